package scoring

import (
	"math/bits"

	"kvepp/kvblock"
)

// output counts what a request holds beyond its prompt.
type output struct {
	blocks int     // generated so far
	weight float64 // the sum of their weights
	own    float64 // the weight of each of the booking's own blocks, less 1
}

// adjustment is the difference between a worker's weighted blocks and their number: negative for blocks of requests
// near their end, positive for generated blocks.
type adjustment struct{ blocks, tokens float64 }

// NotKnown stands for an unknown remaining share of a response.
const NotKnown = -1

// AddOutputBlocks notes that the request has generated n more blocks, which are its own. left is the share of the
// response still to come, 0..1, or NotKnown. It becomes the weight of each block that no other request of the worker
// holds: the less is left, the sooner these blocks become free.
//
// If another request comes to share a run, the run keeps its weight until the last of them ends.
//
// Source: dynamo-kv-router 1.6.1, sequences/block_tracker.
func (b Booking) AddOutputBlocks(n int, left float64) {
	b.do(func(a *ActiveSequences) {
		if n <= 0 {
			return
		}
		of := &a.bookings[b.index]
		of.output.blocks += n
		of.output.weight += float64(n)
		a.adjust(of.worker, float64(n), of.blockSize)
		if left >= 0 {
			a.weigh(of, min(left, 1))
		}
	})
}

// weigh sets the weight of the blocks that only this request holds on its worker.
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

// adjust changes the weight of a worker's blocks.
func (a *ActiveSequences) adjust(w kvblock.Worker, blocks float64, blockSize int) {
	s := &a.adjusted[w]
	s.blocks += blocks
	s.tokens += blocks * float64(blockSize)
}

// dropAdjustment clears rounding errors on a worker without requests.
func (a *ActiveSequences) dropAdjustment(w kvblock.Worker) {
	a.adjusted[w] = adjustment{}
}

// endOutput takes off what an ending booking holds beyond its prompt.
func (a *ActiveSequences) endOutput(b *booking) {
	if b.output != (output{}) {
		a.adjust(b.worker, -b.output.weight-float64(b.ownBlocks)*b.output.own, b.blockSize)
	}
}

// endWeight clears the weight of a run that the worker has released.
func (a *ActiveSequences) endWeight(run uint32, w kvblock.Worker, blocks, blockSize int) {
	if less := a.blocks.weigh(run, w, 0); less != 0 {
		a.adjust(w, -less*float64(blocks), blockSize)
	}
}

// holdsOnce reports whether exactly one request of the worker holds the run. At least one does.
func (b *activeBlocks) holdsOnce(id uint32, w kvblock.Worker) bool {
	r := &b.runs[id]
	if r.set == 0 {
		return r.holders == 1
	}
	return b.extra[uint64(r.set)<<32|uint64(w)] == 0
}

// weigh sets the weight of the run's blocks on the worker, less 1, and returns the previous one.
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

// copyWeights copies the weights of a split run to its first part.
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
