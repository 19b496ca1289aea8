package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// cluster returns a cluster of an Envoy's configuration.
func cluster(t *testing.T, config any, name string) map[string]any {
	t.Helper()
	for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
		if stack.At(c, "name") == name {
			return c.(map[string]any)
		}
	}
	t.Fatalf("no cluster %q", name)
	return nil
}

// logLine waits until kvepp has logged a line with all of these parts, and returns it. It fails if there are several.
func logLine(t *testing.T, s *stack.Stack, parts ...string) string {
	t.Helper()
	var found []string
	eventually(t, func() error {
		text, err := s.Log()
		if err != nil {
			return err
		}
		found = slices.DeleteFunc(slices.Collect(strings.Lines(text)), func(line string) bool {
			return slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
		})
		if len(found) == 0 {
			return fmt.Errorf("no log line has %q", parts)
		}
		return nil
	})
	if len(found) > 1 {
		t.Errorf("%d log lines have %q:\n%s", len(found), parts, strings.Join(found, ""))
	}
	return found[0]
}

// responding starts a server that answers every request, with its address in the header x-server. It returns that
// address.
func responding(t *testing.T) string {
	t.Helper()
	var server *httptest.Server
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("content-type", "application/json")
		w.Header().Set("x-server", server.Listener.Addr().String())
		fmt.Fprint(w, `{"choices":[{"text":"ok"}]}`)
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// TestProxyTLSMismatch: kvepp logs its first proxy, and a proxy whose TLS setting differs from its own, in either
// direction.
func TestProxyTLSMismatch(t *testing.T) {
	for _, c := range []struct {
		name, flag, cause, advice, tls string
		proxySpeaksTLS                 bool
	}{
		{"kvepp speaks TLS and Envoy does not", "--secure-serving=true", "plaintext", "--secure-serving=false",
			`tls="TLS 1.2"`, false},
		{"Envoy speaks TLS and kvepp does not", "--secure-serving=false", "tls_is_off", "transport_socket", "tls=off",
			true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var speaksTLS any // Envoy's transport socket for kvepp, from the manifest
			matches := func(config any) {
				kvepp := cluster(t, config, "kvepp")
				if speaksTLS = maps.Clone(kvepp)["transport_socket"]; c.proxySpeaksTLS {
					delete(kvepp, "transport_socket")
				}
			}
			edit := matches
			s := start(
				t,
				stack.Config{
					Workers:    -1,
					Servers:    []string{responding(t)},
					KveppFlags: []string{c.flag, "--router-kv-events=false"},
					EditEnvoy:  func(config any) { edit(config) },
				},
			)
			logLine(t, s, "a proxy connected for the first time", "level=INFO", "address=127.0.0.1:", c.tls)

			edit = func(config any) {
				if kvepp := cluster(t, config, "kvepp"); c.proxySpeaksTLS {
					kvepp["transport_socket"] = speaksTLS
				} else {
					delete(kvepp, "transport_socket")
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			started := make(chan error, 1)
			go func() { // Envoy never finds kvepp healthy
				_, err := s.StartEnvoy(ctx, "override-host.yaml", nil)
				started <- err
			}()
			logLine(t, s, "a proxy cannot connect", "level=WARN", "cause="+c.cause, c.advice, "address=127.0.0.1:")
			eventually(t, func() error {
				if n := metric(t, s, fmt.Sprintf("kvepp_tls_handshake_failures_total{cause=%q}", c.cause)); n < 1 {
					return errors.New("the metric counts no failure")
				}
				return nil
			})
			cancel()
			if err := <-started; !errors.Is(err, context.Canceled) {
				t.Errorf("the mismatched Envoy: %v", err)
			}
		})
	}
}

// TestServedElsewhere: when an endpoint other than the chosen one serves a request for the first time, kvepp logs a
// warning with both addresses and the fix. The response and the decision's record name the worker that served.
func TestServedElsewhere(t *testing.T) {
	known := []string{responding(t), responding(t)}
	unknown := responding(t)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: known, KveppFlags: []string{"--router-kv-events=false", "--engine=vllm"}},
	)
	names := map[string]string{known[0]: "server-0/0", known[1]: "server-1/0", unknown: "unknown (" + unknown + ")"}
	for _, c := range []struct {
		name    string
		cluster string // the only endpoint that Envoy's cluster has
		outcome string
		cause   string
	}{
		{"an endpoint that Envoy's cluster does not have", known[1], "moved",
			"the proxy's cluster does not have the chosen address"},
		{"an endpoint that kvepp does not know", unknown, "unknown", "kvepp has none at the address that answered"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", func(config any) {
				host, port, err := net.SplitHostPort(c.cluster)
				if err != nil {
					t.Fatal(err)
				}
				socket := map[string]any{"address": host, "port_value": json.Number(port)}
				stack.At(cluster(t, config, "pool"), "load_assignment", "endpoints",
					0).(map[string]any)["lb_endpoints"] =
					[]any{
						map[string]any{"endpoint": map[string]any{"address": map[string]any{"socket_address": socket}}},
					}
			})
			if err != nil {
				t.Fatal(err)
			}
			elsewhere := map[string]int{}
			for elsewhere[known[0]] < 3 {
				a := chatAt(t, e.URL)
				if got := a.Header.Get("x-server"); got != c.cluster {
					t.Fatalf("%s served, but it is not in Envoy's cluster", got)
				}
				if a.Worker != names[c.cluster] {
					t.Errorf("x-kvepp-worker is %q, but %q served", a.Worker, names[c.cluster])
				}
				d, err := s.Decision(t.Context(), a.Header.Get("x-kvepp-request-id"))
				if err != nil {
					t.Fatal(err)
				}
				served, worker, outcome := d.Served.Address, d.Served.Worker, d.Served.Outcome
				want := c.outcome
				if d.Worker.Address == c.cluster {
					want = "as_chosen"
				} else if got := a.Header.Get("x-kvepp-chosen-worker"); got != names[d.Worker.Address] {
					t.Errorf("x-kvepp-chosen-worker is %q, want %q", got, names[d.Worker.Address])
				}
				if known := strings.TrimPrefix(names[c.cluster], "unknown ("+c.cluster+")"); served != c.cluster ||
					worker != known ||
					outcome != want {
					t.Errorf(
						"the record says that %q at %s served, %s; it was %q at %s, %s",
						worker,
						served,
						outcome,
						known,
						c.cluster,
						want,
					)
				}
				if want != "as_chosen" {
					elsewhere[d.Worker.Address]++
				}
			}
			for chosen := range elsewhere { // three requests, and one warning
				logLine(
					t,
					s,
					"an endpoint that kvepp did not choose answered a request",
					"level=WARN",
					"chosen="+chosen,
					"served="+c.cluster,
					"outcome="+c.outcome,
					c.cause,
				)
			}
		})
	}
}

