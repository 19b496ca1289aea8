package scoring

import (
	"cmp"

	"kvepp/kvblock"
)

// MoveTo moves the booking, with its present state, to the worker that answers the request. blockSize is that worker's,
// in tokens; 0: not known. If the prompt was cut in that size, its blocks are shared with the worker's other requests,
// otherwise they count as the request's own. MoveTo has no effect after Free or Forget, or for a worker number of
// MaxWorkers or above.
func (b Booking) MoveTo(w kvblock.Worker, blockSize int) {
	b.do(func(a *ActiveSequences) {
		if w < MaxWorkers && a.bookings[b.index].worker != w {
			a.move(b.index, w, blockSize)
		}
	})
}

func (a *ActiveSequences) move(index uint32, to kvblock.Worker, blockSize int) {
	a.fit(int(to) + 1)
	a.version++
	a.now = a.clock()
	b := &a.bookings[index]
	a.tell(Freed, b, nil)
	var m chainMemory
	holds, generated := b.change(Booked, m.chainsOf(a, b)), b.output.blocks
	if blockSize != b.blockSize {
		holds.Blocks, holds.Chains = b.ownBlocks+a.blocks.distinct(b.leaves), nil
		if blockSize > 0 {
			holds.Blocks = holds.Blocks * b.blockSize / blockSize
		}
	}
	a.drop(index)
	b.output, b.worker, b.blockSize = output{}, to, cmp.Or(blockSize, b.blockSize)
	if !b.expires { // those that expire are listed in the order in which they were made
		b.since = a.now // time spent elsewhere must not count for this worker's speed
	}
	a.carry(index, &holds)
	if generated > 0 {
		b.output = output{blocks: generated, weight: float64(generated)}
		a.adjust(to, float64(generated), b.blockSize)
	}
	a.tell(Booked, b, holds.Chains)
}

// distinct returns how many blocks the chains that end with some leaves have.
func (b *activeBlocks) distinct(leaves []uint32) (blocks int) {
	b.pass()
	for _, id := range leaves {
		for ; id != 0 && b.meet(id); id = b.runs[id].parent {
			blocks += len(b.runs[id].hashes)
		}
	}
	return blocks
}
