package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/tokenizer"
)

// modelOf returns the model that a worker says it serves, else fallback.
func modelOf(p *pool.Pool, w kvblock.Worker, fallback string) string {
	s := p.Acquire()
	defer s.Release()
	for i := range s.Workers {
		if x := &s.Workers[i]; x.Worker == w && x.Model != "" {
			return x.Model
		}
	}
	return fallback
}

// wantsEvents reports whether anything is decided by what workers hold, and they are to say it.
func (o *options) wantsEvents() bool {
	return o.kvEvents && o.scoring.OverlapScoreCredit > 0 && o.scoring.Mode == scoring.KV
}

// subscribe returns what will follow the KV events of the workers of p. Where there are peers to take the index over
// from, events are held back until that is done.
func subscribe(
	o *options,
	p *pool.Pool,
	index *indexer.Index,
	adapters *router.Adapters,
	engine tokenizer.Engine,
	m *metrics.Metrics,
	log *slog.Logger,
) (*feed.Feed, error) {
	o.feed.Engine = string(engine)
	if engine != tokenizer.Dynamo {
		o.feed.Adapter = func(w kvblock.Worker, name string) {
			adapters.Seen(name, func() string { return modelOf(p, w, o.onlyModel()) })
		}
	}
	events, err := feed.New(o.feed, p, index, m, log)
	if err == nil && len(o.indexPeers) > 0 {
		events.Hold()
	}
	return events, err
}

// forgetful is a watcher that keeps nothing for a worker until the worker's first event or request.
type forgetful struct{ forget func(kvblock.Worker) }

func (forgetful) WorkerJoined(pool.Worker) {}

func (f forgetful) WorkerLeft(w kvblock.Worker) { f.forget(w) }

// follow keeps the pool at what the endpoints file, Dynamo's discovery and the cluster say together. The cluster is
// followed until stop is called: while the last requests end, workers still leave.
func follow(
	ctx context.Context,
	o *options,
	cluster *kubernetes,
	ready *readiness,
	p *pool.Pool,
	models map[string]*tokenizer.Model,
	files map[string]dynamo.ModelFiles,
	m *metrics.Metrics,
	log *slog.Logger,
) (stop func(), err error) {
	var (
		mu      sync.Mutex // guards the parts; held over Update so that the latest wins
		entries []pool.Entry
		stored  []dynamo.Instance
		pods    kube.State
		said    = map[dynamo.Mismatch]bool{}
		wrong   = complaints{log: log}
	)
	names, err := pool.NewNames(o.dnsLookupFamily, log)
	if err != nil {
		return nil, fmt.Errorf("--dns-lookup-family: %w", err)
	}
	m.GaugeFunc(
		metrics.UnresolvedNames,
		metrics.UnresolvedNamesHelp,
		nil,
		func() float64 { return float64(names.Unresolved()) },
	)
	update := func() {
		instances := slices.Concat(stored, pods.Instances)
		wrong.begin()
		tellSettings(models, instances, &wrong)
		endpoints := besides(dynamo.Join(names.Resolve(entries), stored), pods.Endpoints, &wrong)
		found := len(endpoints)
		endpoints = usable(endpoints, &wrong)
		m.RefusedEndpoints.Set(float64(found - len(endpoints)))
		mismatches := dynamo.Compare(endpoints, instances, files)
		m.ModelFileMismatches.Set(float64(len(mismatches)))
		complainOfFiles(log, mismatches, said)
		tellMixed(endpoints, &wrong)
		ignored := 0 // encode workers
		for i := range endpoints {
			if o.blockSize > 0 {
				endpoints[i].BlockSize = o.blockSize
			}
			if endpoints[i].Role == pool.Encode {
				ignored++
			}
		}
		m.IgnoredEndpoints.Set(float64(ignored))
		if ignored > 0 {
			wrong.warn("endpoints whose model card says that they are encode workers are no candidates")
		}
		p.Update(endpoints)
	}
	discovered := func(now []dynamo.Instance) {
		mu.Lock()
		defer mu.Unlock()
		stored = now
		update()
	}
	switch kind, at, _ := strings.Cut(o.dynamoDiscovery, ":"); kind {
	case "file":
		dynamo.NewFileStore(at, log).Watch(ctx, discovered)
	case "frontend":
		dynamo.NewFrontends(strings.Split(at, ","), log).Watch(ctx, discovered)
	}
	stop = func() {}
	if cluster != nil {
		stop = cluster.follow(func(now kube.State) {
			mu.Lock()
			defer mu.Unlock()
			pods = now
			update()
		})
		ready.await("the pool and its Pods to be read", cluster.source.Synced())
	}
	if o.endpoints == "" {
		return stop, nil
	}
	refused := m.EndpointFileRefused.Inc
	err = pool.WatchFile(ctx, o.endpoints, log, func(now []pool.Entry) error {
		if joins := slices.IndexFunc(now, func(e pool.Entry) bool { return e.Dynamo != "" }); joins >= 0 &&
			o.dynamoDiscovery == "" {
			return fmt.Errorf("endpoint %q has a dynamo path, but --dynamo-discovery is not given", now[joins].Name)
		}
		names.Use(ctx, now)
		mu.Lock()
		defer mu.Unlock()
		entries = now
		update()
		return nil
	}, refused)
	if err != nil {
		stop()
		return stop, err
	}
	go names.Follow(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		update()
	})
	return stop, nil
}

