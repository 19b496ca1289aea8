// Package rewrite says to which model the requests for another go.
//
// It owns the rules in force and the draw among a rule's targets. It never reads a body or changes one, and does not
// know where rules come from. Rules may be used from any goroutine.
package modelrewrite

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
)

// Rule sends the requests for a model to others, under the names of these.
//
// Source: InferenceModelRewrite, groups llm-d.ai and inference.networking.x-k8s.io, v1alpha2.
type Rule struct {
	// Name says where the rule is from, for a metric: the name of the object, or of the flag.
	Name string
	// Models are the names that requests give. nil: whatever they give that no other rule names.
	Models []string
	// Targets are drawn from; one at least.
	Targets []Target
}

// Target is a model that a Rule leads to.
type Target struct {
	Model string
	// Weight is the target's part of the requests, among the targets of its rule: up to a million. All 0: the same for
	// each.
	Weight int
}

// maxWeight is the most that one target may weigh. Source: InferenceModelRewrite's schema.
const maxWeight = 1_000_000

// Check refuses a rule without targets, a name that is empty, and a weight below 0 or above a million.
func (r *Rule) Check() error {
	if len(r.Targets) == 0 {
		return errors.New("no target")
	}
	for _, t := range r.Targets {
		switch {
		case t.Model == "":
			return errors.New("a target without a model's name")
		case t.Weight < 0 || t.Weight > maxWeight:
			return fmt.Errorf("the weight of %q is %d; it goes from 0 to %d", t.Model, t.Weight, maxWeight)
		}
	}
	for _, model := range r.Models {
		if model == "" {
			return errors.New("an empty name matches no request")
		}
	}
	return nil
}

// Label returns the model's name for a metric: what the rule names, never what only a client does.
func (r *Rule) Label(model string) string {
	if r.Models == nil {
		return "other"
	}
	return model
}

func (r *Rule) draw() string {
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

// Rules are those in force. A nil one, and one that was never set, have none.
type Rules struct{ now atomic.Pointer[table] }

type table struct {
	named map[string]*Rule
	other *Rule // nil: other names stay
}

// Set puts rules in place of those before; they must not be changed afterwards. Of several that name one model the
// first holds, and so of several that name none. Errors: a rule that Check refuses; then nothing changes.
func (r *Rules) Set(rules []Rule) error {
	next := &table{named: map[string]*Rule{}}
	for i := range rules {
		rule := &rules[i]
		if err := rule.Check(); err != nil {
			return fmt.Errorf("rewrite: rule %q: %w", rule.Name, err)
		}
		if rule.Models == nil && next.other == nil {
			next.other = rule
		}
		for _, model := range rule.Models {
			if next.named[model] == nil {
				next.named[model] = rule
			}
		}
	}
	r.now.Store(next)
	return nil
}

// Of returns the rule for requests that name a model, and the target drawn for one of them; nil: the name stays.
func (r *Rules) Of(model string) (*Rule, string) {
	if r == nil {
		return nil, ""
	}
	now := r.now.Load()
	if now == nil {
		return nil, ""
	}
	rule := now.named[model]
	if rule == nil {
		rule = now.other
	}
	if rule == nil {
		return nil, ""
	}
	return rule, rule.draw()
}
