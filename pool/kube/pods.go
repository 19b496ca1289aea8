package kube

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/dynamo"
)

// Annotations with which a Pod overrides the flags for itself.
const (
	annotationPrefix = "kvepp/"

	EventsPortAnnotation       = annotationPrefix + "kv-events-port"     // of rank 0; "0": no events
	MetricsPortAnnotation      = annotationPrefix + "metrics-port"       // of the engine's own metrics, at /metrics
	ReplayPortAnnotation       = annotationPrefix + "kv-replay-port"     // of rank 0; "0": no replay
	TopicAnnotation            = annotationPrefix + "kv-topic"           // subscription prefix
	RanksAnnotation            = annotationPrefix + "data-parallel-size" // ranks behind a single port
	StartRankAnnotation        = annotationPrefix + "data-parallel-start-rank"
	RoleAnnotation             = annotationPrefix + "role"        // aggregated, prefill or decode
	InstanceAnnotation         = annotationPrefix + "instance-id" // decimal
	ModelAnnotation            = annotationPrefix + "model"
	BlockSizeAnnotation        = annotationPrefix + "block-size"
	TotalBlocksAnnotation      = annotationPrefix + "total-kv-blocks"
	MaxBatchedTokensAnnotation = annotationPrefix + "max-num-batched-tokens"
	EAGLEDropAnnotation        = annotationPrefix + "eagle-drop" // none, full, windows or all
	CordonAnnotation           = annotationPrefix + "cordon"     // "true": no new requests
)

// activePortsAnnotations list which of the target ports a Pod serves. The first one that is present counts. Source:
// llm-d-router v0.10; GAIE v1.5.
var activePortsAnnotations = []string{"llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"}

// Labels of other projects that give a Pod's role and its Dynamo namespace.
const (
	dynamoTypeLabel      = "nvidia.com/dynamo-component-type"
	dynamoNamespaceLabel = "nvidia.com/dynamo-namespace"
	dynamoHashLabel      = "nvidia.com/dynamo-worker-hash" // of the worker's generation, during a rolling update
	llmdRoleLabel        = "llm-d.ai/role"
)

// Names of container ports of Dynamo's workers. Source: Dynamo's operator.
const (
	httpPort   = "http"   // of the frontend
	systemPort = "system" // of the worker's own metrics
)

// namedPort returns the container port with a name, or 0 if there is none or several.
func namedPort(p *corev1.Pod, name string) (found int) {
	// A sidecar may be in either list.
	for _, containers := range [][]corev1.Container{p.Spec.Containers, p.Spec.InitContainers} {
		for i := range containers {
			for _, port := range containers[i].Ports {
				switch {
				case port.Name != name:
				case found != 0:
					return 0
				default:
					found = int(port.ContainerPort)
				}
			}
		}
	}
	return found
}

// followPods follows the Pods that a selector selects, until ctx ends.
func (s *Source) followPods(ctx context.Context, selector labels.Selector) {
	api := s.client.core.CoreV1().Pods(s.config.Namespace)
	// locked calls f under s.mu, unless the selector has changed.
	locked := func(f func()) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() == nil {
			f()
		}
	}
	ask := narrowed[*corev1.PodList](api, s.client.core, labelled(selector.String()))
	s.podKind.follow(ctx, ask, &corev1.Pod{}, follower{
		strip: stripPod,
		put: func(o any) {
			if p, ok := o.(*corev1.Pod); ok {
				locked(func() {
					if !selector.Matches(labels.Set(p.Labels)) {
						p = nil
					}
					s.put(o.(*corev1.Pod).Name, p)
				})
			}
		},
		remove: func(o any) {
			if p, ok := o.(*corev1.Pod); ok {
				locked(func() { s.put(p.Name, nil) })
			}
		},
		replace: func(list []any) {
			locked(func() {
				s.lists.Add(1)
				there := map[string]bool{}
				for _, o := range list {
					if p, ok := o.(*corev1.Pod); ok && selector.Matches(labels.Set(p.Labels)) {
						there[p.Name] = true
						s.put(p.Name, p)
					}
				}
				for _, name := range slices.Clone(s.order) {
					if !there[name] {
						s.put(name, nil)
					}
				}
				s.listed = true
				s.wake()
			})
		},
	})
}

