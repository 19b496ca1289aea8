package replicas

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/spf13/pflag"

	"kvepp/pool"
	"kvepp/scoring/replica"
	"kvepp/serve/secrets"
)

// Config says with which other kvepps this one shares its load book and its sessions.
type Config struct {
	Port      uint16
	Peers     []string // HOST:PORT
	Service   string   // of Kubernetes
	TokenFile string
}

// AddFlags registers the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&c.Peers, "replica-peers", nil,
		"other replicas of this kvepp, as `HOST:PORT` of their --replica-port, separated by commas: each shares its "+
			"running requests and its sessions with the others. kvepp resolves a host name again every 5 seconds and "+
			"takes all its addresses; its own may be among them. Empty, and no --replica-service: it shares nothing")
	fs.StringVar(&c.Service, "replica-service", "",
		"in Kubernetes, the `NAME` of a headless Service in kvepp's own namespace whose Pods are the replicas, in "+
			"place of --replica-peers")
	fs.Uint16Var(&c.Port, "replica-port", 9004,
		"`PORT` at which the other replicas read what this one shares; with --replica-service it is also theirs")
	fs.StringVar(&c.TokenFile, "replica-token-file", "",
		"`FILE` with a secret that all replicas have; kvepp reads it again when it changes. Replicas recognise one "+
			"another by it, or by --cert-path and --tls-client-ca, or by both. Without either, --bind-address and all "+
			"peers must be loopback addresses")
}

// Shares reports whether kvepp has other replicas.
func (c *Config) Shares() bool { return len(c.Peers) > 0 || c.Service != "" }

// Validate returns an error for the first invalid flag. inCluster: kvepp follows Kubernetes. certified: see Certified.
func (c *Config) Validate(inCluster, certified bool, bindAddress string) error {
	switch {
	case !c.Shares():
		return nil
	case len(c.Peers) > 0 && c.Service != "":
		return errors.New("--replica-peers and --replica-service: both say who the replicas are; leave out one of them")
	case c.Service != "" && !inCluster:
		return errors.New("--replica-service: the Service is Kubernetes'; give --pool-name or --endpoint-selector, " +
			"or give --replica-peers")
	case c.Port == 0:
		return errors.New("--replica-port 0: must be from 1 to 65535")
	}
	if c.Service != "" {
		if err := pool.CheckName(c.Service); err != nil {
			return fmt.Errorf("--replica-service %q: %w", c.Service, err)
		}
	}
	trusts := c.TokenFile != "" || certified
	if !trusts && (c.Service != "" || !loopback(bindAddress)) {
		return errors.New("replicas must recognise one another: give --replica-token-file, or --cert-path with " +
			"--tls-client-ca. Only with --bind-address 127.0.0.1 may both be left out")
	}
	for _, peer := range c.Peers {
		if err := pool.CheckHostPort(peer); err != nil {
			return fmt.Errorf("--replica-peers %q: %w", peer, err)
		}
		if host, _, _ := net.SplitHostPort(peer); !trusts && !loopback(host) {
			return fmt.Errorf("--replica-peers %q: without --replica-token-file, and without --cert-path and "+
				"--tls-client-ca, peers must have loopback addresses", peer)
		}
	}
	return nil
}

// Certified reports whether kvepp has a certificate, and an authority of its clients'.
func Certified(c secrets.Config) bool { return c.CertPath != "" && c.ClientCA != "" }

// Security returns how replicas recognise one another. The certificates and the token follow their files.
func (c *Config) Security(files *secrets.Files, tls secrets.Config) (s replica.Security, err error) {
	token, err := files.Token("--replica-token-file", c.TokenFile)
	if err != nil || token == nil && !Certified(tls) {
		return s, err
	}
	certificates, err := files.Certificates(tls)
	if err != nil {
		return s, err
	}
	s.Certificate = certificates.Own
	if Certified(tls) {
		s.Authorities = certificates.Authorities
	}
	if token != nil {
		s.Token = token.Text
	}
	return s, nil
}

func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}
