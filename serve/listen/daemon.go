package listen

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/health"

	"kvepp/extproc"
	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
)

// Config says where kvepp serve listens, and how it ends.
type Config struct {
	BindAddress              string // empty: all interfaces
	GRPCPort, HealthPort     uint16
	MetricsPort              uint16 // 0: none
	MetricsAddress           string // in place of BindAddress and MetricsPort; empty: none
	AdminAddress             string // empty: none
	Hosts                    Hosts
	DrainTimeout, DrainDelay time.Duration
}

// At returns the address of a port.
func (c *Config) At(port uint16) string {
	return net.JoinHostPort(c.BindAddress, strconv.Itoa(int(port)))
}

// Daemon is what kvepp serve listens for.
type Daemon struct {
	Config
	Proxies       *Proxies
	Picker        *extproc.Server
	AccessLog     *extproc.AccessLog
	MaxParseBytes int // largest body that is read
	MaxStreams    int // 0: no limit
	MetricsPage   http.Handler
	Admin         http.Handler // nil: none
	Ready         *Readiness
	HandOver      func() <-chan struct{} // begins to hand over leadership; closed when it has
	Metrics       *metrics.Metrics
	Log           *slog.Logger

	checks  *health.Server
	grpc    *grpc.Server // the external processor
	plain   *grpc.Server // health alone, without TLS
	failed  chan error   // of servers that ended
	closers []func()
}

// Run serves until ctx ends, then drains. While a condition of Ready does not hold, health checks say NOT_SERVING.
func (d *Daemon) Run(ctx context.Context) error {
	d.checks, d.failed = health.NewServer(), make(chan error, 4)
	d.Ready.begin(ctx, d.checks, d.Log)
	defer func() {
		for _, f := range slices.Backward(d.closers) {
			f()
		}
	}()
	if err := d.open(); err != nil {
		return err
	}
	go d.Proxies.WarnWithoutProxy(ctx, d.At(d.GRPCPort))
	select {
	case err := <-d.failed:
		return err
	case <-ctx.Done():
	}
	// Reset the handler, so that a second signal ends the process at once.
	signal.Reset(syscall.SIGTERM, syscall.SIGINT)
	return d.drain()
}

// open listens at all addresses, and serves there.
func (d *Daemon) open() error {
	picker, err := d.listen("ext_proc", "grpc-port", d.GRPCPort, Connections())
	if err != nil {
		return err
	}
	plain, err := d.listen("health", "grpc-health-port", d.HealthPort, webConnections())
	if err != nil {
		return err
	}
	// In FULL_DUPLEX_STREAMED mode pieces are small; in BUFFERED mode one message holds the whole body.
	codec, largest := encoding.GetCodecV2("proto"), max(d.MaxParseBytes, 4<<20)+64<<10
	methods := healthMethods()
	methods[extprocv3.ExternalProcessor_Process_FullMethodName] = &connlimit.Method{Codec: codec, Message: largest}
	methods[accesslogv3.AccessLogService_StreamAccessLogs_FullMethodName] = &connlimit.Method{
		Codec: codec, Message: maxAccessLog, Streams: maxAccessLogs, Idle: true}
	limits := append(Options(picker, methods),
		grpc.Creds(d.Proxies),
		grpc.MaxRecvMsgSize(largest),
		// A proxy has a few connections and many streams: large buffers save system calls and cost little. Windows of a
		// fixed size need no pings to measure a better one. They bound the responses that wait here for slow clients:
		// with four times these sizes, 2,000 such responses of 1 MB took 550 MiB instead of 200.
		grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10),
		grpc.InitialWindowSize(256<<10), grpc.InitialConnWindowSize(4<<20),
		// Short requests reuse goroutines whose stacks have grown; longer ones get goroutines of their own.
		grpc.NumStreamWorkers(128),
	)
	if d.MaxStreams > 0 {
		limits = append(limits, grpc.MaxConcurrentStreams(uint32(d.MaxStreams+spareStreams)))
	}
	d.grpc = grpc.NewServer(limits...)
	extprocv3.RegisterExternalProcessorServer(d.grpc, d.Picker)
	accesslogv3.RegisterAccessLogServiceServer(d.grpc, d.AccessLog)
	d.grpc.RegisterService(&healthService, d.checks)
	d.plain = grpc.NewServer(append(Options(plain, healthMethods()),
		grpc.MaxConcurrentStreams(maxHealthChecks), grpc.MaxRecvMsgSize(maxHealthCheck),
		grpc.InitialWindowSize(64<<10), grpc.InitialConnWindowSize(64<<10), // fixed; the least that grpc allows
		grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(4<<10))...)
	d.plain.RegisterService(&healthService, d.checks)
	d.closers = append(d.closers, d.plain.Stop, d.grpc.Stop)
	d.serve("ext_proc", picker, d.Proxies.Mode(), d.grpc.Serve)
	d.serve("health", plain, "off", d.plain.Serve)

	switch {
	case d.MetricsAddress != "":
		err = d.openWeb("metrics", "metrics", "metrics-address", d.MetricsAddress, d.MetricsPage)
	case d.MetricsPort != 0:
		err = d.openWeb("metrics", "metrics", "metrics-port", d.At(d.MetricsPort), d.MetricsPage)
	}
	if err == nil && d.AdminAddress != "" {
		err = d.openWeb("admin requests", "admin", "admin-address", d.AdminAddress, d.Admin)
	}
	return err
}

