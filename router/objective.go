package router

import (
	"sync/atomic"

	"kvepp/internal/apibody"
)

// Objectives are the priorities of requests by the name of their objective. It is safe for concurrent use. A nil one
// has none.
//
// Source: InferenceObjective, groups llm-d.ai and inference.networking.x-k8s.io, v1alpha2.
type Objectives struct {
	priorities atomic.Pointer[map[string]int32]
}

// Set puts priorities in place of those before; it must not be changed afterwards. Above 0 goes before all of a lower
// one; below 0 the request may be turned away instead of waiting.
func (o *Objectives) Set(priorities map[string]int32) { o.priorities.Store(&priorities) }

// of returns the priority of an objective; 0 for one that is not known.
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

// lift gives a request the priority of its objective, unless it says one itself that is strict, and returns the
// objective's.
func (r *Router) lift(h *apibody.Hints) int32 {
	priority := r.cfg.Objectives.of(h.Objective)
	if priority > 0 && h.StrictPriority == 0 {
		h.StrictPriority = uint32(priority)
	}
	return priority
}
