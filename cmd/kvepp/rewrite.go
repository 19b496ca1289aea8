package main

import (
	"fmt"
	"strings"

	"kvepp/modelrewrite"
)

// rewriteRules returns the rules of --model-rewrite, one for each name that requests give, in the order in which they
// come.
func (o *options) rewriteRules() ([]modelrewrite.Rule, error) {
	var rules []modelrewrite.Rule
	of := map[string]int{} // a name's place in rules
	for _, given := range o.modelRewrites {
		name, target, ok := strings.Cut(given, "=")
		if !ok || name == "" || target == "" {
			return nil, fmt.Errorf(
				"--model-rewrite %q: must look like NAME=TARGET, or *=TARGET for all other names",
				given,
			)
		}
		i, known := of[name]
		if !known {
			i = len(rules)
			of[name] = i
			rule := modelrewrite.Rule{Name: "flag"}
			if name != "*" {
				rule.Models = []string{name}
			}
			rules = append(rules, rule)
		}
		rules[i].Targets = append(rules[i].Targets, modelrewrite.Target{Model: target})
	}
	return rules, nil
}
