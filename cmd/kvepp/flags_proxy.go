package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"kvepp/serve/secrets"
)

// transport are the flags of TLS between proxies and the external processor.
type transport struct {
	secureServing bool
	secrets.Config
}

func (t *transport) add(f *pflag.FlagSet) {
	f.BoolVar(&t.secureServing, "secure-serving", true,
		"serve TLS at --grpc-port, as Envoy's cluster for kvepp must expect")
	f.StringVar(&t.CertPath, "cert-path", "",
		"folder `DIR` with the certificate, tls.crt, and its key, tls.key, as Kubernetes mounts a TLS secret; kvepp "+
			"reads them again when they change. Empty: kvepp makes a self-signed certificate at start")
	f.StringVar(&t.ClientCA, "tls-client-ca", "",
		"PEM `FILE` with authorities: kvepp accepts only proxies with a certificate of one of them; kvepp reads it "+
			"again when it changes. Empty: kvepp accepts any proxy")
	f.StringVar(&t.MinVersion, "tls-min-version", "1.2", "the oldest `VERSION` of TLS that kvepp accepts, 1.2 or 1.3")
	values(f, "tls-min-version", "1.2", "1.3")
}

func (t *transport) check(given func(flag string) bool) error {
	if err := oneOf("tls-min-version", t.MinVersion, "1.2", "1.3"); err != nil {
		return err
	}
	for _, flag := range []string{"cert-path", "tls-client-ca", "tls-min-version"} {
		if !t.secureServing && given(flag) {
			return fmt.Errorf(
				"--%s belongs to TLS, which --secure-serving=false turns off; leave one of them out",
				flag,
			)
		}
	}
	return nil
}
