package apiserver

import (
	"context"
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Pod is a pod that the API server lists as running. No container runs: the test may listen at its addresses.
type Pod struct {
	Namespace   string // empty: default
	Name        string
	Labels      map[string]string
	Annotations map[string]string
	IPs         []string              // podIPs; empty: not assigned yet
	NotReady    bool                  // the readiness probe has not passed
	Containers  []corev1.Container    // empty: one container without ports
	Subdomain   string                // spec.subdomain
	Conditions  []corev1.PodCondition // in addition to Ready
	Owners      []metav1.OwnerReference
}

// RunPod creates a pod, or changes its labels, annotations and status; nothing else of a pod may change.
func (s *Server) RunPod(ctx context.Context, p Pod) error {
	if p.Namespace == "" {
		p.Namespace = metav1.NamespaceDefault
	}
	if err := s.namespace(ctx, p.Namespace); err != nil {
		return err
	}
	if len(p.Containers) == 0 {
		p.Containers = []corev1.Container{{Name: "engine"}}
	}
	for i := range p.Containers {
		if p.Containers[i].Image == "" {
			p.Containers[i].Image = "none"
		}
	}
	pods := s.Client.CoreV1().Pods(p.Namespace)
	meta := metav1.ObjectMeta{Name: p.Name, Labels: p.Labels, Annotations: p.Annotations, OwnerReferences: p.Owners}
	// The pod needs a node. Otherwise its deletion would not take two steps, as with a kubelet.
	_, err := pods.Create(
		ctx,
		&corev1.Pod{
			ObjectMeta: meta,
			Spec:       corev1.PodSpec{NodeName: "node", Containers: p.Containers, Subdomain: p.Subdomain},
		},
		metav1.CreateOptions{},
	)
	if apierrors.IsAlreadyExists(err) {
		var now *corev1.Pod
		if now, err = pods.Get(ctx, p.Name, metav1.GetOptions{}); err == nil {
			now.Labels, now.Annotations = p.Labels, p.Annotations
			_, err = pods.Update(ctx, now, metav1.UpdateOptions{})
		}
	}
	if err != nil {
		return err
	}
	status := corev1.PodStatus{
		Phase: corev1.PodPending,
		Conditions: append(
			[]corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			p.Conditions...),
	}
	if p.NotReady {
		status.Conditions[0].Status = corev1.ConditionFalse
	}
	for i, ip := range p.IPs {
		if i == 0 {
			status.Phase, status.PodIP = corev1.PodRunning, ip
		}
		status.PodIPs = append(status.PodIPs, corev1.PodIP{IP: ip})
	}
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return err
	}
	_, err = pods.Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// TerminatePod begins a pod's deletion, as kubectl delete does: the pod is terminating until RemovePod.
func (s *Server) TerminatePod(ctx context.Context, namespace, name string) error {
	return s.Client.CoreV1().Pods(namespace).Delete(ctx, name, *metav1.NewDeleteOptions(600))
}

// RemovePod ends a pod's deletion, as a kubelet does when its containers are gone, or deletes the pod at once.
func (s *Server) RemovePod(ctx context.Context, namespace, name string) error {
	return s.Client.CoreV1().Pods(namespace).Delete(ctx, name, *metav1.NewDeleteOptions(0))
}
