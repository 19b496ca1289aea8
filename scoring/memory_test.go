package scoring

import (
	"runtime"
	"testing"

	"kvepp/kvblock"
)

// heap returns the bytes of the heap in use after a collection.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// burst books n requests on two workers, and then frees them. It returns the memory that the book takes with and after
// them, and the loads of the two workers together. Request i has the prompts of prompts(i).
func burst(t *testing.T, a *ActiveSequences, n int, prompts func(i int) *Prompt) (during, after int, load Load) {
	t.Helper()
	before := heap()
	bookings := make([]Booking, n)
	for i := range bookings {
		_, b, err := a.SelectAndAdd(Request{ISLTokens: 64}, workers(2, prompts(i)), defaults(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		bookings[i] = b
	}
	during = heap() - before
	for w := range kvblock.Worker(2) {
		l := a.Load(w)
		load.Requests += l.Requests
		load.ActiveBlocks += l.ActiveBlocks
		load.ActiveTokens += l.ActiveTokens
	}
	if held := a.HeldBytes(); a.MaxBytes > 0 && held > a.MaxBytes {
		t.Errorf("%d bytes are held, the bound is %d", held, a.MaxBytes)
	}
	for _, b := range bookings {
		b.Free()
	}
	if held := a.HeldBytes(); held != 0 {
		t.Errorf("%d bytes are held without a request", held)
	}
	wantEmpty(t, a)
	after = heap() - before
	runtime.KeepAlive(a)
	return during, after, load
}

// Prompts of each kind take no more memory than MaxBytes and a constant. Requests beyond it count their blocks all the
// same. The memory is given back after the requests have ended, and what a former burst left is not in the way of the
// next.
func TestBookedBlocksAreBounded(t *testing.T) {
	const most, requests, blocks = 1 << 20, 100, 2048
	short := func(name, n int) *Prompt {
		chains := make([][]kvblock.SequenceHash, n)
		for j := range chains {
			chains[j] = chain(name<<16|j, 1)
		}
		return prompt(16, chains...)
	}
	kinds := map[string]func(i int) *Prompt{
		"many short prompts":                     func(i int) *Prompt { return short(i, blocks) },
		"the same short prompts in each request": func(int) *Prompt { return short(1, blocks) },
		"long prompts":                           func(i int) *Prompt { return prompt(16, chain(i+1, 16*blocks)) },
		"prompts that leave a common one at every block": func(i int) *Prompt {
			chains := make([][]kvblock.SequenceHash, 256)
			for j := range chains {
				chains[j] = append(chain(1, j+1), chain(i<<16|j, 1)...)
			}
			return prompt(16, chains...)
		},
	}
	for name, prompts := range kinds {
		t.Run(name, func(t *testing.T) {
			a, free := NewActiveSequences(), NewActiveSequences()
			a.MaxBytes = most
			during, after, load := burst(t, a, requests, prompts)
			if during > 2*most || after > most+maxKept {
				t.Errorf("the book takes %d bytes, and %d after the requests", during, after)
			}
			_, _, want := burst(t, free, requests, prompts)
			if load.Requests != want.Requests || load.ActiveBlocks < want.ActiveBlocks {
				t.Errorf("the workers' loads are %+v, at least %+v expected", load, want)
			}
			if a.Flattened() == 0 || free.Flattened() != 0 {
				t.Errorf("%d and %d requests were flattened", a.Flattened(), free.Flattened())
			}
		})
	}
	a := NewActiveSequences()
	a.MaxBytes = most
	for name, prompts := range kinds {
		if during, _, _ := burst(t, a, requests, prompts); during > 2*most+maxKept {
			t.Errorf("%s after other bursts: the book takes %d bytes more", name, during)
		}
	}
}

// A request that moves, one that generates, and those of other replicas leave no bytes counted.
func TestHeldBytesAfterMoves(t *testing.T) {
	a := NewActiveSequences()
	copies := a.NewCopies()
	b := mustAdd(t, a, Request{ISLTokens: 64}, Candidate{Prompt: prompt(16, chain(1, 4), chain(2, 1))})
	copies.Apply([]Change{{Kind: Booked, Number: 1, BlockSize: 16, Chains: [][]kvblock.SequenceHash{chain(3, 4)}}})
	if held := a.HeldBytes(); held < 2*runBytes || held >= 3*runBytes+16*8 {
		t.Errorf("%d bytes are held for two runs", held)
	}
	b.AddOutputBlocks(2, 0.5)
	b.MoveTo(1, 16)
	b.MoveTo(0, 32)
	b.Free()
	copies.Apply([]Change{{Kind: Freed, Number: 1}})
	if held, bytes := a.HeldBytes(), a.blocks.bytes; held != 0 || bytes != [2]int{} {
		t.Errorf("%d bytes are held, %v are counted", held, bytes)
	}
}
