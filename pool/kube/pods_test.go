package kube

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"kvepp/kvblock"
	"kvepp/pool"
)

var quiet = slog.New(slog.DiscardHandler)

// readyPod returns a ready Pod with addresses.
func readyPod(name string, addresses ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Namespace:   "ns",
			UID:         types.UID("uid-" + name),
			Labels:      map[string]string{"app": "vllm"},
			Annotations: map[string]string{},
		},
		Status: corev1.PodStatus{
			Conditions: []corev1.PodCondition{
				{Type: corev1.PodScheduled, Status: corev1.ConditionTrue},
				{Type: corev1.PodReady, Status: corev1.ConditionTrue},
			},
		},
	}
	for _, ip := range addresses {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	if len(addresses) > 0 {
		p.Status.PodIP = addresses[0]
	}
	return p
}

// byStage takes roles from the label stage alone.
var byStage = Config{RoleOf: func(labels map[string]string) (pool.Role, bool) {
	return map[string]pool.Role{"p": pool.Prefill, "d": pool.Decode}[labels["stage"]], labels["stage"] != ""
}}

// format formats endpoints for comparison.
func format(endpoints []pool.Endpoint) string {
	var lines []string
	for _, e := range endpoints {
		line := fmt.Sprintf("%s %s %s rank %d", e.Name, e.Address, e.Role, e.DataParallelStartRank)
		if e.DataParallelSize > 1 {
			line += fmt.Sprintf("+%d", e.DataParallelSize)
		}
		if e.RankByAddress {
			line += " own"
		}
		for _, s := range []string{e.Metrics, e.KVEvents, e.KVReplay, e.KVTopic, e.Namespace, e.Model} {
			if s != "" {
				line += " " + s
			}
		}
		if e.CordonedBy != "" {
			line += " cordoned by " + string(e.CordonedBy)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func TestEndpointsOfAPod(t *testing.T) {
	vllm := Config{KVEventsPort: 5557}
	for _, c := range []struct {
		name    string
		config  Config
		ports   []int
		pod     *corev1.Pod
		edit    func(*corev1.Pod)
		want    string
		problem string
	}{
		{name: "one port", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "a port for each rank", config: Config{KVEventsPort: 5557, KVReplayPort: 6557},
			ports: []int{8000, 8001, 8005}, pod: readyPod("a", "10.0.0.7"),
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 own tcp://10.0.0.7:5557 tcp://10.0.0.7:6557\n" +
				"a-rank-1 10.0.0.7:8001 aggregated rank 1 own tcp://10.0.0.7:5558 tcp://10.0.0.7:6558\n" +
				"a-rank-2 10.0.0.7:8005 aggregated rank 2 own tcp://10.0.0.7:5559 tcp://10.0.0.7:6559"},
		{name: "one port for all ranks", config: Config{KVEventsPort: 5557, DataParallelSize: 4}, ports: []int{8000},
			pod:  readyPod("a", "10.0.0.7"),
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0+4 tcp://10.0.0.7:5557"},
		{name: "not ready", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionFalse }},
		{name: "readiness unknown", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionUnknown }},
		{name: "no condition", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Status.Conditions = nil }},
		{name: "terminating", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }},
		{name: "no address", config: vllm, ports: []int{8000}, pod: readyPod("a")},
		{name: "no pool", config: vllm, pod: readyPod("a", "10.0.0.7"), want: "",
			problem: "exactly one container port named"},
		{name: "active ports", config: vllm, ports: []int{8000, 8001, 8002}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["llm-d.ai/active-ports"] = "8002, 9, x,8000,8002" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 own tcp://10.0.0.7:5557\na-rank-2 10.0.0.7:8002 " +
				"aggregated rank 2 own tcp://10.0.0.7:5559"},
		{name: "no active ports", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["llm-d.ai/active-ports"] = "" }},
		{name: "active ports as GAIE names them", config: vllm, ports: []int{8000, 8001},
			pod:  readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["inference.networking.k8s.io/active-ports"] = "8001" },
			want: "a-rank-1 10.0.0.7:8001 aggregated rank 1 own tcp://10.0.0.7:5558"},
		{name: "IPv6", config: vllm, ports: []int{8000}, pod: readyPod("a", "fd00::7"),
			want: "a-rank-0 [fd00::7]:8000 aggregated rank 0 tcp://[fd00::7]:5557"},
		{name: "dual stack, the first", config: vllm, ports: []int{8000}, pod: readyPod("a", "fd00::7", "10.0.0.7"),
			want: "a-rank-0 [fd00::7]:8000 aggregated rank 0 tcp://[fd00::7]:5557"},
		{name: "dual stack, ipv4", config: Config{Family: "v4_only"}, ports: []int{8000},
			pod: readyPod("a", "fd00::7", "10.0.0.7"), want: "a-rank-0 10.0.0.7:8000 aggregated rank 0"},
		{name: "dual stack, ipv6", config: Config{Family: "v6_only"}, ports: []int{8000},
			pod: readyPod("a", "10.0.0.7", "fd00::7"), want: "a-rank-0 [fd00::7]:8000 aggregated rank 0"},
		{name: "dual stack, ipv4 preferred", config: Config{Family: "v4_preferred"}, ports: []int{8000},
			pod: readyPod("a", "fd00::7", "10.0.0.7"), want: "a-rank-0 10.0.0.7:8000 aggregated rank 0"},
		{name: "only ipv6, ipv4 preferred", config: Config{Family: "v4_preferred"}, ports: []int{8000},
			pod: readyPod("a", "fd00::7"), want: "a-rank-0 [fd00::7]:8000 aggregated rank 0"},
		{name: "not of that family", config: Config{Family: "v6_only"}, ports: []int{8000},
			pod: readyPod("a", "10.0.0.7")},
		{name: "annotations", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Annotations = map[string]string{"kvepp/kv-events-port": "7000", "kvepp/kv-replay-port": "7100",
					"kvepp/kv-topic": "kv@", "kvepp/data-parallel-size": "2",
					"kvepp/data-parallel-start-rank": "2", "kvepp/role": "prefill", "kvepp/model": "m"}
			}, want: "a-rank-0 10.0.0.7:8000 prefill rank 2+2 tcp://10.0.0.7:7000 tcp://10.0.0.7:7100 kv@ m"},
		{name: "no events", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/kv-events-port"] = "0" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0"},
		{name: "a wrong annotation", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/kv-events-port"] = "70000" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557", problem: "kvepp/kv-events-port"},
		{name: "cordoned", config: vllm, ports: []int{8000, 8001}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/cordon"] = "true" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 own tcp://10.0.0.7:5557 cordoned by Pod annotation\n" +
				"a-rank-1 10.0.0.7:8001 aggregated rank 1 own tcp://10.0.0.7:5558 cordoned by Pod annotation"},
		{name: "a wrong EAGLE drop", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit:    func(p *corev1.Pod) { p.Annotations["kvepp/eagle-drop"] = "some" },
			want:    "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557",
			problem: "kvepp/eagle-drop: \"some\" must be one of none, full, windows, all"},
		{name: "not cordoned", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/cordon"] = "false" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "a wrong cordon", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit:    func(p *corev1.Pod) { p.Annotations["kvepp/cordon"] = "yes" },
			want:    "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557",
			problem: "kvepp/cordon: \"yes\" must be true or false"},
		{name: "a wrong role", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/role"] = "boss" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557", problem: "kvepp/role"},
		{name: "ranks beyond the last port", config: Config{KVEventsPort: 65535}, ports: []int{8000, 8001},
			pod: readyPod("a", "10.0.0.7"),
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 own tcp://10.0.0.7:65535\na-rank-1 10.0.0.7:8001 " +
				"aggregated rank 1 own", problem: "kvepp does not subscribe to its KV events"},
		{name: "Dynamo's label", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Labels["nvidia.com/dynamo-component-type"], p.Labels["nvidia.com/dynamo-namespace"] = "decode", "base"
			}, want: "a-rank-0 10.0.0.7:8000 decode rank 0 tcp://10.0.0.7:5557 base"},
		{name: "Dynamo's generations", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Labels["nvidia.com/dynamo-component-type"], p.Labels["nvidia.com/dynamo-namespace"],
					p.Labels["nvidia.com/dynamo-worker-hash"] = "worker", "base", "9f2"
			}, want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557 base-9f2"},
		{name: "llm-d's label", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "prefill" },
			want: "a-rank-0 10.0.0.7:8000 prefill rank 0 tcp://10.0.0.7:5557"},
		{name: "llm-d's encoder that prefills", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "encode-prefill" },
			want: "a-rank-0 10.0.0.7:8000 prefill rank 0 tcp://10.0.0.7:5557"},
		{name: "llm-d's encoder", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "encode" },
			want: "a-rank-0 10.0.0.7:8000 encode rank 0 tcp://10.0.0.7:5557"},
		{name: "llm-d's decoder", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "decode" },
			want: "a-rank-0 10.0.0.7:8000 decode rank 0 tcp://10.0.0.7:5557"},
		{name: "llm-d's prefill and decode", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "prefill-decode" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "llm-d's all", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "encode-prefill-decode" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "llm-d's both", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "both" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "a role that llm-d does not have", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit:    func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "prefil" },
			want:    "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557",
			problem: "llm-d.ai/role: \"prefil\" is none of both, decode, encode, encode-prefill"},
		{name: "an annotation before a label", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Labels["llm-d.ai/role"], p.Annotations["kvepp/role"] = "encode-prefill", "aggregated"
			}, want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "failed", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }},
		{name: "succeeded", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }},
		{name: "running", config: vllm, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 tcp://10.0.0.7:5557"},
		{name: "without an address", config: vllm, ports: []int{8000}, pod: readyPod("a")},
		{name: "Dynamo's frontendSidecar", config: Config{Dynamo: true}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Spec.Containers = []corev1.Container{{Name: "main",
					Ports: []corev1.ContainerPort{{Name: "system", ContainerPort: 9090}}},
					{Name: "frontend", Ports: []corev1.ContainerPort{{Name: "grpc", ContainerPort: 1},
						{Name: "http", ContainerPort: 8123}}}}
			}, want: "a-rank-0 10.0.0.7:8123 aggregated rank 0 http://10.0.0.7:9090/metrics"},
		{name: "two ports named http", config: Config{Dynamo: true}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http",
					ContainerPort: 1}}},
					{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 2}}}}
			}, problem: "exactly one container port named"},
		{name: "metrics of each rank", config: Config{}, ports: []int{8000, 8001}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/metrics-port"] = "9100" },
			want: "a-rank-0 10.0.0.7:8000 aggregated rank 0 own http://10.0.0.7:9100/metrics\na-rank-1 10.0.0.7:8001 " +
				"aggregated rank 1 own http://10.0.0.7:9101/metrics"},
		{name: "a role by another rule", config: byStage, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["stage"] = "p" },
			want: "a-rank-0 10.0.0.7:8000 prefill rank 0"},
		{name: "no endpoint by another rule", config: byStage, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Labels["llm-d.ai/role"] = "decode" }},
		{name: "an annotation before another rule", config: byStage, ports: []int{8000}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) { p.Annotations["kvepp/role"] = "decode" },
			want: "a-rank-0 10.0.0.7:8000 decode rank 0"},
		{name: "a sidecar among the init containers", config: Config{Dynamo: true}, pod: readyPod("a", "10.0.0.7"),
			edit: func(p *corev1.Pod) {
				p.Spec.InitContainers = []corev1.Container{{Name: "frontend",
					Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8123}}}}
			}, want: "a-rank-0 10.0.0.7:8123 aggregated rank 0"},
	} {
		s := NewSource(&Client{}, c.config, quiet)
		s.spec = &spec{ports: c.ports}
		if c.edit != nil {
			c.edit(c.pod)
		}
		stripped, err := stripPod(c.pod)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := stripPod(stripped); err != nil || fmt.Sprint(again) != fmt.Sprint(stripped) {
			t.Errorf("%s: stripPod is not idempotent: %v", c.name, err)
		}
		endpoints, _, problem := s.endpointsOf(&knownPod{pod: stripped.(*corev1.Pod)})
		if got := format(endpoints); got != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, got, c.want)
		}
		if (c.problem == "") != (problem == "") || !strings.Contains(problem, c.problem) {
			t.Errorf("%s: problem %q, want %q", c.name, problem, c.problem)
		}
		for _, e := range endpoints {
			if e.InstanceID != kvblock.InstanceID("a") {
				t.Errorf("%s: instance %d", c.name, e.InstanceID)
			}
		}
	}
}

