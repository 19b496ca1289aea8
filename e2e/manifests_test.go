package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/stack"
)

// namedServer answers every request with its name. If it is ill, only its health check fails.
type namedServer struct {
	name    string
	address string
	ill     atomic.Bool
	server  *httptest.Server
}

func startNamed(t *testing.T, name string) *namedServer {
	s := &namedServer{name: name}
	s.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("x-served-by", s.name)
		if r.URL.Path == "/health" && s.ill.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprintf(w, `{"server":%q}`, s.name)
	}))
	t.Cleanup(s.server.Close)
	s.address = s.server.Listener.Addr().String()
	return s
}

// served posts a completion and returns the name of the server that answered; empty for a status other than 200.
func served(t *testing.T, url, host string) (by string, status int) {
	t.Helper()
	req, err := http.NewRequestWithContext(
		t.Context(),
		"POST",
		url+"/v1/completions",
		strings.NewReader(fmt.Sprintf(`{"model":%q,"prompt":"one two three"}`, stack.Model)),
	)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	a, err := stack.Do(http.DefaultClient, req)
	if err != nil {
		t.Fatal(err)
	}
	if a.Status != http.StatusOK {
		return "", a.Status
	}
	return a.Header.Get("x-served-by"), a.Status
}

// checkFast shortens the intervals of the health checks in an Envoy's configuration.
func checkFast(config any) {
	for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
		if check, ok := stack.At(c, "health_checks", 0).(map[string]any); ok {
			check["interval"], check["no_traffic_interval"] = "0.2s", "0.2s"
		}
	}
}

// TestFailOpen: with fail-open.yaml, Envoy follows kvepp while it runs. Without kvepp, healthy endpoints answer every
// request. Without a healthy endpoint, Envoy answers.
func TestFailOpen(t *testing.T) {
	a, b, ill := startNamed(t, "a"), startNamed(t, "b"), startNamed(t, "ill")
	ill.ill.Store(true)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: []string{a.address, b.address, ill.address}, Manifest: "fail-open.yaml",
			// This shortens the test.
			KveppFlags: []string{"--router-kv-events=false", "--engine=vllm"}, EditEnvoy: checkFast},
	)
	if err := s.ReplaceEndpoints(fmt.Sprintf("endpoints:\n- {name: b, address: '%s'}\n", b.address)); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if metric(t, s, "kvepp_workers") != 1 {
			return fmt.Errorf("kvepp has not read the endpoints file yet")
		}
		return nil
	})
	for range 6 {
		if by, status := served(t, s.Envoy.URL, ""); by != "b" {
			t.Errorf("kvepp knows b alone, and %q has answered, %d", by, status)
		}
	}
	for round := range 2 {
		if round == 0 {
			s.KillKvepp()
			failed := 0
			for by := ""; by == ""; failed++ {
				by, _ = served(t, s.Envoy.URL, "")
			}
			if failed > 5 { // about one; with health checks alone it would be dozens
				t.Errorf("%d requests failed after kvepp was killed", failed-1)
			}
			eventually(t, func() error { return s.Envoy.SeesKvepp(t.Context(), false) })
		} else { // so that the responses show that Envoy does not follow kvepp's choice
			a.ill.Store(true)
			b.ill.Store(true)
			ill.ill.Store(false)
		}
		want := map[int]map[string]bool{0: {"a": true, "b": true}, 1: {"ill": true}}[round]
		eventually(t, func() error { // wait for the pool's health checks
			for range 12 {
				if by, _ := served(t, s.Envoy.URL, ""); !want[by] {
					return fmt.Errorf("answered by %q", by)
				}
			}
			return nil
		})
		var mu sync.Mutex
		var wait sync.WaitGroup
		counts := map[string]int{}
		for range 8 {
			wait.Go(func() {
				for range 5 {
					by, status := served(t, s.Envoy.URL, "")
					mu.Lock()
					counts[by]++
					if !want[by] {
						t.Errorf("without kvepp, round %d: answered by %q, %d", round, by, status)
					}
					mu.Unlock()
				}
			})
		}
		if wait.Wait(); len(counts) != len(want) {
			t.Errorf("without kvepp, round %d: requests went to %v, want %v", round, counts, want)
		}
	}
	ill.ill.Store(true)
	eventually(t, func() error { // no endpoint is healthy, so none gets requests
		if by, status := served(t, s.Envoy.URL, ""); status != http.StatusServiceUnavailable {
			return fmt.Errorf("answered by %q, %d", by, status)
		}
		return nil
	})
	if err := s.StartKvepp(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return s.Envoy.SeesKvepp(t.Context(), true) })
	eventually(t, func() error {
		if by, status := served(t, s.Envoy.URL, ""); by != "b" {
			return fmt.Errorf("kvepp is back, and %q has answered, %d", by, status)
		}
		return nil
	})
}

