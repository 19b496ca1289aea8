package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	corefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kvepp/kvblock"
	"kvepp/pool/dynamo"
)

// cluster is a fake API server. Its watches send only changes after their start, and miss changes between a list and
// the watch, so tests wait until the watch has started.
type cluster struct {
	t       testing.TB
	core    *corefake.Clientset
	dynamic *dynamicfake.FakeDynamicClient
	client  *Client

	mu      sync.Mutex
	watches map[string]int    // number started, by resource
	refuse  map[string]error  // errors of lists and watches, by resource or group
	open    []watch.Interface // all that were started
}

func newCluster(t testing.TB) *cluster {
	c := &cluster{t: t, watches: map[string]int{}, refuse: map[string]error{}}
	c.core = corefake.NewClientset()
	kinds := map[schema.GroupVersionResource]string{
		poolResources[PoolGroup]: "InferencePoolList", poolResources[LegacyPoolGroup]: "InferencePoolList",
		workerResource: "DynamoWorkerMetadataList",
	}
	for _, group := range policyGroups {
		kinds[schema.GroupVersionResource{Group: group, Version: "v1alpha2",
			Resource: "inferenceobjectives"}] = "InferenceObjectiveList"
		kinds[schema.GroupVersionResource{Group: group, Version: "v1alpha2",
			Resource: "inferencemodelrewrites"}] = "InferenceModelRewriteList"
	}
	c.dynamic = dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds)
	c.client = &Client{core: c.core, reviews: c.core, dynamic: c.dynamic, Namespace: "ns"}
	for _, at := range []struct {
		fake    *clienttesting.Fake
		tracker clienttesting.ObjectTracker
	}{{&c.core.Fake, c.core.Tracker()}, {&c.dynamic.Fake, c.dynamic.Tracker()}} {
		at.fake.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			err := c.refused(a.GetResource())
			return err != nil, nil, err
		})
		at.fake.PrependWatchReactor("*", func(a clienttesting.Action) (bool, watch.Interface, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			resource := a.GetResource()
			if err := c.refused(resource); err != nil {
				return true, nil, err
			}
			w, err := at.tracker.Watch(resource, a.GetNamespace())
			if err == nil {
				c.watches[resource.Resource]++
				c.open = append(c.open, w)
			}
			return true, w, err
		})
	}
	return c
}

// refused returns the error that lists and watches of a resource get. The caller holds mu.
func (c *cluster) refused(resource schema.GroupVersionResource) error {
	return errors.Join(c.refuse[resource.Resource], c.refuse[resource.Group])
}

// watched returns how many watches of a resource have started.
func (c *cluster) watched(resource string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.watches[resource]
}

// failWith makes lists and watches of a resource or a group fail with err from now on; nil makes them succeed. Running
// watches end.
func (c *cluster) failWith(of string, err error) {
	c.mu.Lock()
	c.refuse[of] = err
	open := c.open
	c.open = nil
	c.mu.Unlock()
	for _, w := range open {
		w.Stop()
	}
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) put(p *corev1.Pod) {
	c.t.Helper()
	api := c.core.CoreV1().Pods("ns")
	_, err := api.Update(context.Background(), p, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = api.Create(context.Background(), p, metav1.CreateOptions{})
	}
	c.must(err)
}

func (c *cluster) remove(name string) {
	c.t.Helper()
	c.must(c.core.CoreV1().Pods("ns").Delete(context.Background(), name, metav1.DeleteOptions{}))
}

// pool puts an InferencePool named p.
func (c *cluster) pool(app string, ports ...int) {
	c.t.Helper()
	c.object(poolResources[PoolGroup], poolOf(app, ports...))
}

func poolOf(app string, ports ...int) *unstructured.Unstructured {
	var targets []any
	for _, p := range ports {
		targets = append(targets, map[string]any{"number": int64(p)})
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
		"metadata": map[string]any{"name": "p", "namespace": "ns"},
		"spec": map[string]any{
			"selector":    map[string]any{"matchLabels": map[string]any{"app": app}},
			"targetPorts": targets,
		},
	}}
}

func (c *cluster) object(resource schema.GroupVersionResource, u *unstructured.Unstructured) {
	c.t.Helper()
	api := c.dynamic.Resource(resource).Namespace("ns")
	_, err := api.Update(context.Background(), u, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = api.Create(context.Background(), u, metav1.CreateOptions{})
	}
	c.must(err)
}

