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

// A model whose name in kvepp's flags differs from the one in requests looks like one without a tokenizer: every
// request is routed by load. So kvepp compares the names once there was some traffic.
const (
	judgeRequests = 100
	judgeAfter    = 5 * time.Minute

	// maxListedNames and maxListedName bound what is kept and logged of names that clients choose, the latter in bytes.
	maxListedNames = 10
	maxListedName  = 64
)

// modelUse finds the operator's models that no request names. It is safe for concurrent use.
type modelUse struct {
	judged atomic.Bool // there is nothing more to do

	mu       sync.Mutex      // guards what follows
	unused   map[string]bool // the operator's models that no request named so far
	requests int
	first    time.Time      // of requests
	others   map[string]int // requests by the name of another model; at most maxListedNames
	unlisted int            // requests for other names than these
}

func newModelUse(named map[string]bool) *modelUse {
	u := &modelUse{unused: maps.Clone(named), others: map[string]int{}}
	u.judged.Store(len(named) == 0)
	return u
}

// request counts a request for a model, and the adapter of it if that is not "". It returns true for the one request
// after which unused models are to be told of.
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

// tellUnused logs the models that no request has named, one line each. served are the names that workers say they
// serve.
func (u *modelUse) tellUnused(served []string, log *slog.Logger) {
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
			strings.Join(served, ", "),
		)
	}
}

// servedModels returns the names of models that workers say they serve, the first few in alphabetical order.
func (r *Router) servedModels() []string {
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