// TestTwoPools: two-pools.yaml sends requests to the pool of their host, and calls that pool's kvepp. If one kvepp is
// away, the other pool's requests are still answered.
func TestTwoPools(t *testing.T) {
	first, second := startNamed(t, "first"), startNamed(t, "second")
	one := start(
		t,
		stack.Config{Workers: -1, Servers: []string{first.address}, KveppFlags: []string{"--router-kv-events=false"}},
	)
	two := start(
		t,
		stack.Config{Workers: -1, Servers: []string{second.address}, KveppFlags: []string{"--router-kv-events=false"}},
	)
	at := func(address string) any {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(port)
		if err != nil {
			t.Fatal(err)
		}
		return []any{
			map[string]any{
				"endpoint": map[string]any{
					"address": map[string]any{"socket_address": map[string]any{"address": host, "port_value": n}},
				},
			},
		}
	}
	envoy, err := one.StartEnvoyOf(t.Context(), "two-pools.yaml", func(config any) {
		for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
			for name, address := range map[string]string{"pool-2": second.address, "kvepp-2": two.ExtProc()} {
				if stack.At(c, "name") == name {
					stack.At(c, "load_assignment", "endpoints", 0).(map[string]any)["lb_endpoints"] = at(address)
				}
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	hosts := map[string]string{
		"chat.example":       "first",
		"code.example":       "second",
		"code.example:10080": "second",
		"":                   "first",
	}
	for host, want := range hosts {
		eventually(t, func() error { // the stack waited only for the first kvepp
			if by, status := served(t, envoy.URL, host); by != want {
				return fmt.Errorf("host %q: answered by %q, %d", host, by, status)
			}
			return nil
		})
	}
	decided := func(s *stack.Stack) float64 { return metric(t, s, `kvepp_selections_total{role="aggregated"}`) }
	before := [2]float64{decided(one), decided(two)}
	for host, want := range hosts {
		for range 3 {
			if by, status := served(t, envoy.URL, host); by != want {
				t.Errorf("host %q: answered by %q, %d", host, by, status)
			}
		}
	}
	if a, b := decided(one)-before[0], decided(two)-before[1]; a != 6 || b != 6 {
		t.Errorf("the kvepps have decided %v and %v times, want 6 and 6", a, b)
	}
	two.KillKvepp()
	eventually(t, func() error {
		if by, status := served(t, envoy.URL, "code.example"); status != http.StatusServiceUnavailable {
			return fmt.Errorf("answered by %q, %d", by, status)
		}
		return nil
	})
	if by, status := served(t, envoy.URL, "chat.example"); by != "first" {
		t.Errorf("the other pool: answered by %q, %d", by, status)
	}
}

// TestLongSilence: Envoy waits for an engine that is silent for long, before and during its response, although it waits
// only briefly for kvepp's messages here. The idle timeout of the configuration ends the stream.
func TestLongSilence(t *testing.T) {
	const silence = 3 * time.Second
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/health" {
			return
		}
		<-time.After(silence)
		w.Header().Set("content-type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
		http.NewResponseController(w).Flush()
		<-time.After(silence)
		fmt.Fprint(w, "data: [DONE]\n\n")
	}))
	t.Cleanup(server.Close)
	certificates := t.TempDir()
	newAuthority(t).issue(t, certificates, 1, "kvepp")
	s := start(
		t,
		stack.Config{Workers: -1, Servers: []string{server.Listener.Addr().String()}, Certificates: certificates,
			KveppFlags: []string{
				"--router-kv-events=false",
				"--engine=vllm",
				"--cert-path=" + certificates,
				"--tls-client-ca=" + filepath.Join(certificates, "ca.crt"),
			},
			EditEnvoy: withClientCertificate(certificates)},
	)
	var wait sync.WaitGroup
	ask := func(name string, lives bool, edit func(connections map[string]any)) {
		envoy, err := s.StartEnvoyEdited(t.Context(), name, edit)
		if err != nil {
			t.Fatal(name, err)
		}
		wait.Go(func() {
			a, err := stack.Post(
				t.Context(),
				http.DefaultClient,
				envoy.URL+"/v1/completions",
				nil,
				map[string]any{"model": stack.Model, "prompt": "one", "stream": true},
			)
			if whole := err == nil && a.Status == http.StatusOK &&
				strings.HasSuffix(a.Body, "[DONE]\n\n"); whole != lives {
				t.Errorf("%s: complete response: %v, want %v (%+v, %v)", name, whole, lives, a, err)
			}
		})
	}
	impatient := func(connections map[string]any) {
		stack.At(connections, "http_filters", 0, "typed_config").(map[string]any)["message_timeout"] = "1s"
	}
	for _, file := range manifestFiles(t) {
		ask(filepath.Base(file), true, impatient)
	}
	ask("override-host.yaml", false, func(connections map[string]any) {
		connections["stream_idle_timeout"] = "1s"
		delete(
			stack.At(connections, "route_config", "virtual_hosts", 0, "routes", 0, "route").(map[string]any),
			"idle_timeout",
		)
	})
	wait.Wait()
}

