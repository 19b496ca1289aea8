package main

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/router/admission"
	"kvepp/router/eject"
	"kvepp/router/ladder"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

// sessions makes the table of session affinity, and exports its counts.
func sessions(c session.Config, m *metrics.Metrics) *session.Table {
	s := session.NewTable(c)
	m.GaugeFunc(metrics.Sessions, metrics.SessionsHelp, nil, func() float64 { return float64(s.Active()) })
	countersOf(
		m,
		metrics.SessionRequests,
		metrics.SessionRequestsHelp,
		"outcome",
		s.Stats,
		map[string]func(session.Stats) uint64{
			session.New:   func(x session.Stats) uint64 { return x.New },
			session.Kept:  func(x session.Stats) uint64 { return x.Kept },
			session.Moved: func(x session.Stats) uint64 { return x.Moved },
		},
	)
	countersOf(
		m,
		metrics.SessionsEnded,
		metrics.SessionsEndedHelp,
		"cause",
		s.Stats,
		map[string]func(session.Stats) uint64{
			"final":       func(x session.Stats) uint64 { return x.Final },
			"expired":     func(x session.Stats) uint64 { return x.Expired },
			"evicted":     func(x session.Stats) uint64 { return x.Evicted },
			"worker_left": func(x session.Stats) uint64 { return x.WorkerLeft },
		},
	)
	return s
}

// newLadder makes the hit-rate ladder and exports it; nil with --ladder-max-bytes 0.
func (s *server) newLadder() *router.Ladder {
	if s.ladderBytes == 0 {
		return nil
	}
	s.ladder = &router.Ladder{Sums: new(ladder.Ladder), Seen: ladder.NewSeen(int(s.ladderBytes))}
	s.m.CollectLadder(func() []metrics.LadderSum { return ladderSums(s.ladder.Sums) }, s.ladder.Seen.Sampling)
	return s.ladder
}

func ladderSums(l *ladder.Ladder) []metrics.LadderSum {
	var all []metrics.LadderSum
	for _, sum := range l.Sums() {
		out := metrics.LadderSum{Model: sum.Model, Unpredicted: sum.Unpredicted}
		for r, n := range sum.Tokens {
			out.Tokens = append(out.Tokens, metrics.Named{Name: ladder.Rung(r).String(), Count: n})
		}
		for c, n := range sum.Lost {
			out.Lost = append(out.Lost, metrics.Named{Name: ladder.Cause(c).String(), Count: n})
		}
		all = append(all, out)
	}
	return all
}

// withoutPool is the pool's name in labels if there is no InferencePool.
const withoutPool = "kvepp"

// exportGauges exports what the engines' metrics say. g is nil if kvepp does not scrape them.
func exportGauges(m *metrics.Metrics, name string, p *pool.Pool, g *enginemetrics.Gauges) {
	if g == nil {
		g = new(enginemetrics.Gauges)
	}
	m.CollectPool(name, func() metrics.InferencePool { return poolNow(p, g) })
	m.GaugeFunc(metrics.WorkersWithReadings, metrics.WorkersWithReadingsHelp, nil,
		func() float64 { return float64(g.Known()) })
	m.GaugeFunc(metrics.UnseenLoad, metrics.UnseenLoadHelp, nil, func() float64 { return float64(g.Unseen()) })
	for i, c := range g.Readings() {
		m.CounterFunc(
			metrics.EngineReadings,
			metrics.EngineReadingsHelp,
			prometheus.Labels{"outcome": c.Outcome},
			func() float64 { return float64(g.Readings()[i].Readings) },
		)
	}
}

// poolNow returns the pool's workers and the averages of their latest metrics.
func poolNow(p *pool.Pool, g *enginemetrics.Gauges) metrics.InferencePool {
	s := p.Acquire()
	defer s.Release()
	var now metrics.InferencePool
	type mean struct{ sum, n float64 }
	var usage, waiting, running mean
	add := func(m *mean, v float64) {
		if !math.IsNaN(v) {
			m.sum += v
			m.n++
		}
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Role == pool.Encode {
			continue
		}
		now.Ready++
		l := g.Of(w.Worker)
		add(&usage, l.Usage)
		add(&waiting, l.Waiting)
		add(&running, l.Running)
		if !math.IsNaN(l.Waiting) {
			now.Pods = append(now.Pods, metrics.PodQueue{Pod: podName(w), Waiting: l.Waiting})
		}
	}
	now.KVUsage = usage.sum / max(usage.n, 1)
	now.Waiting = waiting.sum / max(waiting.n, 1)
	now.Running = running.sum / max(running.n, 1)
	return now
}

// podName returns the name that the Gateway API Inference Extension gives a worker. An endpoint made of a pod's port
// may have it already.
func podName(w *pool.Worker) string {
	suffix := "-rank-" + strconv.FormatUint(uint64(w.Rank), 10)
	if strings.HasSuffix(w.Name, suffix) {
		return w.Name
	}
	return w.Name + suffix
}

