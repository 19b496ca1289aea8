package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	gaie "sigs.k8s.io/gateway-api-inference-extension/api/v1"
)

// The API groups of InferencePool.
const (
	PoolGroup       = "inference.networking.k8s.io"   // version v1
	LegacyPoolGroup = "inference.networking.x-k8s.io" // version v1alpha2
)

// poolResources names the resource in each group.
var poolResources = map[string]schema.GroupVersionResource{
	PoolGroup:       {Group: PoolGroup, Version: "v1", Resource: "inferencepools"},
	LegacyPoolGroup: {Group: LegacyPoolGroup, Version: "v1alpha2", Resource: "inferencepools"},
}

// followPool calls set with the pool's spec, and with nil if the pool does not exist, until ctx ends. It ignores a spec
// that it cannot parse.
func (s *Source) followPool(ctx context.Context, set func(*spec)) {
	group := s.config.PoolGroup
	if group == "" {
		group = PoolGroup
	}
	ask := s.client.objects(poolResources[group],
		s.config.Namespace, fields.OneTermEqualSelector("metadata.name", s.config.PoolName).String())
	var last *spec // the last one passed to set, because gateways update a pool's status often
	put := func(o any) {
		u, ok := o.(*unstructured.Unstructured)
		if !ok || u.GetName() != s.config.PoolName {
			return
		}
		now, err := parsePool(group, u)
		if err != nil {
			s.log.Error("the InferencePool is invalid; its earlier version stays in force",
				"pool", s.config.PoolName, "error", err)
			return
		}
		if last != nil && last.selector.String() == now.selector.String() && slices.Equal(last.ports, now.ports) {
			return
		}
		last = now
		s.log.Info("InferencePool read",
			"pool", s.config.PoolName, "selector", now.selector.String(), "ports", now.ports)
		set(now)
	}
	none := func() {
		last = nil
		set(nil)
	}
	s.pools.follow(ctx, ask, &unstructured.Unstructured{}, follower{
		put: put,
		remove: func(o any) {
			if u, ok := o.(*unstructured.Unstructured); ok && u.GetName() == s.config.PoolName {
				none()
			}
		},
		replace: func(list []any) {
			for _, o := range list {
				if u, ok := o.(*unstructured.Unstructured); ok && u.GetName() == s.config.PoolName {
					put(o)
					return
				}
			}
			s.log.Warn("the InferencePool does not exist yet",
				"pool", s.config.PoolName, "namespace", s.config.Namespace, "group", group)
			none()
		},
	})
}

// objects lists and watches a resource as unstructured objects: it has no Go types here, or few objects.
func (c *Client) objects(resource schema.GroupVersionResource, namespace, fieldSelector string) requests {
	at := c.dynamic.Resource(resource).Namespace(namespace)
	return narrowed(at, c.dynamic, func(o *metav1.ListOptions) { o.FieldSelector = fieldSelector })
}

// maxPorts is the largest number of target ports of a pool. Source: the InferencePool CRD.
const maxPorts = 8

// parsePool parses an InferencePool of an API group. Source: GAIE v1.6.0, api/v1; v1.0.0, apix/v1alpha2.
func parsePool(group string, u *unstructured.Unstructured) (*spec, error) {
	now := &spec{}
	match := map[string]string{}
	if group == LegacyPoolGroup {
		var p struct {
			Spec struct {
				Selector         map[string]string `json:"selector"`
				TargetPortNumber int               `json:"targetPortNumber"`
			} `json:"spec"`
		}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &p); err != nil {
			return nil, fmt.Errorf("its spec is not one of %s: %w", u.GetAPIVersion(), err)
		}
		match, now.ports = p.Spec.Selector, []int{p.Spec.TargetPortNumber}
	} else {
		var p gaie.InferencePool
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &p); err != nil {
			return nil, fmt.Errorf("its spec is not one of %s: %w", u.GetAPIVersion(), err)
		}
		for key, value := range p.Spec.Selector.MatchLabels {
			match[string(key)] = string(value)
		}
		for _, port := range p.Spec.TargetPorts {
			now.ports = append(now.ports, int(port.Number))
		}
	}
	var err error
	switch {
	case len(match) == 0: // an empty selector would select every Pod of the namespace
		return nil, errors.New("its selector is empty")
	case len(now.ports) == 0 || len(now.ports) > maxPorts:
		return nil, fmt.Errorf("it has %d target ports, but must have 1 to %d", len(now.ports), maxPorts)
	}
	if now.selector, err = labels.ValidatedSelectorFromSet(match); err != nil {
		return nil, err
	}
	return now, CheckPorts(now.ports)
}

// CheckPorts returns an error if the target ports of a pool are not valid.
func CheckPorts(ports []int) error {
	seen := map[int]bool{}
	for _, p := range ports {
		if p < 1 || p > 65535 {
			return fmt.Errorf("target port %d is not from 1 to 65535", p)
		}
		if seen[p] {
			return fmt.Errorf("target port %d is given twice", p)
		}
		seen[p] = true
	}
	if len(ports) > maxPorts {
		return fmt.Errorf("%d target ports: at most %d", len(ports), maxPorts)
	}
	return nil
}
