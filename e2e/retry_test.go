package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// attempt is a request as one endpoint received it.
type attempt struct {
	body     []byte
	declared int64  // content-length; -1: none
	chosen   string // the endpoints in kvepp's header
	at       string // the endpoint
}

// TestRetryOfChangedBody: Envoy retries a request whose body kvepp changed at the next of kvepp's endpoints. The second
// attempt has the same body as the first, with the right length, if it has one.
func TestRetryOfChangedBody(t *testing.T) {
	var (
		mu       sync.Mutex
		attempts = map[string][]attempt{} // by request
	)
	var servers []string
	for range 2 {
		var server *httptest.Server
		server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			id := r.Header.Get("x-number")
			mu.Lock()
			attempts[id] = append(
				attempts[id],
				attempt{
					body,
					r.ContentLength,
					r.Header.Get("x-gateway-destination-endpoint"),
					server.Listener.Addr().String(),
				},
			)
			first := id != "" && len(attempts[id]) == 1
			mu.Unlock()
			switch {
			case first && strings.HasSuffix(id, "reset"):
				panic(http.ErrAbortHandler)
			case first:
				w.WriteHeader(http.StatusServiceUnavailable)
			default:
				fmt.Fprint(w, `{"choices":[{"text":"ok"}]}`)
			}
		}))
		server.Config.Protocols = new(http.Protocols)
		server.Config.Protocols.SetHTTP1(true)
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		server.Start()
		t.Cleanup(server.Close)
		servers = append(servers, server.Listener.Addr().String())
	}
	s := start(t, stack.Config{Workers: -1, Servers: servers,
		KveppFlags: []string{
			"--router-kv-events=false",
			"--engine=vllm",
			"--tenant-cache-salt",
			"--fallback-endpoints=1",
		}})
	retrying := func(connections map[string]any) {
		stack.At(connections, "route_config", "virtual_hosts", 0, "routes", 0,
			"route").(map[string]any)["retry_policy"] =
			map[string]any{
				"retry_on":    "5xx,reset",
				"num_retries": 1,
			}
	}
	mode := func(body string, http2 bool) *stack.Envoy {
		e, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", func(config any) {
			manager := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0,
				"typed_config").(map[string]any)
			retrying(manager)
			processor := stack.At(manager, "http_filters", 0, "typed_config").(map[string]any)
			if stack.At(processor, "processing_mode").(map[string]any)["request_body_mode"] = body; body == "BUFFERED" {
				processor["processing_mode"] = map[string]any{
					"request_header_mode":  "SEND",
					"response_header_mode": "SEND",
					"request_body_mode":    body,
					"response_body_mode":   "NONE",
				}
			}
			if http2 {
				http2Upstream(config)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	clients := stormClients(t)
	const salt = `"cache_salt":"dynamo-cache-salt:acme"`
	n := 0
	for _, body := range []string{"FULL_DUPLEX_STREAMED", "BUFFERED"} {
		for _, upstreams := range []bool{false, true} {
			envoy := mode(body, upstreams)
			if n == 0 { // a response shows kvepp that this Envoy takes several endpoints
				r, err := stack.Post(t.Context(), http.DefaultClient, envoy.URL+"/v1/models", nil, nil)
				if err != nil || r.Status != http.StatusOK {
					t.Fatal(err, r)
				}
			}
			for _, clients2 := range []bool{false, true} {
				for _, size := range []int{10, 30_000, 200_000} {
					for _, how := range []string{"503", "reset"} {
						n++
						id := fmt.Sprintf("%d-%s", n, how)
						what := fmt.Sprintf(
							"%s, HTTP/2 of the client %v, to the endpoint %v, %d bytes, %s",
							body,
							clients2,
							upstreams,
							size,
							how,
						)
						sent := fmt.Appendf(
							nil,
							`{"model":%q, "prompt":"%s", "x":1.0e+2}`,
							stack.Model,
							bytes.Repeat([]byte("brass "), size/6+1),
						)
						req, err := http.NewRequestWithContext(
							t.Context(),
							"POST",
							envoy.URL+"/v1/completions",
							bytes.NewReader(sent),
						)
						if err != nil {
							t.Fatal(err)
						}
						req.Header.Set("content-type", "application/json")
						req.Header.Set("x-tenant-id", "acme")
						req.Header.Set("x-number", id)
						if n%2 == 0 {
							req.ContentLength = -1
						}
						a, err := stack.Do(clients[clients2], req)
						if err != nil || a.Status != http.StatusOK {
							t.Errorf("%s: %v %+v", what, err, a)
							continue
						}
						mu.Lock()
						got := slices.Clone(attempts[id])
						mu.Unlock()
						if len(got) != 2 {
							t.Errorf("%s: %d attempts", what, len(got))
							continue
						}
						if got[0].at == got[1].at || got[0].chosen != got[0].at+","+got[1].at {
							t.Errorf(
								"%s: kvepp named %q, Envoy tried %s and %s",
								what,
								got[0].chosen,
								got[0].at,
								got[1].at,
							)
						}
						for i, x := range got {
							without := bytes.Replace(
								bytes.Replace(x.body, []byte(salt+","), nil, 1),
								[]byte(","+salt),
								nil,
								1,
							)
							if !bytes.Contains(x.body, []byte(salt)) || !bytes.Equal(without, sent) {
								t.Errorf(
									"%s: attempt %d had %d bytes, %.80q ... %.60q",
									what,
									i+1,
									len(x.body),
									x.body,
									x.body[max(0, len(x.body)-60):],
								)
							}
							if x.declared >= 0 && x.declared != int64(len(x.body)) ||
								x.declared < 0 && body == "BUFFERED" && n%2 == 1 {
								t.Errorf(
									"%s: attempt %d declares %d bytes and has %d",
									what,
									i+1,
									x.declared,
									len(x.body),
								)
							}
						}
					}
				}
			}
		}
	}
	allFreed(t, s)
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if moved := m[`kvepp_served_total{outcome="moved"}`]; moved != float64(n) {
		t.Errorf("the metric counts %v of %d requests as moved", moved, n)
	}
}
