package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"

	"kvepp/internal/flags"
	"kvepp/pool"
	"kvepp/pool/dynamo"
)

// Config says which Pods are endpoints, gives the settings that the Pods themselves do not give, and says what kvepp
// asks the cluster besides.
type Config struct {
	Kubeconfig string // a file; empty: the cluster that the process runs in
	Namespace  string // of the pool, and of its Pods
	// PoolName names the InferencePool. If it is empty, EndpointSelector and Ports select the endpoints.
	PoolName string
	// PoolGroup is the pool's API group, PoolGroup or LegacyPoolGroup. Empty: PoolGroup.
	PoolGroup        string
	EndpointSelector string          // in place of a pool
	Selector         labels.Selector // EndpointSelector, as Validate reads it
	// Ports are the target ports of each Pod, in place of a pool's. Empty: with Dynamo, the Pod's container port
	// "http".
	Ports []int

	// KVEventsPort is that of a Pod's rank 0; rank r is at KVEventsPort + r. 0: none.
	KVEventsPort uint16
	// KVEventsGiven gives KVEventsPort precedence over the event channels that Dynamo's workers announce.
	KVEventsGiven bool
	KVReplayPort  uint16 // of the replay sockets, numbered like KVEventsPort; 0: none
	// DataParallelSize is how many ranks share the port of a Pod with one port. 0 means 1.
	DataParallelSize uint32
	// Family says which address of a Pod with several is used: v4_only, v6_only, v4_preferred (IPv4 if there is one);
	// auto or empty: the first.
	Family string
	// Dynamo means that the Pods are Dynamo's: Source follows their DynamoWorkerMetadata objects.
	Dynamo bool
	// QueryFrontend asks the frontend of a Dynamo Pod which workers it knows, as dynamo.QueryFrontend does; nil: kvepp
	// asks no frontend. It gives the instance ids of workers that write no DynamoWorkerMetadata because their discovery
	// is etcd or another.
	QueryFrontend func(ctx context.Context, address string) (dynamo.View, error)

	// RoleOf returns the role of a Pod with these labels, and whether it is an endpoint. nil: the labels of roles that
	// kvepp knows count, and each Pod is an endpoint. No flag sets it.
	RoleOf func(labels map[string]string) (pool.Role, bool)

	LeaderElection  bool          // only one of several replicas is active
	LeaseName       string        // of the election; empty: made of the pool's name, or of the selector
	HandOverTimeout time.Duration // how long a leader that ends waits for another
	MetricsAuth     bool          // the API server says who may read metrics
	ReplicaService  string        // names the Service of kvepp's replicas; empty: none
}