// exportCounts exports the counts of packages that have no metrics of their own.
func exportCounts(
	m *metrics.Metrics,
	book *scoring.ActiveSequences,
	index *indexer.Index,
	p *pool.Pool,
	events *feed.Feed,
) {
	m.GaugeFunc(metrics.ActiveRequests, metrics.ActiveRequestsHelp, nil, func() float64 { return float64(book.Len()) })
	m.CounterFunc(metrics.Flattened, metrics.FlattenedHelp, nil, func() float64 { return float64(book.Flattened()) })
	indexGauges(m, index)
	m.GaugeFunc(
		metrics.PrefixIndexer,
		metrics.PrefixIndexerHelp,
		nil,
		func() float64 { return float64(index.Stats().Entries) },
	)
	if events != nil {
		m.GaugeFunc(
			metrics.SilentWorkers,
			metrics.SilentWorkersHelp,
			nil,
			func() float64 { return float64(events.Silent()) },
		)
	}
	m.GaugeFunc(metrics.Workers, metrics.WorkersHelp, nil, func() float64 {
		s := p.Acquire()
		defer s.Release()
		return float64(len(s.Workers))
	})
	for _, connected := range []bool{true, false} {
		state := map[bool]string{true: "connected", false: "connecting"}[connected]
		m.GaugeFunc(metrics.Subscriptions, metrics.SubscriptionsHelp, prometheus.Labels{"state": state},
			func() float64 {
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

// exportModels exports the state of the models.
func exportModels(m *metrics.Metrics, models map[string]*prompt.Model, adapters *router.Adapters) {
	without := 0
	for _, model := range models {
		if model == nil {
			without++
		}
	}
	m.GaugeFunc(metrics.ModelsWithoutTokenizer, metrics.ModelsWithoutTokenizerHelp, nil,
		func() float64 { return float64(without) })
	m.GaugeFunc(metrics.Adapters, metrics.AdaptersHelp, nil, func() float64 { return float64(adapters.Len()) })
}

// exportPicker exports what the external processor holds.
func exportPicker(m *metrics.Metrics, picker *extproc.Server) {
	m.GaugeFunc(metrics.Streams, metrics.StreamsHelp, nil, func() float64 { return float64(picker.Streams()) })
	m.GaugeFunc(metrics.HeldBytes, metrics.HeldBytesHelp, nil, func() float64 { return float64(picker.HeldBytes()) })
}

// exportRouter exports how many workers are overloaded, and how many requests wait in each policy class.
func exportRouter(m *metrics.Metrics, q *queue.RoomConfig, r *router.Router) {
	m.GaugeFunc(
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
		m.GaugeFunc(
			metrics.QueuedRequests,
			metrics.QueuedRequestsHelp,
			prometheus.Labels{"policy_class": class},
			func() float64 { return float64(r.Waiting(class)) },
		)
	}
}

// exportAdmission exports what the admission of conversations knows.
func exportAdmission(m *metrics.Metrics, a *router.Admission, r *router.Router) {
	m.GaugeFunc(metrics.HeldRequests, metrics.HeldRequestsHelp, nil, func() float64 { return float64(r.Held()) })
	for state, of := range map[string]func(admission.Stats) int{
		"running": func(s admission.Stats) int { return s.Running },
		"idle":    func(s admission.Stats) int { return s.Idle },
		"lapsed":  func(s admission.Stats) int { return s.Lapsed },
	} {
		m.GaugeFunc(metrics.Conversations, metrics.ConversationsHelp, prometheus.Labels{"state": state},
			func() float64 { return float64(of(a.Stats())) })
	}
}

// indexGauges exports the counts of the index.
func indexGauges(m *metrics.Metrics, index *indexer.Index) {
	m.GaugeFunc(
		metrics.IndexBlocks,
		metrics.IndexBlocksHelp,
		nil,
		func() float64 { return float64(index.Stats().Entries) },
	)
	m.GaugeFunc(metrics.IndexBytes, metrics.IndexBytesHelp, nil, func() float64 { return float64(index.Stats().Used) })
	m.GaugeFunc(
		metrics.IndexPredicted,
		metrics.IndexPredictedHelp,
		nil,
		func() float64 { return float64(index.Stats().Predicted) },
	)
	m.GaugeFunc(
		metrics.IndexMaxBytes,
		metrics.IndexMaxBytesHelp,
		nil,
		func() float64 { return float64(index.Stats().MaxBytes) },
	)
	m.GaugeFunc(metrics.IndexAtBound, metrics.IndexAtBoundHelp, nil, func() float64 {
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

// countersOf exports counters of stats that differ in the value of a label. counts has them by that value.
func countersOf[S any](m *metrics.Metrics, name, help, label string, stats func() S, counts map[string]func(S) uint64) {
	for value, count := range counts {
		m.CounterFunc(name, help, prometheus.Labels{label: value}, func() float64 { return float64(count(stats())) })
	}
}

// exportWorkers exports each worker of p under its name. events is nil if kvepp does not subscribe to KV events.
func exportWorkers(
	m *metrics.Metrics,
	p *pool.Pool,
	index *indexer.Index,
	events *feed.Feed,
	health *eject.Tracker,
	r *router.Router,
) {
	m.CollectWorkers(func() []metrics.WorkerState {
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
