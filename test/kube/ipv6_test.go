package kube

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/stack"
)

// TestIPv6 runs clients, Envoy, kvepp, the pod and its KV events at [::1].
func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("loopback has no IPv6 address; run sysctl net.ipv6.conf.lo.disable_ipv6=0 (%v)", err)
	}
	l.Close()
	ctx, ns := t.Context(), "six"
	port := freePorts(t, 2)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	e := &engine{
		port: port,
		pod:  apiserver.Pod{Namespace: ns, Name: "a", IPs: []string{"::1"}, Labels: map[string]string{"app": "engine"}},
	}
	e.listen(t, port)
	e.writePod(t)
	events := e.publish(t, port+1, 0)
	held := prompt(8)

	// works checks that the engine serves requests from both address families, and that kvepp uses its events.
	works := func(t *testing.T, k *kvepp, endpoints ...string) {
		t.Helper()
		k.awaitReady(t)
		k.awaitWorkers(t, 1)
		events.awaitSubscription(true)
		events.publishStore(held)
		six, four := dualEnvoy(t, endpoints, k)
		awaitCached(t, six, held, "a-rank-0/0", 8*blockSize)
		awaitCached(t, four, held, "a-rank-0/0", 8*blockSize)
		if a := complete(t, six, held); a.Status != http.StatusOK || a.Header.Get("x-served-by") != e.address() {
			t.Errorf("status %d by %s", a.Status, a.Header.Get("x-served-by"))
		}
		k.Kill()
		events.awaitSubscription(false)
	}
	flags := []string{
		"--kubeconfig",
		cluster.Kubeconfig,
		"--pool-name",
		"engines",
		"--pool-namespace",
		ns,
		"--kv-events-port",
		fmt.Sprint(port + 1),
	}
	t.Run("a pod with only an IPv6 address", func(t *testing.T) {
		works(t, startKveppAt(t, "::1", flags...))
	})
	t.Run("Envoy has the endpoint in its configuration", func(t *testing.T) {
		k := startKveppAt(t, "::1", flags...)
		works(t, k, e.address())
	})
	t.Run("a pod's second address", func(t *testing.T) {
		e.pod.IPs = []string{newAddress(), "::1"}
		e.writePod(t)
		works(t, startKveppAt(t, "::1", append(flags, "--dns-lookup-family", "v6_only")...))
	})
	t.Run("an endpoints file", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "endpoints.yaml")
		must(
			t,
			os.WriteFile(
				file,
				fmt.Appendf(
					nil,
					"endpoints:\n- {name: a-rank-0, address: %q, kvEvents: %q}\n",
					e.address(),
					fmt.Sprintf("tcp://[::1]:%d", port+1),
				),
				0o644,
			),
		)
		works(t, startKveppAt(t, "::1", "--endpoints", file))
	})
}

// dualEnvoy starts the Envoy of manifests/kustomize/components in front of a kvepp, or one that has the endpoints in
// its configuration. It returns its IPv6 and IPv4 addresses.
func dualEnvoy(t *testing.T, endpoints []string, k *kvepp) (six, four string) {
	t.Helper()
	cfg := stack.Config{Servers: endpoints}
	if len(endpoints) == 0 {
		cfg.Manifest = "../kustomize/components/envoy/envoy-config.yaml"
	}
	// The listener of the manifest, with another port.
	cfg.EditEnvoy = func(config any) {
		listener := stack.At(config, "static_resources", "listeners", 0, "address", "socket_address").(map[string]any)
		listener["address"], listener["ipv4_compat"] = "::", true
	}
	four = startEnvoy(t, cfg, k)
	return strings.Replace(four, "127.0.0.1", "[::1]", 1), four
}
