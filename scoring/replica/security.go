package replica

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
)

// Security says how replicas recognise one another. With Authorities, a peer must have a certificate of theirs that
// shares a name with one's own; with Token, each side proves that it has the token, without sending it. Both may be
// required. The zero value is plaintext, for loopback alone.
type Security struct {
	// Certificate returns this process's certificate. It may change; nil: plaintext.
	Certificate func() *tls.Certificate
	// Authorities returns those of the peers' certificates; nil, or nil returned: certificates are not verified.
	Authorities func() *x509.CertPool
	// Token returns the secret that all replicas share; nil or empty: none.
	Token func() string
}

// Plaintext reports whether connections are not encrypted.
func (s *Security) Plaintext() bool { return s.Certificate == nil }

func (s *Security) authorities() *x509.CertPool {
	if s.Authorities == nil {
		return nil
	}
	return s.Authorities()
}

// Mode says in a word how replicas recognise one another.
func (s *Security) Mode() string {
	if s.Plaintext() {
		return "off"
	}
	mode := "TLS"
	if s.authorities() != nil {
		mode = "mutual TLS"
	}
	if s.Token != nil && s.Token() != "" {
		mode += " and token"
	}
	return mode
}

// config returns the TLS configuration for either end of a connection. TLS 1.3: its exporter binds the proof of a token
// to a connection.
func (s *Security) config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{alpn},
		// VerifyConnection verifies: peers are found by their addresses, which certificates do not name.
		InsecureSkipVerify: true,
		VerifyConnection:   s.verify,
		GetCertificate:     func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.Certificate(), nil },
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return s.Certificate(), nil
		},
		ClientAuth:             tls.RequestClientCert,
		SessionTicketsDisabled: true, // a resumed session would outlive a removed authority
	}
}

// verify verifies the peer's certificate, if there are authorities.
func (s *Security) verify(state tls.ConnectionState) error {
	roots := s.authorities()
	if roots == nil {
		return nil
	}
	if len(state.PeerCertificates) == 0 {
		return errors.New("the peer has no certificate")
	}
	leaf, others := state.PeerCertificates[0], x509.NewCertPool()
	own := s.Certificate()
	if bytes.Equal(own.Certificate[0], leaf.Raw) {
		return nil // the peer has proved that it has this replica's key; the authorities may be those of proxies alone
	}
	for _, c := range state.PeerCertificates[1:] {
		others.AddCert(c)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: others,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return err
	}
	mine, err := x509.ParseCertificate(own.Certificate[0])
	if err != nil {
		return err
	}
	if !shareName(mine, leaf) {
		return fmt.Errorf("the peer's certificate (%s) shares no name with this replica's (%s): give all replicas "+
			"certificates with one DNS name or URI in common", leaf.Subject, mine.Subject)
	}
	return nil
}

// shareName reports whether two certificates have a subject alternative name in common, or without such names, the
// subject. Other clients of the same authority, such as proxies, have other names.
func shareName(a, b *x509.Certificate) bool {
	names := func(c *x509.Certificate) []string {
		all := slices.Clone(c.DNSNames)
		for _, u := range c.URIs {
			all = append(all, u.String())
		}
		for _, ip := range c.IPAddresses {
			all = append(all, ip.String())
		}
		if len(all) == 0 {
			all = append(all, "subject "+c.Subject.String())
		}
		return all
	}
	theirs := names(b)
	return slices.ContainsFunc(names(a), func(name string) bool { return slices.Contains(theirs, name) })
}

// handshake returns a connection after the handshake; end is tls.Server or tls.Client. Another protocol at the other
// end is the reason OldVersion.
func (s *Security) handshake(
	ctx context.Context, raw net.Conn, end func(net.Conn, *tls.Config) *tls.Conn,
) (*link, error) {
	if s.Plaintext() {
		return newLink(raw), nil
	}
	conn := end(raw, s.config())
	err := conn.HandshakeContext(ctx)
	switch {
	case err == nil && conn.ConnectionState().NegotiatedProtocol == alpn:
		return newLink(conn), nil
	case err == nil || strings.Contains(err.Error(), "application protocol"):
		err = refused(OldVersion)
	}
	return nil, err
}

// Sides of a proof.
const (
	clientProof = "kvepp replica receiver"
	serverProof = "kvepp replica sender"
)

// proof returns what shows to the other end of a connection that this process has the token: a MAC of key material that
// only the two ends of the connection have, so that it is worth nothing on another connection. It is nil without a
// token.
func (s *Security) proof(conn net.Conn, side string) ([]byte, error) {
	if s.Token == nil || s.Token() == "" {
		return nil, nil
	}
	encrypted, ok := conn.(*tls.Conn)
	if !ok {
		return nil, errors.New("replica: a token needs TLS")
	}
	state := encrypted.ConnectionState()
	material, err := state.ExportKeyingMaterial("EXPORTER-kvepp-replica", nil, 32)
	if err != nil {
		return nil, fmt.Errorf("replica: %w", err)
	}
	mac := hmac.New(sha256.New, []byte(s.Token()))
	mac.Write([]byte(side))
	mac.Write(material)
	return mac.Sum(nil), nil
}

// proves reports whether the other end of a connection has the token. Without a token it does not look.
func (s *Security) proves(conn net.Conn, side string, proof []byte) bool {
	want, err := s.proof(conn, side)
	return err == nil && (want == nil || hmac.Equal(want, proof))
}
