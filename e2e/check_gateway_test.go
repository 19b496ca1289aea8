package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// gatewayStack is kvepp and Envoy in front of stand-ins for vLLM.
func gatewayStack(t *testing.T, engines []*stack.Engine, edit func(config any), flags ...string) *stack.Stack {
	t.Helper()
	var addresses []string
	for _, e := range engines {
		addresses = append(addresses, e.Address)
	}
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    addresses,
			EditEnvoy:  edit,
			KveppFlags: append([]string{"--engine=vllm"}, flags...),
		},
	)
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

// checkFlags returns the flags with which `kvepp check` finds a stack's gateway and kvepp.
func checkFlags(t *testing.T, s *stack.Stack, e *stack.Envoy) []string {
	t.Helper()
	metrics, err := url.Parse(s.MetricsURL())
	if err != nil {
		t.Fatal(err)
	}
	return []string{
		"--endpoints",
		s.EndpointsFile(),
		"--model=" + stack.Model + "=" + tinyModel,
		"--engine=vllm",
		"--gateway=" + e.URL,
		"--ext-proc-address=" + s.ExtProc(),
		"--metrics-address=" + metrics.Host,
	}
}

func adminFlag(s *stack.Stack) string {
	return "--admin-address=" + strings.TrimPrefix(s.Admin(), "http://")
}

func withoutHealthChecks(t *testing.T, config any) map[string]any {
	t.Helper()
	kvepp := cluster(t, config, "kvepp")
	delete(kvepp, "health_checks") // Envoy starts although kvepp is not healthy
	return kvepp
}

// TestCheckGateway: `kvepp check --gateway` reports no problem with Envoy in front of kvepp and stock engines, and
// reports each mistake between them.
func TestCheckGateway(t *testing.T) {
	engines := standIns(t, 3)
	missing := engines[1].Address
	port := missing[strings.LastIndexByte(missing, ':')+1:]
	s := gatewayStack(t, engines, nil)
	admin := adminFlag(s)
	envoy := func(edit func(config any)) *stack.Envoy {
		t.Helper()
		e, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", edit)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	without := envoy(func(config any) { // without one endpoint
		locality := stack.At(cluster(t, config, "pool"), "load_assignment", "endpoints", 0).(map[string]any)
		locality["lb_endpoints"] = slices.DeleteFunc(locality["lb_endpoints"].([]any), func(e any) bool {
			return fmt.Sprint(stack.At(e, "endpoint", "address", "socket_address", "port_value")) == port
		})
	})
	plain := envoy(func(config any) { delete(withoutHealthChecks(t, config), "transport_socket") })
	unasked := envoy(func(config any) {
		connections := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0,
			"typed_config").(map[string]any)
		connections["http_filters"] = connections["http_filters"].([]any)[1:]
	})
	named := write(
		t,
		"endpoints.yaml",
		strings.ReplaceAll(endpointsOf(engines...), "address: 127.0.0.1:", "address: localhost:"),
	)
	for _, c := range []struct {
		name   string
		envoy  *stack.Envoy
		flags  []string
		status int
		says   []string
		times  int // that each text must occur
	}{
		{"correct setup", s.Envoy, []string{admin}, 0, []string{", as kvepp chose"}, 3},
		{"correct setup, seen in the headers of responses", s.Envoy, nil, 0, []string{"predicted cached tokens"}, 3},
		{"host names that Envoy resolves to the same addresses", s.Envoy,
			[]string{admin, "--endpoints=" + named, "--dns-lookup-family=v4_only"}, 0,
			[]string{"a host name, which kvepp and the gateway resolve to 127.0.0.1:"}, 3},
		{"a host name that Envoy does not have", without,
			[]string{admin, "--endpoints=" + named, "--dns-lookup-family=v4_only"}, 1,
			[]string{"is a host name, which kvepp resolves to " + missing}, 1},
		{"an endpoint is missing from Envoy's cluster", without, []string{admin}, 1,
			[]string{"kvepp chose " + missing + ", but 127.0.0.1:", "the gateway does not know the chosen endpoint",
				"-> add " + missing + " to the endpoints of the gateway's cluster"}, 1},
		{"an endpoint is missing, seen in the headers of responses", without, nil, 1,
			[]string{"kvepp chose " + missing + ", but 127.0.0.1:", "-> add " + missing +
				" to the endpoints of the gateway's cluster"}, 1},
		{"Envoy speaks no TLS", plain, []string{admin}, 1,
			[]string{"answered HTTP 503", "without asking kvepp", "kvepp serves TLS at " + s.ExtProc() +
				", but the gateway connects without TLS", "-> give the gateway's cluster for kvepp a transport_socket"},
			1},
		{"Envoy skips kvepp", unasked, []string{admin}, 1, []string{"answered HTTP 200 without asking kvepp",
			"check that ext_proc is among the filters"}, 1},
		{"kvepp's decisions are not visible", unasked, nil, 0,
			[]string{"unknown", "-> make kvepp serve report its decisions: --admin-address"}, 1},
		{"no such gateway", &stack.Envoy{URL: "http://127.0.0.1:1"}, []string{admin},
			1, []string{"connection refused", "-> check that this is the gateway's listener"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, table := runCheck(t, append(checkFlags(t, s, c.envoy), c.flags...)...)
			if status != c.status {
				t.Errorf("status %d, want %d", status, c.status)
			}
			for _, says := range c.says {
				if n := strings.Count(table, says); n < c.times {
					t.Errorf("%q occurs %d times, want %d", says, n, c.times)
				}
			}
		})
	}
	s.KillKvepp()
	status, table := runCheck(t, append(checkFlags(t, s, unasked), "--ext-proc-address="+s.ExtProc(), admin)...)
	if status != 0 || !strings.Contains(table, "does not report its decisions: "+s.Admin()+": connection refused") {
		t.Errorf("kvepp is stopped, and its gateway answers: status %d", status)
	}
	status, table = runCheck(t, append(checkFlags(t, s, s.Envoy), admin)...)
	if status != 1 || !strings.Contains(table, "kvepp does not answer at "+s.ExtProc()) ||
		!strings.Contains(table, "-> check that kvepp is up") {
		t.Errorf("kvepp is stopped: status %d", status)
	}
}

