package kube

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	zmq "github.com/pebbe/zmq4"

	"kvepp/kvblock/kvblocktest"
	"kvepp/pool/kube"
	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/stack"
)

// publisher is the socket on which a rank of an engine publishes its KV events.
type publisher struct {
	t      *testing.T
	socket *zmq.Socket
	rank   int
	seq    uint64
}

// publish opens the socket of a rank at one of the engine's ports.
func (e *engine) publish(t *testing.T, port, rank int) *publisher {
	t.Helper()
	socket, err := zmq.NewSocket(zmq.XPUB) // a PUB that also receives subscriptions
	must(t, err)
	t.Cleanup(func() { socket.Close() })
	must(t, socket.SetLinger(0))
	must(t, socket.SetIpv6(true))
	must(t, socket.Bind("tcp://"+net.JoinHostPort(e.host(), strconv.Itoa(port))))
	return &publisher{t: t, socket: socket, rank: rank}
}

// awaitSubscription waits until kvepp subscribes, or with false, until it ends its subscription.
func (p *publisher) awaitSubscription(wanted bool) {
	p.t.Helper()
	must(p.t, p.socket.SetRcvtimeo(2*60e9))
	frame, err := p.socket.RecvBytes(0)
	if err != nil || len(frame) == 0 || (frame[0] == 1) != wanted {
		p.t.Fatalf("waiting for a subscription (%v): got %x, %v", wanted, frame, err)
	}
}

// publishStore publishes a store event for a prompt in vLLM's encoding.
func (p *publisher) publishStore(tokens []int) {
	p.t.Helper()
	var names []uint64
	for i := blockSize; i <= len(tokens); i += blockSize {
		names = append(names, uint64(tokens[0])<<32|uint64(tokens[1])<<16|uint64(i))
	}
	event := []any{"BlockStored", names, nil, tokens, blockSize, nil, "GPU"}
	_, err := p.socket.SendMessage(
		"",
		binary.BigEndian.AppendUint64(nil, p.seq),
		kvblocktest.Append(nil, []any{1.5, []any{event}, p.rank}),
	)
	must(p.t, err)
	p.seq++
}

// awaitCached waits until requests with a prompt go to a worker, with this many predicted cached tokens.
func awaitCached(t *testing.T, url string, tokens []int, worker string, cached int) {
	t.Helper()
	eventually(t, func() error {
		for range 4 { // a random choice would differ
			if a := complete(t, url, tokens); a.Status != http.StatusOK || a.Worker != worker ||
				a.KveppCached != cached {
				return fmt.Errorf("status %d, worker %s, %d tokens cached", a.Status, a.Worker, a.KveppCached)
			}
		}
		return nil
	})
}

// TestEvents: kvepp subscribes to KV events at the port of a flag or a pod's annotation, while the pod is ready.
func TestEvents(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "events"
	port := freePorts(t, 3)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	b.pod.Annotations = map[string]string{kube.EventsPortAnnotation: fmt.Sprint(port + 2)}
	b.writePod(t)
	ofA, ofB := a.publish(t, port+1, 0), b.publish(t, port+2, 0)
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--kv-events-port",
		fmt.Sprint(port+1),
	)
	k.awaitReady(t)
	url := envoy(t, k)
	ofA.awaitSubscription(true)
	ofB.awaitSubscription(true)
	held := map[string][]int{"a": prompt(8), "b": prompt(8)}
	ofA.publishStore(held["a"])
	ofB.publishStore(held["b"])
	awaitCached(t, url, held["a"], "a-rank-0/0", 8*blockSize)
	awaitCached(t, url, held["b"], "b-rank-0/0", 8*blockSize)

	b.pod.NotReady = true
	b.writePod(t)
	ofB.awaitSubscription(false)
	b.pod.NotReady = false
	b.writePod(t)
	ofB.awaitSubscription(true)
	k.awaitWorkers(t, 2)
	if x := complete(t, url, held["b"]); x.KveppCached != 0 {
		t.Errorf("kvepp predicts %d cached tokens of an engine that was not ready", x.KveppCached)
	}
	ofB.publishStore(held["b"])
	awaitCached(t, url, held["b"], "b-rank-0/0", 8*blockSize)
	awaitCached(t, url, held["a"], "a-rank-0/0", 8*blockSize)
}

