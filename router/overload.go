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
	"kvepp/router/queue"
	"kvepp/scoring"
)

// ErrOverloaded says that every endpoint that may take the request is above a busy threshold.
var ErrOverloaded = errors.New("every endpoint that may take this request is overloaded; try again later")

// Thresholds are the loads above which a worker is overloaded. An overloaded worker is no candidate until its load is
// below again. A nil threshold is off. An endpoint with several data-parallel ranks is overloaded when all of them are.
//
// Source: dynamo-llm 1.6.1, discovery::worker_monitor.
type Thresholds struct {
	// ActiveDecodeBlocks is a share of the worker's KV blocks, 0..1. The worker is overloaded if active requests hold
	// more, by the load book or by the engine's own report (Config.KVUsage). The book's share needs the worker's number
	// of KV blocks.
	ActiveDecodeBlocks *float64
	// ActivePrefillTokens is a number of prompt tokens. The worker is overloaded if more wait to be prefilled.
	ActivePrefillTokens *uint64
	// ActivePrefillTokensFrac is the same in multiples of the tokens that the engine takes in one step
	// (pool.Endpoint.MaxNumBatchedTokens). It has no effect on workers for which that is not known.
	ActivePrefillTokensFrac *float64
}

// Validate names the first threshold that is out of range, as Dynamo names it.
func (t *Thresholds) Validate() error {
	// The comparisons are also false for NaN.
	if v := t.ActiveDecodeBlocks; v != nil && !(*v >= 0 && *v <= 1) {
		return fmt.Errorf("active_decode_blocks_threshold must be between 0.0 and 1.0, got %v", *v)
	}
	if v := t.ActivePrefillTokensFrac; v != nil && !(*v >= 0 && *v <= math.MaxFloat64) {
		return fmt.Errorf(
			"active_prefill_tokens_threshold_frac must be a finite value greater than or equal to 0.0, got %v", *v)
	}
	return nil
}

// None reports whether no threshold is set.
func (t *Thresholds) None() bool {
	return t.ActiveDecodeBlocks == nil && t.ActivePrefillTokens == nil && t.ActivePrefillTokensFrac == nil
}

// exceeded reports whether w with that load is above any threshold. usage is the share of its KV blocks in
// use, 0..1, as its engine reports it.
func (t *Thresholds) exceeded(w *pool.Worker, load *scoring.Load, usage float64) bool {
	prefill := float64(load.PrefillTokens)
	switch {
	case t.ActivePrefillTokens != nil && load.PrefillTokens > 0 && uint64(load.PrefillTokens) > *t.ActivePrefillTokens:
		return true
	case t.ActivePrefillTokensFrac != nil && prefill > *t.ActivePrefillTokensFrac*float64(w.BatchedTokens()):
		return true
	}
	return t.ActiveDecodeBlocks != nil && (usage > *t.ActiveDecodeBlocks ||
		w.TotalKVBlocks > 0 && float64(load.ActiveBlocks) > *t.ActiveDecodeBlocks*float64(w.TotalKVBlocks))
}

// thresholds are the busy thresholds of all models. They can change at run time.
type thresholds struct {
	changing sync.Mutex // held while current is replaced
	// current is nil while no threshold is set: then no load is compared.
	current atomic.Pointer[thresholdTable]
}

// thresholdTable is immutable.
type thresholdTable struct {
	fallback Thresholds // of models without an entry in byModel
	byModel  map[string]Thresholds
	blocks   bool // any threshold reads KV blocks
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

// Models returns, sorted, the names of the models that the operator configured and that endpoints report.
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

// SetThresholds sets the thresholds of a model that are not nil in given, and returns all of the model's. If the model
// is none of [Router.Models], it changes nothing and returns false.
func (r *Router) SetThresholds(model string, given Thresholds) (Thresholds, bool) {
	if !slices.Contains(r.Models(), model) {
		return Thresholds{}, false
	}
	t := r.thresholds
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
	next.blocks = next.blocks || own.ActiveDecodeBlocks != nil // a threshold cannot be unset
	t.current.Store(next)
	return own, true
}

// overloaded says for each worker of the snapshot whether it is overloaded; nil if no threshold is set. Workers without
// a model have the thresholds of model. The result is sc's until the next call; sc.version is the version of the loads.
func (r *Router) overloaded(g *gathered, s *pool.Snapshot, model string) []bool {
	table := r.thresholds.current.Load()
	if g.version = 0; table == nil {
		return nil
	}
	g.loads, g.version = r.book.LoadsAndVersion(g.loads[:0])
	g.usage = g.usage[:0]
	if r.cfg.KVUsage != nil && table.blocks {
		g.usage = r.cfg.KVUsage(g.usage)
	}
	g.overloaded = g.overloaded[:0]
	for from := 0; from < len(s.Workers); {
		e := s.Workers[from].Endpoint
		name := e.Model
		if name == "" {
			name = model
		}
		limits, all, to := table.of(name), true, from
		for ; to < len(s.Workers) && s.Workers[to].Endpoint == e; to++ { // ranks of an endpoint follow one another
			usage := 0.0
			if w := int(s.Workers[to].Worker); w < len(g.usage) {
				usage = g.usage[w]
			}
			all = all && limits.exceeded(&s.Workers[to], loadOf(g.loads, &s.Workers[to]), usage)
		}
		for ; from < to; from++ {
			g.overloaded = append(g.overloaded, all)
		}
	}
	return g.overloaded
}

// Policy is what a policy file may change while the router runs.
type Policy struct {
	Weights scoring.Config
	Queues  *queue.Profiles // nil: no request waits
}

// SetPolicy replaces the policy. Its classes must have the same names as before, and its weights must read the index if
// those before do.
func (r *Router) SetPolicy(p Policy) error {
	before := r.currentPolicy()
	switch {
	case !before.Queues.SameClasses(p.Queues):
		return errors.New("it has other policy classes than before, or classes for other models")
	case (before.Weights.OverlapScoreCredit == 0) != (p.Weights.OverlapScoreCredit == 0):
		return errors.New("it begins or ends to count cached blocks (overlap_score_credit 0)")
	}
	r.policy.Store(&p)
	return nil
}

func (r *Router) currentPolicy() Policy {
	if p := r.policy.Load(); p != nil {
		return *p
	}
	p := Policy{Weights: r.cfg.Scoring}
	if r.cfg.Queue != nil {
		p.Queues = r.cfg.Queue.Profiles
	}
	return p
}

// loadOf returns a worker's load from a list indexed by worker number. Workers beyond its end have no load.
func loadOf(loads []scoring.Load, w *pool.Worker) *scoring.Load {
	if int(w.Worker) < len(loads) {
		return &loads[w.Worker]
	}
	return &noLoad
}

var noLoad scoring.Load // never written to

// Overloaded returns how many workers are above a busy threshold now.
func (r *Router) Overloaded() int {
	sc := r.takeScratch(nil)
	defer r.putScratch(sc)
	s := r.pool.Acquire()
	defer s.Release()
	n := 0
	for _, o := range r.overloaded(&sc.gathered, s, "") {
		if o {
			n++
		}
	}
	return n
}
