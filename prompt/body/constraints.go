package body

import (
	"fmt"
	"math"
	"slices"

	"kvepp/prompt/values"
)

// Constraints are the taints that a request requires or prefers of its workers, from nvext.routing_constraints. The
// zero value sets none.
//
// Source: dynamo-llm 1.6.1, protocols/common/extensions (RoutingConstraints).
type Constraints struct {
	Required  []string           // taints that the workers must have
	Preferred map[string]float32 // weights of taints: workers with the taint are preferred above 0, avoided below 0
}

// Given reports whether the request sets any constraint.
func (c *Constraints) Given() bool { return len(c.Required)+len(c.Preferred) > 0 }

const constraintsKey = "nvext.routing_constraints"

// maxTaints and maxTaintBytes bound the taints of a request, which are compared with those of every worker.
const (
	maxTaints     = 64 // of each kind
	maxTaintBytes = 512
)

// readConstraints reads the constraints in nvext. Any mistake in them is an *Error, so that a typing error cannot route
// a request to an unwanted worker.
func readConstraints(nvext *values.Dict) (c Constraints, err error) {
	v, _ := nvext.Get("routing_constraints")
	object, ok := v.(*values.Dict)
	if v == nil {
		return c, nil
	}
	if !ok {
		return c, wrongType(constraintsKey, "an object")
	}
	for key, v := range object.All() {
		switch key {
		case "required_taints":
			c.Required, err = requiredTaints(constraintsKey+".required_taints", v)
		case "preferred_taints":
			c.Preferred, err = preferredTaints(constraintsKey+".preferred_taints", v)
		default:
			err = &Error{Code: CodeInvalidValue, Param: constraintsKey,
				Message: fmt.Sprintf("'%s' has no field %.64q; its fields are required_taints and preferred_taints.",
					constraintsKey, key)}
		}
		if err != nil {
			return Constraints{}, err
		}
	}
	return c, nil
}

func requiredTaints(path string, v any) (taints []string, err error) {
	list, ok := v.(*values.List)
	if !ok {
		return nil, wrongType(path, "a list of taints, as in [\"gpu\"]")
	}
	if len(list.Items) > maxTaints {
		return nil, tooManyTaints(path)
	}
	for i, item := range list.Items {
		taint, ok := item.(string)
		if !ok {
			return nil, wrongType(fmt.Sprintf("%s[%d]", path, i), "a string")
		}
		if len(taint) > maxTaintBytes {
			return nil, longTaint(path)
		}
		if !slices.Contains(taints, taint) {
			taints = append(taints, taint)
		}
	}
	return taints, nil
}

func preferredTaints(path string, v any) (map[string]float32, error) {
	object, ok := v.(*values.Dict)
	if !ok {
		return nil, wrongType(path, "an object of taints and their weights, as in {\"gpu\": 0.5}")
	}
	taints := map[string]float32{}
	for key, v := range object.All() {
		taint, ok := key.(string)
		if !ok || len(taint) > maxTaintBytes {
			return nil, longTaint(path)
		}
		if len(taints) == maxTaints {
			return nil, tooManyTaints(path)
		}
		weight, ok := number(v)
		if !ok || !(math.Abs(weight) <= math.MaxFloat32) { // written so that NaN fails too
			return nil, wrongType(path+"."+taint, "a number that fits single precision")
		}
		taints[taint] = float32(weight)
	}
	return taints, nil
}

func tooManyTaints(path string) *Error {
	return &Error{
		Code:    CodeInvalidValue,
		Param:   path,
		Message: fmt.Sprintf("'%s' names more than %d taints.", path, maxTaints),
	}
}

func longTaint(path string) *Error {
	return &Error{
		Code:    CodeInvalidValue,
		Param:   path,
		Message: fmt.Sprintf("'%s' has a taint of more than %d bytes.", path, maxTaintBytes),
	}
}
