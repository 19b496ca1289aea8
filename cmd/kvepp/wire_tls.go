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
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"kvepp/internal/boundedfile"
	"kvepp/internal/metrics"
)

// reloadEvery is the interval at which kvepp reads the certificate files. File watches would react sooner, but do not
// work on every file system. Certificates are renewed long before they expire.
const reloadEvery = 5 * time.Second

// certificates holds a server's certificate and the authorities of its clients: the latest versions of the files that
// could be used. grpc's pemfile provider was rejected because it logs a key that does not match its certificate. All
// methods but reload are safe for concurrent use.
type certificates struct {
	transport
	current  atomic.Pointer[tls.Config]
	expires  atomic.Int64 // end of the server's certificate, Unix seconds
	refused  atomic.Int64 // files that could not be used
	read     [3][]byte    // contents of the files that current was made from
	failures int          // consecutive failed reloads
}

// newCertificates reads the files, or creates a self-signed certificate.
func newCertificates(t transport) (*certificates, error) {
	c := &certificates{transport: t}
	if _, err := c.load(); err != nil {
		return nil, err
	}
	return c, nil
}

// server returns a server configuration that uses the current certificates for each connection.
func (c *certificates) server() *tls.Config {
	return &tls.Config{
		MinVersion:         tlsVersions[c.minVersion],
		NextProtos:         []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current.Load(), nil },
		// A resumed session could belong to a client whose authority was removed since.
		SessionTicketsDisabled: true,
	}
}

// newProxyCredentials returns the credentials of the external processor's server. It reloads the certificate files
// until ctx ends.
func newProxyCredentials(ctx context.Context, o *options, m *metrics.Metrics, log *slog.Logger) (*proxies, error) {
	if !o.secureServing {
		return newProxies(nil, "off", m, log), nil
	}
	c, err := newCertificates(o.transport)
	if err != nil {
		return nil, err
	}
	c.export(m)
	go c.follow(ctx, reloadEvery, log)
	mode := "files"
	if o.certPath == "" {
		mode = "self-signed"
	}
	return newProxies(c.server(), mode, m, log), nil
}

// load reads the files and makes them current. It returns false if they are unchanged.
func (c *certificates) load() (changed bool, err error) {
	var read [3][]byte
	files := [3]string{c.certFile("tls.crt"), c.certFile("tls.key"), c.clientCA}
	for i, file := range files {
		if file == "" {
			continue
		}
		if read[i], err = boundedfile.Read(file, maxSettingsBytes); err != nil {
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

// follow reloads the files when they change, until ctx ends. If the new files cannot be used, the current certificates
// stay.
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
		// One failure may be a read between the replacement of the two files.
		if c.failures++; c.failures == 2 {
			log.Error("new certificates are refused; the earlier ones stay", "error", err)
			c.refused.Add(1)
		}
	}
}

// export exports the expiry time of the server's certificate, and how many reloads were refused.
func (c *certificates) export(m *metrics.Metrics) {
	m.GaugeFunc(
		metrics.CertificateExpires,
		metrics.CertificateExpiresHelp,
		nil,
		func() float64 { return float64(c.expires.Load()) },
	)
	m.CounterFunc(
		metrics.CertificatesRefused,
		metrics.CertificatesRefusedHelp,
		nil,
		func() float64 { return float64(c.refused.Load()) },
	)
}

// selfSigned creates a certificate for the lifetime of this process. Gateways encrypt to an endpoint picker without
// checking its certificate, because the reference implementation also creates its own. ECDSA: an RSA key takes seconds
// on a small CPU.
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

// proxies are the transport credentials of the external processor's port. They log which proxies connect, and why
// handshakes fail: gRPC itself does not report failed handshakes. Safe for concurrent use.
type proxies struct {
	credentials.TransportCredentials
	tlsMode string // "self-signed", "files" or "off"
	log     *slog.Logger

	mu        sync.Mutex // guards what follows
	connected int        // connections since the process started
	hosts     map[string]bool
	failures  map[string]*handshakeFailures // by cause; the keys do not change
}

// handshakeFailures are the failed handshakes of one cause.
type handshakeFailures struct {
	total  int
	silent int       // failures since the latest log line
	logged time.Time // zero: never
}

// maxProxyHosts is the most hosts whose first connection is logged.
const maxProxyHosts = 1024

// Causes of failed handshakes: the values of a metric label.
const (
	causePlaintext         = "plaintext"
	causeTLSOff            = "tls_is_off"
	causeClientCertificate = "client_certificate"
	causeRefused           = "certificate_refused"
	causeVersion           = "version"
	causeALPN              = "alpn"
	causeClosed            = "closed"
	causeTimeout           = "timeout"
	causeOther             = "other"
)

// handshakeAdvice says what each cause means and what to change.
var handshakeAdvice = map[string]string{
	causePlaintext: "the peer does not speak TLS, and this port does; add a TLS transport_socket to the " +
		"proxy's cluster for kvepp, or start kvepp with --secure-serving=false",
	causeTLSOff: "the peer speaks TLS, and --secure-serving=false turned it off here; remove the " +
		"transport_socket from the proxy's cluster for kvepp, or that flag",
	causeClientCertificate: "the peer's certificate is missing, or no authority in --tls-client-ca issued it; give " +
		"the proxy such a certificate",
	causeRefused: "the peer refuses kvepp's certificate; make the proxy trust the authority that issued " +
		"the certificate in --cert-path, or do not let it verify a self-signed one",
	causeVersion: "the peer has no TLS version from --tls-min-version on; allow it in the proxy's " +
		"tls_params, or lower that flag",
	causeALPN: "the peer does not offer HTTP/2; set alpn_protocols: [h2] in the proxy's TLS context",
	causeClosed: "the peer closed the connection during the handshake; a TCP health check or a port scan " +
		"does that, and so does a proxy that gives up",
	causeTimeout: "the peer did not complete the handshake in time",
	causeOther: "compare the proxy's TLS context for kvepp with kvepp's flags --cert-path, " +
		"--tls-client-ca and --tls-min-version",
}

// newProxies returns the credentials for a TLS configuration; nil means plaintext.
func newProxies(config *tls.Config, tlsMode string, m *metrics.Metrics, log *slog.Logger) *proxies {
	p := &proxies{TransportCredentials: insecure.NewCredentials(), tlsMode: tlsMode, log: log,
		hosts: map[string]bool{}, failures: map[string]*handshakeFailures{}}
	if config != nil {
		p.TransportCredentials = credentials.NewTLS(config)
	}
	for cause := range handshakeAdvice {
		p.failures[cause] = new(handshakeFailures)
		m.CounterFunc(
			metrics.HandshakeFailures,
			metrics.HandshakeFailuresHelp,
			prometheus.Labels{"cause": cause},
			func() float64 {
				p.mu.Lock()
				defer p.mu.Unlock()
				return float64(p.failures[cause].total)
			},
		)
	}
	return p
}

// ServerHandshake performs the handshake with a proxy. gRPC calls it for each connection, in its own goroutine.
func (p *proxies) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	var conn net.Conn
	var info credentials.AuthInfo
	var err error
	if p.tlsMode == "off" {
		raw, err = notTLS(raw)
	}
	if err == nil {
		conn, info, err = p.TransportCredentials.ServerHandshake(raw)
	}
	if err != nil {
		p.failed(raw.RemoteAddr(), err)
		return nil, nil, err
	}
	p.succeeded(raw.RemoteAddr(), info)
	return conn, info, nil
}