// TestCordon: a pod with the annotation gets no new requests, and its running request ends normally. When the
// annotation is removed, kvepp still knows its blocks.
func TestCordon(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "cordon"
	port := freePorts(t, 2)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	ofA := a.publish(t, port+1, 0)
	b.publish(t, port+1, 0)
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--kv-events-port",
		fmt.Sprint(port+1),
	)
	k.awaitReady(t)
	url := envoy(t, k)
	ofA.awaitSubscription(true)
	held := prompt(8)
	ofA.publishStore(held)
	awaitCached(t, url, held, "a-rank-0/0", 8*blockSize)

	release := a.stall()
	running := make(chan *stack.Response, 1)
	go func() {
		x, err := post(ctx, url, held)
		if err != nil {
			t.Error(err)
		}
		running <- x
	}()
	a.awaitStalled(t)
	annotate := func(value string) {
		a.pod.Annotations = map[string]string{kube.CordonAnnotation: value}
		a.writePod(t)
	}
	annotate("true")
	k.awaitMetric(t, "kvepp_cordoned_workers", 1)
	k.awaitMetric(t, `kvepp_worker_cordoned{dp_rank="0",worker="a-rank-0"}`, 1)
	k.awaitLog(
		t,
		`msg="endpoint cordoned: it gets no new requests" endpoint=a-rank-0 operator=none pool="Pod annotation"`,
	)
	for range 8 {
		if x := complete(t, url, held); x.Status != http.StatusOK || x.Worker != "b-rank-0/0" {
			t.Errorf("status %d, worker %s", x.Status, x.Worker)
		}
	}
	release()
	if x := <-running; x == nil || x.Status != http.StatusOK || x.Worker != "a-rank-0/0" {
		t.Errorf("the request that was running on the cordoned pod: %+v", x)
	}

	annotate("yes")
	k.awaitLog(t, `annotation kvepp/cordon: \"yes\" must be true or false; kvepp ignores it`)
	k.awaitMetric(t, "kvepp_cordoned_workers", 0)
	k.awaitLog(t, `msg="endpoint uncordoned: it gets requests again" endpoint=a-rank-0`)
	awaitCached(t, url, held, "a-rank-0/0", 8*blockSize) // the engine has announced the prompt only once
	log, err := os.ReadFile(k.Log)
	must(t, err)
	if strings.Contains(string(log), "worker left") {
		t.Error("a worker left the pool")
	}
}

