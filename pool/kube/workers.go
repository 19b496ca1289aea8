package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"kvepp/pool/dynamo"
)

// workerResource is the object that each Dynamo worker writes about itself if Kubernetes is its discovery. Source:
// dynamo-runtime 1.6.1, discovery::kube.
var workerResource = schema.GroupVersionResource{
	Group:    "nvidia.com",
	Version:  "v1alpha1",
	Resource: "dynamoworkermetadatas",
}

// metadata holds the objects of Dynamo's workers by their Pod. Most Pods have one worker, and its object has the Pod's
// name. If each container is a worker, a Pod has several.
type metadata struct {
	byPod map[string]map[string]*worker // Pod's name -> object's name
	pods  map[string]string             // object's name -> Pod's name

	brokers string // ZMQ brokers of Dynamo's event plane, as dynamo.JoinBrokers returns them
}

// worker is one DynamoWorkerMetadata object.
type worker struct {
	owner     types.UID // of the Pod; empty: not given
	instances []dynamo.Instance
	brokers   []string // addresses of the ZMQ broker that it is; nil: it is none
	problem   string   // the last one logged
}

// named is an instance and the name of the object that describes it.
type named struct {
	name string
	dynamo.Instance
}

// instances returns the instances of a Pod's workers that requests can be sent to, ordered by name. It skips objects of
// an earlier Pod with the same name.
func (m *metadata) instances(p *corev1.Pod) []named {
	var found []named
	for _, name := range slices.Sorted(maps.Keys(m.byPod[p.Name])) {
		w := m.byPod[p.Name][name]
		if w.owner != "" && w.owner != p.UID {
			continue
		}
		if in, ok := dynamo.ServingInstance(w.instances); ok {
			found = append(found, named{name, in.OverBrokers(m.brokers)})
		}
	}
	return found
}

// put stores an object, or removes it if w is nil. It returns the names of the Pods that the object belonged to before
// and belongs to now; of all if the brokers changed.
func (m *metadata) put(name, pod string, w *worker) []string {
	touched, all := m.replace(name, pod, w), []string{}
	for _, objects := range m.byPod {
		for _, w := range objects {
			all = append(all, w.brokers...)
		}
	}
	if brokers := dynamo.JoinBrokers(all); brokers != m.brokers {
		m.brokers = brokers
		touched = slices.AppendSeq(touched, maps.Keys(m.byPod))
	}
	return touched
}

func (m *metadata) replace(name, pod string, w *worker) (touched []string) {
	if m.byPod == nil {
		m.byPod, m.pods = map[string]map[string]*worker{}, map[string]string{}
	}
	if was, there := m.pods[name]; there && (w == nil || was != pod) {
		touched = append(touched, was)
		delete(m.pods, name)
		if delete(m.byPod[was], name); len(m.byPod[was]) == 0 {
			delete(m.byPod, was)
		}
	}
	if w == nil {
		return touched
	}
	if m.byPod[pod] == nil {
		m.byPod[pod] = map[string]*worker{}
	}
	m.byPod[pod][name], m.pods[name] = w, pod
	return append(touched, pod)
}

// followWorkers follows the objects of Dynamo's workers until ctx ends.
func (s *Source) followWorkers(ctx context.Context) {
	put := func(u *unstructured.Unstructured, there bool) { // the caller holds s.mu
		pod, w := "", (*worker)(nil)
		if there {
			pod, w = s.readWorker(u)
		}
		for _, name := range s.workers.put(u.GetName(), pod, w) {
			if k := s.pods[name]; k != nil {
				s.recompute(k)
			}
		}
	}
	locked := func(o any, there bool) {
		if u, ok := o.(*unstructured.Unstructured); ok {
			s.mu.Lock()
			defer s.mu.Unlock()
			put(u, there)
		}
	}
	s.workerKind.follow(
		ctx,
		s.client.objects(workerResource, s.config.Namespace, ""),
		&unstructured.Unstructured{},
		follower{
			strip:  stripObject,
			put:    func(o any) { locked(o, true) },
			remove: func(o any) { locked(o, false) },
			replace: func(list []any) {
				s.mu.Lock()
				defer s.mu.Unlock()
				there := map[string]bool{}
				for _, o := range list {
					if u, ok := o.(*unstructured.Unstructured); ok {
						there[u.GetName()] = true
						put(u, true)
					}
				}
				for _, name := range slices.Sorted(maps.Keys(s.workers.pods)) {
					if !there[name] {
						u := &unstructured.Unstructured{}
						u.SetName(name)
						put(u, false)
					}
				}
			},
		},
	)
}

// stripObject removes the fields that Kubernetes adds, which are larger than the rest.
func stripObject(o any) (any, error) {
	if u, ok := o.(*unstructured.Unstructured); ok {
		u.SetManagedFields(nil)
	}
	return o, nil
}

// readWorker parses an object. It logs an error once per object. The caller holds s.mu.
func (s *Source) readWorker(u *unstructured.Unstructured) (pod string, w *worker) {
	w = &worker{}
	pod = u.GetName()
	for _, o := range u.GetOwnerReferences() {
		if o.Kind == "Pod" {
			pod, w.owner = o.Name, o.UID
		}
	}
	data, _, err := unstructured.NestedMap(u.Object, "spec", "data")
	if err == nil {
		var text []byte
		if text, err = json.Marshal(data); err == nil {
			w.instances, w.brokers, err = dynamo.ParseMetadata(text)
		}
	}
	if err != nil {
		w.problem = fmt.Sprint(err)
		if was := s.workers.byPod[pod][u.GetName()]; was == nil || was.problem != w.problem {
			s.log.Warn("a DynamoWorkerMetadata has invalid records; kvepp uses the others",
				"name", u.GetName(), "error", err)
		}
	}
	return pod, w
}
