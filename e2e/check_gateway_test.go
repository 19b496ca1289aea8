package e2e

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"kvepp/e2e/stack"
)

// gatewayStack is kvepp and Envoy before stand-ins for vLLM.
func gatewayStack(t *testing.T, engines []*stack.Engine, edit func(config any), flags ...string) *stack.Stack {
	t.Helper()
	var addresses []string
	for _, e := range engines {
		addresses = append(addresses, e.Address)
	}
	s := start(t, stack.Config{Workers: -1, Servers: addresses, EditEnvoy: edit, KveppFlags: append([]string{"--engine=vllm"}, flags...)})
	if err := s.ReplaceEndpoints(endpointsOf(engines...)); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(flags, "--no-router-kv-events") {
		if err := s.Settled(t.Context(), len(engines)); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// checkFlags are the flags by which `kvepp check` finds a stack's gateway and kvepp.
func checkFlags(t *testing.T, s *stack.Stack, e *stack.Envoy) []string {
	t.Helper()
	metrics, err := url.Parse(s.MetricsURL())
	if err != nil {
		t.Fatal(err)
	}
	return []string{"--endpoints", s.EndpointsFile(), "--model=" + stack.Model + "=" + tinyModel, "--engine=vllm", "--gateway=" + e.URL,
		"--ext-proc-address=" + s.ExtProc(), "--metrics-address=" + metrics.Host}
}

func withoutHealthChecks(t *testing.T, config any) map[string]any {
	t.Helper()
	kvepp := cluster(t, config, "kvepp")
	delete(kvepp, "health_checks") // Envoy starts without having found kvepp healthy
	return kvepp
}

// TestCheckGateway: `kvepp check --gateway` finds nothing wrong with Envoy before kvepp and stock engines, and each mistake between them.
func TestCheckGateway(t *testing.T) {
	engines := standIns(t, 3)
	missing := engines[1].Address
	port := missing[strings.LastIndexByte(missing, ':')+1:]
	s := gatewayStack(t, engines, nil)
	admin := "--admin-address=" + strings.TrimPrefix(s.Admin(), "http://")
	envoy := func(edit func(config any)) *stack.Envoy {
		t.Helper()
		e, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", edit)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	without := envoy(func(config any) { // one endpoint less
		locality := stack.At(cluster(t, config, "pool"), "load_assignment", "endpoints", 0).(map[string]any)
		locality["lb_endpoints"] = slices.DeleteFunc(locality["lb_endpoints"].([]any), func(e any) bool {
			return fmt.Sprint(stack.At(e, "endpoint", "address", "socket_address", "port_value")) == port
		})
	})
	plain := envoy(func(config any) { delete(withoutHealthChecks(t, config), "transport_socket") })
	unasked := envoy(func(config any) {
		connections := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config").(map[string]any)
		connections["http_filters"] = connections["http_filters"].([]any)[1:]
	})
	for _, c := range []struct {
		name   string
		envoy  *stack.Envoy
		flags  []string
		status int
		says   []string
		times  int // each
	}{
		{"nothing is wrong", s.Envoy, []string{admin}, 0, []string{", as kvepp chose"}, 3},
		{"nothing is wrong, by the headers of answers", s.Envoy, nil, 0, []string{"predicted cached tokens"}, 3},
		{"an endpoint is missing from Envoy's cluster", without, []string{admin}, 1,
			[]string{"kvepp chose " + missing + ", and 127.0.0.1:", "the gateway does not know the chosen endpoint", "-> add " + missing + " to the endpoints of the gateway's cluster"}, 1},
		{"an endpoint is missing, by the headers of answers", without, nil, 1,
			[]string{"kvepp chose " + missing + ", and 127.0.0.1:", "-> add " + missing + " to the endpoints of the gateway's cluster"}, 1},
		{"Envoy speaks no TLS", plain, []string{admin}, 1,
			[]string{"answered HTTP 503", "kvepp was not asked", "kvepp serves TLS at " + s.ExtProc() + ", and the gateway does not speak it", "-> give the gateway's cluster for kvepp a transport_socket"}, 1},
		{"Envoy does not ask", unasked, []string{admin}, 1, []string{"answered HTTP 200, and kvepp was not asked", "is ext_proc among the filters"}, 1},
		{"kvepp's decisions cannot be seen", unasked, nil, 0, []string{"unknown", "-> switch on what tells: kvepp serve --admin-address"}, 1},
		{"no such gateway", &stack.Envoy{URL: "http://127.0.0.1:1"}, []string{admin}, 1, []string{"connection refused", "-> is this the gateway's listener"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, table := runCheck(t, append(checkFlags(t, s, c.envoy), c.flags...)...)
			if status != c.status {
				t.Errorf("status %d, want %d", status, c.status)
			}
			for _, says := range c.says {
				if n := strings.Count(table, says); n < c.times {
					t.Errorf("%q is there %d times, want %d", says, n, c.times)
				}
			}
		})
	}
	s.KillKvepp()
	status, table := runCheck(t, append(checkFlags(t, s, unasked), "--ext-proc-address="+s.ExtProc(), admin)...)
	if status != 0 || !strings.Contains(table, "does not tell of its decisions: "+s.Admin()+": connection refused") {
		t.Errorf("kvepp is away, and its gateway answers: status %d", status)
	}
	status, table = runCheck(t, append(checkFlags(t, s, s.Envoy), admin)...)
	if status != 1 || !strings.Contains(table, "kvepp does not answer at "+s.ExtProc()) || !strings.Contains(table, "-> is kvepp up") {
		t.Errorf("kvepp is away: status %d", status)
	}
}

// TestCheckGatewayWithoutTLS: Envoy speaks TLS to a kvepp that does not.
func TestCheckGatewayWithoutTLS(t *testing.T) {
	s := gatewayStack(t, standIns(t, 1), func(config any) { withoutHealthChecks(t, config) }, "--secure-serving=false")
	status, table := runCheck(t, append(checkFlags(t, s, s.Envoy), "--admin-address="+strings.TrimPrefix(s.Admin(), "http://"))...)
	if status != 1 || !strings.Contains(table, "the gateway speaks TLS, and kvepp at "+s.ExtProc()+" does not") || !strings.Contains(table, "-> take the transport_socket out") {
		t.Errorf("status %d", status)
	}
}

// TestCheckGatewayApproximate: endpoints whose caches are only guessed are each chosen by chance, and checked.
func TestCheckGatewayApproximate(t *testing.T) {
	s := gatewayStack(t, standIns(t, 2), nil, "--no-router-kv-events")
	status, table := runCheck(t, append(checkFlags(t, s, s.Envoy), "--no-router-kv-events", "--admin-address="+strings.TrimPrefix(s.Admin(), "http://"))...)
	if status != 0 || strings.Count(table, ", as kvepp chose") != 2 {
		t.Errorf("status %d", status)
	}
}