// record is a DynamoWorkerMetadata object as a worker of 1.6.1 writes it, of a Pod.
func record(
	t *testing.T,
	name, pod, uid string,
	id uint64,
	ns, role string,
	ranks int,
	channel bool,
) *unstructured.Unstructured {
	t.Helper()
	part := func(format string, args ...any) any {
		var v any
		if err := json.Unmarshal([]byte(fmt.Sprintf(format, args...)), &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	path := ns + "/backend/generate"
	data := map[string]any{
		"endpoints": map[string]any{
			ns + "/backend/clear_kv_blocks/1": part(
				`{"type":"Endpoint","component":"backend","endpoint":"clear_kv_blocks","namespace":%q,`+
					`"instance_id":%d}`,
				ns,
				id,
			),
			path: part(
				`{"type":"Endpoint","component":"backend","endpoint":"generate","namespace":%q,"instance_id":%d,`+
					`"transport":{"tcp":"10.0.0.7:34567/x"},"device_type":"cuda"}`,
				ns,
				id,
			),
		},
		"model_cards": map[string]any{
			path: part(
				`{"type":"Model","namespace":%q,"component":"backend","endpoint":"generate","instance_id":%d,`+
					`"model_suffix":null,"card_json":{
			"display_name":"m","kv_cache_block_size":32,"worker_type":%q,"runtime_config":{"total_kv_blocks":2048,`+
					`"max_num_batched_tokens":8192,
			"data_parallel_start_rank":0,"data_parallel_size":%d,"enable_eagle":true}}}`,
				ns,
				id,
				role,
				ranks,
			),
		},
		"event_sources": nil,
	}
	if channel {
		data["event_channels"] = map[string]any{
			"c": part(`{"type":"EventChannel","topic":"kv-events","instance_id":77,"scope":{"kind":"endpoint"},
			"transport":{"kind":"Zmq","config":{"endpoint":"tcp://10.0.0.7:41234"}}}`),
		}
		data["event_sources"] = map[string]any{
			"s": part(
				`{"topic":"kv-events","publisher_id":77,"scope":{"endpoint":{"namespace":%q,"component":"backend",`+
					`"name":"generate"}},
			"metadata":{"worker":{"worker_id":%d,"dp_rank":0}}}`,
				ns,
				id,
			),
		}
	}
	u := &unstructured.Unstructured{
		Object: map[string]any{
			"apiVersion": "nvidia.com/v1alpha1",
			"kind":       "DynamoWorkerMetadata",
			"spec":       map[string]any{"data": data},
		},
	}
	u.SetName(name)
	u.SetNamespace("ns")
	u.SetOwnerReferences([]metav1.OwnerReference{{Kind: "Pod", Name: pod, UID: types.UID(uid)}})
	// As from the API server: integers are int64, and fractions float64.
	text, err := json.Marshal(u.Object)
	if err != nil {
		t.Fatal(err)
	}
	back := &unstructured.Unstructured{}
	if err := back.UnmarshalJSON(text); err != nil {
		t.Fatal(err)
	}
	return back
}

// computed returns a Pod "w" of Dynamo with its endpoints, after edit and the records.
func computed(t *testing.T, config Config, edit func(*corev1.Pod), records ...*unstructured.Unstructured) *knownPod {
	t.Helper()
	config.Dynamo = true
	s := NewSource(&Client{}, config, quiet)
	s.spec = &spec{ports: []int{8000}}
	p := readyPod("w", "10.0.0.7")
	if edit != nil {
		edit(p)
	}
	for _, r := range records {
		pod, w := s.readWorker(r)
		s.workers.put(r.GetName(), pod, w)
	}
	k := &knownPod{pod: p}
	s.compute(k)
	return k
}

func TestDynamoCard(t *testing.T) {
	k := computed(t, Config{KVEventsPort: 5557}, nil,
		record(t, "w", "w", "uid-w", kvblock.InstanceID("w"), "base-9f2", "decode", 2, false))
	e := k.endpoints[0]
	if e.Name != "w-rank-0" || e.InstanceID != kvblock.InstanceID("w") || e.Role != pool.Decode ||
		e.Namespace != "base-9f2" || e.BlockSize != 32 || e.TotalKVBlocks != 2048 ||
		e.MaxNumBatchedTokens != 8192 || e.DataParallelSize != 2 || !e.EAGLE || e.Model != "m" ||
		e.DeviceType != "cuda" || e.KVEvents != "" || e.RankByAddress ||
		len(k.instances) != 1 || k.instances[0].Card == nil {
		t.Errorf("got endpoint %+v", e)
	}
}

func TestDynamoInstances(t *testing.T) {
	t.Run("each container is a worker with its own id behind the Pod's frontend", func(t *testing.T) {
		const hashed = 8051026481054291 // of worker-0-engine-0
		k := computed(t, Config{}, nil,
			record(t, "w", "w", "uid-w", 1, "base", "aggregated", 1, false),
			record(t, "w-engine-1", "w", "uid-w", hashed, "base", "aggregated", 1, false))
		if got := format(k.endpoints); got != "w-rank-0 10.0.0.7:8000 aggregated rank 0 base m\nw-engine-1-rank-0 "+
			"10.0.0.7:8000 aggregated rank 0 base m" ||
			k.endpoints[0].InstanceID != 1 || k.endpoints[1].InstanceID != hashed {
			t.Errorf("got endpoints:\n%s", got)
		}
	})
	t.Run("the record of an earlier Pod of the same name is ignored", func(t *testing.T) {
		k := computed(t, Config{}, nil, record(t, "w", "w", "uid-of-before", 1, "base", "aggregated", 1, false))
		if e := k.endpoints[0]; e.InstanceID != kvblock.InstanceID("w") || e.Model != "" {
			t.Errorf("got endpoint %+v", e)
		}
	})
	t.Run("a record that cannot be parsed is ignored", func(t *testing.T) {
		broken := record(t, "w", "w", "uid-w", 5, "base", "decode", 1, true)
		broken.Object["spec"] = map[string]any{"data": map[string]any{"endpoints": map[string]any{"x": "y"}}}
		k := computed(t, Config{}, nil, broken)
		if len(k.endpoints) != 1 || k.endpoints[0].InstanceID != kvblock.InstanceID("w") {
			t.Errorf("got endpoints %+v", k.endpoints)
		}
	})
}

// TestDynamoBrokers: a broker's own object says where the workers' events, loads and first tokens are heard, until it
// goes.
func TestDynamoBrokers(t *testing.T) {
	of := record(t, "w", "w", "uid-w", 5, "base", "aggregated", 1, true)
	unstructured.RemoveNestedField(of.Object, "spec", "data", "event_channels")
	broker := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"data": map[string]any{
		"event_channels": map[string]any{"b": map[string]any{"topic": "any", "transport": map[string]any{
			"kind": "ZmqBroker", "config": map[string]any{"xpub_endpoints": []any{"tcp://10.0.0.9:2"}}}}}}}}}
	broker.SetName("broker")
	e := computed(t, Config{}, nil, of, broker).endpoints[0]
	want := pool.EventChannel{Publisher: 77, Brokers: "tcp://10.0.0.9:2",
		Subject: "namespace.base.component.backend.endpoint.generate.kv-events"}
	if len(e.EventChannels) != 1 || e.EventChannels[0] != want || len(e.LoadChannels) != 2 ||
		!e.LoadChannels[0].FirstTokens {
		t.Errorf("%+v, %+v", e.EventChannels, e.LoadChannels)
	}
	if e := computed(t, Config{}, nil, of).endpoints[0]; len(e.EventChannels)+len(e.LoadChannels) != 0 {
		t.Errorf("without a broker: %+v, %+v", e.EventChannels, e.LoadChannels)
	}
	var m metadata
	m.put("w", "w", new(worker))
	got := m.put("broker", "broker", &worker{brokers: []string{"tcp://a:1"}})
	if !slices.Contains(got, "w") || m.brokers != "tcp://a:1" {
		t.Errorf("%q touches %q", m.brokers, got)
	}
	if got = m.put("broker", "", nil); !slices.Contains(got, "w") || m.brokers != "" {
		t.Errorf("%q touches %q after the broker went", m.brokers, got)
	}
}