// AddFlags declares the flags. Where GAIE's endpoint picker has the same flag, the name and the default are its.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.PoolName, "pool-name", "",
		"in Kubernetes, the `NAME` of the InferencePool whose Pods are the endpoints; kvepp follows its changes. May "+
			"be combined with --endpoints")
	fs.StringVar(&c.Namespace, "pool-namespace", "",
		"the `NAMESPACE` of the pool and its Pods. Empty: $NAMESPACE, else kvepp's own, or the kubeconfig's")
	flags.Choice(fs, &c.PoolGroup, "pool-group", PoolGroup,
		"the pool's API `GROUP`: "+PoolGroup+" (v1) or "+LegacyPoolGroup+" (v1alpha2)", PoolGroup, LegacyPoolGroup)
	fs.StringVar(&c.EndpointSelector, "endpoint-selector", "",
		"instead of a pool: the label selector of the Pods that are the endpoints, `KEY=VALUE,...`")
	fs.IntSliceVar(&c.Ports, "endpoint-target-ports", nil,
		"with --endpoint-selector: the `PORTS` of each Pod, separated by commas, at most 8; several ports are "+
			"data-parallel ranks. Empty: each Pod's container port named \"http\", as Dynamo's frontendSidecar has it")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"kubeconfig `FILE` for the API server. Empty: the cluster that kvepp runs in")
	fs.Uint16Var(&c.KVEventsPort, "kv-events-port", 5557,
		"the `PORT` at which rank 0 of each Pod publishes KV events; rank r publishes at PORT + r. 0: none. "+
			"Precedence: the Pod's annotation kvepp/kv-events-port, this flag if it is given, the event channels "+
			"that Dynamo's workers announce, the default")
	fs.Uint16Var(&c.KVReplayPort, "kv-replay-port", 0,
		"the `PORT` of the KV event replay socket of rank 0; rank r has PORT + r. 0: none. A Pod's annotation "+
			"kvepp/kv-replay-port has precedence")
	fs.Uint32Var(&c.DataParallelSize, "data-parallel-size", 1,
		"how many data-parallel `RANKS` share the target port of a Pod with one port; a header selects the rank "+
			"(x-data-parallel-rank, x-dynamo-dp-rank). A Pod's annotation kvepp/data-parallel-size, or a Dynamo "+
			"worker's model card, has precedence")
	flags.Inherit(fs, "pool-name", "DYN_EPP_INFERENCE_POOL_NAME", "pool-namespace", "POD_NAMESPACE",
		"kv-events-port", "DYN_EPP_KV_EVENT_PORT", "kv-replay-port", "DYN_EPP_KV_EVENT_REPLAY_PORT")
	fs.BoolVar(&c.LeaderElection, "ha-enable-leader-election", false,
		"only one of several replicas is ready: the holder of a Lease. All replicas follow the workers and their KV "+
			"events")
	fs.StringVar(&c.LeaseName, "ha-lease-name", "",
		"the Lease's `NAME`, in --pool-namespace. Empty: kvepp-POOL, or with a selector kvepp- and the selector's hash")
	fs.DurationVar(&c.HandOverTimeout, "ha-handover-timeout", time.Minute,
		"after SIGTERM, how long the leader stays ready until another replica leads. Then proxies have --drain-delay "+
			"to notice the change; --drain-timeout begins after that")
	fs.BoolVar(&c.MetricsAuth, "metrics-endpoint-auth", true,
		"in Kubernetes, a request for metrics must carry a cluster token that is authorized to get the path /metrics "+
			"(TokenReview, SubjectAccessReview). Without effect with --metrics-token-file")
}

// Used reports whether endpoints come from Kubernetes.
func (c *Config) Used() bool { return c.PoolName != "" || c.EndpointSelector != "" }

// Validate returns an error for the first invalid setting.
func (c *Config) Validate() (err error) {
	switch {
	case c.PoolName != "" && c.EndpointSelector != "":
		return errors.New(
			"--pool-name and --endpoint-selector: the pool has a selector of its own; leave out one of the two")
	case c.PoolName != "" && len(c.Ports) > 0:
		return errors.New("--endpoint-target-ports: the pool says its Pods' ports; leave it out")
	case len(c.Ports) > 0 && c.EndpointSelector == "":
		return errors.New("--endpoint-target-ports needs to know which Pods to follow: give --endpoint-selector")
	case c.DataParallelSize < 1 || c.DataParallelSize > 1024:
		return fmt.Errorf("--data-parallel-size %d: must be from 1 to 1024, for example 2", c.DataParallelSize)
	case c.LeaderElection && !c.Used():
		return errors.New(
			"--ha-enable-leader-election: the Lease is Kubernetes'; give --pool-name or --endpoint-selector")
	}
	if err := CheckPorts(c.Ports); err != nil {
		return fmt.Errorf("--endpoint-target-ports: %w", err)
	}
	if c.EndpointSelector != "" {
		if c.Selector, err = ParseSelector(c.EndpointSelector); err != nil {
			return fmt.Errorf("--endpoint-selector %q: %w", c.EndpointSelector, err)
		}
	}
	return flags.NotNegative("ha-handover-timeout", c.HandOverTimeout)
}

// lease returns the name of the Lease. Without a pool it has a hash of the selector.
func (c *Config) lease() string {
	if c.LeaseName != "" || c.PoolName != "" {
		return cmp.Or(c.LeaseName, "kvepp-"+c.PoolName)
	}
	h := fnv.New32a()
	h.Write([]byte(c.EndpointSelector))
	return fmt.Sprintf("kvepp-%08x", h.Sum32())
}
