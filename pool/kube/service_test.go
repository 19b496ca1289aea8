package kube

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func sliceOf(name, service string, kind discoveryv1.AddressType, addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns",
		Labels: map[string]string{discoveryv1.LabelServiceName: service}}, AddressType: kind}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

// TestFollowsAService: the addresses of all slices of one Service and family, as they come and go.
func TestFollowsAService(t *testing.T) { synctest.Test(t, testFollowsAService) }

func testFollowsAService(t *testing.T) {
	c := newCluster(t)
	api := c.core.DiscoveryV1().EndpointSlices("ns")
	create := func(s *discoveryv1.EndpointSlice) {
		_, err := api.Create(t.Context(), s, metav1.CreateOptions{})
		c.must(err)
	}
	create(sliceOf("a", "replicas", discoveryv1.AddressTypeIPv4, "10.0.0.2", "10.0.0.1"))
	create(sliceOf("b", "replicas", discoveryv1.AddressTypeIPv6, "fd00::1"))
	create(sliceOf("other", "engines", discoveryv1.AddressTypeIPv4, "10.0.0.9"))
	s := NewService(c.client, "ns", "replicas", "v4_only", slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var mu sync.Mutex
	var now string
	go s.Run(ctx, func(all []string) {
		mu.Lock()
		defer mu.Unlock()
		now = strings.Join(all, " ")
	})
	want := func(addresses string) {
		t.Helper()
		eventually(t, addresses, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return now == addresses
		})
	}
	want("10.0.0.1 10.0.0.2")
	eventually(t, "the watch", func() bool { return c.watched("endpointslices") > 0 })
	create(sliceOf("c", "replicas", discoveryv1.AddressTypeIPv4, "10.0.0.3", "10.0.0.1", "no address"))
	want("10.0.0.1 10.0.0.2 10.0.0.3")
	c.must(api.Delete(t.Context(), "a", metav1.DeleteOptions{}))
	want("10.0.0.1 10.0.0.3")
}