// stripPod keeps only the fields that endpoints need: a tenth of the Pod.
func stripPod(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	slim := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name: p.Name, Namespace: p.Namespace, UID: p.UID, ResourceVersion: p.ResourceVersion,
		Labels: p.Labels, DeletionTimestamp: p.DeletionTimestamp,
	}}
	for key, value := range p.Annotations {
		if strings.HasPrefix(key, annotationPrefix) || slices.Contains(activePortsAnnotations, key) {
			if slim.Annotations == nil {
				slim.Annotations = map[string]string{}
			}
			slim.Annotations[key] = value
		}
	}
	kept := corev1.Container{}
	for _, name := range []string{httpPort, systemPort} {
		if port := namedPort(p, name); port != 0 {
			kept.Ports = append(kept.Ports, corev1.ContainerPort{Name: name, ContainerPort: int32(port)})
		}
	}
	if len(kept.Ports) > 0 {
		slim.Spec.Containers = []corev1.Container{kept}
	}
	slim.Status.Phase, slim.Status.PodIP, slim.Status.PodIPs = p.Status.Phase, p.Status.PodIP, p.Status.PodIPs
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			slim.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return slim, nil
}

// serves reports whether requests may be sent to a Pod. Subscriptions follow it: kvepp clears the blocks of a Pod that
// is not ready, because an engine that stopped answering may have restarted. Replay restores the blocks that it still
// holds. A Pod that failed or succeeded may stay ready, while another one has its address already.
//
// Source: GAIE v1.5, which removes and adds a Pod's endpoints with its readiness; Kubernetes 1.34,
// endpointslice/util (ShouldPodBeInEndpoints).
func serves(p *corev1.Pod) bool {
	ended := p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded
	return !ended && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// address returns the Pod's address of the wanted family, or "" if it has none.
func address(p *corev1.Pod, family string) string {
	if family == "" || family == "auto" {
		return p.Status.PodIP
	}
	for _, ip := range p.Status.PodIPs {
		if parsed := net.ParseIP(ip.IP); parsed != nil && (parsed.To4() != nil) == (family != "v6_only") {
			return ip.IP
		}
	}
	if family == "v4_preferred" {
		return p.Status.PodIP
	}
	return ""
}

// activePorts returns the indexes of the target ports that a Pod serves. It ignores entries that are not a number, not
// a target port, or repeated; an empty list means no ports. Source: llm-d-router v0.10.
func activePorts(p *corev1.Pod, ports []int) []int {
	for _, key := range activePortsAnnotations {
		text, there := p.Annotations[key]
		if !there {
			continue
		}
		var active []int
		for _, field := range strings.Split(text, ",") {
			port, err := strconv.Atoi(strings.TrimSpace(field))
			if i := slices.Index(ports, port); err == nil && i >= 0 && !slices.Contains(active, i) {
				active = append(active, i)
			}
		}
		slices.Sort(active)
		return active
	}
	all := make([]int, len(ports))
	for i := range all {
		all[i] = i
	}
	return all
}

// endpointsOf returns the endpoints of a Pod, and the Dynamo instances behind them. problem describes a mistake in the
// Pod's settings; empty: none. The caller holds s.mu.
//
// Each target port is an endpoint. If there are several, port i is the engine of rank i; its events are at rank 0's
// port + i, and all share one instance id. If there is one port, the ranks behind it share it.
func (s *Source) endpointsOf(k *knownPod) (endpoints []pool.Endpoint, instances []dynamo.Instance, problem string) {
	p := k.pod
	ip := address(p, s.config.Family)
	if s.spec == nil || ip == "" || !serves(p) || s.excludes(p) {
		k.response = frontendResponse{} // another worker may run when the Pod is ready again
		return nil, nil, ""
	}
	ports := s.spec.ports
	if len(ports) == 0 {
		if port := namedPort(p, httpPort); port != 0 {
			ports = []int{port}
		} else {
			return nil, nil, "it must have exactly one container port named \"http\" if --endpoint-target-ports is " +
				"not given"
		}
	}
	of, err := s.readPod(p)
	if err != nil {
		problem = err.Error() + "; kvepp ignores it"
	}
	found := s.workers.instances(p)
	if seen := s.startWait(k); len(found) > 0 {
		if seen.known &&
			!slices.ContainsFunc(found, func(n named) bool { return n.InstanceID == seen.worker.InstanceID }) {
			problem = fmt.Sprintf(
				"a frontend knows its worker as %d, but DynamoWorkerMetadata has %d: requests name the latter",
				seen.worker.InstanceID, found[0].InstanceID)
		}
	} else if found = []named{{}}; seen.known {
		found[0].Instance = seen.instance()
	} else if s.asksFrontends() && !seen.waitEnded {
		s.frontends.wake()
		return nil, nil, problem
	}
	for i := range found {
		in := &found[i].Instance
		e, name := of, p.Name
		if in.Path != "" {
			if found[i].name != "" { // a frontend's response is not a model card
				instances = append(instances, *in)
			}
			e = dynamo.Complete(e, in)
			e.Namespace, _, _ = strings.Cut(in.Path, "/")
			e.EventChannels, e.LoadChannels = in.Channels, in.Loads
			if _, err := strconv.ParseUint(p.Annotations[InstanceAnnotation], 10, 64); err == nil {
				e.InstanceID = of.InstanceID
			}
			if roles[p.Annotations[RoleAnnotation]] != "" {
				e.Role = of.Role
			} else if c := in.Card; c != nil && c.Role != "" {
				e.Role = c.Role // labels do not change if a worker changes its role
			}
			if len(found) > 1 {
				name = found[i].name
			}
		}
		eventsPort, replayPort := s.eventPorts(p, &e)
		metrics := 0
		if s.config.Dynamo && len(found) == 1 { // the metrics at the frontend's port are not the worker's
			metrics = namedPort(p, systemPort)
		}
		if port, err := strconv.ParseUint(p.Annotations[MetricsPortAnnotation], 10, 16); err == nil {
			metrics = int(port)
		}
		for _, port := range activePorts(p, ports) {
			one := e
			one.Name = fmt.Sprintf("%s-rank-%d", name, port) // GAIE's names for endpoints
			one.Address = net.JoinHostPort(ip, strconv.Itoa(ports[port]))
			step := 0
			if len(ports) > 1 {
				step = port
				one.DataParallelStartRank += uint32(port)
				one.DataParallelSize = 1
				one.RankByAddress = !s.config.Dynamo
			}
			if metrics != 0 {
				one.Metrics = "http://" + net.JoinHostPort(ip, strconv.Itoa(metrics+step)) + "/metrics"
			}
			one.KVEvents, one.KVReplay = tcp(ip, eventsPort, step), tcp(ip, replayPort, step)
			if err := checkEvents(&one); err != nil {
				problem = err.Error() + "; kvepp does not subscribe to its KV events"
				one.KVEvents, one.KVReplay = "", ""
			}
			endpoints = append(endpoints, one)
		}
	}
	return endpoints, instances, problem
}

// readPod returns the settings of each of a Pod's endpoints: its annotations, or else the flags. An annotation that is
// not valid counts as absent.
func (s *Source) readPod(p *corev1.Pod) (pool.Endpoint, error) {
	e := pool.Endpoint{
		InstanceID: kvblock.InstanceID(p.Name), Role: s.role(p), DataParallelSize: max(s.config.DataParallelSize, 1),
		KVTopic: p.Annotations[TopicAnnotation], Model: p.Annotations[ModelAnnotation],
	}
	if e.Namespace = p.Labels[dynamoNamespaceLabel]; e.Namespace != "" && p.Labels[dynamoHashLabel] != "" {
		e.Namespace += "-" + p.Labels[dynamoHashLabel]
	}
	var wrong error
	number := func(key string, most uint64, to func(uint64)) {
		text, there := p.Annotations[key]
		if !there {
			return
		}
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil || n > most {
			wrong = fmt.Errorf("annotation %s: %q is not a number up to %d", key, text, most)
			return
		}
		to(n)
	}
	number(RanksAnnotation, pool.MaxRanks, func(n uint64) { e.DataParallelSize = uint32(max(n, 1)) })
	number(StartRankAnnotation, 1<<31, func(n uint64) { e.DataParallelStartRank = uint32(n) })
	number(InstanceAnnotation, 1<<64-1, func(n uint64) { e.InstanceID = n })
	number(BlockSizeAnnotation, kvblock.MaxBlockSize, func(n uint64) { e.BlockSize = int(n) })
	number(TotalBlocksAnnotation, 1<<40, func(n uint64) { e.TotalKVBlocks = int(n) })
	number(MaxBatchedTokensAnnotation, 1<<40, func(n uint64) { e.MaxNumBatchedTokens = int(n) })
	number(EventsPortAnnotation, 65535, func(uint64) {})
	number(ReplayPortAnnotation, 65535, func(uint64) {})
	number(MetricsPortAnnotation, 65535, func(uint64) {})
	if text, there := p.Annotations[RoleAnnotation]; there && roles[text] == "" {
		wrong = fmt.Errorf("annotation %s: %q must be aggregated, prefill or decode", RoleAnnotation, text)
	}
	if text, there := p.Labels[llmdRoleLabel]; there && llmdRoles[text] == "" {
		wrong = fmt.Errorf("label %s: %q is none of %s", llmdRoleLabel, text,
			strings.Join(slices.Sorted(maps.Keys(llmdRoles)), ", "))
	}
	drop, known := kvblock.ParseEAGLEDrop(p.Annotations[EAGLEDropAnnotation])
	if e.EAGLEDrop = drop; !known {
		wrong = fmt.Errorf("annotation %s: %q must be one of %s", EAGLEDropAnnotation,
			p.Annotations[EAGLEDropAnnotation], strings.Join(kvblock.EAGLEDropNames, ", "))
	}
	switch text, there := p.Annotations[CordonAnnotation]; {
	case text == "true":
		e.CordonedBy = pool.CordonedByPod
	case there && text != "false":
		wrong = fmt.Errorf("annotation %s: %q must be true or false", CordonAnnotation, text)
	}
	return e, wrong
}

// roles maps the values of annotations and labels to roles.
var roles = map[string]pool.Role{
	"aggregated": pool.Aggregated, "prefill": pool.Prefill, "decode": pool.Decode, "encode": pool.Encode,
}

// llmdRoles maps the values of llm-d's label to roles. A worker that only encodes and prefills cannot answer a request.
// Source: llm-d-router v0.11.
var llmdRoles = map[string]pool.Role{
	"encode": pool.Encode, "prefill": pool.Prefill, "encode-prefill": pool.Prefill, "decode": pool.Decode,
	"prefill-decode": pool.Aggregated, "encode-prefill-decode": pool.Aggregated, "both": pool.Aggregated,
}

// excludes reports whether a Pod is no endpoint by its labels.
func (s *Source) excludes(p *corev1.Pod) bool {
	if s.config.RoleOf == nil || roles[p.Annotations[RoleAnnotation]] != "" {
		return false
	}
	_, takes := s.config.RoleOf(p.Labels)
	return !takes
}

// role returns the role of a Pod that is an endpoint.
func (s *Source) role(p *corev1.Pod) pool.Role {
	if s.config.RoleOf == nil || roles[p.Annotations[RoleAnnotation]] != "" {
		return role(p)
	}
	of, _ := s.config.RoleOf(p.Labels)
	return of
}

// role returns the role in a Pod's annotation, or else in its labels. Any other value, such as Dynamo's "worker", means
// Aggregated.
func role(p *corev1.Pod) pool.Role {
	return cmp.Or(roles[p.Annotations[RoleAnnotation]], roles[p.Labels[dynamoTypeLabel]],
		llmdRoles[p.Labels[llmdRoleLabel]], pool.Aggregated)
}

// eventPorts returns the event port and the replay port of a Pod's rank 0; 0 means none. Precedence: the Pod's
// annotation, an event port set by flag, the worker's own event channels, the default event port.
func (s *Source) eventPorts(p *corev1.Pod, e *pool.Endpoint) (events, replay int) {
	events, replay = int(s.config.KVEventsPort), int(s.config.KVReplayPort)
	// Dynamo's decode workers send no events for prompts.
	if !s.config.KVEventsGiven && (len(e.EventChannels) > 0 || s.config.Dynamo && e.Role == pool.Decode) {
		events = 0
	}
	port := func(key string, to *int) {
		if n, err := strconv.ParseUint(p.Annotations[key], 10, 16); err == nil {
			*to = int(n)
		}
	}
	port(EventsPortAnnotation, &events)
	port(ReplayPortAnnotation, &replay)
	return events, replay
}

// tcp returns the address of a ZMQ socket, "" for port 0.
func tcp(ip string, port, step int) string {
	if port == 0 {
		return ""
	}
	return "tcp://" + net.JoinHostPort(ip, strconv.Itoa(port+step))
}

func checkEvents(e *pool.Endpoint) error {
	for _, a := range []string{e.KVEvents, e.KVReplay} {
		if a != "" {
			if err := pool.CheckTCP(a, e.DataParallelSize); err != nil {
				return err
			}
		}
	}
	return nil
}
