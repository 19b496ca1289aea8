package e2e

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// authority signs certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "authority of a test"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{parsed, key}
}

// issue writes a certificate, its key and the authority's certificate to a folder.
func (a *authority) issue(t *testing.T, dir string, serial int64, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		NotBefore:    time.Now().Add(-time.Hour), // Dynamo refuses certificates without it
		NotAfter:     time.Now().Add(time.Hour),
		DNSNames:     []string{name},
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: der},
		"tls.key": {Type: "PRIVATE KEY", Bytes: private},
		"ca.crt":  {Type: "CERTIFICATE", Bytes: a.certificate.Raw}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// serial returns the serial number of the certificate that kvepp presents to a client with the certificate in dir; an
// error if kvepp refuses the client.
func serial(s *stack.Stack, a *authority, dir string) (int64, error) {
	cfg := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "kvepp", NextProtos: []string{"h2"}}
	cfg.RootCAs.AddCert(a.certificate)
	if dir != "" {
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
		if err != nil {
			return 0, err
		}
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	conn, err := tls.Dial("tcp", s.ExtProc(), cfg)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); err != nil { // a refusal follows the client's part of the handshake
		return 0, err
	}
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64(), nil
}

// TestMutualTLS: Envoy and kvepp check each other's certificates, which change during a running response, and clients
// without a valid certificate are refused.
func TestMutualTLS(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	kvepp, envoy, stranger := t.TempDir(), t.TempDir(), t.TempDir()
	ours.issue(t, kvepp, 1, "kvepp")
	ours.issue(t, envoy, 2, "envoy")
	others.issue(t, stranger, 3, "envoy")
	s := start(t, stack.Config{Workers: 1, Manifest: "mtls.yaml", Certificates: envoy,
		KveppFlags: []string{
			"--cert-path=" + kvepp,
			"--tls-client-ca=" + filepath.Join(kvepp, "ca.crt"),
			"--tls-min-version=1.3",
		}})

	if n, err := serial(s, ours, envoy); err != nil || n != 1 {
		t.Errorf("certificate %d, %v", n, err)
	}
	for _, dir := range []string{"", stranger} {
		if _, err := serial(s, ours, dir); err == nil {
			t.Errorf("kvepp talks to a client with the certificate in %q", dir)
		}
	}
	if _, err := serial(s, others, envoy); err == nil {
		t.Error("kvepp's certificate is from another authority")
	}

	body, err := json.Marshal(
		map[string]any{
			"model":      stack.Model,
			"messages":   novel(),
			"stream":     true,
			"max_tokens": 1200,
			"ignore_eos": true,
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(s.Envoy.URL+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if first, err := lines.ReadString('\n'); err != nil || resp.StatusCode != http.StatusOK ||
		resp.Header.Get("x-kvepp-reason") != "kv" {
		t.Fatalf("status %d, reason %q, %q, %v", resp.StatusCode, resp.Header.Get("x-kvepp-reason"), first, err)
	}
	ours.issue(t, kvepp, 4, "kvepp")
	eventually(t, func() error {
		if n, err := serial(s, ours, envoy); err != nil || n != 4 {
			return fmt.Errorf("certificate %d, %w", n, err)
		}
		return nil
	})
	if n := metric(t, s, "kvepp_active_requests"); n != 1 {
		t.Errorf("%v requests are running: the response has ended, so the test proves nothing", n)
	}
	rest, err := io.ReadAll(lines)
	if err != nil || !strings.HasSuffix(strings.TrimSpace(string(rest)), "data: [DONE]") {
		t.Errorf("the running response ended with %.100q, %v", rest[max(0, len(rest)-100):], err)
	}
	if a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), false, nil); err != nil ||
		a.Status != http.StatusOK {
		t.Error(a, err)
	}
}
