package replay
import ("testing";"context";"fmt";"os";"kvepp/scoring";"kvepp/queue")
func TestTmp(t *testing.T){
 for _,th:=range []float64{0,2,4,16}{
 for seed:=range uint64(3){
 r,c,err:=Open(os.Getenv("TRACE"),Mooncake,ReaderOptions{BlockSize:64,TraceBlockSize:64}); if err!=nil{t.Fatal(err)}
 cfg:=Config{Workers:4,Engine:DefaultEngineConfig(),Scoring:scoring.DefaultConfig(),ArrivalSpeed:1,Seed:seed}
 if th>0 { cfg.Queue=queue.Single(queue.FCFS,&th); cfg.QueueBound=1<<20 }
 rep,err:=Run(context.Background(),cfg,r.Next,nil); c.Close(); if err!=nil{t.Fatal(err)}
 fmt.Printf("th %v cached %.6f ttft %.3f p50 %.3f p90 %.3f p99 %.3f e2e %.2f tpot %.4f n %d\n",th,rep.CachedShare(),rep.TTFT.Mean*1e3,rep.TTFT.P50*1e3,rep.TTFT.P90*1e3,rep.TTFT.P99*1e3,rep.E2E.Mean*1e3,rep.TPOT.Mean*1e3,rep.Completed)
 }}
}
