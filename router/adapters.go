package router

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// maxPlaced bounds the adapters in Adapters.placed. Beyond it any one is forgotten.
const maxPlaced = 4096

// Adapters maps a LoRA adapter to the model that it adapts, and knows which workers have it. The operator names
// adapters, engines list theirs, and engines' events name the adapter that computed a block. What an engine says speaks
// for its worker alone: when the worker leaves, or its blocks are cleared, its names are forgotten. It is safe for
// concurrent use. A nil one is empty.
type Adapters struct {
	named map[string]string // adapter -> model; read-only

	mu     sync.RWMutex
	seen   map[string][]adapted                 // adapter -> models of the workers that named it
	worker map[kvblock.Worker]map[string]string // worker -> adapter of its events -> model; "": unknown
	lists  []*adapterList                       // by worker: what its engine says; nil: nothing
	placed map[placement]kvblock.Worker         // where adapters go that no engine has
	loads  uint64                               // how often one got such a place
}

// adapted is a model, and how many of its workers named an adapter; at least one.
type adapted struct {
	model   string
	workers int
}

// adapterList is what a worker's engine says of adapters.
type adapterList struct {
	models map[string]string // adapter -> model
	active map[string]bool
	most   int // active ones at once; 0: not known
	coming int // adapters that were placed since
}

// placement is an adapter, for prefill workers or for the others.
type placement struct {
	adapter string
	prefill bool
}

// NewAdapters returns a table with the operator's adapters, by the names that requests and events use, and the models
// that they adapt.
func NewAdapters(named map[string]string) *Adapters {
	return &Adapters{named: named, seen: map[string][]adapted{}, worker: map[kvblock.Worker]map[string]string{},
		placed: map[placement]kvblock.Worker{}}
}

// Seen adds an adapter that an event of worker w names. If it is new for w, Seen calls model for the worker's model; it
// returns "" if that is unknown.
func (a *Adapters) Seen(w kvblock.Worker, name string, model func() string) {
	if a.named[name] != "" || name == "" || len(name) > pool.MaxAdapterName {
		return
	}
	a.mu.RLock()
	_, known := a.worker[w][name]
	full := len(a.worker[w]) >= pool.MaxAdapters
	a.mu.RUnlock()
	if known || full {
		return
	}
	adapts := model()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.worker[w] == nil {
		a.worker[w] = map[string]string{}
	}
	a.worker[w][name] = adapts
	a.count(name, adapts, 1)
}

// Forget takes back what w's events named, because its blocks were cleared or it left.
func (a *Adapters) Forget(w kvblock.Worker) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, model := range a.worker[w] {
		a.count(name, model, -1)
	}
	delete(a.worker, w)
}

// count adds n to the workers of a model that named an adapter. The caller holds a.mu.
func (a *Adapters) count(name, model string, n int) {
	if model == "" || a.named[name] != "" {
		return
	}
	all := a.seen[name]
	i := slices.IndexFunc(all, func(m adapted) bool { return m.model == model })
	if i < 0 {
		all, i = append(all, adapted{model: model}), len(all)
	}
	if all[i].workers += n; all[i].workers <= 0 {
		all = slices.Delete(all, i, i+1)
	}
	if a.seen[name] = all; len(all) == 0 {
		delete(a.seen, name)
	}
}

