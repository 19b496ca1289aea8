package kube

import (
	"fmt"
	"net/http"
	"testing"

	"kvepp/test/harness/apiserver"
)

// TestPool follows one InferencePool and its pods through all their changes.
func TestPool(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "pool"
	port := freePorts(t, 3)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a := newEngine(t, ns, "engine", "a", port)
	stranger := newEngine(t, ns, "other", "stranger", port)
	newEngine(t, "elsewhere", "engine", "a", port) // a pod of another namespace
	k := startKvepp(t, cluster.Kubeconfig, "--pool-name", "engines", "--pool-namespace", ns, "--kv-events-port", "0")
	k.awaitReady(t)
	k.awaitWorkers(t, 1)
	url := envoy(t, k)

	response := complete(t, url, prompt(1))
	if response.Status != http.StatusOK || response.Header.Get("x-served-by") != a.address() ||
		response.Worker != "a-rank-0/0" {
		t.Errorf(
			"status %d, %s answered, the worker is %q: %s",
			response.Status,
			response.Header.Get("x-served-by"),
			response.Worker,
			response.Body,
		)
	}

	b := newEngine(t, ns, "engine", "b", port)
	awaitReached(t, url, a, b)

	// Not ready, as when a readiness probe fails: no new requests; running ones continue.
	release := b.stall()
	a.pod.NotReady = true
	a.writePod(t)
	k.awaitWorkers(t, 1)
	running := make(chan error, 1)
	go func() {
		a, err := post(ctx, url, prompt(1))
		if err == nil && a.Status != http.StatusOK {
			err = fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		running <- err
	}()
	b.awaitStalled(t)
	b.pod.NotReady = true
	b.writePod(t)
	k.awaitWorkers(t, 0)
	awaitUnavailable(t, url)
	a.pod.NotReady = false
	a.writePod(t)
	awaitReached(t, url, a)
	release()
	if err := <-running; err != nil {
		t.Errorf("a request that was running when its pod became not ready: %v", err)
	}
	b.pod.NotReady = false
	b.writePod(t)
	awaitReached(t, url, a, b)

	// A pod that is being deleted is still Ready.
	must(t, cluster.TerminatePod(ctx, ns, "a"))
	awaitReached(t, url, b)
	must(t, cluster.RemovePod(ctx, ns, "a"))
	awaitReached(t, url, b)
	a.writePod(t) // a new pod with the same name, as in a StatefulSet
	awaitReached(t, url, a, b)

	// The label alone makes a pod a member of the pool.
	b.pod.Labels["app"] = "retired"
	b.writePod(t)
	awaitReached(t, url, a)
	b.pod.Labels["app"] = "engine"
	b.writePod(t)
	awaitReached(t, url, a, b)

	// The pool selects other pods, then another port.
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "other", port)))
	awaitReached(t, url, stranger)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	awaitReached(t, url, a, b)
	a.listen(t, port+1)
	b.listen(t, port+1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port+1)))
	a.port, b.port = port+1, port+1
	awaitReached(t, url, a, b)

	// When the pool is deleted, no endpoint is left and kvepp keeps running. When it is created again, all return.
	must(t, cluster.Delete(ctx, ns, inferencePool("engines", "engine", port)))
	awaitUnavailable(t, url)
	k.awaitWorkers(t, 0)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port+1)))
	awaitReached(t, url, a, b)
}

// TestFamilies: a flag selects one of a pod's two addresses.
func TestFamilies(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "families"
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", 8000)))
	must(
		t,
		cluster.RunPod(
			ctx,
			apiserver.Pod{
				Namespace: ns,
				Name:      "both",
				Labels:    map[string]string{"app": "engine"},
				IPs:       []string{"127.0.0.5", "fd00::5"},
			},
		),
	)
	must(
		t,
		cluster.RunPod(
			ctx,
			apiserver.Pod{
				Namespace: ns,
				Name:      "four",
				Labels:    map[string]string{"app": "engine"},
				IPs:       []string{"127.0.0.6"},
			},
		),
	)
	for family, want := range map[string]struct {
		workers int
		address string
	}{"auto": {2, "127.0.0.5:8000"}, "v4_only": {2, "127.0.0.5:8000"}, "v6_only": {1, "[fd00::5]:8000"}} {
		k := startKvepp(
			t,
			cluster.Kubeconfig,
			"--pool-name",
			"engines",
			"--pool-namespace",
			ns,
			"--dns-lookup-family",
			family,
		)
		k.awaitReady(t)
		k.awaitWorkers(t, want.workers)
		k.awaitLog(t, "address="+want.address)
	}
}
