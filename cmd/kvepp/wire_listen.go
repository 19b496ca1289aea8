package main

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	"kvepp/extproc"
	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/serve/logs"
	"kvepp/serve/secrets"
)

// listen serves until ctx ends, then drains. While a condition of s.ready does not hold, health checks say NOT_SERVING.
func (s *server) listen(ctx context.Context) error {
	defer s.cluster.Elect(ctx)()
	l := &listeners{server: s, checks: health.NewServer(), failed: make(chan error, 4)}
	unmet := s.ready.unmetConditions()
	announce(l.checks, unmet == "")
	if unmet != "" {
		s.log.Info("not ready yet", "waits_for", unmet)
	}
	defer l.close()
	if err := l.open(); err != nil {
		return err
	}
	go s.proxies.WarnWithoutProxy(ctx, s.addressOf(s.grpcPort))
	unmet, err := l.watchReadiness(ctx, unmet)
	if err != nil {
		return err
	}
	// Reset the handler, so that a second signal ends the process at once.
	signal.Reset(syscall.SIGTERM, syscall.SIGINT)
	return l.drain(unmet == "")
}

func (s *server) addressOf(port uint16) string {
	return net.JoinHostPort(s.bindAddress, strconv.Itoa(int(port)))
}

// listeners are the servers of a running kvepp.
type listeners struct {
	*server
	checks    *health.Server
	grpc      *grpc.Server // the external processor
	plain     *grpc.Server // health alone, without TLS
	accessLog *extproc.AccessLog
	failed    chan error // of servers that ended
	closers   []func()
}

func (l *listeners) close() {
	for _, f := range slices.Backward(l.closers) {
		f()
	}
}

// open listens at all addresses, and serves there.
func (l *listeners) open() error {
	picker, err := l.listenLimited("ext_proc", "grpc-port", l.grpcPort, connections())
	if err != nil {
		return err
	}
	plain, err := l.listenLimited("health", "grpc-health-port", l.grpcHealthPort, webConnections())
	if err != nil {
		return err
	}
	// In FULL_DUPLEX_STREAMED mode pieces are small; in BUFFERED mode one message holds the whole body.
	codec, largest := extproc.Codec(), max(l.maxParseBytes, 4<<20)+64<<10
	methods := healthMethods()
	methods[extprocv3.ExternalProcessor_Process_FullMethodName] = &connlimit.Method{Codec: codec, Message: largest}
	methods[accesslogv3.AccessLogService_StreamAccessLogs_FullMethodName] = &connlimit.Method{
		Codec: codec, Message: maxAccessLog, Streams: maxAccessLogs, Idle: true}
	limits := append(grpcLimits(picker, methods),
		grpc.Creds(l.proxies),
		grpc.MaxRecvMsgSize(largest),
		grpc.ForceServerCodecV2(codec),
		// A proxy has a few connections and many streams: large buffers save system calls and cost little. Windows of a
		// fixed size need no pings to measure a better one. They bound the responses that wait here for slow clients:
		// with four times these sizes, 2,000 such responses of 1 MB took 550 MiB instead of 200.
		grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10),
		grpc.InitialWindowSize(256<<10), grpc.InitialConnWindowSize(4<<20),
		// Short requests reuse goroutines whose stacks have grown; longer ones get goroutines of their own.
		grpc.NumStreamWorkers(128),
	)
	if l.maxStreams > 0 {
		limits = append(limits, grpc.MaxConcurrentStreams(uint32(l.maxStreams+spareStreams)))
	}
	l.accessLog = extproc.NewAccessLog(l.router)
	l.grpc = grpc.NewServer(limits...)
	extprocv3.RegisterExternalProcessorServer(l.grpc, l.picker)
	accesslogv3.RegisterAccessLogServiceServer(l.grpc, l.accessLog)
	l.grpc.RegisterService(&healthService, l.checks)
	l.plain = grpc.NewServer(append(grpcLimits(plain, healthMethods()),
		grpc.MaxConcurrentStreams(maxHealthChecks), grpc.MaxRecvMsgSize(maxHealthCheck),
		grpc.InitialWindowSize(64<<10), grpc.InitialConnWindowSize(64<<10), // fixed; the least that grpc allows
		grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(4<<10))...)
	l.plain.RegisterService(&healthService, l.checks)
	l.closers = append(l.closers, l.plain.Stop, l.grpc.Stop)
	l.serve("ext_proc", picker, l.proxies.Mode(), l.grpc.Serve)
	l.serve("health", plain, "off", l.plain.Serve)

	switch metrics := l.metricsHandler(); {
	case l.metricsAddress != "":
		err = l.openWeb("metrics", "metrics", "metrics-address", l.metricsAddress, metrics)
	case l.metricsPort != 0:
		err = l.openWeb("metrics", "metrics", "metrics-port", l.addressOf(l.metricsPort), metrics)
	}
	if err == nil && l.adminAddress != "" {
		err = l.openWeb("admin requests", "admin", "admin-address", l.adminAddress, l.adminHandler())
	}
	return err
}