// running is a Source whose Run is active.
type running struct {
	*Source
	t    testing.TB
	mu   sync.Mutex
	last State
}

func run(t testing.TB, c *cluster, config Config) *running {
	config.Namespace = "ns"
	r := &running{Source: NewSource(c.client, config, quiet), t: t}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx, func(s State) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.last = s
		})
	}()
	t.Cleanup(func() { stop(); <-done })
	return r
}

// addresses returns the addresses of the latest state.
func (r *running) addresses() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, e := range r.last.Endpoints {
		all = append(all, e.Address)
	}
	return strings.Join(all, " ")
}

func (r *running) want(addresses string) {
	r.t.Helper()
	eventually(r.t, "endpoints "+addresses, func() bool { return r.addresses() == addresses })
}

func (r *running) synced() bool {
	select {
	case <-r.Synced():
		return true
	default:
		return false
	}
}

// eventually waits until holds returns true. In a synctest bubble, time passes when all goroutines wait.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Minute)
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 5 minutes: %s", what)
		}
		<-time.After(time.Millisecond)
	}
}

func TestFollowsAPool(t *testing.T) { synctest.Test(t, testFollowsAPool) }

func testFollowsAPool(t *testing.T) {
	c := newCluster(t)
	c.put(readyPod("a", "10.0.0.1"))
	stranger := readyPod("x", "10.0.0.9")
	stranger.Labels["app"] = "other"
	c.put(stranger)
	r := run(t, c, Config{PoolName: "p"})
	eventually(t, "the pool to be watched", func() bool { return c.watched("inferencepools") == 1 })
	r.want("")
	if r.synced() {
		t.Error("synced without a pool")
	}
	c.pool("vllm", 8000)
	r.want("10.0.0.1:8000")
	eventually(t, "ready", r.synced)

	// Pods are created, become ready, and are deleted.
	eventually(t, "Pods to be watched", func() bool { return c.watched("pods") == 1 })
	b := readyPod("b", "10.0.0.2")
	b.Status.Conditions = nil
	c.put(b)
	b = readyPod("b", "10.0.0.2")
	c.put(b)
	r.want("10.0.0.1:8000 10.0.0.2:8000")
	b.Status.Conditions[1].Status = corev1.ConditionFalse
	c.put(b)
	r.want("10.0.0.1:8000")
	b.Status.Conditions[1].Status = corev1.ConditionTrue
	c.put(b)
	r.want("10.0.0.1:8000 10.0.0.2:8000")
	b.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	c.put(b)
	r.want("10.0.0.1:8000")
	c.remove("b")

	// A Pod whose labels no longer match leaves, as with the API server's own selection.
	a := readyPod("a", "10.0.0.1")
	a.Labels["app"] = "other"
	c.put(a)
	r.want("")
	c.put(readyPod("a", "10.0.0.1"))
	r.want("10.0.0.1:8000")

	// Other ports recompute every Pod without a list.
	before := r.Stats()
	c.pool("vllm", 9000, 9001)
	r.want("10.0.0.1:9000 10.0.0.1:9001")
	if now := r.Stats(); now.Lists != before.Lists || now.Recomputed != before.Recomputed+1 {
		t.Errorf("other ports: %+v, before %+v", now, before)
	}
	// Another selector needs a list.
	c.pool("other", 9000)
	r.want("10.0.0.9:9000")
	if now := r.Stats(); now.Lists != before.Lists+1 {
		t.Errorf("another selector: %+v, before %+v", now, before)
	}
	// A change of the pool's status, which gateways write, changes no endpoints.
	<-time.After(time.Second) // all states are delivered
	before = r.Stats()
	other := poolOf("other", 9000)
	other.SetAnnotations(map[string]string{"seen": "by a gateway"})
	c.object(poolResources[PoolGroup], other)
	<-time.After(time.Second)
	if now := r.Stats(); now != before {
		t.Errorf("a pool with an unchanged spec: %+v, before %+v", now, before)
	}
	// Without the pool there are no endpoints. They return with the pool.
	c.must(
		c.dynamic.Resource(poolResources[PoolGroup]).Namespace("ns").Delete(t.Context(), "p", metav1.DeleteOptions{}),
	)
	r.want("")
	c.pool("vllm", 8000)
	r.want("10.0.0.1:8000")
	if !r.synced() {
		t.Error("not synced after the pool was deleted and created again")
	}
}

