package scoring

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// A dry run has the same choice and costs as a booking right after it, and does not change the book.
func TestDryRunBooksNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	book, cfg := NewActiveSequences(), defaults()
	var bookings []Booking
	for step := range 500 {
		length := rng.IntN(20)
		req := Request{ISLTokens: 16*length + rng.IntN(16)}
		candidates := workers(1+rng.IntN(9), prompt(16, chain(rng.IntN(3), length)))
		for i := range candidates {
			candidates[i].DeviceBlocks = rng.IntN(length + 1)
			candidates[i].HostBlocks = rng.IntN(2) * rng.IntN(3)
		}
		n, loads, blocks := book.Len(), book.Loads(nil), inBook(book)
		costs := [2][]float64{make([]float64, len(candidates)), make([]float64, len(candidates))}
		dry := req
		dry.DryRun = true
		would, none, err := book.SelectAndAdd(dry, candidates, cfg, rand.New(rand.NewPCG(1, uint64(step))), costs[0])
		if err != nil {
			t.Fatal(err)
		}
		after := book.Loads(nil)
		for i := range loads {
			if loads[i] != after[i] {
				t.Fatalf("step %d: worker %d carries %+v after a dry run, %+v before", step, i, after[i], loads[i])
			}
		}
		if none != (Booking{}) || book.Len() != n || inBook(book) != blocks {
			t.Fatalf("step %d: a dry run left something behind", step)
		}
		did, b, err := book.SelectAndAdd(req, candidates, cfg, rand.New(rand.NewPCG(1, uint64(step))), costs[1])
		if err != nil {
			t.Fatal(err)
		}
		did.ActiveBlocks, did.Version = 0, did.Version-1 // the booking made one
		if would != did || !slices.Equal(costs[0], costs[1]) {
			t.Fatalf("step %d: would choose %+v at %v, but chose %+v at %v", step, would, costs[0], did, costs[1])
		}
		if bookings = append(bookings, b); len(bookings) > 30 {
			i := rng.IntN(len(bookings))
			bookings[i].Free()
			bookings = slices.Delete(bookings, i, i+1)
		}
	}
}

// inBook counts the blocks of all runs. A dry run may split a run, but adds no blocks.
func inBook(a *ActiveSequences) (blocks int) {
	for i := range a.blocks.runs {
		blocks += len(a.blocks.runs[i].hashes)
	}
	for _, id := range a.blocks.free {
		blocks -= len(a.blocks.runs[id].hashes)
	}
	return blocks
}
