package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/spf13/pflag"

	"kvepp/pool"
)

// replicaFlags say with which other kvepps this one shares its load book and its sessions.
type replicaFlags struct {
	replicaPort      uint16
	replicaPeers     []string
	replicaService   string
	replicaTokenFile string
}

func (o *replicaFlags) add(f *pflag.FlagSet) {
	f.StringSliceVar(&o.replicaPeers, "replica-peers", nil,
		"other replicas of this kvepp, as `HOST:PORT` of their --replica-port, separated by commas: each shares its "+
			"running requests and its sessions with the others. kvepp resolves a host name again every 5 seconds and "+
			"takes all its addresses; its own may be among them. Empty, and no --replica-service: it shares nothing")
	f.StringVar(&o.replicaService, "replica-service", "",
		"in Kubernetes, the `NAME` of a headless Service in kvepp's own namespace whose Pods are the replicas, in "+
			"place of --replica-peers")
	f.Uint16Var(&o.replicaPort, "replica-port", 9004,
		"`PORT` at which the other replicas read what this one shares; with --replica-service it is also theirs")
	f.StringVar(&o.replicaTokenFile, "replica-token-file", "",
		"`FILE` with a secret that all replicas have; kvepp reads it again when it changes. Replicas recognise one "+
			"another by it, or by --cert-path and --tls-client-ca, or by both. Without either, --bind-address and all "+
			"peers must be loopback addresses")
}

// shares reports whether kvepp has other replicas.
func (o *replicaFlags) shares() bool { return len(o.replicaPeers) > 0 || o.replicaService != "" }

// checkReplicas returns an error for the first invalid flag about replicas.
func (o *options) checkReplicas() error {
	switch {
	case !o.shares():
		return nil
	case len(o.replicaPeers) > 0 && o.replicaService != "":
		return errors.New("--replica-peers and --replica-service: both say who the replicas are; leave out one of them")
	case o.replicaService != "" && !o.sources.Kube.Used():
		return errors.New("--replica-service: the Service is Kubernetes'; give --pool-name or --endpoint-selector, " +
			"or give --replica-peers")
	case o.replicaPort == 0:
		return errors.New("--replica-port 0: must be from 1 to 65535")
	}
	if o.replicaService != "" {
		if err := pool.CheckName(o.replicaService); err != nil {
			return fmt.Errorf("--replica-service %q: %w", o.replicaService, err)
		}
	}
	for _, peer := range o.replicaPeers {
		if err := pool.CheckHostPort(peer); err != nil {
			return fmt.Errorf("--replica-peers %q: %w", peer, err)
		}
	}
	if o.replicaTokenFile != "" || o.CertPath != "" && o.ClientCA != "" {
		return nil
	}
	if o.replicaService != "" || !loopbackHost(o.bindAddress) {
		return errors.New("replicas must recognise one another: give --replica-token-file, or --cert-path with " +
			"--tls-client-ca. Only with --bind-address 127.0.0.1 may both be left out")
	}
	for _, peer := range o.replicaPeers {
		if host, _, _ := net.SplitHostPort(peer); !loopbackHost(host) {
			return fmt.Errorf("--replica-peers %q: without --replica-token-file, and without --cert-path and "+
				"--tls-client-ca, peers must have loopback addresses", peer)
		}
	}
	return nil
}

// loopbackHost reports whether a host is a loopback address.
func loopbackHost(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}

// replicaAddress returns the address of a peer's port.
func (o *replicaFlags) replicaAddress(host string) string {
	return net.JoinHostPort(host, strconv.Itoa(int(o.replicaPort)))
}
