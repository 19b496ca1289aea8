package router

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"kvepp/pool"
	"kvepp/router/eject"
	"kvepp/scoring"
)

// A request is served by one aggregated worker, or by two: a prefill worker computes its prompt, and the decode worker
// that it is sent to fetches the blocks from there and goes on. Each of these choices is a leg: a pool of candidates,
// priced and booked in one step.

// leg is the scratch memory of one choice.
type leg struct {
	cfg        scoring.Config
	workers    []pool.Worker // the candidates
	candidates []scoring.Candidate
	costs      []float64
	terms      []scoring.Terms
}

func (l *leg) reset() { l.workers, l.candidates = l.workers[:0], l.candidates[:0] }

// prefillConfig prices the leg of the prompt: an engine that only prefills holds no blocks for decoding.
//
// Source: dynamo-llm 1.6.1, discovery: what the prefill router of a decode endpoint is configured with.
func prefillConfig(c scoring.Config) scoring.Config {
	c.TrackActiveBlocks = false
	return c
}

// decodeConfig prices the leg of the answer, by load alone: its blocks come from the prefill worker, each time anew.
//
// Source: dynamo-llm 1.6.1, kv_router::prefill_router: what the decode part of a disaggregated request is routed with.
func decodeConfig(c scoring.Config) scoring.Config {
	c.OverlapScoreCredit, c.AssumeKVReuse, c.TrackPrefillTokens = 0, false, false
	return c
}

// pairing is what a prefill worker wants of the decode workers of its prompts: a direct frontend sends the prompt to
// workers of its own namespace and model alone, and blocks may have to stay within a part of the cluster. Empty is not
// known, or not wanted, and goes with all.
type pairing struct{ model, namespace, taint string }

func pairingOf(prefill *pool.Worker) pairing {
	g := pairing{prefill.Model, prefill.Namespace, ""}
	if prefill.Transfer.Required {
		g.taint = prefill.Transfer.Taint
	}
	return g
}

// with reports whether a decode worker goes with the prefill worker.
func (g *pairing) with(decode *pool.Worker) bool {
	if g.taint != "" {
		if _, has := slices.BinarySearch(decode.Taints, g.taint); !has {
			return false
		}
	}
	return (g.model == decode.Model || g.model == "" || decode.Model == "") &&
		(g.namespace == decode.Namespace || g.namespace == "" || decode.Namespace == "")
}

// gather sorts the pool's workers into the legs that they may be candidates of. over says which of the snapshot's
// workers are overloaded; nil: none counts as that.
//
// The proxy's subset says where it can send a request, and so binds destinations alone. So does t, the target of the
// request's session.
func (r *Router) gather(d *decision, snapshot *pool.Snapshot, req *Request, p *prompt, t *target, over []bool) error {
	d.aggregated.reset()
	d.prefill.reset()
	d.decode.reset()
	d.pairs = d.pairs[:0]
	d.aggregated.cfg = r.cfg.Scoring
	if p.scoring != nil {
		d.aggregated.cfg = *p.scoring
	}
	d.standings = r.standings()
	d.ejected, d.ejectedPrefill, d.regardless, d.cordoned = d.ejected[:0], d.ejectedPrefill[:0], false, d.cordoned[:0]
	explains := r.explains()
	otherModel, overloaded, busyPrefill, others, otherPrefill, untainted, untaintedPrefill, cordoned,
		cordonedPrefill := 0, 0, 0, 0, 0, 0, 0, 0, 0
	pinned, constrained := p.pins.Given(), len(p.constraints.Required) > 0
	for i := range snapshot.Workers {
		w := &snapshot.Workers[i]
		known := p.model == "" || w.Model == p.model || w.Model == "" && !p.mustBeNamed
		switch {
		case w.Role == pool.Prefill:
			if !known || r.cfg.StockPrefill && w.Address == "" {
				continue
			}
			if pinned && !asked(&p.pins.Prefill, w) {
				otherPrefill++
				continue
			}
			if constrained && !p.constraints.Allow(w.Taints) {
				untaintedPrefill++
				continue
			}
			switch standing := d.standings.of(w); {
			case standing == eject.Cordoned:
				cordonedPrefill++
				d.tellCordoned(w, explains)
			case standing == eject.Ejected && !pinned:
				d.ejectedPrefill = append(d.ejectedPrefill, *w)
			case over != nil && over[i]:
				busyPrefill++
			default:
				d.addPrefill(w)
			}
		case req.Allowed != nil && !req.Allowed(w.Address):
		case !known:
			otherModel++
		case pinned && !asked(&p.pins.Worker, w):
			others++
		case constrained && !p.constraints.Allow(w.Taints):
			untainted++
		case w.Role == pool.Encode:
		default:
			switch standing := d.standings.of(w); {
			case standing == eject.Cordoned:
				cordoned++
				d.tellCordoned(w, explains)
			case standing == eject.Ejected && !pinned:
				d.ejected = append(d.ejected, *w)
			case over != nil && over[i]:
				overloaded++
				t.overloaded = t.overloaded || w.Worker == t.worker
			default:
				d.addDestination(w)
			}
		}
	}
	d.admitEjected(overloaded, busyPrefill)
	unpaired := d.pairUp(r.cfg.StockPrefill || p.reason == ReasonNoBody || p.reason == ReasonUnknownAPI)
	if err := d.holdTo(t); err != nil {
		return err
	}
	d.dropLone()
	switch alone, pairs := len(d.aggregated.workers), len(d.decode.workers); {
	case alone+pairs > 0:
		return nil
	case overloaded > 0 || unpaired > 0 && busyPrefill > 0:
		return ErrOverloaded
	case cordoned > 0 || unpaired > 0 && cordonedPrefill > 0:
		return ErrCordoned
	case untainted > 0 || unpaired > 0 && untaintedPrefill > 0:
		return fmt.Errorf("%w: %.200q", ErrConstraints, p.constraints.Required)
	case unpaired > 0 && otherPrefill > 0:
		return unknownPin(&p.pins.Prefill)
	case unpaired > 0:
		return ErrNoPrefill
	case others > 0:
		return unknownPin(&p.pins.Worker)
	case otherModel > 0:
		return fmt.Errorf("%w: %q", ErrUnknownModel, p.model)
	}
	return ErrNoEndpoints
}

