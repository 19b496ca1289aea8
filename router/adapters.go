package router

import (
	"slices"
	"strings"
	"sync"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// maxWorkerAdapters bounds how many adapters are learned from one worker's events, maxAdapterName the length of an
// adapter's name in bytes.
const (
	maxWorkerAdapters = 1024
	maxAdapterName    = 256
)

// Adapters maps a LoRA adapter to the model that it adapts. The operator names adapters, and engines' events name the
// adapter that computed a block. An event speaks for its worker alone: when the worker leaves or its blocks are
// cleared, its names are forgotten. It is safe for concurrent use. A nil one is empty.
type Adapters struct {
	named map[string]string // adapter -> model; read-only

	mu     sync.RWMutex
	seen   map[string][]adapted                 // adapter -> models of the workers that named it
	worker map[kvblock.Worker]map[string]string // worker -> adapter -> model; "": unknown
}

// adapted is a model, and how many of its workers named an adapter; at least one.
type adapted struct {
	model   string
	workers int
}

// NewAdapters returns a table with the operator's adapters, by the names that requests and events use, and the models
// that they adapt.
func NewAdapters(named map[string]string) *Adapters {
	return &Adapters{named: named, seen: map[string][]adapted{}, worker: map[kvblock.Worker]map[string]string{}}
}

// Seen adds an adapter that an event of worker w names. If it is new for w, Seen calls model for the worker's model; it
// returns "" if that is unknown.
func (a *Adapters) Seen(w kvblock.Worker, name string, model func() string) {
	if a.named[name] != "" || name == "" || len(name) > maxAdapterName {
		return
	}
	a.mu.RLock()
	_, known := a.worker[w][name]
	full := len(a.worker[w]) >= maxWorkerAdapters
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
	if i := slices.IndexFunc(a.seen[name], func(m adapted) bool { return m.model == adapts }); i >= 0 {
		a.seen[name][i].workers++
	} else if adapts != "" {
		a.seen[name] = append(a.seen[name], adapted{adapts, 1})
	}
}

// Forget takes back what w's events named, because its blocks were cleared or it left.
func (a *Adapters) Forget(w kvblock.Worker) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, model := range a.worker[w] {
		all := a.seen[name]
		i := slices.IndexFunc(all, func(m adapted) bool { return m.model == model })
		if i < 0 {
			continue // the model is unknown
		}
		if all[i].workers--; all[i].workers == 0 {
			all = slices.Delete(all, i, i+1)
		}
		if a.seen[name] = all; len(all) == 0 {
			delete(a.seen, name)
		}
	}
	delete(a.worker, w)
}

// Len returns how many adapters are known.
func (a *Adapters) Len() int {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return len(a.named) + len(a.seen)
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
