package router

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
)

// Rewrite sends the requests for a model to others, under the names of these.
//
// Source: InferenceModelRewrite, groups llm-d.ai and inference.networking.x-k8s.io, v1alpha2.
type Rewrite struct {
	// Name says where the rule is from, for a metric: the name of the object, or of the flag.
	Name string
	// Models are the names that requests give. nil: whatever they give that no other rule names.
	Models []string
	// Targets are drawn from.
	Targets []RewriteTarget
}

// RewriteTarget is a model that a Rewrite leads to.
type RewriteTarget struct {
	Model string
	// Weight is the target's part of the requests, among the targets of its rule. All 0: the same for each.
	Weight int
}

// Renamed is what a model is called on either side of a Rewrite.
type Renamed struct {
	Asked, Served string
	label         string // Asked, for metrics
}

// maxRewriteWeight is the most that one target may weigh. Source: InferenceModelRewrite's schema.
const maxRewriteWeight = 1_000_000

// Rewrites are the rules in force. It is safe for concurrent use. A nil one has none.
type Rewrites struct{ rules atomic.Pointer[rewriteRules] }

type rewriteRules struct {
	named map[string]*Rewrite
	other *Rewrite // nil: other names stay
}

// Set puts rules in place of those before; they must not be changed afterwards. Of several that name one model the first holds, and so of several that name none.
// Errors: a rule without targets, a target without a name, a weight below 0 or above a million; then nothing changes.
func (w *Rewrites) Set(rules []Rewrite) error {
	next := &rewriteRules{named: map[string]*Rewrite{}}
	for i := range rules {
		rule := &rules[i]
		if len(rule.Targets) == 0 {
			return fmt.Errorf("router: rewrite %q: no target", rule.Name)
		}
		for _, t := range rule.Targets {
			switch {
			case t.Model == "":
				return fmt.Errorf("router: rewrite %q: a target without a model's name", rule.Name)
			case t.Weight < 0 || t.Weight > maxRewriteWeight:
				return fmt.Errorf("router: rewrite %q: the weight of %q is %d; it goes from 0 to %d", rule.Name, t.Model, t.Weight, maxRewriteWeight)
			}
		}
		if rule.Models == nil && next.other == nil {
			next.other = rule
		}
		for _, model := range rule.Models {
			if model == "" {
				return errors.New("router: rewrite " + rule.Name + ": an empty name matches no request")
			}
			if next.named[model] == nil {
				next.named[model] = rule
			}
		}
	}
	w.rules.Store(next)
	return nil
}

// of returns the rule for a request and the model that it draws; nil: the name stays.
func (w *Rewrites) of(model string) (*Rewrite, string) {
	if w == nil {
		return nil, ""
	}
	rules := w.rules.Load()
	if rules == nil {
		return nil, ""
	}
	rule := rules.named[model]
	if rule == nil {
		rule = rules.other
	}
	if rule == nil {
		return nil, ""
	}
	return rule, rule.draw()
}

// label returns the model's name for a metric: what the rule names, never what only a client does.
func (r *Rewrite) label(model string) string {
	if r.Models == nil {
		return "other"
	}
	return model
}

func (r *Rewrite) draw() string {
	total := 0
	for _, t := range r.Targets {
		total += t.Weight
	}
	if total == 0 {
		return r.Targets[rand.IntN(len(r.Targets))].Model
	}
	at := rand.IntN(total)
	for _, t := range r.Targets {
		if at -= t.Weight; at < 0 {
			return t.Model
		}
	}
	return r.Targets[0].Model // not reached: the weights add up to total
}
