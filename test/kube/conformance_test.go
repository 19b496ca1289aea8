package kube

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// TestConformance checks what the conformance tests of the Gateway API Inference Extension require of an endpoint
// picker (GatewayFollowingEPPRouting, the same with data parallelism, GatewayDestinationEndpointServed), behind an
// Envoy with the configuration that they require of a gateway. kvepp has the flags that they pass, and three more.
func TestConformance(t *testing.T) {
	ctx, ns := t.Context(), "conformance"
	port := freePorts(t, 3)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port, port+1, port+2)))
	var engines []*engine
	var endpoints []string
	for i := range 3 {
		e := newEngine(t, ns, "engine", fmt.Sprintf("backend-%d", i), port)
		e.listen(t, port+1)
		e.listen(t, port+2)
		engines = append(engines, e)
		for rank := range 3 {
			endpoints = append(endpoints, net.JoinHostPort(e.pod.IPs[0], strconv.Itoa(port+rank)))
		}
	}
	k := startKvepp(
		t,
		cluster.Kubeconfig,
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--log-format",
		"json",
		"--gateway=conformance",
		"--kv-events-port",
		"0",
	)
	k.awaitReady(t)
	k.awaitWorkers(t, 9)
	url := envoyWithEndpoints(t, endpoints, k)

	of := func(selection string) (*stack.Response, error) {
		header := http.Header{"Test-Epp-Endpoint-Selection": {selection}}
		return stack.Post(
			context.WithoutCancel(ctx),
			http.DefaultClient,
			url+"/v1/completions",
			header,
			map[string]any{"model": stack.Model, "prompt": prompt(1), "max_tokens": 1},
		)
	}
	a, b := engines[0].pod.IPs[0], engines[1].pod.IPs[0]
	at := func(ip string, rank int) string { return net.JoinHostPort(ip, strconv.Itoa(port+rank)) }
	for selection, want := range map[string][]string{
		a:                         {at(a, 0), at(a, 1), at(a, 2)},
		a + "," + b:               {at(a, 0), at(a, 1), at(a, 2), at(b, 0), at(b, 1), at(b, 2)},
		at(a, 1):                  {at(a, 1)},
		at(a, 2) + "," + at(b, 0): {at(a, 2), at(b, 0)},
		at(b, 1) + "," + engines[2].pod.IPs[0]: {at(b, 1), at(engines[2].pod.IPs[0], 0), at(engines[2].pod.IPs[0], 1),
			at(engines[2].pod.IPs[0], 2)},
	} {
		var (
			mu      sync.Mutex
			seen    = map[string]int{}
			clients sync.WaitGroup
		)
		for range 10 {
			clients.Go(func() {
				for range 10 {
					response, err := of(selection)
					mu.Lock()
					switch {
					case err != nil || response.Status != http.StatusOK:
						t.Errorf("%s: %v, %+v", selection, err, response)
					case response.Header.Get("x-conformance-test-served-endpoint") !=
						response.Header.Get("x-served-by"):
						t.Errorf(
							"%s: served by %s, and kvepp reports %q",
							selection,
							response.Header.Get("x-served-by"),
							response.Header.Get("x-conformance-test-served-endpoint"),
						)
					default:
						seen[response.Header.Get("x-served-by")]++
					}
					mu.Unlock()
				}
			})
		}
		clients.Wait()
		for endpoint := range seen {
			if !slices.Contains(want, endpoint) {
				t.Errorf("%s: %s has served", selection, endpoint)
			}
		}
		if len(seen) != len(want) {
			t.Errorf("%s: served by %v, want each of %v", selection, seen, want)
		}
	}
	if response, err := of("192.0.2.1"); err != nil || response.Status != http.StatusServiceUnavailable {
		t.Errorf("none of the endpoints: %v, %+v", err, response)
	}
}
