package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/pflag"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/enginemetrics"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/prompt/remote"
	"kvepp/router"
	"kvepp/router/admission"
	"kvepp/router/budget"
	"kvepp/router/eject"
	"kvepp/router/ladder"
	"kvepp/router/modelrewrite"
	"kvepp/router/queue"
	"kvepp/router/record"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/serve/admin"
	indexerapi "kvepp/serve/dynamo/indexer"
	"kvepp/serve/join"
	"kvepp/serve/listen"
	"kvepp/serve/models"
	"kvepp/serve/secrets"
	"kvepp/serve/web"
)

// serve runs the endpoint picker until SIGTERM or SIGINT.
func serve(o *options) error {
	m := metrics.New()
	if o.seat != nil {
		m.Twins(o.seat.Twins(cmp.Or(o.sources.Kube.PoolName, withoutPool)))
	}
	log := o.Logger(m)
	o.logStart("serve", log)
	o.logSeat(log)
	limitMemory(memlimit.FromCgroup, m, log)
	defer runtime.KeepAlive(restrainCollector())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // so that a second signal ends the process at once

	s := &server{options: o, m: m, log: log, ready: listen.NewReadiness()}
	defer s.close()
	if err := s.open(ctx); err != nil {
		return err
	}
	if err := s.discover(ctx); err != nil {
		return err
	}
	s.decide(ctx)
	if err := s.followPolicy(ctx); err != nil {
		return err
	}
	return s.listen(ctx)
}

// responseTTL is how long it is known which worker has a stored response. Engines keep them until they end.
const responseTTL = 24 * time.Hour

// withoutPool is the pool's name in labels if there is no InferencePool.
const withoutPool = "kvepp"

// server is a running `kvepp serve`. Its steps set its fields in this order: open, discover, decide, listen.
type server struct {
	*options
	m     *metrics.Metrics
	log   *slog.Logger
	ready *listen.Readiness

	// Set by open: files, models and clients that the flags name.
	secrets                  *secrets.Files
	adminToken, metricsToken *secrets.Token
	loaded                   models.Models
	files                    map[string]dynamo.ModelFiles
	adapters                 *router.Adapters
	tokenizers               map[string]*remote.Client
	tokenizerKey             func() string
	accessLog                *slog.Logger
	recorder                 *record.Recorder  // nil: none
	ladder                   *router.Ladder    // nil: none
	admission                *router.Admission // nil: none
	tracer                   *tracing.Tracer
	proxies                  *listen.Proxies
	memory                   *budget.Budget
	maxParseBytes            int

	// Set by discover: the workers, their cached blocks and their load.
	pool  *pool.Pool
	index *indexer.Index
	book  *scoring.ActiveSequences
	// the requests that wait for a note of their first token
	firstTokens router.FirstTokens
	sessions    *session.Table
	responses   *session.Table // workers by the stored responses that they have
	health      *eject.Tracker
	events      *feed.Feed // nil: kvepp does not subscribe to KV events
	gauges      *enginemetrics.Gauges
	cluster     *kube.Cluster // nil: there is none
	join        *join.Join
	reader      *indexerapi.Reader
	remoteOf    func(model string) *remote.Client
	rewrites    *modelrewrite.Rules
	objectives  *router.Objectives
	replicas    *sharing // nil: kvepp shares nothing

	// Set by decide.
	router *router.Router
	picker *extproc.Server
	live   *admin.Live

	closers []func() // close calls these, the latest first
}

func (s *server) closeWith(f func()) { s.closers = append(s.closers, f) }

// close releases what the steps have opened.
func (s *server) close() {
	for _, f := range slices.Backward(s.closers) {
		f()
	}
}

