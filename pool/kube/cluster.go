package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
)

// Cluster follows what kvepp needs of a cluster. Create it with Open. Its methods also work on nil: there is none.
type Cluster struct {
	Namespace string   // of the endpoints
	Replicas  *Service // nil: Config.ReplicaService is not given
	source    *Source
	policies  *Policies // nil: there is no pool
	election  *Election // nil: every replica is active
	reviewer  *Reviewer // nil: kvepp does not ask the API server who may read metrics
	handOver  time.Duration
	log       *slog.Logger
}

// Open creates the followers that c asks for; nil without a pool and a selector. leads is called with whether this
// replica is the leader. Open sends no requests yet. c must have passed Validate.
func Open(c *Config, leads func(bool), m *metrics.Metrics, log *slog.Logger) (*Cluster, error) {
	if !c.Used() {
		return nil, nil
	}
	client, err := Connect(c.Kubeconfig, log)
	if err != nil {
		return nil, err
	}
	config := *c
	config.Namespace = cmp.Or(c.Namespace, os.Getenv("NAMESPACE"), client.Namespace)
	k := &Cluster{Namespace: config.Namespace, source: NewSource(client, config, log), handOver: c.HandOverTimeout,
		log: log}
	kinds := k.source.Kinds()
	if c.PoolName != "" {
		k.policies = NewPolicies(client, k.Namespace, c.PoolName, log)
		kinds = append(kinds, k.policies.Kinds()...)
	}
	if c.LeaderElection {
		leading := atomic.Bool{}
		lead := func(now bool) {
			leading.Store(now)
			leads(now)
		}
		metrics.Flag(m, metrics.Leader, leading.Load)
		// A restarted container has the same identity, so that it leads again at once if it led before.
		identity := os.Getenv("POD_NAME")
		if identity == "" {
			host, _ := os.Hostname()
			identity = fmt.Sprintf("%s_%08x", host, rand.Uint32())
		}
		if k.election, err = NewElection(client, k.Namespace, c.lease(), identity, lead, log); err != nil {
			return nil, err
		}
		kinds = append(kinds, k.election.Kind())
	}
	if c.MetricsAuth {
		k.reviewer = NewReviewer(client, log)
		kinds = append(kinds, k.reviewer.Kind())
	}
	if c.ReplicaService != "" {
		own := cmp.Or(os.Getenv("NAMESPACE"), client.Namespace)
		k.Replicas = NewService(client, own, c.ReplicaService, c.Family, log)
		kinds = append(kinds, k.Replicas.Kind())
	}
	for _, kind := range kinds {
		metrics.Counter(m, metrics.KubeErrors, kind.Errors, "kind", kind.Name)
		metrics.Flag(m, metrics.KubeFollowed, func() bool { return kind.Health() == Followed }, "kind", kind.Name)
	}
	metrics.Counters(m, metrics.KubeUpdates, "of", func() map[string]uint64 {
		s := k.source.Stats()
		return map[string]uint64{"list": s.Lists, "pool": s.Recomputed, "change": s.Changes, "update": s.Updates}
	})
	return k, nil
}

// Synced returns a channel that is closed when kvepp knows the endpoints. The Cluster is not nil.
func (k *Cluster) Synced() <-chan struct{} { return k.source.Synced() }

// Follow calls apply with the cluster's state at each change, until stop is called. When stop returns, apply is not
// called any more. The Cluster is not nil.
func (k *Cluster) Follow(apply func(State)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.source.Run(ctx, apply)
	}()
	return func() { cancel(); <-done }
}

// Await waits until kvepp knows the endpoints, or ctx ends.
func (k *Cluster) Await(ctx context.Context) {
	if k == nil {
		return
	}
	select {
	case <-k.source.Synced():
	case <-ctx.Done():
	}
}

// Elect takes part in the election, if there is one, until ctx ends or done is called. done returns when the lease is
// released. A replica does not take part before it knows its endpoints.
func (k *Cluster) Elect(ctx context.Context) (done func()) {
	if k == nil || k.election == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	released := make(chan struct{})
	go func() {
		defer close(released)
		if k.Await(ctx); ctx.Err() == nil {
			k.election.Run(ctx)
		}
	}()
	return func() { cancel(); <-released }
}

// HandedOver returns a channel that is closed when this replica may become unready: another replica has led for
// notice, so that proxies know of it. Without an election the channel is closed at once. Call HandedOver after the
// context of Elect has ended.
func (k *Cluster) HandedOver(notice time.Duration) <-chan struct{} {
	done := make(chan struct{})
	if k == nil || k.election == nil {
		close(done)
		return done
	}
	k.log.Info("this replica stays ready until another one leads and proxies have noticed", "at_most", k.handOver)
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), k.handOver)
		defer cancel()
		if k.election.Succeeded(ctx) {
			time.Sleep(notice)
		} else {
			k.log.Warn("no other replica leads after --ha-handover-timeout; kvepp stops all the same")
		}
	}()
	return done
}

// FollowPolicies calls apply with the pool's rewrites and objectives at each change, until ctx ends.
func (k *Cluster) FollowPolicies(ctx context.Context, apply func(Policy)) {
	if k != nil && k.policies != nil {
		go k.policies.Run(ctx, apply)
	}
}

// Guard answers with next only those requests whose tokens may get metrics (--metrics-endpoint-auth).
func (k *Cluster) Guard(next http.Handler) http.Handler {
	if k == nil || k.reviewer == nil {
		return next
	}
	return k.reviewer.Guard(next)
}
