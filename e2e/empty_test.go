package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"kvepp/test/harness/stack"
)

// noBytes is an empty body without a declared length.
type noBytes struct{}

func (noBytes) Read([]byte) (int, error) { return 0, io.EOF }
func (noBytes) Close() error             { return nil }

// TestEmptyBody: through Envoy, a POST without a body on a path whose bodies kvepp reads gets 400 in OpenAI's shape,
// for each way in which a client can send no body. Other methods and other paths are routed.
func TestEmptyBody(t *testing.T) {
	var served atomic.Int32 // requests with the tested method; kvepp itself asks engines by GET, at any time
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			served.Add(1)
		}
		fmt.Fprint(w, `{"object":"list"}`)
	}))
	t.Cleanup(upstream.Close)
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    []string{upstream.Listener.Addr().String()},
			KveppFlags: []string{"--router-kv-events=false", "--engine=vllm"},
		},
	)
	envoys := map[string]*stack.Envoy{"FULL_DUPLEX_STREAMED": s.Envoy}
	for _, mode := range []string{"BUFFERED", "BUFFERED_PARTIAL"} {
		envoy, err := s.StartEnvoy(t.Context(), "override-host.yaml", func(extProc map[string]any) {
			extProc["processing_mode"] = map[string]any{
				"request_header_mode":   "SEND",
				"response_header_mode":  "SEND",
				"request_body_mode":     mode,
				"response_body_mode":    mode,
				"request_trailer_mode":  "SEND",
				"response_trailer_mode": "SEND",
			}
		})
		if err != nil {
			t.Fatal(mode, err)
		}
		envoys[mode] = envoy
	}
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h2.CloseIdleConnections()

	// over sends a request without a body over a new connection, as written here.
	over := func(head string) func(*stack.Envoy, string, string) (*http.Response, error) {
		return func(envoy *stack.Envoy, method, path string) (*http.Response, error) {
			conn, err := net.Dial("tcp", strings.TrimPrefix(envoy.URL, "http://"))
			if err != nil {
				return nil, err
			}
			t.Cleanup(func() { conn.Close() })
			fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s", method, path, head)
			return http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
		}
	}
	by := func(client *http.Transport, length int64, body io.ReadCloser, trailer http.Header) func(*stack.Envoy, string,
		string) (*http.Response, error) {
		return func(envoy *stack.Envoy, method, path string) (*http.Response, error) {
			req, err := http.NewRequestWithContext(t.Context(), method, envoy.URL+path, nil)
			if err != nil {
				return nil, err
			}
			req.Body, req.ContentLength, req.Trailer = body, length, trailer
			return client.RoundTrip(req)
		}
	}
	ways := map[string]func(*stack.Envoy, string, string) (*http.Response, error){
		"content-length: 0":             over("content-length: 0\r\n\r\n"),
		"an empty chunked body":         over("transfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
		"neither length nor encoding":   over("\r\n"),
		"HTTP/2 headers that end":       by(h2, 0, http.NoBody, nil),
		"HTTP/2 with an empty DATA":     by(h2, -1, noBytes{}, nil),
		"HTTP/2 headers, then trailers": by(h2, -1, noBytes{}, http.Header{"X-Sum": {"0"}}),
	}
	for mode, envoy := range envoys {
		for way, send := range ways {
			for _, path := range []string{"/v1/chat/completions", "/v1/completions?x=1", "/v1/responses",
				"/v1/messages"} {
				before := served.Load()
				resp, err := send(envoy, "POST", path)
				if err != nil {
					t.Errorf("%s, %s, POST %s: %v", mode, way, path, err)
					continue
				}
				text, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				var response struct {
					Error struct{ Message, Type, Code string }
				}
				if err == nil {
					err = json.Unmarshal(text, &response)
				}
				if err != nil || resp.StatusCode != http.StatusBadRequest ||
					resp.Header.Get("content-type") != "application/json" ||
					resp.Header.Get("x-kvepp-reason") != "invalid_json" ||
					response.Error.Code != "invalid_json" ||
					response.Error.Type != "invalid_request_error" ||
					response.Error.Message != "The request body is empty: it must be a JSON object." {
					t.Errorf(
						"%s, %s, POST %s: %d %v %s (%v), want 400 in OpenAI's shape",
						mode,
						way,
						path,
						resp.StatusCode,
						resp.Header,
						text,
						err,
					)
				}
				if n := served.Load(); n != before {
					t.Errorf("%s, %s, POST %s: the engine got the request", mode, way, path)
				}
			}
			for _, other := range []struct{ method, path, reason string }{
				{"GET", "/v1/responses", "no_body"}, {"HEAD", "/v1/chat/completions", "no_body"},
				{"OPTIONS", "/v1/chat/completions", "no_body"},
				{"DELETE", "/v1/responses", "no_body"}, {"GET", "/v1/models", "no_body"},
				{"POST", "/v1/audio/speech", "no_body"},
			} {
				resp, err := send(envoy, other.method, other.path)
				if err != nil {
					t.Errorf("%s, %s, %s %s: %v", mode, way, other.method, other.path, err)
					continue
				}
				text, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				reason := resp.Header.Get("x-kvepp-reason")
				if resp.StatusCode != http.StatusOK || reason != other.reason && reason != "unknown_api" {
					t.Errorf(
						"%s, %s, %s %s: %d, reason %q, %s",
						mode,
						way,
						other.method,
						other.path,
						resp.StatusCode,
						reason,
						bytes.TrimSpace(text),
					)
				}
			}
		}
	}
	m, err := s.Metrics(t.Context())
	if want := float64(len(envoys) * len(ways) * 4); err != nil || m[`kvepp_requests_total{code="400"}`] != want {
		t.Errorf("%v requests are counted as 400 (%v), want %v", m[`kvepp_requests_total{code="400"}`], err, want)
	}
}
