package router

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"kvepp/pool"
	"kvepp/scoring"
)

// A request goes to one aggregated worker, or to two: a prefill worker computes its prompt, and a decode worker, which
// the request is sent to, fetches the blocks from there and generates. Each of these choices is a leg: a set of
// candidates that is priced and booked in one step.

// leg is the scratch memory of one choice.
type leg struct {
	cfg        scoring.Config
	workers    []pool.Worker // the candidates; the other slices are indexed like it
	candidates []scoring.Candidate
	costs      []float64
	terms      []scoring.Terms
	explained  bool            // the decision lists the candidates
	dry        bool            // a choice books nothing
	priced     scoring.Version // of the book, at the latest dry choice
}

// reset also ends a dry choice that panicked.
func (l *leg) reset() { l.workers, l.candidates, l.dry = l.workers[:0], l.candidates[:0], false }

// bookAlone chooses a worker of a leg that takes the request alone, and books it there.
func (r *Router) bookAlone(sc *scratch, l *leg, p *prepared) (*Route, error) {
	l.cfg = sc.pricing
	reason, sel, booking, err := r.bookPrompt(sc, l, p)
	if err != nil {
		return nil, err
	}
	w := &l.workers[sel.Index]
	others, prices := r.cfg.fallbacks(&sc.gathered, l, sel.Index)
	route := &Route{
		placed: placed{booking: booking, destination: w.Worker, instance: w.InstanceID, computes: *w,
			sameTokenizer: w.SameTokenizer, unit: blockSizeOf(w, sel), weighted: sel.CachedTokens,
			notes: notesFirstTokens(w)},
		Decision: Decision{
			Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank, RankByAddress: w.RankByAddress,
			Fallbacks: others, FallbackCosts: prices, Cost: l.costs[sel.Index], BlockSize: w.BlockSize,
			Costs: l.prices(), Chosen: sel.Index, Weights: l.weights(),
		},
	}
	r.explain(sc, route, l, sel, p, reason)
	return route, nil
}

// bookPair chooses a prefill worker and a decode worker that matches it, and books the request on both.
func (r *Router) bookPair(sc *scratch, p *prepared) (*Route, error) {
	sc.prefill.cfg = sc.pricing.PrefillLeg()
	reason, first, prefill, err := r.bookPrompt(sc, &sc.prefill, p)
	if err != nil {
		return nil, err
	}
	x := &sc.prefill.workers[first.Index]
	l := &sc.decode
	l.cfg = sc.pricing.DecodeLeg(r.cfg.Disaggregation.On)
	if g := pairingOf(x); len(sc.pairings) > 1 {
		l.workers = slices.DeleteFunc(l.workers, func(w pool.Worker) bool { return !g.matches(&w) })
	}
	constraints := &p.constraints
	if t := &x.Transfer; t.Taint != "" && !t.Required {
		constraints = constraints.Preferring(t.Taint, t.Weight)
	}
	l.candidates = l.candidates[:0]
	for i := range l.workers {
		w := &l.workers[i]
		c := scoring.Candidate{Worker: w.Worker, Prompt: sc.promptOf(w.BlockSize), CPU: w.DeviceType == pool.CPU,
			KVBlocks: w.TotalKVBlocks, CostMultiplier: sc.trialMultiplier(w, constraints.Multiplier(w.Taints))}
		if v := sc.variantOf(w); v != nil && r.cfg.Disaggregation.On {
			v.credit(&c)
		}
		l.candidates = append(l.candidates, c)
	}
	last, booking, err := r.bookLeg(sc, l, p)
	if err != nil {
		return nil, err
	}
	w := &l.workers[last.Index]
	others, prices := r.cfg.fallbacks(&sc.gathered, l, last.Index)
	route := &Route{
		placed: placed{booking: booking, prefill: prefill, destination: w.Worker, instance: w.InstanceID, computes: *x,
			sameTokenizer: w.SameTokenizer && x.SameTokenizer, unit: blockSizeOf(w, last),
			notes: notesFirstTokens(w)},
		Decision: Decision{
			Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank, RankByAddress: w.RankByAddress,
			Fallbacks: others, FallbackCosts: prices, Cost: l.costs[last.Index], BlockSize: x.BlockSize,
			Costs: l.prices(), Chosen: last.Index, Weights: l.weights(),
			Prefill: &Prefill{
				Name:       x.Name,
				Address:    x.Address,
				InstanceID: x.InstanceID,
				Rank:       x.Rank,
				Costs:      sc.prefill.prices(),
				Chosen:     first.Index,
				Weights:    sc.prefill.weights(),
			},
		},
	}
	r.explain(sc, route, &sc.prefill, first, p, reason)
	route.cost += comparableCost(last, &l.cfg)
	if d := &r.cfg.Disaggregation; d.On {
		route.fetches = *w
		fetched := p.isl - last.CachedTokens
		if prefill.Fetched(fetched); d.Policy == scoring.ByCost {
			route.cost += 1000 * r.book.TransferTime(x.Worker, fetched)
		}
	}
	return route, nil
}