// listenLimited listens at the gRPC port of a flag, for at most most connections. name is its label in metrics.
func (l *listeners) listenLimited(name, flag string, port uint16, most int) (*connlimit.Listener, error) {
	raw, err := listenAt(flag, l.addressOf(port))
	if err != nil {
		return nil, err
	}
	l.closers = append(l.closers, func() { raw.Close() })
	return limitConnections(raw, name, most, l.m), nil
}

// openWeb serves h over HTTP at the address of a flag. name is the listener's label in metrics.
func (l *listeners) openWeb(what, name, flag, address string, h http.Handler) error {
	raw, err := listenAt(flag, address)
	if err != nil {
		return err
	}
	web := webServer(h, &l.hosts)
	l.closers = append(l.closers, func() { web.Close() })
	l.serve(what, raw, "off", func(raw net.Listener) error { return serveWeb(web, raw, name, l.m) })
	return nil
}

// serve runs a server at a listener, and sends to failed if it ends early.
func (l *listeners) serve(what string, at net.Listener, tlsMode string, run func(net.Listener) error) {
	l.log.Info("listening", "for", what, "address", at.Addr().String(), "tls", tlsMode)
	go func() {
		if err := run(at); err != nil && !errors.Is(err, http.ErrServerClosed) {
			l.failed <- fmt.Errorf("%s: %w", what, err)
		}
	}()
}

// watchReadiness announces changes of readiness until ctx ends. It takes and returns the unmet conditions.
func (l *listeners) watchReadiness(ctx context.Context, unmet string) (string, error) {
	for ctx.Err() == nil {
		select {
		case err := <-l.failed:
			return unmet, err
		case <-l.ready.changed:
			// After ctx has ended, the end of the election says nothing about readiness.
			if now := l.ready.unmetConditions(); now != unmet && ctx.Err() == nil {
				l.log.Info(map[bool]string{true: "ready", false: "not ready"}[now == ""], "waits_for", now)
				unmet = now
				announce(l.checks, unmet == "")
			}
		case <-ctx.Done():
		}
	}
	return unmet, nil
}

// drain stops the servers in order. A ready replica first hands over its leadership. Then health checks answer
// NOT_SERVING, kvepp serves new requests for --drain-delay, and running requests may end within --drain-timeout.
func (l *listeners) drain(ready bool) error {
	if ready {
		select {
		case <-l.cluster.HandedOver(l.drainDelay):
		case err := <-l.failed:
			return err
		}
	}
	l.log.Info("kvepp stops: it serves new requests until proxies notice, and lets running requests end",
		"new_requests_for", l.drainDelay, "running_requests_for", l.drainTimeout,
		"running_requests", l.picker.Streams())
	announce(l.checks, false)
	within, cancel := context.WithTimeout(context.Background(), l.drainTimeout)
	defer cancel()
	select { // until its next health check a proxy would get an error for each request
	case <-time.After(l.drainDelay):
	case <-within.Done():
	case err := <-l.failed:
		return err
	}
	drained := make(chan struct{})
	l.accessLog.Stop()
	go func() { l.grpc.GracefulStop(); close(drained) }()
	select {
	case <-drained:
	case <-within.Done():
		l.log.Warn("requests still run after --drain-timeout; kvepp aborts them")
	}
	return nil
}

// Limits of health checks and of proxies' access logs.
const (
	maxHealthChecks = 16        // streams of one connection to the health port
	maxHealthCheck  = 4 << 10   // bytes of a message
	maxWatches      = 256       // streams that wait for changes of the health, over all connections to a port
	maxAccessLog    = 128 << 10 // bytes of a message: Envoy's default buffer, and an entry with headers of 60 KiB
	maxAccessLogs   = 1024      // streams of access logs: one for each thread of each Envoy
)

