package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/router/modelrewrite"
)

// kubernetes is kvepp's connection to a cluster. Its methods also work on nil: there is no cluster.
type kubernetes struct {
	client    *kube.Client
	namespace string
	source    *kube.Source
	policies  *kube.Policies // nil: there is no pool
	election  *kube.Election // nil: every replica is active
	reviewer  *kube.Reviewer // nil: kvepp does not ask the API server who may read metrics
	replicas  *kube.Service  // nil: --replica-service is not given
}

// connect creates the followers of a cluster; nil without a cluster. It sends no requests yet.
func connect(o *options, ready *readiness, m *metrics.Metrics, log *slog.Logger) (*kubernetes, error) {
	if !o.usesKubernetes() {
		return nil, nil
	}
	client, err := kube.Connect(o.kubeconfig, log)
	if err != nil {
		return nil, err
	}
	k := &kubernetes{client: client, namespace: cmp.Or(o.poolNamespace, os.Getenv("NAMESPACE"), client.Namespace)}
	config := kube.Config{
		Namespace: k.namespace, PoolName: o.poolName, PoolGroup: o.poolGroup, Ports: o.targetPorts,
		KVEventsPort: int(o.kvEventsPort), KVEventsGiven: o.given("kv-events-port"), KVReplayPort: int(o.kvReplayPort),
		DataParallelSize: o.dataParallelSize, Family: o.podIPFamily, Dynamo: o.config.engine.Engine == prompt.Dynamo,
	}
	if config.Dynamo {
		config.QueryFrontend = dynamo.QueryFrontend
	}
	if o.poolName == "" {
		if config.Selector, err = kube.ParseSelector(o.endpointSelector); err != nil {
			return nil, fmt.Errorf("--endpoint-selector: %w", err)
		}
	}
	k.source = kube.NewSource(client, config, log)
	kinds := k.source.Kinds()
	if o.poolName != "" {
		k.policies = kube.NewPolicies(client, k.namespace, o.poolName, log)
		kinds = append(kinds, k.policies.Kinds()...)
	}
	if o.leaderElection {
		leading := atomic.Bool{}
		setReady := ready.condition("this replica to lead")
		leads := func(now bool) {
			leading.Store(now)
			setReady(now)
		}
		metrics.Flag(m, metrics.Leader, leading.Load)
		// A restarted container has the same identity, so that it leads again at once if it led before.
		identity := os.Getenv("POD_NAME")
		if identity == "" {
			identity = fmt.Sprintf("%s_%08x", hostName(), rand.Uint32())
		}
		if k.election, err = kube.NewElection(client, k.namespace, o.lease(), identity, leads, log); err != nil {
			return nil, err
		}
		kinds = append(kinds, k.election.Kind())
	}
	if o.metricsAuth && o.metricsTokenFile == "" {
		k.reviewer = kube.NewReviewer(client, log)
		kinds = append(kinds, k.reviewer.Kind())
	}
	if k.replicas = k.newService(o, log); k.replicas != nil {
		kinds = append(kinds, k.replicas.Kind())
	}
	for _, kind := range kinds {
		metrics.Counter(m, metrics.KubeErrors, kind.Errors, "kind", kind.Name)
		metrics.Flag(m, metrics.KubeFollowed, func() bool { return kind.Health() == kube.Followed }, "kind", kind.Name)
	}
	metrics.Counters(m, metrics.KubeUpdates, "of", func() map[string]uint64 {
		s := k.source.Stats()
		return map[string]uint64{"list": s.Lists, "pool": s.Recomputed, "change": s.Changes, "update": s.Updates}
	})
	return k, nil
}

// follow calls apply with the cluster's state at each change, until stop is called. When stop returns, apply is not
// called any more.
func (k *kubernetes) follow(apply func(kube.State)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.source.Run(ctx, apply)
	}()
	return func() { cancel(); <-done }
}

// await waits until kvepp knows the cluster's endpoints, or ctx ends.
func (k *kubernetes) await(ctx context.Context) {
	if k == nil {
		return
	}
	select {
	case <-k.source.Synced():
	case <-ctx.Done():
	}
}

// elect takes part in the election, if there is one, until ctx ends or done is called. done returns when the lease is
// released. A replica does not take part before it knows its endpoints.
func (k *kubernetes) elect(ctx context.Context) (done func()) {
	if k == nil || k.election == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	released := make(chan struct{})
	go func() {
		defer close(released)
		if k.await(ctx); ctx.Err() == nil {
			k.election.Run(ctx)
		}
	}()
	return func() { cancel(); <-released }
}

// handedOver returns a channel that is closed when this replica may become unready: another replica has led for
// --drain-delay, so that proxies have noticed it. Without an election the channel is closed at once. Call handedOver
// after elect's context has ended.
func (k *kubernetes) handedOver(o *options, log *slog.Logger) <-chan struct{} {
	done := make(chan struct{})
	if k == nil || k.election == nil {
		close(done)
		return done
	}
	log.Info("this replica stays ready until another one leads and proxies have noticed", "at_most", o.handOverTimeout)
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), o.handOverTimeout)
		defer cancel()
		if k.election.Succeeded(ctx) {
			time.Sleep(o.drainDelay)
		} else {
			log.Warn("no other replica leads after --ha-handover-timeout; kvepp stops all the same")
		}
	}()
	return done
}

// applyPolicies applies the cluster's rewrites and objectives until ctx ends. rules, from the command line, take
// precedence over the cluster's.
func (k *kubernetes) applyPolicies(
	ctx context.Context,
	rules []modelrewrite.Rule,
	rewrites *modelrewrite.Rules,
	objectives *router.Objectives,
	log *slog.Logger,
) {
	if k == nil || k.policies == nil {
		return
	}
	go k.policies.Run(ctx, func(now kube.Policy) {
		objectives.Set(now.Priorities)
		if err := rewrites.Set(slices.Concat(rules, now.Rewrites)); err != nil {
			log.Error("the cluster's model rewrites are invalid; the earlier ones stay in force", "error", err)
		}
	})
}

// guard asks the API server who may read metrics (--metrics-endpoint-auth).
func (k *kubernetes) guard(next http.Handler) http.Handler {
	if k == nil || k.reviewer == nil {
		return next
	}
	return k.reviewer.Guard(next)
}
