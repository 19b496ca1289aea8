package kind

import (
	"fmt"
	"strings"
	"testing"
)

// asPicker makes kvepp's Deployment the one that others render for llm-d's picker: the image alone is kvepp's.
const asPicker = `
- target: {kind: Deployment, name: kvepp}
  patch: |-
    - op: replace
      path: /spec/template/spec/containers/0
      value:
        name: kvepp
        image: kvepp
        imagePullPolicy: IfNotPresent
        COMMAND
        env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        ports:
        - {name: ext-proc, containerPort: 9002}
        - {name: health, containerPort: 9003}
        - {name: metrics, containerPort: 9090}
        readinessProbe: {grpc: {port: 9003, service: readiness}, periodSeconds: 2}
        livenessProbe: {grpc: {port: 9003, service: liveness}, initialDelaySeconds: 5, periodSeconds: 10}
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities: {drop: [ALL]}
        volumeMounts: [{name: picker-config, mountPath: /config}]
    - op: replace
      path: /spec/template/spec/volumes
      value: [{name: picker-config, configMap: {name: picker-config}}]
configMapGenerator:
- name: picker-config
  literals:
  - |-
    default-plugins.yaml=CONFIG
`

// pickerConfig is the default configuration of llm-d's chart.
const pickerConfig = `{"apiVersion": "llm-d.ai/v1", "kind": "EndpointPickerConfig", "plugins": [
      {"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}, {"type": "prefix-cache-scorer"},
      {"type": "metrics-data-source", "parameters": {"scheme": "http", "path": "/metrics"}},
      {"type": "core-metrics-extractor"}], "schedulingProfiles": [{"name": "default", "plugins": [
      {"pluginRef": "queue-scorer", "weight": 2}, {"pluginRef": "kv-cache-utilization-scorer", "weight": 2},
      {"pluginRef": "prefix-cache-scorer", "weight": 3}]}]}`

// TestSeat: kvepp starts with the container specifications of llm-d's chart and of KServe, keeps conversations together
// without a tokenizer, and survives its own rolling update.
func TestSeat(t *testing.T) {
	for name, command := range map[string]string{
		"llm-d": `args: [--pool-name, kvepp, --pool-namespace, NAMESPACE, --pool-group, inference.networking.k8s.io,
          --zap-encoder, json, --config-file, /config/default-plugins.yaml, --grpc-health-port, "9003", --v=2,
          --tracing=false, --metrics-endpoint-auth=false, --decision-headers]`,
		"kserve": `command: [/app/epp, --pool-name, kvepp, --pool-namespace, NAMESPACE, --zap-encoder, json,
          --grpc-port, "9002", --grpc-health-port, "9003", "", "", "", ""]
        args: [--config-text, 'CONFIG', --metrics-endpoint-auth=false, --decision-headers]
        lifecycle: {preStop: {exec: {command: [/bin/sleep, "3"]}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			n := newNamespace(t, "kvepp-e2e-seat-"+name)
			kustomization := strings.ReplaceAll(
				strings.ReplaceAll("resources: [KUSTOMIZE/overlays/envoy]"+userSettings+
					strings.ReplaceAll(standIn, "ENGINE", "vllm")+asPicker, "COMMAND", command), "CONFIG", pickerConfig)
			n.overlay(kustomization, "vllm", "kvepp", "envoy")
			n.findEnvoy("envoy")
			n.eventually("kvepp knows the workers", func() error { // without subscriptions
				return n.eachReplica(func(pod string, m map[string]float64) error {
					if m["kvepp_workers"] != 2 {
						return fmt.Errorf("%s: %v workers", pod, m["kvepp_workers"])
					}
					return nil
				})
			})
			n.awaitEnvoys()
			c := n.newConversation()
			engine := ""
			for turn := range 6 {
				response, err := c.say(words(200), 1)
				if err != nil || response.Reason != "approximate" || turn > 0 && c.engine() != engine {
					t.Fatalf("turn %d: %+v at %s, before at %s: %v", turn, response, c.engine(), engine, err)
				}
				engine = c.engine()
			}
			if name == "kserve" {
				n.duringTraffic(n.rollout)
				failed := n.kubectl("get", "events", "--field-selector=reason=FailedPreStopHook", "-o", "name")
				if strings.Contains(failed, "event") {
					t.Errorf("the preStop hook failed: %s", failed)
				}
				return
			}
			n.duringTraffic(n.rollout)
			n.eventually("llm-d's metrics", func() error {
				return n.eachReplica(func(pod string, m map[string]float64) error {
					for name := range m {
						if strings.HasPrefix(name, "llm_d_epp_request_total") {
							return nil
						}
					}
					return fmt.Errorf("%s has no llm_d_epp_request_total", pod)
				})
			})
		})
	}
}