// healthService is the health service with streams alone: grpc receives the message of another method by itself, with
// the limit of the whole server.
var healthService = grpc.ServiceDesc{
	ServiceName: healthv1.Health_ServiceDesc.ServiceName,
	HandlerType: healthv1.Health_ServiceDesc.HandlerType,
	Streams: append([]grpc.StreamDesc{
		{StreamName: "Check", ServerStreams: true, Handler: answerOne(healthv1.HealthServer.Check)},
		{StreamName: "List", ServerStreams: true, Handler: answerOne(healthv1.HealthServer.List)},
	}, healthv1.Health_ServiceDesc.Streams...), // Watch
}

// answerOne returns the handler of a method with one message each way.
func answerOne[In, Out any](
	answer func(healthv1.HealthServer, context.Context, *In) (*Out, error)) grpc.StreamHandler {
	return func(server any, stream grpc.ServerStream) error {
		in := new(In)
		if err := stream.RecvMsg(in); err != nil {
			return err
		}
		out, err := answer(server.(healthv1.HealthServer), stream.Context(), in)
		if err != nil {
			return err
		}
		return stream.SendMsg(out)
	}
}

// healthMethods returns the limits of the health service's methods at one port.
func healthMethods() map[string]*connlimit.Method {
	check := &connlimit.Method{Codec: encoding.GetCodecV2("proto"), Message: maxHealthCheck}
	return map[string]*connlimit.Method{
		healthv1.Health_Check_FullMethodName: check,
		healthv1.Health_List_FullMethodName:  check,
		healthv1.Health_Watch_FullMethodName: {
			Codec: check.Codec, Message: maxHealthCheck, Streams: maxWatches, Idle: true},
	}
}

// listenAt listens at the address of a flag; flag has no dashes. Errors say what to do.
func listenAt(flag, address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf(
			"--%s: the address %s is in use; stop the process that listens there (ss -ltnp shows it), or give "+
				"another port",
			flag,
			address,
		)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf(
			"--%s: this user may not listen at %s; give a port above 1023, or the capability NET_BIND_SERVICE",
			flag,
			address,
		)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf(
			"--%s: this machine has no network interface with the address of %s; give one that \"ip address\" shows",
			flag,
			address,
		)
	case err != nil:
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	return l, nil
}

// healthServices are the service names in health checks of gateways and probes. Source: GAIE's endpoint picker and its
// charts.
var healthServices = []string{
	"",
	liveness,
	"readiness",
	"envoy.service.ext_proc.v3.ExternalProcessor",
	"inference-extension",
}

const liveness = "liveness"

// announce sets the health of all services: SERVING or NOT_SERVING, depending on serving. liveness is always SERVING.
func announce(checks *health.Server, serving bool) {
	for _, name := range healthServices {
		status := healthv1.HealthCheckResponse_SERVING
		if !serving && name != liveness {
			status = healthv1.HealthCheckResponse_NOT_SERVING
		}
		checks.SetServingStatus(name, status)
	}
}

// readiness is the set of conditions that must hold before kvepp reports itself ready. Requests that arrive earlier are
// served nevertheless.
type readiness struct {
	mu      sync.Mutex
	unmet   map[string]bool // guarded by mu
	changed chan struct{}   // has one value after a change
}

func newReadiness() *readiness {
	return &readiness{unmet: map[string]bool{}, changed: make(chan struct{}, 1)}
}

// condition adds a condition that does not hold yet. The caller reports changes with the returned function.
func (r *readiness) condition(what string) func(holds bool) {
	set := func(holds bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if holds {
			delete(r.unmet, what)
		} else {
			r.unmet[what] = true
		}
		select {
		case r.changed <- struct{}{}:
		default:
		}
	}
	set(false)
	return set
}

// await adds a condition that holds once done is closed.
func (r *readiness) await(what string, done <-chan struct{}) {
	set := r.condition(what)
	select {
	case <-done:
		set(true)
	default:
		go func() {
			<-done
			set(true)
		}()
	}
}

// unmetConditions returns the conditions that do not hold; "" if all do.
func (r *readiness) unmetConditions() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(r.unmet)), ", ")
}

