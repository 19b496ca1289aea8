package kind

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// userSettings are the changes that users make to an overlay (namespace, images, smaller resource requests), and a way
// for the test to reach Envoy.
const userSettings = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: NAMESPACE
images:
- {name: kvepp, newName: kvepp/kvepp, newTag: e2e}
- {name: envoyproxy/envoy, newName: kvepp/envoy, newTag: e2e}
- {name: ai-dynamo/vllm-runtime, newName: kvepp/dynamo, newTag: e2e}
patches:
- target: {kind: Deployment, name: kvepp}
  patch: |-
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --decision-headers}
    - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 50m}
    # A namespace is deleted after half of its Pods' grace period.
    - {op: replace, path: /spec/template/spec/terminationGracePeriodSeconds, value: 45}
- target: {kind: Deployment, name: "(kvepp-)?envoy"}
  patch: |-
    - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 50m}
    - {op: replace, path: /spec/template/spec/terminationGracePeriodSeconds, value: 15}
- target: {kind: Service, name: "(kvepp-)?envoy"}
  patch: |-
    - {op: add, path: /spec/type, value: NodePort}
`

// standIn replaces an engine that needs a GPU by a stand-in, and leaves the rest of its Pod unchanged.
const standIn = `
- target: {kind: Deployment, name: ENGINE}
  patch: |-
    - op: replace
      path: /spec/template/spec/containers/0
      value:
        name: ENGINE
        image: kvepp/engine:e2e
        args: [-like=ENGINE, -model=/models/tiny, -served-model-name=Qwen/Qwen3-8B]
        ports: [{name: http, containerPort: 8000}]
        readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 1}
`

// tokenizerJob fills kvepp's claim from the hub in the cluster, which serves one model under all names.
const tokenizerJob = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: NAMESPACE
resources: [KUSTOMIZE/tokenizers]
images:
- {name: kvepp, newName: kvepp/kvepp, newTag: e2e}
patches:
- target: {kind: Job, name: tokenizers}
  patch: |-
    - {op: replace, path: /spec/template/spec/containers/0/args/1, value: --hub=http://hub}
    # The volumes of a kind without its own provisioner belong to root.
    - {op: replace, path: /spec/template/spec/securityContext/runAsNonRoot, value: false}
    - {op: replace, path: /spec/template/spec/securityContext/runAsUser, value: 0}
`

// kustomize applies a kustomization that refers to some of manifests/kustomize.
func (n *namespace) kustomize(kustomization string) {
	n.t.Helper()
	dir := n.t.TempDir()
	manifests, err := filepath.Abs("../../manifests/kustomize")
	if err != nil {
		n.t.Fatal(err)
	}
	if manifests, err = filepath.Rel(dir, manifests); err != nil {
		n.t.Fatal(err)
	}
	text := strings.NewReplacer("NAMESPACE", n.name, "KUSTOMIZE", manifests).Replace(kustomization)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
	n.kubectl("apply", "-k", dir)
}

// overlay applies a kustomization, with the tokenizers first, and waits until its deployments are ready.
func (n *namespace) overlay(kustomization string, deployments ...string) {
	n.t.Helper()
	n.model = "Qwen/Qwen3-8B"
	n.apply(read(n.t, "testdata/hub.yaml"))
	n.kubectl("rollout", "status", "deployment/hub", "--timeout=120s")
	n.kustomize(tokenizerJob)
	n.kubectl("wait", "job/tokenizers", "--for=condition=complete", "--timeout=180s")
	n.kustomize(kustomization)
	for _, deployment := range deployments {
		n.kubectl("rollout", "status", "deployment/"+deployment, "--timeout=240s")
	}
}

// rollout replaces the only kvepp of an overlay, and waits until the old one is gone.
func (n *namespace) rollout() {
	n.t.Helper()
	n.kubectl("rollout", "restart", "deployment/kvepp")
	n.awaitRollout()
}

// awaitRollout waits until a changed Deployment of kvepp has replaced its only Pod.
func (n *namespace) awaitRollout() {
	n.t.Helper()
	n.kubectl("rollout", "status", "deployment/kvepp", "--timeout=180s")
	n.eventually("the old kvepp is gone", func() error {
		if pods, _ := n.pods(kvepp); len(pods) != 1 {
			return fmt.Errorf("kvepp has the Pods %v", pods)
		}
		return nil
	})
}

// TestOverlays tests kustomize's overlays, unchanged, behind the plain Envoy that is among them.
func TestOverlays(t *testing.T) {
	for _, c := range []struct{ name, engines, envoy, kustomization string }{
		{"envoy", "vllm", "envoy", "resources: [KUSTOMIZE/overlays/envoy]" + userSettings +
			strings.ReplaceAll(standIn, "ENGINE", "vllm")},
		{"stock-engines", "vllm", "kvepp-envoy", "resources: [KUSTOMIZE/overlays/stock-engines]" + userSettings +
			strings.ReplaceAll(standIn, "ENGINE", "vllm")},
		{"sglang", "sglang", "envoy", "resources: [KUSTOMIZE/overlays/sglang]\ncomponents: " +
			"[KUSTOMIZE/components/envoy]" + userSettings + strings.ReplaceAll(standIn, "ENGINE", "sglang")},
		{"mocker", "dynamo", "envoy", "resources: [KUSTOMIZE/overlays/mocker]" + userSettings},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			n := newNamespace(t, "kvepp-e2e-overlay-"+c.name)
			n.overlay(c.kustomization, c.engines, "kvepp", c.envoy)
			n.findEnvoy(c.envoy)
			n.awaitWorkers(2)
			// An Envoy that started before kvepp had an address resolves it again after seconds. Until then some Envoys
			// refuse requests, and that of stock-engines chooses engines itself.
			n.awaitEnvoys()
			n.stickyConversations(2)
			if c.engines != "vllm" {
				return // the rest uses the same kvepp, and the same Envoy as "envoy"
			}
			n.duringTraffic(func() {
				n.kubectl("scale", "deployment/vllm", "--replicas=3")
				n.awaitWorkers(3)
				// Kubernetes now sets variables in kvepp's Pod with names like kvepp's own, such as
				// KVEPP_METRICS_PORT=tcp://...
				n.kubectl("create", "service", "clusterip", "kvepp-metrics", "--tcp=9090:9090")
				n.kubectl(
					"patch",
					"deployment",
					"kvepp",
					"--patch",
					`{"spec":{"template":{"spec":{"enableServiceLinks":true}}}}`,
				)
				n.awaitRollout()
			})
			if c.name != "stock-engines" {
				return
			}
			pods, _ := n.pods("app=vllm")
			if lost := n.chats(300, 100, func() { n.setFault(pods[0], "503") }); len(lost) > 0 {
				t.Errorf("%d requests lost at an engine that answers 503: %q ...", len(lost), lost[0])
			}
		})
	}
}
