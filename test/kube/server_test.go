package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kvepp/test/harness/apiserver"
)

// TestServerAway: while the API server is stopped, kvepp keeps its state. Afterwards it gets the missed changes.
func TestServerAway(t *testing.T) {
	ctx, ns := t.Context(), "away"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	w := newCuttableProxy(t, cluster.Kubeconfig)
	k := startKvepp(t, w.kubeconfig, "--pool-name", "engines", "--pool-namespace", ns, "--kv-events-port", "0")
	k.awaitReady(t)
	url := envoy(t, k)
	awaitReached(t, url, a, b)

	cluster.Stop()
	k.awaitMetric(t, `kvepp_kube_followed{kind="pods"}`, 0)
	k.awaitMetric(t, `kvepp_kube_followed{kind="inferencepools"}`, 0)
	awaitReached(t, url, a, b)
	must(t, k.checkHealth(true))
	must(t, cluster.Serve(ctx))
	a.pod.NotReady = true
	a.writePod(t)
	c := newEngine(t, ns, "engine", "c", port)
	awaitReached(t, url, b, c)
	k.awaitMetric(t, `kvepp_kube_followed{kind="pods"}`, 1)

	// Pods change, leave and join while the API server is stopped, and its history is compacted.
	lists := func() float64 {
		m, err := k.metrics()
		must(t, err)
		return m[`kvepp_kube_updates_total{of="list"}`]
	}
	before := lists()
	w.silence()
	must(t, cluster.RemovePod(ctx, ns, "b"))
	a.pod.NotReady = false
	a.writePod(t)
	c.pod.Labels["app"] = "other"
	c.writePod(t)
	d := newEngine(t, ns, "engine", "d", port)
	cluster.Stop()
	must(t, cluster.Serve(ctx))
	awaitReached(t, url, a, d)
	if after := lists(); after <= before {
		t.Errorf(
			"%v lists of all pods before, %v after: a watch delivered the changes one by one, so nothing is proved",
			before,
			after,
		)
	}

	// The pool changes too.
	w.silence()
	must(t, cluster.Delete(ctx, ns, inferencePool("engines", "engine", port)))
	cluster.Stop()
	must(t, cluster.Serve(ctx))
	awaitUnavailable(t, url)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "other", port)))
	awaitReached(t, url, c)
}

// TestServerLate starts kvepp before the API server.
func TestServerLate(t *testing.T) {
	ctx, ns := t.Context(), "late"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a := newEngine(t, ns, "engine", "a", port)
	cluster.Stop()
	k := startKvepp(t, cluster.Kubeconfig, "--pool-name", "engines", "--pool-namespace", ns, "--kv-events-port", "0")
	k.awaitLog(t, "kvepp cannot read objects of this kind from the API server")
	must(t, k.checkHealth(false))
	k.awaitMetric(t, `kvepp_kube_followed{kind="inferencepools"}`, 0)
	must(t, cluster.Serve(ctx))
	k.awaitReady(t)
	awaitReached(t, envoy(t, k), a)
}

// TestServerHangs: an API server that accepts connections and never answers delays neither requests nor the shutdown.
// It delays a start only while it hangs.
func TestServerHangs(t *testing.T) {
	ctx, ns := t.Context(), "hangs"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a := newEngine(t, ns, "engine", "a", port)
	flags := []string{
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--kv-events-port",
		"0",
		"--ha-enable-leader-election",
		"--ha-handover-timeout",
		"3s",
	}
	k := startKvepp(t, cluster.Kubeconfig, flags...)
	k.awaitReady(t)
	url := envoy(t, k)
	awaitReached(t, url, a)

	cluster.Pause()
	defer cluster.Resume()
	awaitReached(t, url, a)
	late := startKvepp(t, cluster.Kubeconfig, flags...)
	eventually(t, func() error { return late.checkHealth(false) })
	k.awaitLog(t, "leads until it sees another leader")
	late.awaitLog(t, "kvepp cannot read objects of this kind from the API server")
	must(t, late.checkHealth(false))
	must(t, k.checkHealth(true))
	awaitReached(t, url, a)
	began := time.Now()
	k.Signal(syscall.SIGTERM)
	k.awaitEnd(t)
	t.Logf("ended after %v", time.Since(began))
	cluster.Resume()
	late.awaitReady(t) // the lease of the other kvepp was not released, and has expired
}

