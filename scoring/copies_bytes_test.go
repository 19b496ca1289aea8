package scoring

import (
	"runtime"
	"testing"

	"kvepp/kvblock"
)

func heapBytes() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// The memory of a peer's bookings is about what counts, in any shape of their blocks: chains of one hash, one prompt
// that others leave at each block, blocks that many workers hold.
func TestCopiesCountTheirMemory(t *testing.T) {
	single := func(a *ActiveSequences, c *Copies) { // chains of one hash
		for n := range uint64(100) {
			ch := Change{Kind: Booked, Number: n + 1, BlockSize: 16}
			for i := range uint64(2000) {
				ch.Chains = append(ch.Chains, []kvblock.SequenceHash{kvblock.SequenceHash(10_000*n + i + 1)})
			}
			c.Apply([]Change{ch})
		}
	}
	long := func(n int) (all []kvblock.SequenceHash) {
		for i := range n {
			all = append(all, kvblock.SequenceHash(i+1))
		}
		return all
	}
	split := func(a *ActiveSequences, c *Copies) { // a long chain that others cut into runs of one hash, and end
		all := long(1 << 13)
		c.Apply([]Change{{Kind: Booked, Number: 1, BlockSize: 16, Chains: [][]kvblock.SequenceHash{all}}})
		for i := range all {
			c.Apply([]Change{{Kind: Booked, Number: 2, BlockSize: 16, Chains: [][]kvblock.SequenceHash{all[:i+1]}},
				{Kind: Freed, Number: 2}})
		}
	}
	for name, book := range map[string]func(*ActiveSequences, *Copies){"single": single, "split": split,
		"on many workers": func(a *ActiveSequences, c *Copies) {
			split(a, c)
			all := long(1 << 13)
			for n := range uint64(20) {
				c.Apply([]Change{{Kind: Booked, Number: 10 + n, BlockSize: 16, Worker: kvblock.Worker(100 + n/2),
					Chains: [][]kvblock.SequenceHash{all}}})
			}
		}} {
		t.Run(name, func(t *testing.T) {
			a := NewActiveSequences()
			c := a.NewCopies()
			before := heapBytes()
			book(a, c)
			took, counted := heapBytes()-before, a.blocks.copied()
			runtime.KeepAlive(a)
			if took > counted*3/2+1<<20 {
				t.Errorf("%d bytes count, and they take %d", counted, took)
			}
			c.FreeAll()
			wantEmpty(t, a)
		})
	}
}

// Copies beyond the bound in bytes have no hashes, also if the number of hashes is far below its own bound.
func TestCopiesAreBoundedInBytes(t *testing.T) {
	a := NewActiveSequences()
	c := a.NewCopies()
	many := Change{Kind: Booked, Number: 1, BlockSize: 16}
	for i := range 1 << 12 {
		many.Chains = append(many.Chains, []kvblock.SequenceHash{kvblock.SequenceHash(i + 1)})
	}
	a.blocks.bytes[byCopy] += maxCopiedBytes - 100<<10
	if _, flat := c.Apply([]Change{many}); flat != 1 || len(a.blocks.runs) != 1 || a.Load(0).ActiveBlocks != 1<<12 {
		t.Errorf("%d flat, %d runs, %+v", flat, len(a.blocks.runs)-1, a.Load(0))
	}
	few := Change{Kind: Booked, Number: 2, BlockSize: 16, Chains: [][]kvblock.SequenceHash{chain(1, 8)}}
	if _, flat := c.Apply([]Change{few}); flat != 0 {
		t.Error("a booking within the bound is flat")
	}
	a.blocks.bytes[byCopy] -= maxCopiedBytes - 100<<10
	c.FreeAll()
	wantEmpty(t, a)
}

// What a peer books and frees leaves little memory behind, also if each booking has another shape.
func TestEndedCopiesLeaveLittle(t *testing.T) {
	a := NewActiveSequences()
	c := a.NewCopies()
	book := func(from, n, chains, hashes int) {
		for i := range n {
			ch := Change{Kind: Booked, Number: uint64(from + i), BlockSize: 16}
			for k := range chains {
				one := make([]kvblock.SequenceHash, hashes)
				for j := range one {
					one[j] = kvblock.SequenceHash(((from+i)*chains+k)<<16 + j + 1)
				}
				ch.Chains = append(ch.Chains, one)
			}
			c.Apply([]Change{ch})
		}
	}
	before := heapBytes()
	book(1, 20, 100, 4096)
	for round := range 20 {
		book(1+1000*round, 200, 1, 1) // takes the runs that kept most
		book(501+1000*round, 2, 100, 4096)
		c.BeginSnapshot()
		book(1+1000*round, 200, 1, 1)
		c.EndSnapshot()
	}
	c.FreeAll()
	wantEmpty(t, a)
	if took := heapBytes() - before; took > 8<<20 {
		t.Errorf("%d bytes stay", took)
	}
	runtime.KeepAlive(a)
}