// addPrefill makes a prefill worker a candidate.
func (d *decision) addPrefill(w *pool.Worker) {
	if g := pairingOf(w); len(d.pairs) == 0 || g != d.pairs[len(d.pairs)-1] && !slices.Contains(d.pairs, g) {
		d.pairs = append(d.pairs, g)
	}
	d.prefill.workers = append(d.prefill.workers, *w)
}

// addDestination makes a worker that a request can be sent to a candidate.
func (d *decision) addDestination(w *pool.Worker) {
	l := &d.aggregated
	if w.Role == pool.Decode {
		l = &d.decode
	}
	l.workers = append(l.workers, *w)
}

// admitEjected makes the ejected workers candidates if there are no others: a request that may fail is better than one
// that must. overloaded and busyPrefill are how many others there are that are too busy.
func (d *decision) admitEjected(overloaded, busyPrefill int) {
	if len(d.ejected) > 0 && len(d.aggregated.workers)+len(d.decode.workers)+overloaded == 0 {
		d.regardless = true
		for i := range d.ejected {
			d.addDestination(&d.ejected[i])
		}
	}
	if len(d.ejectedPrefill) > 0 && len(d.prefill.workers)+busyPrefill == 0 {
		d.regardless = true
		for i := range d.ejectedPrefill {
			d.addPrefill(&d.ejectedPrefill[i])
		}
	}
}

// tellCordoned notes the name of a cordoned endpoint once, if a record is wanted.
func (d *decision) tellCordoned(w *pool.Worker, wanted bool) {
	if n := len(d.cordoned); wanted && (n == 0 || d.cordoned[n-1] != w.Name) { // its ranks follow each other
		d.cordoned = append(d.cordoned, w.Name)
	}
}

// tellExcluded names in a decision the endpoints that were left out.
func (d *decision) tellExcluded(route *Route) {
	if len(d.cordoned) > 0 {
		route.Cordoned = slices.Clone(d.cordoned)
	}
	if len(d.ejected)+len(d.ejectedPrefill) == 0 {
		return
	}
	route.EjectedAdmitted = d.regardless
	for _, out := range [][]pool.Worker{d.ejected, d.ejectedPrefill} {
		for i := range out {
			if name := out[i].Name; !slices.Contains(route.Ejected, name) {
				route.Ejected = append(route.Ejected, name)
			}
		}
	}
}

// pairUp takes the decode workers that no prefill worker goes with out of their leg, and returns how many cannot serve
// for that. alone says that they serve without one: a stock engine, which only decodes when it is told where the prompt
// is computed, and any for a request that has nothing to prefill.
func (d *decision) pairUp(alone bool) (unpaired int) {
	kept := d.decode.workers[:0]
	for i := range d.decode.workers {
		w := &d.decode.workers[i]
		switch {
		case slices.ContainsFunc(d.pairs, func(g pairing) bool { return g.with(w) }):
			kept = append(kept, *w)
		case alone:
			d.aggregated.workers = append(d.aggregated.workers, *w)
		default:
			unpaired++
		}
	}
	d.decode.workers = kept
	return unpaired
}

