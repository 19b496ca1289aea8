package replicas

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"kvepp/scoring/replica"
	"kvepp/serve/check"
	"kvepp/serve/secrets"
)

const (
	resolveEvery = 5 * time.Second
	maxAddresses = 256 // of all peers
)

// Service follows the hosts of a Service's Pods until ctx ends; nil: there is none.
type Service func(ctx context.Context, apply func(hosts []string))

// followPeers calls set with the addresses of all peers, at each change and each time the names are resolved.
func (c *Config) followPeers(ctx context.Context, service Service, set func([]string), failed func(string, error)) {
	if service != nil {
		service(ctx, func(hosts []string) {
			var all []string
			for _, host := range hosts {
				all = append(all, net.JoinHostPort(host, strconv.Itoa(int(c.Port))))
			}
			set(all)
		})
		return
	}
	known := map[string][]string{} // by peer; those of a name that cannot be resolved stay
	tick := time.NewTicker(resolveEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		var all []string
		for _, peer := range c.Peers {
			some, err := resolve(ctx, peer)
			if err == nil {
				known[peer] = some
			}
			failed(peer, err)
			all = append(all, known[peer]...)
		}
		slices.Sort(all)
		all = slices.Compact(all)
		set(all[:min(len(all), maxAddresses)])
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// resolve returns the addresses of a peer, HOST:PORT.
func resolve(ctx context.Context, peer string) (addresses []string, err error) {
	host, port, err := net.SplitHostPort(peer)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, resolveEvery)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	for _, a := range found {
		addresses = append(addresses, net.JoinHostPort(a.Unmap().String(), port))
	}
	return addresses, err
}

// Check asks each of the other replicas whether it would share its load with one that has these settings.
func (c *Config) Check(
	ctx context.Context, files *secrets.Files, tls secrets.Config, group string, service Service,
) []check.Finding {
	if !c.Shares() {
		return nil
	}
	finding := func(who string, state check.State, fix, says string, args ...any) check.Finding {
		return check.Finding{Worker: who, About: "sharing", State: state, Says: fmt.Sprintf(says, args...), Fix: fix}
	}
	security, err := c.Security(files, tls)
	if err != nil {
		return []check.Finding{finding("replicas", check.Wrong, "--replica-token-file, --cert-path, --tls-client-ca",
			"%v", err)}
	}
	var all []string
	var findings []check.Finding
	once, cancel := context.WithCancel(ctx)
	defer cancel()
	c.followPeers(once, service, func(found []string) {
		all = found
		cancel()
	}, func(peer string, err error) {
		if err != nil {
			findings = append(findings, finding("replica "+peer, check.Wrong, "--replica-peers", "%v", err))
		}
	})
	if len(all) == 0 && len(findings) == 0 {
		return []check.Finding{finding("replicas", check.Unknown, "--replica-peers, --replica-service",
			"no replica has an address; each one works on its own book")}
	}
	asked := make([]check.Finding, len(all))
	var asking sync.WaitGroup
	for i, at := range all {
		asking.Go(func() {
			name, err := replica.Probe(ctx, security, group, at)
			switch why := replica.ReasonOf(err); {
			case why != "":
				asked[i] = finding("replica "+at, check.Wrong, why.Fix(), "shares nothing: %s", why)
			case err != nil:
				asked[i] = finding("replica "+at, check.Wrong, "is kvepp there, with this --replica-port? With "+
					"certificates, replicas need one authority and a name in common", "does not answer: %v", err)
			default:
				asked[i] = finding("replica "+at, check.OK, "", "%q shares (protocol %d; security: %s)", name,
					replica.Version, security.Mode())
			}
		})
	}
	asking.Wait()
	return append(findings, asked...)
}
