package main

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"kvepp/internal/metrics"
)

// proxies are the transport credentials of the external processor's port. They tell the operator which proxies connect,
// and why others cannot: gRPC itself keeps failed handshakes to itself. Safe for concurrent use.
type proxies struct {
	credentials.TransportCredentials
	tlsMode string // "self-signed", "files" or "off"
	log     *slog.Logger

	mu        sync.Mutex // guards what follows
	connected int        // connections since the start
	hosts     map[string]bool
	failures  map[string]*handshakeFailures // by cause; the keys do not change
}

// handshakeFailures are the failed handshakes of one cause.
type handshakeFailures struct {
	total  int
	silent int       // of total, those since the latest log line
	logged time.Time // zero: never
}

// maxProxyHosts bounds how many hosts' first connections are logged.
const maxProxyHosts = 1024

// Causes of failed handshakes, as a metric has them.
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
	m.CounterSource(
		metrics.ProxyConnections,
		metrics.ProxyConnectionsHelp,
		nil,
		func() float64 { return float64(p.count()) },
	)
	for cause := range handshakeAdvice {
		p.failures[cause] = new(handshakeFailures)
		m.CounterSource(
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

// count returns how many connections there were.
func (p *proxies) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.connected
}

// ServerHandshake shakes hands with a proxy. gRPC calls it for each connection, in a goroutine of its own.
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

// handshakeLogInterval is the least time between two lines about one cause.
const handshakeLogInterval = time.Minute

// failed counts a failed handshake, and logs it unless one of the same cause was logged a moment ago.
func (p *proxies) failed(peer net.Addr, err error) {
	cause := handshakeCause(err)
	p.mu.Lock()
	f := p.failures[cause]
	f.total++
	f.silent++
	since := f.silent
	now := time.Now()
	// Health checks by TCP go on for ever, and mean nothing: one line is enough.
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
	remote := errors.As(err, &op) && op.Op == "remote error" // an alert of the peer's
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

// errIsTLS says that a peer speaks TLS where it must not.
var errIsTLS = errors.New("the peer began a TLS handshake on a port without TLS")

// tlsHandshake is the first byte of every TLS handshake; HTTP/2 begins with "PRI".
const tlsHandshake = 0x16

// notTLS reads the first byte of a connection, and returns the connection with that byte still to be read. It returns
// errIsTLS for a peer that speaks TLS.
func notTLS(raw net.Conn) (net.Conn, error) {
	c := &begunConn{Conn: raw}
	if _, err := io.ReadFull(raw, c.first[:]); err != nil {
		return raw, err
	}
	if c.first[0] == tlsHandshake {
		return raw, errIsTLS
	}
	return c, nil
}

// begunConn is a connection whose first byte was read already.
type begunConn struct {
	net.Conn
	first [1]byte
	given bool // Read returned it
}

func (c *begunConn) Read(p []byte) (int, error) {
	if c.given || len(p) == 0 {
		return c.Conn.Read(p)
	}
	c.given = true
	return copy(p, c.first[:]), nil
}

// proxyPatience is how long kvepp waits for its first proxy before it says that none has come.
const proxyPatience = 60 * time.Second

// expect logs once if no proxy has connected to an address within proxyPatience, unless ctx ends first.
func (p *proxies) expect(ctx context.Context, address string) {
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
