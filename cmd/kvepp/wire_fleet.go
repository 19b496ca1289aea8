package main

import (
	"context"
	"fmt"
	"time"

	"kvepp/router"
	"kvepp/serve/admin"
)

// remember takes samples of the fleet for its history until ctx ends.
func (s *server) remember(ctx context.Context) {
	tick := time.NewTicker(admin.HistoryInterval)
	defer tick.Stop()
	for {
		now := s.fleet()
		s.history.Add(&now)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// fleet reads what pool, index, book, sessions and metrics hold now. It asks no engine.
func (s *server) fleet() admin.Fleet {
	b := readBuild()
	now := admin.Fleet{Time: time.Now(), Started: s.started, Version: b.version, Workers: []admin.FleetWorker{},
		Queues: []admin.FleetQueue{}, Held: s.router.Held()}
	for _, e := range s.router.Endpoints() {
		if e.Endpoint == nil {
			continue // a cordoned name without an endpoint
		}
		described := admin.EndpointOf(&e)
		for i := range e.Workers {
			now.Workers = append(now.Workers, s.fleetWorker(&described, &e, &e.Workers[i]))
		}
	}
	for _, q := range s.router.Queues() {
		now.Queues = append(now.Queues, admin.FleetQueue(q))
	}
	if ttl := s.sessions.TTL(); ttl > 0 || s.sessions.Active() > 0 {
		x := s.sessions.Stats()
		now.Sessions = &admin.FleetSessions{Active: s.sessions.Active(), TTL: ttl.Seconds(), New: x.New, Kept: x.Kept,
			Moved: x.Moved, Final: x.Final, Expired: x.Expired, Evicted: x.Evicted, WorkerLeft: x.WorkerLeft}
	}
	stats := s.index.Stats()
	now.Index = admin.FleetIndex{Blocks: stats.Entries, Bytes: stats.Used, MaxBytes: stats.MaxBytes,
		AtBound: s.index.AtBound()}
	return now
}

func (s *server) fleetWorker(e *admin.Endpoint, of *router.EndpointState, w *router.WorkerState) admin.FleetWorker {
	requests, tokens := s.router.WorkerRequests(w.Worker), s.router.WorkerTokens(w.Worker)
	out := admin.FleetWorker{
		Name: e.Name, Rank: w.Rank, Address: e.Address, Model: e.Model, Role: e.Role,
		Blocks: s.index.WorkerEntries(w.Worker), CapacityBlocks: of.Endpoint.TotalKVBlocks,
		BookedRequests: w.Load.Requests, PrefillTokens: w.Load.PrefillTokens, ActiveBlocks: w.Load.ActiveBlocks,
		Sessions: w.Sessions,
		Requests: requests.All, Failures: requests.Errors + requests.Incomplete,
		PromptTokens: tokens.Prompt, CachedTokens: tokens.Cached,
		States: admin.ConditionsOf(e),
	}
	if s.gauges != nil {
		load := s.gauges.Of(w.Worker)
		out.Running, out.Waiting, out.KVUsage = admin.Finite(load.Running), admin.Finite(load.Waiting),
			admin.Finite(load.Usage)
	}
	add := func(state, detail, level string) {
		out.States = append(out.States, admin.WorkerCondition{State: state, Detail: detail, Level: level})
	}
	if w.Busy {
		add("at threshold", "above a busy threshold: it gets no requests until its load falls", admin.LevelNote)
	}
	if w.Announced != 0 {
		add("block size differs", fmt.Sprintf("its events have blocks of %d tokens, its endpoint %d: it is chosen by "+
			"load alone", w.Announced, w.BlockSize), admin.LevelBad)
	}
	s.addSubscription(&out, w, add)
	if len(out.States) == 0 {
		add("serving", "", admin.LevelOK)
	}
	return out
}

// addSubscription describes a worker's KV events, if something is wrong with them.
func (s *server) addSubscription(out *admin.FleetWorker, w *router.WorkerState, add func(state, detail, level string)) {
	if s.events == nil {
		return
	}
	subscription, has := s.events.Subscription(w.Worker)
	if has && !subscription.LastEvent.IsZero() {
		age := max(time.Since(subscription.LastEvent).Seconds(), 0)
		out.LastEvent = &age
	}
	switch {
	case !has:
		add(admin.StateEventsOff, "it has no address for KV events: kvepp does not know what it has cached",
			admin.LevelBad)
	case w.Silent:
		add(admin.StateSilent, "it serves requests and sends no KV events for them: kvepp check says why",
			admin.LevelBad)
	case !subscription.Connected:
		add("connecting", "the subscription to its KV events is not connected", admin.LevelBad)
	}
}
