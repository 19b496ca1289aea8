package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/router"
	"kvepp/serve/admin"
)

// TestExplainCommand: the command shows the decision that the request then gets, and its responses to bad bodies.
func TestExplainCommand(t *testing.T) {
	s := serveHere(t, threeWorkers, "--router-session-affinity-ttl-secs=600")
	s.store("w1", tokenIDs(1, 40))
	request := tokensRequest("", tokenIDs(1, 42), "")
	for _, c := range []struct {
		args, body string
		status     int
		want       []string // on stdout or stderr, in this order
	}{
		{"", string(request.Body), 0, []string{"model m, 42 prompt tokens, reason kv, blocks of 4 tokens\n",
			"=> w1/0 at 10.0.0.2:8000, 40 tokens cached\n", "w0/0", "0+0+0", "it costs 4 ms more", "w1/0",
			"10+0+0", "prompt 4.20", "cached -4.00", "chosen"}},
		{"--header=x-session-id:s1 --path=/v1/completions", string(request.Body), 0,
			[]string{"session new\n", "=> w1/0"}},
		{"--json", string(request.Body), 0, []string{`"predicted_cached_tokens":40`, `"would_wait":false`}},
		{"", `{"model":"other","prompt":[1,2]}`, 1, []string{"the request would get no worker: no endpoint serves"}},
		{"", `{"model":`, 1, []string{"the gateway would answer 400: "}},
		{"", "", 1, []string{"no body"}},
		{"--path=v1", "{}", 2, []string{"must begin with /"}},
		{"--header=x", "{}", 2, []string{"NAME: VALUE"}},
		{"body.json", "{}", 2, []string{`unexpected argument "body.json"`}},
	} {
		var out, errs bytes.Buffer
		args := append(strings.Fields(c.args), "--admin-address="+strings.TrimPrefix(s.web.URL, "http://"))
		status := runClient("explain", args, strings.NewReader(c.body), &out, &errs, func(string) string { return "" })
		rest := out.String() + errs.String()
		for _, want := range c.want {
			_, after, found := strings.Cut(rest, want)
			if !found {
				t.Errorf("%s < %s: %q is not in, or not in this order:\n%s%s", c.args, c.body, want, out.String(),
					errs.String())
			}
			rest = after
		}
		if status != c.status {
			t.Errorf("%s < %s: status %d", c.args, c.body, status)
		}
	}
	if n := len(s.router.Records(9, router.Query{})); n != 0 || s.book.Len() != 0 || s.sessions.Active() != 0 {
		t.Errorf("dry runs left %d records, %d bookings, %d sessions", n, s.book.Len(), s.sessions.Active())
	}
	route := s.route(request)
	defer route.Free()
	if route.Name != "w1" {
		t.Errorf("the request goes to %s", route.Name)
	}
}

// TestProbe: Dynamo's probe is answered in its shape, and refused with its codes.
func TestProbe(t *testing.T) {
	s := serveHere(t, threeWorkers, "--model", "m="+filepath.Join("..", "..", "test", "models", "tiny-bytelevel"))
	chat := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("what is cached? ", 20) + `"}]}`
	ask := func(body string, headers ...string) (status int, text string) {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, s.web.URL+"/v1/routing/probe", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		for i := 0; i < len(headers); i += 2 {
			if headers[i] != "" {
				req.Header.Set(headers[i], headers[i+1])
			}
		}
		resp, err := s.web.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(all)
	}
	status, text := ask(chat)
	var found struct {
		Model        string
		Instance     string `json:"epp_instance"`
		SampledAt    int64  `json:"sampled_at_unix_ms"`
		PromptTokens int    `json:"prompt_tokens"`
		BlockSize    int    `json:"block_size"`
		Candidate    struct {
			WorkerID string `json:"worker_id"`
			Cache    map[string]any
			Load     map[string]any
		}
		Pool map[string]any
	}
	if err := json.Unmarshal([]byte(text), &found); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	cache := fmt.Sprint(found.Candidate.Cache)
	want := fmt.Sprintf("map[cpu_prefix_tokens:<nil> disk_prefix_tokens:<nil> effective_prefill_tokens:%d "+
		"estimate_source:events gpu_prefix_tokens:0 predicted_cpu_inclusive_hit_rate:<nil> "+
		"predicted_disk_inclusive_hit_rate:<nil> predicted_gpu_hit_rate:0]", found.PromptTokens)
	load := fmt.Sprint(found.Candidate.Load)
	blocks := (found.PromptTokens + 3) / 4
	wantLoad := fmt.Sprintf("map[active_prefill_tokens:0 potential_decode_blocks:%d prefill_token_capacity:<nil> "+
		"total_kv_blocks:1000]", blocks)
	if status != http.StatusOK || found.Model != "m" || found.Instance != host || found.SampledAt == 0 ||
		found.PromptTokens < 20 || found.BlockSize != 4 || found.Candidate.WorkerID == "" || cache != want ||
		load != wantLoad || fmt.Sprint(found.Pool) != "map[pending_input_tokens:0 pending_requests:0]" {
		t.Errorf("%d %s\ncache %s\nwant  %s\nload %s\nwant %s", status, text, cache, want, load, wantLoad)
	}
	for _, c := range []struct {
		body, header, value string
		status              int
		code                string
	}{
		{`{"model":"other","messages":[{"role":"user","content":"x"}]}`, "", "", 400, "model_mismatch"},
		{"{", "", "", 400, "invalid_request"},
		{chat, "Content-Encoding", "gzip", 415, "unsupported_encoding"},
		{chat, "Content-Type", "text/plain", 415, "expected_json"},
		{strings.Repeat(" ", 2<<20) + chat, "", "", 413, "request_too_large"},
		{`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, "", "",
			422, "unsupported_probe_request"},
	} {
		status, text := ask(c.body, c.header, c.value)
		if status != c.status || strings.TrimSpace(text) != `{"error":{"code":"`+c.code+`"}}` {
			t.Errorf("%.60s, %s %s: %d %s, want %d %s", c.body, c.header, c.value, status, text, c.status, c.code)
		}
	}
	for _, path := range []string{"/pick", "/v1/routing/probe"} {
		req, err := http.NewRequest(http.MethodPost, s.web.URL+path, strings.NewReader(chat))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Origin", "http://evil.example")
		resp, err := s.web.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s from another origin: %s", path, resp.Status)
		}
	}
	var f admin.Fleet
	if s.get("/debug/fleet", &f); len(f.Workers) != 3 || f.Workers[0].BookedRequests != 0 {
		t.Errorf("probes booked: %+v", f.Workers)
	}
}
