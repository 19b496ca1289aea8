package secrets

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
)

// Trust returns the settings of a client of TLS that trusts the authorities in a PEM file, and shows the certificate of
// two PEM files, which it reads again for each connection. Empty names: the system's authorities, and no certificate.
func Trust(authorities, certificate, key string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if authorities != "" {
		text, err := boundedfile.Read(authorities, flags.MaxFileBytes)
		if err != nil {
			return nil, err
		}
		if c.RootCAs = x509.NewCertPool(); !c.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate in PEM", authorities)
		}
	}
	if certificate == "" {
		return c, nil
	}
	load := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		return &pair, err
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	_, err := load()
	return c, err
}
