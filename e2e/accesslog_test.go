package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestAccessLog: kvepp's access log has one line for each request through Envoy. The line has the request id of Envoy's
// own access log, and the values of the decision headers and of the engine's response.
func TestAccessLog(t *testing.T) {
	const secret = "Zyzzogeton"
	file := filepath.Join(t.TempDir(), "access.log")
	s := start(
		t,
		stack.Config{Workers: 2, Speedup: 20, KveppFlags: []string{"--access-log=" + file, "--log-format=json"}},
	)
	lines := 0
	// logged waits for the next line of the log, and checks that it is the request's.
	logged := func(id string) (line map[string]any) {
		t.Helper()
		lines++
		eventually(t, func() error {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(string(text), "\n"); n < lines {
				return fmt.Errorf("%s: %d lines, want %d", id, n, lines)
			}
			if strings.Contains(string(text), secret) {
				t.Errorf("a prompt is in the access log:\n%s", text)
			}
			line = nil
			return json.Unmarshal([]byte(strings.Split(string(text), "\n")[lines-1]), &line)
		})
		if line["request_id"] != id {
			t.Fatalf("the line after %s is %v", id, line)
		}
		eventually(t, func() error { // Envoy's line may come later
			of, err := s.Envoy.AccessLog(id)
			if err == nil && (len(of) != 1 || fmt.Sprint(of[0]["status"]) != fmt.Sprint(line["status"])) {
				err = fmt.Errorf("Envoy's access log has %v about %s", of, id)
			}
			return err
		})
		return line
	}
	messages := append(novel(), stack.Message{Role: "user", Content: secret + strings.Repeat(", the leafhopper", 30)})
	warmed := false
	for i := 0; !warmed; i++ {
		id := fmt.Sprintf("streamed-%d", i)
		a, err := stack.Chat(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL,
			http.Header{"X-Request-Id": {id}},
			messages,
			true,
			nil,
		)
		if err != nil || a.Status != http.StatusOK {
			t.Fatal(err, a)
		}
		line := logged(id)
		worker, rank, _ := strings.Cut(a.Worker, "/")
		for key, want := range map[string]any{"method": "POST", "path": "/v1/chat/completions", "model": stack.Model,
			"worker": worker, "dp_rank": rank, "reason": "kv", "status": 200,
			"prompt_tokens": a.PromptTokens, "predicted_cached_tokens": a.KveppCached,
			"reported_cached_tokens": a.CachedTokens, "output_tokens": a.CompletionTokens} {
			if fmt.Sprint(line[key]) != fmt.Sprint(want) {
				t.Errorf("%s: %s is %v, want %v", id, key, line[key], want)
			}
		}
		first, _ := line["time_to_first_token_seconds"].(float64)
		duration, _ := line["duration_seconds"].(float64)
		// kvepp reads the clock after it has forwarded a piece, so the client may get the piece earlier.
		if waited, ok := line["waited_seconds"].(float64); !ok || waited != 0 || !(0 < first && first <= duration) ||
			duration > 120 {
			t.Errorf(
				"%s: first token after %v, end after %v; the client saw the first after %v",
				id,
				first,
				duration,
				a.TTFT,
			)
		}
		if a.KveppPrompt != a.PromptTokens {
			t.Errorf("%s: %d prompt tokens, the engine has %d", id, a.KveppPrompt, a.PromptTokens)
		}
		if warmed = a.CachedTokens > 0 && a.KveppCached > 0; i == 50 {
			t.Fatal("no cached tokens after 50 requests with one prompt")
		}
	}

	post := func(id, path string, body any) map[string]any {
		t.Helper()
		if _, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+path, http.Header{"X-Request-Id": {id}},
			body); err != nil {
			t.Fatal(err)
		}
		return logged(id)
	}
	for _, c := range []struct {
		id, path string
		body     any
		want     string
	}{
		{"one-piece", "/v1/completions?key=" + secret, map[string]any{"model": stack.Model, "prompt": secret,
			"max_tokens": 3}, "200 kv tiny"},
		{"not-an-object", "/v1/completions", []int{1}, "400 invalid_type <nil>"},
		{"no-model", "/v1/chat/completions", map[string]any{"messages": messages},
			"400 missing_required_parameter <nil>"},
		{"another-model", "/v1/chat/completions", map[string]any{"model": "another", "messages": messages},
			"404 model_not_found another"},
	} {
		line := post(c.id, c.path, c.body)
		if got := fmt.Sprintf("%v %v %v", line["status"], line["reason"], line["model"]); got != c.want {
			t.Errorf("%s: %s, want %s: %v", c.id, got, c.want, line)
		}
		if line["time_to_first_token_seconds"] != nil {
			t.Errorf("%s: a non-streamed response has a time to first token: %v", c.id, line)
		}
	}

	// A client that closes its connection during its response.
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(
		ctx,
		"POST",
		s.Envoy.URL+"/v1/completions",
		strings.NewReader(`{"model":"tiny","prompt":"p","max_tokens":4000,"stream":true}`),
	)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("x-request-id", "away")
	req.Header.Set("content-type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	resp.Body.Close()
	if line := logged("away"); line["status"] != 200.0 || line["worker"] == nil {
		t.Errorf("a client that closed its connection: %v", line)
	}
	if err := s.ReplaceEndpoints("endpoints: []\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if n := metric(t, s, "kvepp_workers"); n != 0 {
			return fmt.Errorf("%v workers", n)
		}
		return nil
	})
	if line := post("unknown", "/v1/completions",
		map[string]any{"model": stack.Model, "prompt": "p"}); line["status"] != 503.0 ||
		line["reason"] != "no_endpoints" ||
		line["worker"] != nil {
		t.Errorf("without endpoints: %v", line)
	}
	if written, dropped := metric(t, s, `kvepp_access_log_lines_total{outcome="written"}`),
		metric(t, s, `kvepp_access_log_lines_total{outcome="dropped"}`); written != float64(
		lines,
	) ||
		dropped != 0 {
		t.Errorf("the metric counts %v written and %v dropped lines, want %d and 0", written, dropped, lines)
	}
}

