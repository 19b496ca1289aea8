package secrets

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
)

// Config are the settings of TLS between proxies and the external processor, and of that between replicas.
type Config struct {
	Serving    bool   // the external processor uses TLS
	CertPath   string // folder with tls.crt and tls.key; empty: a self-signed certificate
	ClientCA   string // file with the authorities of clients; empty: any client
	MinVersion string // of TLS, a key of versions
	// Suites are the cipher suites of TLS 1.2; nil: Go's. No flag sets them.
	Suites []uint16
}

var versions = map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}

// AddFlags declares the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.Serving, "secure-serving", true,
		"serve TLS at --grpc-port, as Envoy's cluster for kvepp must expect")
	flags.Inherit(fs, "secure-serving", "DYN_SECURE_SERVING")
	fs.StringVar(&c.CertPath, "cert-path", "",
		"folder `DIR` with the certificate, tls.crt, and its key, tls.key, as Kubernetes mounts a TLS secret; kvepp "+
			"reads them again when they change. Empty: kvepp makes a self-signed certificate at start")
	fs.StringVar(&c.ClientCA, "tls-client-ca", "",
		"PEM `FILE` with authorities: kvepp accepts only proxies with a certificate of one of them; kvepp reads it "+
			"again when it changes. Empty: kvepp accepts any proxy")
	flags.Choice(fs, &c.MinVersion, "tls-min-version", "1.2",
		"the oldest `VERSION` of TLS that kvepp accepts, 1.2 or 1.3", "1.2", "1.3")
}

// Validate checks the flags. given reports whether a flag was given.
func (c *Config) Validate(given func(flag string) bool) error {
	for _, flag := range []string{"cert-path", "tls-client-ca", "tls-min-version"} {
		if !c.Serving && given(flag) {
			return fmt.Errorf("--%s belongs to TLS, which --secure-serving=false turns off; leave one of them out",
				flag)
		}
	}
	return nil
}

// Certificates are a server's certificate and the authorities of its clients: the latest contents of the files that
// could be used. grpc's pemfile provider was rejected because it logs a key that does not match its certificate.
type Certificates struct {
	config  Config
	current atomic.Pointer[tls.Config]
	read    [3][]byte // contents of the files that current was made from
}

// Certificates reads the files of c and follows them, or creates a self-signed certificate. All ports share them: later
// calls return the same. The caller makes one call at a time.
func (f *Files) Certificates(c Config) (*Certificates, error) {
	if f.certificates != nil {
		return f.certificates, nil
	}
	certs := &Certificates{config: c}
	if err := f.add(&followed{load: certs.load, refused: &f.refusedCertificates,
		changed:  "certificates read",
		rejected: "new certificates are refused; the earlier ones stay"}); err != nil {
		return nil, err
	}
	metrics.Gauge(f.m, metrics.CertificateExpires, func() int64 { return certs.Own().Leaf.NotAfter.Unix() })
	metrics.Counter(f.m, metrics.CertificatesRefused, f.refusedCertificates.Load)
	f.certificates = certs
	return certs, nil
}

// Server returns a configuration that uses the current certificates for each connection.
func (c *Certificates) Server() *tls.Config {
	config := c.config.tls()
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return c.current.Load(), nil }
	return config
}

// Mode says where the certificate comes from: "files" or "self-signed".
func (c *Certificates) Mode() string {
	if c.config.CertPath == "" {
		return "self-signed"
	}
	return "files"
}

// Own returns the server's current certificate.
func (c *Certificates) Own() *tls.Certificate { return &c.current.Load().Certificates[0] }

// Authorities returns the current authorities of clients; nil: any client is accepted.
func (c *Certificates) Authorities() *x509.CertPool { return c.current.Load().ClientCAs }

// tls returns the settings that do not come from files.
func (c *Config) tls() *tls.Config {
	// A resumed session could belong to a client whose authority was removed since.
	return &tls.Config{MinVersion: versions[c.MinVersion], CipherSuites: c.Suites, NextProtos: []string{"h2"},
		SessionTicketsDisabled: true}
}

// load reads the files and makes them current.
func (c *Certificates) load() (news []any, err error) {
	dir, ca := c.config.CertPath, c.config.ClientCA
	certificate, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	var read [3][]byte
	for i, file := range [3]struct{ flag, option, path string }{
		{"--cert-path", dir, certificate}, {"--cert-path", dir, key}, {"--tls-client-ca", ca, ca},
	} {
		if file.option == "" {
			continue
		}
		if read[i], err = boundedfile.Read(file.path, flags.MaxFileBytes); err != nil {
			return nil, fmt.Errorf("%s: %w", file.flag, err)
		}
	}
	before := c.current.Load()
	if before != nil && slices.EqualFunc(read[:], c.read[:], bytes.Equal) {
		return nil, nil
	}
	var own tls.Certificate
	switch {
	case dir != "":
		if own, err = tls.X509KeyPair(read[0], read[1]); err != nil {
			return nil, fmt.Errorf("--cert-path: %s and %s: %w", certificate, key, err)
		}
	case before != nil:
		own = before.Certificates[0]
	default:
		if own, err = selfSigned(); err != nil {
			return nil, fmt.Errorf("making a certificate: %w", err)
		}
	}
	if own.Leaf, err = x509.ParseCertificate(own.Certificate[0]); err != nil {
		return nil, fmt.Errorf("--cert-path: %s: %w", certificate, err)
	}
	config := c.config.tls()
	config.Certificates = []tls.Certificate{own}
	if ca != "" {
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(read[2]) {
			return nil, fmt.Errorf("--tls-client-ca: %s holds no certificate in PEM", ca)
		}
	}
	c.read = read
	c.current.Store(config)
	return []any{"expires", own.Leaf.NotAfter.UTC()}, nil
}

// selfSigned creates a certificate for the lifetime of this process. Gateways encrypt to an endpoint picker without
// checking its certificate, because the reference implementation also creates its own. ECDSA: an RSA key takes seconds
// on a small CPU.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "kvepp"},
		DNSNames:              []string{"kvepp", "localhost"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().AddDate(10, 0, 0),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}
