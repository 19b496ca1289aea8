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

	"kvepp/e2e/stack"
)

// cluster returns one of the clusters of an Envoy's configuration.
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
		text, _, err := s.Logs("")
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

// answering starts a server that answers every request, with its address in the header x-server, and returns that address.
func answering(t *testing.T) string {
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

// TestProxyTLSMismatch: kvepp logs its first proxy, and one whose TLS setting is not its own, in either direction.
func TestProxyTLSMismatch(t *testing.T) {
	for _, c := range []struct {
		name, flag, cause, advice, tls string
		proxySpeaksTLS                 bool
	}{
		{"kvepp speaks TLS and Envoy does not", "--secure-serving=true", "plaintext", "--secure-serving=false", `tls="TLS 1.2"`, false},
		{"Envoy speaks TLS and kvepp does not", "--secure-serving=false", "tls_is_off", "transport_socket", "tls=off", true},
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
			s := start(t, stack.Config{Workers: -1, Servers: []string{answering(t)}, KveppFlags: []string{c.flag, "--router-kv-events=false"},
				EditEnvoy: func(config any) { edit(config) }})
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
			go func() { // it never finds kvepp healthy
				_, err := s.StartEnvoy(ctx, "override-host.yaml", nil)
				started <- err
			}()
			logLine(t, s, "a proxy cannot connect", "level=WARN", "cause="+c.cause, c.advice, "address=127.0.0.1:")
			eventually(t, func() error {
				if n := metric(t, s, fmt.Sprintf("kvepp_tls_handshake_failures_total{cause=%q}", c.cause)); n < 1 {
					return errors.New("no failure is counted")
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

// TestServedElsewhere: of the first request that an endpoint served in the place of the chosen one, kvepp warns with both addresses and
// what to change. The response and the decision's record name the worker that served.
func TestServedElsewhere(t *testing.T) {
	known := []string{answering(t), answering(t)}
	unknown := answering(t)
	s := start(t, stack.Config{Workers: -1, Servers: known, KveppFlags: []string{"--router-kv-events=false", "--engine=vllm"}})
	names := map[string]string{known[0]: "server-0/0", known[1]: "server-1/0", unknown: "unknown (" + unknown + ")"}
	for _, c := range []struct {
		name    string
		cluster string // the only endpoint that Envoy's cluster has
		outcome string
		cause   string
	}{
		{"an endpoint that Envoy's cluster does not have", known[1], "moved", "the proxy's cluster does not have the chosen address"},
		{"an endpoint that kvepp does not know", unknown, "unknown", "kvepp has none at the address that served"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", func(config any) {
				host, port, err := net.SplitHostPort(c.cluster)
				if err != nil {
					t.Fatal(err)
				}
				socket := map[string]any{"address": host, "port_value": json.Number(port)}
				stack.At(cluster(t, config, "pool"), "load_assignment", "endpoints", 0).(map[string]any)["lb_endpoints"] =
					[]any{map[string]any{"endpoint": map[string]any{"address": map[string]any{"socket_address": socket}}}}
			})
			if err != nil {
				t.Fatal(err)
			}
			elsewhere := map[string]int{}
			for elsewhere[known[0]] < 3 {
				a, err := stack.Chat(t.Context(), http.DefaultClient, e.URL, nil, novel(), false, nil)
				if err != nil || a.Status != http.StatusOK || a.Header.Get("x-server") != c.cluster {
					t.Fatalf("%v: %+v", err, a)
				}
				if a.Worker != names[c.cluster] {
					t.Errorf("x-kvepp-worker is %q, and %q served", a.Worker, names[c.cluster])
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
				if known := strings.TrimPrefix(names[c.cluster], "unknown ("+c.cluster+")"); served != c.cluster || worker != known || outcome != want {
					t.Errorf("the record says that %q at %s served, %s; it was %q at %s, %s", worker, served, outcome, known, c.cluster, want)
				}
				if want != "as_chosen" {
					elsewhere[d.Worker.Address]++
				}
			}
			for chosen := range elsewhere { // three requests, and one warning
				logLine(t, s, "a request was served by another endpoint than kvepp chose", "level=WARN", "chosen="+chosen, "served="+c.cluster, "outcome="+c.outcome, c.cause)
			}
		})
	}
}