// succeeded logs the first connection of each host.
func (p *proxies) succeeded(peer net.Addr, info credentials.AuthInfo) {
	host, _, err := net.SplitHostPort(peer.String())
	if err != nil {
		host = peer.String()
	}
	p.mu.Lock()
	p.connected++
	first := !p.hosts[host] && len(p.hosts) < maxProxyHosts
	if first {
		p.hosts[host] = true
	}
	p.mu.Unlock()
	if !first {
		return
	}
	about := []any{"address", peer.String(), "tls", "off"}
	if t, ok := info.(credentials.TLSInfo); ok {
		about[3] = tls.VersionName(t.State.Version)
		if len(t.State.PeerCertificates) > 0 {
			about = append(about, "client_certificate", t.State.PeerCertificates[0].Subject.String())
		}
	}
	p.log.Info("a proxy connected for the first time", about...)
}

// handshakeLogInterval is the minimum time between two log lines about one cause.
const handshakeLogInterval = time.Minute

// failed counts a failed handshake, and logs it if the latest line about its cause is old enough.
func (p *proxies) failed(peer net.Addr, err error) {
	cause := handshakeCause(err)
	p.mu.Lock()
	f := p.failures[cause]
	f.total++
	f.silent++
	since := f.silent
	now := time.Now()
	// TCP health checks repeat forever and are harmless: one line is enough.
	say := f.logged.IsZero() || cause != causeClosed && now.Sub(f.logged) >= handshakeLogInterval
	if say {
		f.silent, f.logged = 0, now
	}
	p.mu.Unlock()
	if say {
		p.log.Warn(
			"a proxy cannot connect: "+handshakeAdvice[cause],
			"address",
			peer.String(),
			"cause",
			cause,
			"error",
			err,
			"times",
			since,
		)
	}
}

// handshakeCause classifies an error of a handshake. Package tls has types for few of its errors.
func handshakeCause(err error) string {
	var notTLS tls.RecordHeaderError
	var unverified *tls.CertificateVerificationError
	var op *net.OpError
	remote := errors.As(err, &op) && op.Op == "remote error" // the peer sent an alert
	switch text := err.Error(); {
	case errors.Is(err, errIsTLS):
		return causeTLSOff
	case errors.As(err, &notTLS):
		return causePlaintext
	case errors.As(err, &unverified), strings.Contains(text, "client didn't provide a certificate"):
		return causeClientCertificate
	case strings.Contains(text, "unsupported versions"), remote && strings.Contains(text, "protocol version"):
		return causeVersion
	case strings.Contains(text, "application protocols"), strings.Contains(text, "ALPN"):
		return causeALPN
	case remote && strings.Contains(text, "certificate"):
		return causeRefused
	case errors.Is(err, os.ErrDeadlineExceeded):
		return causeTimeout
	case errors.Is(err, io.EOF),
		errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, net.ErrClosed),
		strings.Contains(text, "connection reset"):
		return causeClosed
	}
	return causeOther
}

