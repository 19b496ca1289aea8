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
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/metrics"
)

// transport is how proxies reach the external processor.
type transport struct {
	secureServing bool
	certPath      string
	clientCA      string
	minVersion    string
}

func (t *transport) add(f *pflag.FlagSet) {
	f.BoolVar(&t.secureServing, "secure-serving", true, "serve the external processor over TLS")
	f.StringVar(
		&t.certPath,
		"cert-path",
		"",
		"folder `DIR` with the certificate, tls.crt, and its key, tls.key, as Kubernetes mounts a TLS secret; read "+
			"again when they change. Empty: a certificate that kvepp makes and signs itself at start",
	)
	f.StringVar(
		&t.clientCA,
		"tls-client-ca",
		"",
		"PEM `FILE` with authorities: only proxies with a certificate of one of them are served; read again when it "+
			"changes. Empty: any proxy is",
	)
	f.StringVar(&t.minVersion, "tls-min-version", "1.2", "the oldest `VERSION` of TLS that is spoken, 1.2 or 1.3")
}

var tlsVersions = map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}

func (t *transport) check(given map[string]bool) error {
	if err := oneOf("tls-min-version", t.minVersion, "1.2", "1.3"); err != nil {
		return err
	}
	for _, flag := range []string{"cert-path", "tls-client-ca", "tls-min-version"} {
		if !t.secureServing && given[flag] {
			return fmt.Errorf(
				"--%s belongs to TLS, which --secure-serving=false turns off; leave one of them out",
				flag,
			)
		}
	}
	return nil
}

// reloadEvery is how often the files of certificates are looked at. Watching them would tell sooner, but not on every
// file system; who renews a certificate does so long before the old one ends.
const reloadEvery = 5 * time.Second

// certificates are those that a server shows and asks for, as their files last were when they could be used. Of the
// libraries, grpc's pemfile provider was not taken: it logs a key that does not go with its certificate. Safe from any
// goroutine, but for reload.
type certificates struct {
	transport
	current  atomic.Pointer[tls.Config]
	expires  atomic.Int64 // the server's certificate, in seconds since 1970
	refused  atomic.Int64 // files that could not be used
	read     [3][]byte    // the files that current was made of
	failures int          // reloads in a row that failed
}

// newCertificates reads the files, or makes a certificate.
func newCertificates(t transport) (*certificates, error) {
	c := &certificates{transport: t}
	if _, err := c.load(); err != nil {
		return nil, err
	}
	return c, nil
}

// server returns the configuration of a server that shows each client what is current.
func (c *certificates) server() *tls.Config {
	return &tls.Config{
		MinVersion:         tlsVersions[c.minVersion],
		NextProtos:         []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current.Load(), nil },
		// A resumed session would be one of a client whose authority may have been taken away since.
		SessionTicketsDisabled: true,
	}
}

// secured returns the credentials of the external processor's server. It follows the files of certificates until ctx
// ends.
func secured(ctx context.Context, o *options, m *metrics.Metrics, log *slog.Logger) (*proxies, error) {
	if !o.secureServing {
		return newProxies(nil, "off", m, log), nil
	}
	c, err := newCertificates(o.transport)
	if err != nil {
		return nil, err
	}
	c.show(m)
	go c.follow(ctx, reloadEvery, log)
	mode := "files"
	if o.certPath == "" {
		mode = "self-signed"
	}
	return newProxies(c.server(), mode, m, log), nil
}

// load reads the files and makes them current; false if they are what they were.
func (c *certificates) load() (changed bool, err error) {
	var read [3][]byte
	files := [3]string{c.certFile("tls.crt"), c.certFile("tls.key"), c.clientCA}
	for i, file := range files {
		if file == "" {
			continue
		}
		if read[i], err = os.ReadFile(file); err != nil {
			return false, fmt.Errorf("%s: %w", c.flagOf(i), err)
		}
	}
	if c.current.Load() != nil && bytes.Equal(read[0], c.read[0]) && bytes.Equal(read[1], c.read[1]) &&
		bytes.Equal(read[2], c.read[2]) {
		return false, nil
	}
	cfg := &tls.Config{MinVersion: tlsVersions[c.minVersion], NextProtos: []string{"h2"}, SessionTicketsDisabled: true}
	var own tls.Certificate
	switch {
	case c.certPath != "":
		if own, err = tls.X509KeyPair(read[0], read[1]); err != nil {
			return false, fmt.Errorf("--cert-path: %s and %s: %w", files[0], files[1], err)
		}
	case c.current.Load() != nil:
		own = c.current.Load().Certificates[0]
	default:
		if own, err = selfSigned(); err != nil {
			return false, fmt.Errorf("making a certificate: %w", err)
		}
	}
	cfg.Certificates = []tls.Certificate{own}
	if c.clientCA != "" {
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !cfg.ClientCAs.AppendCertsFromPEM(read[2]) {
			return false, fmt.Errorf("--tls-client-ca: %s holds no certificate in PEM", c.clientCA)
		}
	}
	leaf, err := x509.ParseCertificate(own.Certificate[0])
	if err != nil {
		return false, fmt.Errorf("--cert-path: %s: %w", files[0], err)
	}
	c.expires.Store(leaf.NotAfter.Unix())
	c.read = read
	c.current.Store(cfg)
	return true, nil
}

func (c *certificates) certFile(name string) string {
	if c.certPath == "" {
		return ""
	}
	return filepath.Join(c.certPath, name)
}

func (c *certificates) flagOf(file int) string {
	if file == 2 {
		return "--tls-client-ca"
	}
	return "--cert-path"
}

// follow loads the files whenever they change, until ctx ends. Files that cannot be used leave what was current.
func (c *certificates) follow(ctx context.Context, every time.Duration, log *slog.Logger) {
	if c.certPath == "" && c.clientCA == "" {
		return
	}
	repeat(ctx, every, func() { c.reload(log) })
}

// repeat calls f at intervals until ctx ends.
func repeat(ctx context.Context, every time.Duration, f func()) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f()
		}
	}
}

func (c *certificates) reload(log *slog.Logger) {
	changed, err := c.load()
	switch {
	case changed:
		log.Info("certificates read", "expires", time.Unix(c.expires.Load(), 0).UTC())
		fallthrough
	case err == nil:
		c.failures = 0
	default:
		// Once may be a look at files of which one is replaced and the other not yet.
		if c.failures++; c.failures == 2 {
			log.Error("certificates are refused; the ones before stay", "error", err)
			c.refused.Add(1)
		}
	}
}

// show exports until when the server's certificate holds, and whether another one is refused.
func (c *certificates) show(m *metrics.Metrics) {
	m.Source(
		metrics.CertificateExpires,
		metrics.CertificateExpiresHelp,
		nil,
		func() float64 { return float64(c.expires.Load()) },
	)
	m.CounterSource(
		metrics.CertificatesRefused,
		metrics.CertificatesRefusedHelp,
		nil,
		func() float64 { return float64(c.refused.Load()) },
	)
}

// selfSigned makes a certificate for this process's life. Gateways encrypt to an endpoint picker without checking its
// certificate, as the reference implementation's is made the same way. ECDSA: an RSA key takes seconds on a small CPU.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "kvepp"},
		DNSNames:              []string{"kvepp", "localhost"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(10, 0, 0),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
