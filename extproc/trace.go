package extproc

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"google.golang.org/grpc/metadata"

	"kvepp/internal/tracing"
	"kvepp/router"
)

// spanRequest is the name of the span of a request, from its headers to the end of its response, as in the Gateway
// API's endpoint picker. Source: Gateway API Inference Extension 1.5.
const spanRequest = "gateway.request"

// beginSpan begins the request's span. If the proxy traces, its trace context is in the metadata of its call: the span
// is a child of the proxy's span, and the proxy sends the context upstream. Else the parent is in the client's headers,
// and kvepp sends this span's context upstream.
//
// Source: Envoy 1.40 puts the context of its span for the call into the call's metadata, and of that for the upstream
// request into traceparent when it sends that, after all filters.
func (x *exchange) beginSpan(ctx context.Context) {
	caller := x.head.caller
	in, _ := metadata.FromIncomingContext(ctx)
	first := func(name string) string {
		if v := in.Get(name); len(v) > 0 {
			return v[0]
		}
		return ""
	}
	proxy := tracing.Context{
		Traceparent: first(tracing.Traceparent),
		Tracestate:  strings.Join(in.Get(tracing.Tracestate), ","),
	}
	traces := proxy.Traceparent != "" && proxy.Valid()
	if traces {
		caller = proxy
	}
	if x.span = x.Server.cfg.Tracer.Request(spanRequest, caller); !traces {
		x.forward = x.span.Context()
	}
	path, _, _ := strings.Cut(x.head.path, "?") // queries may contain keys
	x.span.Set(tracing.Text("url.path", router.Clip(path)))
}

// endSpan ends the span with what is known about the response.
func (x *exchange) endSpan() {
	if x.head.id != "" { // the client's, or a generated one
		x.span.Set(tracing.Text("kvepp.request_id", router.Clip(x.head.id)))
	}
	if n, err := strconv.Atoi(x.code); err != nil { // no response, or one with an invalid status
		x.span.Set(tracing.Text("error.type", x.code))
	} else {
		x.span.Set(tracing.Int("http.response.status_code", n))
		if n >= http.StatusInternalServerError && x.route != nil { // without a route the span has the reason already
			x.span.Fail(x.code)
		}
	}
	if x.usage != nil {
		if u, ok, _ := x.reported(); ok {
			x.span.Set(tracing.Int("gen_ai.usage.input_tokens", u.PromptTokens),
				tracing.Int("gen_ai.usage.output_tokens", u.CompletionTokens))
			if u.HasCached {
				x.span.Set(tracing.Int("kvepp.reported_cached_tokens", u.CachedTokens))
			}
		}
	}
	x.span.End()
}