func TestFollowsALegacyPool(t *testing.T) { synctest.Test(t, testFollowsALegacyPool) }

func testFollowsALegacyPool(t *testing.T) {
	c := newCluster(t)
	c.put(readyPod("a", "10.0.0.1"))
	r := run(t, c, Config{PoolName: "p", PoolGroup: LegacyPoolGroup})
	eventually(t, "the pool to be watched", func() bool { return c.watched("inferencepools") == 1 })
	c.object(poolResources[LegacyPoolGroup], &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferencePool",
		"metadata": map[string]any{"name": "p", "namespace": "ns"},
		"spec":     map[string]any{"selector": map[string]any{"app": "vllm"}, "targetPortNumber": int64(8000)},
	}})
	r.want("10.0.0.1:8000")
	// An invalid spec changes nothing.
	c.object(poolResources[LegacyPoolGroup], &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferencePool",
		"metadata": map[string]any{"name": "p", "namespace": "ns"},
		"spec":     map[string]any{"selector": map[string]any{}, "targetPortNumber": int64(8001)},
	}})
	eventually(t, "Pods to be watched", func() bool { return c.watched("pods") == 1 })
	c.put(readyPod("b", "10.0.0.2"))
	r.want("10.0.0.1:8000 10.0.0.2:8000")
}

func TestWithoutAPool(t *testing.T) { synctest.Test(t, testWithoutAPool) }

func testWithoutAPool(t *testing.T) {
	c := newCluster(t)
	selector, err := ParseSelector("app=vllm")
	c.must(err)
	r := run(t, c, Config{Selector: selector, Ports: []int{8000}})
	eventually(t, "ready without Pods", r.synced)
	eventually(t, "Pods to be watched", func() bool { return c.watched("pods") == 1 })
	c.put(readyPod("a", "10.0.0.1"))
	r.want("10.0.0.1:8000")
}

// TestChurn: a change of one Pod recomputes only that Pod's endpoints, and lists no Pods again.
func TestChurn(t *testing.T) { synctest.Test(t, testChurn) }

func testChurn(t *testing.T) {
	c := newCluster(t)
	pods, step := 500, 7
	if testing.Short() {
		pods, step = 100, 2
	}
	address := func(i int) string { return fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250) }
	for i := range pods {
		c.put(readyPod(fmt.Sprintf("w-%03d", i), address(i)))
	}
	r := run(
		t,
		c,
		Config{Selector: labels.SelectorFromSet(labels.Set{"app": "vllm"}), Ports: []int{8000}, KVEventsPort: 5557},
	)
	applied := func() int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.last.Endpoints) }
	eventually(t, "all Pods", func() bool { return applied() == pods })
	eventually(t, "Pods to be watched", func() bool { return c.watched("pods") == 1 })
	before := r.Stats()
	for i := range 50 { // the changes of one second
		name := fmt.Sprintf("w-%03d", i*step)
		c.remove(name)
		c.put(readyPod(fmt.Sprintf("n-%03d", i), address(i*step)))
	}
	eventually(t, "the changes", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		n := 0
		for _, e := range r.last.Endpoints {
			if strings.HasPrefix(e.Name, "n-") {
				n++
			}
		}
		return n == 50 && len(r.last.Endpoints) == pods
	})
	now := r.Stats()
	if now.Lists != before.Lists || now.Recomputed != before.Recomputed || now.Changes != before.Changes+100 {
		t.Errorf("%+v, before %+v: want 100 changes and no list", now, before)
	}
	if n := now.Updates - before.Updates; n > 50 {
		t.Errorf("apply was called %d times for 100 simultaneous changes, want at most 50", n)
	}
	if !slices.IsSorted(r.order) {
		t.Error("the names of the Pods are not sorted")
	}
}

// TestUnwatched: failed reads are counted, the earlier state stays, and the source continues when reads succeed again.
func TestUnwatched(t *testing.T) { synctest.Test(t, testUnwatched) }

