package kind

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// TestAIGateway tests Envoy AI Gateway in a cluster: Envoy Gateway and the AI gateway's controller, installed by their
// own charts. `make e2e-aigw` builds them from their modules, not from a release.
func TestAIGateway(t *testing.T) {
	gateway, controller := newNamespace(t, "envoy-gateway-system"), newNamespace(t, "envoy-ai-gateway-system")
	charts := os.Getenv("KVEPP_AIGW") + "/charts/"
	// Its chart also lets Envoy Gateway read InferencePools, without which that does not become ready.
	controller.helm("aieg", charts+"ai-gateway-helm", "testdata/ai-gateway.yaml")
	gateway.helm("eg", charts+"gateway-helm", charts+"envoy-gateway-values.yaml",
		charts+"envoy-gateway-values-addon.yaml", "testdata/envoy-gateway.yaml")
	gateway.apply(read(t, "testdata/gatewayclass.yaml"))
	t.Cleanup(func() { // while Envoy Gateway runs, which has a finalizer on it
		_, err := gateway.run("", "kubectl", "delete", "gatewayclass", "envoy-ai-gateway", "--timeout=180s")
		if err != nil {
			t.Error(err)
		}
	})

	for _, part := range []struct {
		name string
		test func(*testing.T, *namespace)
	}{{"Overlay", aigwOverlay}, {"AIGatewayRoute", aigwRoute}, {"Conformance", aigwConformance}} {
		t.Run(part.name, func(t *testing.T) {
			t.Cleanup(func() {
				if !t.Failed() {
					return
				}
				for n, object := range map[*namespace]string{
					gateway: "deployment/envoy-gateway", controller: "deployment/ai-gateway-controller",
				} {
					out, err := n.run("", "kubectl", "logs", object, "--tail=60")
					t.Logf("%s: %v\n%s", object, err, out)
				}
				out, err := gateway.run("", "kubectl", "get", "pods,services", "-o", "wide")
				t.Logf("%v\n%s", err, out)
			})
			part.test(t, &namespace{t: t, name: gateway.name})
		})
	}
}

// helm installs a chart and waits until its Deployments are ready. Its CustomResourceDefinitions are there already.
func (n *namespace) helm(name, chart string, values ...string) {
	n.t.Helper()
	args := []string{"upgrade", "--install", name, chart, "--skip-crds", "--wait", "--timeout=3m"}
	for _, file := range values {
		args = append(args, "--values", file)
	}
	n.t.Cleanup(func() { // what belongs to no namespace; helm uninstall leaves hooks there
		hooks, _ := n.run("", "helm", "get", "hooks", name)
		n.run("", "helm", "uninstall", name)
		n.run(hooks, "kubectl", "delete", "--ignore-not-found", "-f", "-")
	})
	if _, err := n.run("", "helm", args...); err != nil {
		n.t.Fatal(err)
	}
}

// behindAIGateway waits until a Gateway of a namespace serves, and the pool of its kvepp with it.
func (n *namespace) behindAIGateway(gateway *namespace, workers int) {
	n.t.Helper()
	n.awaitConditions("gateway/inference", "Accepted", "Programmed")
	n.awaitConditions("inferencepool/kvepp", "Accepted", "ResolvedRefs")
	gateway.apply(read(n.t, "testdata/outside.yaml"), "{namespace}", n.name)
	n.findEnvoyOf(gateway, n.name)
	n.awaitWorkers(workers)
}

// servedAsNamed sends 100 requests, and a stream of two seconds. It fails the test unless kvepp decides each by its
// tokens and counts it once, the worker that it names serves it, and the stream arrives piece by piece.
func (n *namespace) servedAsNamed() {
	n.t.Helper()
	before := n.counted()
	for range 100 {
		c := n.newConversation()
		if _, err := c.say(words(20), 4); err != nil {
			n.t.Fatal(err)
		}
		if c.last.Reason != "kv" || c.engine() == "" || !strings.HasPrefix(c.last.Worker, c.engine()) {
			n.t.Errorf("kvepp chose %s by %q, the gateway used %q", c.last.Worker, c.last.Reason, c.engine())
		}
	}
	c := n.newConversation()
	if _, err := c.say(words(20), 400); err != nil {
		n.t.Fatal(err)
	}
	n.t.Logf("a stream's first token came after %v of %v", c.last.TTFT, c.last.LastToken)
	if c.last.LastToken < time.Second || c.last.TTFT > c.last.LastToken/5 {
		n.t.Error("a stream did not arrive piece by piece")
	}
	if got := n.counted() - before; got != 101 {
		n.t.Errorf("kvepp counted %v requests, want 101", got)
	}
}

