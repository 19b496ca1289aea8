package main

import (
	"cmp"
	"context"
	"net/http"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"syscall"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/api/admin"
	indexerapi "kvepp/internal/api/indexer"
	"kvepp/internal/budget"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/modelrewrite"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/tokenizer"
)

// serve runs the endpoint picker until SIGTERM or SIGINT.
func serve(o *options) error {
	m := metrics.New()
	log := o.logger(m)
	o.logStart("serve", log)
	limitMemory("/", m, log)
	defer runtime.KeepAlive(restrainCollector())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	// What is given, and may be wrong.
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
	accessLog, closeAccessLog, err := o.logAccess(m, log)
	if err != nil {
		return err
	}
	defer closeAccessLog()
	tracer, err := o.tracer(ctx, m, log)
	if err != nil {
		return err
	}
	defer closeTracer(tracer, log)
	rules, err := o.rewriteRules()
	if err != nil {
		return err
	}
	rewrites, objectives := new(modelrewrite.Rules), new(router.Objectives)
	if err := rewrites.Set(rules); err != nil {
		return err
	}
	proxies, err := secured(ctx, o, m, log)
	if err != nil {
		return err
	}
	engines, err := remoteTokenizers(o, engineKey, m, log)
	if err != nil {
		return err
	}
	for _, unread := range o.withoutEffect() {
		log.Warn("a flag has no effect", "flag", unread)
	}
	if o.conformance {
		log.Warn(
			"clients choose among the endpoints, and are told which has served: --conformance is for conformance " +
				"tests alone",
		)
	}

	buffered, parsed, err := o.bufferedBytes(debug.SetMemoryLimit(-1))
	if err != nil {
		return err
	}
	memory := budget.New(buffered)
	log.Info("memory of requests until they are routed", "max_buffered_bytes", buffered, "max_parse_bytes", parsed)

	// What is known of workers: who they are, what they hold, what they were given to do.
	index, err := indexer.New(o.index(debug.SetMemoryLimit(-1)))
	if err != nil {
		return err
	}
	endpoints, book, conversations := pool.New(log), scoring.NewActiveSequences(), sessions(o, m)
	book.Prefill = o.prefill()
	var pages atomic.Pointer[enginemetrics.Gauges]
	health := o.ejection.tracker(m, &pages, log)
	endpoints.Watch(health) // first, so that it knows the workers of which the others tell it
	endpoints.OnCordon(health.PoolCordon)
	o.feed.Connection = health.Subscribed
	var events *feed.Feed // nil: none are wanted
	if o.wantsEvents() {
		if events, err = subscribe(o, endpoints, index, adapters, engine.Engine, m, log); err != nil {
			return err
		}
		defer events.Close()
		endpoints.Watch(events) // before the index, so that nothing writes to the index once the others forget a worker
	}
	endpoints.Watch(forgetful{index.Forget})
	endpoints.Watch(forgetful{book.Forget})
	endpoints.Watch(forgetful{conversations.Forget})

	// What tells of them. Requests are wanted once all of it did.
	ready := newReadiness()
	cluster, err := connect(o, ready, m, log)
	if err != nil {
		return err
	}
	first := awaitWorkers(endpoints, o.minInitialWorkers)
	ready.await("as many endpoints as --router-min-initial-workers", first.there)
	endpoints.Watch(first)
	engineSays, err := followEngines(ctx, o, endpoints, book, health, engine.Engine == tokenizer.Dynamo, log)
	if err != nil {
		return err
	}
	pages.Store(engineSays)
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
	reader := indexerapi.NewReader(endpoints, index, events, log)
	if events != nil && len(o.indexPeers) > 0 {
		warm, cancel := context.WithTimeout(ctx, o.warmUpTimeout)
		cluster.await(warm) // what a peer says of workers that are not known yet is of no use
		reader.WarmUp(warm, o.indexPeers, token.token())
		cancel()
	}
	sources(m, book, index, endpoints, events)
	showModels(m, models, adapters)
	showGauges(m, cmp.Or(o.poolName, withoutPool), endpoints, engineSays)

	// Who decides by it, and who asks for decisions.
	var served func(kvblock.Worker, int, int)
	if events != nil {
		served = events.Served
	}
	decides := router.New(router.Config{
		Models: models, Adapters: adapters, Rewrites: rewrites, Objectives: objectives, Remote: engines,
		Checks:          startChecks(ctx, o, models, engines, log),
		UpperBound:      upperBound(engine.Engine, models),
		Scoring:         o.scoring,
		TrackOutput:     o.trackOutput,
		PromptComputed:  served,
		Predict:         o.predict(),
		Metrics:         m.NewRouter(o.identity()),
		Picker:          m.NewPicker(),
		PickTimeout:     o.pickTimeout,
		Memory:          memory,
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
		Eject:           health,
		FirstByte:       o.firstByte,
		Queue:           o.busy.queue(),
		CountTokens:     o.busy.countsTokens(),
		StockPrefill:    o.prefillerHeader,
	}, endpoints, index, book, m, log)
	endpoints.Watch(forgetful{decides.Forget})
	showRouter(m, o.busy.queue(), decides)
	showEjection(m, health)
	showWorkers(m, endpoints, index, events, health, decides)
	picker := extproc.NewServer(extproc.Config{
		HeaderAliases:   o.headerAliases,
		PrefillerHeader: o.prefillerHeader,
		DecisionHeaders: o.decisionHeaders, Conformance: o.conformance, IgnoreSubset: o.withoutSubset,
		IgnoreHints:    o.ignoreHints,
		Frontends:      engine.Engine == tokenizer.Dynamo,
		PassSessions:   o.passSessions,
		MaxParseBytes:  parsed,
		MaxBodyBytes:   o.maxBodyBytes,
		MaxStreams:     o.maxStreams,
		Memory:         memory,
		OverloadStatus: o.overloadStatus,
		RetryAfter:     int(o.retryAfter),
		Tracer:         tracer,
		AccessLog:      accessLog,
	}, decides, m, log)
	showPicker(m, picker)
	mux := http.NewServeMux()
	reader.Handle(mux)
	admin.HandleDecisions(mux, decides)
	admin.HandleBusyThreshold(mux, decides, log)
	admin.HandleWorkers(mux, decides)
	if o.enablePprof {
		handleProfiles(mux)
	}
	seen := http.NewServeMux()
	// Of one series that is wrong the others do not suffer.
	seen.Handle(
		"GET /metrics",
		promhttp.HandlerFor(
			m.Registry,
			promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: maxMetricsReadings},
		),
	)
	defer cluster.elect(ctx)()
	return listen(
		ctx,
		o,
		parsed,
		picker,
		extproc.NewAccessLog(decides),
		proxies,
		guarded(mux, token),
		cluster.guard(guarded(seen, metricsToken)),
		ready,
		func() <-chan struct{} { return cluster.handedOver(o, log) },
		m,
		log,
	)
}