// List replaces what w's engine says of adapters. model returns the name that kvepp has for the model of w.
func (a *Adapters) List(w kvblock.Worker, says pool.Adapters, model func(base string) string) {
	next := &adapterList{models: map[string]string{}, active: map[string]bool{}, most: says.Most}
	for name, base := range says.Listed {
		next.models[name] = model(base)
	}
	for _, name := range says.Active {
		next.active[name] = true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lists = append(a.lists, make([]*adapterList, max(int(w)+1-len(a.lists), 0))...)
	if before := a.lists[w]; before != nil {
		for name, model := range before.models {
			a.count(name, model, -1)
		}
	}
	for name, model := range next.models {
		a.count(name, model, 1)
	}
	a.lists[w] = next
	if len(says.Listed)+len(says.Active)+says.Most == 0 {
		a.lists[w] = nil
	}
	maps.DeleteFunc(a.placed, func(p placement, at kvblock.Worker) bool {
		return at == w && (a.lists[w] == nil || next.has(p.adapter))
	})
}

// Left forgets a worker.
func (a *Adapters) Left(w kvblock.Worker) {
	a.Forget(w)
	a.List(w, pool.Adapters{}, nil)
}

// Len returns how many adapters are known.
func (a *Adapters) Len() int {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return len(a.named) + len(a.seen)
}

// Loads returns how often an adapter that no engine had was given to a worker to load.
func (a *Adapters) Loads() uint64 {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.loads
}

// fit says how well a worker suits the requests for an adapter.
type fit uint8

const (
	silent fit = iota // its engine says nothing of adapters
	evicts            // it has to load the adapter, and to evict another
	loads             // it has to load the adapter, and has room
	full              // it has the adapter, whose requests wait for those of others
	fits              // it has the adapter
)

// fitsOf returns how each worker of the snapshot suits an adapter, by worker number, in the memory of dst; empty if no
// engine says anything of adapters. prefill says that a prefill worker has the adapter, and other that another worker
// does, of the workers that are accepted.
func (a *Adapters) fitsOf(dst []fit, adapter string, s *pool.Snapshot, accepted func(*pool.Worker) bool) (_ []fit,
	prefill, other bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for i := range s.Workers {
		w := &s.Workers[i]
		if list := a.listOf(w.Worker); list != nil && list.has(adapter) && accepted(w) {
			prefill, other = prefill || w.Role == pool.Prefill, other || w.Role != pool.Prefill
		}
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		list := a.listOf(w.Worker)
		if list == nil {
			continue
		}
		f, held := evicts, other
		if w.Role == pool.Prefill {
			held = prefill
		}
		at, placed := a.placed[placement{adapter, w.Role == pool.Prefill}]
		if list.has(adapter) || placed && at == w.Worker && !held {
			f = full
		}
		if list.most == 0 || list.active[adapter] || len(list.active)+list.coming < list.most {
			f++
		}
		dst = append(dst, make([]fit, max(int(w.Worker)+1-len(dst), 0))...)
		dst[w.Worker] = f
	}
	return dst, prefill, other
}

// place notes that a request goes to w. If no engine has its adapter, later requests for it go there, too.
func (a *Adapters) place(p placement, w kvblock.Worker) {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := a.listOf(w)
	if at, placed := a.placed[p]; list == nil || list.has(p.adapter) || placed && at == w {
		return
	}
	for any := range a.placed {
		if len(a.placed) < maxPlaced {
			break
		}
		delete(a.placed, any)
	}
	a.placed[p] = w
	a.loads++
	list.coming++
}

// listOf returns what w's engine says; nil: nothing. The caller holds a.mu.
func (a *Adapters) listOf(w kvblock.Worker) *adapterList {
	if int(w) < len(a.lists) {
		return a.lists[w]
	}
	return nil
}

func (l *adapterList) has(adapter string) bool {
	_, listed := l.models[adapter]
	return listed || l.active[adapter]
}

// readSpaces sets the model and the adapter that a request names, and in which parts of the engine's cache its prompts'
// blocks are. p.salt is set.
func (r *Router) readSpaces(p *prepared, payload *body.Request) {
	if r.cfg.Engine != prompt.SGLang {
		if adapted := r.cfg.Adapters.of(p.model, r.served); adapted != "" && !r.cfg.names(p.model) {
			p.lora = strings.Clone(p.model) // a metric keeps it longer than the body
			p.model, p.label = adapted, p.lora
		}
		return
	}
	adapter := ""
	if name := p.model; strings.Contains(name, ":") {
		p.model, adapter = r.splitModel(name)
	} else if adapted := r.cfg.Adapters.of(name, r.served); adapted != "" && !r.cfg.names(name) {
		p.model = adapted // to SGLang, the name of an adapter alone has no meaning
	}
	space, unnamed := prompt.SGLangSpace(payload, adapter, 0)
	p.lora, p.salt, p.unnamed = strings.Clone(space.LoRA), space.Salt, unnamed
	if r.cfg.Adapters.of(p.lora, r.served) != "" {
		p.label = p.lora
	}
	if prompt.SGLangSpacesDiffer(payload) {
		p.spaces = make([]prompt.Space, len(payload.Prompts))
		for i := range p.spaces {
			p.spaces[i], unnamed = prompt.SGLangSpace(payload, adapter, i)
			p.unnamed = p.unnamed || unnamed
		}
	}
}

// splitModel splits the name of a model and its adapter, with a colon between them, as SGLang does. The adapter is
// behind the name of a model that is served, which may have colons itself, else behind the first colon.
// Source: SGLang 0.5.23, entrypoints/openai/serving_base, _parse_model_parameter; versions before it serve no model
// with a colon in its name.
func (r *Router) splitModel(name string) (model, adapter string) {
	at := 0
	see := func(model string) {
		if n := len(model); n > at && strings.HasPrefix(name, model) && (n == len(name) || name[n] == ':') {
			at = n
		}
	}
	for model := range r.cfg.modelNames() {
		see(model)
	}
	s := r.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		see(s.Workers[i].Model)
	}
	if at == 0 {
		at = strings.IndexByte(name, ':')
	}
	if at == len(name) {
		return name, ""
	}
	return strings.TrimSpace(name[:at]), strings.TrimSpace(name[at+1:])
}

// of returns the model that an adapter adapts; "" if there is no such adapter. If workers of several models named it,
// the model with most of these workers counts, then the first one. served reports whether a worker has a model
// of that name: then it is no adapter, unless the operator says so.
func (a *Adapters) of(name string, served func(model string) bool) (model string) {
	if a == nil {
		return ""
	}
	if model := a.named[name]; model != "" {
		return model
	}
	a.mu.RLock()
	most := 0
	for _, m := range a.seen[name] {
		if m.workers > most {
			model, most = m.model, m.workers
		}
	}
	a.mu.RUnlock()
	if model != "" && served(name) {
		return ""
	}
	return model
}
