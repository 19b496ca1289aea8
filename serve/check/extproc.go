package check

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tlsFixes holds a finding for each cause of failed TLS handshakes that kvepp counts.
var tlsFixes = map[string]struct{ says, fix string }{
	"plaintext": {
		"kvepp serves TLS at %s, but the gateway connects without TLS",
		"give the gateway's cluster for kvepp a transport_socket with TLS and alpn_protocols: [h2] " +
			"(manifests/envoy), or start kvepp with --secure-serving=false",
	},
	"tls_is_off": {
		"the gateway connects with TLS, but kvepp at %s serves without TLS",
		"remove the transport_socket from the gateway's cluster for kvepp, or start kvepp without " +
			"--secure-serving=false",
	},
	"client_certificate": {
		"kvepp at %s refuses the gateway's certificate, or the gateway sends none",
		"give the gateway's cluster for kvepp a certificate of an authority in --tls-client-ca " +
			"(manifests/envoy/mtls.yaml)",
	},
	"certificate_refused": {
		"the gateway refuses the certificate of kvepp at %s",
		"make the gateway trust the authority of the certificate in --cert-path; if the certificate is self-signed " +
			"by kvepp, switch its verification off",
	},
	"version": {
		"the gateway speaks no TLS version that kvepp at %s allows",
		"allow it in the gateway's tls_params, or lower --tls-min-version",
	},
	"alpn": {
		"the gateway does not offer HTTP/2 to kvepp at %s",
		"set alpn_protocols: [h2] in the gateway's TLS context for kvepp",
	},
}

// handshakeFailures reads how many TLS handshakes with kvepp have failed, by cause. It returns nil if kvepp's
// metrics cannot be read.
func (g *gatewayCheck) handshakeFailures(ctx context.Context) map[string]float64 {
	if g.gateway.MetricsPage == "" {
		return nil
	}
	failures := map[string]float64{}
	err := g.get(ctx, g.gateway.MetricsPage, g.gateway.MetricsToken, func(body io.Reader) error {
		lines := bufio.NewScanner(body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			labels, ok := strings.CutPrefix(lines.Text(), "kvepp_tls_handshake_failures_total{")
			if !ok {
				continue
			}
			_, value, _ := strings.Cut(labels, "} ")
			if n, err := strconv.ParseFloat(value, 64); err == nil {
				failures[label(labels, "cause")] = n
			}
		}
		return lines.Err()
	})
	if err != nil {
		return nil
	}
	return failures
}

// explainNotAsked reports why the gateway, which answered with status, did not ask kvepp. before has the numbers of
// failed handshakes before the request.
func (g *gatewayCheck) explainNotAsked(ctx context.Context, status int, before map[string]float64) {
	now := g.handshakeFailures(ctx)
	cause := mostFrequent(now, before)
	// If the gateway's health checks failed, it makes no new connection for a request.
	if cause == "" && status >= http.StatusInternalServerError {
		cause = mostFrequent(now, nil)
	}
	if x, known := tlsFixes[cause]; known {
		g.wrong(ThroughGateway, AboutExtProc, x.fix, x.says, g.gateway.ExtProc)
		return
	}
	fix := fmt.Sprintf(
		"check that ext_proc is among the filters of the gateway's listener, and that %s is in its cluster for kvepp "+
			"(failure_mode_allow lets requests pass without kvepp)", g.gateway.ExtProc)
	protocol, err := protocolOf(ctx, g.gateway.ExtProc, g.Wait)
	switch {
	case err != nil:
		g.wrong(ThroughGateway, AboutExtProc,
			"check that kvepp is up and that this is its --grpc-port; if not, give its address with --ext-proc-address",
			"kvepp does not answer at %s: %v", g.gateway.ExtProc, err)
	case protocol == protocolPlaintext:
		g.wrong(ThroughGateway, AboutExtProc, fix+"; that cluster must not have a transport_socket (TLS)",
			"kvepp serves at %s without TLS, but the gateway's request did not reach it", g.gateway.ExtProc)
	default:
		g.wrong(ThroughGateway, AboutExtProc,
			fix+"; that cluster must have a transport_socket with TLS and alpn_protocols: [h2], unless kvepp runs "+
				"with --secure-serving=false",
			"kvepp serves TLS at %s, but the gateway's request did not reach it", g.gateway.ExtProc)
	}
}

// mostFrequent returns the cause in tlsFixes whose count grew most; "" if none grew.
func mostFrequent(now, before map[string]float64) (cause string) {
	most := 0.0
	for c := range tlsFixes {
		if n := now[c] - before[c]; n > most {
			cause, most = c, n
		}
	}
	return cause
}

// The protocols of a port.
const (
	protocolTLS       = "TLS"
	protocolPlaintext = "plaintext"
)

// protocolOf returns whether the gRPC server at an address uses TLS: protocolTLS or protocolPlaintext.
func protocolOf(ctx context.Context, address string, wait time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	// The certificate is not verified: only the protocol matters.
	client := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	err = client.HandshakeContext(ctx)
	record := tls.RecordHeaderError{}
	switch {
	case ctx.Err() != nil:
		return "", errors.New("no response in time")
	case errors.As(err, &record) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET):
		return protocolPlaintext, nil
	}
	return protocolTLS, nil
}