// TestJSONLog: every line of kvepp's log is a JSON object, costs are objects in it, and durations are seconds.
func TestJSONLog(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Speedup: 20, KveppFlags: []string{"--log-format=json"}})
	a := chat(t, s.Envoy.URL, novel(), true, nil)
	var routed, loaded map[string]any
	eventually(t, func() error {
		log, err := s.Log()
		if err != nil {
			t.Fatal(err)
		}
		for text := range strings.Lines(log) {
			var line map[string]any
			if err := json.Unmarshal([]byte(text), &line); err != nil {
				return fmt.Errorf("%w in %q", err, text) // the line may be incomplete yet
			}
			switch line["msg"] {
			case "routed":
				routed = line
			case "model loaded":
				loaded = line
			}
		}
		if routed == nil || loaded == nil {
			return fmt.Errorf("no decision or model in\n%s", log)
		}
		return nil
	})
	if seconds, ok := loaded["took_seconds"].(float64); !ok || seconds <= 0 || seconds > 60 ||
		routed["waited_seconds"] != 0.0 {
		t.Errorf("durations: took_seconds %v, waited_seconds %v", loaded["took_seconds"], routed["waited_seconds"])
	}
	costs, _ := routed["costs"].(map[string]any)
	for _, worker := range []string{"worker-0/0", "worker-1/0"} {
		cost, _ := costs[worker].(map[string]any)
		if n, ok := cost["cost"].(float64); !ok || n <= 0 || cost["block_size"] != float64(stack.BlockSize) ||
			cost["active_requests"] != 0.0 {
			t.Errorf("the cost of %s is %v, in %v", worker, costs[worker], routed)
		}
	}
	if routed["request_id"] != a.Header.Get("x-kvepp-request-id") {
		t.Errorf("the decision is %v", routed)
	}
}

// TestAccessLogOnStdout: with "-" the lines go to standard output, as text if the log is text.
func TestAccessLogOnStdout(t *testing.T) {
	s := start(t, stack.Config{Workers: 1, Speedup: 20, KveppFlags: []string{"--access-log=-"}})
	a := chat(t, s.Envoy.URL, novel(), true, nil)
	want := regexp.MustCompile(
		`(?m)^time=\S+ level=INFO msg=request request_id=` + regexp.QuoteMeta(a.Header.Get("x-kvepp-request-id")) +
			` method=POST path=/v1/chat/completions model=tiny worker=worker-0 dp_rank=0 address=\S+ prompt_tokens=` +
			fmt.Sprint(a.PromptTokens) +
			` predicted_cached_tokens=\d+ reported_cached_tokens=\d+ output_tokens=8 waited_seconds=0 ` +
			`time_to_first_token_seconds=[0-9.e-]+ reason=kv status=200 duration_seconds=[0-9.e-]+$`,
	)
	eventually(t, func() error {
		log, err := s.Log()
		if err != nil {
			t.Fatal(err)
		}
		if !want.MatchString(log) {
			return fmt.Errorf("kvepp's output has no line like %s:\n%s", want, log)
		}
		return nil
	})
}
