package models

import (
	"cmp"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/prompt/remote"
)

// othersLabel stands in metrics for all models that Others names.
const othersLabel = "*"

// maxEngines bounds the clients of the pool's engines: those of engines that have left go when it is reached.
const maxEngines = 4096

// RemoteOf returns what returns an engine that tokenizes the requests of a model, as Others says; nil: none does. p has
// the engines. The clients send key.
func (c *Config) RemoteOf(p *pool.Pool, key func() string, m *metrics.Metrics, log *slog.Logger) (
	func(model string) *remote.Client, error) {
	o := c.Others
	switch {
	case o.URL != "":
		client, err := remote.New(remote.Config{Model: othersLabel, URL: o.URL, As: o.Model, Engine: c.Engine(),
			APIKey: key, Timeout: cmp.Or(o.Timeout, c.URLTimeout)}, m, log)
		if err != nil {
			return nil, fmt.Errorf("the tokenizer server %s: %w", o.URL, err)
		}
		return func(string) *remote.Client { return client }, nil
	case !o.Engines:
		return nil, nil
	}
	var mu sync.Mutex
	clients := map[string]*remote.Client{}
	return func(model string) *remote.Client {
		address := engineAt(p, model)
		if address == "" {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		client := clients[address]
		if client == nil {
			if len(clients) >= maxEngines {
				clear(clients)
			}
			var err error
			client, err = remote.New(remote.Config{Model: othersLabel, URL: cmp.Or(o.Scheme, "http") + "://" + address,
				Engine: c.Engine(), APIKey: key, Timeout: c.URLTimeout, TLS: o.TLS}, m, log)
			if err != nil {
				return nil // an engine that has no endpoint to ask
			}
			clients[address] = client
		}
		return client
	}, nil
}

// engineAt returns the address of a random endpoint that serves a model; "" if there is none.
func engineAt(p *pool.Pool, model string) (address string) {
	s := p.Acquire()
	defer s.Release()
	found := 0
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Address != "" && w.Role != pool.Encode && (w.Model == model || w.Model == "") {
			if found++; rand.IntN(found) == 0 {
				address = w.Address
			}
		}
	}
	return address
}
