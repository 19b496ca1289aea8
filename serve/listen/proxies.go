package listen

import (
	"bytes"
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

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"kvepp/internal/metrics"
	"kvepp/serve/secrets"
)

// Proxies are the transport credentials of the external processor's port. They log which proxies connect, and why
// handshakes fail: gRPC itself does not report failed handshakes. Safe for concurrent use.
type Proxies struct {
	credentials.TransportCredentials
	mode string
	log  *slog.Logger

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

// handshakeAdvice says, for each cause of failed handshakes, what it means and what to change. The causes are the
// values of a metric label.
var handshakeAdvice = map[string]string{
	"plaintext": "the peer does not speak TLS, and this port does; add a TLS transport_socket to the proxy's cluster " +
		"for kvepp, or start kvepp with --secure-serving=false",
	"tls_is_off": "the peer speaks TLS, and --secure-serving=false turned it off here; remove the transport_socket " +
		"from the proxy's cluster for kvepp, or that flag",
	"client_certificate": "the peer's certificate is missing, or no authority in --tls-client-ca issued it; give the " +
		"proxy such a certificate",
	"certificate_refused": "the peer refuses kvepp's certificate; make the proxy trust the authority that issued the " +
		"certificate in --cert-path, or do not let it verify a self-signed one",
	"version": "the peer has no TLS version from --tls-min-version on; allow it in the proxy's tls_params, or lower " +
		"that flag",
	"alpn": "the peer does not offer HTTP/2; set alpn_protocols: [h2] in the proxy's TLS context",
	"closed": "the peer closed the connection during the handshake; a TCP health check or a port scan does that, and " +
		"so does a proxy that gives up",
	"timeout": "the peer did not complete the handshake in time",
	"other": "compare the proxy's TLS context for kvepp with kvepp's flags --cert-path, --tls-client-ca and " +
		"--tls-min-version",
}

// NewProxies returns the credentials of a server with these certificates; nil means plaintext.
func NewProxies(certs *secrets.Certificates, m *metrics.Metrics, log *slog.Logger) *Proxies {
	p := &Proxies{TransportCredentials: insecure.NewCredentials(), mode: "off", log: log,
		hosts: map[string]bool{}, failures: map[string]*handshakeFailures{}}
	if certs != nil {
		p.TransportCredentials, p.mode = credentials.NewTLS(certs.Server()), certs.Mode()
	}
	for cause := range handshakeAdvice {
		f := new(handshakeFailures)
		p.failures[cause] = f
		metrics.Counter(m, metrics.HandshakeFailures, func() int {
			p.mu.Lock()
			defer p.mu.Unlock()
			return f.total
		}, "cause", cause)
	}
	return p
}

// Mode says where the certificate comes from: "self-signed" or "files"; "off" without TLS.
func (p *Proxies) Mode() string { return p.mode }

// ServerHandshake performs the handshake with a proxy. gRPC calls it for each connection, in its own goroutine.
func (p *Proxies) ServerHandshake(raw net.Conn) (conn net.Conn, info credentials.AuthInfo, err error) {
	if p.mode == "off" {
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
func (p *Proxies) succeeded(peer net.Addr, info credentials.AuthInfo) {
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
func (p *Proxies) failed(peer net.Addr, err error) {
	cause := handshakeCause(err)
	p.mu.Lock()
	f := p.failures[cause]
	f.total++
	f.silent++
	since, now := f.silent, time.Now()
	// TCP health checks repeat forever and are harmless: one line is enough.
	say := f.logged.IsZero() || cause != "closed" && now.Sub(f.logged) >= handshakeLogInterval
	if say {
		f.silent, f.logged = 0, now
	}
	p.mu.Unlock()
	if say {
		p.log.Warn("a proxy cannot connect: "+handshakeAdvice[cause], "address", peer.String(), "cause", cause,
			"error", err, "times", since)
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
		return "tls_is_off"
	case errors.As(err, &notTLS):
		return "plaintext"
	case errors.As(err, &unverified), strings.Contains(text, "client didn't provide a certificate"):
		return "client_certificate"
	case strings.Contains(text, "unsupported versions"), remote && strings.Contains(text, "protocol version"):
		return "version"
	case strings.Contains(text, "application protocols"), strings.Contains(text, "ALPN"):
		return "alpn"
	case remote && strings.Contains(text, "certificate"):
		return "certificate_refused"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "timeout"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		strings.Contains(text, "connection reset"):
		return "closed"
	}
	return "other"
}

// errIsTLS means that a peer uses TLS on a port without TLS.
var errIsTLS = errors.New("the peer began a TLS handshake on a port without TLS")

// tlsHandshake is the first byte of every TLS handshake; HTTP/2 begins with "PRI".
const tlsHandshake = 0x16

// notTLS reads the first byte of a connection, and returns a connection that still yields that byte. If the peer uses
// TLS, it returns errIsTLS.
func notTLS(raw net.Conn) (net.Conn, error) {
	first := make([]byte, 1)
	if _, err := io.ReadFull(raw, first); err != nil {
		return raw, err
	}
	if first[0] == tlsHandshake {
		return raw, errIsTLS
	}
	return &peekedConn{raw, io.MultiReader(bytes.NewReader(first), raw)}, nil
}

// peekedConn is a connection whose first byte has already been read; all yields it once more.
type peekedConn struct {
	net.Conn
	all io.Reader
}

func (c *peekedConn) Read(p []byte) (int, error) { return c.all.Read(p) }

// proxyPatience is how long kvepp waits for its first proxy before it logs that none has connected.
const proxyPatience = 60 * time.Second

// WarnWithoutProxy logs once if no proxy has connected to an address within proxyPatience, unless ctx ends first.
func (p *Proxies) WarnWithoutProxy(ctx context.Context, address string) {
	select {
	case <-ctx.Done():
		return
	case <-time.After(proxyPatience):
	}
	p.mu.Lock()
	connected, failed := p.connected, 0
	for _, f := range p.failures {
		failed += f.total
	}
	p.mu.Unlock()
	if connected == 0 {
		p.log.Warn("no proxy has connected within 60 s: no request is routed. Does the proxy's ext_proc cluster have "+
			"this address, and the same TLS setting?", "address", address, "tls", p.mode, "failed_handshakes", failed)
	}
}
