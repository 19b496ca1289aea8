// Package kube keeps kvepp's endpoints in line with Kubernetes: the Pods of an InferencePool, or of a label selector.
//
// It owns the watches of the API server, with one file for each kind of object. It decides when a Pod is an endpoint,
// with which addresses, data-parallel ranks and KV events. If a kind is absent or forbidden, it logs that once, counts
// it, tries again, and keeps the last known state. It also holds the lease of a replica that must be the only active
// one, and asks the API server who may read metrics. It writes no other object than that lease, never talks to an
// engine, and never routes.
//
// Concurrency: everything is safe from any goroutine. Watches write to a Source under its lock. One goroutine, Run's,
// reports the changes.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"kvepp/internal/useragent"
	"kvepp/pool"
	"kvepp/pool/dynamo"
)

// Client talks to one API server. Create it with Connect.
type Client struct {
	core    kubernetes.Interface
	dynamic dynamic.Interface
	reviews kubernetes.Interface // with its own request limit: any client can cause a review
	// Namespace is the one that the process runs in, or that of the kubeconfig's context; "default" if neither gives
	// one.
	Namespace string
}

// serviceAccountNamespace is the file in which Kubernetes gives a container its namespace.
const serviceAccountNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// Connect returns a client of the cluster that a kubeconfig file names, or if the name is "", of the cluster that the
// process runs in. It does not talk to the API server yet. client-go's own log goes to log only at debug level: kvepp
// logs each failure itself, once.
func Connect(kubeconfig string, log *slog.Logger) (*Client, error) {
	if !log.Enabled(context.Background(), slog.LevelDebug) {
		log = slog.New(slog.DiscardHandler)
	}
	klog.SetSlogLogger(log.With("from", "client-go"))

	c := &Client{Namespace: "default"}
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		if config, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("kube: not in a cluster (%w): give --kubeconfig FILE", err)
		}
		if text, err := os.ReadFile(serviceAccountNamespace); err == nil {
			c.Namespace = strings.TrimSpace(string(text))
		}
	} else {
		file := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}, nil)
		if config, err = file.ClientConfig(); err != nil {
			return nil, fmt.Errorf("kube: --kubeconfig %s: %w", kubeconfig, err)
		}
		if namespace, _, err := file.Namespace(); err == nil {
			c.Namespace = namespace
		}
	}
	config.UserAgent = useragent.Text()
	config.QPS, config.Burst = 50, 100
	config.Wrap(func(under http.RoundTripper) http.RoundTripper { return observedTransport{under} })
	if c.dynamic, err = dynamic.NewForConfig(config); err != nil {
		return nil, fmt.Errorf("kube: %w", err)
	}
	quick := rest.CopyConfig(config)
	quick.AcceptContentTypes, quick.ContentType = "application/vnd.kubernetes.protobuf,application/json",
		"application/vnd.kubernetes.protobuf"
	if c.core, err = kubernetes.NewForConfig(quick); err != nil {
		return nil, fmt.Errorf("kube: %w", err)
	}
	few := rest.CopyConfig(quick)
	few.QPS, few.Burst = 5, 10
	if c.reviews, err = kubernetes.NewForConfig(few); err != nil {
		return nil, fmt.Errorf("kube: %w", err)
	}
	return c, nil
}

// State is the state of the cluster at one moment.
type State struct {
	// Endpoints are ordered by Pod, then by port. Their names are unique.
	Endpoints []pool.Endpoint
	// Instances are the Dynamo instances behind the endpoints.
	Instances []dynamo.Instance
}

// Stats are counters and conditions for metrics.
type Stats struct {
	// Lists counts full lists of Pods: one at the start, and one for each change of the selector and each watch that
	// could not resume. Recomputed counts changes of the pool for which all Pods were computed again.
	Lists, Recomputed uint64
	// Changes counts changes of one Pod, or of its Dynamo objects, that changed its endpoints.
	Changes uint64
	// Updates counts how often Run called apply. Changes that come together are applied together.
	Updates uint64
}

