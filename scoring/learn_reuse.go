package scoring

import (
	"math"
	"time"

	"kvepp/kvblock"
)

// What a worker evicts for a new request may be asked for again. The policy Time prices that with the chance of it,
// which the book learns from one block in 64 (kvblock.Sampled): how long the blocks that a worker evicts were unused,
// and how often blocks that were unused for so long are asked for again.

const (
	// reuseSlots bounds the sampled blocks that are remembered, a power of two. A newer one takes the place of an
	// older.
	reuseSlots = 1 << 14
	// maxSampledBlocks bounds the sampled blocks of one request.
	maxSampledBlocks = 256
	// ageBins is the number of ranges of unused time: the first ends at ageBase, each further one half an octave later.
	ageBins = 40
	ageBase = 0.125 // seconds
	// reuseEvery is the time between two computations of the chances, which takes some 50 microseconds.
	reuseEvery = 2 * time.Second
	// keepReuse is the weight that earlier samples keep with each computation: about the last 1,000 s count.
	keepReuse = 0.998
	// keepAge is the weight that earlier evictions keep with each further one.
	keepAge = 0.98
	// leastFreshness is how long the age of a worker's evictions is used at least after the last one. See chanceOf.
	leastFreshness = 10 * time.Second
)

// inUse is a lastUse.at of a block that an active request has.
const inUse = time.Duration(-1)

// lastUse says when the last request that had a block ended.
type lastUse struct {
	key uint64
	at  time.Duration // 0: the slot is empty
}

// lastUses is a table without chains: a key has one place, and a newer key takes it.
type lastUses []lastUse

func (l lastUses) place(key uint64) *lastUse { return &l[(key*0x9e3779b97f4a7c15)>>(64-14)] }

// onWorker returns the key of a block on one worker.
func onWorker(w kvblock.Worker, seq kvblock.SequenceHash) uint64 {
	return uint64(seq) ^ (uint64(w)+1)*0xd6e8feb86659fd93
}

// evictions is what is known of one worker's evictions.
type evictions struct {
	age  float64       // mean time in seconds for which the evicted blocks were unused
	last time.Duration // when the latest was reported; 0: none yet
}

// reuse is what the book has learned about evictions and blocks that are asked for again.
type reuse struct {
	blocks    lastUses    // by block; nil until the first sample
	onWorkers lastUses    // by block and worker
	evicted   []evictions // indexed by worker

	again   [ageBins]float64 // unused times that ended with a request, by their length
	lost    [ageBins]float64 // unused times whose end will not be seen, by their length so far
	chance  [ageBins]float64 // chance that a block unused for so long is asked for again
	updated time.Duration
}

// ageBin returns the range of an unused time.
func ageBin(age time.Duration) int {
	s := age.Seconds()
	if !(s > ageBase) {
		return 0
	}
	const ofBase = 0x3fc0000000000000 >> 51 // the same bits of ageBase
	return min(int(math.Float64bits(s)>>51)-ofBase+1, ageBins-1)
}

// begin notes that a request has a block.
func (r *reuse) begin(seq kvblock.SequenceHash, now time.Duration) {
	if r.blocks == nil {
		r.blocks, r.onWorkers = make(lastUses, reuseSlots), make(lastUses, reuseSlots)
	}
	switch l := r.blocks.place(uint64(seq)); {
	case l.key != uint64(seq):
		if l.at > 0 {
			r.lost[ageBin(now-l.at)]++
		}
		*l = lastUse{uint64(seq), inUse}
	case l.at > 0:
		r.again[ageBin(now-l.at)]++
		l.at = inUse
	}
}

// end notes that a request on w ended, and the sampled blocks that it had.
func (r *reuse) end(w kvblock.Worker, sampled []kvblock.SequenceHash, now time.Duration) {
	for _, seq := range sampled {
		if l := r.blocks.place(uint64(seq)); l.key == uint64(seq) {
			l.at = max(now, 1)
		}
		key := onWorker(w, seq)
		*r.onWorkers.place(key) = lastUse{key, max(now, 1)}
	}
}

// evict notes that w has evicted a block.
func (r *reuse) evict(w kvblock.Worker, seq kvblock.SequenceHash, now time.Duration) {
	if r.onWorkers == nil || int(w) >= len(r.evicted) {
		return
	}
	key := onWorker(w, seq)
	l := r.onWorkers.place(key)
	if l.key != key || l.at <= 0 {
		return // no request that the book knows had it
	}
	age, e := (now - l.at).Seconds(), &r.evicted[w]
	*l = lastUse{}
	if !(age >= 0) {
		return
	}
	if e.last == 0 {
		e.age = age
	}
	e.age += (1 - keepAge) * (age - e.age)
	e.last = max(now, 1)
}

// chanceOf returns the chance that what w evicts next is asked for again. It is 0 if w evicts nothing: none was
// reported for the time for which the last evicted ones were unused, such as after a restart.
func (r *reuse) chanceOf(w kvblock.Worker, now time.Duration) float64 {
	e := &r.evicted[w]
	if e.last == 0 || now-e.last > max(seconds(e.age), leastFreshness) {
		return 0
	}
	return r.chance[ageBin(seconds(e.age))]
}

// update computes the chances from the samples, by the estimator of Kaplan and Meier: of the blocks that were unused
// until a range began, again/all are asked for within it.
func (r *reuse) update(now time.Duration) {
	r.updated = now
	all := r.lost
	for i := range r.blocks {
		if at := r.blocks[i].at; at > 0 {
			all[ageBin(now-at)]++ // not asked for so far
		}
	}
	reached, missed := 0.0, 1.0
	for bin := ageBins - 1; bin >= 0; bin-- {
		reached += all[bin] + r.again[bin]
		if reached > 1 {
			missed *= 1 - r.again[bin]/reached
		}
		r.chance[bin] = 1 - missed
	}
	for bin := range ageBins {
		r.again[bin] *= keepReuse
		r.lost[bin] *= keepReuse
	}
}

// sampledBlocks appends to dst the sampled ones among the blocks of a prompt.
func sampledBlocks(dst []kvblock.SequenceHash, p *Prompt) []kvblock.SequenceHash {
	for _, chain := range p.Chains {
		for _, seq := range chain {
			if kvblock.Sampled(seq) && len(dst) < maxSampledBlocks {
				dst = append(dst, seq)
			}
		}
	}
	return dst
}

// beginUse learns from a request that was just booked, and updates the chances of all workers if it is time.
func (a *ActiveSequences) beginUse(b *booking, p *Prompt) {
	r := &a.learned.reuse
	b.sampled = sampledBlocks(b.sampled[:0], p)
	for _, seq := range b.sampled {
		r.begin(seq, a.now)
	}
	if a.now-r.updated >= reuseEvery {
		r.update(a.now)
		for w := range a.learned.prices {
			a.learned.prices[w].reuse = float32(r.chanceOf(kvblock.Worker(w), a.now))
		}
	}
}

// BlockRemoved notes that a worker has removed a block from its device. Call it for the blocks that kvblock.Sampled
// picks. The policy Time learns from it; it changes no load.
func (a *ActiveSequences) BlockRemoved(w kvblock.Worker, seq kvblock.SequenceHash) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.learned.reuse.evict(w, seq, a.clock())
}
