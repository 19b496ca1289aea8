package kube

import (
	"encoding/binary"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	zmq "github.com/pebbe/zmq4"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/stack"
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

	t.Run("brokers", testBrokers) // it needs the definition, too
}

// planeMessage is a message of Dynamo's event plane about a prompt whose blocks a worker has stored.
func planeMessage(publisher, instance, seq uint64, prompt []int) (frames []any) {
	tokens := make([]kvblock.Token, len(prompt))
	for i, id := range prompt {
		tokens[i] = kvblock.Token(id)
	}
	var blocks []any
	for i, local := range kvblock.AppendLocalHashes(nil, tokens, kvblock.HashOptions{BlockSize: blockSize}) {
		blocks = append(blocks, kvblocktest.Pairs{"block_hash", seq<<32 + uint64(i), "tokens_hash", uint64(local),
			"mm_extra_info", nil})
	}
	event := kvblocktest.Pairs{"worker_id", instance, "storage_tier", "device", "residency_domain", "worker", "event",
		kvblocktest.Pairs{"event_id", int(seq) + 1, "dp_rank", 0, "data", kvblocktest.Pairs{"stored",
			kvblocktest.Pairs{"parent_hash", nil, "start_position", nil, "blocks", blocks}}}}
	envelope := kvblocktest.Append(nil, kvblocktest.Pairs{"publisher_id", publisher, "sequence", seq, "published_at", 1,
		"topic", "kv-events", "payload", kvblocktest.Append(nil, []any{event})})
	return []any{"namespace.base.component.backend.endpoint.generate.kv-events",
		binary.BigEndian.AppendUint64(nil, publisher), binary.BigEndian.AppendUint64(nil, seq),
		append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(envelope))), envelope...)}
}

// testBrokers: a worker's metadata name a source of events and no channel, and those of a broker name its sockets.
// kvepp hears the worker through the broker, and through its successor when the broker is replaced.
func testBrokers(t *testing.T) {
	ctx, ns := t.Context(), "dynamo-brokers"
	port := freePorts(t, 1)
	var workers []*engine
	for i := range 2 {
		workers = append(workers, newEngine(t, ns, "engine", fmt.Sprintf("worker-%d", i), port))
	}
	k := startKvepp(t, cluster.Kubeconfig, "--endpoint-selector", "app=engine", "--pool-namespace", ns,
		"--endpoint-target-ports", strconv.Itoa(port), "--dynamo-discovery", "kubernetes", "--kv-events-port", "0")
	k.awaitReady(t)
	url := envoy(t, k)
	instances, publishers := []uint64{4721, 4722}, []uint64{77, 78}
	for i, w := range workers {
		pod, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, w.pod.Name, metav1.GetOptions{})
		must(t, err)
		must(t, cluster.Apply(ctx, ns, strings.Replace(metadataOf(pod, "base", instances[i], 1), "event_sources: null",
			fmt.Sprintf(`event_sources: {s: {topic: kv-events, publisher_id: %d, scope: {endpoint: {namespace: base, `+
				`component: backend, name: generate}}, metadata: {worker: {worker_id: %d, dp_rank: 0}}}}`,
				publishers[i], instances[i]), 1)))
	}
	for round := range 2 {
		xsub, xpub, stop, err := stack.StartBroker()
		must(t, err)
		defer stop()
		must(t, cluster.Apply(ctx, ns, fmt.Sprintf(`
apiVersion: nvidia.com/v1alpha1
kind: DynamoWorkerMetadata
metadata: {name: broker}
spec: {data: {event_channels: {b: {type: EventChannel, topic: any, instance_id: 99, transport: {kind: ZmqBroker,
  config: {xsub_endpoints: [%q], xpub_endpoints: [%q]}}}}}}
`, xsub, xpub)))
		for i, w := range workers {
			out, err := zmq.NewSocket(zmq.PUB)
			must(t, err)
			defer out.Close()
			must(t, out.SetLinger(0))
			must(t, out.Connect(xsub))
			seq, held := uint64(10*round), prompt(8)
			eventually(t, func() error { // what is sent before kvepp has subscribed is lost
				if _, err := out.SendMessage(planeMessage(publishers[i], instances[i], seq, held)...); err != nil {
					return err
				}
				seq++
				a := complete(t, url, held)
				if by := a.Header.Get("x-served-by"); a.Status != http.StatusOK || a.KveppCached != 8*blockSize ||
					by != w.address() {
					return fmt.Errorf("round %d: status %d by %s, not %s: %d tokens cached", round, a.Status, by,
						w.address(), a.KveppCached)
				}
				return nil
			})
		}
		stop()
	}
}
