package main

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spf13/pflag"

	"kvepp/internal/check"
	"kvepp/pool"
)

// gatewayOptions are what `kvepp check` is told about the gateway.
type gatewayOptions struct {
	url, keyFile string
	insecure     bool
	extProc      string
}

func (g *gatewayOptions) add(f *pflag.FlagSet) {
	f.StringVar(
		&g.url,
		"gateway",
		"",
		"`URL` of the gateway, such as http://envoy:10080: chats go through it, one for each endpoint, and the "+
			"endpoint that kvepp chose is compared with the one that served. The running kvepp must tell of its "+
			"decisions, at --admin-address (give it here too, with --admin-token-file) or by --decision-headers",
	)
	f.StringVar(
		&g.keyFile,
		"gateway-api-key-file",
		"",
		"`FILE` with the key that the gateway's clients must bring, as \"Authorization: Bearer KEY\"",
	)
	f.BoolVar(&g.insecure, "gateway-insecure-skip-verify", false, "do not verify the certificate of an https --gateway")
	f.StringVar(
		&g.extProc,
		"ext-proc-address",
		"",
		"`HOST:PORT` where the gateway should reach kvepp. Empty: --bind-address, or this machine, and --grpc-port",
	)
}

func (g *gatewayOptions) check() error {
	if g.url == "" {
		for flag, given := range map[string]bool{"gateway-api-key-file": g.keyFile != "",
			"gateway-insecure-skip-verify": g.insecure, "ext-proc-address": g.extProc != ""} {
			if given {
				return fmt.Errorf("--%s acts with --gateway only; give --gateway URL too", flag)
			}
		}
		return nil
	}
	u, err := url.Parse(g.url)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
		return fmt.Errorf("--gateway %q: must be a URL such as http://envoy:10080", g.url)
	}
	if g.extProc != "" {
		if err := pool.CheckHostPort(g.extProc); err != nil {
			return fmt.Errorf("--ext-proc-address: %w", err)
		}
	}
	return nil
}

// gateway returns where the gateway and the running kvepp are asked.
func (c *checkOptions) gatewayToCheck() (*check.Gateway, error) {
	key, err := newTokenFile("--gateway-api-key-file", c.gateway.keyFile)
	if err != nil {
		return nil, err
	}
	admin, err := newTokenFile("--admin-token-file", c.adminTokenFile)
	if err != nil {
		return nil, err
	}
	metrics, err := newTokenFile("--metrics-token-file", c.metricsTokenFile)
	if err != nil {
		return nil, err
	}
	at := func(port uint16) string { return dialable(net.JoinHostPort(c.bindAddress, strconv.Itoa(int(port)))) }
	g := &check.Gateway{
		URL:          c.gateway.url,
		Key:          key.token(),
		ExtProc:      cmp.Or(c.gateway.extProc, at(c.grpcPort)),
		AdminToken:   admin.token(),
		MetricsToken: metrics.token(),
		HTTP: &http.Client{
			Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: c.gateway.insecure}},
		},
	}
	if c.adminAddress != "" {
		g.Admin = "http://" + dialable(c.adminAddress)
	}
	switch {
	case c.metricsAddress != "":
		g.MetricsPage = "http://" + dialable(c.metricsAddress) + "/metrics"
	case c.metricsPort != 0:
		g.MetricsPage = "http://" + at(c.metricsPort) + "/metrics"
	}
	return g, nil
}

// dialable returns where a server listens, as a client on the same machine reaches it.
func dialable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && (host == "" || ip != nil && ip.IsUnspecified()) {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return address
}
