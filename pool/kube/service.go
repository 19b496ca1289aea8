package kube

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// maxServiceAddresses bounds the addresses of a Service.
const maxServiceAddresses = 256

// Service follows the addresses of a Service's Pods: those of its EndpointSlices, ready or not. Create it with
// NewService.
type Service struct {
	client          *Client
	namespace, name string
	family          string // as in Config; auto and v4_preferred: both
	kind            *Kind
	log             *slog.Logger
	changed         changes

	mu     sync.Mutex
	slices map[string][]string // by the slice's name; guarded by mu
	listed bool                // guarded by mu
}

// NewService returns a follower of a Service. family is as in Config.
func NewService(c *Client, namespace, name, family string, log *slog.Logger) *Service {
	return &Service{client: c, namespace: namespace, name: name, family: family, log: log,
		kind: newKind("endpointslices", log), changed: newChanges(), slices: map[string][]string{}}
}

// Kind returns the kind of objects that is followed.
func (s *Service) Kind() *Kind { return s.kind }

// Run follows the Service until ctx ends, and calls apply with the addresses of all Pods, in order, at each change.
func (s *Service) Run(ctx context.Context, apply func([]string)) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { s.follow(ctx) })
	for s.changed.await(ctx) {
		if addresses, listed := s.addresses(); listed {
			apply(addresses)
		}
	}
}

// addresses returns all addresses; false before the first list.
func (s *Service) addresses() (all []string, listed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, some := range s.slices {
		all = append(all, some...)
	}
	slices.Sort(all)
	if all = slices.Compact(all); len(all) > maxServiceAddresses {
		s.log.Error("the Service has too many addresses; kvepp ignores the others", "service", s.name, "most",
			maxServiceAddresses)
		all = all[:maxServiceAddresses]
	}
	return all, s.listed
}

func (s *Service) follow(ctx context.Context) {
	api := s.client.core.DiscoveryV1().EndpointSlices(s.namespace)
	selector := discoveryv1.LabelServiceName + "=" + s.name
	locked := func(f func()) {
		s.mu.Lock()
		f()
		s.mu.Unlock()
		s.changed.note()
	}
	put := func(o any) {
		if slice, ok := o.(*discoveryv1.EndpointSlice); ok {
			s.slices[slice.Name] = s.addressesOf(slice)
		}
	}
	ask := narrowed[*discoveryv1.EndpointSliceList](api, s.client.core, labelled(selector))
	s.kind.follow(ctx, ask, &discoveryv1.EndpointSlice{}, follower{
		put: func(o any) { locked(func() { put(o) }) },
		remove: func(o any) {
			if slice, ok := o.(*discoveryv1.EndpointSlice); ok {
				locked(func() { delete(s.slices, slice.Name) })
			}
		},
		replace: func(list []any) {
			locked(func() {
				s.listed = true
				clear(s.slices)
				for _, o := range list {
					put(o)
				}
			})
		},
	})
}

// addressesOf returns the addresses of a slice's Pods.
func (s *Service) addressesOf(slice *discoveryv1.EndpointSlice) (all []string) {
	if s.family == "v4_only" && slice.AddressType != discoveryv1.AddressTypeIPv4 ||
		s.family == "v6_only" && slice.AddressType != discoveryv1.AddressTypeIPv6 {
		return nil
	}
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		if len(e.Addresses) == 0 {
			continue
		}
		if _, err := netip.ParseAddr(e.Addresses[0]); err == nil {
			all = append(all, e.Addresses[0])
		}
	}
	return all
}