// blockSizeOf returns the block size of the chosen worker, in tokens. If it is not known: the block size that the
// worker was priced with.
func blockSizeOf(w *pool.Worker, sel scoring.Selection) int {
	if w.BlockSize > 0 {
		return w.BlockSize
	}
	return sel.UnitTokens
}

// bookPrompt matches the prompt with the blocks of a leg's candidates, chooses one and books the prompt there.
func (r *Router) bookPrompt(sc *scratch, l *leg, p *prepared) (Reason, scoring.Selection, scoring.Booking, error) {
	reason := p.reason
	if p.tokens != nil {
		reason = r.match(sc, l.workers, p)
	}
	l.candidates = slices.Grow(l.candidates[:0], len(l.workers))[:len(l.workers)]
	preferring := len(p.constraints.Preferred) > 0
	for i := range l.workers {
		w, c := &l.workers[i], &l.candidates[i]
		sc.candidate(c, w)
		if preferring {
			c.CostMultiplier = p.constraints.Multiplier(w.Taints)
		}
		c.CostMultiplier = sc.trialMultiplier(w, c.CostMultiplier)
	}
	sel, booking, err := r.bookLeg(sc, l, p)
	return reason, sel, booking, err
}

// candidate makes c of a worker, with what it holds of the prompt.
func (m *matched) candidate(c *scoring.Candidate, w *pool.Worker) {
	*c = scoring.Candidate{Worker: w.Worker, CPU: w.DeviceType == pool.CPU, KVBlocks: w.TotalKVBlocks}
	if v := m.variantOf(w); v != nil && !v.unread { // else it shares no block with a running request
		c.Prompt = &v.prompt
		v.credit(c)
	} else {
		c.Prompt = m.promptOf(w.BlockSize)
	}
}

// bookLeg prices a leg's candidates, chooses one and books the request there, in one step.
func (r *Router) bookLeg(sc *scratch, l *leg, p *prepared) (scoring.Selection, scoring.Booking, error) {
	l.costs = slices.Grow(l.costs[:0], len(l.candidates))[:len(l.candidates)]
	l.terms, l.explained = l.terms[:0], r.explains()
	var terms []scoring.Terms // nil: not wanted
	if l.explained || l.dry {
		l.terms = slices.Grow(l.terms, len(l.candidates))[:len(l.candidates)]
		terms = l.terms
	}
	return r.bookAmong(sc, l, 0, len(l.candidates), terms, p)
}