// TestCheckGatewayTLS: Envoy's TLS setting for kvepp differs from kvepp's own.
func TestCheckGatewayTLS(t *testing.T) {
	certificates := t.TempDir()
	newAuthority(t).issue(t, certificates, 1, "kvepp")
	for _, c := range []struct {
		name  string
		flags []string // of kvepp; Envoy speaks TLS without a client certificate
		says  []string
	}{
		{"kvepp speaks none", []string{"--secure-serving=false"},
			[]string{"the gateway connects with TLS, but kvepp at ADDRESS serves without TLS",
				"-> remove the transport_socket"}},
		{"kvepp asks for a certificate",
			[]string{"--cert-path=" + certificates, "--tls-client-ca=" + filepath.Join(certificates, "ca.crt")},
			[]string{"kvepp at ADDRESS refuses the gateway's certificate, or the gateway sends none",
				"-> give the gateway's cluster for kvepp a certificate"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := gatewayStack(t, standIns(t, 1), func(config any) { withoutHealthChecks(t, config) }, c.flags...)
			status, table := runCheck(t, append(checkFlags(t, s, s.Envoy), adminFlag(s))...)
			if status != 1 {
				t.Errorf("status %d", status)
			}
			for _, says := range c.says {
				if says = strings.Replace(says, "ADDRESS", s.ExtProc(), 1); !strings.Contains(table, says) {
					t.Errorf("nowhere %q", says)
				}
			}
		})
	}
}

