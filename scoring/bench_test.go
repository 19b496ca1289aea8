package scoring

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"kvepp/kvblock"
)

// One whole decision on a book in use: price every worker, choose, book, complete the prefill of, and free, an older
// request. Each worker has 16 requests whose first half is a system prompt that all share.
func BenchmarkSelectAndAdd(b *testing.B) {
	for _, blocks := range []int{128, 512} {
		for _, n := range []int{2, 32, 64, 1024} {
			b.Run(fmt.Sprintf("blocks=%d/workers=%d", blocks, n), func(b *testing.B) {
				benchmarkSelectAndAdd(b, blocks, n)
			})
		}
	}
}

func benchmarkSelectAndAdd(b *testing.B, blocks, n int) {
	const prompts = 1024
	cfg := defaults()
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
	candidates := workers(n, nil)
	for i := range candidates {
		candidates[i].DeviceBlocks = rng.IntN(blocks)
	}
	costs := make([]float64, n)
	a := NewActiveSequences()
	active := make([]Booking, 16*n)
	next := 0
	step := func() {
		p := pool[next%prompts]
		for j := range candidates {
			candidates[j].Prompt = p
		}
		_, booking, err := a.SelectAndAdd(Request{ISLTokens: 64*blocks + 5}, candidates, cfg, rng, costs)
		if err != nil {
			b.Fatal(err)
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
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/worker")
}

func BenchmarkCost(b *testing.B) {
	cfg := defaults()
	t := Terms{BlockSize: 64, ISLTokens: 8192, DeviceBlocks: 30, PrefillTokens: 5000, DecodeBlocks: 700, ActiveRequests: 9, UnitTokens: 64}
	sum := 0.0
	for b.Loop() {
		t.PrefillTokens++
		sum += cfg.Cost(&t)
	}
	if sum < 0 {
		b.Fatal("a negative cost")
	}
}
