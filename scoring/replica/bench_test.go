package replica

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvepp/internal/chart"
	"kvepp/kvblock"
	"kvepp/scoring"
)

// TestBenchReplicas measures eight replicas in one process that share 10,000 requests a second of 128 blocks each, over
// loopback and mutual TLS: CPU time and bytes of a replica, and how long a booking takes from one to another. It
// asserts nothing about speed. KVEPP_BENCH_REPLICAS is how long it runs, and KVEPP_BENCH_OUT the folder for a chart.
func TestBenchReplicas(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("KVEPP_BENCH_REPLICAS"))
	if err != nil {
		t.Skip("make bench-replicas runs it")
	}
	const replicas, rate, blocks, step = 8, 10_000, 128, 2 * time.Millisecond
	ca := newAuthority(t)
	var nodes []*testNode
	begin := time.Now()
	var mu sync.Mutex
	var late []time.Duration
	for range replicas {
		n := startNode(t, ca.mutual(t, "kvepp"), nil)
		n.mu.Lock()
		n.heard = func(changes []scoring.Change) {
			for i := range changes {
				if c := &changes[i]; c.Kind == scoring.Booked && c.Number%64 < replicas {
					d := time.Since(begin) - time.Duration(c.Number/64*64)
					mu.Lock()
					late = append(late, d)
					mu.Unlock()
				}
			}
		}
		n.mu.Unlock()
		nodes = append(nodes, n)
	}
	connectAll(nodes...)
	for _, n := range nodes {
		<-n.Synced()
	}
	chains := [][]kvblock.SequenceHash{make([]kvblock.SequenceHash, blocks)}
	var before, after syscall.Rusage
	sent := func() (bytes int) {
		for _, n := range nodes {
			bytes += n.counted(Sent, "")
		}
		return bytes
	}
	bytes := sent()
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
		t.Fatal(err)
	}
	from := time.Now()
	tick := time.NewTicker(step)
	defer tick.Stop()
	requests := 0
	for time.Since(from) < length {
		<-tick.C
		for due := int(time.Since(from).Seconds() * rate); requests < due; requests++ {
			// The number has the time of the booking, in units of 64 ns, and which requests are measured.
			number := uint64(time.Since(begin)) / 64 * 64
			n := nodes[requests%replicas]
			number += uint64(requests % 64)
			w, _ := n.worker("a")
			n.observe(&scoring.Change{Kind: scoring.Booked, Number: number, Worker: w, BlockSize: 16,
				PrefillTokens: 16 * blocks, Chains: chains})
			n.observe(&scoring.Change{Kind: scoring.PrefillDone, Number: number, Worker: w})
			n.observe(&scoring.Change{Kind: scoring.Freed, Number: number, Worker: w})
		}
	}
	took := time.Since(from).Seconds()
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &after); err != nil {
		t.Fatal(err)
	}
	seconds := func(r *syscall.Rusage) float64 {
		return time.Duration(r.Utime.Nano() + r.Stime.Nano()).Seconds()
	}
	cores := (seconds(&after) - seconds(&before)) / took / replicas
	bytes = sent() - bytes // before mu, which Heard takes under the lock of hearing
	mu.Lock()
	defer mu.Unlock()
	if len(late) == 0 {
		t.Fatal("no booking came")
	}
	slices.Sort(late)
	at := func(q float64) time.Duration { return late[int(q*float64(len(late)-1))].Round(10 * time.Microsecond) }
	fmt.Printf("%d replicas, %.0f requests/s of %d blocks, mutual TLS, %.0f s:\n"+
		"a replica: %.3f cores, %.1f MB/s each way\nbooked at one to known at another: p50 %v, p99 %v\n",
		replicas, float64(requests)/took, blocks, took, cores, float64(bytes)/took/replicas/1e6, at(0.5),
		at(0.99))
	if out := os.Getenv("KVEPP_BENCH_OUT"); out != "" {
		line := chart.Line{Name: "bookings"}
		for i := range 1001 {
			line.X = append(line.X, float64(late[i*(len(late)-1)/1000])/1e6)
			line.Y = append(line.Y, float64(i)/10)
		}
		file := filepath.Join(out, "replicas.svg")
		if err := (&chart.Chart{Title: "From a booking at one replica to its copy at another",
			XLabel: "ms (logarithmic)", YLabel: "% of bookings within this time", Log: true, To: 100,
			Lines: []chart.Line{line}}).Save(file); err != nil {
			t.Fatal(err)
		}
		fmt.Println("chart: " + file)
	}
}
