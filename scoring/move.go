package scoring

import "kvepp/kvblock"

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
	copied := b.from != nil
	if copied {
		a.uncount(index)
	}
	before := a.loads[to]
	waiting, generated := b.prefillTokens, b.output.blocks
	a.completePrefill(index, false)
	a.endOutput(b)
	b.output = output{}

	from, here := &a.loads[b.worker], &a.loads[to]
	own := b.ownBlocks * b.blockSize // tokens
	from.Requests--
	here.Requests++
	from.ActiveBlocks -= b.ownBlocks
	from.ActiveTokens -= own
	// Hold before release, so that blocks that no other request holds stay in the set.
	same := blockSize == b.blockSize
	a.blocks.pass()
	for _, leaf := range b.leaves {
		for id := leaf; id != 0 && a.blocks.meet(id); id = a.blocks.runs[id].parent {
			r := &a.blocks.runs[id]
			tokens := len(r.hashes) * int(r.tokens)
			if !same {
				own += tokens
			} else if a.blocks.hold(id, to) {
				here.ActiveBlocks += len(r.hashes)
				here.ActiveTokens += tokens
			}
		}
	}
	a.releaseChains(b)
	if from.Requests == 0 {
		a.dropAdjustment(b.worker)
	}
	if !same {
		a.dropLeaves(b)
	}
	if blockSize > 0 {
		b.blockSize = blockSize
	}
	b.ownBlocks = own / b.blockSize
	here.ActiveBlocks += b.ownBlocks
	here.ActiveTokens += b.ownBlocks * b.blockSize
	b.worker = to
	if copied {
		a.count(index, here.ActiveBlocks-before.ActiveBlocks, here.ActiveTokens-before.ActiveTokens)
	} else if a.observer != nil {
		a.change = Change{Kind: Moved, Number: b.number, Worker: to, BlockSize: blockSize}
		a.observer(&a.change)
	}
	if !b.expires { // those that expire are listed in the order in which they were made
		b.since = a.now // time spent elsewhere must not count for this worker's speed
	}
	if waiting > 0 {
		a.beginPrefill(index, waiting)
		if copied {
			a.copied[to].prefill(waiting, 1)
		}
	}
	if generated > 0 {
		b.output = output{blocks: generated, weight: float64(generated)}
		a.adjust(to, float64(generated), b.blockSize)
	}
}
