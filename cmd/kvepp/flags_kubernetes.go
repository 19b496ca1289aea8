package main

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/spf13/pflag"

	"kvepp/pool/kube"
)

// cluster holds the Kubernetes flags of `kvepp serve`.
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

// add declares the flags. Where GAIE's endpoint picker has the same flag, the name and the default are its.
func (c *cluster) add(f *pflag.FlagSet) {
	f.StringVar(
		&c.poolName,
		"pool-name",
		"",
		"in Kubernetes, the `NAME` of the InferencePool whose Pods are the endpoints; kvepp follows its changes. May "+
			"be combined with --endpoints",
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
	values(f, "pool-group", kube.PoolGroup, kube.LegacyPoolGroup)
	f.StringVar(
		&c.endpointSelector,
		"endpoint-selector",
		"",
		"instead of a pool: the label selector of the Pods that are the endpoints, `KEY=VALUE,...`",
	)
	f.IntSliceVar(
		&c.targetPorts,
		"endpoint-target-ports",
		nil,
		"with --endpoint-selector: the `PORTS` of each Pod, separated by commas, at most 8; several ports are "+
			"data-parallel ranks. Empty: each Pod's container port named \"http\", as Dynamo's frontendSidecar has it",
	)
	f.StringVar(
		&c.kubeconfig,
		"kubeconfig",
		"",
		"kubeconfig `FILE` for the API server. Empty: the cluster that kvepp runs in",
	)
	f.Uint16Var(
		&c.kvEventsPort,
		"kv-events-port",
		5557,
		"the `PORT` at which rank 0 of each Pod publishes KV events; rank r publishes at PORT + r. 0: none. "+
			"Precedence: the Pod's annotation kvepp/kv-events-port, this flag if it is given, the event channels "+
			"that Dynamo's workers announce, the default",
	)
	f.Uint16Var(
		&c.kvReplayPort,
		"kv-replay-port",
		0,
		"the `PORT` of the KV event replay socket of rank 0; rank r has PORT + r. 0: none. A Pod's annotation "+
			"kvepp/kv-replay-port has precedence",
	)
	f.Uint32Var(
		&c.dataParallelSize,
		"data-parallel-size",
		1,
		"how many data-parallel `RANKS` share the target port of a Pod with one port; a header selects the rank "+
			"(x-data-parallel-rank, x-dynamo-dp-rank). A Pod's annotation kvepp/data-parallel-size, or a Dynamo "+
			"worker's model card, has precedence",
	)
	f.StringVar(
		&c.podIPFamily,
		"pod-ip-family",
		"",
		"which address kvepp takes from a Pod with several, `FAMILY`: ipv4 or ipv6. Empty: the first (status.podIP)",
	)
	values(f, "pod-ip-family", "ipv4", "ipv6")
	f.BoolVar(
		&c.leaderElection,
		"ha-enable-leader-election",
		false,
		"only one of several replicas is ready: the holder of a Lease. All replicas follow the workers and their KV "+
			"events",
	)
	f.StringVar(
		&c.leaseName,
		"ha-lease-name",
		"",
		"the Lease's `NAME`, in --pool-namespace. Empty: kvepp-POOL, or with a selector kvepp- and the selector's hash",
	)
	f.DurationVar(
		&c.handOverTimeout,
		"ha-handover-timeout",
		time.Minute,
		"after SIGTERM, how long the leader stays ready until another replica leads. Then proxies have --drain-delay "+
			"to notice the change; --drain-timeout begins after that",
	)
	f.BoolVar(
		&c.metricsAuth,
		"metrics-endpoint-auth",
		true,
		"in Kubernetes, a request for metrics must carry a cluster token that is authorized to get the path /metrics "+
			"(TokenReview, SubjectAccessReview). Without effect with --metrics-token-file",
	)
}

// inKubernetes is the value of --dynamo-discovery for workers that write DynamoWorkerMetadata objects.
const inKubernetes = "kubernetes"

// usesKubernetes reports whether endpoints come from Kubernetes.
func (c *cluster) usesKubernetes() bool { return c.poolName != "" || c.endpointSelector != "" }

// check returns an error for the first invalid flag.
func (c *cluster) check() error {
	switch {
	case c.poolName != "" && c.endpointSelector != "":
		return errors.New(
			"--pool-name and --endpoint-selector: the pool has a selector of its own; leave out one of the two",
		)
	case c.poolName != "" && len(c.targetPorts) > 0:
		return errors.New("--endpoint-target-ports: the pool says its Pods' ports; leave it out")
	case len(c.targetPorts) > 0 && c.endpointSelector == "":
		return errors.New("--endpoint-target-ports needs to know which Pods to follow: give --endpoint-selector")
	case c.poolGroup != kube.PoolGroup && c.poolGroup != kube.LegacyPoolGroup:
		return fmt.Errorf("--pool-group %q: must be %s or %s", c.poolGroup, kube.PoolGroup, kube.LegacyPoolGroup)
	case c.dataParallelSize < 1 || c.dataParallelSize > 1024:
		return fmt.Errorf("--data-parallel-size %d: must be from 1 to 1024, for example 2", c.dataParallelSize)
	case c.leaderElection && !c.usesKubernetes():
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

// lease returns the name of the Lease. Without a pool it has a hash of the selector.
func (c *cluster) lease() string {
	if c.leaseName != "" || c.poolName != "" {
		return cmp.Or(c.leaseName, "kvepp-"+c.poolName)
	}
	h := fnv.New32a()
	h.Write([]byte(c.endpointSelector))
	return fmt.Sprintf("kvepp-%08x", h.Sum32())
}
