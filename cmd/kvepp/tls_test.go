package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
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
)

// authority signs certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: t.Name()},
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{parsed, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// sign returns a certificate and its key in PEM.
func (a *authority) sign(t *testing.T, serial int64) (certificate, key []byte) {
	t.Helper()
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, own.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(
			&pem.Block{Type: "CERTIFICATE", Bytes: der},
		), pem.EncodeToMemory(
			&pem.Block{Type: "PRIVATE KEY", Bytes: text},
		)
}

// client returns the configuration of a client that trusts a, and presents a certificate of by; none if by is nil.
func (a *authority) client(t *testing.T, by *authority) *tls.Config {
	cfg := &tls.Config{RootCAs: x509.NewCertPool(), NextProtos: []string{"h2"}}
	cfg.RootCAs.AddCert(a.certificate)
	if by != nil {
		pair, err := tls.X509KeyPair(by.sign(t, 9))
		if err != nil {
			t.Fatal(err)
		}
		// Sent even if the server asks for a certificate of another authority.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return cfg
}

// mount puts files into a folder as Kubernetes does: changing one symbolic link replaces all of them together.
func mount(t *testing.T, dir, version string, files map[string][]byte) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, version, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(version, filepath.Join(dir, "..new")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
}

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
	servers, before, after := newAuthority(t), newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	version := func(name string, serial int64, clients *authority) map[string][]byte {
		files := map[string][]byte{"ca.crt": clients.pem}
		files["tls.crt"], files["tls.key"] = servers.sign(t, serial)
		mount(t, dir, name, files)
		return files
	}
	version("..1", 11, before)
	ctx := t.Context()
	var logged bytes.Buffer
	m := metrics.New()
	c, err := newCertificates(
		transport{secureServing: true, certPath: dir, clientCA: filepath.Join(dir, "ca.crt"), minVersion: "1.3"},
	)
	if err != nil {
		t.Fatal(err)
	}
	c.export(m)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(c.server())))
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
	if n, err := serial(servers.client(t, before)); err != nil || n != 11 {
		t.Fatal(n, err)
	}
	tooOld := servers.client(t, before)
	tooOld.MaxVersion = tls.VersionTLS12
	for why, cfg := range map[string]*tls.Config{"no certificate": servers.client(t, nil),
		"another authority": servers.client(t, after), "TLS 1.2": tooOld} {
		if _, err := serial(cfg); err == nil {
			t.Errorf("%s: the server accepts the client", why)
		}
	}

	conn, err := grpc.NewClient(
		l.Addr().String(),
		grpc.WithTransportCredentials(credentials.NewTLS(servers.client(t, before))),
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
		c.follow(following, time.Millisecond, slog.New(slog.NewTextHandler(&logged, nil)))
		close(ended)
	}()
	files := version("..2", 22, after)
	until(
		t,
		"the second certificate",
		func() bool { n, err := serial(servers.client(t, after)); return err == nil && n == 22 },
	)
	if _, err := serial(servers.client(t, before)); err == nil {
		t.Error("the server accepts a client of the authority that was replaced")
	}
	checks.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	next(healthv1.HealthCheckResponse_NOT_SERVING)

	// kvepp refuses a key that does not match its certificate, logs it once, and keeps the current certificate.
	_, other := servers.sign(t, 33)
	mount(t, dir, "..3", map[string][]byte{"tls.crt": files["tls.crt"], "tls.key": other, "ca.crt": after.pem})
	until(t, "the refusal", func() bool { return c.refused.Load() == 1 })
	if n, err := serial(servers.client(t, after)); err != nil || n != 22 {
		t.Error(n, err)
	}
	mount(
		t,
		dir,
		"..4",
		map[string][]byte{"tls.crt": files["tls.crt"], "tls.key": files["tls.key"], "ca.crt": []byte("none")},
	)
	version("..5", 55, after)
	until(
		t,
		"the last certificate",
		func() bool { n, err := serial(servers.client(t, after)); return err == nil && n == 55 },
	)
	stop()
	<-ended
	if out := logged.String(); strings.Contains(out, "PRIVATE") || strings.Count(out, "refused") > 2 {
		t.Errorf("the log has a key, or more than two refusals:\n%s", out)
	}
	ends := metricstest.Read(t, m.Registry).Of(metrics.CertificateExpires).Value()
	if left := time.Until(time.Unix(int64(ends), 0)); left < 55*time.Minute || left > time.Hour {
		t.Errorf("the metric says that the certificate expires in %v", left)
	}
}

func TestCertificatesAtStart(t *testing.T) {
	a := newAuthority(t)
	good, empty := t.TempDir(), t.TempDir()
	certificate, key := a.sign(t, 1)
	mount(t, good, "..1", map[string][]byte{"tls.crt": certificate, "tls.key": key, "not.crt": key})
	for _, c := range []struct {
		transport
		says string
	}{
		{transport{certPath: empty}, "--cert-path: open"},
		{transport{certPath: good, clientCA: filepath.Join(good, "ca.crt")}, "--tls-client-ca: open"},
		{transport{certPath: good, clientCA: filepath.Join(good, "not.crt")}, "--tls-client-ca: "},
		{transport{certPath: good}, ""},
		{transport{clientCA: filepath.Join(good, "tls.crt")}, ""},
	} {
		c.minVersion = "1.2"
		if _, err := newCertificates(c.transport); (err == nil) != (c.says == "") ||
			err != nil && !strings.HasPrefix(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", c.transport, err, c.says)
		}
	}
	own, err := newCertificates(transport{minVersion: "1.2"})
	if err != nil {
		t.Fatal(err)
	}
	if _, isECDSA := own.current.Load().Certificates[0].PrivateKey.(*ecdsa.PrivateKey); !isECDSA {
		t.Error("kvepp's own certificate has no ECDSA key")
	}
	before := own.current.Load()
	if changed, err := own.load(); changed || err != nil || own.current.Load() != before {
		t.Errorf("kvepp's own certificate was created again: %v, %v", changed, err)
	}
}
