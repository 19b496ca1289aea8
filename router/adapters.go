package router

import "sync"

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
