package router

import (
	"fmt"
	"math/rand/v2"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// decision is the scratch memory of one choice, reused.
type decision struct {
	workers    []pool.Worker // the candidates
	candidates []scoring.Candidate
	costs      []float64
	terms      []scoring.Terms
	variants   []variant
	local      []kvblock.LocalHash // of one prompt
	scores     indexer.OverlapScores
	loads      []scoring.Load // indexed by worker number
	overloaded []bool         // indexed like the snapshot's workers
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

func (r *Router) choose(d *decision, snapshot *pool.Snapshot, req *Request, p *prompt) (*Route, error) {
	d.workers, d.candidates, d.variants = d.workers[:0], d.candidates[:0], d.variants[:0]
	otherModel, overloaded := 0, 0
	over := r.overloaded(d, snapshot, p.model)
	for i, w := range snapshot.Workers {
		switch {
		case w.Role != pool.Aggregated: // prefill and decode workers need a second leg, which is not there yet
		case req.Allowed != nil && !req.Allowed(w.Address):
		case p.model != "" && w.Model != "" && w.Model != p.model:
			otherModel++
		case over != nil && over[i]:
			overloaded++
		default:
			d.workers = append(d.workers, w)
		}
	}
	switch {
	case len(d.workers) == 0 && overloaded > 0:
		return nil, ErrOverloaded
	case len(d.workers) == 0 && otherModel > 0:
		return nil, fmt.Errorf("%w: %q", ErrUnknownModel, p.model)
	case len(d.workers) == 0:
		return nil, ErrNoEndpoints
	}

	reason := p.reason
	if p.tokens != nil {
		reason = r.match(d, p)
	}
	for _, w := range d.workers {
		c := scoring.Candidate{Worker: w.Worker, CPU: w.DeviceType == pool.CPU}
		if v := d.variantOf(&w); v != nil {
			c.Prompt = &v.prompt
			o := v.overlapOf(w.Worker)
			c.DeviceBlocks, c.HostBlocks, c.DiskBlocks = int(o.device), int(o.host), int(o.disk)
		} else if w.BlockSize > 0 {
			c.Prompt = &scoring.Prompt{BlockSize: w.BlockSize}
		}
		d.candidates = append(d.candidates, c)
	}
	at := time.Now()
	if cap(d.costs) < len(d.candidates) {
		d.costs = make([]float64, len(d.candidates))
	}
	costs := d.costs[:len(d.candidates)]
	var terms []scoring.Terms // nil: nobody wants to know
	if r.explains() {
		if cap(d.terms) < len(d.candidates) {
			d.terms = make([]scoring.Terms, len(d.candidates))
		}
		terms = d.terms[:len(d.candidates)]
	}
	// The book's request ids would be the client's x-request-id, which need not be unique: the booking is named by nobody.
	sel, booking, err := r.book.SelectAndAdd(scoring.Request{ISLTokens: p.isl, Terms: terms}, d.candidates, &r.cfg.Scoring, nil, costs)
	r.metrics.Phase("select", at)
	if err != nil {
		return nil, fmt.Errorf("router: %w", err)
	}
	w, chosen := &d.workers[sel.Index], &d.candidates[sel.Index]
	if w.Silent && reason == ReasonKV {
		reason = ReasonApproximate
	}
	r.predict(d, w)
	route := &Route{booking: booking, worker: w.Worker, Decision: Decision{
		Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank, BlockSize: w.BlockSize,
		Reason: reason, PromptTokens: p.isl,
		PredictedCachedTokens: (chosen.DeviceBlocks + chosen.HostBlocks + chosen.DiskBlocks) * w.BlockSize,
		UpperBound:            w.UpperBound && chosen.DeviceBlocks+chosen.HostBlocks+chosen.DiskBlocks > 0,
		IndexAtBound:          r.index.AtBound(),
		Chosen:                sel.Index,
		Temperature:           r.cfg.Scoring.Temperature,
	}}
	if p.tokens != nil {
		route.served = r.cfg.Served
	}
	if terms != nil {
		route.Costs = make([]Cost, len(terms))
	}
	for i := range terms {
		route.Costs[i] = Cost{d.workers[i].Name, d.workers[i].Rank, costs[i], terms[i], r.cfg.Scoring.Credit(&terms[i])}
	}
	return route, nil
}

// match hashes the prompt once for every distinct block size among the candidates and looks the hashes up.
func (r *Router) match(d *decision, p *prompt) Reason {
	sized, announcing, differs := false, false, false
	for i := range d.workers {
		w := &d.workers[i]
		if w.OtherTokenizer {
			differs = true
			continue
		}
		if w.BlockSize == 0 || w.Announced != 0 {
			continue
		}
		sized = true
		announcing = announcing || w.Announces()
		if d.variantOf(w) == nil {
			d.variants = append(d.variants, r.cut(d, p, w.BlockSize, w.EAGLE))
		}
	}
	switch {
	case !sized && differs:
		return ReasonTokenizerDiffers
	case !sized:
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

// predict tells the index what the chosen worker is about to compute, so that the next request with the same beginning
// knows.
func (r *Router) predict(d *decision, w *pool.Worker) {
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
	at := time.Now()
	var before variant // whose memory is used again
	if n := len(d.variants); n < cap(d.variants) {
		before = d.variants[:n+1][n]
	}
	v := variant{blockSize: blockSize, eagle: eagle, certain: before.certain[:0], overlap: before.overlap[:0]}
	v.prompt = scoring.Prompt{BlockSize: blockSize, Chains: make([][]kvblock.SequenceHash, 0, len(p.tokens))}
	options := kvblock.HashOptions{BlockSize: blockSize, EAGLE: eagle, LoRAName: p.lora, CacheNamespace: p.salt}
	for _, t := range p.tokens {
		d.local = kvblock.AppendLocalHashes(d.local[:0], t.IDs[:t.Certain], options)
		v.prompt.Chains = append(v.prompt.Chains, kvblock.AppendSequenceHashes(make([]kvblock.SequenceHash, 0, len(d.local)), d.local))
	}
	at = r.metrics.Phase("hash", at)
	for _, chain := range v.prompt.Chains {
		v.certain = append(v.certain, len(chain))
		if !r.cfg.asksIndex() {
			continue
		}
		r.index.FindMatches(chain, &d.scores)
		for _, o := range d.scores.Overlaps() {
			if n := int(o.Worker) + 1; n > len(v.overlap) {
				v.overlap = append(v.overlap, make([]overlap, n-len(v.overlap))...)
			}
			sum, lower := &v.overlap[o.Worker], d.scores.Extension(o.Worker)
			sum.device += int32(o.Blocks)
			sum.host += int32(lower.Host)
			sum.disk += int32(lower.Disk + lower.External)
		}
	}
	for i, t := range p.tokens {
		if t.Certain < len(t.IDs) {
			v.prompt.Chains[i] = appendOwn(v.prompt.Chains[i], options.Blocks(len(t.IDs)))
		}
	}
	r.metrics.Phase("match", at)
	return v
}

// appendOwn appends what stands, in the load book alone, for the blocks behind a prompt's certain tokens: their hashes are
// not known, so they count as the request's own, shared with nobody.
func appendOwn(chain []kvblock.SequenceHash, blocks int) []kvblock.SequenceHash {
	for len(chain) < blocks {
		chain = append(chain, kvblock.SequenceHash(rand.Uint64()))
	}
	return chain
}

// variantOf returns the prompt as the worker's engine cuts it; nil when it was not hashed for it.
func (d *decision) variantOf(w *pool.Worker) *variant {
	if w.Announced != 0 || w.OtherTokenizer {
		return nil
	}
	for i := range d.variants {
		if v := &d.variants[i]; v.blockSize == w.BlockSize && v.eagle == w.EAGLE {
			return v
		}
	}
	return nil
}
