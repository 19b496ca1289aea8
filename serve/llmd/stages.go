package llmd

import (
	"cmp"
	"slices"
	"strings"
)

// Requirement is what a Pod's label must be.
type Requirement struct {
	terms []term
}

// term is one label's: its value must be one of values. absent: there may be no such label. not: the opposite of both.
type term struct {
	key         string
	values      []string // nil: any
	absent, not bool
}

// met reports whether labels meet the requirement.
func (r Requirement) met(labels map[string]string) bool {
	return !slices.ContainsFunc(r.terms, func(t term) bool {
		value, there := labels[t.key]
		ok := there && (t.values == nil || slices.Contains(t.values, value)) || !there && t.absent
		return ok == t.not
	})
}

func requireLabels(t *translation, p *plugin, row *Row) {
	var r Requirement
	if labels := p.parameters.at("matchLabels"); labels != nil {
		for key, v := range labels.keys {
			r.terms = append(r.terms, term{key: key, values: []string{v.text()}})
		}
	}
	for _, e := range p.parameters.at("matchExpressions").list() {
		x := term{key: e.at("key").text(), values: []string{}}
		for _, v := range e.at("values").list() {
			x.values = append(x.values, v.text())
		}
		switch operator := e.at("operator").text(); operator {
		case "In":
		case "NotIn": // labels that are absent are not in it either
			x.not = true
		case "Exists":
			x.values = nil
		case "DoesNotExist":
			x.values, x.not = nil, true
		default:
			row.refuse("operator %q: must be In, NotIn, Exists or DoesNotExist", operator)
		}
		r.terms = append(r.terms, x)
	}
	t.limits[p] = r
}

func requireLabel(t *translation, p *plugin, _ *Row) {
	at := p.parameters.at
	x := term{key: at("label").text(), values: []string{}, absent: at("allowsNoLabel").is(false)}
	for _, v := range at("validValues").list() {
		x.values = append(x.values, v.text())
	}
	t.limits[p] = Requirement{[]term{x}}
}

// roleLabel is llm-d's label of a Pod's role.
const roleLabel = "llm-d.ai/role"

// The values of roleLabel with which a Pod may prefill, and decode.
var (
	prefillRoles = []string{"encode-prefill", "prefill", "prefill-decode", "encode-prefill-decode", "both"}
	decodeRoles  = []string{"decode", "prefill-decode", "encode-prefill-decode", "both"}
)

// requireRole returns what requires one of roles; or, if absent is set, no role.
func requireRole(absent bool, roles []string) func(*translation, *plugin, *Row) {
	return func(t *translation, p *plugin, _ *Row) {
		t.limits[p] = Requirement{[]term{{key: roleLabel, values: roles, absent: absent}}}
	}
}

// requirement returns what a profile requires of Pods, and whether it does.
func (t *translation) requirement(name string) (all Requirement, limited bool) {
	for _, f := range t.profiles {
		if f.name != name {
			continue
		}
		for _, p := range f.plugins {
			if r, ok := t.limits[p]; ok {
				all.terms, limited = append(all.terms, r.terms...), true
			}
		}
	}
	return all, limited
}

// splitStages follows the handler of prefill and decode.
func splitStages(t *translation, p *plugin, row *Row) {
	at := p.parameters.at
	flat := []string{"decodeProfile", "prefillProfile", "encodeProfile", "deciderPluginName",
		"prefillDeciderPluginName", "encodeDeciderPluginName"}
	if i := slices.IndexFunc(flat, func(key string) bool { return at(key) != nil }); i >= 0 &&
		(at("profiles") != nil || at("deciders") != nil) {
		row.refuse("%s beside profiles or deciders: give one of the two forms", flat[i])
		return
	}
	t.split = p
	row.set("--prefiller-header=true")
	decider := cmp.Or(at("deciders.prefill").text(), at("prefillDeciderPluginName").text(),
		at("deciderPluginName").text())
	if cmp.Or(at("deciders.encode").text(), at("encodeDeciderPluginName").text()) != "" {
		row.refuse("kvepp chooses no encode workers: remove the encode decider")
		return
	}
	switch order := at("stageOrder").text(); {
	case order == "prefill-first" && decider != "":
		row.refuse("stageOrder prefill-first: takes no prefill decider")
		return
	case order == "prefill-first":
		row.approximate("kvepp chooses both workers in one step")
		return
	case order != "" && order != "decode-first":
		row.refuse("stageOrder %q: must be decode-first or prefill-first", order)
		return
	}
	d := t.named(decider)
	switch {
	case d == nil && p.kind == "pd-profile-handler":
	case d == nil:
		t.settings.NoPrefill = true
		row.Says = "without a prefill decider no request has a prefill worker"
	case d.kind == "prefix-based-pd-decider":
		t.settings.Disaggregate.NonCached = d.parameters.at("nonCachedTokens").number(0)
		t.settings.Disaggregate.Prompt = d.parameters.at("promptTokens").number(0)
		t.settings.NoPrefill = t.settings.Disaggregate.NonCached == 0
		t.prefix = max(t.prefix, assumed)
	}
}

// stages says which Pods are endpoints, and for which stage.
func (t *translation) stages() {
	if t.split == nil {
		t.settings.NoPrefill = true
		if r, limited := t.requirement(t.profiles[0].name); limited {
			t.settings.Stages = func(labels map[string]string) (bool, bool) { return r.met(labels), r.met(labels) }
		}
		return
	}
	at := t.split.parameters.at
	p, limitsPrefill := t.requirement(cmp.Or(at("profiles.prefill").text(), at("prefillProfile").text(), "prefill"))
	d, limitsDecode := t.requirement(cmp.Or(at("profiles.decode").text(), at("decodeProfile").text(), "decode"))
	if limitsPrefill || limitsDecode {
		t.settings.Stages = func(labels map[string]string) (bool, bool) { return p.met(labels), d.met(labels) }
	}
}

// Table returns the rows as lines of text.
func Table(rows []Row) string {
	var out strings.Builder
	for _, r := range rows {
		name := r.Name
		if r.Type != "" && r.Type != r.Name {
			name += " (" + r.Type + ")"
		}
		out.WriteString(name + ": " + string(r.Verdict))
		if len(r.Settings) > 0 {
			out.WriteString(" " + strings.Join(r.Settings, " "))
		}
		out.WriteString(": " + r.Says + "\n")
	}
	return out.String()
}