// Source follows one pool. Create it with NewSource.
type Source struct {
	client *Client
	config Config
	log    *slog.Logger

	pools, podKind, workerKind *Kind
	synced                     chan struct{} // closed after the first call of apply
	changed                    changes

	lists, recomputed, changes, updates atomic.Uint64

	mu        sync.Mutex
	found     bool                 // the pool was listed, or Config names none
	spec      *spec                // of the pool; nil while there is none
	listed    bool                 // the Pods were listed since the pool exists
	following labels.Selector      // the selector of the Pods' watch; nil while there is none
	stopPods  func()               // ends that watch
	pods      map[string]*knownPod // Pods that may become endpoints, by name
	order     []string             // their names, sorted
	workers   metadata
	frontends frontends
}

// spec is the part of an InferencePool that defines its endpoints.
type spec struct {
	selector labels.Selector
	ports    []int // empty: each Pod's own named "http"
}

// knownPod is a Pod and its endpoints.
type knownPod struct {
	pod       *corev1.Pod // stripped
	endpoints []pool.Endpoint
	instances []dynamo.Instance
	problem   string // the last one logged
	response  frontendResponse
}

// NewSource returns a source that follows nothing yet.
func NewSource(c *Client, config Config, log *slog.Logger) *Source {
	return &Source{client: c, config: config, log: log,
		frontends: newFrontends(), pools: newKind("inferencepools", log), podKind: newKind("pods", log),
		workerKind: newKind("dynamoworkermetadatas", log),
		synced:     make(chan struct{}), changed: newChanges(), pods: map[string]*knownPod{}}
}

// Synced returns a channel that is closed after Run has applied the first state of the pool and its Pods. The pool must
// exist, but needs no Pods.
func (s *Source) Synced() <-chan struct{} { return s.synced }

// Kinds returns the kinds of objects that are followed.
func (s *Source) Kinds() []*Kind {
	kinds := []*Kind{s.podKind}
	if s.config.PoolName != "" {
		kinds = append(kinds, s.pools)
	}
	if s.config.Dynamo {
		kinds = append(kinds, s.workerKind)
	}
	return kinds
}

// Stats returns the counters.
func (s *Source) Stats() Stats {
	return Stats{
		Lists:      s.lists.Load(),
		Recomputed: s.recomputed.Load(),
		Changes:    s.changes.Load(),
		Updates:    s.updates.Load(),
	}
}

const (
	// gatherDelay is how long Run waits for more changes after the first, so that it applies a Deployment's many Pods
	// together.
	gatherDelay = 5 * time.Millisecond
	// applyInterval is the least time between two calls of apply: each makes a new snapshot of the pool.
	applyInterval = 50 * time.Millisecond
	// metadataTimeout is how long the first call of apply waits for the objects of Dynamo's workers.
	metadataTimeout = 2 * time.Second
)

// Run follows the cluster until ctx ends, and calls apply with each new state, in order. It continues if the API
// server fails.
func (s *Source) Run(ctx context.Context, apply func(State)) {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if s.config.PoolName == "" {
		s.mu.Lock()
		s.setSpec(ctx, &running, &spec{selector: s.config.Selector, ports: s.config.Ports})
		s.mu.Unlock()
	} else {
		running.Go(func() {
			s.followPool(ctx, func(now *spec) {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.setSpec(ctx, &running, now)
			})
		})
	}
	if s.config.Dynamo {
		running.Go(func() { s.followWorkers(ctx) })
		select { // without this wait, the first endpoints may have other instance ids for a moment
		case <-s.workerKind.tried:
		case <-time.After(metadataTimeout):
		case <-ctx.Done():
		}
	}
	if s.asksFrontends() {
		running.Go(func() { s.askFrontends(ctx) })
	}
	s.applyChanges(ctx, apply)
}

// applyChanges calls apply with new states until ctx ends.
func (s *Source) applyChanges(ctx context.Context, apply func(State)) {
	applied := false
	for s.changed.await(ctx) {
		state, ready := s.state()
		if state == nil {
			continue
		}
		apply(*state)
		s.updates.Add(1)
		if ready && !applied {
			applied = true
			close(s.synced)
		}
		if !pause(ctx, applyInterval-gatherDelay) {
			return
		}
	}
}