// bookAmong is bookLeg for the candidates from one index to another.
func (r *Router) bookAmong(sc *scratch, l *leg, from, to int, terms []scoring.Terms,
	p *prepared) (scoring.Selection, scoring.Booking, error) {
	model := l.workers[0].Model // not p.model, which is the client's, and shares the body's memory
	if model != p.model {
		model = ""
	}
	// The booking has no ID: the client's x-request-id need not be unique.
	at := time.Now()
	sel, booking, err := r.book.SelectAndAdd(
		scoring.Request{Model: model, ISLTokens: p.isl, Terms: terms, IfVersion: sc.version, DryRun: r.dry || l.dry},
		l.candidates[from:to],
		&l.cfg,
		nil,
		l.costs[from:to],
	)
	if err != nil {
		return sel, booking, fmt.Errorf("router: %w", err)
	}
	if sel.Index += from; l.dry {
		l.priced = sel.Version
		return sel, booking, nil
	}
	sc.booked = append(sc.booked, booking)
	if len(l.candidates) == 1 {
		r.metrics.OnlyCandidate.Inc()
	}
	if sc.version != 0 {
		sc.version = sel.Version
	}
	done := r.metrics.Phase("select", at)
	if sc.span != nil {
		traceChoice(sc.span, at, done, l, sel)
	}
	return sel, booking, nil
}

// explain completes a decision by the leg that computes the prompt.
func (r *Router) explain(sc *scratch, route *Route, l *leg, sel scoring.Selection, p *prepared, reason Reason) {
	w, chosen := &route.computes, &l.candidates[sel.Index]
	switch reason {
	case ReasonKV,
		ReasonKVRendered,
		ReasonMediaPrefix,
		ReasonApproximate,
		ReasonNoBlockSize: // overlap was priced for the other candidates, not for this one
		reason = cmp.Or(loadOnly(w), reason)
	}
	if w.Silent && reason.exact() {
		reason = ReasonApproximate
	}
	cached := cachedBlocks(chosen)
	route.Reason, route.PromptTokens = reason, p.isl
	if p.version != nil {
		route.EngineVersion = p.version.Version()
	}
	route.PredictedCachedTokens = cached * w.BlockSize
	route.UpperBound = cached > 0 && (w.UpperBound || r.cfg.UpperBound != nil && r.cfg.UpperBound(p.model))
	if v := sc.variantOf(w); v != nil && p.tokens != nil {
		o := v.overlapOf(w.Worker)
		route.UpperBound = route.UpperBound || cached > 0 && o.upperBound
		route.UnusableTokens, route.UnusableBy = int(o.cut)*w.BlockSize, o.by
	}
	route.IndexAtBound = r.index.AtBound()
	route.cost = comparableCost(sel, &l.cfg)
	if p.tokens != nil {
		route.promptComputed = r.cfg.PromptComputed
	}
}

// comparableCost returns a cost that compares with those of other legs: in milliseconds, or in tokens rather than in
// blocks, whose sizes may differ.
func comparableCost(sel scoring.Selection, cfg *scoring.Config) float64 {
	if cfg.Policy == scoring.Time {
		return sel.Cost
	}
	return sel.Cost * float64(sel.UnitTokens)
}

// cheaper returns the route with the lower cost and frees the other. One of them may be nil. The costs compare: an
// aggregated worker's has the same terms as a prefill and a decode worker's together. At equal cost one worker is
// better than two.
func cheaper(alone, pair *Route) *Route {
	switch {
	case alone == nil:
		return pair
	case pair == nil:
		return alone
	case pair.cost < alone.cost:
		alone.Free()
		return pair
	}
	pair.Free()
	return alone
}

// prices returns the cost of each candidate; nil unless Router.explains.
func (l *leg) prices() []Cost {
	if !l.explained {
		return nil
	}
	prices := make([]Cost, len(l.terms))
	for i := range l.terms {
		prices[i] = Cost{l.workers[i].Name, l.workers[i].Rank, l.costs[i], l.terms[i], l.cfg.Credit(&l.terms[i])}
	}
	return prices
}

// weights returns the configuration behind prices; nil with them.
func (l *leg) weights() *scoring.Config {
	if !l.explained {
		return nil
	}
	cfg := l.cfg
	return &cfg
}

// promptOf returns a prompt without hashes, for a candidate with only the block size known; nil if that is not
// known either.
func (m *matched) promptOf(blockSize int) *scoring.Prompt {
	if blockSize <= 0 {
		return nil
	}
	for _, p := range m.sized {
		if p.BlockSize == blockSize {
			return p
		}
	}
	p := &scoring.Prompt{BlockSize: blockSize}
	m.sized = append(m.sized, p)
	return p
}
