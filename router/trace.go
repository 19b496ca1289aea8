package router

import (
	"strconv"
	"time"

	"kvepp/internal/tracing"
	"kvepp/scoring"
)

// Names of spans. The root has the name that the Gateway API's endpoint picker uses; its spans of plug-ins have no
// equivalent here. Source: Gateway API Inference Extension 1.5.
const (
	spanRoute    = "gateway.request_orchestration"
	spanParse    = "kvepp.parse"
	spanTokenize = "kvepp.tokenize"
	spanHash     = "kvepp.hash"
	spanLookUp   = "kvepp.lookup"
	spanQueue    = "kvepp.queue"
	spanChoose   = "kvepp.choose"
)

// traceRoute sets the span's attributes by the decision. route is nil for a refused request. No attribute has anything
// of the prompt.
func traceRoute(span *tracing.Span, p *prepared, route *Route) {
	if span == nil {
		return
	}
	span.Set(tracing.Text("gen_ai.request.model", Clip(p.model)))
	if route == nil {
		return
	}
	overlap := 0
	if route.BlockSize > 0 {
		overlap = route.PredictedCachedTokens / route.BlockSize
	}
	span.Set(
		tracing.Text("kvepp.endpoint", route.Name),
		tracing.Text("kvepp.endpoint.address", route.Address),
		tracing.Text("kvepp.worker", workerID(route.InstanceID, route.Rank)),
		tracing.Text("kvepp.reason", string(route.Reason)),
		tracing.Int("kvepp.prompt_tokens", route.PromptTokens),
		tracing.Int("kvepp.predicted_cached_tokens", route.PredictedCachedTokens),
		tracing.Int("kvepp.overlap_blocks", overlap),
	)
	if x := route.Prefill; x != nil {
		span.Set(
			tracing.Text("kvepp.prefill.endpoint", x.Name),
			tracing.Text("kvepp.prefill.worker", workerID(x.InstanceID, x.Rank)),
		)
	}
	if route.Session != "" {
		span.Set(tracing.Text("kvepp.session", route.Session))
	}
}

// workerID returns a worker's name in Dynamo: instance id and rank.
func workerID(instance uint64, rank uint32) string {
	return strconv.FormatUint(instance, 10) + "/" + strconv.FormatUint(uint64(rank), 10)
}

// traceChoice adds a span for one leg's choice.
func traceChoice(span *tracing.Span, from, to time.Time, l *leg, sel scoring.Selection) {
	w, c := &l.workers[sel.Index], &l.candidates[sel.Index]
	span.Phase(spanChoose, from, to,
		tracing.Int("kvepp.candidates", len(l.candidates)),
		tracing.Text("kvepp.endpoint", w.Name),
		tracing.Text("kvepp.worker", workerID(w.InstanceID, w.Rank)),
		tracing.Int("kvepp.overlap_blocks", cachedBlocks(c)),
		tracing.Float("kvepp.cost", sel.Cost),
	)
}

// blocks counts the blocks of all prompts.
func (v *variant) blocks() (n int) {
	for _, chain := range v.prompt.Chains {
		n += len(chain)
	}
	return n
}

// best returns the most blocks that a worker holds on its device.
func (v *variant) best() (most int) {
	for _, o := range v.overlap {
		most = max(most, int(o.device))
	}
	return most
}
