package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/extproc"
	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
)

// listen serves until ctx ends, then drains: health says so first, so that proxies stop sending. Requests are not
// wanted, and health says so, while anything of ready does not hold. Where they are wanted when ctx ends, draining
// begins when the channel is closed that handOver returns. maxParseBytes is the size of the largest body that is read.
func listen(
	ctx context.Context,
	o *options,
	maxParseBytes int,
	picker *extproc.Server,
	accessLog *extproc.AccessLog,
	proxies *proxies,
	admin, seen http.Handler,
	ready *readiness,
	handOver func() <-chan struct{},
	m *metrics.Metrics,
	log *slog.Logger,
) error {
	checks := health.NewServer()
	waits := ready.waits()
	announce(checks, waits == "")
	if waits != "" {
		log.Info("not ready yet", "waits_for", waits)
	}
	port := func(port uint16) string { return net.JoinHostPort(o.bindAddress, strconv.Itoa(int(port))) }
	limit := func(what, flag, address string) (*connlimit.Listener, error) {
		l, err := listenAt(flag, address)
		if err != nil {
			return nil, err
		}
		return limited(l, what, connections(), m), nil
	}
	asked, err := limit("ext_proc", "grpc-port", port(o.grpcPort))
	if err != nil {
		return err
	}
	defer asked.Close()
	checked, err := limit("health", "grpc-health-port", port(o.grpcHealthPort))
	if err != nil {
		return err
	}
	defer checked.Close()
	limits := append(grpcLimits(asked, o.maxStreams),
		grpc.Creds(proxies),
		// In FULL_DUPLEX_STREAMED mode pieces are small; in BUFFERED mode one message holds the whole body.
		grpc.MaxRecvMsgSize(max(maxParseBytes, 4<<20)+64<<10),
		grpc.ForceServerCodecV2(extproc.Codec()),
		// A proxy has a few connections and many streams: large buffers, for fewer system calls, cost little. Windows
		// of a fixed size need no pings to find theirs. They bound what waits here of answers that clients do not read:
		// with four times these, 2,000 such answers of 1 MB took 550 MiB instead of 200.
		grpc.ReadBufferSize(128<<10), grpc.WriteBufferSize(128<<10),
		grpc.InitialWindowSize(256<<10), grpc.InitialConnWindowSize(4<<20),
		// Requests that end soon find a goroutine whose stack has grown already; others get one of their own.
		grpc.NumStreamWorkers(128),
	)
	main := grpc.NewServer(limits...)
	extprocv3.RegisterExternalProcessorServer(main, picker)
	accesslogv3.RegisterAccessLogServiceServer(main, accessLog)
	healthv1.RegisterHealthServer(main, checks)
	plain := grpc.NewServer(grpcLimits(checked, maxHealthChecks)...)
	healthv1.RegisterHealthServer(plain, checks)

	failed := make(chan error, 4)
	serveAt := func(what string, l net.Listener, tlsMode string, serve func(net.Listener) error) {
		log.Info("listening", "for", what, "address", l.Addr().String(), "tls", tlsMode)
		go func() {
			if err := serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("%s: %w", what, err)
			}
		}()
	}
	open := func(what, flag, address, tlsMode string, serve func(net.Listener) error) error {
		l, err := listenAt(flag, address)
		if err == nil {
			serveAt(what, l, tlsMode, serve)
		}
		return err
	}
	web := webServer(seen, &o.hosts)
	defer web.Close()
	questions := webServer(admin, &o.hosts)
	defer questions.Close()
	defer main.Stop()
	defer plain.Stop()
	serveAt("ext_proc", asked, proxies.tlsMode, main.Serve)
	serveAt("health", checked, "off", plain.Serve)
	readings := func(l net.Listener) error { return serveWeb(web, l, "metrics", m) }
	switch {
	case o.metricsAddress != "":
		err = open("metrics", "metrics-address", o.metricsAddress, "off", readings)
	case o.metricsPort != 0:
		err = open("metrics", "metrics-port", port(o.metricsPort), "off", readings)
	}
	if err == nil && o.adminAddress != "" {
		err = open(
			"admin requests",
			"admin-address",
			o.adminAddress,
			"off",
			func(l net.Listener) error { return serveWeb(questions, l, "admin", m) },
		)
	}
	if err != nil {
		return err
	}
	go proxies.expect(ctx, port(o.grpcPort))
	for ctx.Err() == nil {
		select {
		case err := <-failed:
			return err
		case <-ready.changed:
			// an election that ctx ended says no more who is wanted
			if now := ready.waits(); now != waits && ctx.Err() == nil {
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
	log.Info("kvepp stops: it serves new requests for a moment, until proxies notice, and lets running requests end",
		"new_requests_for", o.drainDelay, "running_requests_for", o.drainTimeout, "running_requests", picker.Streams())
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
	accessLog.Stop()
	go func() { main.GracefulStop(); close(drained) }()
	select {
	case <-drained:
	case <-within.Done():
		log.Warn("requests were still running after --drain-timeout; they are cut off")
	}
	return nil
}

// maxHealthChecks is the most streams of one connection to the health service.
const maxHealthChecks = 100

// listenAt opens the address that a flag names; flag is without its dashes. Errors say what to do.
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
