package router

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"kvepp/pool"
	"kvepp/scoring"
)

// ErrOverloaded says that there are endpoints for the request, and that each of them is above a busy threshold.
var ErrOverloaded = errors.New("every endpoint that may take this request is overloaded; try again later")

// Thresholds say above which load a worker is overloaded, and no candidate until it is below again. Each may be nil:
// then it is not looked at. An endpoint with several data-parallel ranks is overloaded when all of them are.
//
// Source: dynamo-llm 1.6.1, discovery::worker_monitor.
type Thresholds struct {
	// ActiveDecodeBlocks is a part of the worker's KV blocks, 0 to 1: overloaded when active requests hold more, by the
	// book or by the engine's own account (Config.KVUsage). The book's part is not known of workers whose number of
	// blocks is not.
	ActiveDecodeBlocks *float64
	// ActivePrefillTokens is a number of prompt tokens: overloaded when more wait to be prefilled.
	ActivePrefillTokens *uint64
	// ActivePrefillTokensFrac is the same in multiples of the tokens that the engine takes in one step
	// (pool.Endpoint.MaxNumBatchedTokens). Without effect on workers of which that is not known.
	ActivePrefillTokensFrac *float64
}

// Validate says which threshold is out of range, by Dynamo's names of them.
func (t *Thresholds) Validate() error {
	// The comparisons are also false for NaN.
	if v := t.ActiveDecodeBlocks; v != nil && !(*v >= 0 && *v <= 1) {
		return fmt.Errorf("active_decode_blocks_threshold must be between 0.0 and 1.0, got %v", *v)
	}
	if v := t.ActivePrefillTokensFrac; v != nil && !(*v >= 0 && *v <= math.MaxFloat64) {
		return fmt.Errorf(
			"active_prefill_tokens_threshold_frac must be a finite value greater than or equal to 0.0, got %v",
			*v,
		)
	}
	return nil
}

// None reports whether no threshold is set.
func (t *Thresholds) None() bool {
	return t.ActiveDecodeBlocks == nil && t.ActivePrefillTokens == nil && t.ActivePrefillTokensFrac == nil
}

// exceeded reports whether one rank of e with that load is above any threshold. usage is the part of its KV blocks that
// its engine says are held.
func (t *Thresholds) exceeded(e *pool.Endpoint, load *scoring.Load, usage float64) bool {
	prefill := float64(load.PrefillTokens)
	switch {
	case t.ActivePrefillTokens != nil && load.PrefillTokens > 0 && uint64(load.PrefillTokens) > *t.ActivePrefillTokens:
		return true
	case t.ActivePrefillTokensFrac != nil && prefill > *t.ActivePrefillTokensFrac*float64(e.BatchedTokens()):
		return true
	}
	return t.ActiveDecodeBlocks != nil && (usage > *t.ActiveDecodeBlocks ||
		e.TotalKVBlocks > 0 && float64(load.ActiveBlocks) > *t.ActiveDecodeBlocks*float64(e.TotalKVBlocks))
}

// thresholds are those of all models. They change at run time.
type thresholds struct {
	changing sync.Mutex
	// current is replaced whole; nil while none is set, so that then nothing is computed.
	current atomic.Pointer[thresholdTable]
}

// thresholdTable does not change.
type thresholdTable struct {
	fallback Thresholds // of models that have none of their own
	byModel  map[string]Thresholds
	blocks   bool // any of them looks at KV blocks
}

func (t *thresholdTable) of(model string) Thresholds {
	if t == nil {
		return Thresholds{}
	}
	if own, ok := t.byModel[model]; ok {
		return own
	}
	return t.fallback
}

func (t *thresholds) start(fallback Thresholds) {
	if !fallback.None() {
		t.current.Store(&thresholdTable{fallback: fallback, blocks: fallback.ActiveDecodeBlocks != nil})
	}
}

// Models returns the names of the models that are configured or that an endpoint says it serves, sorted.
func (r *Router) Models() []string {
	names := r.cfg.modelNames()
	s := r.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		if m := s.Workers[i].Model; m != "" {
			names[m] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// Thresholds returns the busy thresholds of a model's workers.
func (r *Router) Thresholds(model string) Thresholds { return r.thresholds.current.Load().of(model) }

// SetThresholds changes the thresholds that are given, and returns all of the model's; false, and nothing is changed,
// if it is none of [Router.Models].
func (r *Router) SetThresholds(model string, given Thresholds) (Thresholds, bool) {
	if !slices.Contains(r.Models(), model) {
		return Thresholds{}, false
	}
	t := &r.thresholds
	t.changing.Lock()
	defer t.changing.Unlock()
	now := t.current.Load()
	next := &thresholdTable{byModel: map[string]Thresholds{}}
	if now != nil {
		next.fallback, next.blocks = now.fallback, now.blocks
		maps.Copy(next.byModel, now.byModel)
	}
	own := now.of(model)
	if given.ActiveDecodeBlocks != nil {
		own.ActiveDecodeBlocks = given.ActiveDecodeBlocks
	}
	if given.ActivePrefillTokens != nil {
		own.ActivePrefillTokens = given.ActivePrefillTokens
	}
	if given.ActivePrefillTokensFrac != nil {
		own.ActivePrefillTokensFrac = given.ActivePrefillTokensFrac
	}
	next.byModel[model] = own
	next.blocks = next.blocks || own.ActiveDecodeBlocks != nil // once set, none is ever taken back
	t.current.Store(next)
	return own, true
}

// overloaded says of each worker of the snapshot whether it is overloaded; nil: no threshold is set, and none is.
// Workers that do not say which model they serve have the thresholds of model. The result is d's, until the next call,
// and d.version what it was made by.
func (r *Router) overloaded(d *decision, s *pool.Snapshot, model string) []bool {
	table := r.thresholds.current.Load()
	if d.version = 0; table == nil {
		return nil
	}
	d.loads, d.version = r.book.LoadsAndVersion(d.loads[:0])
	d.usage = d.usage[:0]
	if r.cfg.KVUsage != nil && table.blocks {
		d.usage = r.cfg.KVUsage(d.usage)
	}
	d.overloaded = d.overloaded[:0]
	for from := 0; from < len(s.Workers); {
		e := s.Workers[from].Endpoint
		name := e.Model
		if name == "" {
			name = model
		}
		limits, all, to := table.of(name), true, from
		for ; to < len(s.Workers) && s.Workers[to].Endpoint == e; to++ { // the ranks of an endpoint follow one another
			usage := 0.0
			if w := int(s.Workers[to].Worker); w < len(d.usage) {
				usage = d.usage[w]
			}
			all = all && limits.exceeded(e, loadOf(d.loads, &s.Workers[to]), usage)
		}
		for ; from < to; from++ {
			d.overloaded = append(d.overloaded, all)
		}
	}
	return d.overloaded
}

// loadOf returns a worker's load in a list indexed by worker number, beyond whose end nothing is carried.
func loadOf(loads []scoring.Load, w *pool.Worker) *scoring.Load {
	if int(w.Worker) < len(loads) {
		return &loads[w.Worker]
	}
	return &noLoad
}

var noLoad scoring.Load // never written to

// Overloaded returns how many workers are above a busy threshold now.
func (r *Router) Overloaded() int {
	d := r.scratch.Get().(*decision)
	defer r.scratch.Put(d)
	s := r.pool.Acquire()
	defer s.Release()
	n := 0
	for _, o := range r.overloaded(d, s, "") {
		if o {
			n++
		}
	}
	return n
}
