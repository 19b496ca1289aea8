package router

import (
	"strings"
	"sync"

	"kvepp/internal/apibody"
	"kvepp/tokenizer"
)

// maxSeenAdapters bounds how many adapters are learned from events, maxAdapterName the length of an adapter's name in
// bytes.
const (
	maxSeenAdapters = 4096
	maxAdapterName  = 256
)

// Adapters maps a LoRA adapter to the model that it adapts. The operator names adapters, and engines' events name the
// adapter that computed a block. It is safe for concurrent use. A nil one is empty.
type Adapters struct {
	named map[string]string // adapter -> model; read-only

	mu   sync.RWMutex
	seen map[string]string // guarded by mu; an empty model is unknown
}

// NewAdapters returns a table with the operator's adapters, by the names that requests and events use, and the models
// that they adapt.
func NewAdapters(named map[string]string) *Adapters {
	return &Adapters{named: named, seen: map[string]string{}}
}

// Seen adds an adapter that a worker's event names. If the adapter is new, Seen calls model for the worker's model; it
// returns "" if that is unknown.
func (a *Adapters) Seen(name string, model func() string) {
	if a.named[name] != "" || name == "" || len(name) > maxAdapterName {
		return
	}
	a.mu.RLock()
	_, known := a.seen[name]
	a.mu.RUnlock()
	if known {
		return
	}
	adapts := model()
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.seen) < maxSeenAdapters {
		a.seen[name] = adapts
	}
}

// Len returns how many adapters are known.
func (a *Adapters) Len() int {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return len(a.named) + len(a.seen)
}

// readSpaces sets the model and the adapter that a request names, and in which parts of the engine's cache its prompts'
// blocks are. p.salt is set.
func (r *Router) readSpaces(p *prompt, body *apibody.Request) {
	if r.cfg.Engine != tokenizer.SGLang {
		if adapted := r.cfg.Adapters.of(p.model); adapted != "" && !r.cfg.names(p.model) {
			p.lora = strings.Clone(p.model) // a metric keeps it longer than the body
			p.model, p.label = adapted, p.lora
		}
		return
	}
	adapter := ""
	if name := p.model; strings.Contains(name, ":") {
		p.model, adapter = r.splitModel(name)
	} else if adapted := r.cfg.Adapters.of(name); adapted != "" && !r.cfg.names(name) {
		p.model = adapted // to SGLang, the name of an adapter alone has no meaning
	}
	space, unnamed := tokenizer.SGLangSpace(body, adapter, 0)
	p.lora, p.salt, p.unnamed = strings.Clone(space.LoRA), space.Salt, unnamed
	if r.cfg.Adapters.of(p.lora) != "" {
		p.label = p.lora
	}
	if tokenizer.SGLangSpacesDiffer(body) {
		p.spaces = make([]tokenizer.Space, len(body.Prompts))
		for i := range p.spaces {
			p.spaces[i], unnamed = tokenizer.SGLangSpace(body, adapter, i)
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

// of returns the model that an adapter adapts; "" if there is no such adapter.
func (a *Adapters) of(name string) string {
	if a == nil {
		return ""
	}
	if model := a.named[name]; model != "" {
		return model
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.seen[name]
}
