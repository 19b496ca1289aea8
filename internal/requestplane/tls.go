package requestplane

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
)

// TLS names the files that make connections encrypted, in both directions, as Dynamo's processes name them. The zero
// value is plain TCP. Files are read for each connection, so that new ones take effect.
//
// Source: dynamo-runtime 1.6.1, tls_utils.
type TLS struct {
	Cert, Key             string // of the port where responses arrive; empty: plain TCP there
	ClientCA              string // whose certificates endpoints must present there; empty: none
	CA                    string // that signed the endpoints' certificates; empty, without Insecure: plain TCP to them
	ClientCert, ClientKey string // that kvepp presents to them; empty: none
	ServerName            string // in the endpoints' certificates; empty: their host
	Insecure              bool   // accept any certificate of theirs
}

// TLSFromEnv returns what Dynamo's environment variables say.
func TLSFromEnv() TLS {
	file := func(name string) string { return os.Getenv("DYN_TCP_TLS_" + name) }
	insecure, _ := strconv.ParseBool(file("INSECURE"))
	return TLS{file("CERT_PATH"), file("KEY_PATH"), file("CLIENT_CA_CERT_PATH"), file("CA_CERT_PATH"),
		file("CLIENT_CERT_PATH"), file("CLIENT_KEY_PATH"), file("SERVER_NAME"), insecure}
}

// check returns an error unless the files can be used now.
func (t *TLS) check() error {
	switch {
	case (t.Cert == "") != (t.Key == ""):
		return errors.New("DYN_TCP_TLS_CERT_PATH and DYN_TCP_TLS_KEY_PATH need each other")
	case (t.ClientCert == "") != (t.ClientKey == ""):
		return errors.New("DYN_TCP_TLS_CLIENT_CERT_PATH and DYN_TCP_TLS_CLIENT_KEY_PATH need each other")
	case t.ClientCA != "" && t.Cert == "":
		return errors.New("DYN_TCP_TLS_CLIENT_CA_CERT_PATH needs DYN_TCP_TLS_CERT_PATH")
	}
	_, err := t.server()
	if err == nil {
		_, err = t.client("")
	}
	return err
}

// server returns the configuration of the port where responses arrive; nil: plain TCP.
func (t *TLS) server() (*tls.Config, error) {
	if t.Cert == "" {
		return nil, nil
	}
	own, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, fmt.Errorf("DYN_TCP_TLS_CERT_PATH and DYN_TCP_TLS_KEY_PATH: %w", err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12}
	if t.ClientCA != "" {
		c.ClientAuth = tls.RequireAndVerifyClientCert
		if c.ClientCAs, err = authorities(t.ClientCA); err != nil {
			return nil, fmt.Errorf("DYN_TCP_TLS_CLIENT_CA_CERT_PATH: %w", err)
		}
	}
	return c, nil
}

// client returns the configuration of connections to an endpoint's host; nil: plain TCP.
func (t *TLS) client(host string) (*tls.Config, error) {
	if t.CA == "" && !t.Insecure {
		return nil, nil
	}
	c := &tls.Config{ServerName: host, InsecureSkipVerify: t.Insecure, MinVersion: tls.VersionTLS12}
	if t.ServerName != "" {
		c.ServerName = t.ServerName
	}
	var err error
	if t.CA != "" {
		if c.RootCAs, err = authorities(t.CA); err != nil {
			return nil, fmt.Errorf("DYN_TCP_TLS_CA_CERT_PATH: %w", err)
		}
	}
	if t.ClientCert != "" {
		own, err := tls.LoadX509KeyPair(t.ClientCert, t.ClientKey)
		if err != nil {
			return nil, fmt.Errorf("DYN_TCP_TLS_CLIENT_CERT_PATH and DYN_TCP_TLS_CLIENT_KEY_PATH: %w", err)
		}
		c.Certificates = []tls.Certificate{own}
	}
	return c, nil
}

func authorities(file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	all := x509.NewCertPool()
	if !all.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate", file)
	}
	return all, nil
}

// dial connects to an endpoint.
func (t *TLS) dial(ctx context.Context, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	config, err := t.client(host)
	if err != nil {
		return nil, err
	}
	if config == nil {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}
	return (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", address)
}

// accept returns the connection on which c's response arrives. On an error it returns c.
func (t *TLS) accept(c net.Conn) (net.Conn, error) {
	config, err := t.server()
	if err != nil || config == nil {
		return c, err
	}
	secure := tls.Server(c, config)
	if err := secure.Handshake(); err != nil {
		return c, err
	}
	return secure, nil
}
