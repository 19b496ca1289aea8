package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/internal/service"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/router"
	"kvepp/router/rewrite"
	"kvepp/scoring"
	"kvepp/tokenizer"
)

// serve runs the endpoint picker until SIGTERM or SIGINT.
func serve(o *options) error {
	log, err := o.logger()
	if err != nil {
		return err
	}
	m := metrics.New()
	limitMemory("/", m, log)
	defer runtime.KeepAlive(restrainCollector())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	token, err := newTokenFile("--admin-token-file", o.adminTokenFile)
	if err != nil {
		return err
	}
	metricsToken, err := newTokenFile("--metrics-token-file", o.metricsTokenFile)
	if err != nil {
		return err
	}
	engineKey, err := newTokenFile("--tokenizer-url-api-key-file", o.tokenizerURLKeyFile)
	if err != nil {
		return err
	}
	followTokens(ctx, reloadEvery, m, log, token, metricsToken, engineKey)
	models, err := loadModels(o, log)
	if err != nil {
		return err
	}
	files, err := modelFiles(o, models)
	if err != nil {
		return err
	}
	engine, err := o.tokenizerOptions()
	if err != nil {
		return err
	}
	named, err := o.adapted()
	if err != nil {
		return err
	}
	adapters := router.NewAdapters(named)
	tracer, err := o.tracer(ctx, m, log)
	if err != nil {
		return err
	}
	defer closeTracer(tracer, log)
	rules, err := o.rewriteRules()
	if err != nil {
		return err
	}
	rewrites, objectives := new(rewrite.Rules), new(router.Objectives)
	if err := rewrites.Set(rules); err != nil {
		return err
	}
	security, err := secured(ctx, o, m, log)
	if err != nil {
		return err
	}
	engines, err := remoteTokenizers(o, engineKey, m, log)
	if err != nil {
		return err
	}
	index, err := indexer.New(o.index(debug.SetMemoryLimit(-1)))
	if err != nil {
		return err
	}
	book := scoring.NewActiveSequences()
	book.Prefill = o.prefill()

	endpoints := pool.New(log)
	var events *feed.Feed
	for _, unread := range o.withoutEffect() {
		log.Warn("a flag has no effect", "flag", unread)
	}
	if o.conformance {
		log.Warn("clients choose among the endpoints, and are told which has served: --conformance is for conformance tests alone")
	}
	if o.kvEvents && o.scoring.OverlapScoreCredit > 0 && o.scoring.Mode == scoring.KV {
		o.feed.Engine = o.engine
		if engine.Engine != tokenizer.Dynamo {
			o.feed.Adapter = func(w kvblock.Worker, name string) {
				adapters.Seen(name, func() string { return modelOf(endpoints, w, o.onlyModel()) })
			}
		}
		if events, err = feed.New(o.feed, endpoints, index, m, log); err != nil {
			return err
		}
		defer events.Close()
		if len(o.indexPeers) > 0 {
			events.Hold()
		}
		endpoints.Watch(events) // first, so that nothing writes to the index once the others forget a worker
	}
	endpoints.Watch(forgetful{index.Forget})
	endpoints.Watch(forgetful{book.Forget})
	m.Source(metrics.Adapters, metrics.AdaptersHelp, nil, func() float64 { return float64(adapters.Len()) })
	conversations := sessions(o, m)
	endpoints.Watch(forgetful{conversations.Forget})
	ready := newReadiness()
	cluster, err := connect(o, ready, m, log)
	if err != nil {
		return err
	}
	first := awaitWorkers(endpoints, o.minInitialWorkers)
	ready.await("as many endpoints as --router-min-initial-workers", first.there)
	endpoints.Watch(first)
	engineSays, err := followEngines(ctx, o, endpoints, book, engine.Engine == tokenizer.Dynamo, log)
	if err != nil {
		return err
	}
	cluster.obey(ctx, rules, rewrites, objectives, log)
	stopFollowing, err := follow(ctx, o, cluster, ready, endpoints, models, files, m, log)
	if err != nil {
		return err
	}
	defer stopFollowing()
	if events != nil {
		if err := events.Room(); err != nil {
			return err
		}
	}
	reader := service.NewReader(endpoints, index, events, log)
	if events != nil && len(o.indexPeers) > 0 {
		warm, cancel := context.WithTimeout(ctx, o.warmUpTimeout)
		cluster.await(warm) // what a peer says of workers that are not known yet is of no use
		reader.WarmUp(warm, o.indexPeers, token.token())
		cancel()
	}
	sources(m, book, index, endpoints, events)
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

	showGauges(m, cmp.Or(o.poolName, withoutPool), endpoints, engineSays)

	var served func(kvblock.Worker, int, int)
	if events != nil {
		served = events.Served
	}
	decides := router.New(router.Config{
		Models: models, Adapters: adapters, Rewrites: rewrites, Objectives: objectives, Remote: engines, Checks: startChecks(ctx, o, models, engines, log),
		Scoring:         o.scoring,
		TrackOutput:     o.trackOutput,
		Served:          served,
		Predict:         o.predict(),
		Metrics:         m.NewRouter(o.identity()),
		Picker:          m.NewPicker(),
		PickTimeout:     o.pickTimeout,
		Fallbacks:       o.fallbacks,
		Explain:         o.decisionHeaders,
		Keep:            o.keptDecisions(),
		IgnoreHints:     o.ignoreHints,
		StrictModel:     o.strictModel,
		Sessions:        conversations,
		Pinning:         o.allowPinning,
		Frontends:       engine.Engine == tokenizer.Dynamo,
		KeepLegacyNvext: o.keepLegacy,
		InjectTokens:    o.injectTokens,
		TenantSalt:      o.tenantSalt,
		Thresholds:      o.thresholds,
		KVUsage:         kvUsage(engineSays),
		Queue:           o.busy.queue(),
		CountTokens:     o.busy.countsTokens(),
		StockPrefill:    o.prefillerHeader,
	}, endpoints, index, book, m, log)
	m.Source(metrics.OverloadedWorkers, metrics.OverloadedWorkersHelp, nil, func() float64 { return float64(decides.Overloaded()) })
	showQueue(m, o.busy.queue(), decides)
	picker := extproc.NewServer(extproc.Config{
		HeaderAliases:   o.headerAliases,
		PrefillerHeader: o.prefillerHeader,
		DecisionHeaders: o.decisionHeaders, Conformance: o.conformance, IgnoreSubset: o.withoutSubset,
		IgnoreHints:    o.ignoreHints,
		Frontends:      engine.Engine == tokenizer.Dynamo,
		PassSessions:   o.passSessions,
		MaxParseBytes:  o.maxParseBytes,
		MaxBodyBytes:   o.maxBodyBytes,
		MaxStreams:     o.maxStreams,
		MaxHeldBytes:   o.maxBufferedBytes,
		OverloadStatus: o.overloadStatus,
		RetryAfter:     int(o.retryAfter),
		Tracer:         tracer,
	}, decides, m, log)
	m.Source(metrics.Streams, metrics.StreamsHelp, nil, func() float64 { return float64(picker.Streams()) })
	m.Source(metrics.HeldBytes, metrics.HeldBytesHelp, nil, func() float64 { return float64(picker.HeldBytes()) })
	mux := http.NewServeMux()
	reader.Handle(mux)
	service.HandleDecisions(mux, decides)
	service.HandleBusyThreshold(mux, decides, log)
	if o.enablePprof {
		handleProfiles(mux)
	}
	seen := http.NewServeMux()
	// Of one series that is wrong the others do not suffer.
	seen.Handle("GET /metrics", promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	defer cluster.elect(ctx)()
	return listen(ctx, o, picker, security, guarded(mux, token), cluster.guard(guarded(seen, metricsToken)), ready,
		func() <-chan struct{} { return cluster.handedOver(o, log) }, log)
}

// collectorFloor is how many bytes are at least allocated between two garbage collections.
const collectorFloor = 64 << 20

// restrainCollector returns what is to be kept alive so that a small heap is not collected dozens of times a second: the collector
// counts this memory as in use, and the system gives none for what is never touched. nil where GOMEMLIMIT leaves no room for it.
func restrainCollector() []byte {
	if debug.SetMemoryLimit(-1) < 16*collectorFloor {
		return nil
	}
	return make([]byte, collectorFloor)
}

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

// forgetful is a watcher that keeps nothing for a worker until the worker's first event or request.
type forgetful struct{ forget func(kvblock.Worker) }

func (forgetful) WorkerJoined(pool.Worker)      {}
func (f forgetful) WorkerLeft(w kvblock.Worker) { f.forget(w) }

// identity is what the labels of the metrics that have Dynamo's names say.
func (o *options) identity() metrics.Identity {
	id := o.routerID
	if id == 0 {
		host, _ := os.Hostname() // without a name, the id of the empty one
		id = kvblock.InstanceID(host)
	}
	return metrics.Identity{Namespace: o.dynamoNamespace, Component: o.dynamoComponent, RouterID: id}
}

// follow keeps the pool at what the endpoints file, Dynamo's discovery and the cluster say together. The cluster is followed until
// stop is called: while the last requests end, workers still leave.
func follow(ctx context.Context, o *options, cluster *kubernetes, ready *readiness, p *pool.Pool, models map[string]*tokenizer.Model, files map[string]dynamo.ModelFiles, m *metrics.Metrics, log *slog.Logger) (stop func(), err error) {
	var (
		mu      sync.Mutex // guards the parts; held over Update so that the latest wins
		entries []pool.Entry
		stored  []dynamo.Instance
		pods    kube.State
		said    = map[dynamo.Mismatch]bool{}
		wrong   = complaints{log: log}
	)
	update := func() {
		instances := slices.Concat(stored, pods.Instances)
		wrong.begin()
		tellSettings(models, instances, &wrong)
		endpoints := besides(dynamo.Join(entries, stored), pods.Endpoints, &wrong)
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
		if joins := slices.IndexFunc(now, func(e pool.Entry) bool { return e.Dynamo != "" }); joins >= 0 && o.dynamoDiscovery == "" {
			return fmt.Errorf("endpoint %q has a dynamo path, but --dynamo-discovery is not given", now[joins].Name)
		}
		mu.Lock()
		defer mu.Unlock()
		entries = now
		update()
		return nil
	}, refused)
	if err != nil {
		stop()
	}
	return stop, err
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
			wrong.warn(fmt.Sprintf("endpoint %q is in the endpoints file and in the cluster: the file's is used", cluster[i].Name))
			continue
		}
		file = append(file, cluster[i])
	}
	return file
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