// manifestFiles are Envoy's configurations in which kvepp chooses. In shadow.yaml it only observes.
func manifestFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../manifests/envoy/*.yaml")
	files = slices.DeleteFunc(files, func(f string) bool { return filepath.Base(f) == "shadow.yaml" })
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	return files
}

// TestManifestsAgree: each of Envoy's configurations needs time for silent responses, routing headers that no client
// can send, upgrades, and health checks of kvepp.
func TestManifestsAgree(t *testing.T) {
	var stripped, responses any // the first file's
	for _, file := range manifestFiles(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var config any
		if err := yaml.Unmarshal(text, &config); err != nil {
			t.Fatal(file, err)
		}
		manager := stack.At(
			config,
			"static_resources",
			"listeners",
			0,
			"filter_chains",
			0,
			"filters",
			0,
			"typed_config",
		)
		silence := func(what string, v any) {
			text, _ := v.(string)
			if d, err := time.ParseDuration(text); err != nil || d < time.Hour {
				t.Errorf("%s: %s is %v; a silent response must be allowed for an hour", file, what, v)
			}
		}
		silence("stream_idle_timeout", stack.At(manager, "stream_idle_timeout"))
		hosts := stack.At(manager, "route_config", "virtual_hosts").([]any)
		for _, host := range hosts {
			for _, r := range stack.At(host, "routes").([]any) {
				route := stack.At(r, "route").(map[string]any)
				if silence("idle_timeout", route["idle_timeout"]); route["timeout"] != "0s" {
					t.Errorf("%s: route %v", file, route)
				}
				if several := stack.At(r, "match", "headers",
					0, "name") == "x-gateway-destination-endpoint"; several != (route["retry_policy"] != nil) {
					t.Errorf(
						"%s: route %v: a retry_policy is safe only where kvepp named several endpoints",
						file,
						route,
					)
				}
			}
		}
		processor := stack.At(manager, "http_filters", 0, "typed_config")
		if stack.At(processor, "grpc_service", "timeout") != "0s" ||
			stack.At(manager, "upgrade_configs", 0, "upgrade_type") != "websocket" {
			t.Errorf("%s: the processor's streams end by time, or WebSockets do not pass", file)
		}
		if got := fmt.Sprint(stack.At(processor,
			"response_attributes")); got != "[response.code_details response.flags upstream.request_attempt_count]" {
			t.Errorf("%s: response_attributes %s: kvepp cannot tell Envoy's own responses from an engine's", file, got)
		}
		var forPeople []any // access logs for people; the others go to each kvepp, see extproc/accesslog.go
		told := map[any]bool{}
		for _, log := range stack.At(manager, "access_log").([]any) {
			if stack.At(log, "name") == "envoy.access_loggers.http_grpc" {
				told[stack.At(log, "typed_config", "common_config", "grpc_service", "envoy_grpc",
					"cluster_name")] = true
			} else {
				forPeople = append(forPeople, log)
			}
		}
		for _, cluster := range stack.At(config, "static_resources", "clusters").([]any) {
			if name, _ := stack.At(cluster, "name").(string); strings.HasPrefix(name, "kvepp") && !told[name] {
				t.Errorf("%s: no access log tells %s which side broke off a response", file, name)
			}
		}
		if got := fmt.Sprint(stack.At(processor, "grpc_service",
			"initial_metadata")); got != "[map[key:x-kvepp-access-log value:on]]" {
			t.Errorf("%s: initial_metadata %s does not tell kvepp of its access log", file, got)
		}
		own := fmt.Sprint(stack.At(manager, "local_reply_config"), forPeople)
		if responses == nil {
			responses = own
		}
		if own != responses || stack.At(manager, "local_reply_config") == nil ||
			stack.At(manager, "access_log") == nil {
			t.Errorf("%s: local_reply_config and access_log are not those of %s", file, manifestFiles(t)[0])
		}
		removed := fmt.Sprint(stack.At(manager, "early_header_mutation_extensions"))
		if stripped == nil {
			stripped = removed
		}
		if removed != stripped || !strings.Contains(removed, "x-gateway-destination-endpoint") {
			t.Errorf("%s: removes %v of clients' headers, but %s %v", file, removed, manifestFiles(t)[0], stripped)
		}
		for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
			name := stack.At(c, "name").(string)
			if !strings.HasPrefix(name, "kvepp") {
				continue
			}
			if stack.At(c, "health_checks", 0, "grpc_health_check") == nil ||
				stack.At(c, "common_lb_config", "healthy_panic_threshold", "value") != 0 {
				t.Errorf("%s: cluster %s has no health check, or gets requests while unhealthy", file, name)
			}
			if stack.At(c, "common_lb_config", "update_merge_window") != "0s" {
				t.Errorf("%s: cluster %s gets requests only some time after it is healthy", file, name)
			}
		}
	}
}