func TestDynamoEventPorts(t *testing.T) {
	channel := record(t, "w", "w", "uid-w", 5, "base", "aggregated", 1, true)
	t.Run("a worker's event channels have precedence over the default port", func(t *testing.T) {
		k := computed(t, Config{KVEventsPort: 5557}, nil, channel)
		if e := k.endpoints[0]; e.KVEvents != "" || len(e.EventChannels) != 1 ||
			e.EventChannels[0].ZMQ != "tcp://10.0.0.7:41234" || e.EventChannels[0].Publisher != 77 {
			t.Errorf("got endpoint %+v", e)
		}
	})
	t.Run("a port set by flag has precedence over event channels", func(t *testing.T) {
		k := computed(t, Config{KVEventsPort: 6000, KVEventsGiven: true}, nil, channel)
		if e := k.endpoints[0]; e.KVEvents != "tcp://10.0.0.7:6000" {
			t.Errorf("got endpoint %+v", e)
		}
	})
	t.Run("annotations have precedence over everything else", func(t *testing.T) {
		annotate := func(p *corev1.Pod) {
			p.Annotations["kvepp/kv-events-port"] = "7000"
			p.Annotations["kvepp/role"] = "aggregated"
			p.Annotations["kvepp/instance-id"] = "18446744073709551615"
		}
		k := computed(t, Config{KVEventsPort: 5557}, annotate,
			record(t, "w", "w", "uid-w", 5, "base", "decode", 1, true))
		if e := k.endpoints[0]; e.KVEvents != "tcp://10.0.0.7:7000" || e.Role != pool.Aggregated ||
			e.InstanceID != 1<<64-1 {
			t.Errorf("got endpoint %+v", e)
		}
	})
}

