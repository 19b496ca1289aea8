package router

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// If a model's name in kvepp's flags differs from the one in requests, it looks like a model without a tokenizer: every
// request is routed by load. So kvepp compares the names after some traffic.
const (
	judgeRequests = 100
	judgeAfter    = 5 * time.Minute

	// maxListedNames and maxListedName bound what is kept and logged of names that clients choose. The latter is in
	// bytes.
	maxListedNames = 10
	maxListedName  = 64
)

// modelUse finds the operator's models that no request names. It is safe for concurrent use.
type modelUse struct {
	judged atomic.Bool // nothing more is to be done

	mu       sync.Mutex      // guards all below
	unused   map[string]bool // the operator's models that no request has named yet
	requests int
	first    time.Time      // the first request's time
	others   map[string]int // requests by the name of a model; at most maxListedNames
	unlisted int            // requests for names that are not in others
}

func newModelUse(named map[string]bool) *modelUse {
	u := &modelUse{unused: maps.Clone(named), others: map[string]int{}}
	u.judged.Store(len(named) == 0)
	return u
}

// request counts a request for a model, and for its adapter if that is not "". It returns true once: for the request
// after which the unused models are logged.
func (u *modelUse) request(model, adapter string) bool {
	if u.judged.Load() {
		return false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.unused, model)
	delete(u.unused, adapter)
	if u.requests++; u.requests == 1 {
		u.first = time.Now()
	}
	name := cmp.Or(adapter, model)
	if len(name) > maxListedName {
		name = strings.ToValidUTF8(name[:maxListedName], "") + "..."
	}
	if _, listed := u.others[name]; listed || len(u.others) < maxListedNames {
		u.others[strings.Clone(name)]++
	} else {
		u.unlisted++
	}
	if len(u.unused) == 0 {
		u.judged.Store(true)
		return false
	}
	return (u.requests >= judgeRequests || time.Since(u.first) >= judgeAfter) && !u.judged.Swap(true)
}

// logUnused logs the models that no request has named, one line each. workers are the models that workers report.
func (u *modelUse) logUnused(workers []string, log *slog.Logger) {
	u.mu.Lock()
	unused := slices.Sorted(maps.Keys(u.unused))
	requested := make([]string, 0, len(u.others)+1)
	for _, name := range slices.Sorted(maps.Keys(u.others)) {
		requested = append(requested, fmt.Sprintf("%q: %d", name, u.others[name]))
	}
	if u.unlisted > 0 {
		requested = append(requested, fmt.Sprintf("others: %d", u.unlisted))
	}
	requests := u.requests
	u.mu.Unlock()
	for _, name := range unused {
		log.Warn(
			`no request has named a model of kvepp's flags. The name in --model, --lora or --tokenizer-url must be `+
				`the one in requests' "model"`,
			"model",
			name,
			"requests",
			requests,
			"requested",
			strings.Join(requested, ", "),
			"workers_serve",
			strings.Join(workers, ", "),
		)
	}
}

// served reports whether a worker serves a model of this name.
func (r *Router) served(name string) bool {
	s := r.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		if s.Workers[i].Model == name {
			return true
		}
	}
	return false
}

// workerModels returns the models that workers report, the first few in alphabetical order.
func (r *Router) workerModels() []string {
	s := r.pool.Acquire()
	defer s.Release()
	names := map[string]bool{}
	for i := range s.Workers {
		if model := s.Workers[i].Model; model != "" {
			names[model] = true
		}
	}
	all := slices.Sorted(maps.Keys(names))
	if len(all) > maxListedNames {
		return append(all[:maxListedNames], fmt.Sprintf("and %d more", len(all)-maxListedNames))
	}
	return all
}
