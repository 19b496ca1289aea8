package kube

import (
	"fmt"
	"net/http"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kvepp/kvblock"
	"kvepp/test/harness/apiserver"
)

// workerMetadata is a minimal definition of DynamoWorkerMetadata without a schema. Source: Dynamo 1.6.1, the operator's
// definition.
const workerMetadata = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: dynamoworkermetadatas.nvidia.com}
spec:
  group: nvidia.com
  names: {kind: DynamoWorkerMetadata, plural: dynamoworkermetadatas}
  scope: Namespaced
  versions:
  - name: v1alpha1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, ` +
	`x-kubernetes-preserve-unknown-fields: true}}}}
`

// metadataOf returns the DynamoWorkerMetadata that a worker of 1.6.1 writes.
func metadataOf(pod *corev1.Pod, namespace string, instance uint64, ranks int) string {
	return fmt.Sprintf(`
apiVersion: nvidia.com/v1alpha1
kind: DynamoWorkerMetadata
metadata:
  name: %[1]s
  ownerReferences: [{apiVersion: v1, kind: Pod, name: %[1]s, uid: %[2]s}]
spec:
  data:
    endpoints:
      %[3]s/backend/generate: {type: Endpoint, namespace: %[3]s, component: backend, endpoint: generate, `+
		`instance_id: %[4]d, transport: {tcp: "10.0.0.7:1/x"}}
    model_cards:
      %[3]s/backend/generate:
        type: Model
        namespace: %[3]s
        component: backend
        endpoint: generate
        instance_id: %[4]d
        card_json: {display_name: tiny, kv_cache_block_size: %[6]d, worker_type: aggregated, runtime_config: `+
		`{total_kv_blocks: 2048, data_parallel_start_rank: 0, data_parallel_size: %[5]d}}
    event_sources: null
`, pod.Name, pod.UID, namespace, instance, ranks, blockSize)
}

// TestDynamo runs Dynamo's workers, each with its frontend, in a cluster that gets the definition of
// DynamoWorkerMetadata later.
func TestDynamo(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "dynamo"
	port := freePorts(t, 1)
	worker := func(name, generation string) *engine {
		e := &engine{port: port, pod: apiserver.Pod{Namespace: ns, Name: name, IPs: []string{newAddress()},
			Labels: map[string]string{
				"app":                              "engine",
				"nvidia.com/dynamo-component-type": "worker",
				"nvidia.com/dynamo-namespace":      "base",
				"nvidia.com/dynamo-worker-hash":    generation,
			},
			Containers: []corev1.Container{
				{Name: "engine"},
				{Name: "frontend", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: int32(port)}}},
			}}}
		e.listen(t, port)
		e.writePod(t)
		return e
	}
	old := worker("worker-old", "1a")
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--endpoint-selector",
		"app=engine",
		"--pool-namespace",
		ns,
		"--dynamo-discovery",
		"kubernetes",
		"--kv-events-port",
		"0",
	)
	k.awaitReady(t)
	url := envoy(t, k)
	instance := func(of *engine, id uint64) {
		t.Helper()
		eventually(t, func() error {
			a := complete(t, url, prompt(1))
			if by, got := a.Header.Get("x-served-by"), a.Header.Get("x-instance"); a.Status != http.StatusOK ||
				by != of.address() ||
				got != strconv.FormatUint(id, 10) {
				return fmt.Errorf(
					"status %d by %s as instance %s, not %s as %d: %s",
					a.Status,
					by,
					got,
					of.address(),
					id,
					a.Body,
				)
			}
			return nil
		})
	}
	instance(old, kvblock.InstanceID("worker-old"))
	k.awaitMetric(t, `kvepp_kube_followed{kind="dynamoworkermetadatas"}`, 0)

	must(t, cluster.ApplyCRD(ctx, workerMetadata))
	pod, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, "worker-old", metav1.GetOptions{})
	must(t, err)
	must(t, cluster.Apply(ctx, ns, metadataOf(pod, "base-1a", 4711, 2)))
	k.awaitWorkers(t, 2) // its ranks
	instance(old, 4711)

	// A rolling update: the next generation joins, then the old one leaves.
	next := worker("worker-next", "2b")
	k.awaitWorkers(t, 3)
	awaitReached(t, url, old, next)
	pod, err = cluster.Client.CoreV1().Pods(ns).Get(ctx, "worker-next", metav1.GetOptions{})
	must(t, err)
	must(t, cluster.Apply(ctx, ns, metadataOf(pod, "base-2b", 4712, 1)))
	must(t, cluster.TerminatePod(ctx, ns, "worker-old"))
	k.awaitWorkers(t, 1)
	instance(next, 4712)
	must(t, cluster.RemovePod(ctx, ns, "worker-old"))

	// Without its metadata kvepp uses the hash of the pod's name.
	must(t, cluster.Delete(ctx, ns, metadataOf(pod, "base-2b", 4712, 1)))
	instance(next, kvblock.InstanceID("worker-next"))
}
