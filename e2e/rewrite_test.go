package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestModelRewrite: a client sees only the model name that it sent, and the frontend only the name that it serves.
func TestModelRewrite(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers:    2,
			Speedup:    20,
			KveppFlags: []string{"--model-rewrite=public=" + stack.Model, "--strict-model"},
		},
	)
	post := func(path string, body map[string]any) (*http.Response, []byte) {
		t.Helper()
		sent, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.Post(s.Envoy.URL+path, "application/json", bytes.NewReader(sent))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		response, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, response
	}
	text := strings.Repeat("A long document about cranes. ", 60)
	worker := ""
	for turn, streams := range []bool{false, true, false, true} {
		resp, response := post(
			"/v1/chat/completions",
			map[string]any{"model": "public", "stream": streams, "max_tokens": 8,
				"messages": []any{map[string]any{"role": "user", "content": text}}},
		)
		if resp.StatusCode != http.StatusOK || resp.Header.Get("x-kvepp-reason") != "kv" {
			t.Fatalf(
				"turn %d: status %d, reason %q: %s",
				turn,
				resp.StatusCode,
				resp.Header.Get("x-kvepp-reason"),
				response,
			)
		}
		if worker == "" {
			worker = resp.Header.Get("x-kvepp-worker")
			eventually(t, func() error {
				if n := metric(t, s, "kvepp_index_blocks"); n == 0 {
					return fmt.Errorf("the index is empty")
				}
				return nil
			})
		}
		if got := resp.Header.Get("x-kvepp-worker"); got != worker {
			t.Errorf("turn %d went to %s, the first to %s", turn, got, worker)
		}
		events := 0
		for line := range strings.Lines(string(response)) {
			line = strings.TrimSpace(strings.TrimPrefix(line, "data:"))
			var event struct{ Model string }
			if !strings.HasPrefix(line, "{") {
				continue
			}
			if err := json.Unmarshal([]byte(line), &event); err != nil || event.Model != "public" {
				t.Errorf("turn %d: %q names %q (%v)", turn, line, event.Model, err)
			}
			events++
		}
		if events == 0 || streams && events < 3 {
			t.Errorf("turn %d: %d events in %s", turn, events, response)
		}
	}
	if n := metric(t, s, `inference_extension_model_rewrite_decisions_total{model_name="public",`+
		`model_rewrite_name="flag",target_model="`+stack.Model+`"}`); n != 4 {
		t.Errorf("the metric counts %v rewrites, want 4", n)
	}
	if resp, response := post("/v1/chat/completions",
		map[string]any{"model": "other",
			"messages": []any{map[string]any{"role": "user",
				"content": "x"}}}); resp.StatusCode != http.StatusNotFound {
		t.Errorf("a name without a rule: %d %s", resp.StatusCode, response)
	}
}
