package extproc

import (
	"context"
	"crypto/rand"
	"errors"
	"hash/maphash"
	"maps"
	"slices"

	"kvepp/prompt/body"
	"kvepp/router"
)

// addressAttribute is where Envoy sent the request, IP:port, if the filter's response_attributes name it.
const addressAttribute = "upstream.address"

// Why kvepp cannot judge a request, beside the router's reasons and the codes of errors.
const (
	notShadow     = "not_shadow"      // the filter is in observability mode, and kvepp was started without --shadow
	notObserved   = "not_observed"    // the filter waits for decisions
	noRequestBody = "no_request_body" // the response came before the end of the request's body
	// a response without a body: its end and its first token are not seen. Such a request has another outcome too.
	noResponseBody = "no_response_body"
)

// shadowAdvice says what to change for requests that kvepp cannot judge.
var shadowAdvice = map[string]string{
	notShadow: "the filter has observability_mode: true, so kvepp may not answer and chooses nothing: start kvepp " +
		"serve with --shadow, or set observability_mode: false",
	notObserved: "kvepp serve --shadow chooses nothing, and leaves the requests of this filter alone: set " +
		"observability_mode: true and failure_mode_allow: true in it (manifests/envoy/shadow.yaml), or start kvepp " +
		"without --shadow",
	noRequestBody: "a response began before kvepp had the request's whole body: set request_body_mode: STREAMED and " +
		"request_trailer_mode: SEND in the ext_proc filter",
	noResponseBody: "kvepp saw nothing of the body of a response 200: set response_body_mode: STREAMED and " +
		"response_trailer_mode: SEND in the ext_proc filter, unless the client broke off",
	router.ShadowNoAddress: "the proxy does not say which endpoint serves a request: add upstream.address to the " +
		"response_attributes of the ext_proc filter",
	router.ShadowUnknown: "kvepp has no endpoint at the address that serves: list the same IP:port in the endpoints " +
		"file (or the pool's selector) as in the proxy's cluster",
}

// initShadow makes the series of shadowed requests exist before the first one.
func (s *Server) initShadow() {
	s.metrics.ShadowTokens(0, 0, 0)
	outcomes := []string{router.ShadowEqual, router.ShadowOther, router.ShadowRefused, router.ShadowUnserved,
		router.ShadowNoMemory, router.ShadowSeveral, router.ShadowDisaggregated}
	for _, outcome := range slices.AppendSeq(outcomes, maps.Keys(shadowAdvice)) {
		s.metrics.Shadowed(outcome, 0)
	}
}

// unjudged counts a request whose endpoint kvepp cannot compare with its own choice, and logs each reason once.
func (x *exchange) unjudged(reason string) {
	if !x.judged {
		x.router.Unjudged(reason)
	}
	x.judged = true
	x.advise(reason, "")
}

func (x *exchange) advise(reason, served string) {
	advice := shadowAdvice[reason]
	if advice == "" {
		return
	}
	if _, seen := x.noted.LoadOrStore(reason, true); !seen {
		x.log.Warn("kvepp cannot judge a request in shadow; logged once for each reason", "reason", reason,
			"request_id", router.Clip(x.head.id), "served", served, "what_to_do", advice)
	}
}

// askShadow has the router decide a request that another picker routes.
func (x *exchange) askShadow(ctx context.Context) {
	req := x.request()
	req.Received = x.began
	route, err := x.router.Shadow(ctx, req)
	if x.Server.cfg.AccessLog != nil {
		x.model = router.Clip(req.Model) // the name would keep the body in memory
	}
	x.body, x.head = nil, x.head.kept()
	if x.phase = replied; !x.ended {
		x.phase = relay
	}
	var invalid *body.Error
	switch x.route = route; {
	case errors.As(err, &invalid):
		x.unjudged(router.ShadowRefused)
	case err != nil: // the client has gone
		x.unjudged(router.ShadowUnserved)
	}
}

// actInShadow is act for a request that another picker routes. It sends nothing to the proxy. With the end of the
// response it ends the stream, which Envoy would keep for deferred_close_timeout.
func (x *exchange) actInShadow(ctx context.Context, e *effect) {
	e.Send, e.ServedBy, e.Close = nil, "", e.Close || x.complete
	switch {
	case e.Refuse != nil:
		x.unjudged(e.Refuse.code)
		e.Close = true
	case e.Ask:
		x.askShadow(ctx)
	case e.Status != "" && !x.judged:
		x.serve(e)
	}
}

// serve books a shadowed request where the response comes from.
func (x *exchange) serve(e *effect) {
	address := x.in.GetAttributes()[attributesNamespace].GetFields()[addressAttribute].GetStringValue()
	switch {
	case address == "" && !e.OfEndpoint: // the proxy's own response; the end of the stream counts the request
	case x.route == nil:
		x.unjudged(noRequestBody)
	default:
		x.judged = true
		x.advise(x.router.Serve(x.route, address), router.Clip(address))
	}
}

// shareSeed is the same for all requests, so that a request that is repeated with its id has the same fate.
var shareSeed = maphash.MakeSeed()

// sampled reports whether a request with this id is in the share of --shadow-share.
func (c *Config) sampled(id string) bool {
	if id == "" {
		id = rand.Text()
	}
	return float64(maphash.String(shareSeed, id)>>11) < c.ShadowShare*(1<<53)
}