// TestHostNames: kvepp's choice is served for endpoints with host names, if Envoy's cluster is of type STRICT_DNS and
// has the same names.
func TestHostNames(t *testing.T) {
	servers := []string{responding(t), responding(t)}
	named := map[string]string{} // by name of the worker: the address of its server
	var list strings.Builder
	list.WriteString("endpoints:\n")
	var endpoints []any
	for i, address := range servers {
		_, port, err := net.SplitHostPort(address)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&list, "- {name: named-%d, address: \"localhost:%s\", model: %s}\n", i, port, stack.Model)
		named[fmt.Sprintf("named-%d/0", i)] = address
		socket := map[string]any{"address": "localhost", "port_value": json.Number(port)}
		endpoints = append(
			endpoints,
			map[string]any{"endpoint": map[string]any{"address": map[string]any{"socket_address": socket}}},
		)
	}
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    servers,
			KveppFlags: []string{"--router-kv-events=false", "--engine=vllm", "--dns-lookup-family=v4_only"},
			EditEnvoy: func(config any) {
				pool := cluster(t, config, "pool")
				pool["type"], pool["dns_lookup_family"] = "STRICT_DNS", "V4_ONLY"
				stack.At(pool, "load_assignment", "endpoints", 0).(map[string]any)["lb_endpoints"] = endpoints
			},
		},
	)
	if err := s.ReplaceEndpoints(list.String() +
		"- {name: nowhere, address: \"no-such-host.invalid:1\"}\n"); err != nil {
		t.Fatal(err)
	}
	logLine(t, s, "worker joined", "worker=named-0/0", "address="+named["named-0/0"])
	logLine(t, s, "worker joined", "worker=named-1/0", "address="+named["named-1/0"])
	logLine(t, s, "resolved the host name of an endpoint", "name=localhost", "address=127.0.0.1")
	logLine(
		t,
		s,
		"cannot resolve the host name of an endpoint",
		"level=WARN",
		"name=no-such-host.invalid",
		"address=none",
	)
	served := map[string]bool{}
	for range 200 {
		a := chatAt(t, s.Envoy.URL)
		if a.Header.Get("x-server") != named[a.Worker] {
			t.Fatalf(
				"kvepp chose %s at %q, but %s served",
				a.Worker,
				named[a.Worker],
				a.Header.Get("x-server"),
			)
		}
		if served[a.Worker] = true; len(served) == len(servers) {
			break
		}
	}
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(served) != len(servers) || m[`kvepp_served_total{outcome="as_chosen"}`] == 0 ||
		m[`kvepp_served_total{outcome="moved"}`] != 0 ||
		m[`kvepp_served_total{outcome="unknown"}`] != 0 {
		t.Errorf(
			"served by %v: %v as chosen, %v moved, %v unknown",
			served,
			m[`kvepp_served_total{outcome="as_chosen"}`],
			m[`kvepp_served_total{outcome="moved"}`],
			m[`kvepp_served_total{outcome="unknown"}`],
		)
	}
	if m["kvepp_unresolved_host_names"] != 1 || m["kvepp_workers"] != 2 {
		t.Errorf(
			"%v names are unresolved, and there are %v workers",
			m["kvepp_unresolved_host_names"],
			m["kvepp_workers"],
		)
	}
}

// chatAt sends a new chat, which must get status 200.
func chatAt(t *testing.T, url string) *stack.Response {
	t.Helper()
	a, err := stack.Chat(t.Context(), http.DefaultClient, url, nil, novel(), false, nil)
	if err != nil || a.Status != http.StatusOK {
		t.Fatalf("%v: %+v", err, a)
	}
	return a
}

// TestUnusedModel: after 100 requests kvepp logs one warning for a configured model that no request named, with the
// names in requests and at workers.
func TestUnusedModel(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers: -1,
			Servers: []string{responding(t)},
			KveppFlags: []string{"--router-kv-events=false", "--engine=vllm",
				"--model=Tiny=models/tiny-bytelevel", "--lora=sql=" + stack.Model},
		},
	)
	for range 150 {
		chatAt(t, s.Envoy.URL)
	}
	for _, unused := range []string{"Tiny", "sql"} {
		logLine(
			t,
			s,
			"no request has named a model of kvepp's flags",
			"level=WARN",
			"model="+unused+" ",
			"requests=100",
			`requested="\"tiny\": 100"`,
			"workers_serve=tiny",
		)
	}
	if text, err := s.Log(); err != nil || strings.Count(text, "no request has named a model") != 2 {
		t.Errorf("want two lines (%v):\n%s", err, text)
	}
}
