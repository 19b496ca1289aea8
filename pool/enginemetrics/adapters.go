package enginemetrics

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"kvepp/internal/useragent"
	"kvepp/pool"
)

const (
	// modelsEvery is the least time between two requests for an engine's models.
	modelsEvery = 5 * time.Second
	// maxModelsBytes bounds a list of models. An entry of vLLM's has about 600 bytes.
	maxModelsBytes = 1 << 20
)

// modelList is what an engine's /v1/models said last.
type modelList struct {
	mu       sync.Mutex // held while the engine is asked
	due      time.Time
	adapters map[string]string // see pool.Adapters
	said     bool              // Config.Adapters knows of some
}

// activeAdapters is what a page says of adapters in use.
type activeAdapters struct {
	at    float64 // the engine's time: a page keeps older series
	most  float64
	names string // separated by commas
}

// reportAdapters passes the adapters of an engine to Config.Adapters, if it says anything of them.
func (g *Gauges) reportAdapters(ctx context.Context, t *target, active activeAdapters) {
	if g.cfg.Adapters == nil || t.members[0].address == "" {
		return
	}
	says, tell := g.askAdapters(ctx, t, active)
	for i := range t.members {
		m := &t.members[i]
		g.mu.Lock()
		stays := g.slot(m.worker).generation == m.generation
		g.mu.Unlock()
		if tell && stays {
			g.cfg.Adapters(m.worker, says)
		}
	}
}

// askAdapters returns the adapters that an engine lists, which it asks for if they are due, and those that the page
// names as active. tell: there are some, or were some before.
func (g *Gauges) askAdapters(ctx context.Context, t *target, active activeAdapters) (says pool.Adapters, tell bool) {
	list := t.list
	if !list.mu.TryLock() {
		return says, false
	}
	defer list.mu.Unlock()
	if now := time.Now(); !now.Before(list.due) {
		list.due = now.Add(modelsEvery)
		url := g.cfg.Scheme + "://" + t.members[0].address + "/v1/models"
		adapters, err := g.fetchAdapters(ctx, url)
		switch {
		case ctx.Err() != nil:
			return says, false
		case err != nil: // the earlier list stays
			g.outcomes[noModels].Add(1)
			g.logFailure(url, t.members[0].name, noModels, err)
		default:
			list.adapters = adapters
		}
	}
	says.Listed = list.adapters
	if active.most <= pool.MaxAdapters { // not NaN
		says.Most = int(active.most)
	}
	for name := range strings.SplitSeq(active.names, ",") {
		if name = strings.TrimSpace(name); name != "" && len(name) <= pool.MaxAdapterName {
			says.Active = append(says.Active, name)
		}
	}
	before := list.said
	list.said = len(says.Listed)+len(says.Active)+says.Most > 0
	return says, list.said || before
}

// fetchAdapters returns the adapters among an engine's models: those with a parent. It keeps pool.MaxAdapters of them.
// An engine without the path has none.
//
// Source: vLLM 0.33.0, entrypoints/openai/models/serving; SGLang 0.5.23, entrypoints/http_server.
func (g *Gauges) fetchAdapters(ctx context.Context, url string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, maxTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	useragent.Add(req)
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotFound:
		return nil, nil
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("the server answered %s", resp.Status)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxModelsBytes+1))
	if err != nil {
		return nil, err
	}
	return readAdapters(text)
}

// readAdapters reads {"data": [{"id": NAME, "parent": MODEL}]}.
func readAdapters(text []byte) (map[string]string, error) {
	var models struct {
		Data *[]struct{ ID, Parent string }
	}
	if len(text) > maxModelsBytes {
		return nil, fmt.Errorf("the list of models is longer than %d bytes", maxModelsBytes)
	} else if err := json.Unmarshal(text, &models); err != nil {
		return nil, err
	} else if models.Data == nil {
		return nil, errors.New("no list of models")
	}
	adapters := map[string]string{}
	for _, m := range *models.Data {
		if m.Parent != "" && m.ID != "" && len(m.ID) <= pool.MaxAdapterName && len(adapters) < pool.MaxAdapters {
			adapters[m.ID] = m.Parent
		}
	}
	return adapters, nil
}
