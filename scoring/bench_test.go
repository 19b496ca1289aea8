package scoring

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvepp/kvblock"
)

// BenchmarkSelectAndAdd measures a decision on a book in use: price every worker, choose and book; then complete the
// prefill of an older request and free it. Each worker has 16 requests, whose first half is a shared system prompt.
func BenchmarkSelectAndAdd(b *testing.B) {
	for _, blocks := range []int{128, 512} {
		for _, n := range []int{2, 32, 64, 1000} {
			b.Run(fmt.Sprintf("blocks=%d/workers=%d", blocks, n), func(b *testing.B) {
				benchmarkSelectAndAdd(b, NewActiveSequences(), defaults(), blocks, n, 1)
			})
		}
	}
}

// BenchmarkPolicies measures what one more worker costs with each policy: the difference between 64 and 1,000 workers.
func BenchmarkPolicies(b *testing.B) {
	for _, n := range []int{64, 1000} {
		for _, policy := range []Policy{Dynamo, Time} {
			b.Run(fmt.Sprintf("workers=%d/policy=%v", n, policy), func(b *testing.B) {
				cfg := defaults()
				cfg.Policy = policy
				benchmarkSelectAndAdd(b, NewActiveSequences(), cfg, 128, n, 1)
			})
		}
	}
}

// BenchmarkSelectAndAddOtherwise is the same with 1,000 workers, with costlier configurations than the default, and in
// the other modes.
func BenchmarkSelectAndAddOtherwise(b *testing.B) {
	const blocks, n = 128, 1000
	b.Run("linear", func(b *testing.B) {
		a := NewActiveSequences()
		a.Prefill = PrefillModel{Linear: true, TokensPerSecond: 10_000}
		benchmarkSelectAndAdd(b, a, defaults(), blocks, n, 1)
	})
	for _, temperature := range []float64{0.01, 0.5, 10} {
		b.Run(fmt.Sprintf("temperature=%v", temperature), func(b *testing.B) {
			cfg := defaults()
			cfg.Temperature = temperature
			benchmarkSelectAndAdd(b, NewActiveSequences(), cfg, blocks, n, 1)
		})
	}
	for mode := RoundRobin; mode <= DeviceAwareWeighted; mode++ {
		b.Run(mode.String(), func(b *testing.B) {
			benchmarkSelectAndAdd(b, NewActiveSequences(), inMode(mode), blocks, n, 1)
		})
	}
}

// BenchmarkSelectAndAddTogether is the same with several goroutines on one book. It shows the cost of the lock.
func BenchmarkSelectAndAddTogether(b *testing.B) {
	for _, n := range []int{64, 1000} {
		for _, together := range []int{1, 2} {
			b.Run(fmt.Sprintf("workers=%d/goroutines=%d", n, together), func(b *testing.B) {
				benchmarkSelectAndAdd(b, NewActiveSequences(), defaults(), 128, n, together)
			})
		}
	}
}

// BenchmarkSelectAndAddWithPeers is the same with the changes told to an observer and 7 other replicas, which have 16
// requests on each worker, too, and are known after 2 ms. Compare it with replicas=1.
func BenchmarkSelectAndAddWithPeers(b *testing.B) {
	const blocks, n = 128, 64
	for _, replicas := range []int{1, 8} {
		b.Run(fmt.Sprintf("replicas=%d", replicas), func(b *testing.B) {
			a, told := NewActiveSequences(), 0
			if replicas > 1 {
				a.Observe(func(*Change) { told++ })
				rng := rand.New(rand.NewPCG(4, 4))
				for origin := range replicas - 1 {
					c := a.NewCopies()
					for i := range 16 * n / (replicas - 1) {
						hashes := make([]kvblock.SequenceHash, blocks)
						for j := range hashes {
							hashes[j] = kvblock.SequenceHash(rng.Uint64())
						}
						c.Apply([]Change{{Kind: Booked, Number: uint64(i), Worker: kvblock.Worker((i + 9*origin) % n),
							BlockSize: 64, Chains: [][]kvblock.SequenceHash{hashes}}})
					}
				}
				a.SetPeersStaleness(2 * time.Millisecond)
			}
			benchmarkSelectAndAdd(b, a, defaults(), blocks, n, 1)
			if replicas > 1 && told == 0 {
				b.Error("nothing was told")
			}
		})
	}
}

func benchmarkSelectAndAdd(b *testing.B, a *ActiveSequences, cfg *Config, blocks, n, together int) {
	const prompts = 1024
	rng := rand.New(rand.NewPCG(1, 1))
	pool := make([]*Prompt, prompts)
	for i := range pool {
		hashes := make([]kvblock.SequenceHash, blocks)
		system := rand.New(rand.NewPCG(7, 7))
		for j := range hashes {
			if j < blocks/2 {
				hashes[j] = kvblock.SequenceHash(system.Uint64())
			} else {
				hashes[j] = kvblock.SequenceHash(rng.Uint64())
			}
		}
		pool[i] = prompt(64, hashes)
	}
	// player returns the step that one goroutine repeats. All goroutines together have 16 requests on each worker.
	player := func(nth int) (step func()) {
		rng := rand.New(rand.NewPCG(2, uint64(nth)))
		candidates, costs := workers(n, nil), make([]float64, n)
		for i := range candidates {
			candidates[i].DeviceBlocks = rng.IntN(blocks)
		}
		active := make([]Booking, 16*n/together)
		next := nth * prompts / together
		step = func() {
			p := pool[next%prompts]
			for j := range candidates {
				candidates[j].Prompt = p
			}
			_, booking, err := a.SelectAndAdd(Request{ISLTokens: 64*blocks + 5}, candidates, cfg, rng, costs)
			if err != nil {
				b.Error(err)
			}
			oldest := &active[next%len(active)]
			oldest.Free()
			booking.MarkPrefillCompleted()
			*oldest = booking
			next++
		}
		for range 2 * len(active) {
			step()
		}
		return step
	}
	b.ReportAllocs()
	var players []func()
	for nth := range together {
		players = append(players, player(nth))
	}
	b.ResetTimer()
	spent := cpuTime(b)
	var wg sync.WaitGroup
	for _, step := range players {
		wg.Go(func() {
			for range b.N / together {
				step()
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64((cpuTime(b)-spent).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

// cpuTime returns the CPU time of the process, which depends less on other load of the machine than wall-clock time.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkCost(b *testing.B) {
	cfg := defaults()
	t := Terms{
		BlockSize:      64,
		ISLTokens:      8192,
		DeviceBlocks:   30,
		PrefillTokens:  5000,
		DecodeBlocks:   700,
		ActiveRequests: 9,
		UnitTokens:     64,
	}
	sum := 0.0
	for b.Loop() {
		t.PrefillTokens++
		sum += cfg.Cost(&t)
	}
	if sum < 0 {
		b.Fatal("a negative cost")
	}
}