// listen serves until ctx ends, then drains: health says so first, so that proxies stop sending. Requests are not wanted, and
// health says so, while anything of ready does not hold. Where they are wanted when ctx ends, draining begins when the channel is
// closed that handOver returns.
func listen(ctx context.Context, o *options, picker *extproc.Server, security []grpc.ServerOption, admin, seen http.Handler, ready *readiness,
	handOver func() <-chan struct{}, log *slog.Logger) error {
	checks := health.NewServer()
	waits := ready.waits()
	announce(checks, waits == "")
	if waits != "" {
		log.Info("not ready yet", "waits_for", waits)
	}
	limits := append(security,
		// In FULL_DUPLEX_STREAMED mode pieces are small; in BUFFERED mode one message holds the whole body.
		grpc.MaxRecvMsgSize(max(o.maxParseBytes, 4<<20)+64<<10),
		grpc.ForceServerCodecV2(extproc.Codec()),
		// A proxy has a few connections and many streams: large buffers, for fewer system calls, cost little. Windows of a
		// fixed size need no pings to find theirs. They bound what waits here of answers that clients do not read: with four times
		// these, 2,000 such answers of 1 MB took 550 MiB instead of 200.
		grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10),
		grpc.InitialWindowSize(256<<10), grpc.InitialConnWindowSize(4<<20),
		// Requests that end soon find a goroutine whose stack has grown already; others get one of their own.
		grpc.NumStreamWorkers(128),
	)
	main := grpc.NewServer(limits...)
	extprocv3.RegisterExternalProcessorServer(main, picker)
	healthv1.RegisterHealthServer(main, checks)
	plain := grpc.NewServer()
	healthv1.RegisterHealthServer(plain, checks)

	failed := make(chan error, 4)
	port := func(port uint16) string { return net.JoinHostPort(o.bindAddress, strconv.Itoa(int(port))) }
	open := func(what, address string, serve func(net.Listener) error) error {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		log.Info("listening", "for", what, "address", l.Addr().String())
		go func() {
			if err := serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		}()
		return nil
	}
	web := webServer(seen)
	defer web.Close()
	questions := webServer(admin)
	defer questions.Close()
	defer main.Stop()
	defer plain.Stop()
	if err := open("ext_proc", port(o.grpcPort), main.Serve); err != nil {
		return err
	}
	if err := open("health", port(o.grpcHealthPort), plain.Serve); err != nil {
		return err
	}
	if address := cmp.Or(o.metricsAddress, port(o.metricsPort)); o.metricsAddress != "" || o.metricsPort != 0 {
		if err := open("metrics", address, web.Serve); err != nil {
			return err
		}
	}
	if o.adminAddress != "" {
		if err := open("admin requests", o.adminAddress, questions.Serve); err != nil {
			return fmt.Errorf("--admin-address: %w", err)
		}
	}
	for ctx.Err() == nil {
		select {
		case err := <-failed:
			return err
		case <-ready.changed:
			if now := ready.waits(); now != waits {
				log.Info(map[bool]string{true: "ready", false: "not ready"}[now == ""], "waits_for", now)
				waits = now
				announce(checks, waits == "")
			}
		case <-ctx.Done():
		}
	}
	signal.Reset(syscall.SIGTERM, syscall.SIGINT) // a second one ends the process at once, as soon as the first shows
	if waits == "" {
		select {
		case <-handOver():
		case err := <-failed:
			return err
		}
	}
	log.Info("stopping: new requests are served until proxies know, and running ones may end", "new_for", o.drainDelay, "within", o.drainTimeout)
	announce(checks, false)
	within, cancel := context.WithTimeout(context.Background(), o.drainTimeout)
	defer cancel()
	select { // who was not asked for health yet still sends requests, and would have an error of each
	case <-time.After(o.drainDelay):
	case <-within.Done():
	case err := <-failed:
		return err
	}
	drained := make(chan struct{})
	go func() { main.GracefulStop(); close(drained) }()
	select {
	case <-drained:
	case <-within.Done():
		log.Warn("requests were still running after --drain-timeout; they are cut off")
	}
	return nil
}
