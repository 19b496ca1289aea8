package main

import (
	"cmp"
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
	"kvepp/pool/engineversion"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/serve/listen"
)

// modelOf returns the model of a worker; fallback if the pool does not know it.
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

// subscribe makes the feed of the KV events of p's workers. If the index will be copied from a peer, the feed holds
// events back until that is done.
func subscribe(
	o *options,
	p *pool.Pool,
	index *indexer.Index,
	adapters *router.Adapters,
	models map[string]*prompt.Model,
	m *metrics.Metrics,
	log *slog.Logger,
) (*feed.Feed, error) {
	engine := o.config.engine.Engine
	o.feed.Engine = string(engine)
	if engine != prompt.Dynamo {
		o.feed.Adapter = func(w kvblock.Worker, name string) {
			if name == "" {
				adapters.Forget(w)
				return
			}
			adapters.Seen(w, name, func() string { return modelOf(p, w, o.config.onlyModel()) })
		}
		o.feed.UnmarkedSalts = !o.routing.TenantSalt
	}
	o.feed.Layers = func(name string) feed.Layers {
		if model := models[cmp.Or(name, o.config.onlyModel())]; model != nil {
			l, known := model.Layers()
			// Other engines keep windows and states in other ways, and announce less.
			known = known && engine == prompt.VLLM
			return feed.Layers{Known: known, Windows: l.Windows, Chunk: l.Chunk, State: l.State,
				Other: len(l.Windows) > 0 || l.Chunk > 0 || l.State}
		}
		return feed.Layers{}
	}
	events, err := feed.New(o.feed, p, index, m, log)
	if err == nil && (len(o.indexPeers) > 0 || o.shares()) {
		events.Hold()
	}
	return events, err
}

// openCluster creates the followers of a cluster; nil without one.
func openCluster(o *options, ready *listen.Readiness, m *metrics.Metrics, log *slog.Logger) (*kube.Cluster, error) {
	c := o.kube
	c.MetricsAuth = c.MetricsAuth && o.metricsTokenFile == ""
	c.ReplicaService = o.replicaService
	if c.Dynamo = o.config.engine.Engine == prompt.Dynamo; c.Dynamo {
		c.QueryFrontend = dynamo.QueryFrontend
	}
	var leads func(bool)
	if c.LeaderElection && c.Used() {
		leads = ready.Condition("this replica to lead")
	}
	return kube.Open(&c, leads, m, log)
}

// poolFollower merges the endpoints file, Dynamo's discovery and the cluster into the endpoints of a pool.
type poolFollower struct {
	*options
	pool   *pool.Pool
	names  *pool.Names
	models map[string]*prompt.Model
	files  map[string]dynamo.ModelFiles
	m      *metrics.Metrics
	log    *slog.Logger

	mu sync.Mutex // guards the fields below; held during pool.Update, so that the latest state wins

	entries    []pool.Entry      // of the endpoints file
	discovered []dynamo.Instance // by --dynamo-discovery
	pods       kube.State        // of the cluster

	finder     *engineversion.Finder    // nil: the engines are not asked for their versions
	mismatches map[dynamo.Mismatch]bool // that are logged
	problems   *dedupLog
}

// follow updates the pool from the endpoints file and Dynamo's discovery until ctx ends, and from the cluster until
// stop is called: while the last requests drain, workers still leave.
func follow(
	ctx context.Context,
	o *options,
	cluster *kube.Cluster,
	ready *listen.Readiness,
	p *pool.Pool,
	models map[string]*prompt.Model,
	files map[string]dynamo.ModelFiles,
	m *metrics.Metrics,
	log *slog.Logger,
) (stop func(), err error) {
	names, err := pool.NewNames(o.dnsLookupFamily, log)
	if err != nil {
		return nil, fmt.Errorf("--dns-lookup-family: %w", err)
	}
	f := &poolFollower{options: o, pool: p, names: names, models: models, files: files, m: m, log: log,
		mismatches: map[dynamo.Mismatch]bool{}, problems: newDedupLog(log)}
	if f.finder = newFinder(o, func() { f.change(func() {}) }); f.finder != nil {
		go f.finder.Run(ctx)
	}
	metrics.Gauge(m, metrics.UnresolvedNames, names.Unresolved)
	setDiscovered := func(now []dynamo.Instance) { f.change(func() { f.discovered = now }) }
	switch kind, at, _ := strings.Cut(o.dynamoDiscovery, ":"); kind {
	case "file":
		dynamo.NewFileStore(at, log).Watch(ctx, setDiscovered)
	case "frontend":
		dynamo.NewFrontends(strings.Split(at, ","), log).Watch(ctx, setDiscovered)
	}
	stop = func() {}
	if cluster != nil {
		stop = cluster.Follow(func(now kube.State) { f.change(func() { f.pods = now }) })
		ready.Await("the pool and its Pods to be read", cluster.Synced())
	}
	if o.endpoints == "" {
		return stop, nil
	}
	setEntries := func(now []pool.Entry) error {
		hasPath := func(e pool.Entry) bool { return e.Dynamo != "" }
		if i := slices.IndexFunc(now, hasPath); i >= 0 && o.dynamoDiscovery == "" {
			return fmt.Errorf("endpoint %q has a dynamo path, but --dynamo-discovery is not given", now[i].Name)
		}
		if err := checkVersions(o.config.engine.Engine, now); err != nil {
			return err
		}
		names.Use(ctx, now)
		f.change(func() { f.entries = now })
		return nil
	}
	if err := pool.WatchFile(ctx, o.endpoints, log, setEntries, m.EndpointFileRefused.Inc); err != nil {
		stop()
		return stop, err
	}
	go names.Follow(ctx, func() { f.change(func() {}) })
	return stop, nil
}