// firstWorkers waits until the pool has n endpoints that can serve requests. It stops looking after that.
//
// Source: dynamo-llm 1.6.1, kv_router, which waits for the same number before it routes.
type firstWorkers struct {
	pool    *pool.Pool
	n       int
	once    sync.Once
	reached chan struct{} // closed when n endpoints are present
}

// awaitWorkers returns a watcher that waits for n endpoints of p. The caller adds it to p's watchers.
func awaitWorkers(p *pool.Pool, n int) *firstWorkers {
	w := &firstWorkers{pool: p, n: n, reached: make(chan struct{})}
	w.check()
	return w
}

func (w *firstWorkers) check() {
	select {
	case <-w.reached:
		return // without this, each of thousands of workers that join together would cause a scan of all
	default:
	}
	s := w.pool.Acquire()
	defer s.Release()
	found := 0
	var last *pool.Endpoint
	for i := range s.Workers { // the ranks of an endpoint are adjacent
		if e := s.Workers[i].Endpoint; e != last && (e.Role == pool.Aggregated || e.Role == pool.Decode) {
			found++
			last = e
		}
	}
	if found >= w.n {
		w.once.Do(func() { close(w.reached) })
	}
}

func (w *firstWorkers) WorkerJoined(pool.Worker) { w.check() }

func (*firstWorkers) WorkerLeft(kvblock.Worker) {}

// Limits on the resources that a peer of a gRPC port can hold.
const (
	handshakeWithin = 10 * time.Second // for TLS and the first HTTP/2 frames
	idleConnection  = 15 * time.Minute // a connection without a stream is closed gracefully
	askSilentAfter  = time.Minute      // kvepp pings a connection that receives nothing
	silentWithin    = 20 * time.Second // for the answer to a ping
	leastPings      = 5 * time.Second  // between a peer's pings; a peer that pings more often is disconnected
	// bytes of names and values in a stream's gRPC metadata; the client's headers are not part of it
	maxGRPCMetadata  = 16 << 10
	spareStreams     = 1000 // per connection, beyond --max-streams: these get an error with a reason
	leastConnections = 64
	mostConnections  = 4096
)

// connections is the limit on the connections of a gRPC port: a sixteenth of the process's file descriptors, because
// subscriptions to KV events need most of them.
func connections() int { return connlimit.Share(16, leastConnections, mostConnections) }

// grpcLimits returns gRPC server options that bound what each peer can use. methods has the server's methods by name.
// A stream counts as a request of its connection of l; nil: none does.
func grpcLimits(l *connlimit.Listener, methods map[string]*connlimit.Method) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ConnectionTimeout(handshakeWithin),
		grpc.KeepaliveParams(
			keepalive.ServerParameters{MaxConnectionIdle: idleConnection, Time: askSilentAfter, Timeout: silentWithin},
		),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: leastPings, PermitWithoutStream: true}),
		grpc.MaxHeaderListSize(maxGRPCMetadata),
		grpc.StreamInterceptor(
			func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
				return l.Serve(server, stream, methods[info.FullMethod], handler)
			},
		),
	}
}

// markInUse marks the connection of a stream as in use. It returns the function that ends the mark.
func markInUse(ctx context.Context, l *connlimit.Listener) func() {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return func() {}
	}
	c := l.Find(p.LocalAddr, p.Addr)
	c.Begin()
	return c.End
}

// limitConnections returns a listener with at most most connections. name is its label in metrics.
func limitConnections(l net.Listener, name string, most int, m *metrics.Metrics) *connlimit.Listener {
	limited := connlimit.New(l, most)
	metrics.Gauge(m, metrics.Connections, func() int { open, _, _ := limited.Counts(); return open }, "listener", name)
	metrics.Counter(m, metrics.ConnectionsClosed, func() int64 { _, n, _ := limited.Counts(); return n },
		"listener", name, "outcome", "evicted")
	metrics.Counter(m, metrics.ConnectionsClosed, func() int64 { _, _, n := limited.Counts(); return n },
		"listener", name, "outcome", "refused")
	return limited
}

