package router

import (
	"errors"
	"math/rand/v2"
	"time"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// decision is the scratch memory of one decision, reused.
type decision struct {
	aggregated, prefill, decode leg
	pairs                       []pairing
	variants                    []variant           // of all legs
	sized                       []*scoring.Prompt   // one for each block size met, kept from decision to decision
	local                       []kvblock.LocalHash // of one prompt
	scores                      indexer.OverlapScores
	both                        []pool.Worker     // of aggregated and prefill
	loads                       []scoring.Load    // indexed by worker number
	usage                       []float64         // indexed by worker number, by the engines' own account
	overloaded                  []bool            // indexed like the snapshot's workers
	version                     scoring.Version   // of the loads behind overloaded; 0: any
	booked                      []scoring.Booking // for this request, of which some may be freed
	route                       *Route            // what was chosen, once a session may hold it
	standings                   standings         // by which candidates were gathered
	ejected, ejectedPrefill     []pool.Worker     // that would be candidates, but for their ejection
	regardless                  bool              // they are candidates, because there are no others
	// names of endpoints that would be candidates, but for their cordon; only if Router.explains
	cordoned []string
	took     metrics.Overhead
	span     *tracing.Span // below which phases are told; nil: nobody is told
}

// undo ends whatever was booked for the request.
func (d *decision) undo() {
	if d.route != nil {
		d.route.Free()
	}
	for _, b := range d.booked {
		b.Free()
	}
	d.route, d.booked = nil, d.booked[:0]
}

// variant is a prompt cut for one block size. Workers of one model usually share one.
type variant struct {
	blockSize int
	eagle     bool
	prompt    scoring.Prompt
	certain   []int     // by prompt: how many blocks of its chain are the engine's, and not only the load book's
	overlap   []overlap // indexed by worker number, summed over the prompts; 0 beyond its length
}

// overlap is how many leading blocks a worker holds on its device, and behind them in the tiers that cost the same.
type overlap struct{ device, host, disk int32 }

func (v *variant) overlapOf(w kvblock.Worker) overlap {
	if int(w) < len(v.overlap) {
		return v.overlap[w]
	}
	return overlap{}
}

// choose decides who serves a request, and books it there.
func (r *Router) choose(d *decision, snapshot *pool.Snapshot, req *Request, p *prompt) (route *Route, err error) {
	if p.affinity.wanted {
		route, err = r.chooseInSession(d, snapshot, req, p, &p.affinity)
	} else {
		route, err = r.chooseAt(d, snapshot, req, p, &target{})
	}
	if err != nil {
		return nil, err
	}
	d.route = route
	route.health.counts[0] = r.counts.of(route.destination)
	if route.Prefill != nil {
		route.health.counts[1] = r.counts.of(route.computes.Worker)
	}
	if r.explains() {
		d.tellExcluded(route)
	}
	r.predict(d, route)
	route.released = r.onRelease
	if p.whole {
		route.expectPrefill()
	}
	if r.cfg.TrackOutput {
		route.answer = newAnswer(p.isl, route.unit, p.hints.ExpectedOutputTokens)
	}
	return route, nil
}

// maxLooks bounds how often a request is decided anew because others were booked since it was looked who is overloaded.
// Mostly these were quicker, and two that book a prefill worker and then a decode worker may send each other back as
// well; not even a burst comes near the bound. Whoever does is decided by loads that are a moment old.
const maxLooks = 64

// chooseAt decides who serves a request that is to go to t, and books it there. Where thresholds say who is overloaded,
// nobody is booked between that look and the booking, so that a burst does not pass them together. With an error what
// was booked is not freed: see undo.
func (r *Router) chooseAt(d *decision, snapshot *pool.Snapshot, req *Request, p *prompt, t *target) (*Route, error) {
	for look := 1; ; look++ {
		over := r.overloaded(d, snapshot, p.model)
		if look == maxLooks {
			d.version = 0
		}
		t.overloaded = false
		if err := r.gather(d, snapshot, req, p, t, over); err != nil {
			return nil, err
		}
		route, err := r.chooseGathered(d, p)
		switch {
		case err == nil && (!r.cordonedSince(d, route) && r.watch(d, route, p) || look >= maxLooks):
			return route, nil
		case err != nil && !errors.Is(err, scoring.ErrChanged):
			return nil, err
		}
		d.undo()
	}
}

// chooseGathered chooses among the candidates of d's legs.
func (r *Router) chooseGathered(d *decision, p *prompt) (*Route, error) {
	if alone, pairs := len(d.aggregated.workers), len(d.decode.workers); alone > 0 && pairs > 0 &&
		r.cfg.Scoring.Mode != scoring.KV {
		// Nothing tells in another mode which costs less: both have their part, by how many destinations they are.
		if rand.IntN(alone+pairs) < alone {
			d.decode.reset()
		} else {
			d.aggregated.reset()
		}
	}
	var alone, pair *Route
	var err error
	if len(d.aggregated.workers) > 0 {
		if alone, err = r.chooseOne(d, p); err != nil {
			return nil, err
		}
	}
	if len(d.decode.workers) > 0 {
		if pair, err = r.choosePair(d, p); err != nil {
			return nil, err
		}
	}
	return cheaper(alone, pair), nil
}

// match hashes the prompt once for every distinct block size among the candidates and looks the hashes up.
func (r *Router) match(d *decision, candidates []pool.Worker, p *prompt) Reason {
	sized, announcing := false, false
	for i := range candidates {
		w := &candidates[i]
		if loadOnly(w) != "" {
			continue
		}
		sized = true
		announcing = announcing || w.Announces()
		if d.variantOf(w) == nil {
			d.variants = append(d.variants, r.cut(d, p, w.BlockSize, w.EAGLE))
		}
	}
	switch {
	case !sized: // explain says why of the chosen one
		return ReasonNoBlockSize
	case r.cfg.Scoring.Mode != scoring.KV:
		return ReasonMode
	case r.cfg.Scoring.OverlapScoreCredit == 0:
		return ReasonNoCredit
	case r.cfg.Predict.Alone && p.reason == ReasonKV:
		return ReasonApproximate
	case !announcing && !r.cfg.Predict.Alone:
		return ReasonNoEvents
	}
	return p.reason
}

// loadOnly returns why a worker's blocks cannot be matched with any prompt, so that it is chosen by load alone; "" if
// they can.
func loadOnly(w *pool.Worker) Reason {
	switch {
	case w.OtherTokenizer:
		return ReasonTokenizerDiffers
	case w.Announced != 0:
		return ReasonBlockSize
	case w.BlockSize == 0:
		return ReasonNoBlockSize
	}
	return ""
}

// predict tells the index what the worker that prefills is about to compute, so that the next request with the same
// beginning knows.
func (r *Router) predict(d *decision, route *Route) {
	w := &route.computes
	v, life := d.variantOf(w), r.cfg.Predict.lifetime(w)
	if v == nil || life == (indexer.Lifetime{}) || !r.cfg.asksIndex() {
		return
	}
	at := time.Now()
	for i, chain := range v.prompt.Chains {
		r.index.Predict(w.Worker, chain[:v.certain[i]], life)
	}
	r.metrics.Phase("predict", at)
}

func (r *Router) cut(d *decision, p *prompt, blockSize int, eagle bool) variant {
	began := time.Now()
	var before variant // whose memory is used again
	if n := len(d.variants); n < cap(d.variants) {
		before = d.variants[:n+1][n]
	}
	v := variant{blockSize: blockSize, eagle: eagle, certain: before.certain[:0], overlap: before.overlap[:0]}
	v.prompt = scoring.Prompt{BlockSize: blockSize, Chains: make([][]kvblock.SequenceHash, 0, len(p.tokens))}
	options := kvblock.HashOptions{BlockSize: blockSize, EAGLE: eagle, LoRAName: p.lora, CacheNamespace: p.salt}
	at := began
	for _, t := range p.tokens {
		d.local = kvblock.AppendLocalHashes(d.local[:0], t.IDs[:t.Certain], options)
		at = lap(&d.took.BlockHashing, at)
		v.prompt.Chains = append(
			v.prompt.Chains,
			kvblock.AppendSequenceHashes(make([]kvblock.SequenceHash, 0, len(d.local)), d.local),
		)
		at = lap(&d.took.SeqHashing, at)
	}
	r.metrics.ObservePhase("hash", at.Sub(began))
	if d.span != nil {
		d.span.Phase(
			spanHash,
			began,
			at,
			tracing.Int("kvepp.block_size", blockSize),
			tracing.Int("kvepp.blocks", v.blocks()),
		)
	}
	for i, t := range p.tokens {
		v.certain = append(v.certain, len(v.prompt.Chains[i]))
		if t.Certain < len(t.IDs) {
			v.prompt.Chains[i] = appendOwn(v.prompt.Chains[i], options.Blocks(len(t.IDs)))
		}
	}
	r.lookUp(d, &v)
	return v
}

// lookUp sets what the workers hold of the prompt.
func (r *Router) lookUp(d *decision, v *variant) {
	at := time.Now()
	clear(v.overlap)
	v.overlap = v.overlap[:0]
	for i, chain := range v.prompt.Chains {
		if !r.cfg.asksIndex() {
			break
		}
		r.index.FindMatches(chain[:v.certain[i]], &d.scores)
		for o := range d.scores.Overlaps() {
			if n := int(o.Worker) + 1; n > len(v.overlap) {
				v.overlap = append(v.overlap, make([]overlap, n-len(v.overlap))...)
			}
			sum, lower := &v.overlap[o.Worker], d.scores.Extension(o.Worker)
			sum.device += int32(o.Blocks)
			sum.host += int32(lower.Host)
			sum.disk += int32(lower.Disk + lower.External)
		}
	}
	done := lap(&d.took.FindMatches, at)
	r.metrics.ObservePhase("match", done.Sub(at))
	if d.span != nil {
		d.span.Phase(
			spanLookUp,
			at,
			done,
			tracing.Int("kvepp.blocks", v.blocks()),
			tracing.Int("kvepp.best_overlap_blocks", v.best()),
		)
	}
}

// lookAgain looks up once more what the workers hold, after a time.
func (r *Router) lookAgain(d *decision) {
	for i := range d.variants {
		r.lookUp(d, &d.variants[i])
	}
}

// lap adds the time since at to sum, and returns now.
func lap(sum *time.Duration, at time.Time) time.Time {
	now := time.Now()
	*sum += now.Sub(at)
	return now
}

// appendOwn appends what stands, in the load book alone, for the blocks behind a prompt's certain tokens: their hashes
// are not known, so they count as the request's own, shared with nobody.
func appendOwn(chain []kvblock.SequenceHash, blocks int) []kvblock.SequenceHash {
	for len(chain) < blocks {
		chain = append(chain, kvblock.SequenceHash(rand.Uint64()))
	}
	return chain
}

// variantOf returns the prompt as the worker's engine cuts it; nil when it was not hashed for it.
func (d *decision) variantOf(w *pool.Worker) *variant {
	if loadOnly(w) != "" {
		return nil
	}
	for i := range d.variants {
		if v := &d.variants[i]; v.blockSize == w.BlockSize && v.eagle == w.EAGLE {
			return v
		}
	}
	return nil
}