// open opens the files, models and clients that the flags name. Its errors are mistakes in flags and files.
func (s *server) open(ctx context.Context) error {
	var err error
	s.secrets = secrets.Follow(ctx, s.m, s.log)
	if s.adminToken, err = s.secrets.Token("--admin-token-file", s.adminTokenFile); err != nil {
		return err
	}
	if s.metricsToken, err = s.secrets.Token("--metrics-token-file", s.metricsTokenFile); err != nil {
		return err
	}
	engineKey, err := s.secrets.Token("--tokenizer-url-api-key-file", s.models.KeyFile)
	if err != nil {
		return err
	}
	s.tokenizerKey = engineKey.Text
	s.loaded = s.models.Load(s.log)
	if s.sources.Discovery != "" || s.sources.Kube.Used() && s.models.Engine() == prompt.Dynamo {
		if s.files, err = s.models.Files(s.loaded); err != nil {
			return err
		}
	}
	s.adapters = router.NewAdapters(s.models.Adapters)
	accessLog, closeAccessLog, err := s.OpenAccess(s.m, s.log)
	if err != nil {
		return err
	}
	s.accessLog = accessLog
	s.closeWith(closeAccessLog)
	if s.recorder, err = s.recording.Open(s.m, s.log); err != nil {
		return err
	}
	s.closeWith(func() { s.recorder.Close(2 * time.Second) })
	if !s.noTraces {
		if s.tracer, err = tracing.New(ctx, version(), s.log); err != nil {
			return err
		}
	}
	s.tracer.Export(s.m)
	s.closeWith(s.closeTracer)
	var certificates *secrets.Certificates
	if s.transport.Serving {
		if certificates, err = s.secrets.Certificates(s.transport); err != nil {
			return err
		}
	}
	s.proxies = listen.NewProxies(certificates, s.m, s.log)
	if s.tokenizers, err = s.models.Remote(engineKey.Text, s.m, s.log); err != nil {
		return err
	}
	for _, line := range s.withoutEffect() {
		s.log.Warn("a flag has no effect", "flag", line)
	}
	if s.proxy.Conformance {
		s.log.Warn(
			"--gateway conformance: clients can choose endpoints and see which one answered; use it for conformance " +
				"tests only",
		)
	}
	buffered, parsed, err := s.proxy.Buffers(debug.SetMemoryLimit(-1))
	if err != nil {
		return err
	}
	s.memory, s.maxParseBytes = budget.New(buffered), parsed
	s.log.Info("memory of requests until they are routed", "max_buffered_bytes", buffered, "max_parse_bytes", parsed)
	return nil
}

// closeTracer sends the last spans, for at most 5 s.
func (s *server) closeTracer() {
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := s.tracer.Close(last); err != nil {
		s.log.Warn("the last spans of requests are lost", "error", err)
	}
}

// discover starts to follow the workers, their cached blocks and their load. It returns after it has read the endpoints
// file, and copied the index from a peer, if the flags name these.
func (s *server) discover(ctx context.Context) error {
	s.book = scoring.NewActiveSequences()
	s.book.MaxBytes, s.memory.Booked = s.memory.BookedLimit(), s.book.HeldBytes
	index, err := indexer.New(s.options.index(debug.SetMemoryLimit(-1)))
	if err != nil {
		return err
	}
	s.index, s.pool, s.sessions = index, pool.New(s.log), session.NewTable(s.options.affinity)
	s.book.Prefill = s.prefill
	var pages atomic.Pointer[enginemetrics.Gauges]
	s.health = tracker(s.ejection, s.m, &pages, s.log)
	s.pool.Watch(s.health) // first: later watchers report workers that health must know
	s.pool.OnCordon(s.health.PoolCordon)
	s.feed.Connection = s.health.Subscribed
	if s.wantsEvents() {
		if err = s.subscribe(); err != nil {
			return err
		}
		s.closeWith(func() { s.events.Close() })
		s.pool.Watch(s.events) // before the index: events of a worker must not arrive after the index forgot it
	}
	s.pool.OnLeave(index.Forget)
	s.pool.OnLeave(s.book.Forget)
	s.pool.OnLeave(s.sessions.Forget)
	s.responses = session.NewTable(session.Config{TTL: responseTTL})
	s.pool.OnLeave(s.responses.Forget)

	if s.cluster, err = openCluster(s.options, s.ready, s.m, s.log); err != nil {
		return err
	}
	if s.replicas, err = s.newReplicas(); err != nil {
		return err
	}
	s.ready.Await("as many endpoints as --router-min-initial-workers", s.pool.AwaitFirst(s.sources.MinWorkers))
	s.gauges = s.followEngines(ctx)
	pages.Store(s.gauges)
	if s.remoteOf, err = s.models.RemoteOf(s.pool, s.tokenizerKey, s.m, s.log); err != nil {
		return err
	}
	s.rewrites, s.objectives = new(modelrewrite.Rules), new(router.Objectives)
	if err := s.rewrites.Set(s.models.Rewrites); err != nil {
		return err
	}
	s.cluster.FollowPolicies(ctx, func(now kube.Policy) {
		s.objectives.Set(now.Priorities)
		if err := s.rewrites.Set(slices.Concat(s.models.Rewrites, now.Rewrites)); err != nil {
			s.log.Error("the cluster's model rewrites are invalid; the earlier ones stay in force", "error", err)
		}
	})
	s.join = &join.Join{Config: &s.sources, Models: &s.models, Loaded: s.loaded, Files: s.files,
		Gauges: &s.options.gauges, Cluster: s.cluster, Pool: s.pool, Metrics: s.m, Log: s.log}
	stopFollowing, err := s.join.Follow(ctx)
	if err != nil {
		return err
	}
	s.closeWith(stopFollowing)
	if s.events != nil {
		if err := s.events.Room(); err != nil {
			return err
		}
	}
	s.reader = indexerapi.NewReader(s.pool, index, s.events, s.log)
	s.warmUp(ctx)
	s.book.Export(s.m)
	s.sessions.Export(s.m)
	index.Export(s.m)
	metrics.Gauge(s.m, metrics.PrefixIndexer, func() int { return index.Stats().Entries })
	feed.Export(s.m, s.events)
	s.loaded.Export(s.m)
	enginemetrics.Export(s.m, cmp.Or(s.sources.Kube.PoolName, withoutPool), s.pool, s.gauges)
	return nil
}