// counted returns how many requests kvepp has counted, when all have ended.
func (n *namespace) counted() (requests float64) {
	n.t.Helper()
	n.awaitIdle()
	if err := n.eachReplica(func(_ string, m map[string]float64) error {
		requests += m["kvepp_requests_total"]
		return nil
	}); err != nil {
		n.t.Fatal(err)
	}
	return requests
}

// aigwOverlay tests kustomize's overlay, with its HTTPRoute.
func aigwOverlay(t *testing.T, gateway *namespace) {
	n := newNamespace(t, "kvepp-e2e-aigw")
	n.overlay("resources: [KUSTOMIZE/overlays/envoy-ai-gateway]"+userSettings+
		strings.ReplaceAll(standIn, "ENGINE", "vllm"), "vllm", "kvepp")
	n.awaitConditions("httproute/kvepp", "Accepted", "ResolvedRefs")
	n.behindAIGateway(gateway, 2)
	n.stickyConversations(2)
	n.servedAsNamed()
	n.duringTraffic(func() {
		n.scaleUp("vllm", 3)
		n.rollout()
	})
}

// aigwRoute tests the chart's Gateway and pool with an AIGatewayRoute, whose filter the controller's webhook adds to
// Envoy's Pod.
func aigwRoute(t *testing.T, gateway *namespace) {
	n := newNamespace(t, "kvepp-e2e-aigw-route")
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/engines.yaml"))
	n.install("pool.selector.app=engine", "gateway.create=true", "gateway.className=envoy-ai-gateway")
	n.apply(read(t, "testdata/aigatewayroute.yaml"))
	n.awaitConditions("httproute/kvepp", "Accepted", "ResolvedRefs") // the controller makes it
	n.eventually("Envoy has the AI gateway's filter, and nothing else runs", func() error {
		filters, err := gateway.run("", "kubectl", "get", "pods",
			"-l", "gateway.envoyproxy.io/owning-gateway-namespace="+n.name,
			"-o", "jsonpath={.items[*].spec.initContainers[*].name}")
		if err == nil && filters != "ai-gateway-extproc" {
			err = fmt.Errorf("Envoy's Pods have %q", filters)
		}
		return err
	})
	n.behindAIGateway(gateway, 3)
	n.stickyConversations(3)
	n.servedAsNamed()
}

// aigwConformance runs the conformance suite of the Gateway API Inference Extension behind the gateway, which fails
// some of its tests: docs/gateways.md says why.
func aigwConformance(t *testing.T, _ *namespace) {
	infra, _ := suiteNamespaces(t)
	infra.conformance(suiteRun{
		part:    "aigw",
		class:   "envoy-ai-gateway",
		gateway: "Envoy AI Gateway 1.0.0",
		// The suite waits 300 s for each response that does not come, the Gateway API's own suite at most this long.
		option: "-timeout-config-overrides=MaxTimeToConsistency:30",
		ends:   "Failed",
		passes: []string{
			"EppUnAvailableFailOpen",
			"GatewayFollowingEPPRouting",
			"GatewayFollowingEPPRoutingWithDataParallelism",
			"HTTPRouteInvalidInferencePoolRef",
			"HTTPRouteMultipleGatewaysDifferentPools",
			"HTTPRouteMultipleRulesDifferentPools",
			"InferencePoolAccepted",
			"InferencePoolHTTPRoutePortValidation",
			"InferencePoolInvalidEPPService",
			"InferencePoolResolvedRefsCondition",
		},
	})
}
