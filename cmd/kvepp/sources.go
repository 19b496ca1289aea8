package main

import (
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/tokenizer"
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
	m.Source(
		metrics.PrefixIndexer,
		metrics.PrefixIndexerHelp,
		nil,
		func() float64 { return float64(index.Stats().Entries) },
	)
	if events != nil {
		m.Source(
			metrics.SilentWorkers,
			metrics.SilentWorkersHelp,
			nil,
			func() float64 { return float64(events.Silent()) },
		)
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

// showModels shows what is known of models, and which of their texts are costly.
func showModels(m *metrics.Metrics, models map[string]*tokenizer.Model, adapters *router.Adapters) {
	without := 0
	for name, model := range models {
		if model == nil {
			without++
			continue
		}
		m.CounterSource(metrics.GeneralPattern, metrics.GeneralPatternHelp, prometheus.Labels{"model": name},
			func() float64 { return float64(model.EngineRuns()) })
	}
	m.Source(metrics.WithoutTokenizer, metrics.WithoutTokenizerHelp, nil, func() float64 { return float64(without) })
	m.Source(metrics.Adapters, metrics.AdaptersHelp, nil, func() float64 { return float64(adapters.Len()) })
}

// showPicker shows what the external processor holds.
func showPicker(m *metrics.Metrics, picker *extproc.Server) {
	m.Source(metrics.Streams, metrics.StreamsHelp, nil, func() float64 { return float64(picker.Streams()) })
	m.Source(metrics.HeldBytes, metrics.HeldBytesHelp, nil, func() float64 { return float64(picker.HeldBytes()) })
}

// showRouter shows how many workers are overloaded, and how many requests wait in each policy class.
func showRouter(m *metrics.Metrics, q *router.Queue, r *router.Router) {
	m.Source(
		metrics.OverloadedWorkers,
		metrics.OverloadedWorkersHelp,
		nil,
		func() float64 { return float64(r.Overloaded()) },
	)
	classes := []string{"default"}
	if q != nil {
		classes = q.Profiles.Classes()
	}
	for _, class := range classes {
		m.Source(
			metrics.QueuedRequests,
			metrics.QueuedRequestsHelp,
			prometheus.Labels{"policy_class": class},
			func() float64 { return float64(r.Waiting(class)) },
		)
	}
}

// indexGauges shows what the index counts.
func indexGauges(m *metrics.Metrics, index *indexer.Index) {
	m.Source(
		metrics.IndexBlocks,
		metrics.IndexBlocksHelp,
		nil,
		func() float64 { return float64(index.Stats().Entries) },
	)
	m.Source(metrics.IndexBytes, metrics.IndexBytesHelp, nil, func() float64 { return float64(index.Stats().Used) })
	m.Source(
		metrics.IndexPredicted,
		metrics.IndexPredictedHelp,
		nil,
		func() float64 { return float64(index.Stats().Predicted) },
	)
	m.Source(
		metrics.IndexMaxBytes,
		metrics.IndexMaxBytesHelp,
		nil,
		func() float64 { return float64(index.Stats().MaxBytes) },
	)
	m.Source(metrics.IndexAtBound, metrics.IndexAtBoundHelp, nil, func() float64 {
		if index.AtBound() {
			return 1
		}
		return 0
	})
	countersOf(
		m,
		metrics.IndexOutcomes,
		metrics.IndexOutcomesHelp,
		"outcome",
		index.Stats,
		map[string]func(indexer.Stats) uint64{
			"duplicate":        func(s indexer.Stats) uint64 { return s.Duplicates },
			"evicted":          func(s indexer.Stats) uint64 { return s.Evicted },
			"joined":           func(s indexer.Stats) uint64 { return s.Joined },
			"expired":          func(s indexer.Stats) uint64 { return s.Expired },
			"pruned":           func(s indexer.Stats) uint64 { return s.Pruned },
			"parent_not_found": func(s indexer.Stats) uint64 { return s.ParentNotFound },
		},
	)
}

// countersOf shows counters of stats, which differ in a label; each is named by its value.
func countersOf[S any](m *metrics.Metrics, name, help, label string, stats func() S, counts map[string]func(S) uint64) {
	for value, count := range counts {
		m.CounterSource(name, help, prometheus.Labels{label: value}, func() float64 { return float64(count(stats())) })
	}
}