// warmUp takes over what other replicas and --index-peers have.
func (s *server) warmUp(ctx context.Context) {
	if len(s.indexPeers) == 0 && s.replicas == nil {
		return
	}
	warm, cancel := context.WithTimeout(ctx, s.warmUpTimeout)
	defer cancel()
	s.cluster.Await(warm) // kvepp can only use what a peer says of workers that it knows
	s.replicas.Follow(ctx, warm, replicaService(s.cluster))
	if s.events != nil {
		s.reader.WarmUpFrom(warm, slices.Concat(indexerapi.Sources(s.indexPeers, s.adminToken.Text()),
			s.replicas.Sources()))
		s.replicas.GiveIndex(s.reader)
	}
}

// decide creates the router, and the external processor that uses it.
func (s *server) decide(ctx context.Context) {
	var promptComputed func(kvblock.Worker, int, int)
	if s.events != nil {
		promptComputed = s.events.PromptComputed
	}
	engine := s.models.Engine()
	s.ladder = router.NewLadder(ladder.DefaultSeenBytes)
	if s.hold.On {
		s.admission = &router.Admission{Controller: admission.New(s.hold), Bound: s.queue.Size,
			Timeout: s.queue.Timeout}
	}
	c := s.routing
	c.Models, c.Adapters, c.Remote = s.loaded, s.adapters, s.tokenizers
	c.RemoteOf, c.Rewrites, c.Objectives = s.remoteOf, s.rewrites, s.objectives
	c.Checks = s.models.StartChecks(ctx, s.loaded, s.tokenizers, s.join.Finder(func() {}), s.log)
	c.UpperBound = s.models.UpperBound(s.loaded)
	c.PromptComputed, c.Predict = promptComputed, s.predict()
	c.Metrics, c.Picker = s.m.NewRouter(s.identity()), s.m.NewPicker()
	c.Explain, c.Keep = s.proxy.DecisionHeaders, s.keptDecisions()
	c.Memory, c.Sessions, c.Responses, c.Ladder = s.memory, s.sessions, s.responses, s.ladder
	if s.gauges != nil && engine == prompt.Dynamo {
		c.FirstTokens = &s.firstTokens
	}
	c.Frontends, c.StockPrefill = engine == prompt.Dynamo, s.proxy.PrefillerHeader
	c.KVUsage, c.Eject, c.FirstByte = kvUsage(s.gauges), s.health, s.ejection.FirstByte
	c.Queue, c.Admission, c.Recorder = s.queue.Room(), s.admission, s.recorder
	if s.queue.File != nil {
		c.TenantHeader = s.queue.File.TenantHeader
	}
	if s.replicas != nil {
		c.Charged = s.replicas.Charge
	}
	c.CountTokens = c.Queue != nil && c.Queue.Profiles.Waits() || c.Thresholds.ReadTokens() || s.recorder != nil
	if s.proxy.Shadow { // kvepp holds no request back, and follows no session
		c.Queue, c.Admission, c.Fallbacks, c.Sessions, c.FirstTokens = nil, nil, 0, nil, nil
	}
	s.router = router.New(c, s.pool, s.index, s.book, s.m, s.log)
	s.pool.Watch(s.router)
	s.replicas.RoutedBy(s.router)
	if s.admission != nil {
		s.pool.OnLeave(s.admission.Forget)
	}
	s.router.Export()
	s.health.Export(s.m)
	s.live = &admin.Live{Pool: s.pool, Router: s.router, Index: s.index, Sessions: s.sessions, Health: s.health,
		Events: s.events, Gauges: s.gauges, Metrics: s.m, Version: readBuild().version, Started: time.Now()}
	s.live.Export(s.m)
	p := s.proxy
	p.IgnoreHints, p.Frontends, p.TenantHeader = c.IgnoreHints, c.Frontends, c.TenantHeader
	p.MaxParseBytes, p.Memory = s.maxParseBytes, s.memory
	p.Tracer, p.AccessLog = s.tracer, s.accessLog
	s.picker = extproc.NewServer(p, s.router, s.m, s.log)
	s.picker.Export()
	if s.ports.AdminAddress != "" {
		go s.live.Remember(ctx)
	}
}