// dropLone takes the prefill workers that no decode worker goes with out of their leg.
func (d *decision) dropLone() {
	all := len(d.pairs)
	d.pairs = slices.DeleteFunc(d.pairs, func(g pairing) bool {
		for i := range d.decode.workers {
			if g.with(&d.decode.workers[i]) {
				return false
			}
		}
		return true
	})
	if len(d.pairs) < all {
		d.prefill.workers = slices.DeleteFunc(
			d.prefill.workers,
			func(w pool.Worker) bool { return !slices.Contains(d.pairs, pairingOf(&w)) },
		)
	}
}

// chooseOne books an aggregated worker.
func (r *Router) chooseOne(d *decision, p *prompt) (*Route, error) {
	l := &d.aggregated
	reason, sel, booking, err := r.bookPrompt(d, l, p)
	if err != nil {
		return nil, err
	}
	w := &l.workers[sel.Index]
	route := &Route{
		booking:       booking,
		destination:   w.Worker,
		instance:      w.InstanceID,
		computes:      *w,
		sameTokenizer: w.SameTokenizer,
		unit:          blockSizeOf(w, sel),
		Decision: Decision{
			Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank, RankByAddress: w.RankByAddress,
			Fallbacks: r.fallbacks(d, l, sel.Index), BlockSize: w.BlockSize, Costs: l.prices(), Chosen: sel.Index,
			Weights: l.weights(),
		},
	}
	r.explain(route, l, sel, p, reason)
	return route, nil
}

// choosePair books a prefill worker, and a decode worker that goes with it.
func (r *Router) choosePair(d *decision, p *prompt) (*Route, error) {
	d.prefill.cfg = prefillConfig(d.aggregated.cfg)
	reason, first, prefill, err := r.bookPrompt(d, &d.prefill, p)
	if err != nil {
		return nil, err
	}
	x := &d.prefill.workers[first.Index]
	l := &d.decode
	l.cfg = decodeConfig(d.aggregated.cfg)
	if g := pairingOf(x); len(d.pairs) > 1 {
		l.workers = slices.DeleteFunc(l.workers, func(w pool.Worker) bool { return !g.with(&w) })
	}
	constraints := &p.constraints
	if t := &x.Transfer; t.Taint != "" && !t.Required {
		constraints = constraints.Preferring(t.Taint, t.Weight)
	}
	for i := range l.workers {
		w := &l.workers[i]
		l.candidates = append(
			l.candidates,
			scoring.Candidate{Worker: w.Worker, Prompt: d.promptOf(w.BlockSize), CPU: w.DeviceType == pool.CPU,
				CostMultiplier: d.preferTrial(w, constraints.Multiplier(w.Taints))},
		)
	}
	last, booking, err := r.bookLeg(d, l, p)
	if err != nil {
		return nil, err
	}
	w := &l.workers[last.Index]
	route := &Route{
		booking:       booking,
		prefill:       prefill,
		destination:   w.Worker,
		instance:      w.InstanceID,
		computes:      *x,
		sameTokenizer: w.SameTokenizer && x.SameTokenizer,
		unit:          blockSizeOf(w, last),
		Decision: Decision{
			Name: w.Name, Address: w.Address, InstanceID: w.InstanceID, Rank: w.Rank, RankByAddress: w.RankByAddress,
			Fallbacks: r.fallbacks(d, l, last.Index), BlockSize: x.BlockSize, Costs: l.prices(), Chosen: last.Index,
			Weights: l.weights(),
			Prefill: &Prefill{
				Name:       x.Name,
				Address:    x.Address,
				InstanceID: x.InstanceID,
				Rank:       x.Rank,
				Costs:      d.prefill.prices(),
				Chosen:     first.Index,
				Weights:    d.prefill.weights(),
			},
		},
	}
	r.explain(route, &d.prefill, first, p, reason)
	route.cost += last.Cost * float64(last.UnitTokens)
	return route, nil
}

// blockSizeOf returns the tokens of a block of the worker that was chosen; where that is not known, of what it was
// priced in.
func blockSizeOf(w *pool.Worker, sel scoring.Selection) int {
	if w.BlockSize > 0 {
		return w.BlockSize
	}
	return sel.UnitTokens
}