// listen listens at the gRPC port of a flag, for at most most connections. name is its label in metrics.
func (d *Daemon) listen(name, flag string, port uint16, most int) (*connlimit.Listener, error) {
	raw, err := At(flag, d.At(port))
	if err != nil {
		return nil, err
	}
	d.closers = append(d.closers, func() { raw.Close() })
	return Limit(raw, name, most, d.Metrics), nil
}

// openWeb serves h over HTTP at the address of a flag. name is the listener's label in metrics.
func (d *Daemon) openWeb(what, name, flag, address string, h http.Handler) error {
	raw, err := At(flag, address)
	if err != nil {
		return err
	}
	web := WebServer(h, &d.Hosts)
	d.closers = append(d.closers, func() { web.Close() })
	d.serve(what, raw, "off", func(raw net.Listener) error { return serveWeb(web, raw, name, d.Metrics) })
	return nil
}

// serve runs a server at a listener, and sends to failed if it ends early.
func (d *Daemon) serve(what string, at net.Listener, tlsMode string, run func(net.Listener) error) {
	d.Log.Info("listening", "for", what, "address", at.Addr().String(), "tls", tlsMode)
	go func() {
		if err := run(at); err != nil && !errors.Is(err, http.ErrServerClosed) {
			d.failed <- fmt.Errorf("%s: %w", what, err)
		}
	}()
}

// lastResponses is how long before the end of --drain-timeout kvepp refuses requests that still wait: without a
// response their clients would have a broken connection.
const lastResponses = time.Second

// drain stops the servers in order. A ready replica first hands over its leadership. Then health checks answer
// NOT_SERVING, kvepp serves new requests for --drain-delay, and running requests may end within --drain-timeout.
func (d *Daemon) drain() error {
	if d.Ready.ready() {
		select {
		case <-d.HandOver():
		case err := <-d.failed:
			return err
		}
	}
	d.Log.Info("kvepp stops: it serves new requests until proxies notice, and lets running requests end",
		"new_requests_for", d.DrainDelay, "running_requests_for", d.DrainTimeout,
		"running_requests", d.Picker.Streams())
	announce(d.checks, false)
	within, cancel := context.WithTimeout(context.Background(), d.DrainTimeout)
	defer cancel()
	defer time.AfterFunc(d.DrainTimeout-lastResponses, d.Picker.RefuseWaiting).Stop()
	select { // until its next health check a proxy would get an error for each request
	case <-time.After(d.DrainDelay):
	case <-within.Done():
	case err := <-d.failed:
		return err
	}
	drained := make(chan struct{})
	d.AccessLog.Stop()
	go func() { d.grpc.GracefulStop(); close(drained) }()
	select {
	case <-drained:
	case <-within.Done():
		d.Log.Warn("requests still run after --drain-timeout; kvepp aborts them")
	}
	return nil
}
