package secrets

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/serve/secrets/secretstest"
)

// TestTrust: a client trusts the authorities of its file alone, and shows the certificate that its files have now.
func TestTrust(t *testing.T) {
	authority, stranger := secretstest.NewAuthority(t), secretstest.NewAuthority(t)
	serial := ""
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		serial = r.TLS.PeerCertificates[0].SerialNumber.String()
	}))
	pair, err := tls.X509KeyPair(authority.Sign(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(authority.PEM)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: clients,
		ClientAuth: tls.RequireAndVerifyClientCert}
	server.StartTLS()
	defer server.Close()
	dir := t.TempDir()
	file := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	sign := func(serial int64) (certificate, key string) {
		c, k := authority.Sign(t, serial)
		return file("tls.crt", c), file("tls.key", k)
	}
	certificate, key := sign(2)
	trusted, strange, empty := file("ca.crt", authority.PEM), file("strange.crt", stranger.PEM), file("empty", nil)
	get := func(ca, certificate, key string) error {
		c, err := Trust(ca, certificate, key)
		if err != nil {
			return err
		}
		transport := &http.Transport{TLSClientConfig: c, DisableKeepAlives: true}
		resp, err := (&http.Client{Transport: transport}).Get(server.URL)
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	for _, next := range []int64{2, 3} { // the files change
		sign(next)
		if err := get(trusted, certificate, key); err != nil || serial != string(rune('0'+next)) {
			t.Errorf("certificate %s, %v; want %d", serial, err, next)
		}
	}
	for _, c := range []struct{ ca, certificate, key, says string }{
		{strange, certificate, key, "unknown authority"},
		{"", certificate, key, "unknown authority"},
		{trusted, "", "", "certificate"},
		{empty, "", "", "has no certificate in PEM"},
		{filepath.Join(dir, "none"), "", "", "no such file"},
		{trusted, certificate, empty, "failed to find any PEM data"},
	} {
		if err := get(c.ca, c.certificate, c.key); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