// change applies a change of the follower's state to the pool.
func (f *poolFollower) change(apply func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	apply()
	f.update()
}

// update merges the sources and updates the pool. The caller holds mu.
func (f *poolFollower) update() {
	instances := slices.Concat(f.discovered, f.pods.Instances)
	f.problems.begin()
	applySettings(f.models, instances, f.problems)
	endpoints := addCluster(dynamo.Join(f.names.Resolve(f.entries), f.discovered), f.pods.Endpoints, f.problems)
	found := len(endpoints)
	endpoints = usable(endpoints, f.problems)
	f.m.RefusedEndpoints.Set(float64(found - len(endpoints)))
	mismatches := dynamo.Compare(endpoints, instances, f.files)
	f.m.ModelFileMismatches.Set(float64(len(mismatches)))
	logMismatches(f.log, mismatches, f.mismatches)
	f.setVersions(endpoints)
	warnMixedFrontends(endpoints, f.problems)
	encoders := 0
	for i := range endpoints {
		if f.blockSize > 0 {
			endpoints[i].BlockSize = f.blockSize
		}
		if endpoints[i].Role == pool.Encode {
			encoders++
		}
	}
	f.m.IgnoredEndpoints.Set(float64(encoders))
	if encoders > 0 {
		f.problems.warn("kvepp ignores the endpoints whose model card says that they are encode workers")
	}
	f.pool.Update(endpoints)
}

// usable returns the endpoints whose names, addresses and texts are valid. It reuses the slice.
func usable(endpoints []pool.Endpoint, problems *dedupLog) []pool.Endpoint {
	return slices.DeleteFunc(endpoints, func(e pool.Endpoint) bool {
		err := e.Check()
		if err != nil {
			problems.warn(fmt.Sprintf("kvepp ignores an endpoint because its name, address or a text is invalid: %v",
				err))
		}
		return err != nil
	})
}

// addCluster returns the endpoints of the file and those of the cluster. If a name is in both, the file takes
// precedence.
func addCluster(file, cluster []pool.Endpoint, problems *dedupLog) []pool.Endpoint {
	if len(file) == 0 {
		return slices.Clone(cluster) // the caller changes them in place
	}
	names := make(map[string]bool, len(file))
	for i := range file {
		names[file[i].Name] = true
	}
	for i := range cluster {
		if names[cluster[i].Name] {
			problems.warn(
				fmt.Sprintf(
					"endpoint %q is in the endpoints file and in the cluster: kvepp uses the file's",
					cluster[i].Name,
				),
			)
			continue
		}
		file = append(file, cluster[i])
	}
	return file
}

// warnMixedFrontends warns about Dynamo's frontends that serve one model in two ways: by workers of two namespaces, or
// by aggregated and by decode workers. Such a frontend chooses one of the ways at random for each request, and refuses
// requests that name a worker of the other.
//
// Source: dynamo-llm 1.6.1, discovery (a model's worker sets), and the answers of its frontend.
func warnMixedFrontends(endpoints []pool.Endpoint, problems *dedupLog) {
	type frontend struct{ address, model string }
	type way struct {
		namespace  string
		aggregated bool
	}
	seen := map[frontend]way{}
	for i := range endpoints {
		e := &endpoints[i]
		if e.Namespace == "" || e.Role != pool.Aggregated && e.Role != pool.Decode {
			continue
		}
		at, how := frontend{e.Address, e.Model}, way{e.Namespace, e.Role == pool.Aggregated}
		if first, known := seen[at]; !known {
			seen[at] = how
		} else if first != how {
			problems.warn(fmt.Sprintf("the frontend at %s serves %q in two ways (workers of two Dynamo namespaces, or "+
				"aggregated and decode workers) and will refuse requests at random: give each its own frontend, "+
				"started with --namespace", e.Address, e.Model))
		}
	}
}
