package secrets

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/serve/secrets/secretstest"
)

// until waits at most 20 s for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 20 s", what)
		}
		<-time.After(2 * time.Millisecond)
	}
}

// TestCertificatesAreReloadedUnderStreams: new connections use the reloaded certificate and client authorities. A
// running stream goes on.
func TestCertificatesAreReloadedUnderStreams(t *testing.T) {
	servers, before, after := secretstest.NewAuthority(t), secretstest.NewAuthority(t), secretstest.NewAuthority(t)
	dir := t.TempDir()
	version := func(name string, serial int64, clients *secretstest.Authority) map[string][]byte {
		files := map[string][]byte{"ca.crt": clients.PEM}
		files["tls.crt"], files["tls.key"] = servers.Sign(t, serial)
		secretstest.Mount(t, dir, name, files)
		return files
	}
	version("..1", 11, before)
	ctx := t.Context()
	var logged bytes.Buffer
	m := metrics.New()
	files := &Files{m: m, log: slog.New(slog.NewTextHandler(&logged, nil))}
	c, err := files.Certificates(Config{CertPath: dir, ClientCA: filepath.Join(dir, "ca.crt"), MinVersion: "1.3"})
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(c.Server())))
	checks := health.NewServer()
	healthv1.RegisterHealthServer(server, checks)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(l)
	defer server.Stop()

	// serial opens a connection, and returns the serial number of the server's certificate.
	serial := func(cfg *tls.Config) (int64, error) {
		conn, err := tls.Dial("tcp", l.Addr().String(), cfg)
		if err != nil {
			return 0, err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		// the server refuses after the client has completed its part of the handshake
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			return 0, err
		}
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64(), nil
	}
	if n, err := serial(servers.Client(t, before)); err != nil || n != 11 {
		t.Fatal(n, err)
	}
	tooOld := servers.Client(t, before)
	tooOld.MaxVersion = tls.VersionTLS12
	for why, cfg := range map[string]*tls.Config{"no certificate": servers.Client(t, nil),
		"another authority": servers.Client(t, after), "TLS 1.2": tooOld} {
		if _, err := serial(cfg); err == nil {
			t.Errorf("%s: the server accepts the client", why)
		}
	}

	conn, err := grpc.NewClient(
		l.Addr().String(),
		grpc.WithTransportCredentials(credentials.NewTLS(servers.Client(t, before))),
	)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	running, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	next := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if got, err := running.Recv(); err != nil || got.GetStatus() != want {
			t.Fatalf("the running stream gives %v, %v; want %v", got, err, want)
		}
	}
	next(healthv1.HealthCheckResponse_SERVING)

	following, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		files.follow(following, time.Millisecond)
		close(ended)
	}()
	second := version("..2", 22, after)
	until(
		t,
		"the second certificate",
		func() bool { n, err := serial(servers.Client(t, after)); return err == nil && n == 22 },
	)
	if _, err := serial(servers.Client(t, before)); err == nil {
		t.Error("the server accepts a client of the authority that was replaced")
	}
	checks.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	next(healthv1.HealthCheckResponse_NOT_SERVING)

	// kvepp refuses a key that does not match its certificate, logs it once, and keeps the current certificate.
	_, other := servers.Sign(t, 33)
	secretstest.Mount(t, dir, "..3", map[string][]byte{"tls.crt": second["tls.crt"], "tls.key": other,
		"ca.crt": after.PEM})
	until(t, "the refusal", func() bool { return files.refusedCertificates.Load() == 1 })
	if n, err := serial(servers.Client(t, after)); err != nil || n != 22 {
		t.Error(n, err)
	}
	secretstest.Mount(
		t,
		dir,
		"..4",
		map[string][]byte{"tls.crt": second["tls.crt"], "tls.key": second["tls.key"], "ca.crt": []byte("none")},
	)
	version("..5", 55, after)
	until(
		t,
		"the last certificate",
		func() bool { n, err := serial(servers.Client(t, after)); return err == nil && n == 55 },
	)
	stop()
	<-ended
	if out := logged.String(); strings.Contains(out, "PRIVATE") || strings.Count(out, "refused") > 2 {
		t.Errorf("the log has a key, or more than two refusals:\n%s", out)
	}
	ends := metricstest.Read(t, m.Registry).Of(metrics.CertificateExpires.Name).Value()
	if left := time.Until(time.Unix(int64(ends), 0)); left < 55*time.Minute || left > time.Hour {
		t.Errorf("the metric says that the certificate expires in %v", left)
	}
}

// certificates returns what the files of c hold.
func certificates(c Config) (*Certificates, error) {
	return (&Files{m: metrics.New(), log: slog.New(slog.DiscardHandler)}).Certificates(c)
}

func TestCertificatesAtStart(t *testing.T) {
	a := secretstest.NewAuthority(t)
	good, empty := t.TempDir(), t.TempDir()
	certificate, key := a.Sign(t, 1)
	secretstest.Mount(t, good, "..1", map[string][]byte{"tls.crt": certificate, "tls.key": key, "not.crt": key})
	for _, c := range []struct {
		Config
		says string
	}{
		{Config{CertPath: empty}, "--cert-path: open"},
		{Config{CertPath: good, ClientCA: filepath.Join(good, "ca.crt")}, "--tls-client-ca: open"},
		{Config{CertPath: good, ClientCA: filepath.Join(good, "not.crt")}, "--tls-client-ca: "},
		{Config{CertPath: good}, ""},
		{Config{ClientCA: filepath.Join(good, "tls.crt")}, ""},
	} {
		c.MinVersion = "1.2"
		if _, err := certificates(c.Config); (err == nil) != (c.says == "") ||
			err != nil && !strings.HasPrefix(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", c.Config, err, c.says)
		}
	}
	own, err := certificates(Config{MinVersion: "1.2"})
	if err != nil {
		t.Fatal(err)
	}
	if _, isECDSA := own.Own().PrivateKey.(*ecdsa.PrivateKey); !isECDSA {
		t.Error("kvepp's own certificate has no ECDSA key")
	}
	before := own.current.Load()
	if news, err := own.load(); news != nil || err != nil || own.current.Load() != before {
		t.Errorf("kvepp's own certificate was created again: %v, %v", news, err)
	}
}
