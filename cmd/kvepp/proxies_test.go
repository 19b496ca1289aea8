package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/internal/metrics"
)

// TestHandshakeFailures: each kind of failed TLS handshake is counted under its own cause, and logged once with advice.
func TestHandshakeFailures(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	dir, ours, others := t.TempDir(), newAuthority(t), newAuthority(t)
	certificate, key := ours.sign(t, 1)
	mount(t, dir, "1", map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": ours.pem})
	r := reserve(t)
	r.writeEndpoints("endpoints: []\n")
	r.start(
		"--secure-serving",
		"--cert-path="+dir,
		"--tls-client-ca="+filepath.Join(dir, "ca.crt"),
		"--tls-min-version=1.3",
	)
	r.awaitReady()
	dialer := &net.Dialer{Timeout: 20 * time.Second}
	address := fmt.Sprintf("127.0.0.1:%d", r.grpc)
	handshake := func(cfg *tls.Config) {
		conn, err := tls.DialWithDialer(dialer, "tcp", address, cfg)
		if err != nil {
			return // the client saw the failure too
		}
		defer conn.Close()
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		conn.Read(make([]byte, 1)) // the server refuses after the client has completed its part of the handshake
	}
	with := func(edit func(*tls.Config)) *tls.Config {
		c := ours.client(t, ours)
		edit(c)
		return c
	}
	plain := func(bytes string) {
		conn, err := dialer.Dial("tcp", address)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		if bytes == "" {
			return
		}
		fmt.Fprint(conn, bytes)
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		conn.Read(make([]byte, 1))
	}
	for _, c := range []struct {
		cause, advice string
		fail          func()
	}{
		{causePlaintext, "--secure-serving=false", func() { plain("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") }},
		{causeClosed, "TCP health check", func() { plain("") }},
		{causeClientCertificate, "--tls-client-ca", func() { handshake(ours.client(t, nil)) }},
		{causeClientCertificate, "--tls-client-ca", func() { handshake(ours.client(t, others)) }},
		{causeRefused, "--cert-path", func() {
			handshake(
				with(func(c *tls.Config) { c.RootCAs = x509.NewCertPool() }))
		}},
		{causeVersion, "--tls-min-version",
			func() { handshake(with(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 })) }},
		{causeALPN, "alpn_protocols", func() {
			handshake(
				with(func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }))
		}},
		{causeALPN, "alpn_protocols", func() { handshake(with(func(c *tls.Config) { c.NextProtos = nil })) }},
	} {
		name := fmt.Sprintf("%s{cause=%q}", metrics.HandshakeFailures, c.cause)
		before, err := r.metric(name)
		if err != nil {
			t.Fatal(err)
		}
		c.fail()
		r.eventually(c.cause+" to be counted", func() error { return r.checkMetric(name, int(before)+1) })
		if before > 0 { // if a minute has passed, there may be another line
			continue
		}
		r.awaitLog("a proxy cannot connect", c.advice, "cause="+c.cause, "level=WARN", "address=127.0.0.1:")
	}
	// Two successful connections of one host: one log line.
	for range 2 {
		conn, err := tls.DialWithDialer(dialer, "tcp", address, with(func(*tls.Config) {}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	r.awaitLog(
		"a proxy connected for the first time",
		"level=INFO",
		"address=127.0.0.1:",
		`tls="TLS 1.3"`,
		"client_certificate=",
	)
}

// TestTLSToPlaintextPort: kvepp reports a proxy that uses TLS on a port without TLS, and serves one that does not.
func TestTLSToPlaintextPort(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints("endpoints: []\n")
	r.start()
	r.awaitReady()
	if _, err := tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", r.grpc),
		&tls.Config{InsecureSkipVerify: true}); err == nil {
		t.Error("a TLS handshake with a port without TLS succeeded")
	}
	r.eventually(
		"the failure to be counted",
		func() error { return r.checkMetric(metrics.HandshakeFailures+`{cause="tls_is_off"}`, 1) },
	)
	r.awaitLog("a proxy cannot connect", "cause=tls_is_off", "transport_socket", "level=WARN")
	if q, err := r.startRequest(t.Context()); err != nil || q.status != 503 { // there are no endpoints
		t.Errorf("%+v, %v", q, err)
	}
	r.awaitLog("a proxy connected for the first time", "level=INFO", "tls=off")
}

// TestNoProxy: 60 s after its start kvepp logs once that no proxy has connected.
func TestNoProxy(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints("endpoints: []\n")
	r.start()
	r.awaitReady()
	r.awaitLog(
		"no proxy has connected within 60 s",
		"level=WARN",
		fmt.Sprintf("address=127.0.0.1:%d", r.grpc),
		"tls=off",
		"failed_handshakes=0",
	)
}

// TestNoProxyTiming: kvepp logs the line after 60 s, and never if a proxy has connected or kvepp stops.
func TestNoProxyTiming(t *testing.T) {
	for _, c := range []struct {
		name               string
		connects, failures int
		stops              bool
		want               int
	}{{"no proxy", 0, 0, false, 1}, {"a failed handshake", 0, 2, false, 1}, {"a proxy", 1, 0, false, 0},
		{"a stop", 0, 0, true, 0}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log logtest.Log
				p := newProxies(nil, "off", metrics.New(), slog.New(slog.NewTextHandler(&log, nil)))
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				go p.warnWithoutProxy(ctx, "127.0.0.1:9002")
				for range c.connects {
					p.succeeded(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}, nil)
				}
				for range c.failures {
					p.failed(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}, errIsTLS)
				}
				<-time.After(proxyPatience - time.Second)
				synctest.Wait()
				if n := log.Count("no proxy has connected"); n != 0 {
					t.Errorf("logged %d times after 59 s, want 0", n)
				}
				if c.stops {
					stop()
				}
				<-time.After(10 * time.Minute)
				synctest.Wait()
				if n := log.Count("no proxy has connected"); n != c.want {
					t.Errorf("logged %d times, want %d: %s", n, c.want, log.String())
				}
				if want := fmt.Sprintf("failed_handshakes=%d", c.failures); c.want == 1 &&
					!strings.Contains(log.String(), want) {
					t.Errorf("the log line lacks %s: %s", want, log.String())
				}
			})
		})
	}
}

// TestHandshakeFailuresAreNotRepeated: a proxy that fails each second causes one line a minute with the number of
// failures. TCP health checks cause one line in total.
func TestHandshakeFailuresAreNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logtest.Log
		p := newProxies(nil, "off", metrics.New(), slog.New(slog.NewTextHandler(&log, nil)))
		peer := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}
		for range 150 {
			p.failed(peer, errIsTLS)
			p.failed(peer, os.ErrDeadlineExceeded)
			p.failed(peer, net.ErrClosed)
			<-time.After(time.Second)
		}
		for cause, want := range map[string]int{causeTLSOff: 3, causeTimeout: 3, causeClosed: 1} {
			if n := log.Count("cause=" + cause); n != want {
				t.Errorf("%d lines about %s in 150 s, want %d", n, cause, want)
			}
		}
		if n := log.Count("times=60"); n != 4 {
			t.Errorf("%d lines report 60 failures, want 4:\n%s", n, log.String())
		}
		for host := range 3 * maxProxyHosts {
			p.succeeded(&net.TCPAddr{IP: net.IPv4(10, 1, byte(host>>8), byte(host)), Port: 1}, nil)
		}
		if n := log.Count("a proxy connected"); n != maxProxyHosts || len(p.hosts) != maxProxyHosts {
			t.Errorf("%d lines are logged and %d hosts kept, want maxProxyHosts", n, len(p.hosts))
		}
	})
}