// TestCheckGatewayHealthChecks: Envoy's health checks of kvepp fail, and Envoy does not try kvepp for a request.
func TestCheckGatewayHealthChecks(t *testing.T) {
	s := gatewayStack(t, standIns(t, 1), nil)
	ctx, cancel := context.WithCancel(t.Context())
	ports, started := make(chan string, 1), make(chan error, 1)
	go func() { // Envoy never finds kvepp healthy
		_, err := s.StartEnvoyOf(ctx, "override-host.yaml", func(config any) {
			delete(cluster(t, config, "kvepp"), "transport_socket")
			ports <- fmt.Sprint(stack.At(config, "static_resources", "listeners", 0, "address", "socket_address",
				"port_value"))
		})
		started <- err
	}()
	plain := &stack.Envoy{URL: "http://127.0.0.1:" + <-ports}
	eventually(t, func() error {
		resp, err := http.Get(plain.URL)
		if err == nil {
			resp.Body.Close()
		}
		return err
	})
	eventually(t, func() error {
		if n := metric(t, s, `kvepp_tls_handshake_failures_total{cause="plaintext"}`); n < 1 {
			return errors.New("the metric counts no failed handshake")
		}
		return nil
	})
	status, table := runCheck(t, append(checkFlags(t, s, plain), adminFlag(s))...)
	if status != 1 ||
		!strings.Contains(table, "kvepp serves TLS at "+s.ExtProc()+", but the gateway connects without TLS") {
		t.Errorf("status %d", status)
	}
	status, table = runCheck(t, append(checkFlags(t, s, plain), adminFlag(s), "--metrics-address=127.0.0.1:1")...)
	if status != 1 ||
		!strings.Contains(table, "kvepp serves TLS at "+s.ExtProc()+", but the gateway's request did not reach it") {
		t.Errorf("without metrics: status %d", status)
	}
	cancel()
	<-started
}

// TestCheckGatewayGuarded: a gateway over HTTPS that requires an API key and gives requests its own ids, in front of a
// kvepp whose admin address requires a token. kvepp only guesses caches, so that it chooses each endpoint at random.
func TestCheckGatewayGuarded(t *testing.T) {
	certificates := t.TempDir()
	newAuthority(t).issue(t, certificates, 1, "gateway")
	key, token := write(t, "key", "a key\n"), write(t, "token", "a token\n")
	s := gatewayStack(t, standIns(t, 2), func(config any) {
		chain := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0).(map[string]any)
		pair := map[string]any{
			"certificate_chain": map[string]any{"filename": filepath.Join(certificates, "tls.crt")},
			"private_key":       map[string]any{"filename": filepath.Join(certificates, "tls.key")},
		}
		chain["transport_socket"] = map[string]any{
			"name": "envoy.transport_sockets.tls",
			"typed_config": map[string]any{
				"@type": "type.googleapis.com/" +
					"envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
				"common_tls_context": map[string]any{"tls_certificates": []any{pair}}},
		}
		connections := stack.At(chain, "filters", 0, "typed_config").(map[string]any)
		mutations := stack.At(connections, "early_header_mutation_extensions", 0, "typed_config").(map[string]any)
		mutations["mutations"] = append(mutations["mutations"].([]any), map[string]any{"remove": "x-request-id"})
		match := stack.At(connections, "route_config", "virtual_hosts", 0, "routes", 0, "match").(map[string]any)
		match["headers"] = []any{
			map[string]any{"name": "authorization", "string_match": map[string]any{"exact": "Bearer a key"}},
		}
	}, "--no-router-kv-events", "--admin-token-file="+token, "--decision-headers=false")
	gateway := &stack.Envoy{URL: strings.Replace(s.Envoy.URL, "http:", "https:", 1)}
	flags := append(checkFlags(t, s, gateway), "--no-router-kv-events", adminFlag(s), "--admin-token-file="+token)
	if status, table := runCheck(t, append(flags, "--gateway-insecure-skip-verify", "--gateway-api-key-file="+
		key)...); status != 0 ||
		strings.Count(table, ", as kvepp chose") != 2 {
		t.Errorf("status %d", status)
	}
	if status, table := runCheck(t, append(flags, "--gateway-insecure-skip-verify")...); status != 1 ||
		!strings.Contains(table, "HTTP 404") ||
		!strings.Contains(table, "-> check whether the gateway requires a key (--gateway-api-key-file)") {
		t.Errorf("without a key: status %d", status)
	}
	if status, table := runCheck(t, append(flags, "--gateway-api-key-file="+key)...); status != 1 ||
		!strings.Contains(table, "--gateway-insecure-skip-verify") {
		t.Errorf("the gateway's certificate is verified: status %d", status)
	}
}
