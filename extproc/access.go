package extproc

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"kvepp/router"
)

// logAccess writes the request's line of the access log. The line has no text of the prompt, and no query, which may
// contain keys. It omits what is unknown. A request without a response has status 0, as in Envoy's access log.
func (x *exchange) logAccess() {
	attrs := make([]slog.Attr, 0, 24)
	text := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	number := func(key string, n int) { attrs = append(attrs, slog.Int(key, n)) }
	path, _, _ := strings.Cut(x.head.path, "?")
	text("request_id", router.Clip(x.head.id))
	text("method", router.Clip(x.head.method))
	text("path", router.Clip(path))
	text("model", x.model)
	reason := x.refusal
	if x.route != nil {
		d := &x.route.Decision
		text("worker", d.Name)
		number("dp_rank", int(d.Rank))
		text("address", d.Address)
		if by := &x.route.ServedBy; by.Outcome != "" && by.Outcome != router.ServedByChosen {
			text("served_worker", by.Worker)
			text("served_address", router.Clip(by.Address))
		}
		if p := d.Prefill; p != nil {
			text("prefill_worker", p.Name)
			number("prefill_dp_rank", int(p.Rank))
		}
		if reason == "" { // else kvepp refused it after it was routed
			reason = string(d.Reason)
		}
		number("prompt_tokens", d.PromptTokens)
		number("predicted_cached_tokens", d.PredictedCachedTokens)
		if x.usage != nil {
			reported, found, _ := x.reported()
			if found && reported.HasCached {
				number("reported_cached_tokens", reported.CachedTokens)
			}
			if found {
				number("output_tokens", reported.CompletionTokens)
			}
		}
		attrs = append(attrs, slog.Duration("waited", d.Waited))
		if !x.firstToken.IsZero() {
			attrs = append(attrs, slog.Duration("time_to_first_token", x.firstToken.Sub(x.began)))
		}
	}
	text("reason", reason)
	status, _ := strconv.Atoi(x.code)
	number("status", status)
	attrs = append(attrs, slog.Duration("duration", time.Since(x.began)))
	x.Server.cfg.AccessLog.LogAttrs(context.Background(), slog.LevelInfo, "request", attrs...)
}
