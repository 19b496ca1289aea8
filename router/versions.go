package router

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// Workers of one model may run several versions of the engine, for example during a rollout. If these make different
// token ids of a request, the ids of one version say nothing about the blocks of the other's workers. The request then
// follows the version that most of the workers that have its prefix cached run; without such a worker it goes by load.

// versioned is what one version of an engine makes of a request.
type versioned struct {
	model   *prompt.Model
	prompts []prompt.Prompt
}

// runningVersions are the rules that the workers of each model follow, newest first, in one snapshot of the pool.
type runningVersions struct {
	snapshot *pool.Snapshot
	of       map[string][]*prompt.Model
}

// versionsRunning caches the runningVersions of the latest snapshot.
type versionsRunning struct {
	latest atomic.Pointer[runningVersions]
}

// of returns the rules that the workers of a model follow, newest first; the model's own if it has no workers.
func (c *versionsRunning) of(p *pool.Pool, models map[string]*prompt.Model, name string) []*prompt.Model {
	model := models[name]
	if model == nil || !model.HasVersions() {
		return nil
	}
	s := p.Acquire()
	defer s.Release()
	now := c.latest.Load()
	if now == nil || now.snapshot != s {
		now = &runningVersions{s, make(map[string][]*prompt.Model, len(models))}
		for name, model := range models {
			if model != nil {
				now.of[name] = versionsIn(s, name, model)
			}
		}
		c.latest.Store(now)
	}
	return now.of[name]
}

func versionsIn(s *pool.Snapshot, name string, model *prompt.Model) []*prompt.Model {
	var found []*prompt.Model
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Model != "" && w.Model != name || w.OtherTokenizer || w.Role == pool.Encode {
			continue
		}
		if at := versionOf(model, w); !slices.Contains(found, at) {
			found = append(found, at)
		}
	}
	if found == nil {
		found = append(found, model)
	}
	slices.SortFunc(found, func(a, b *prompt.Model) int { return b.Recency() - a.Recency() })
	return found
}

// versionOf returns a model by the rules that a worker follows.
func versionOf(model *prompt.Model, w *pool.Worker) *prompt.Model {
	if w.EngineVersion == "" {
		return model
	}
	at, err := model.At(w.EngineVersion)
	if err != nil { // the pool's source checks versions
		return model
	}
	return at
}

// tokenizeByVersion returns the prompts of a request by the newest of several rules. versions is nil if all make the
// same prompts, and otherwise has those that make any.
func (g *reading) tokenizeByVersion(
	ctx context.Context,
	until time.Time,
	models []*prompt.Model,
	payload *body.Request,
) (prompts []prompt.Prompt, versions []versioned, err error) {
	differ := false
	for _, model := range models {
		made, failure := g.tokenize(ctx, until, model, payload)
		if failure != nil {
			if err == nil {
				err = failure
			}
			differ = true
			continue
		}
		versions = append(versions, versioned{model, made})
		differ = differ || !slices.EqualFunc(versions[0].prompts, made, func(a, b prompt.Prompt) bool {
			return a.Certain == b.Certain && slices.Equal(a.IDs, b.IDs)
		})
	}
	switch {
	case len(versions) == 0:
		return nil, nil, err
	case !differ:
		return versions[0].prompts, nil, nil
	}
	return versions[0].prompts, versions, nil
}

// chooseVersion chooses among the versions of a request's prompt, if they differ: the one that most of the workers
// that have a block of it cached run, the newer one of two. Without such a worker the request goes by load.
func (r *Router) chooseVersion(sc *scratch, p *prepared) {
	if p.versions == nil || p.tokens == nil {
		return
	}
	base := r.cfg.Models[p.model]
	s := r.pool.Acquire()
	defer s.Release()
	var best *versioned
	most := 0
	for i := range p.versions {
		v := &p.versions[i]
		p.tokens, sc.variants = v.prompts, sc.variants[:0]
		warm := 0
		for j := range s.Workers {
			w := &s.Workers[j]
			if w.Model != "" && w.Model != p.model || loadOnly(w) != "" || versionOf(base, w) != v.model {
				continue
			}
			cut := sc.variantOf(w)
			if cut == nil {
				sc.variants = append(sc.variants, r.cut(sc, p, w.BlockSize, w.EAGLE))
				cut = &sc.variants[len(sc.variants)-1]
			}
			if o := cut.overlapOf(w.Worker); o.device+o.host+o.disk > 0 {
				warm++
			}
		}
		if warm > most {
			best, most = v, warm
		}
	}
	sc.variants = sc.variants[:0]
	if best == nil {
		p.tokens, p.reason = nil, ReasonEngineVersions
		return
	}
	p.tokens, p.version = best.prompts, best.model
	p.countTokens()
}

// countTokens sets isl from tokens, and reason if they are not all certain.
func (p *prepared) countTokens() {
	p.isl = 0
	for _, t := range p.tokens {
		p.isl += len(t.IDs)
		if t.Certain < len(t.IDs) {
			p.reason = ReasonMediaPrefix
		}
	}
}

// predictable reports whether the worker will hold the blocks of the prompt's token ids.
func (r *Router) predictable(p *prepared, w *pool.Worker) bool {
	return p.version == nil || versionOf(r.cfg.Models[p.model], w) == p.version
}
