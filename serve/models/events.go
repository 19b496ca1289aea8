package models

import (
	"cmp"

	"kvepp/indexer/feed"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/router"
)

// CompleteFeed sets what a feed of the KV events of p's workers needs to know of models.
func (c *Config) CompleteFeed(f *feed.Config, p *pool.Pool, all Models, adapters *router.Adapters) {
	engine := c.Engine()
	f.Engine = string(engine)
	if engine != prompt.Dynamo {
		f.Adapter = func(w kvblock.Worker, name string) {
			if name == "" {
				adapters.Forget(w)
				return
			}
			adapters.Seen(w, name, func() string { return cmp.Or(modelOf(p, w), c.Only()) })
		}
	}
	f.Layers = func(name string) feed.Layers {
		model := all[cmp.Or(name, c.Only())]
		if model == nil {
			return feed.Layers{}
		}
		l, known := model.Layers()
		// Other engines keep windows and states in other ways, and announce less.
		return feed.Layers{Known: known && engine == prompt.VLLM, Windows: l.Windows, Chunk: l.Chunk, State: l.State,
			Other: len(l.Windows) > 0 || l.Chunk > 0 || l.State}
	}
}

// Listed returns what tells adapters what a worker's engine says.
func (c *Config) Listed(p *pool.Pool, adapters *router.Adapters) func(kvblock.Worker, pool.Adapters) {
	return func(w kvblock.Worker, says pool.Adapters) {
		own := cmp.Or(modelOf(p, w), c.Only())
		adapters.List(w, says, func(base string) string { return cmp.Or(own, base) })
	}
}

// modelOf returns the model of a worker; "" if the pool does not know it.
func modelOf(p *pool.Pool, w kvblock.Worker) string {
	s := p.Acquire()
	defer s.Release()
	if x := s.Worker(w); x != nil {
		return x.Model
	}
	return ""
}