// errIsTLS means that a peer uses TLS on a port without TLS.
var errIsTLS = errors.New("the peer began a TLS handshake on a port without TLS")

// tlsHandshake is the first byte of every TLS handshake; HTTP/2 begins with "PRI".
const tlsHandshake = 0x16

// notTLS reads the first byte of a connection, and returns a connection that still yields that byte. If the peer uses
// TLS, it returns errIsTLS.
func notTLS(raw net.Conn) (net.Conn, error) {
	c := &peekedConn{Conn: raw}
	if _, err := io.ReadFull(raw, c.first[:]); err != nil {
		return raw, err
	}
	if c.first[0] == tlsHandshake {
		return raw, errIsTLS
	}
	return c, nil
}

// peekedConn is a connection whose first byte has already been read.
type peekedConn struct {
	net.Conn
	first    [1]byte
	returned bool // Read has returned first
}

func (c *peekedConn) Read(p []byte) (int, error) {
	if c.returned || len(p) == 0 {
		return c.Conn.Read(p)
	}
	c.returned = true
	return copy(p, c.first[:]), nil
}

// proxyPatience is how long kvepp waits for its first proxy before it logs that none has connected.
const proxyPatience = 60 * time.Second

// warnWithoutProxy logs once if no proxy has connected to an address within proxyPatience, unless ctx ends first.
func (p *proxies) warnWithoutProxy(ctx context.Context, address string) {
	timer := time.NewTimer(proxyPatience)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return
	case <-timer.C:
	}
	p.mu.Lock()
	connected, failed := p.connected, 0
	for _, f := range p.failures {
		failed += f.total
	}
	p.mu.Unlock()
	if connected == 0 {
		p.log.Warn(
			"no proxy has connected within 60 s: no request is routed. Does the proxy's ext_proc cluster have this "+
				"address, and the same TLS setting?",
			"address",
			address,
			"tls",
			p.tlsMode,
			"failed_handshakes",
			failed,
		)
	}
}

// tokenFile is a secret that a kvepp listener or an engine requires: the latest version of its file that could be used.
// A nil *tokenFile requires nothing. All methods but reload are safe for concurrent use.
type tokenFile struct {
	flag, file string
	current    atomic.Pointer[string]
	refused    atomic.Int64
	failures   int // consecutive failed reloads
}

// newTokenFile reads the file; it returns nil if file is empty. flag is the name of the flag, for errors.
func newTokenFile(flag, file string) (*tokenFile, error) {
	if file == "" {
		return nil, nil
	}
	f := &tokenFile{flag: flag, file: file}
	if _, err := f.load(); err != nil {
		return nil, err
	}
	return f, nil
}

// token returns the secret; "" for nil.
func (f *tokenFile) token() string {
	if f == nil {
		return ""
	}
	return *f.current.Load()
}

func (f *tokenFile) load() (changed bool, err error) {
	text, err := boundedfile.Read(f.file, maxSettingsBytes)
	if err != nil {
		return false, fmt.Errorf("%s: %w", f.flag, err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return false, fmt.Errorf("%s: the file is empty; put a secret into it, in one line", f.flag)
	}
	if strings.ContainsAny(token, "\r\n") { // a header value cannot hold it
		return false, fmt.Errorf("%s: the file has several lines; put the secret into it alone", f.flag)
	}
	before := f.current.Swap(&token)
	return before == nil || *before != token, nil
}

// reload reads the file again. If the file cannot be used, the old secret stays: a listener never becomes open.
func (f *tokenFile) reload(log *slog.Logger) {
	changed, err := f.load()
	switch {
	case err == nil:
		if f.failures = 0; changed {
			log.Info("a new token was read; the earlier one is no longer valid", "flag", f.flag)
		}
	default:
		// One failure may be a read between the removal of the file and its replacement.
		if f.failures++; f.failures == 2 {
			log.Error("a file with a token is refused; the earlier token stays", "error", err)
			f.refused.Add(1)
		}
	}
}

// followTokens reloads the files when they change, until ctx ends. It skips nil ones.
func followTokens(ctx context.Context, every time.Duration, m *metrics.Metrics, log *slog.Logger, files ...*tokenFile) {
	m.CounterFunc(metrics.TokenFilesRefused, metrics.TokenFilesRefusedHelp, nil, func() (n float64) {
		for _, f := range files {
			if f != nil {
				n += float64(f.refused.Load())
			}
		}
		return n
	})
	go repeat(ctx, every, func() {
		for _, f := range files {
			if f != nil {
				f.reload(log)
			}
		}
	})
}