// TestRanks: each rank of a pod has its own port, or all share one.
func TestRanks(t *testing.T) {
	ctx, ns := t.Context(), "ranks"
	port := freePorts(t, 6)
	// found makes each rank of an engine store a prompt, and finds it there. It returns the second rank's prompt.
	found := func(t *testing.T, e *engine, first, second string) (k *kvepp, url string, ofSecond []int) {
		t.Helper()
		zero, one := e.publish(t, port+2, 0), e.publish(t, port+3, 1)
		k = startKvepp(
			t,
			cluster.Kubeconfig,
			"--pool-name",
			"engines",
			"--pool-namespace",
			ns,
			"--kv-events-port",
			fmt.Sprint(port+2),
		)
		k.awaitReady(t)
		k.awaitWorkers(t, 2)
		url = envoy(t, k)
		zero.awaitSubscription(true)
		one.awaitSubscription(true)
		ofFirst, ofSecond := prompt(8), prompt(8)
		zero.publishStore(ofFirst)
		one.publishStore(ofSecond)
		awaitCached(t, url, ofFirst, first, 8*blockSize)
		awaitCached(t, url, ofSecond, second, 8*blockSize)
		return k, url, ofSecond
	}

	t.Run("a port each", func(t *testing.T) {
		must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port, port+1)))
		e := newEngine(t, ns, "engine", "a", port)
		e.listen(t, port+1)
		k, url, second := found(t, e, "a-rank-0/0", "a-rank-1/1")
		if by, want := complete(t, url, second).Header.Get("x-served-by"),
			fmt.Sprintf("%s:%d", e.pod.IPs[0], port+1); by != want {
			t.Errorf("%s answered for rank 1, not %s", by, want)
		}

		e.pod.Annotations = map[string]string{"llm-d.ai/active-ports": fmt.Sprint(port + 1)}
		e.writePod(t)
		k.awaitWorkers(t, 1)
		awaitCached(t, url, second, "a-rank-1/1", 8*blockSize) // its subscription and blocks remain
		must(t, cluster.RemovePod(ctx, ns, "a"))
		k.awaitWorkers(t, 0)
	})

	t.Run("one port", func(t *testing.T) {
		must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
		e := &engine{
			port: port,
			pod: apiserver.Pod{
				Namespace:   ns,
				Name:        "b",
				IPs:         []string{newAddress()},
				Labels:      map[string]string{"app": "engine"},
				Annotations: map[string]string{kube.RanksAnnotation: "2"},
			},
		}
		e.listen(t, port)
		e.writePod(t)
		_, url, second := found(t, e, "b-rank-0/0", "b-rank-0/1")
		if rank := complete(t, url, second).Header.Get("x-rank"); rank != "1" {
			t.Errorf("the request for rank 1 came with rank %q", rank)
		}
	})
}

// TestSelector: without an InferencePool, flags select the pods.
func TestSelector(t *testing.T) {
	t.Parallel()
	ns := "selector"
	port := freePorts(t, 1)
	a := newEngine(t, ns, "engine", "a", port)
	b := newEngine(t, ns, "engine", "b", port)
	newEngine(t, ns, "other", "c", port)
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--endpoint-selector",
		"app=engine,!retired",
		"--endpoint-target-ports",
		fmt.Sprint(port),
		"--pool-namespace",
		ns,
		"--kv-events-port",
		"0",
	)
	k.awaitReady(t)
	url := envoy(t, k)
	awaitReached(t, url, a, b)
	b.pod.Labels["retired"] = "yes"
	b.writePod(t)
	awaitReached(t, url, a)
}

// legacyPools is a definition of InferencePool before v1, with only the fields that kvepp reads. Source: GAIE v1.0.0,
// apix/v1alpha2.
const legacyPools = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: inferencepools.inference.networking.x-k8s.io, annotations: {api-approved.kubernetes.io: ` +
	`"unapproved, for a test"}}
spec:
  group: inference.networking.x-k8s.io
  names: {kind: InferencePool, listKind: InferencePoolList, plural: inferencepools, singular: inferencepool}
  scope: Namespaced
  versions:
  - name: v1alpha2
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [selector, targetPortNumber]
            properties:
              selector: {type: object, additionalProperties: {type: string}}
              targetPortNumber: {type: integer, format: int32, minimum: 1, maximum: 65535}
`

// TestLegacyGroup: with --pool-group kvepp reads pools of the API group before v1.
func TestLegacyGroup(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "legacy"
	port := freePorts(t, 1)
	must(t, cluster.ApplyCRD(ctx, legacyPools))
	must(t, cluster.Apply(ctx, ns, fmt.Sprintf(`
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferencePool
metadata: {name: engines}
spec: {selector: {app: engine}, targetPortNumber: %d}
`, port)))
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "other", port))) // with the same name
	a := newEngine(t, ns, "engine", "a", port)
	newEngine(t, ns, "other", "b", port)
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--pool-group",
		kube.LegacyPoolGroup,
		"--kv-events-port",
		"0",
	)
	k.awaitReady(t)
	awaitReached(t, envoy(t, k), a)
}