// state returns the state to apply, or nil if it is not known yet. ready means that the pool and its Pods are known.
func (s *Source) state() (state *State, ready bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.found || s.spec != nil && !s.listed {
		return nil, false
	}
	state, ready = &State{}, s.spec != nil
	for _, name := range s.order {
		state.Endpoints = append(state.Endpoints, s.pods[name].endpoints...)
		state.Instances = append(state.Instances, s.pods[name].instances...)
		ready = ready && !(s.asksFrontends() && s.pods[name].waits())
	}
	return state, ready
}

// wake makes applyChanges call apply.
func (s *Source) wake() { s.changed.note() }

// setSpec stores the pool's spec, nil if the pool does not exist. The caller holds s.mu.
func (s *Source) setSpec(ctx context.Context, running *sync.WaitGroup, now *spec) {
	was := s.spec
	s.found, s.spec = true, now
	defer s.wake()
	if now == nil {
		if s.stopPods != nil {
			s.stopPods()
		}
		s.stopPods, s.following, s.listed = nil, nil, false
		s.pods, s.order = map[string]*knownPod{}, nil
		if was != nil {
			s.log.Warn("the InferencePool was deleted: there are no endpoints until it exists again",
				"pool", s.config.PoolName, "namespace", s.config.Namespace)
		}
		return
	}
	if s.following == nil || s.following.String() != now.selector.String() {
		if s.stopPods != nil {
			s.stopPods()
		}
		follow, stop := context.WithCancel(ctx)
		s.following, s.stopPods = now.selector, stop
		running.Go(func() { s.followPods(follow, now.selector) })
		return // the earlier Pods stay until the Pods of the new selector are listed
	}
	if was == nil || !slices.Equal(was.ports, now.ports) {
		s.recomputed.Add(1)
		for _, k := range s.pods {
			s.compute(k)
		}
	}
}

// compute recomputes a Pod's endpoints. The caller holds s.mu.
func (s *Source) compute(k *knownPod) {
	before := k.problem
	if k.endpoints, k.instances, k.problem = s.endpointsOf(k); k.problem != "" && k.problem != before {
		s.log.Warn("a Pod has a problem", "pod", k.pod.Name, "what", k.problem)
	}
}

// put stores a Pod, or removes it if p is nil. The caller holds s.mu.
func (s *Source) put(name string, p *corev1.Pod) {
	at, there := slices.BinarySearch(s.order, name)
	if p == nil {
		if !there {
			return
		}
		if len(s.pods[name].endpoints) > 0 {
			s.changes.Add(1)
			s.wake()
		}
		delete(s.pods, name)
		s.order = slices.Delete(s.order, at, at+1)
		return
	}
	k := s.pods[name]
	if k == nil {
		k = &knownPod{}
		s.pods[name] = k
		s.order = slices.Insert(s.order, at, name)
	}
	// a new Pod with the same name: the watch missed the deletion of the earlier one
	if k.pod != nil && k.pod.UID != p.UID {
		k.response = frontendResponse{}
	}
	k.pod = p
	s.recompute(k)
}

// recompute recomputes a Pod's endpoints, and wakes Run if they changed. The caller holds s.mu.
func (s *Source) recompute(k *knownPod) {
	before, instances := k.endpoints, k.instances
	s.compute(k)
	if !reflect.DeepEqual(before, k.endpoints) || !reflect.DeepEqual(instances, k.instances) {
		s.changes.Add(1)
		s.wake()
	}
}

// changes holds one token if there were changes that are not applied.
type changes chan struct{}

func newChanges() changes { return make(changes, 1) }

// note notes a change. It does not wait.
func (c changes) note() {
	select {
	case c <- struct{}{}:
	default:
	}
}

// await waits for a change and then for gatherDelay, so that changes that come together are applied together. It
// returns false if ctx ends first.
func (c changes) await(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c:
		return pause(ctx, gatherDelay)
	}
}

// pause waits for d. It returns false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// ParseSelector parses a label selector in kubectl's syntax, such as "app=vllm,env in (a,b)". It refuses an empty one,
// which would select every Pod.
func ParseSelector(text string) (labels.Selector, error) {
	s, err := labels.Parse(text)
	if err != nil {
		return nil, err
	}
	if s.Empty() {
		return nil, errors.New("it selects every Pod")
	}
	return s, nil
}
