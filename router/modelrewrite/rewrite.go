// Package modelrewrite replaces the model that a request names by another.
//
// It owns the rules in force and the random draw among a rule's targets. It never reads or changes a body, and does not
// know where rules come from.
//
// Concurrency: Rules is safe for concurrent use.
package modelrewrite

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
)

// Rule sends the requests for some models to other models, under the others' names.
//
// Source: InferenceModelRewrite, groups llm-d.ai and inference.networking.x-k8s.io, v1alpha2.
type Rule struct {
	// Name says where the rule comes from, for a metric: the name of an object or of a flag.
	Name string
	// Models are the names that requests give. nil: all names that no other rule has.
	Models []string
	// Targets are the models to draw from; at least one.
	Targets []Target
}

// Target is a model that a Rule sends requests to.
type Target struct {
	Model string
	// Weight is the target's share of the requests, relative to the other targets of its rule, 0 to 1,000,000. If all
	// are 0, the shares are equal.
	Weight int
}

// maxWeight is the largest weight. Source: InferenceModelRewrite's schema.
const maxWeight = 1_000_000

// Check refuses a rule without targets, an empty name, and a weight out of range.
func (r *Rule) Check() error {
	if len(r.Targets) == 0 {
		return errors.New("no target: a rule needs at least one")
	}
	for _, t := range r.Targets {
		switch {
		case t.Model == "":
			return errors.New("a target needs a model's name")
		case t.Weight < 0 || t.Weight > maxWeight:
			return fmt.Errorf("the weight of %q is %d; it must be 0 to %d", t.Model, t.Weight, maxWeight)
		}
	}
	for _, model := range r.Models {
		if model == "" {
			return errors.New("an empty name matches no request")
		}
	}
	return nil
}

// Label returns the model's name for a metric's label: a name in a rule, never one that only a client gave.
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

// Rules are the rules in force. A nil Rules has none.
type Rules struct{ now atomic.Pointer[table] }

type table struct {
	named map[string]*Rule
	other *Rule // for all other names; nil: they stay
}

// Set replaces all rules. The caller must not change them afterwards. If several rules have a model, the first holds;
// the same goes for several rules without models. Errors: of Check; then nothing changes.
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

// Of returns the rule for a model, and a target drawn for one request. nil: the name stays.
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