func TestWorkersMove(t *testing.T) {
	var m metadata
	if touched := m.put("x", "a", &worker{}); fmt.Sprint(touched) != "[a]" {
		t.Error(touched)
	}
	if touched := m.put("x", "b", &worker{}); fmt.Sprint(touched) != "[a b]" || len(m.byPod) != 1 {
		t.Error(touched, m.byPod)
	}
	if touched := m.put("x", "", nil); fmt.Sprint(touched) != "[b]" || len(m.byPod) != 0 || len(m.pods) != 0 {
		t.Error(touched, m.byPod)
	}
	if touched := m.put("x", "", nil); len(touched) != 0 {
		t.Error(touched)
	}
}

func TestParsePool(t *testing.T) {
	for _, c := range []struct{ group, spec, want, wrong string }{
		{PoolGroup, `{"selector":{"matchLabels":{"app":"vllm","tier":"a"}},"targetPorts":[{"number":8000},` +
			`{"number":8001}],"endpointPickerRef":{"name":"x"}}`, "app=vllm,tier=a [8000 8001]", ""},
		{PoolGroup, `{"selector":{"matchLabels":{"app":"vllm"}},"targetPorts":[{"number":8000}],` +
			`"appProtocol":"kubernetes.io/h2c"}`, "app=vllm [8000]", ""},
		{PoolGroup, `{"selector":{},"targetPorts":[{"number":8000}]}`, "", "selector is empty"},
		{PoolGroup, `{"selector":{"matchLabels":{"app":"vllm"}},"targetPorts":[]}`, "", "0 target ports"},
		{PoolGroup, `{"selector":{"matchLabels":{"app":"vllm"}},"targetPorts":[{"number":8000},{"number":8000}]}`, "",
			"twice"},
		{PoolGroup, `{"selector":{"matchLabels":{"app":"v l"}},"targetPorts":[{"number":8000}]}`, "", "v l"},
		{PoolGroup, `{"selector":{"matchLabels":{"app":"vllm"}},"targetPorts":[{"number":0}]}`, "", "not from 1"},
		{PoolGroup, `{"selector":"x"}`, "", "its spec"},
		{LegacyPoolGroup, `{"selector":{"app":"vllm"},"targetPortNumber":8000,"extensionRef":{"name":"x"}}`,
			"app=vllm [8000]", ""},
		{LegacyPoolGroup, `{"selector":{},"targetPortNumber":8000}`, "", "selector is empty"},
		{LegacyPoolGroup, `{"selector":{"app":"vllm"}}`, "", "not from 1"},
	} {
		u := &unstructured.Unstructured{}
		if err := u.UnmarshalJSON([]byte(`{"apiVersion":"x/v1","kind":"InferencePool","metadata":{"name":"p"},"spec":` +
			c.spec + `}`)); err != nil {
			t.Fatal(err)
		}
		got, err := parsePool(c.group, u)
		switch {
		case c.wrong != "":
			if err == nil || !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%s: %v, want an error with %q", c.spec, err, c.wrong)
			}
		case err != nil || got.selector.String()+" "+fmt.Sprint(got.ports) != c.want:
			t.Errorf("%s: %+v %v, want %s", c.spec, got, err, c.want)
		}
	}
}

