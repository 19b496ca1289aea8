package router

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
)

// BenchmarkPickBesideEvents is BenchmarkPick while the index applies the KV events of the same workers: that many
// blocks per second, half of them stored and half removed. It reports the wall-clock time of the picks.
func BenchmarkPickBesideEvents(b *testing.B) {
	for _, perSecond := range []int{0, 2_500_000} {
		b.Run(fmt.Sprintf("%d-blocks-a-second", perSecond), func(b *testing.B) {
			const tick, length = time.Millisecond, 64
			es := workers(64)
			for i := range es {
				es[i].BlockSize = 64
			}
			h := newHouse(b, es...)
			h.cfg.Explain = false
			ids := tokens(0, 8192)
			for i := range es {
				h.warm(es[i].Name, 0, ids[:(i+1)*128], kvblock.HashOptions{BlockSize: 64})
			}
			s := h.pool.Acquire()
			var held []kvblock.Worker
			for i := range s.Workers {
				held = append(held, s.Workers[i].Worker)
			}
			s.Release()
			// The blocks that are stored and removed in turn.
			rng := rand.New(rand.NewPCG(1, 2))
			stores, removes := make([]kvblock.Stored, 16*len(held)), make([]kvblock.Removed, 16*len(held))
			for i := range stores {
				for range length {
					x := kvblock.StoredBlock{
						Engine: kvblock.EngineHash(rng.Uint64()),
						Local:  kvblock.LocalHash(rng.Uint64()),
					}
					stores[i].Blocks = append(stores[i].Blocks, x)
					removes[i].Hashes = append(removes[i].Hashes, x.Engine)
				}
			}
			stop, done := make(chan struct{}), make(chan int)
			go func() {
				applied := 0
				defer func() { done <- applied }()
				for began := time.Now(); ; {
					select {
					case <-stop:
						return
					case <-time.After(tick):
					}
					// After a pause of this goroutine the missed events are skipped: to catch up would be a burst.
					for due := min(applied+perSecond/100,
						int(time.Since(began).Seconds()*float64(perSecond))); applied < due; applied += length {
						n := applied / length
						i := n / 2 % len(stores)
						if w := held[i%len(held)]; n%2 == 1 {
							h.index.Removed(w, removes[(i+len(stores)/2)%len(stores)])
						} else if err := h.index.Stored(w, stores[i]); err != nil {
							b.Error(err)
							return
						}
					}
				}
			}()
			p := prepared{
				model:  "m",
				tokens: []prompt.Prompt{{IDs: ids, Certain: len(ids)}},
				isl:    len(ids),
				reason: ReasonKV,
			}
			var took []time.Duration
			began := time.Now()
			for b.Loop() {
				at := time.Now()
				h.pick(&p)
				took = append(took, time.Since(at))
			}
			close(stop)
			applied := <-done
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
			b.ReportMetric(float64(applied)/time.Since(began).Seconds()/1e6, "Mblk/s")
		})
	}
}
