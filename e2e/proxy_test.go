package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// answering starts a server that answers every request, and returns its address.
func answering(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("content-type", "application/json")
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