func TestParseSelector(t *testing.T) {
	for text, want := range map[string]string{"app=vllm,env=prod": "app=vllm,env=prod",
		"app in (a,b),!x": "app in (a,b),!x"} {
		if s, err := ParseSelector(text); err != nil || s.String() != want {
			t.Errorf("%q: %v %v", text, s, err)
		}
	}
	for _, text := range []string{"", " ", "a=b=c", "="} {
		if s, err := ParseSelector(text); err == nil {
			t.Errorf("%q is a selector: %v", text, s)
		}
	}
}

// A Pod that has failed or succeeded may stay Ready, and its address may belong to another one already. Kubernetes' own
// endpoint slices leave it out too.
func TestEndedPods(t *testing.T) { synctest.Test(t, testEndedPods) }

func testEndedPods(t *testing.T) {
	c := newCluster(t)
	c.pool("vllm", 8000)
	ended := readyPod("a", "10.0.0.1")
	c.put(ended)
	r := run(t, c, Config{PoolName: "p"})
	r.want("10.0.0.1:8000")
	for _, phase := range []corev1.PodPhase{corev1.PodFailed, corev1.PodRunning, corev1.PodSucceeded} {
		ended = ended.DeepCopy()
		ended.Status.Phase = phase
		c.put(ended)
		if phase == corev1.PodRunning {
			r.want("10.0.0.1:8000")
		} else {
			r.want("")
		}
	}
	c.put(readyPod("b", "10.0.0.1"))
	r.want("10.0.0.1:8000") // once
	r.mu.Lock()
	defer r.mu.Unlock()
	if name := r.last.Endpoints[0].Name; name != "b-rank-0" {
		t.Errorf("the endpoint is %s", name)
	}
}
