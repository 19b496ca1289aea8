package kind

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// plain is what the overlays here have in common: images that are there, less of the node, and Envoy where the test can reach it.
const plain = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: NAMESPACE
images:
- {name: kvepp, newName: kvepp/kvepp, newTag: e2e}
- {name: envoyproxy/envoy, newName: kvepp/envoy, newTag: e2e}
patches:
- target: {kind: Deployment, name: kvepp}
  patch: |-
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --model=tiny=/models/qwen3-8b}
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --decision-headers}
    - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 100m}
    # A namespace takes half of what its Pods are given to go.
    - {op: replace, path: /spec/template/spec/terminationGracePeriodSeconds, value: 45}
- target: {kind: Deployment, name: envoy}
  patch: |-
    - {op: replace, path: /spec/template/spec/containers/0/resources/requests/cpu, value: 100m}
    - {op: replace, path: /spec/template/spec/terminationGracePeriodSeconds, value: 15}
- target: {kind: Service, name: envoy}
  patch: |-
    - {op: add, path: /spec/type, value: NodePort}
`

// vllm is manifests/kustomize/overlays/envoy, with stand-ins for vLLM.
const vllm = plain + `
- target: {kind: Deployment, name: vllm}
  patch: |-
    - op: replace
      path: /spec/template/spec/containers/0
      value:
        name: vllm
        image: kvepp/engine:e2e
        args: [-model=/models/tiny]
        ports: [{name: http, containerPort: 8000}]
        readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 1}
resources: [OVERLAYS/envoy]
`

// claim is what the overlay's kvepp mounts, and a job that fills it.
const claim = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: tokenizers}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 100Mi}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: fetch}
spec:
  template:
    spec:
      restartPolicy: OnFailure
      containers:
      - name: fetch
        image: kvepp/kvepp:e2e
        imagePullPolicy: Never
        args: [fetch, --hub=http://hub, --to=/models, qwen3-8b=e2e/tiny]
        securityContext: {readOnlyRootFilesystem: true, runAsUser: 0}   # kind's volumes belong to root
        volumeMounts: [{name: models, mountPath: /models}]
      volumes: [{name: models, persistentVolumeClaim: {claimName: tokenizers}}]
`

// applied is a namespace with an overlay, whose tokenizers are in a volume.
func applied(t *testing.T, name, overlay string, deployments ...string) *namespace {
	t.Helper()
	n := newNamespace(t, name)
	n.apply(read(t, "testdata/hub.yaml"))
	n.kubectl("rollout", "status", "deployment/hub", "--timeout=120s")
	n.apply(claim)
	n.kubectl("wait", "job/fetch", "--for=condition=complete", "--timeout=180s")

	dir := t.TempDir()
	overlays, err := filepath.Abs("../../manifests/kustomize/overlays")
	if err != nil {
		t.Fatal(err)
	}
	if overlays, err = filepath.Rel(dir, overlays); err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer("NAMESPACE", n.name, "OVERLAYS", overlays).Replace(overlay)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	n.kubectl("apply", "-k", dir)
	for _, deployment := range append(deployments, "kvepp", "envoy") {
		n.kubectl("rollout", "status", "deployment/"+deployment, "--timeout=240s")
	}
	n.findEnvoy()
	n.sees(2)
	return n
}

// TestOverlay is about the plain manifests: kustomize's overlay of an Envoy without a gateway controller, before vLLM.
func TestOverlay(t *testing.T) {
	n := applied(t, "kvepp-e2e-overlay", vllm, "vllm")
	var talk []*conversation
	for range 4 {
		talk = append(talk, n.newConversation())
	}
	all(t, talk, words(20))
	n.settled()
	for _, c := range talk {
		home := c.engine()
		n.idle()
		if a, err := c.say(words(20), 8); err != nil || c.engine() != home || a.CachedTokens == 0 {
			t.Errorf("the second turn: %v, at %s, the first at %s, %+v", err, c.engine(), home, a)
		}
	}
	n.during(func() {
		n.kubectl("scale", "deployment/vllm", "--replicas=3")
		n.sees(3)
		n.kubectl("rollout", "restart", "deployment/kvepp")
		n.kubectl("rollout", "status", "deployment/kvepp", "--timeout=180s")
		n.eventually("the old kvepp is gone", func() error {
			if pods, _ := n.pods(kvepp); len(pods) != 1 {
				return fmt.Errorf("there are %v", pods)
			}
			return nil
		})
	})
}
