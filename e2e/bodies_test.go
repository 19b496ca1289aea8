package e2e

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// secrets are values that clients send and logs must not contain, by their place in the request.
var secrets = map[string]string{
	"prompt":           "Zyzzogeton haenschi, the leafhopper",
	"a system prompt":  "Aardwolf Confidential",
	"authorization":    "sk-client-7f3a91",
	"query":            "key-in-query-55e1",
	"no JSON":          "Quokka unfinished",
	"tenant":           "tenant-of-the-okapi",
	"cookie":           "numbat-cookie",
	"a name of a pin":  "pangolin-pin",
	"the admin secret": "admin-ocelot-secret",
}

// TestTokenData: a frontend that gets the token ids does not tokenize, and answers like one that does. The log contains
// nothing of the request.
func TestTokenData(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(secrets["the admin secret"]), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(
		t,
		stack.Config{
			Workers: 1,
			Speedup: 20,
			KveppFlags: []string{
				"--model=" + stack.Model + "=" + tinyModel,
				"--model=broken=/none",
				"--inject-token-data",
				"--log-level=info",
				"--admin-token-file=" + token,
			},
		},
	)
	w := s.Workers[0]
	instance, err := w.InstanceID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := metric(t, s, "kvepp_models_without_tokenizer"); n != 1 { // kvepp is ready anyway
		t.Errorf("%v models are without a tokenizer", n)
	}
	const skipped = "SIDECAR-SKIP-TOKENIZE"
	header := http.Header{
		"Authorization": {"Bearer " + secrets["authorization"]},
		"Cookie":        {secrets["cookie"]},
		"X-Tenant-Id":   {secrets["tenant"]},
	}
	direct := http.Header{"X-Dynamo-Worker-Instance-Id": {instance}}
	nvext := func(more map[string]any) map[string]any {
		all := map[string]any{
			"extra_fields":        []string{"prompt_token_ids"},
			"backend_instance_id": 4711,
			"prefill_worker_id":   4712,
			"dp_rank":             3,
		}
		for k, v := range more {
			all[k] = v
		}
		return all
	}
	chat := func(messages ...map[string]any) map[string]any {
		return map[string]any{"model": stack.Model, "max_tokens": 4, "messages": messages}
	}
	system, user := map[string]any{
		"role":    "system",
		"content": secrets["a system prompt"],
	}, map[string]any{
		"role":    "user",
		"content": secrets["prompt"],
	}
	tool := map[string]any{
		"type":     "function",
		"function": map[string]any{"name": "find", "parameters": map[string]any{"type": "object"}},
	}
	withTools := chat(system, user)
	withTools["tools"] = []any{tool}
	injected := 0.0
	for i, c := range []struct {
		path     string
		body     map[string]any
		nvext    map[string]any
		injected bool
	}{
		{"/v1/chat/completions", chat(user), nil, true},
		{"/v1/chat/completions", chat(system, user, map[string]any{"role": "assistant", "content": "Ünï 水 \u2028 \"\\"},
			user), nil, true},
		{"/v1/chat/completions", withTools, nil, true},
		{"/v1/completions", map[string]any{"model": stack.Model, "max_tokens": 4, "prompt": secrets["prompt"]}, nil,
			true},
		{"/v1/chat/completions", chat(system, user), map[string]any{"annotations": []string{"formatted_prompt"}},
			false},
		{"/v1/completions", map[string]any{"model": stack.Model, "max_tokens": 4, "prompt": []int{5, 6, 7, 8}}, nil,
			false},
	} {
		c.body["nvext"] = nvext(c.nvext)
		through, err := stack.Post(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL+c.path+"?api-key="+secrets["query"],
			header,
			c.body,
		)
		if err != nil || through.Status != http.StatusOK || through.Reason != "kv" {
			t.Fatalf("%d: %v, %+v", i, err, through)
		}
		c.body["nvext"] = map[string]any{"extra_fields": []string{"prompt_token_ids"}}
		own, err := stack.Post(t.Context(), http.DefaultClient, "http://"+w.Address+c.path, direct, c.body)
		if err != nil || own.Status != http.StatusOK {
			t.Fatalf("%d: %v, %+v", i, err, own)
		}
		if a, b := promptTokens(t, through.Body), promptTokens(t, own.Body); a != b ||
			through.PromptTokens != own.PromptTokens ||
			through.KveppPrompt != own.PromptTokens {
			t.Errorf("%d: the engine got %s, and from a frontend that tokenizes %s", i, a, b)
		}
		if c.injected {
			injected++
		}
		if n := metric(t, s, "kvepp_injected_token_data_total"); n != injected {
			t.Errorf("%d: kvepp forwarded %v bodies with token ids, want %v", i, n, injected)
		}
	}
	if n, err := s.CountInFrontendLogs(skipped); err != nil || float64(n) != injected {
		t.Errorf("the frontend skipped tokenizing %d times, want %v (%v)", n, injected, err)
	}

	// The log contains no refused requests either.
	for _, body := range []string{`{"prompt": "` + secrets["no JSON"],
		`{"model":"unknown","messages":[{"role":"user","content":"` +
			secrets["prompt"] + `"}],"nvext":{"routing_constraints":{"required_taints":["` +
			secrets["a name of a pin"] + `"]}}}`} {
		resp, err := http.Post(
			s.Envoy.URL+"/v1/chat/completions?key="+secrets["query"],
			"application/json",
			strings.NewReader(body),
		)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Body.Close(); resp.StatusCode < 400 {
			t.Errorf("%s: status %d", body, resp.StatusCode)
		}
	}
	if err := s.ReplaceEndpoints("endpoints: []\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		a, err := stack.Chat(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL,
			header,
			[]stack.Message{{Role: "user", Content: secrets["prompt"]}},
			false,
			nil,
		)
		if err == nil && a.Status != http.StatusServiceUnavailable {
			err = fmt.Errorf("status %d", a.Status)
		}
		return err
	})
	for want, secret := range map[int]string{http.StatusUnauthorized: "x", http.StatusOK: secrets["the admin secret"]} {
		req, err := http.NewRequest("GET", s.Admin()+"/debug/decisions", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+secret)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Body.Close(); resp.StatusCode != want {
			t.Errorf("the admin address answers %d to %q", resp.StatusCode, secret)
		}
	}
	log, err := s.Log()
	if err != nil || !strings.Contains(log, "request refused") {
		t.Fatalf("%v; the log has no line about refused requests:\n%s", err, log)
	}
	for where, secret := range secrets {
		if strings.Contains(log, secret) {
			t.Errorf("the log contains %s:\n%s", where, log)
		}
	}
}