func testUnwatched(t *testing.T) {
	c := newCluster(t)
	c.put(readyPod("a", "10.0.0.1"))
	r := run(t, c, Config{Selector: labels.SelectorFromSet(labels.Set{"app": "vllm"}), Ports: []int{8000}})
	r.want("10.0.0.1:8000")
	pods := r.Kinds()[0]
	for _, refused := range []struct {
		err  error
		want Health
	}{
		{apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no")), Forbidden},
		{apierrors.NewServiceUnavailable("later"), Failing},
		{apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, ""), Absent},
	} {
		errorsBefore := pods.Errors()
		c.failWith("pods", refused.err)
		eventually(
			t,
			string(refused.want),
			func() bool { return pods.Health() == refused.want && pods.Errors() > errorsBefore },
		)
		if got := r.addresses(); got != "10.0.0.1:8000" {
			t.Errorf("%s: endpoints %q", refused.want, got)
		}
	}
	before := c.watched("pods")
	c.failWith("pods", nil)
	eventually(t, "followed again", func() bool { return pods.Health() == Followed && c.watched("pods") > before })
	c.put(readyPod("b", "10.0.0.2"))
	r.want("10.0.0.1:8000 10.0.0.2:8000")
}

// TestDynamoInstalledLater: while the kind of objects is missing, the source does not wait for it. It follows the kind
// as soon as it exists.
func TestDynamoInstalledLater(t *testing.T) { synctest.Test(t, testDynamoInstalledLater) }

func testDynamoInstalledLater(t *testing.T) {
	c := newCluster(t)
	c.put(readyPod("w", "10.0.0.7"))
	c.failWith(
		"dynamoworkermetadatas",
		apierrors.NewNotFound(schema.GroupResource{Resource: "dynamoworkermetadatas"}, ""),
	)
	r := run(
		t,
		c,
		Config{Selector: labels.SelectorFromSet(labels.Set{"app": "vllm"}), Ports: []int{8000}, Dynamo: true},
	)
	r.want("10.0.0.7:8000")
	instance := func() uint64 {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.last.Endpoints[0].InstanceID
	}
	c.object(workerResource, record(t, "w", "w", "uid-w", 42, "base", "aggregated", 1, false))
	c.failWith("dynamoworkermetadatas", nil)
	eventually(t, "the worker's own id", func() bool { return instance() == 42 })
	eventually(t, "the objects to be watched", func() bool { return c.watched("dynamoworkermetadatas") == 1 })
	c.object(workerResource, record(t, "w", "w", "uid-w", 43, "base", "aggregated", 1, false))
	eventually(t, "another id", func() bool { return instance() == 43 })
	c.must(c.dynamic.Resource(workerResource).Namespace("ns").Delete(t.Context(), "w", metav1.DeleteOptions{}))
	eventually(t, "the Pod's id", func() bool { return instance() != 43 })
}

// TestFrontendsKnow: workers whose discovery is etcd write no objects in Kubernetes. Their ids come from frontends.
func TestFrontendsKnow(t *testing.T) { synctest.Test(t, testFrontendsKnow) }

