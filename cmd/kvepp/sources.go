package main

import (
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
)

// identity is what the labels of the metrics that have Dynamo's names say.
func (o *options) identity() metrics.Identity {
	id := o.routerID
	if id == 0 {
		host, _ := os.Hostname() // without a name, the id of the empty one
		id = kvblock.InstanceID(host)
	}
	return metrics.Identity{Namespace: o.dynamoNamespace, Component: o.dynamoComponent, RouterID: id}
}

// sources shows what the packages without metrics of their own count.
func sources(m *metrics.Metrics, book *scoring.ActiveSequences, index *indexer.Index, p *pool.Pool, events *feed.Feed) {
	m.Source(metrics.ActiveRequests, metrics.ActiveRequestsHelp, nil, func() float64 { return float64(book.Len()) })
	indexGauges(m, index)
	m.Source(metrics.PrefixIndexer, metrics.PrefixIndexerHelp, nil, func() float64 { return float64(index.Stats().Entries) })
	if events != nil {
		m.Source(metrics.SilentWorkers, metrics.SilentWorkersHelp, nil, func() float64 { return float64(events.Silent()) })
	}
	m.Source(metrics.Workers, metrics.WorkersHelp, nil, func() float64 {
		s := p.Acquire()
		defer s.Release()
		return float64(len(s.Workers))
	})
	for _, connected := range []bool{true, false} {
		state := map[bool]string{true: "connected", false: "connecting"}[connected]
		m.Source(metrics.Subscriptions, metrics.SubscriptionsHelp, prometheus.Labels{"state": state}, func() float64 {
			if events == nil {
				return 0
			}
			yes, no := events.Subscriptions()
			if connected {
				return float64(yes)
			}
			return float64(no)
		})
	}
}

// showQueue shows how many requests wait in each policy class.
func showQueue(m *metrics.Metrics, q *router.Queue, r *router.Router) {
	classes := []string{"default"}
	if q != nil {
		classes = q.Profiles.Classes()
	}
	for _, class := range classes {
		m.Source(metrics.QueuedRequests, metrics.QueuedRequestsHelp, prometheus.Labels{"policy_class": class}, func() float64 { return float64(r.Waiting(class)) })
	}
}

// indexGauges shows what the index counts.
func indexGauges(m *metrics.Metrics, index *indexer.Index) {
	m.Source(metrics.IndexBlocks, metrics.IndexBlocksHelp, nil, func() float64 { return float64(index.Stats().Entries) })
	m.Source(metrics.IndexBytes, metrics.IndexBytesHelp, nil, func() float64 { return float64(index.Stats().Used) })
	m.Source(metrics.IndexPredicted, metrics.IndexPredictedHelp, nil, func() float64 { return float64(index.Stats().Predicted) })
	m.Source(metrics.IndexMaxBytes, metrics.IndexMaxBytesHelp, nil, func() float64 { return float64(index.Stats().MaxBytes) })
	m.Source(metrics.IndexAtBound, metrics.IndexAtBoundHelp, nil, func() float64 {
		if index.AtBound() {
			return 1
		}
		return 0
	})
	for outcome, count := range map[string]func(indexer.Stats) uint64{
		"duplicate":        func(s indexer.Stats) uint64 { return s.Duplicates },
		"evicted":          func(s indexer.Stats) uint64 { return s.Evicted },
		"joined":           func(s indexer.Stats) uint64 { return s.Joined },
		"expired":          func(s indexer.Stats) uint64 { return s.Expired },
		"pruned":           func(s indexer.Stats) uint64 { return s.Pruned },
		"parent_not_found": func(s indexer.Stats) uint64 { return s.ParentNotFound },
	} {
		m.CounterSource(metrics.IndexOutcomes, metrics.IndexOutcomesHelp, prometheus.Labels{"outcome": outcome},
			func() float64 { return float64(count(index.Stats())) })
	}
}
