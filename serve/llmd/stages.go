package llmd

import (
	"cmp"
	"math"
	"slices"

	"kvepp/pool"
	"kvepp/scoring"
)

// requirement reports whether a Pod's labels are as a plugin wants them.
type requirement func(labels map[string]string) bool

// oneOf requires that a label has one of the values; with absent, or that there is no such label.
func oneOf(key string, absent bool, values ...string) requirement {
	return func(labels map[string]string) bool {
		value, there := labels[key]
		return there && slices.Contains(values, value) || !there && absent
	}
}

func every(all []requirement) requirement {
	return func(labels map[string]string) bool {
		return !slices.ContainsFunc(all, func(r requirement) bool { return !r(labels) })
	}
}

const roleLabel = "llm-d.ai/role"

// prefills and decodes are met by Pods that may prefill, and decode, by llm-d's label of a Pod's role; with absent, or
// without the label.
func prefills(absent bool) requirement {
	return oneOf(roleLabel, absent, "encode-prefill", "prefill", "prefill-decode", "encode-prefill-decode", "both")
}

func decodes(absent bool) requirement {
	return oneOf(roleLabel, absent, "decode", "prefill-decode", "encode-prefill-decode", "both")
}

func require(r requirement) func(*translation, *Row) {
	return func(_ *translation, row *Row) { row.of.limit = r }
}

func requireLabels(_ *translation, row *Row) {
	var all []requirement
	for key, v := range row.at("matchLabels").keys() {
		all = append(all, oneOf(key, false, v.text()))
	}
	for _, e := range row.at("matchExpressions").list() {
		key, operator, values := e.at("key").text(), e.at("operator").text(), e.at("values").texts()
		if !slices.Contains([]string{"In", "NotIn", "Exists", "DoesNotExist"}, operator) {
			row.refuse("operator %q: must be In, NotIn, Exists or DoesNotExist", operator)
		}
		all = append(all, func(labels map[string]string) bool {
			value, there := labels[key]
			is := there && (operator == "Exists" || operator == "DoesNotExist" || slices.Contains(values, value))
			return is == (operator == "In" || operator == "Exists")
		})
	}
	row.of.limit = every(all)
}

func requireLabel(_ *translation, row *Row) {
	row.of.limit = oneOf(row.at("label").text(), row.at("allowsNoLabel").yes(false), row.at("validValues").texts()...)
}

// requirement returns what a profile requires of Pods, and whether it does.
func (t *translation) requirement(profile string) (r requirement, limited bool) {
	var all []requirement
	for _, p := range t.profiles[profile] {
		if p.limit != nil {
			all = append(all, p.limit)
		}
	}
	return every(all), len(all) > 0
}

// splitStages follows the handler of prefill and decode.
func splitStages(t *translation, row *Row) {
	for key := range row.of.parameters.keys() {
		isFlat := key != "stageOrder" && key != "profiles" && key != "deciders"
		if isFlat && (row.at("profiles") != nil || row.at("deciders") != nil) {
			row.refuse("%s beside profiles or deciders: give one of the two forms", key)
			return
		}
	}
	t.split = row
	row.set("--prefiller-header=true")
	decider := t.named(row.first("deciders.prefill", "prefillDeciderPluginName", "deciderPluginName"))
	order := row.at("stageOrder").text()
	switch {
	case row.first("deciders.encode", "encodeDeciderPluginName") != "":
		row.refuse("%s: remove the encode decider", sayNoEncode)
	case order == "prefill-first" && decider != nil:
		row.refuse("stageOrder prefill-first: takes no prefill decider")
	case order == "prefill-first":
		row.approximate("kvepp chooses both workers in one step")
	case order != "" && order != "decode-first":
		row.refuse("stageOrder %q: must be decode-first or prefill-first", order)
	case decider == nil && row.Type != "pd-profile-handler":
		t.settings.NoPrefill = true
		row.Says = "without a prefill decider no request has a prefill worker"
	case decider != nil && decider.kind == "prefix-based-pd-decider":
		uncached := decider.parameters.at("nonCachedTokens").number(0)
		t.prefixes, t.settings.NoPrefill = true, uncached == 0
		t.settings.Disaggregation = scoring.Disaggregation{On: uncached > 0, Policy: scoring.ISLBounding,
			EffISL: uncached, EffISLRatio: math.Inf(1), LeastPrompt: decider.parameters.at("promptTokens").number(0)}
	}
}

// first returns the first parameter that is given as a text; "" if none is.
func (r *Row) first(keys ...string) (text string) {
	for _, key := range keys {
		text = cmp.Or(text, r.at(key).text())
	}
	return text
}

// roleOf returns the role of what meets the requirements of both stages, or of one, and whether it is an endpoint.
func roleOf(prefill, decode requirement) func(labels map[string]string) (pool.Role, bool) {
	return func(labels map[string]string) (pool.Role, bool) {
		switch takes := decode(labels); {
		case !prefill(labels):
			return pool.Decode, takes
		case takes:
			return pool.Aggregated, true
		default:
			return pool.Prefill, true
		}
	}
}

// stages says which Pods are endpoints, and for which stage.
func (t *translation) stages() {
	prefill, decode := t.profile, t.profile
	if t.settings.NoPrefill = t.settings.NoPrefill || t.split == nil; t.split != nil {
		prefill = cmp.Or(t.split.first("profiles.prefill", "prefillProfile"), "prefill")
		decode = cmp.Or(t.split.first("profiles.decode", "decodeProfile"), "decode")
	}
	p, limitsPrefill := t.requirement(prefill)
	d, limitsDecode := t.requirement(decode)
	if limitsPrefill || limitsDecode {
		t.settings.RoleOf = roleOf(p, d)
	}
}
