package router

import (
	"hash/maphash"
	"sync/atomic"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/ladder"
	"kvepp/scoring"
)

// Ladder is what a Router needs to count where cached tokens are lost.
type Ladder struct {
	Sums *ladder.Ladder
	Seen *ladder.Seen

	salted atomic.Bool // a request had a salt or an adapter
}

// NewLadder returns a ladder that remembers requested blocks in so many bytes; nil for 0.
func NewLadder(bytes int64) *Ladder {
	if bytes == 0 {
		return nil
	}
	return &Ladder{Sums: new(ladder.Ladder), Seen: ladder.NewSeen(int(bytes))}
}

// read returns what is exported of the ladder.
func (l *Ladder) read() []metrics.LadderSum {
	var all []metrics.LadderSum
	for _, sum := range l.Sums.Sums() {
		out := metrics.LadderSum{Model: sum.Model, Unpredicted: sum.Unpredicted}
		for r, n := range sum.Tokens {
			out.Tokens = append(out.Tokens, metrics.Named{Name: ladder.Rung(r).String(), Count: n})
		}
		for c, n := range sum.Lost {
			out.Lost = append(out.Lost, metrics.Named{Name: ladder.Cause(c).String(), Count: n})
		}
		all = append(all, out)
	}
	return all
}

var modelSpaces = maphash.MakeSeed()

// climb notes how many of the request's prompt tokens reach each rung of the ladder, up to the chosen worker, and why
// not more.
func (r *Router) climb(sc *scratch, snapshot *pool.Snapshot, req *Request, p *prepared, route *Route) {
	if r.cfg.Ladder == nil {
		return
	}
	c := &route.climb
	c.Tokens[ladder.Prompt], c.Tokens[ladder.Delivered] = p.isl, -1
	v := sc.variantOf(&route.computes)
	if p.tokens == nil || p.estimated || v == nil {
		return
	}
	if v.unread { // no part of it is reusable
		r.cfg.Ladder.noteSeen(v, p)
		return
	}
	c.Known, c.Unusable = true, route.UnusableTokens
	l, chosen, best := sc.promptLeg(route), -1, 0
	for i := range l.candidates {
		if l.workers[i].Worker == route.computes.Worker {
			chosen = i
		}
		if cachedBlocks(&l.candidates[i]) > cachedBlocks(&l.candidates[best]) && l.candidates[i].Prompt == &v.prompt {
			best = i
		}
	}
	if chosen < 0 {
		return
	}
	if cachedBlocks(&l.candidates[best]) > cachedBlocks(&l.candidates[chosen]) {
		c.NotChosen = l.whyNotChosen(best, chosen)
		// With affinity the conversation's later turns would stay with its worker.
		if p.hints.Session != "" && route.Session == "" && c.NotChosen != ladder.Tier &&
			c.NotChosen != ladder.Preference {
			c.NotChosen = ladder.NoAffinity
		}
	} else {
		best = chosen
	}
	eligible := cachedBlocks(&l.candidates[best])
	fleet := eligible
	if holder, blocks := sc.bestHolder(snapshot, v, p, eligible); holder >= 0 {
		fleet = blocks
		c.NotEligible = r.cfg.whyNotEligible(&sc.gathered, &snapshot.Workers[holder], holder, req, p)
	}
	c.NotInFleet = r.cfg.whyNotInFleet(snapshot, v)
	seen, plain := r.cfg.Ladder.noteSeen(v, p)
	c.OtherSalt = max(plain-seen, 0) * v.blockSize
	c.Tokens[ladder.Reusable] = max(seen, fleet) * v.blockSize
	c.Tokens[ladder.Fleet] = fleet * v.blockSize
	c.Tokens[ladder.Eligible] = eligible * v.blockSize
	c.Tokens[ladder.Chosen] = cachedBlocks(&l.candidates[chosen]) * v.blockSize
	c.Fit()
}

// noteSeen returns how many of the prompt's blocks were requested before, with the same salt and adapter, and with any.
func (l *Ladder) noteSeen(v *variant, p *prepared) (seen, plain int) {
	space := maphash.String(modelSpaces, p.model)
	// Blocks without regard to salts are remembered beside the others, and only once a request has a salt.
	plainSpace := ^space
	for i := range v.prompts {
		chain, options := v.prompts[i].Chain, v.prompts[i].Options
		seen += l.Seen.Note(space, chain)
		switch {
		case options.CacheNamespace != "" || options.LoRAName != "":
			l.salted.Store(true)
			options.LoRAName, options.CacheNamespace = "", ""
			local := kvblock.AppendLocalHashes(nil, v.prompts[i].IDs, options)
			plain += l.Seen.Note(plainSpace, kvblock.AppendSequenceHashes(nil, local))
		case l.salted.Load():
			plain += l.Seen.Note(plainSpace, chain)
		}
	}
	return seen, plain
}