func testFrontendsKnow(t *testing.T) {
	c := newCluster(t)
	c.put(readyPod("a", "10.0.0.1"))
	c.put(readyPod("b", "10.0.0.2"))
	c.put(readyPod("n", "10.0.0.3")) // not known to a frontend
	var mu sync.Mutex
	view := dynamo.View{Models: map[string]dynamo.FrontendModel{"m": {BlockSize: 16, TotalKVBlocks: 99}}}
	r := run(t, c, Config{Selector: labels.SelectorFromSet(labels.Set{"app": "vllm"}), Ports: []int{8000}, Dynamo: true,
		QueryFrontend: func(_ context.Context, address string) (dynamo.View, error) {
			mu.Lock()
			defer mu.Unlock()
			if address != "10.0.0.2:8000" {
				return dynamo.View{}, errors.New("no frontend there")
			}
			return view, nil
		}})
	know := func(workers ...dynamo.FrontendWorker) {
		mu.Lock()
		defer mu.Unlock()
		view.Workers = workers
	}
	instances := func() (all []uint64) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, e := range r.last.Endpoints {
			all = append(all, e.InstanceID)
		}
		return all
	}
	want := func(ids ...uint64) {
		t.Helper()
		eventually(t, fmt.Sprint("instances ", ids), func() bool { return slices.Equal(instances(), ids) })
	}
	eventually(t, "Pods to be watched", func() bool { return c.watched("pods") == 1 })
	if r.synced() || len(instances()) != 0 {
		t.Error("synced before a frontend has identified the workers")
	}
	// Pod a, and the Pod of the frontend itself.
	know(
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 1 << 63, IP: "10.0.0.1"},
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 2, IP: "127.0.0.1"},
	)
	want(1<<63, 2)
	want(1<<63, 2, kvblock.InstanceID("n")) // the wait of Pod n has ended
	eventually(t, "ready", r.synced)
	r.mu.Lock()
	if e := r.last.Endpoints[0]; e.Namespace != "ns" || e.Model != "m" || e.BlockSize != 16 || e.TotalKVBlocks != 99 ||
		len(r.last.Instances) != 0 {
		t.Errorf("%+v, instances %+v", e, r.last.Instances)
	}
	r.mu.Unlock()
	know(
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 1 << 63, IP: "10.0.0.1"},
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 2, IP: "10.0.0.2"},
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 3, IP: "10.0.0.3"},
	)
	want(1<<63, 2, 3)
	// A worker that restarts in its Pod gets another id. Until the old lease ends, the frontend lists both, and the
	// source uses neither.
	a := readyPod("a", "10.0.0.1")
	a.Status.Conditions[1].Status = corev1.ConditionFalse
	c.put(a)
	want(2, 3)
	know(
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 1 << 63, IP: "10.0.0.1"},
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 7, IP: "10.0.0.1"},
		dynamo.FrontendWorker{
			Path:       "ns/backend/generate",
			InstanceID: 2,
			IP:         "10.0.0.2",
		},
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 3, IP: "10.0.0.3"},
	)
	a.Status.Conditions[1].Status = corev1.ConditionTrue
	c.put(a)
	eventually(t, "a to wait", func() bool {
		r.Source.mu.Lock()
		defer r.Source.mu.Unlock()
		return r.pods["a"].waits()
	})
	know(
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 7, IP: "10.0.0.1"},
		dynamo.FrontendWorker{
			Path:       "ns/backend/generate",
			InstanceID: 2,
			IP:         "10.0.0.2",
		},
		dynamo.FrontendWorker{Path: "ns/backend/generate", InstanceID: 3, IP: "10.0.0.3"},
	)
	want(7, 2, 3)
	// The worker's own object takes precedence. kvepp logs that the frontend disagrees.
	c.object(workerResource, record(t, "a", "a", "uid-a", 42, "ns", "aggregated", 1, false))
	want(42, 2, 3)
	r.Source.mu.Lock()
	defer r.Source.mu.Unlock()
	if problem := r.pods["a"].problem; !strings.Contains(
		problem,
		"knows its worker as 7, but DynamoWorkerMetadata has 42",
	) {
		t.Errorf("problem %q", problem)
	}
}

// TestFrontendsOfTheirOwnPodsAlone: if each frontend knows only the worker in its own Pod, the source asks all
// frontends before a Pod's waiting time is over.
func TestFrontendsOfTheirOwnPodsAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	synctest.Test(t, testFrontendsOfTheirOwnPodsAlone)
}

func testFrontendsOfTheirOwnPodsAlone(t *testing.T) {
	const pods = 300
	c := newCluster(t)
	for i := range pods {
		c.put(readyPod(fmt.Sprint("w", i), fmt.Sprintf("10.0.%d.%d", i/100, i%100)))
	}
	var asked atomic.Int64
	r := run(t, c, Config{Selector: labels.SelectorFromSet(labels.Set{"app": "vllm"}), Ports: []int{8000}, Dynamo: true,
		QueryFrontend: func(_ context.Context, address string) (dynamo.View, error) {
			asked.Add(1)
			var i, j uint64
			if _, err := fmt.Sscanf(address, "10.0.%d.%d:", &i, &j); err != nil {
				return dynamo.View{}, err
			}
			return dynamo.View{
				Workers: []dynamo.FrontendWorker{{Path: "ns/backend/generate", InstanceID: 1 + 100*i + j,
					IP: "127.0.0.1"}},
			}, nil
		}})
	eventually(t, "ready", r.synced)
	r.mu.Lock()
	defer r.mu.Unlock()
	known := 0
	for _, e := range r.last.Endpoints {
		if e.InstanceID <= pods {
			known++
		}
	}
	if known != pods || len(r.last.Endpoints) != pods {
		t.Errorf("of %d endpoints %d have their frontends' ids", len(r.last.Endpoints), known)
	}
	if asked.Load() > 2*pods {
		t.Errorf("%d queries", asked.Load())
	}
}

