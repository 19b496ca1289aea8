package llmd

import (
	"cmp"
	"time"

	"kvepp/router/queue"
)

// forever is the longest wait for an endpoint if the configuration sets none.
const forever = 365 * 24 * time.Hour

// flowControl translates the bands of the queue, with the feature gate.
func (t *translation) flowControl() {
	f := t.at("flowControl")
	row := t.add("flowControl", "", Approximated, "requests wait in kvepp's queue, in bands of their priorities; its "+
		"gate reads kvepp's own bookings, not scraped metrics")
	for _, r := range t.rows { // of plugins that are used otherwise than as the gate
		if r.Says == sayGateOff {
			r.Verdict, r.Says = Maps, "the queue: see flowControl"
		}
	}
	ttl := f.at("defaultRequestTTL").wait(time.Minute)
	b := &queue.Bands{MaxRequests: f.at("maxRequests").quantity(), MaxBytes: f.at("maxBytes").quantity(),
		MaxWait: cmp.Or(f.at("noEndpointRequestTTL").wait(ttl), forever), ByPriority: map[int]queue.Band{}}
	orders := map[string]queue.Policy{"slo-deadline-ordering-policy": queue.EDF}
	band := func(v *value) queue.Band {
		return queue.Band{
			Policy:      orders[t.kindOf(v, "orderingPolicyRef")],
			Fair:        t.kindOf(v, "fairnessPolicyRef") == "round-robin-fairness-policy",
			MaxRequests: cmp.Or(v.at("maxRequests").quantity(), 5000), // llm-d's default, as the next
			MaxBytes:    cmp.Or(v.at("maxBytes").quantity(), 1_000_000_000),
			Timeout:     v.at("defaultRequestTTL").wait(ttl),
		}
	}
	bands := append(f.at("priorityBands").list(), f.at("defaultPriorityBand"), f.at("defaultNegativePriorityBand"))
	for _, v := range bands {
		if kind := t.kindOf(v, "fairnessPolicyRef"); kind == "program-aware-fairness" {
			row.refuse("%s: kvepp does not weigh programs; take round-robin-fairness-policy", kind)
			return
		}
	}
	for _, v := range f.at("priorityBands").list() {
		b.ByPriority[v.at("priority").number(0)] = band(v)
	}
	b.Default, b.Negative = band(f.at("defaultPriorityBand")), band(f.at("defaultNegativePriorityBand"))
	b.Gate = t.gate(t.named(cmp.Or(f.at("saturationDetector.pluginRef"),
		t.at("saturationDetector.pluginRef")).text()))
	b.Gate.Ceiling = 1
	switch usage := t.kindOf(f, "usageLimitPolicyPluginRef"); usage {
	case "", "static-usage-limit-policy":
		if p := t.named(f.at("usageLimitPolicyPluginRef").text()); p != nil {
			b.Gate.Ceiling = p.parameters.at("threshold").float(1)
		}
	default:
		row.refuse("%s: kvepp holds no capacity back for higher bands", usage)
		return
	}
	if f.at("enableEviction").yes(false) {
		row.approximate("running requests are not ended for waiting ones (enableEviction)")
	}
	t.settings.Bands = b
}

// kindOf returns the type of the plugin that a key names; empty: none.
func (t *translation) kindOf(v *value, key string) string {
	name := v.at(key).text()
	if p := t.named(name); p != nil {
		return p.kind
	}
	return name
}

// gate returns the gate of a saturation detector. nil: llm-d's default.
func (t *translation) gate(p *plugin) (g queue.Gate) {
	kind, at := "utilization-detector", (*value)(nil).at
	if p != nil {
		kind, at = p.kind, p.parameters.at
	}
	switch mode := at("concurrencyMode").text(); kind {
	case "utilization-detector":
		g.Steps, g.Usage = at("queueDepthThreshold").float(5), at("kvCacheUtilThreshold").float(.8)
	case "concurrency-detector":
		if mode != "tokens" {
			g.Requests = at("maxConcurrency").number(100)
		}
		if mode == "tokens" || mode == "hybrid" {
			g.Tokens = at("maxTokenConcurrency").number(1_000_000)
		}
	case "max-saturation-detector":
		for _, name := range at("detectors").texts() {
			if other := t.gate(t.named(name)); name != p.name {
				g = queue.Gate{Requests: cmp.Or(g.Requests, other.Requests), Tokens: cmp.Or(g.Tokens, other.Tokens),
					Steps: cmp.Or(g.Steps, other.Steps), Usage: cmp.Or(g.Usage, other.Usage)}
			}
		}
	}
	return g
}
