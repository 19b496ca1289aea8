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

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/internal/metrics"
	"kvepp/modelrewrite"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/router"
	"kvepp/tokenizer"
)

// kubernetes is kvepp's side of a cluster. nil: there is none.
type kubernetes struct {
	client    *kube.Client
	namespace string
	source    *kube.Source
	policies  *kube.Policies // nil: there is no pool that they could be of
	election  *kube.Election // nil: every replica is active
	reviewer  *kube.Reviewer // nil: the API server is not asked who may read metrics
}

// connect prepares what follows a cluster; nothing is asked of it yet.
func connect(o *options, ready *readiness, m *metrics.Metrics, log *slog.Logger) (*kubernetes, error) {
	if !o.wanted() {
		return nil, nil
	}
	client, err := kube.Connect(o.kubeconfig, log)
	if err != nil {
		return nil, err
	}
	engine, err := o.tokenizerOptions()
	if err != nil {
		return nil, err
	}
	k := &kubernetes{client: client, namespace: cmp.Or(o.poolNamespace, os.Getenv("NAMESPACE"), client.Namespace)}
	config := kube.Config{
		Namespace: k.namespace, PoolName: o.poolName, PoolGroup: o.poolGroup, Ports: o.targetPorts,
		KVEventsPort: int(o.kvEventsPort), KVEventsGiven: o.given["kv-events-port"], KVReplayPort: int(o.kvReplayPort),
		DataParallelSize: o.dataParallelSize, Family: o.podIPFamily, Dynamo: engine.Engine == tokenizer.Dynamo,
	}
	if config.Dynamo {
		config.AskFrontend = dynamo.AskFrontend
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
		wanted := ready.want("this replica to lead")
		leads := func(now bool) {
			leading.Store(now)
			wanted(now)
		}
		m.GaugeFunc(metrics.Leader, metrics.LeaderHelp, nil, func() float64 {
			if leading.Load() {
				return 1
			}
			return 0
		})
		// the same for a container that is started again, which leads at once if it did before
		identity := os.Getenv("POD_NAME")
		if identity == "" {
			host, _ := os.Hostname()
			identity = fmt.Sprintf("%s_%08x", host, rand.Uint32())
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
	for _, kind := range kinds {
		labels := prometheus.Labels{"kind": kind.Name}
		m.CounterFunc(
			metrics.KubeErrors,
			metrics.KubeErrorsHelp,
			labels,
			func() float64 { return float64(kind.Errors()) },
		)
		m.GaugeFunc(metrics.KubeFollowed, metrics.KubeFollowedHelp, labels, func() float64 {
			if kind.Health() == kube.Followed {
				return 1
			}
			return 0
		})
	}
	countersOf(
		m,
		metrics.KubeUpdates,
		metrics.KubeUpdatesHelp,
		"of",
		k.source.Stats,
		map[string]func(kube.Stats) uint64{
			"list":   func(s kube.Stats) uint64 { return s.Lists },
			"pool":   func(s kube.Stats) uint64 { return s.Recomputed },
			"change": func(s kube.Stats) uint64 { return s.Changes },
			"update": func(s kube.Stats) uint64 { return s.Updates },
		},
	)
	return k, nil
}

// follow gives what the cluster says to apply until stop is called, which returns when nothing will be applied any
// more.
func (k *kubernetes) follow(apply func(kube.State)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.source.Run(ctx, apply)
	}()
	return func() { cancel(); <-done }
}

// await waits until the cluster's endpoints are known, or ctx ends.
func (k *kubernetes) await(ctx context.Context) {
	if k == nil {
		return
	}
	select {
	case <-k.source.Synced():
	case <-ctx.Done():
	}
}

// elect takes part in the election, if there is one, until ctx ends or done is called, which returns when the lease is
// released. A replica that does not know its endpoints is no candidate.
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

// handedOver is closed when a replica that leads, and whose context of elect has ended, may say that it wants no more
// requests: another has led for as long as proxies take to notice it. At once if there is no election.
func (k *kubernetes) handedOver(o *options, log *slog.Logger) <-chan struct{} {
	done := make(chan struct{})
	if k == nil || k.election == nil {
		close(done)
		return done
	}
	log.Info("this replica stays ready until another one leads, and proxies know", "at_most", o.handOverTimeout)
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), o.handOverTimeout)
		defer cancel()
		if k.election.Succeeded(ctx) {
			time.Sleep(o.drainDelay)
		} else {
			log.Warn("no other replica leads after --ha-handover-timeout")
		}
	}()
	return done
}

// obey puts what the cluster says of requests into force, until ctx ends: rules of the command line go before those of
// the cluster.
func (k *kubernetes) obey(
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
			log.Error("model rewrites stay as they were", "error", err)
		}
	})
}

// guard has the API server say who may read metrics, if it is to.
func (k *kubernetes) guard(next http.Handler) http.Handler {
	if k == nil || k.reviewer == nil {
		return next
	}
	return k.reviewer.Guard(next)
}