// promptTokens returns the token ids that the engine got, as the frontend reports them.
func promptTokens(t *testing.T, body string) string {
	t.Helper()
	var response struct {
		Nvext struct {
			IDs []int `json:"prompt_token_ids"`
		}
	}
	if err := json.Unmarshal([]byte(body), &response); err != nil || len(response.Nvext.IDs) == 0 {
		t.Fatalf("no token ids are reported (%v): %s", err, body)
	}
	var b strings.Builder
	for _, id := range response.Nvext.IDs {
		b.WriteString(strconv.Itoa(id) + " ")
	}
	return b.String()
}

// TestChangedBodies: for each way in which Envoy and clients send a body, the changed body arrives with the right
// length, if it has one. An Envoy that trusts its clients' headers forwards none that could choose a worker, and all
// others.
func TestChangedBodies(t *testing.T) {
	nothingLeft(t, main)
	address, last := upstream(t)
	alone(t, address)
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h2.CloseIdleConnections()
	prompt := strings.Repeat("0123456789abcdef", 4096)
	body := []byte(
		`{"model":"m", "nvext" : {"router_config_override":{"router_temperature":0}, "greed_sampling":true} ,` +
			`"prompt":"` + prompt + `", "x":1.0e+2}` + "\n",
	)
	changed := []byte(`{"model":"m", "nvext" : {"greed_sampling":true} ,"prompt":"` + prompt + `", "x":1.0e+2}` + "\n")
	var zip bytes.Buffer
	pack := gzip.NewWriter(&zip)
	pack.Write(body)
	pack.Close()
	packed := zip.Bytes()
	for _, mode := range []string{"FULL_DUPLEX_STREAMED", "BUFFERED"} {
		envoy, err := main.StartEnvoyEdited(t.Context(), "original-dst.yaml", func(connections map[string]any) {
			delete(connections, "early_header_mutation_extensions")
			extProc := connections["http_filters"].([]any)[0].(map[string]any)["typed_config"].(map[string]any)
			processing := extProc["processing_mode"].(map[string]any)
			processing["request_body_mode"], processing["response_body_mode"] = mode, mode
			extProc["allow_content_length_header"] = mode == "FULL_DUPLEX_STREAMED"
		})
		if err != nil {
			t.Fatal(mode, err)
		}
		for _, c := range []struct {
			name     string
			client   *http.Client
			chunked  bool
			body     []byte
			trailers bool
			want     []byte
		}{
			{"length", http.DefaultClient, false, body, false, changed},
			{"chunked", http.DefaultClient, true, body, false, changed},
			{"HTTP/2", &http.Client{Transport: h2}, false, body, false, changed},
			{"HTTP/2 without a length", &http.Client{Transport: h2}, true, body, false, changed},
			{"trailers", &http.Client{Transport: h2}, true, body, true, changed},
			{"unchanged", http.DefaultClient, false, changed, false, changed},
			{"compressed", http.DefaultClient, false, packed, false, packed},
			{"compressed, chunked", http.DefaultClient, true, packed, false, packed},
			{"compressed, HTTP/2", &http.Client{Transport: h2}, false, packed, false, packed},
		} {
			var from io.Reader = bytes.NewReader(c.body)
			if c.chunked {
				from = io.MultiReader(from) // hides the length
			}
			req, err := http.NewRequestWithContext(t.Context(), "POST", envoy.URL+"/v1/completions", from)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range claimed {
				req.Header.Set(name, "4711")
			}
			req.Header.Set("x-dynamo-session-final", "true") // so that no session remains
			if strings.HasPrefix(c.name, "compressed") {
				req.Header.Set("Content-Encoding", "gzip")
			}
			kept := map[string]string{
				"X-Forwarded-Host": "api.example",
				"Forwarded":        "for=192.0.2.1",
				"X-Real-Ip":        "192.0.2.1",
				"Authorization":    "Bearer x",
				"X-Tenant-Id":      "t",
			}
			for name, value := range kept {
				req.Header.Set(name, value)
			}
			if c.trailers {
				req.Trailer = http.Header{"X-Sum": {"1"}}
			}
			a, err := stack.Do(c.client, req)
			if err != nil || a.Status != http.StatusOK {
				t.Fatalf("%s, %s: %v %+v", mode, c.name, err, a)
			}
			got := last()
			if got.size != len(c.want) || got.digest != sha256.Sum256(c.want) {
				t.Errorf("%s, %s: %d bytes arrived as %d different ones", mode, c.name, len(c.want), got.size)
			}
			if got.length >= 0 && got.length != int64(got.size) {
				t.Errorf("%s, %s: %d bytes arrived, content-length %d", mode, c.name, got.size, got.length)
			}
			for _, name := range claimed {
				if came := strings.Join(got.header.Values(name), ","); strings.Contains(came, "4711") ||
					strings.Contains(came, "true") {
					t.Errorf("%s, %s: the client's %s arrived", mode, c.name, name)
				}
			}
			for name, value := range kept {
				if got.header.Get(name) != value {
					t.Errorf("%s, %s: %s arrived as %q", mode, c.name, name, got.header[name])
				}
			}
		}
	}
}

// claimed are headers with which a client may try to choose the worker.
var claimed = []string{
	"x-gateway-destination-endpoint",
	"x-gateway-destination-endpoint-subset",
	"x-gateway-destination-endpoint-served",
	"x-dynamo-worker-instance-id",
	"x-dynamo-prefill-instance-id",
	"x-dynamo-dp-rank",
	"x-dynamo-prefill-dp-rank",
	"x-worker-instance-id",
	"x-prefill-instance-id",
	"x-dp-rank",
	"x-data-parallel-rank",
	"x-prefill-dp-rank",
	"x-prefiller-host-port",
	"x-dynamo-routing-mode",
	"x-encoder-hosts-ports",
	"x-data-parallel-host-port",
	"x-kv-cache-source-host-port",
	"x-smg-target-worker",
	"x-override-rid",
	"x-override-bootstrap-host",
	"x-override-bootstrap-port",
	"x-override-bootstrap-room",
	"x-override-conversation-id",
	"x-override-routed-dp-rank",
	"x-override-disagg-prefill-dp-rank",
	"x-override-priority",
	"x-dynamo-session-id",
	"x-dynamo-parent-session-id",
	"x-dynamo-session-final",
	"x-claude-code-session-id",
	"thread-id",
	"x-session-id",
}
