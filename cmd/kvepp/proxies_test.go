package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/serve/secrets/secretstest"
)

// TestHandshakeFailures: each kind of failed TLS handshake is counted under its own cause, and logged once with advice.
func TestHandshakeFailures(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	dir, ours, others := t.TempDir(), secretstest.NewAuthority(t), secretstest.NewAuthority(t)
	certificate, key := ours.Sign(t, 1)
	secretstest.Mount(t, dir, "1", map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": ours.PEM})
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
		c := ours.Client(t, ours)
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
		{"plaintext", "--secure-serving=false", func() { plain("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") }},
		{"closed", "TCP health check", func() { plain("") }},
		{"client_certificate", "--tls-client-ca", func() { handshake(ours.Client(t, nil)) }},
		{"client_certificate", "--tls-client-ca", func() { handshake(ours.Client(t, others)) }},
		{"certificate_refused", "--cert-path", func() {
			handshake(
				with(func(c *tls.Config) { c.RootCAs = x509.NewCertPool() }))
		}},
		{"version", "--tls-min-version",
			func() { handshake(with(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 })) }},
		{"alpn", "alpn_protocols", func() {
			handshake(
				with(func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }))
		}},
		{"alpn", "alpn_protocols", func() { handshake(with(func(c *tls.Config) { c.NextProtos = nil })) }},
	} {
		name := fmt.Sprintf("%s{cause=%q}", metrics.HandshakeFailures.Name, c.cause)
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
		func() error { return r.checkMetric(metrics.HandshakeFailures.Name+`{cause="tls_is_off"}`, 1) },
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
