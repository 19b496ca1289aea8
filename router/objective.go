package router

import (
	"sync/atomic"

	"kvepp/prompt/body"
)

// Objectives maps objectives to the priorities of their requests. It is safe for concurrent use. A nil one is empty.
//
// Source: InferenceObjective, groups llm-d.ai and inference.networking.x-k8s.io, v1alpha2.
type Objectives struct {
	priorities atomic.Pointer[map[string]int32]
}

// Set replaces all priorities. The caller must not change the map afterwards. A request with a priority above 0 goes
// before all requests of lower priority. With one below 0 it may be refused instead of waiting.
func (o *Objectives) Set(priorities map[string]int32) { o.priorities.Store(&priorities) }

// of returns the priority of an objective; 0 for an unknown one.
func (o *Objectives) of(name string) int32 {
	if o == nil || name == "" {
		return 0
	}
	all := o.priorities.Load()
	if all == nil {
		return 0
	}
	return (*all)[name]
}

// lift gives a request the priority of its objective, unless the request has a strict priority of its own. It returns
// the objective's priority.
func (o *Objectives) lift(h *body.Hints) int32 {
	priority := o.of(h.Objective)
	if priority > 0 && h.StrictPriority == 0 {
		h.StrictPriority = uint32(priority)
	}
	return priority
}
