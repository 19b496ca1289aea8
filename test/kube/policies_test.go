package kube

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// policyCRD returns a minimal definition of a kind of InferenceObjective's group.
func policyCRD(group, kind string) string {
	plural := strings.ToLower(kind) + "s"
	return fmt.Sprintf(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: %[1]s.%[2]s
  annotations: {api-approved.kubernetes.io: "a test's own"}
spec:
  group: %[2]s
  scope: Namespaced
  names: {kind: %[3]s, plural: %[1]s}
  versions:
  - name: v1alpha2
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, `+
		`x-kubernetes-preserve-unknown-fields: true}}}}
`, plural, group, kind)
}

// TestPolicies: objectives and rewrites take effect as soon as they exist, even if the cluster did not have their kinds
// before.
func TestPolicies(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "policies"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a := newEngine(t, ns, "engine", "a", port)
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--kv-events-port",
		"0",
		"--strict-model",
		"--router-queue-threshold",
		"0",
	)
	k.awaitReady(t)
	url := envoy(t, k)
	for _, kind := range []string{"inferenceobjectives.llm-d.ai", "inferencemodelrewrites.llm-d.ai"} {
		k.awaitMetric(t, `kvepp_kube_followed{kind="`+kind+`"}`, 0)
	}
	ask := func(model, objective string) *stack.Response {
		t.Helper()
		header := http.Header{}
		if objective != "" {
			header.Set("x-gateway-inference-objective", objective)
		}
		response, err := stack.Post(
			ctx,
			http.DefaultClient,
			url+"/v1/completions",
			header,
			map[string]any{"model": model, "prompt": prompt(1), "max_tokens": 1},
		)
		must(t, err)
		return response
	}
	status := func(model, objective string, want int, code string) {
		t.Helper()
		eventually(t, func() error {
			if a := ask(model, objective); a.Status != want || !strings.Contains(a.Body, code) {
				return fmt.Errorf("%s, objective %q: status %d, want %d: %s", model, objective, a.Status, want, a.Body)
			}
			return nil
		})
	}
	status("public", "", http.StatusNotFound, "model_not_found")

	const legacy, group = "inference.networking.x-k8s.io", "llm-d.ai"
	rewrite := func(group, target string) string {
		return fmt.Sprintf(`
apiVersion: %s/v1alpha2
kind: InferenceModelRewrite
metadata: {name: public}
spec:
  poolRef: {name: engines}
  rules:
  - matches: [{model: {type: Exact, value: public}}]
    targets: [{modelRewrite: %s}]
`, group, target)
	}
	must(t, cluster.ApplyCRD(ctx, policyCRD(legacy, "InferenceModelRewrite")))
	must(t, cluster.Apply(ctx, ns, rewrite(legacy, stack.Model)))
	status("public", "", http.StatusOK, "")

	must(t, cluster.ApplyCRD(ctx, policyCRD(group, "InferenceModelRewrite"))) // its objects take effect from now on
	status("public", "", http.StatusNotFound, "model_not_found")
	must(t, cluster.Apply(ctx, ns, rewrite(group, stack.Model)))
	status("public", "", http.StatusOK, "")
	must(t, cluster.Apply(ctx, ns, rewrite(group, "missing")))
	status("public", "", http.StatusNotFound, "model_not_found")
	must(t, cluster.Apply(ctx, ns, rewrite(group, stack.Model)))
	status("public", "", http.StatusOK, "")

	must(t, cluster.ApplyCRD(ctx, policyCRD(group, "InferenceObjective")))
	must(t, cluster.Apply(ctx, ns, `
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -1, poolRef: {name: engines}}
`))
	k.awaitMetric(t, `kvepp_kube_followed{kind="inferenceobjectives.llm-d.ai"}`, 1)
	release := a.stall()
	busy := make(chan error, 1)
	go func() {
		a, err := post(ctx, url, prompt(1))
		if err == nil && a.Status != http.StatusOK {
			err = fmt.Errorf("status %d: %s", a.Status, a.Body)
		}
		busy <- err
	}()
	a.awaitStalled(t)
	status(stack.Model, "batch", http.StatusTooManyRequests, "shed")
	release()
	must(t, <-busy)
	status(stack.Model, "batch", http.StatusOK, "")
	testBands(t)
}

// testBands: with flow control, objectives put what waits into bands: no request goes before one of a higher priority.
// One below 0 waits, too, up to its band's limit. Tenants take turns in one band, and the earliest deadline goes first
// in another.
func testBands(t *testing.T) {
	ctx, ns := t.Context(), "seat-bands"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	for name, priority := range map[string]int{"high": 50, "low": -5} {
		must(t, cluster.Apply(ctx, ns, fmt.Sprintf(`
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: %s}
spec: {priority: %d, poolRef: {name: engines}}
`, name, priority)))
	}
	e := newEngine(t, ns, "engine", "a", port)
	k := startSeat(t, ns, config(t, "priorities.yaml", nil))
	k.awaitReady(t)
	k.awaitWorkers(t, 1)
	k.awaitMetric(t, `kvepp_kube_followed{kind="inferenceobjectives.llm-d.ai"}`, 1)
	url := envoy(t, k)
	send := func(name string, header ...string) *stack.Response {
		h := http.Header{"X-Name": {name}}
		for i := 0; i < len(header); i += 2 {
			h.Set(header[i], header[i+1])
		}
		a, err := stack.Post(ctx, http.DefaultClient, url+"/v1/completions", h,
			map[string]any{"model": stack.Model, "prompt": prompt(1), "max_tokens": 1})
		if err != nil {
			t.Error(err)
			return &stack.Response{}
		}
		return a
	}
	const objective, tenant, deadline = "x-llm-d-inference-objective", "x-llm-d-inference-fairness-id",
		"x-llm-d-slo-ttft-ms"
	var all sync.WaitGroup
	release := e.stall()
	for i, x := range [][]string{{"runs"}, {"low1", objective, "low"}, {"low2", objective, "low"}, {"none"},
		{"later", deadline, "90000"}, {"soon", deadline, "60000"}, {"a1", objective, "high", tenant, "a"},
		{"a2", objective, "high", tenant, "a"}, {"b1", objective, "high", tenant, "b"}} {
		all.Go(func() {
			if a := send(x[0], x[1:]...); a.Status != http.StatusOK {
				t.Errorf("%s: status %d: %s", x[0], a.Status, a.Body)
			}
		})
		e.awaitStalled(t)
		k.awaitMetric(t, `kvepp_queued_requests{policy_class="default"}`, float64(i))
	}
	if a := send("low3", objective, "low"); a.Status != http.StatusTooManyRequests ||
		a.Header.Get("x-llm-d-request-dropped-reason") != "rejected-saturated" {
		t.Errorf("above the limit of its band: status %d, %s", a.Status, a.Body)
	}
	release()
	all.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	if got := strings.Join(e.named, " "); got != "runs a1 b1 a2 soon later none low1 low2" {
		t.Errorf("the engine got: %s", got)
	}
}
