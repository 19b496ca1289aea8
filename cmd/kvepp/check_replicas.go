package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"kvepp/internal/metrics"
	"kvepp/pool/kube"
	"kvepp/scoring/replica/link"
	"kvepp/serve/check"
	"kvepp/serve/secrets"
)

// aboutSharing is what findings about replicas are about.
const aboutSharing = "sharing"

// replicaFindings asks each of the other replicas whether it would share its load with one that has these settings.
func (c *checkOptions) replicaFindings(ctx context.Context, cluster *kube.Cluster, log *slog.Logger) []check.Finding {
	if !c.shares() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.tests.Wait)
	defer cancel()
	finding := func(who string, state check.State, fix, says string, args ...any) check.Finding {
		return check.Finding{Worker: who, About: aboutSharing, State: state, Says: fmt.Sprintf(says, args...), Fix: fix}
	}
	security, err := replicaSecurity(&c.options, secrets.Follow(ctx, metrics.New(), log))
	if err != nil {
		return []check.Finding{finding("replicas", check.Wrong, "--replica-token-file, --cert-path, --tls-client-ca",
			"%v", err)}
	}
	addresses, findings := c.replicaAddresses(ctx, cluster, finding)
	if len(addresses) == 0 && len(findings) == 0 {
		return []check.Finding{finding("replicas", check.Unknown, "--replica-peers, --replica-service",
			"no replica has an address; each one works on its own book")}
	}
	group := replicaGroup(&c.options, cluster)
	asked := make([]check.Finding, len(addresses))
	slots := make(chan struct{}, check.AtOnce)
	var asking sync.WaitGroup
	for i, at := range addresses {
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			switch a, err := link.Probe(ctx, &security, group, at); {
			case err != nil:
				asked[i] = finding("replica "+at, check.Wrong, "is kvepp there, with this --replica-port? With "+
					"certificates, replicas need one authority and a name in common", "does not answer: %v", err)
			case a.Refused != "":
				asked[i] = finding("replica "+at, check.Wrong, a.Fix(), "shares nothing: %s", a.Refused)
			default:
				asked[i] = finding("replica "+at, check.OK, "", "%q shares (protocol %d; security: %s)",
					a.Name, a.Version, security.Mode())
			}
		})
	}
	asking.Wait()
	return append(findings, asked...)
}

// replicaAddresses returns the addresses of all replicas, this one's own among them, and a finding for each name that
// cannot be resolved.
func (c *checkOptions) replicaAddresses(
	ctx context.Context,
	cluster *kube.Cluster,
	finding func(who string, state check.State, fix, says string, args ...any) check.Finding,
) (addresses []string, findings []check.Finding) {
	if cluster != nil && cluster.Replicas != nil {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		cluster.Replicas.Run(ctx, func(hosts []string) {
			for _, host := range hosts {
				addresses = append(addresses, c.replicaAddress(host))
			}
			cancel()
		})
	}
	for _, peer := range c.replicaPeers {
		some, err := resolvePeer(ctx, peer)
		if err != nil {
			findings = append(findings, finding("replica "+peer, check.Wrong, "--replica-peers", "%v", err))
		}
		addresses = append(addresses, some...)
	}
	slices.Sort(addresses)
	addresses = slices.Compact(addresses)
	return addresses[:min(len(addresses), maxReplicaAddresses)], findings
}
