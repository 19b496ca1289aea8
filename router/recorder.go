package router

import (
	"time"

	"kvepp/router/record"
)

// beginRecording keeps what the trace of --record says about a request. Only a request with one prompt, whose token ids
// and block hashes are all known, can be replayed. The hashes count in the memory of bodies. Without room for them the
// request is not recorded.
func (r *Router) beginRecording(sc *scratch, route *Route, p *prepared) {
	v := sc.variantOf(&route.computes)
	if !p.reason.exact() || len(p.tokens) != 1 || v == nil || v.eagle ||
		p.tokens[0].Certain < len(p.tokens[0].IDs) || !r.cfg.Memory.Held.TryTake(8*len(v.prompt.Chains[0])) {
		r.cfg.Recorder.Skip()
		return
	}
	q := &record.Request{
		Model:     route.observed.model,
		Received:  route.observed.received,
		Prompt:    p.isl,
		BlockSize: v.blockSize,
		Hashes:    v.prompt.Chains[0],
		Prefill:   record.Worker{ID: route.InstanceID, Rank: route.Rank},
		Decode:    record.Worker{ID: route.InstanceID, Rank: route.Rank},
	}
	if x := route.Prefill; x != nil {
		q.Prefill = record.Worker{ID: x.InstanceID, Rank: x.Rank}
	}
	route.recorded = q
}

// endRecording hands a request that has ended to the Recorder.
func (r *Route) endRecording(a *Response) {
	q, to := r.recorded, r.observed.router.cfg.Recorder
	r.recorded = nil
	r.observed.router.cfg.Memory.Held.Give(8 * len(q.Hashes))
	if a.Status != "200" {
		to.Skip()
		return
	}
	q.First, q.Ended, q.Output, q.Cached = r.observed.firstToken, time.Now(), a.Tokens, a.CachedTokens
	to.Add(q)
}
