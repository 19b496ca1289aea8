package router

import "sync"

// maxSeenAdapters bounds how many adapters are learned from events, maxAdapterName how long, in bytes, the name of one
// is.
const (
	maxSeenAdapters = 4096
	maxAdapterName  = 256
)

// Adapters knows which model a LoRA adapter adapts: from the operator, and from engines, whose events name the adapter
// that a block was computed with. It is safe for concurrent use. A nil one knows of none.
type Adapters struct {
	named map[string]string // adapter -> model; read-only

	mu   sync.RWMutex
	seen map[string]string // guarded by mu; an empty model is not known
}

// NewAdapters returns a table with the operator's adapters: their names, as requests give them for a model and engines
// announce them, and the models that they adapt.
func NewAdapters(named map[string]string) *Adapters {
	return &Adapters{named: named, seen: map[string]string{}}
}

// Seen records an adapter that an event of a worker names. model is asked for that worker's model if the adapter is
// new; it returns "" if it does not know.
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
