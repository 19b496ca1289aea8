package router

import (
	"kvepp/indexer"
	"kvepp/internal/tracing"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// scratch is the memory of one decision. Router.scratches reuses it.
type scratch struct {
	gathered
	matched

	// The outcome.
	booked []scoring.Booking // for this request; some may be freed already
	route  *Route            // what was chosen
	kept   bool              // route was returned to the caller, which frees it
	span   *tracing.Span     // parent of the phases' spans; nil: no tracing
}

// gathered are the candidates of a request. gather sets them, and all later phases read them.
type gathered struct {
	pricing                 scoring.Config // the router's, with what the request overrides
	aggregated              leg
	prefill, decode         leg
	unaided                 leg // of decode workers that may take the request alone
	destinations, prefills  tally
	pairings                []pairing
	standings               standings       // by which candidates were gathered
	ejected, ejectedPrefill []pool.Worker   // candidates but for their ejection
	ejectedAdmitted         bool            // ejected workers are candidates, because there are no others
	cordoned                []string        // endpoints; candidates but for their cordon; only if Router.explains
	prompting               []pool.Worker   // of prompters
	unaidedPrompts          bool            // decode workers may compute prompts while prefill workers are busy
	loads                   []scoring.Load  // indexed by worker number
	usage                   []float64       // KV usage that the engines report, 0..1, indexed by worker number
	overloaded              []bool          // indexed like the snapshot's workers
	over                    []bool          // overloaded; nil: no thresholds are set
	version                 scoring.Version // of the loads behind overloaded; 0: any
	lastLook                bool            // loads that are a moment old will do, see maxLooks
	fits                    []fit           // for the request's adapter, by worker number; empty: all fit
}

// matched is a prompt's blocks and who holds them. match sets it; pricing and predictions read it.
type matched struct {
	variants []variant
	sized    []*scoring.Prompt   // one for each block size met so far, kept from decision to decision
	local    []kvblock.LocalHash // of one prompt
	scores   indexer.OverlapScores
}

// takeScratch returns scratch memory for one decision. span is the parent of its spans; nil: no tracing.
func (r *Router) takeScratch(span *tracing.Span) *scratch {
	sc := r.scratches.Get().(*scratch)
	sc.variants, sc.span, sc.kept = sc.variants[:0], span, false
	return sc
}

// putScratch gives scratch memory back. Unless the route was returned to the caller, it frees what was booked: after an
// error or a panic nothing else would.
func (r *Router) putScratch(sc *scratch) {
	if route := sc.route; !sc.kept {
		sc.undo()
		if route != nil {
			route.Ended(Response{CachedTokens: -1}) // ends what the metrics count as begun
		}
	}
	sc.route, sc.booked, sc.span = nil, sc.booked[:0], nil
	for i := range sc.variants {
		clear(sc.variants[i].prompts) // they keep the request's token ids
		sc.variants[i].prompt.Chains = nil
	}
	r.scratches.Put(sc)
}

// promptLeg returns the leg in which the worker that computes the prompt was chosen.
func (g *gathered) promptLeg(route *Route) *leg {
	switch {
	case route.Prefill != nil:
		return &g.prefill
	case route.Conditional == scoring.Bypassed:
		return &g.unaided
	}
	return &g.aggregated
}

// undo frees everything that was booked for the request.
func (sc *scratch) undo() {
	if sc.route != nil {
		sc.route.Free()
	}
	for _, b := range sc.booked {
		b.Free()
	}
	sc.route, sc.booked = nil, sc.booked[:0]
}

// prompters returns the candidates that compute prompts. After gather without an error there is at least one.
func (g *gathered) prompters() []pool.Worker {
	if len(g.decode.workers) == 0 {
		return g.aggregated.workers
	}
	if len(g.aggregated.workers) == 0 && !g.unaidedPrompts {
		return g.prefill.workers
	}
	g.prompting = append(append(g.prompting[:0], g.aggregated.workers...), g.prefill.workers...)
	if g.unaidedPrompts {
		g.prompting = append(g.prompting, g.decode.workers...)
	}
	return g.prompting
}
