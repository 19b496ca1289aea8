package extproc

import (
	"hash/maphash"
	"sync"
	"sync/atomic"

	"kvepp/router"
)

// repeatHeader is a header that kvepp sets on each request: a random name of its decision. If a request comes with it
// while the stream that set it is open, the proxy asks again for the same request: clients never see that header. Envoy
// AI Gateway 1.0 asks once for each match of a pool's routes.
const repeatHeader = "x-kvepp-decision"

// maxRepeats is how often kvepp repeats one decision: a gateway's rule has at most 64 matches. Source: Gateway API,
// HTTPRouteRule.
const maxRepeats = 63

// answered is the decision of an open stream.
type answered struct {
	decision *router.Decision
	token    string // as in stream
	digest   uint64 // of the request as it went on
	repeats  atomic.Int64
}

// openDecisions are those of all open streams, by their names in repeatHeader. Safe for concurrent use.
type openDecisions struct {
	seed maphash.Seed

	mu     sync.Mutex
	byName map[string]*answered // guarded by mu; one for each open stream
}

func (o *openDecisions) add(name string, a *answered) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.byName[name] = a
}

func (o *openDecisions) remove(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.byName, name)
}

// repeated returns the decision that a request was sent on with; nil: the request is a new one.
func (o *openDecisions) repeated(name string, digest func() uint64) *answered {
	if name == "" {
		return nil
	}
	o.mu.Lock()
	a := o.byName[name]
	o.mu.Unlock() // the digest of a large body takes milliseconds
	if a == nil || a.digest != digest() || a.repeats.Add(1) > maxRepeats {
		return nil
	}
	return a
}

// digest tells requests apart: their ids, paths, endpoints, and the bodies that kvepp reads.
func (s *stream) digest(seed maphash.Seed, endpoints string) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, text := range []string{s.head.id, s.head.path, endpoints} {
		h.WriteString(text)
		h.WriteByte(0)
	}
	whole := s.body
	if s.replacement != nil {
		whole = s.replacement
	}
	if s.bodylessReason == "" && len(whole) <= s.cfg.MaxParseBytes {
		h.Write(whole)
	}
	return h.Sum64()
}

// repeat answers a request as before, without a booking: the first stream follows the response and counts it.
func (x *exchange) repeat(first *answered) effect {
	x.note("the proxy asks several times for one request, and kvepp repeats its first decision: docs/gateways.md " +
		"says which routes cause this")
	x.repeating, x.token, x.decisionName = true, first.token, x.head.decisionName
	e := x.routed(first.decision)
	x.head = x.head.kept()
	return e
}
