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
		"in Kubernetes, requests for metrics must bring a token of the cluster whose bearer may get the path "+
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