// TestKindAbsent starts kvepp in a cluster without the InferencePool CRD.
func TestKindAbsent(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	bare, err := apiserver.Start(ctx, apiserver.Config{Programs: os.Getenv("KVEPP_KUBE")})
	must(t, err)
	defer bare.Close()
	port := freePorts(t, 1)
	k := startKvepp(t, bare.Kubeconfig, "--pool-name", "engines", "--kv-events-port", "0")
	k.awaitLog(t, "the cluster has no objects of this kind")
	must(t, k.checkHealth(false))
	crd, err := apiserver.InferencePoolCRD()
	must(t, err)
	must(t, bare.ApplyCRD(ctx, crd))
	k.awaitLog(t, "the InferencePool does not exist yet")
	must(t, k.checkHealth(false))
	must(t, bare.Apply(ctx, "default", inferencePool("engines", "engine", port)))
	k.awaitReady(t) // a pool without pods may scale from zero
	k.awaitWorkers(t, 0)
	must(
		t,
		bare.RunPod(
			ctx,
			apiserver.Pod{Name: "a", Labels: map[string]string{"app": "engine"}, IPs: []string{newAddress()}},
		),
	)
	k.awaitWorkers(t, 1)
}

// TestLeader: one of two replicas is ready.
func TestLeader(t *testing.T) {
	ctx, ns := t.Context(), "leader"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a := newEngine(t, ns, "engine", "a", port)
	flags := []string{
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--kv-events-port",
		"0",
		"--ha-enable-leader-election",
	}
	lease := func() coordinationv1.LeaseSpec {
		lease, err := cluster.Client.CoordinationV1().Leases(
			ns,
		).Get(
			context.Background(),
			"kvepp-engines",
			metav1.GetOptions{},
		)
		must(t, err)
		return lease.Spec
	}
	holder := func() string {
		if by := lease().HolderIdentity; by != nil {
			return *by
		}
		return ""
	}
	first := startKvepp(t, cluster.Kubeconfig, flags...)
	first.awaitReady(t)
	first.awaitMetric(t, "kvepp_leader", 1)
	second := startKvepp(t, cluster.Kubeconfig, flags...)
	second.awaitLog(t, "another replica leads")
	second.awaitWorkers(t, 1) // the other replica follows the pool too
	must(t, second.checkHealth(false))
	url := envoy(t, first, second)
	awaitReached(t, url, a)

	// With SIGTERM: the lease is free at once, and running requests end normally.
	release := a.stall()
	running := make(chan error, 1)
	go func() {
		a, err := post(ctx, url, prompt(1))
		if err == nil && a.Status != http.StatusOK {
			err = fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		running <- err
	}()
	a.awaitStalled(t)
	was := holder()
	b := newEngine(t, ns, "engine", "b", port)
	a.pod.NotReady = true
	a.writePod(t)
	first.awaitWorkers(t, 1)
	second.awaitWorkers(t, 1)
	awaitReached(t, url, b)
	withoutFailures(t, url, func() {
		began := time.Now()
		first.Signal(syscall.SIGTERM)
		second.awaitReady(t)
		t.Logf("the other replica leads after %v", time.Since(began))
		if now := holder(); now == was || now == "" {
			t.Errorf("%q leads after %s got SIGTERM", now, was)
		}
		if err := first.checkHealth(true); err != nil {
			t.Errorf("no replica serves proxies that do not know the new leader yet: %v", err)
		}
		eventually(t, func() error { return first.checkHealth(false) })
		t.Logf("proxies see the old leader as not serving after %v", time.Since(began))
		eventually(t, func() error {
			c, err := net.Dial("tcp", first.extProc())
			if err != nil {
				return nil
			}
			return errors.Join(errors.New("the old leader still accepts connections"), c.Close())
		})
	})
	if first.Ended() {
		t.Error("the old leader did not wait for its request")
	}
	release()
	must(t, <-running)
	first.awaitEnd(t)
	a.pod.NotReady = false
	a.writePod(t)
	awaitReached(t, url, a, b)
	must(t, cluster.RemovePod(ctx, ns, "b"))

	// With SIGKILL: the lease expires.
	first.env = []string{"POD_NAME=first"}
	first.start(t)
	first.awaitLog(t, "another replica leads")
	must(t, first.checkHealth(false))
	was = holder()
	second.Kill()
	killed := time.Now()
	if now := holder(); now != was {
		t.Errorf("%s holds the lease of a replica that was killed", now)
	}
	first.awaitReady(t)
	t.Logf("the other replica leads %v after the leader was killed", time.Since(killed))
	if now := holder(); now == was {
		t.Errorf("kvepp is ready, and the lease is held by %s", now)
	}
	awaitReached(t, url, a)
	t.Logf("Envoy calls it after %v", time.Since(killed))

	// A container that restarts leads at once if it led before: its identity in the Lease is the same.
	transitions := *lease().LeaseTransitions
	first.Kill()
	killed = time.Now()
	first.start(t)
	first.awaitReady(t)
	t.Logf("the restarted replica leads again after %v", time.Since(killed))
	if now := lease(); *now.HolderIdentity != "first" || *now.LeaseTransitions != transitions {
		t.Errorf("%s leads after %d more handovers", *now.HolderIdentity, *now.LeaseTransitions-transitions)
	}
	awaitReached(t, url, a)

	// Without an API server no other replica can lead, so the leader continues. Afterwards one of them leads.
	second.start(t)
	second.awaitLog(t, "another replica leads")
	cluster.Stop()
	first.awaitLog(t, "leads until it sees another leader")
	must(t, first.checkHealth(true))
	must(t, second.checkHealth(false))
	awaitReached(t, url, a)
	must(t, cluster.Serve(ctx))
	first.awaitMetric(t, `kvepp_kube_followed{kind="leases"}`, 1)
	second.awaitMetric(t, `kvepp_kube_followed{kind="leases"}`, 1)
	eventually(t, func() error {
		one, two := first.checkHealth(true), second.checkHealth(true)
		if (one == nil) == (two == nil) {
			return fmt.Errorf("ready: %v, %v", one == nil, two == nil)
		}
		return nil
	})
	awaitReached(t, url, a)
}

// TestChurn changes 500 pods 50 times a second. No change makes kvepp list all pods or subscribe again.
func TestChurn(t *testing.T) {
	t.Parallel()
	const (
		pods    = 500
		seconds = 10
		rate    = 50
	)
	ctx, ns := t.Context(), "churn"
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", 8000)))
	k := startKvepp(t, cluster.Kubeconfig, "--pool-name", "engines", "--pool-namespace", ns, "--kv-events-port", "0")
	k.awaitReady(t)
	before, err := k.metrics()
	must(t, err)
	list := make([]apiserver.Pod, pods)
	for i := range list {
		list[i] = apiserver.Pod{
			Namespace: ns,
			Name:      fmt.Sprintf("engine-%d", i),
			Labels:    map[string]string{"app": "engine"},
			IPs:       []string{newAddress()},
		}
		must(t, cluster.RunPod(ctx, list[i]))
	}
	k.awaitWorkers(t, pods)
	settled, err := k.metrics()
	must(t, err)
	const changes = `kvepp_kube_updates_total{of="change"}`
	if got := settled[changes] - before[changes]; got != pods {
		t.Errorf("%v changes of new pods, want %d", got, pods)
	}

	ready := pods
	used := k.cpu(t)
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	for n := range seconds * rate {
		<-tick.C
		p := &list[n*7%pods]
		switch n % 5 {
		case 0, 1: // the pod returns at another address
			must(t, cluster.RemovePod(ctx, ns, p.Name))
			ready--
			if n%2 == 0 {
				p.IPs = []string{newAddress()}
				must(t, cluster.RunPod(ctx, *p))
				ready++
			}
		default:
			if p.NotReady {
				ready++
			} else {
				ready--
			}
			p.NotReady = !p.NotReady
			must(t, cluster.RunPod(ctx, *p))
		}
	}
	k.awaitWorkers(t, ready)
	t.Logf("%v of CPU time for %d changes in %d s, without subscriptions", k.cpu(t)-used, seconds*rate, seconds)
	after, err := k.metrics()
	must(t, err)
	for _, of := range []string{"list", "pool"} {
		if name := fmt.Sprintf("kvepp_kube_updates_total{of=%q}", of); after[name] != before[name] {
			t.Errorf("%s changed from %v to %v", name, before[name], after[name])
		}
	}
	for _, kind := range []string{"pods", "inferencepools"} {
		if name := fmt.Sprintf("kvepp_kube_errors_total{kind=%q}", kind); after[name] != 0 {
			t.Errorf("%s is %v", name, after[name])
		}
	}
	if a := complete(t, envoy(t, k), prompt(1)); a.Status != http.StatusServiceUnavailable || a.Worker == "" {
		t.Errorf("status %d, worker %q: want a chosen pod where nothing listens", a.Status, a.Worker)
	}
}
