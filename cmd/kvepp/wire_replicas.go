package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"

	"kvepp/internal/metrics"
	"kvepp/pool/kube"
	"kvepp/scoring/replica"
	"kvepp/serve/check"
	"kvepp/serve/listen"
	"kvepp/serve/replicas"
	"kvepp/serve/secrets"
)

// replicaFlags are the flags about other replicas, and sharing shares with them. Their package is imported here alone.
type (
	replicaFlags struct{ sharing replicas.Config }
	sharing      = replicas.Sharing
)

func (o *options) checkReplicas() error {
	return o.sharing.Validate(o.sources.Kube.Used(), replicas.Certified(o.transport), o.ports.BindAddress)
}

// newReplicas starts to share; nil without --replica-peers and --replica-service.
func (s *server) newReplicas() (*replicas.Sharing, error) {
	if !s.sharing.Shares() {
		return nil, nil
	}
	security, err := s.sharing.Security(s.secrets, s.transport)
	if err != nil {
		return nil, err
	}
	at, err := listen.At("replica-port", net.JoinHostPort(s.ports.BindAddress, strconv.Itoa(int(s.sharing.Port))))
	if err != nil {
		return nil, err
	}
	r := replicas.New(&s.sharing, replica.Config{Book: s.book, Pool: s.pool, Sessions: s.sessions,
		Stored: s.responses, Security: security, Group: replicaGroup(s.options, s.cluster),
		Name: cmp.Or(os.Getenv("POD_NAME"), fmt.Sprintf("%s:%d", hostName(), s.sharing.Port)), Log: s.log}, s.m)
	go r.Serve(listen.Limit(at, "replica", listen.Connections(), s.m))
	s.closeWith(r.Close)
	return r, nil
}

// replicaGroup names whose endpoints this process picks from.
func replicaGroup(o *options, cluster *kube.Cluster) string {
	if cluster == nil {
		return "endpoints file"
	}
	return cluster.Namespace + "/" + cmp.Or(o.sources.Kube.PoolName, o.sources.Kube.EndpointSelector)
}

// replicaFindings asks each of the other replicas whether it would share its load with one that has these settings.
func (c *checkOptions) replicaFindings(ctx context.Context, cluster *kube.Cluster, log *slog.Logger) []check.Finding {
	ctx, cancel := context.WithTimeout(ctx, c.tests.Wait)
	defer cancel()
	return c.sharing.Check(ctx, secrets.Follow(ctx, metrics.New(), log), c.transport,
		replicaGroup(&c.options, cluster), replicaService(cluster))
}

// replicaService follows the Pods of --replica-service; nil without it.
func replicaService(cluster *kube.Cluster) replicas.Service {
	if cluster == nil || cluster.Replicas == nil {
		return nil
	}
	return cluster.Replicas.Run
}
