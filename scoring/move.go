package scoring

import "kvepp/kvblock"

// MoveTo books the request on another worker, as it stands, because that is the one that serves it. blockSize is the
// worker's, in tokens, 0 if it is not known: where it is the size in which the prompt was cut the blocks are shared
// with the worker's other requests, else they are the request's own. It has no effect after Free, after the first
// worker was forgotten, or for a number of MaxWorkers and above.
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
	// Hold before release: what nobody else holds must not be forgotten between.
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
		b.leaves = b.leaves[:0]
	}
	if blockSize > 0 {
		b.blockSize = blockSize
	}
	b.ownBlocks = own / b.blockSize
	here.ActiveBlocks += b.ownBlocks
	here.ActiveTokens += b.ownBlocks * b.blockSize
	b.worker = to
	if !b.expires { // those that do are kept in the order of their making
		b.since = a.now // so that the time lost elsewhere is not taken for this worker's
	}
	if waiting > 0 {
		a.beginPrefill(index, waiting)
	}
	if generated > 0 {
		b.output = output{blocks: generated, weight: float64(generated)}
		a.adjust(to, float64(generated), b.blockSize)
	}
}
