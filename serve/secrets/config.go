package secrets

import "crypto/tls"

// Config are the settings of TLS between proxies and the external processor, and of that between replicas.
type Config struct {
	CertPath   string // folder with tls.crt and tls.key; empty: a self-signed certificate
	ClientCA   string // file with the authorities of clients; empty: any client
	MinVersion string // of TLS, a key of versions
}

var versions = map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}