// usable returns the endpoints whose names, addresses and texts can be used, in the place of the others.
func usable(endpoints []pool.Endpoint, wrong *complaints) []pool.Endpoint {
	return slices.DeleteFunc(endpoints, func(e pool.Endpoint) bool {
		err := e.Check()
		if err != nil {
			wrong.warn(
				fmt.Sprintf(
					"an endpoint is left out, because a name, an address or a text of it cannot be used: %v",
					err,
				),
			)
		}
		return err != nil
	})
}

// besides returns the endpoints of the file and those of the cluster. A name of both is the file's.
func besides(file, cluster []pool.Endpoint, wrong *complaints) []pool.Endpoint {
	if len(file) == 0 {
		return slices.Clone(cluster) // they are completed in place
	}
	names := make(map[string]bool, len(file))
	for i := range file {
		names[file[i].Name] = true
	}
	for i := range cluster {
		if names[cluster[i].Name] {
			wrong.warn(
				fmt.Sprintf(
					"endpoint %q is in the endpoints file and in the cluster: the file's is used",
					cluster[i].Name,
				),
			)
			continue
		}
		file = append(file, cluster[i])
	}
	return file
}

// tellMixed warns of frontends of Dynamo's behind which one model is served in two ways: by workers of two namespaces,
// or by aggregated and by decode workers. Such a frontend draws one of the ways for each request, whatever worker the
// request names, and refuses those that name a worker of the other.
//
// Source: dynamo-llm 1.6.1, discovery (a model's worker sets), and what its frontend answers.
func tellMixed(endpoints []pool.Endpoint, wrong *complaints) {
	type served struct{ address, model string }
	type way struct {
		namespace string
		alone     bool
	}
	seen := map[served]way{}
	for i := range endpoints {
		e := &endpoints[i]
		if e.Namespace == "" || e.Role != pool.Aggregated && e.Role != pool.Decode {
			continue
		}
		at, how := served{e.Address, e.Model}, way{e.Namespace, e.Role == pool.Aggregated}
		if first, there := seen[at]; !there {
			seen[at] = how
		} else if first != how {
			wrong.warn(fmt.Sprintf("the frontend at %s serves %q in two ways (workers of two Dynamo namespaces, or "+
				"aggregated and decode workers) and will "+
				"refuse requests at random: give each its own frontend, started with --namespace", e.Address, e.Model))
		}
	}
}
