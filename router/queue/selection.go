package queue

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"kvepp/internal/suggest"
)

const (
	// builtIn is the instance of worker_selection that every file has: the policy of costs, with the flags' weights.
	builtIn = "default"
	// costFunction is the type of Dynamo's policy of costs with weights of its own, the only type that kvepp has.
	costFunction = "dynamo-default-cost-fn"
)

// stages are the kinds of workers that worker_selection names an instance for. kvepp sends no request to an encode
// worker, so that the last one changes nothing.
var stages = []string{"aggregated", "prefill", "decode", "encode"}

// Selection is the section "worker_selection" of a policy file: by which weights workers are priced.
//
// Source: dynamo-kv-router 1.6.1, plugins::worker_selection::config.
type Selection struct {
	selects   map[string]string // by stage: the name of an instance
	lines     map[string]int    // by stage
	instances map[string]instance
}

// instance is a policy with its parameters.
type instance struct {
	policyType string
	parameters []Setting
	line       int
}

// Parameters returns the weights of the instances that are selected for aggregated, prefill and decode workers, in the
// file's order; none for the instance "default", which has the flags' weights. by, if it is not empty, takes the place
// of the instances that the file selects. s may be nil.
//
// Errors: an instance that the file does not have, a policy that kvepp does not have, or stages with different weights,
// because kvepp has one set for all workers.
func (s *Selection) Parameters(by string) ([]Setting, error) {
	if s == nil {
		s = &Selection{}
	}
	names := map[string]string{"aggregated": cmp.Or(by, s.selects["aggregated"]),
		"prefill": cmp.Or(by, s.selects["prefill"]),
		"decode":  cmp.Or(by, s.selects["decode"])}
	var used []string // the stages that decide
	if names["aggregated"] != "" {
		used = append(used, "aggregated")
	}
	if names["prefill"] != "" || names["decode"] != "" { // these go together: a request takes one of each
		used = append(used, "prefill", "decode")
	}
	var common []Setting
	for i, stage := range used {
		own, err := s.parametersOf(cmp.Or(names[stage], builtIn))
		switch {
		case err != nil && s.lines[stage] > 0 && names[stage] == s.selects[stage]:
			return nil, fmt.Errorf("line %d: %s: %w", s.lines[stage], stage, err)
		case err != nil:
			return nil, fmt.Errorf("policy of %s workers: %w", stage, err)
		case i == 0:
			common = own
		case !slices.EqualFunc(common, own, func(a, b Setting) bool { return a.Key == b.Key && a.Value == b.Value }):
			return nil, fmt.Errorf("%s and %s select different weights, %q and %q, but kvepp has one set for all "+
				"workers: select the same instance for both", used[0], stage,
				cmp.Or(names[used[0]], builtIn), cmp.Or(names[stage], builtIn))
		}
	}
	return common, nil
}

// parametersOf returns the parameters of an instance, sorted by key.
func (s *Selection) parametersOf(name string) ([]Setting, error) {
	if name == builtIn {
		return nil, nil
	}
	own, there := s.instances[name]
	switch {
	case !there:
		known := []string{builtIn}
		for other := range s.instances {
			known = append(known, other)
		}
		slices.Sort(known[1:])
		return nil, fmt.Errorf("%q is no instance of worker_selection in a policy file, which has: %s; kvepp loads "+
			"no other policies%s", name, strings.Join(known, ", "), suggest.DidYouMean(name, "", known))
	case own.policyType != costFunction:
		return nil, fmt.Errorf("instance %q (line %d) has the type %s, which kvepp does not have: it prices workers "+
			"by %s only; select that, or default", name, own.line, own.policyType, costFunction)
	}
	return own.parameters, nil
}

// selection reads worker_selection.
func (r *reader) selection(n *yaml.Node) (*Selection, error) {
	o, err := r.mapping(n, "worker_selection", append(slices.Clone(stages), "instances"))
	if err != nil {
		return nil, err
	}
	if len(o.values) == 0 {
		return nil, wrong(o.node, "worker_selection: must have instances, or one of: %s", strings.Join(stages, ", "))
	}
	s := &Selection{selects: map[string]string{}, lines: map[string]int{}, instances: map[string]instance{}}
	if list := o.values["instances"]; list != nil {
		if list.Kind != yaml.SequenceNode {
			return nil, wrong(list, "instances: must be a list")
		}
		for _, n := range list.Content {
			if err := r.instance(n, s); err != nil {
				return nil, err
			}
		}
	}
	for _, stage := range stages {
		v := o.values[stage]
		if v == nil {
			continue
		}
		if v.Kind != yaml.ScalarNode {
			return nil, wrong(v, "%s: must be the name of an instance, for example %s: default", stage, stage)
		}
		if _, there := s.instances[v.Value]; !there && v.Value != builtIn {
			_, err := s.parametersOf(v.Value)
			return nil, wrong(v, "%s: %v", stage, err)
		}
		s.selects[stage], s.lines[stage] = v.Value, v.Line
	}
	if len(s.selects) == 0 && len(s.instances) == 0 {
		return nil, wrong(o.node, "worker_selection: must have instances, or one of: %s", strings.Join(stages, ", "))
	}
	return s, nil
}

// instance reads one of instances into s.
func (r *reader) instance(n *yaml.Node, s *Selection) error {
	o, err := r.mapping(n, "an instance of worker_selection", []string{"name", "type", "parameters"})
	if err != nil {
		return err
	}
	name, err := o.identifier("name")
	if err != nil {
		return err
	}
	own := instance{line: o.node.Line}
	if own.policyType, err = o.identifier("type"); err != nil {
		return err
	}
	switch other, twice := s.instances[name]; {
	case name == "":
		return o.absent("name")
	case own.policyType == "":
		return o.absent("type")
	case name == builtIn:
		return wrong(o.node, "name \"default\": is the policy of costs with the flags' weights; choose another name")
	case twice:
		return wrong(o.node, "instance %s is in line %d already", strconv.Quote(name), other.line)
	}
	if v := o.values["parameters"]; v != nil {
		if own.parameters, err = r.settings(v, "parameters", ""); err != nil {
			return err
		}
		slices.SortFunc(own.parameters, func(a, b Setting) int { return strings.Compare(a.Key, b.Key) })
	}
	s.instances[name] = own
	return nil
}

// settings reads a mapping of keys to single values. null stands for YAML's null; empty: such keys are left out.
func (r *reader) settings(n *yaml.Node, what, null string) ([]Setting, error) {
	keys, values, err := r.pairs(n, what)
	if err != nil {
		return nil, err
	}
	var all []Setting
	for i, key := range keys {
		value := resolve(values[i])
		if value.Kind != yaml.ScalarNode {
			return nil, wrong(value, "%s: must be one value", key.Value)
		}
		text := value.Value
		if value.Tag == "!!null" {
			text = null
		}
		if value.Tag != "!!null" || null != "" {
			all = append(all, Setting{Key: key.Value, Value: text, Line: key.Line})
		}
	}
	return all, nil
}