// bookPrompt looks up what the candidates of a leg hold of the prompt, and books the prompt with one of them.
func (r *Router) bookPrompt(d *decision, l *leg, p *prompt) (Reason, scoring.Selection, scoring.Booking, error) {
	reason := p.reason
	if p.tokens != nil {
		reason = r.match(d, l.workers, p)
	}
	preferring := len(p.constraints.Preferred) > 0
	for i := range l.workers {
		w := &l.workers[i]
		c := scoring.Candidate{Worker: w.Worker, CPU: w.DeviceType == pool.CPU}
		if preferring {
			c.CostMultiplier = p.constraints.Multiplier(w.Taints)
		}
		c.CostMultiplier = d.preferTrial(w, c.CostMultiplier)
		if v := d.variantOf(w); v != nil {
			c.Prompt = &v.prompt
			o := v.overlapOf(w.Worker)
			c.DeviceBlocks, c.HostBlocks, c.DiskBlocks = int(o.device), int(o.host), int(o.disk)
		} else {
			c.Prompt = d.promptOf(w.BlockSize)
		}
		l.candidates = append(l.candidates, c)
	}
	sel, booking, err := r.bookLeg(d, l, p)
	return reason, sel, booking, err
}

// bookLeg prices a leg's candidates, chooses one and books it, in one step.
func (r *Router) bookLeg(d *decision, l *leg, p *prompt) (scoring.Selection, scoring.Booking, error) {
	l.costs = slices.Grow(l.costs[:0], len(l.candidates))[:len(l.candidates)]
	l.terms = l.terms[:0]
	var terms []scoring.Terms // nil: nobody wants to know
	if r.explains() {
		l.terms = slices.Grow(l.terms, len(l.candidates))[:len(l.candidates)]
		terms = l.terms
	}
	// The book's request ids would be the client's x-request-id, which need not be unique: the booking is named by
	// nobody.
	at := time.Now()
	sel, booking, err := r.book.SelectAndAdd(
		scoring.Request{ISLTokens: p.isl, Terms: terms, IfVersion: d.version},
		l.candidates,
		&l.cfg,
		nil,
		l.costs,
	)
	if err != nil {
		return sel, booking, fmt.Errorf("router: %w", err)
	}
	d.booked = append(d.booked, booking)
	if d.version != 0 {
		d.version = sel.Version
	}
	done := lap(&d.took.Scheduling, at)
	r.metrics.ObservePhase("select", done.Sub(at))
	if d.span != nil {
		tellChoice(d.span, at, done, l, sel)
	}
	return sel, booking, nil
}

// explain completes a decision with what is known of the leg that computes the prompt.
func (r *Router) explain(route *Route, l *leg, sel scoring.Selection, p *prompt, reason Reason) {
	w, chosen := &route.computes, &l.candidates[sel.Index]
	switch reason {
	case ReasonKV,
		ReasonMediaPrefix,
		ReasonApproximate,
		ReasonNoBlockSize: // the other candidates' overlap was priced, not this one's
		reason = cmp.Or(loadOnly(w), reason)
	}
	if w.Silent && reason == ReasonKV {
		reason = ReasonApproximate
	}
	cached := chosen.DeviceBlocks + chosen.HostBlocks + chosen.DiskBlocks
	route.Reason, route.PromptTokens = reason, p.isl
	route.PredictedCachedTokens = cached * w.BlockSize
	route.UpperBound = cached > 0 && (w.UpperBound || r.cfg.UpperBound != nil && r.cfg.UpperBound(p.model))
	route.IndexAtBound = r.index.AtBound()
	route.cost = sel.Cost * float64(sel.UnitTokens)
	if p.tokens != nil {
		route.promptComputed = r.cfg.PromptComputed
	}
}

// cheaper returns the route that costs less, and frees the other. Either may be nil, not both. An aggregated worker's
// cost is made of the same terms as those of a prefill and a decode worker together, so they compare; at the same cost
// one worker is better than two.
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

// prices returns what each candidate costs, nil if nobody wants to know.
func (l *leg) prices() []Cost {
	if len(l.terms) == 0 {
		return nil
	}
	prices := make([]Cost, len(l.terms))
	for i := range l.terms {
		prices[i] = Cost{l.workers[i].Name, l.workers[i].Rank, l.costs[i], l.terms[i], l.cfg.Credit(&l.terms[i])}
	}
	return prices
}

// weights returns what the costs of prices were made with.
func (l *leg) weights() *scoring.Config {
	if len(l.terms) == 0 {
		return nil
	}
	cfg := l.cfg
	return &cfg
}

// promptOf returns the prompt of a candidate of which no more than the block size is known, nil without that.
func (d *decision) promptOf(blockSize int) *scoring.Prompt {
	if blockSize <= 0 {
		return nil
	}
	for _, p := range d.sized {
		if p.BlockSize == blockSize {
			return p
		}
	}
	p := &scoring.Prompt{BlockSize: blockSize}
	d.sized = append(d.sized, p)
	return p
}