// Limits on the resources that a client of an HTTP listener can hold.
const (
	leastWebConnections = 32
	mostWebConnections  = 256
	maxWebHeader        = 64 << 10 // bytes of a request's headers
	webHeaderWithin     = 10 * time.Second
	webRequestWithin    = 60 * time.Second // to send the whole request, and to receive the response
	webIdle             = 5 * time.Minute
	maxMetricsReadings  = 32 // concurrent requests for the metrics page
)

// webConnections is the limit on the connections of an HTTP listener: a sixteenth of the process's file descriptors.
func webConnections() int { return connlimit.Share(16, leastWebConnections, mostWebConnections) }

// guard rejects requests over loopback whose Host header does not name this machine. Otherwise a web page in a browser
// on this machine could resolve its own name to 127.0.0.1 and read the responses as its own (DNS rebinding); its
// requests carry that name in the Host header.
func (o *webHosts) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr); ok && isLoopback(local) &&
			!o.allowed(req.Host) {
			http.Error(
				w,
				fmt.Sprintf(
					"the header Host names %.100q: over loopback it must be localhost, a loopback address, or a name "+
						"of --allowed-hosts",
					req.Host,
				),
				http.StatusForbidden,
			)
			return
		}
		next.ServeHTTP(w, req)
	})
}

func isLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// allowed reports whether a request may have this Host header. Browsers never send an empty one.
func (o *webHosts) allowed(header string) bool {
	host := header
	if h, _, err := net.SplitHostPort(header); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || host == "localhost" ||
		slices.ContainsFunc(o.names, func(name string) bool { return strings.EqualFold(name, host) }) {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && ip.Unmap().IsLoopback()
}

// webServer returns a server that slow clients cannot block: a request must arrive, and its response be received,
// within a minute. Long operations, such as a dump, set their own deadlines. Web pages in a browser cannot change
// anything.
func webServer(h http.Handler, hosts *webHosts) *http.Server {
	h = hosts.guard(http.NewCrossOriginProtection().Handler(h))
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: webHeaderWithin,
		ReadTimeout:       webRequestWithin,
		WriteTimeout:      webRequestWithin,
		IdleTimeout:       webIdle,
		MaxHeaderBytes:    maxWebHeader,
		ErrorLog:          logs.HTTPErrors(),
	}
}

// metricsPage answers requests for metrics. Readers that do not read make room for others.
func metricsPage(m *metrics.Metrics, o promhttp.HandlerOpts) http.Handler {
	busy := func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "other readers take all places; try again later", http.StatusServiceUnavailable)
	}
	return connlimit.Limit(promhttp.HandlerFor(m.Registry, o).ServeHTTP, busy, maxMetricsReadings, connlimit.LeastWait)
}

// serveWeb serves a listener with a bounded number of connections. name is its label in metrics.
func serveWeb(s *http.Server, l net.Listener, name string, m *metrics.Metrics) error {
	connlimit.HTTP(s)
	return s.Serve(limitConnections(l, name, webConnections(), m))
}

// serve answers requests with h until ctx ends, then lets running requests end. what names their purpose in the log.
func (o *httpService) serve(
	ctx context.Context,
	what string,
	h http.Handler,
	m *metrics.Metrics,
	log *slog.Logger,
) error {
	server := webServer(h, &o.hosts)
	l, err := listenAt("port", net.JoinHostPort(o.host, strconv.Itoa(int(o.port))))
	if err != nil {
		return err
	}
	log.Info("listening", "for", what, "address", l.Addr().String(), "tls", "off")
	failed := make(chan error, 1)
	go func() { failed <- serveWeb(server, l, "http", m) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	log.Info("kvepp stops: running requests have 5 s to end")
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(last)
}

// guarded passes requests with the right token, and health requests. With a nil token it passes all.
func guarded(next http.Handler, token *secrets.Token) http.Handler {
	if token == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		given, bearer := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
		if req.URL.Path != "/health" &&
			!(bearer && subtle.ConstantTimeCompare([]byte(given), []byte(token.Text())) == 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(
				w,
				"the header \"Authorization: Bearer TOKEN\" must have this address's token (--admin-token-file, "+
					"--metrics-token-file)",
				http.StatusUnauthorized,
			)
			return
		}
		next.ServeHTTP(w, req)
	})
}

// handleProfiles serves /debug/pprof/ for `go tool pprof`, but not the command line, which may hold a password.
func handleProfiles(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof/", pprof.Index) // also serves the named profiles below it
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
}
