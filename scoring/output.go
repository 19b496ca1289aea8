package scoring

import (
	"math/bits"

	"kvepp/kvblock"
)

// output is what a request holds beyond its prompt.
type output struct {
	blocks int     // generated so far
	weight float64 // what they count for together
	own    float64 // what each of the booking's own blocks counts for, less 1
}

// adjustment is what a worker's blocks count for beyond their number: less for blocks of requests whose end is near,
// more for generated ones.
type adjustment struct {
	used           bool
	blocks, tokens float64
}

// NotKnown says, in place of what is left of an answer, that nobody knows.
const NotKnown = -1

// AddOutputBlocks notes that the request has generated n blocks more, which are its own. Left is the part of the answer
// that is yet to come, from 0 to 1, or NotKnown: it is what each block counts for from then on that no other request of
// the worker has, since they will be free the sooner the less is left.
//
// A part that another request comes to share keeps counting for the same, until the last of them has ended.
//
// Source: dynamo-kv-router 1.6.1, sequences/block_tracker.
func (b Booking) AddOutputBlocks(n int, left float64) {
	b.do(func(a *ActiveSequences) {
		if n <= 0 {
			return
		}
		booked := &a.bookings[b.index]
		booked.output.blocks += n
		booked.output.weight += float64(n)
		a.adjust(booked.worker, float64(n), booked.blockSize)
		if left >= 0 {
			a.weigh(booked, min(left, 1))
		}
	})
}

// weigh makes what the request alone holds of its worker count for so much.
func (a *ActiveSequences) weigh(b *booking, part float64) {
	all := part * float64(b.output.blocks)
	a.adjust(b.worker, all-b.output.weight, b.blockSize)
	b.output.weight = all
	a.adjust(b.worker, float64(b.ownBlocks)*(part-1-b.output.own), b.blockSize)
	b.output.own = part - 1
	a.blocks.pass()
	for _, id := range b.leaves {
		for ; id != 0 && a.blocks.meet(id) && a.blocks.holdsOnce(id, b.worker); id = a.blocks.runs[id].parent {
			r := &a.blocks.runs[id]
			a.adjust(b.worker, float64(len(r.hashes))*(part-1-a.blocks.weigh(id, b.worker, part-1)), int(r.tokens))
		}
	}
}

// adjust changes what a worker's blocks count for.
func (a *ActiveSequences) adjust(w kvblock.Worker, blocks float64, blockSize int) {
	s := &a.adjusted[w]
	if !s.used {
		s.used = true
		a.adjustedWorkers++
	}
	s.blocks += blocks
	s.tokens += blocks * float64(blockSize)
}

// dropAdjustment forgets what is left by rounding on a worker that has no more requests.
func (a *ActiveSequences) dropAdjustment(w kvblock.Worker) {
	if a.adjusted[w].used {
		a.adjusted[w] = adjustment{}
		a.adjustedWorkers--
	}
}

// endOutput takes off what a booking that ends had beyond its prompt.
func (a *ActiveSequences) endOutput(b *booking) {
	if b.output != (output{}) {
		a.adjust(b.worker, -b.output.weight-float64(b.ownBlocks)*b.output.own, b.blockSize)
	}
}

// endWeight forgets what a run that the worker released counted for.
func (a *ActiveSequences) endWeight(run uint32, w kvblock.Worker, blocks, blockSize int) {
	if less := a.blocks.weigh(run, w, 0); less != 0 {
		a.adjust(w, -less*float64(blocks), blockSize)
	}
}

// holdsOnce reports whether exactly one request of the worker, which holds the run, does.
func (b *activeBlocks) holdsOnce(id uint32, w kvblock.Worker) bool {
	r := &b.runs[id]
	if r.set == 0 {
		return r.holders == 1
	}
	return b.extra.find(uint64(r.set)<<32|uint64(w)) == nil
}

// weigh sets what a block of the run counts for on the worker, less 1, and returns what it was.
func (b *activeBlocks) weigh(run uint32, w kvblock.Worker, less float64) (was float64) {
	key := runOn{run, w}
	was = b.weights[key]
	if less != 0 {
		if b.weights == nil {
			b.weights = map[runOn]float64{}
		}
		b.weights[key] = less
	} else if was != 0 {
		delete(b.weights, key)
	}
	return was
}

// runOn is a run as one worker holds it.
type runOn struct {
	run    uint32
	worker kvblock.Worker
}

// copyWeights gives to the beginning of a run that was split what the run counts for.
func (b *activeBlocks) copyWeights(id, first uint32) {
	r := &b.runs[id]
	if r.set == 0 {
		b.weigh(first, r.worker, b.weights[runOn{id, r.worker}])
		return
	}
	for i, workers := range b.set(r.set) {
		for ; workers != 0; workers &= workers - 1 {
			w := kvblock.Worker(64*i + bits.TrailingZeros64(workers))
			b.weigh(first, w, b.weights[runOn{id, w}])
		}
	}
}
