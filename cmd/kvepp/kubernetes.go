package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"kvepp/internal/metrics"
	"kvepp/modelrewrite"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/router"
	"kvepp/tokenizer"
)

// cluster is what `kvepp serve` can be told of Kubernetes.
type cluster struct {
	kubeconfig                         string
	poolName, poolNamespace, poolGroup string
	endpointSelector                   string
	targetPorts                        []int
	kvEventsPort, kvReplayPort         uint16
	dataParallelSize                   uint32
	podIPFamily                        string
	leaderElection                     bool
	leaseName                          string
	handOverTimeout                    time.Duration
	metricsAuth                        bool
}

// add declares the flags. Names and defaults are GAIE's endpoint picker's where it has the same.
func (c *cluster) add(f *pflag.FlagSet) {
	f.StringVar(
		&c.poolName,
		"pool-name",
		"",
		"the InferencePool whose Pods are the endpoints, `NAME`; followed for as long as kvepp runs. May be given "+
			"beside --endpoints",
	)
	f.StringVar(
		&c.poolNamespace,
		"pool-namespace",
		"",
		"the `NAMESPACE` of the pool and its Pods. Empty: $NAMESPACE, else kvepp's own, or the kubeconfig's",
	)
	f.StringVar(
		&c.poolGroup,
		"pool-group",
		kube.PoolGroup,
		"the pool's API `GROUP`: "+kube.PoolGroup+" (v1) or "+kube.LegacyPoolGroup+" (v1alpha2)",
	)
	f.StringVar(
		&c.endpointSelector,
		"endpoint-selector",
		"",
		"in place of a pool, the labels of the Pods that are the endpoints, `KEY=VALUE,...`, or any label selector ...",
	)
	f.IntSliceVar(
		&c.targetPorts,
		"endpoint-target-ports",
		nil,
		"... and the `PORTS` of each, separated by commas, at most 8; several are data-parallel ranks. Empty: each "+
			"Pod's container port named \"http\", which is that of Dynamo's frontendSidecar",
	)
	f.StringVar(
		&c.kubeconfig,
		"kubeconfig",
		"",
		"`FILE` that says where the API server is. Empty: the cluster that kvepp runs in",
	)
	f.Uint16Var(
		&c.kvEventsPort,
		"kv-events-port",
		5557,
		"the `PORT` at which each Pod's rank 0 publishes KV events; rank r at PORT + r. 0: none. A Pod's annotation "+
			"kvepp/kv-events-port goes first; and where it is not given, the event channels that Dynamo's workers "+
			"tell of",
	)
	f.Uint16Var(
		&c.kvReplayPort,
		"kv-replay-port",
		0,
		"the `PORT` of their replay sockets, numbered alike. 0: none. A Pod's annotation kvepp/kv-replay-port goes "+
			"first",
	)
	f.Uint32Var(
		&c.dataParallelSize,
		"data-parallel-size",
		1,
		"how many data-parallel `RANKS` share the target port of a Pod that has one, told apart by a header "+
			"(x-data-parallel-rank, x-dynamo-dp-rank). A Pod's annotation kvepp/data-parallel-size, or a Dynamo "+
			"worker's model card, can say another",
	)
	f.StringVar(
		&c.podIPFamily,
		"pod-ip-family",
		"",
		"which address of Pods with several: `ipv4 or ipv6`. Empty: the first, which Kubernetes calls the Pod's",
	)
	f.BoolVar(
		&c.leaderElection,
		"ha-enable-leader-election",
		false,
		"of several replicas only one is ready, the holder of a Lease; all of them follow the workers and their KV "+
			"events",
	)
	f.StringVar(
		&c.leaseName,
		"ha-lease-name",
		"",
		"the Lease's `NAME`, in --pool-namespace. Empty: kvepp-POOL, or of a selector kvepp- and a number made of it",
	)
	f.DurationVar(
		&c.handOverTimeout,
		"ha-handover-timeout",
		time.Minute,
		"after SIGTERM, how long a replica that leads stays ready for another one to lead in its place, which "+
			"proxies then have --drain-delay to notice. Only after that --drain-timeout begins",
	)
	f.BoolVar(
		&c.metricsAuth,
		"metrics-endpoint-auth",
		true,
		"in Kubernetes, whoever asks for metrics must bring a token of the cluster's whose bearer may get the path "+
			"/metrics (TokenReview, SubjectAccessReview). Not with --metrics-token-file",
	)
}

// inKubernetes is the --dynamo-discovery of workers that write DynamoWorkerMetadata objects.
const inKubernetes = "kubernetes"

// wanted reports whether endpoints come from Kubernetes.
func (c *cluster) wanted() bool { return c.poolName != "" || c.endpointSelector != "" }

// check says what is wrong with them.
func (c *cluster) check() error {
	switch {
	case c.poolName != "" && c.endpointSelector != "":
		return errors.New(
			"--pool-name and --endpoint-selector: the pool has a selector of its own; leave out one of the two",
		)
	case c.poolName != "" && len(c.targetPorts) > 0:
		return errors.New("--endpoint-target-ports: the pool says its Pods' ports; leave it out")
	case len(c.targetPorts) > 0 && c.endpointSelector == "":
		return errors.New("--endpoint-target-ports: of which Pods? Give --endpoint-selector")
	case c.poolGroup != kube.PoolGroup && c.poolGroup != kube.LegacyPoolGroup:
		return fmt.Errorf("--pool-group %q: must be %s or %s", c.poolGroup, kube.PoolGroup, kube.LegacyPoolGroup)
	case c.dataParallelSize < 1 || c.dataParallelSize > 1024:
		return fmt.Errorf("--data-parallel-size %d: must be from 1 to 1024, for example 2", c.dataParallelSize)
	case c.leaderElection && !c.wanted():
		return errors.New(
			"--ha-enable-leader-election: the Lease is Kubernetes'; give --pool-name or --endpoint-selector",
		)
	}
	if c.podIPFamily != "" {
		if err := oneOf("pod-ip-family", c.podIPFamily, "ipv4", "ipv6"); err != nil {
			return err
		}
	}
	if err := kube.CheckPorts(c.targetPorts); err != nil {
		return fmt.Errorf("--endpoint-target-ports: %w", err)
	}
	if c.endpointSelector != "" {
		if _, err := kube.ParseSelector(c.endpointSelector); err != nil {
			return fmt.Errorf("--endpoint-selector %q: %w", c.endpointSelector, err)
		}
	}
	return nil
}

// lease returns the name of the Lease.
func (c *cluster) lease() string {
	if c.leaseName != "" || c.poolName != "" {
		return cmp.Or(c.leaseName, "kvepp-"+c.poolName)
	}
	h := fnv.New32a()
	h.Write([]byte(c.endpointSelector))
	return fmt.Sprintf("kvepp-%08x", h.Sum32())
}

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
		m.Source(metrics.Leader, metrics.LeaderHelp, nil, func() float64 {
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
		m.CounterSource(
			metrics.KubeErrors,
			metrics.KubeErrorsHelp,
			labels,
			func() float64 { return float64(kind.Errors()) },
		)
		m.Source(metrics.KubeFollowed, metrics.KubeFollowedHelp, labels, func() float64 {
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