// TestAnotherPodOfTheName: a frontend's response about a Pod's worker does not count for a new Pod of the same name
// that was created while the watch was broken.
func TestAnotherPodOfTheName(t *testing.T) { synctest.Test(t, testAnotherPodOfTheName) }

func testAnotherPodOfTheName(t *testing.T) {
	c := newCluster(t)
	c.put(readyPod("a", "10.0.0.1"))
	r := run(t, c, Config{Selector: labels.SelectorFromSet(labels.Set{"app": "vllm"}), Ports: []int{8000}, Dynamo: true,
		QueryFrontend: func(context.Context, string) (dynamo.View, error) {
			return dynamo.View{
				Workers: []dynamo.FrontendWorker{{Path: "ns/backend/generate", InstanceID: 7, IP: "10.0.0.1"}},
			}, nil
		}})
	instance := func() uint64 {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.last.Endpoints[0].InstanceID
	}
	r.want("10.0.0.1:8000")
	if instance() != 7 {
		t.Fatalf("instance %d, want the frontend's", instance())
	}
	eventually(t, "Pods to be watched", func() bool { return c.watched("pods") == 1 })
	another := readyPod("a", "10.0.0.2")
	another.UID = "uid-another"
	c.put(another)
	r.want("") // it waits for a frontend that knows it
	r.want("10.0.0.2:8000")
	if instance() != kvblock.InstanceID("a") {
		t.Errorf("instance %d, want that of its name", instance())
	}
}

// TestElection: one replica leads. When it stops, the other one leads long before the lease would expire.
func TestElection(t *testing.T) { synctest.Test(t, testElection) }

func testElection(t *testing.T) {
	c := newCluster(t)
	var forbidden atomic.Bool // replica b may not update the lease
	c.core.PrependReactor("update", "leases", func(action clienttesting.Action) (bool, runtime.Object, error) {
		lease := action.(clienttesting.UpdateAction).GetObject().(*coordinationv1.Lease)
		if holder := lease.Spec.HolderIdentity; !forbidden.Load() || holder == nil || *holder != "b" {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "leases"}, "kvepp-p", errors.New("no"))
	})
	type replica struct {
		*Election
		leads atomic.Bool
		stop  func()
		done  chan struct{}
	}
	start := func(name string) *replica {
		r := &replica{done: make(chan struct{})}
		e, err := NewElection(c.client, "ns", "kvepp-p", name, func(now bool) { r.leads.Store(now) }, quiet)
		c.must(err)
		ctx, stop := context.WithCancel(context.Background())
		r.Election, r.stop = e, stop
		go func() {
			defer close(r.done)
			e.Run(ctx)
		}()
		t.Cleanup(func() { stop(); <-r.done })
		return r
	}
	a := start("a")
	eventually(t, "a leads", a.leads.Load)
	b := start("b")
	began := time.Now()
	a.stop()
	succeeded := make(chan bool)
	go func() { succeeded <- a.Succeeded(t.Context()) }() // while the lease is being released
	<-a.done
	if a.leads.Load() {
		t.Error("a still leads")
	}
	lease, err := c.core.CoordinationV1().Leases("ns").Get(t.Context(), "kvepp-p", metav1.GetOptions{})
	c.must(err)
	if holder := lease.Spec.HolderIdentity; holder != nil && *holder == "a" {
		t.Error("the lease is not released")
	}
	eventually(t, "b leads", b.leads.Load)
	if took := time.Since(began); took > leaseDuration {
		t.Errorf("b leads after %v", took)
	}
	if !<-succeeded {
		t.Error("a does not see that b leads")
	}
	// A leader that cannot renew the lease continues until another replica leads.
	forbidden.Store(true)
	<-time.After(2 * leaseDuration)
	synctest.Wait()
	if !b.leads.Load() {
		t.Error("b stopped leading although no other replica leads")
	}
	d := start("d")
	eventually(t, "d leads", d.leads.Load)
	eventually(t, "b does not lead any more", func() bool { return !b.leads.Load() })
}
