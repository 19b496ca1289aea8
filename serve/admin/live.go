package admin

import (
	"context"
	"fmt"
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/router"
	"kvepp/router/eject"
	"kvepp/router/session"
)

// Live is what the state of the fleet is read from.
type Live struct {
	Pool     *pool.Pool
	Router   *router.Router
	Index    *indexer.Index
	Sessions *session.Table
	Health   *eject.Tracker
	Events   *feed.Feed            // nil: kvepp does not subscribe to KV events
	Gauges   *enginemetrics.Gauges // nil: kvepp does not read the engines' metrics
	Metrics  *metrics.Metrics
	Version  string // of kvepp
	Started  time.Time
	History  History
}

// Remember takes samples for the history until ctx ends.
func (l *Live) Remember(ctx context.Context) {
	tick := time.NewTicker(HistoryInterval)
	defer tick.Stop()
	for {
		now := l.Fleet()
		l.History.Add(&now)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Fleet reads the state now. It asks no engine.
func (l *Live) Fleet() Fleet {
	now := Fleet{Time: time.Now(), Started: l.Started, Version: l.Version, Workers: []FleetWorker{},
		Queues: []FleetQueue{}, Held: l.Router.Held()}
	for _, e := range l.Router.Endpoints() {
		if e.Endpoint == nil {
			continue // a cordoned name without an endpoint
		}
		described := endpointOf(&e)
		for i := range e.Workers {
			now.Workers = append(now.Workers, l.worker(&described, &e, &e.Workers[i]))
		}
	}
	for _, q := range l.Router.Queues() {
		now.Queues = append(now.Queues, FleetQueue(q))
	}
	if ttl := l.Sessions.TTL(); ttl > 0 || l.Sessions.Active() > 0 {
		x := l.Sessions.Stats()
		now.Sessions = &FleetSessions{Active: l.Sessions.Active(), TTL: ttl.Seconds(), New: x.New, Kept: x.Kept,
			Moved: x.Moved, Final: x.Final, Expired: x.Expired, Evicted: x.Evicted, WorkerLeft: x.WorkerLeft}
	}
	if outcomes, tokens := l.Metrics.Shadow(); len(tokens) > 0 {
		now.Shadow = map[string]map[string]float64{"outcomes": outcomes, "tokens": tokens}
	}
	stats := l.Index.Stats()
	now.Index = FleetIndex{Blocks: stats.Entries, Bytes: stats.Used, MaxBytes: stats.MaxBytes,
		AtBound: l.Index.AtBound()}
	return now
}

func (l *Live) worker(e *Endpoint, of *router.EndpointState, w *router.WorkerState) FleetWorker {
	requests, tokens := l.Router.WorkerRequests(w.Worker), l.Router.WorkerTokens(w.Worker)
	out := FleetWorker{
		Name: e.Name, Rank: w.Rank, Address: e.Address, Model: e.Model, Role: e.Role,
		Blocks: l.Index.WorkerEntries(w.Worker), CapacityBlocks: w.TotalKVBlocks,
		BookedRequests: w.Load.Requests, PrefillTokens: w.Load.PrefillTokens, ActiveBlocks: w.Load.ActiveBlocks,
		Sessions: w.Sessions,
		Requests: requests.All, Failures: requests.Errors + requests.Incomplete,
		PromptTokens: tokens.Prompt, CachedTokens: tokens.Cached,
		States: ConditionsOf(e),
	}
	if l.Gauges != nil {
		load := l.Gauges.Of(w.Worker)
		out.Running, out.Waiting, out.KVUsage = Finite(load.Running), Finite(load.Waiting), Finite(load.Usage)
	}
	if w.Busy {
		out.add("at threshold", "above a busy threshold: it gets no requests until its load falls", LevelNote)
	}
	if w.Announced != 0 {
		out.add("block size differs", fmt.Sprintf("its events have blocks of %d tokens, its endpoint %d: it is chosen "+
			"by load alone", w.Announced, w.BlockSize), LevelBad)
	}
	if l.Events != nil {
		subscription, has := l.Events.Subscription(w.Worker)
		if has && !subscription.LastEvent.IsZero() {
			age := max(time.Since(subscription.LastEvent).Seconds(), 0)
			out.LastEvent = &age
		}
		switch {
		case !has:
			out.add(StateEventsOff, "it has no address for KV events: kvepp does not know what it has cached", LevelBad)
		case w.Silent:
			out.add(StateSilent, "it serves requests and sends no KV events for them: kvepp check says why", LevelBad)
		case !subscription.Connected:
			out.add("connecting", "the subscription to its KV events is not connected", LevelBad)
		}
	}
	if len(out.States) == 0 {
		out.add("serving", "", LevelOK)
	}
	return out
}

func (w *FleetWorker) add(state, detail, level string) {
	w.States = append(w.States, WorkerCondition{State: state, Detail: detail, Level: level})
}

// Export exports each worker under its name.
func (l *Live) Export(m *metrics.Metrics) {
	m.CollectWorkers(func() []metrics.WorkerState {
		s := l.Pool.Acquire()
		defer s.Release()
		excluded, now := l.Health.View(), time.Now()
		all := make([]metrics.WorkerState, 0, len(s.Workers))
		for i := range s.Workers {
			w := &s.Workers[i]
			if w.Role == pool.Encode {
				continue
			}
			load := l.Router.WorkerLoad(w.Worker)
			state := metrics.WorkerState{
				Running: load.Requests, Tokens: load.ActiveTokens,
				Name: w.Name, Rank: w.Rank, InstanceID: w.InstanceID, Prefill: w.Role == pool.Prefill,
				Address: w.Address, Model: w.Model,
				Cordoned: w.CordonedBy != "" || excluded.Of(w.Worker, now) == eject.Cordoned,
				Blocks:   l.Index.WorkerEntries(w.Worker),
				Requests: l.Router.WorkerRequests(w.Worker),
			}
			if l.Events != nil {
				var subscription feed.Subscription
				subscription, state.Subscribed = l.Events.Subscription(w.Worker)
				state.Connected, state.LastEvent = subscription.Connected, subscription.LastEvent
			}
			all = append(all, state)
		}
		return all
	})
}
