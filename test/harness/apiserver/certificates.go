package apiserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// certify writes the files of the server's certificate authority, its own certificate, the key of its service accounts'
// tokens, and the kubeconfig of its administrator.
func (s *Server) certify() error {
	authority := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "authority of a test"},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "kube-apiserver"},
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	// RBAC grants this group all rights.
	admin := &x509.Certificate{
		SerialNumber: big.NewInt(3),
		Subject:      pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}},
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	var signer *ecdsa.PrivateKey
	for _, c := range []struct {
		name        string
		certificate *x509.Certificate // nil: only the key
	}{{"ca", authority}, {"server", server}, {"admin", admin}, {"accounts", nil}} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return err
		}
		if signer == nil {
			signer = key
		}
		der, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			return err
		}
		if err := s.writePEM(c.name+".key", "EC PRIVATE KEY", der); err != nil {
			return err
		}
		if c.certificate == nil {
			continue
		}
		c.certificate.NotBefore, c.certificate.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
		if der, err = x509.CreateCertificate(rand.Reader, c.certificate, authority, &key.PublicKey,
			signer); err != nil {
			return err
		}
		if err := s.writePEM(c.name+".crt", "CERTIFICATE", der); err != nil {
			return err
		}
	}
	var user api.AuthInfo
	for name, to := range map[string]*[]byte{"ca.crt": &s.ca, "admin.crt": &user.ClientCertificateData,
		"admin.key": &user.ClientKeyData} {
		text, err := os.ReadFile(filepath.Join(s.dir, name))
		if err != nil {
			return err
		}
		*to = text
	}
	s.Kubeconfig = filepath.Join(s.dir, "admin.kubeconfig")
	return s.writeKubeconfig(s.Kubeconfig, "default", &user)
}

func (s *Server) writePEM(name, kind string, der []byte) error {
	return os.WriteFile(filepath.Join(s.dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

func (s *Server) writeKubeconfig(file, namespace string, user *api.AuthInfo) error {
	c := api.NewConfig()
	c.Clusters["test"] = &api.Cluster{Server: s.url, CertificateAuthorityData: s.ca}
	c.AuthInfos["user"] = user
	c.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "user", Namespace: namespace}
	c.CurrentContext = "test"
	return clientcmd.WriteToFile(*c, file)
}
