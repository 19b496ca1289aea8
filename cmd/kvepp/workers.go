package main

import (
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/router/eject"
)

// showWorkers exports each worker of p under its name. events is nil if there are none.
func showWorkers(
	m *metrics.Metrics,
	p *pool.Pool,
	index *indexer.Index,
	events *feed.Feed,
	health *eject.Tracker,
	r *router.Router,
) {
	m.ShowWorkers(func() []metrics.WorkerState {
		s := p.Acquire()
		defer s.Release()
		excluded, now := health.View(), time.Now()
		all := make([]metrics.WorkerState, 0, len(s.Workers))
		for i := range s.Workers {
			w := &s.Workers[i]
			if w.Role == pool.Encode {
				continue
			}
			state := metrics.WorkerState{
				Name:       w.Name,
				Rank:       w.Rank,
				InstanceID: w.InstanceID,
				Prefill:    w.Role == pool.Prefill,
				Address:    w.Address,
				Model:      w.Model,
				Cordoned: w.CordonedBy != "" ||
					excluded.Of(w.Worker, now) == eject.Cordoned,
				Blocks:   index.WorkerEntries(w.Worker),
				Requests: r.WorkerRequests(w.Worker),
			}
			if events != nil {
				var subscription feed.Subscription
				subscription, state.Subscribed = events.Subscription(w.Worker)
				state.Connected, state.LastEvent = subscription.Connected, subscription.LastEvent
			}
			all = append(all, state)
		}
		return all
	})
}