// bestHolder returns the index in the snapshot of the worker of the model that has most of the prompt cached, and how
// many blocks, if that is more than so many; -1 if there is none.
func (sc *scratch) bestHolder(s *pool.Snapshot, v *variant, p *prepared, more int) (holder, blocks int) {
	holder, blocks = -1, more
	any := false
	for i := range v.overlap {
		any = any || v.overlap[i].blocks() > more
	}
	if !any {
		return holder, blocks
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		if n := v.overlapOf(w.Worker).blocks(); n > blocks && (w.Model == p.model || w.Model == "") &&
			sc.variantOf(w) == v {
			holder, blocks = i, n
		}
	}
	return holder, blocks
}

func (o overlap) blocks() int { return int(o.device + o.host + o.disk) }

// whyNotEligible says why a worker of the request's model is no candidate.
func (c *Config) whyNotEligible(g *gathered, w *pool.Worker, index int, req *Request, p *prepared) ladder.Cause {
	criteria := c.criteria(g, req, p)
	busy := index < len(g.over) && g.over[index]
	var v verdict
	if w.Role == pool.Prefill {
		v = criteria.prefill(w, busy)
	} else {
		v = criteria.destination(w, busy)
	}
	switch v {
	case notPinned:
		return ladder.Pinned
	case untainted:
		return ladder.Taints
	case cordoned:
		return ladder.Cordoned
	case ejected:
		return ladder.Ejected
	case overloaded:
		return ladder.Busy
	case candidate:
		if p.affinity.wanted {
			return ladder.Session
		}
	}
	return ladder.Role
}

// whyNotInFleet says why no worker has blocks that were requested before.
func (c *Config) whyNotInFleet(s *pool.Snapshot, v *variant) ladder.Cause {
	if !c.asksIndex() {
		return ladder.NotMatched
	}
	if c.Predict.Alone || len(v.overlap) > 0 {
		return ladder.Evicted
	}
	for i := range s.Workers {
		if w := &s.Workers[i]; w.Announces() && !w.Silent || c.lifetime(w) != (indexer.Lifetime{}) {
			return ladder.Evicted
		}
	}
	return ladder.NoEvents
}

// whyNotChosen says what decided against the candidate with the most cached blocks.
func (l *leg) whyNotChosen(best, chosen int) ladder.Cause {
	a, b := &l.candidates[best], &l.candidates[chosen]
	switch {
	case l.costs[best] <= l.costs[chosen]:
		return ladder.Random
	case worth(&l.cfg, a) <= worth(&l.cfg, b):
		return ladder.Tier
	case max(a.CostMultiplier, 1) > max(b.CostMultiplier, 1):
		return ladder.Preference
	case len(l.terms) == 0:
		return ladder.Load
	}
	x, y := &l.terms[best], &l.terms[chosen]
	waiting := l.cfg.PrefillLoadScale * float64(x.PrefillTokens-y.PrefillTokens) / float64(max(x.BlockSize, 1))
	active := x.DecodeBlocks - y.DecodeBlocks +
		l.cfg.DecodeActiveRequestWeight*float64(x.ActiveRequests-y.ActiveRequests)
	if l.cfg.Policy == scoring.Time {
		milliseconds := 1e3 * x.Time.SecondsPerToken
		waiting = milliseconds * float64(x.PrefillTokens-y.PrefillTokens)
		if waiting > 0 {
			return ladder.Waiting
		}
		return ladder.Load
	}
	if waiting >= active {
		return ladder.Waiting
	}
	return ladder.Load
}

// reachDelivered completes the request's climb with what the response reports, and counts it.
func (r *Route) reachDelivered(a *Response) {
	l := r.observed.router.cfg.Ladder
	if l == nil {
		return
	}
	r.climb.Model = r.observed.model
	if a.Status == "200" && r.Compares() {
		r.climb.Tokens[ladder.Delivered] = a.CachedTokens
	}
	l.Sums.Add(&r.climb)
}