// followPolicy applies the policy file again when it changes.
func (s *server) followPolicy(ctx context.Context) error {
	if s.queue.PolicyFile == "" {
		return nil
	}
	file := boundedfile.Watched{Path: s.queue.PolicyFile, Most: flags.MaxFileBytes, What: "policy file", Log: s.log,
		Use: func([]byte) error { return s.applyPolicy() }, Refused: s.m.PolicyFileRefused.Inc}
	return file.Watch(ctx)
}

// applyPolicy reads the policy file and applies its classes and weights. Errors: the file's; a change that needs a
// restart.
func (s *server) applyPolicy() error {
	now, err := s.parseAgain()
	if err != nil {
		return err
	}
	weights := map[string]bool{}
	for _, key := range queue.ParameterKeys {
		if f := queue.FlagOf(now.flags, key); f != nil {
			weights[f.Name] = true
		}
	}
	fixed := ""
	s.flags.VisitAll(func(f *pflag.Flag) {
		if now.flags.Lookup(f.Name).Value.String() != f.Value.String() && !weights[f.Name] {
			fixed = f.Name
		}
	})
	if now.queue.File.TenantHeader != s.queue.File.TenantHeader {
		return fmt.Errorf("restart kvepp for this change: tenant_header %q", now.queue.File.TenantHeader)
	}
	if fixed != "" {
		return fmt.Errorf("restart kvepp for this change: it sets --%s", fixed)
	}
	policy := router.Policy{Weights: now.scoring}
	if room := now.queue.Room(); room != nil {
		policy.Queues = room.Profiles
	}
	if err := s.router.SetPolicy(policy); err != nil {
		return fmt.Errorf("restart kvepp for this change: %w", err)
	}
	return nil
}

// adminHandler handles requests at --admin-address.
func (s *server) adminHandler() http.Handler {
	mux := http.NewServeMux()
	s.reader.Handle(mux)
	admin.HandleDecisions(mux, s.router, s.traceURL)
	admin.HandlePrefixes(mux, s.router)
	admin.HandlePick(mux, s.router, hostName())
	if s.ladder != nil {
		admin.HandleLadder(mux, s.ladder.Sums, s.ladder.Seen, s.router.Miscounted,
			s.options.scoring.Policy == scoring.Time)
	}
	admin.HandleBusyThreshold(mux, s.router, s.log)
	admin.HandleWorkers(mux, s.router)
	mux.HandleFunc("GET /debug/replicas", s.replicas.Handle)
	admin.HandleFleet(mux, s.live.Fleet, &s.live.History)
	admin.HandleSettings(mux, flags.Settings(s.flags))
	web.Handle(mux)
	listen.HandleProfiles(mux)
	if s.adminToken == nil {
		return mux
	}
	return web.NewGuard(s.adminToken.Text).Protect(mux, listen.Guarded(mux, s.adminToken))
}

// metricsHandler handles requests for metrics.
func (s *server) metricsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", listen.MetricsPage(s.m))
	return s.cluster.Guard(listen.Guarded(mux, s.metricsToken))
}

// listen serves until ctx ends, then drains.
func (s *server) listen(ctx context.Context) error {
	defer s.cluster.Elect(ctx)()
	d := &listen.Daemon{
		Config:        s.ports,
		Proxies:       s.proxies,
		Picker:        s.picker,
		AccessLog:     extproc.NewAccessLog(s.router),
		MaxParseBytes: s.maxParseBytes,
		MaxStreams:    s.proxy.MaxStreams,
		MetricsPage:   s.metricsHandler(),
		Ready:         s.ready,
		HandOver:      func() <-chan struct{} { return s.cluster.HandedOver(s.ports.DrainDelay) },
		Metrics:       s.m,
		Log:           s.log,
	}
	if s.ports.AdminAddress != "" {
		d.Admin = s.adminHandler()
	}
	return d.Run(ctx)
}
