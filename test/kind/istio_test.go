package kind

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestIstio tests Istio's control plane: from a Gateway, an HTTPRoute and an InferencePool it configures Envoy. `make
// e2e-istio` builds istiod from Istio's module, not from a release.
func TestIstio(t *testing.T) {
	istiod := newNamespace(t, "kvepp-e2e-istiod")
	istiod.apply(read(t, "testdata/istiod.yaml"), "{istiod}", istiod.name)
	t.Cleanup(func() { istiod.kubectl("delete", "clusterrolebinding", istiod.name) })
	istiod.kubectl("rollout", "status", "deployment/istiod", "--timeout=120s")

	for _, part := range []struct {
		name string
		test func(*testing.T, *namespace)
	}{{"Overlay", istioOverlay}, {"Chart", istioChart}, {"Conformance", istioConformance}} {
		t.Run(part.name, func(t *testing.T) {
			t.Cleanup(func() {
				if t.Failed() {
					out, err := istiod.run("", "kubectl", "logs", "deployment/istiod", "--tail=60")
					t.Logf("istiod: %v\n%s", err, out)
				}
			})
			part.test(t, istiod)
		})
	}
}

// startGateway starts the proxy of a Gateway.
func (n *namespace) startGateway(name string, istiod *namespace) {
	n.t.Helper()
	n.apply(read(n.t, "testdata/gateway.yaml"), "{gateway}", name, "{namespace}", n.name, "{istiod}", istiod.name)
}

// awaitConditions waits until conditions of an object are true, in each of its parents' statuses if it has parents.
func (n *namespace) awaitConditions(object string, conditions ...string) {
	n.t.Helper()
	n.eventually(object+" is accepted", func() error {
		out, err := n.run("", "kubectl", "get", object, "-o", "json")
		if err != nil {
			return err
		}
		type condition struct{ Type, Status, Reason, Message string }
		type status struct{ Conditions []condition }
		var read struct {
			Status struct {
				status
				Parents []status
			}
		}
		if err := json.Unmarshal([]byte(out), &read); err != nil {
			return err
		}
		all := read.Status.Parents
		if len(all) == 0 {
			all = []status{read.Status.status}
		}
		for _, s := range all {
			for _, want := range conditions {
				if !slices.ContainsFunc(
					s.Conditions,
					func(c condition) bool { return c.Type == want && c.Status == "True" },
				) {
					return fmt.Errorf("%s is not true: %+v", want, s.Conditions)
				}
			}
		}
		return nil
	})
}

// istioOverlay tests kustomize's overlay: the Gateway, and the DestinationRule that makes Istio use TLS to kvepp.
func istioOverlay(t *testing.T, istiod *namespace) {
	n := newNamespace(t, "kvepp-e2e-istio")
	n.startGateway("inference", istiod)
	n.overlay(
		"resources: [KUSTOMIZE/overlays/istio]"+userSettings+strings.ReplaceAll(standIn, "ENGINE", "vllm"),
		"vllm",
		"kvepp",
		"inference-istio",
	)
	n.findEnvoy("inference-istio")
	n.awaitConditions("gateway/inference", "Accepted", "Programmed")
	n.awaitConditions("httproute/kvepp", "Accepted", "ResolvedRefs")
	n.awaitConditions("inferencepool/kvepp", "Accepted", "ResolvedRefs")
	n.awaitWorkers(2)
	for _, c := range n.stickyConversations(2) {
		if !strings.HasPrefix(c.last.Worker, c.engine()) {
			t.Errorf("kvepp chose %s, Istio's gateway used %s", c.last.Worker, c.engine())
		}
	}

	n.duringTraffic(func() {
		n.scaleUp("vllm", 3)
		n.rollout()
	})

	// Without the rule it must fail.
	n.kubectl("delete", "destinationrule", "kvepp")
	n.eventually("Istio connects to kvepp without TLS", func() error {
		for range 5 {
			c := n.newConversation()
			if _, err := c.say(words(20), 8); err == nil {
				return fmt.Errorf("%s served", c.engine())
			}
		}
		return nil
	})
}

// istioChart tests the chart's own Gateway, and two replicas behind a gateway that uses EndpointSlices only: such a
// gateway drops a deleted leader before another one is ready.
func istioChart(t *testing.T, istiod *namespace) {
	n := newNamespace(t, "kvepp-e2e-istio-chart")
	n.startGateway("inference", istiod)
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/engines.yaml"))
	n.install(
		"pool.selector.app=engine",
		"gateway.create=true",
		"gateway.className=istio",
		"httpRoute.create=true",
		"istio.destinationRule=true",
		"replicas=2",
		"leaderElection.enabled=true",
	)
	n.findEnvoy("inference-istio")
	n.awaitConditions("gateway/inference", "Accepted", "Programmed")
	n.awaitConditions("httproute/kvepp", "Accepted", "ResolvedRefs")
	n.awaitConditions("inferencepool/kvepp", "Accepted", "ResolvedRefs")
	n.awaitWorkers(3)

	_, leaders := n.pods(kvepp)
	if len(leaders) != 1 {
		t.Fatalf("%v lead", leaders)
	}
	failed, pause := n.measurePause(func() {
		n.kubectl("delete", "pod", leaders[0], "--wait=false")
		n.kubectl("wait", "--for=delete", "pod/"+leaders[0], "--timeout=150s")
		n.awaitWorkers(3)
	})
	t.Logf("a leader was deleted: %d requests failed, within %v", failed, pause.Round(100*time.Millisecond))
	if pause > 15*time.Second {
		t.Error("the pause is as long as if the Lease had not been released")
	}
	talk := []*conversation{n.newConversation(), n.newConversation()}
	sayAll(t, talk, words(20))
	n.awaitIndexes()
	sayExactEach(t, talk)
}

// measurePause sends requests in sequence while f runs. It returns how many failed, and the longest time without a
// success.
func (n *namespace) measurePause(f func()) (failed int, pause time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		var since time.Time
		for {
			began := time.Now()
			_, err := n.newConversation().say(words(20), 1)
			switch {
			case err != nil && since.IsZero():
				since = began
				fallthrough
			case err != nil:
				failed++
			case !since.IsZero():
				pause, since = max(pause, began.Sub(since)), time.Time{}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	f()
	cancel()
	<-done
	return failed, pause
}

// istioConformance runs the conformance suite of the Gateway API Inference Extension behind Istio.
func istioConformance(t *testing.T, istiod *namespace) {
	infra, backend := suiteNamespaces(t)
	infra.startGateway("conformance-primary", istiod)
	infra.startGateway("conformance-secondary", istiod)
	backend.apply(read(t, "testdata/pickers.yaml"))
	infra.conformance(suiteRun{
		part:    "istio",
		class:   "istio",
		gateway: "istiod",
		// If a rule has several weighted InferencePools, istiod makes Envoy ask only the last pool's picker, but the
		// test expects pods of the other pool.
		option: "-skip-tests=GatewayWeightedAcrossTwoInferencePools",
		ends:   "Succeeded",
		// These are for the endpoint picker; the others test Istio alone, but run the same way.
		passes: []string{
			"GatewayFollowingEPPRouting",
			"GatewayFollowingEPPRoutingWithDataParallelism",
			"GatewayDestinationEndpointServed",
			"EppUnAvailableFailOpen",
			"InferencePoolAppProtocol",
		},
	})
}
