package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"kvepp/e2e/stack"
)

// secrets are what clients send and logs must not hold, each in a place of its own.
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

// TestTokenData: a frontend that is given the token ids does not tokenize, and answers as one that does. Of all that nothing
// is in the log.
func TestTokenData(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(secrets["the admin secret"]), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, stack.Config{Workers: 1, Speedup: 20, KveppFlags: []string{"--inject-token-data", "--log-level=info", "--admin-token-file=" + token}})
	w := s.Workers[0]
	instance, err := w.InstanceID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const skipped = "SIDECAR-SKIP-TOKENIZE"
	header := http.Header{"Authorization": {"Bearer " + secrets["authorization"]}, "Cookie": {secrets["cookie"]}, "X-Tenant-Id": {secrets["tenant"]}}
	direct := http.Header{"X-Dynamo-Worker-Instance-Id": {instance}}
	nvext := func(more map[string]any) map[string]any {
		all := map[string]any{"extra_fields": []string{"prompt_token_ids"}, "backend_instance_id": 4711, "prefill_worker_id": 4712, "dp_rank": 3}
		for k, v := range more {
			all[k] = v
		}
		return all
	}
	chat := func(messages ...map[string]any) map[string]any {
		return map[string]any{"model": stack.Model, "max_tokens": 4, "messages": messages}
	}
	system, user := map[string]any{"role": "system", "content": secrets["a system prompt"]}, map[string]any{"role": "user", "content": secrets["prompt"]}
	tool := map[string]any{"type": "function", "function": map[string]any{"name": "find", "parameters": map[string]any{"type": "object"}}}
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
		{"/v1/chat/completions", chat(system, user, map[string]any{"role": "assistant", "content": "Ünï 水 \u2028 \"\\"}, user), nil, true},
		{"/v1/chat/completions", withTools, nil, true},
		{"/v1/completions", map[string]any{"model": stack.Model, "max_tokens": 4, "prompt": secrets["prompt"]}, nil, true},
		{"/v1/chat/completions", chat(system, user), map[string]any{"annotations": []string{"formatted_prompt"}}, false},
		{"/v1/completions", map[string]any{"model": stack.Model, "max_tokens": 4, "prompt": []int{5, 6, 7, 8}}, nil, false},
	} {
		c.body["nvext"] = nvext(c.nvext)
		through, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+c.path+"?api-key="+secrets["query"], header, c.body)
		if err != nil || through.Status != http.StatusOK || through.Reason != "kv" {
			t.Fatalf("%d: %v, %+v", i, err, through)
		}
		c.body["nvext"] = map[string]any{"extra_fields": []string{"prompt_token_ids"}}
		own, err := stack.Post(t.Context(), http.DefaultClient, "http://"+w.Address+c.path, direct, c.body)
		if err != nil || own.Status != http.StatusOK {
			t.Fatalf("%d: %v, %+v", i, err, own)
		}
		if a, b := promptTokens(t, through.Body), promptTokens(t, own.Body); a != b || through.PromptTokens != own.PromptTokens || through.KveppPrompt != own.PromptTokens {
			t.Errorf("%d: the engine was sent %s, and by a frontend that tokenizes %s", i, a, b)
		}
		if c.injected {
			injected++
		}
		if n := metric(t, s, "kvepp_injected_token_data_total"); n != injected {
			t.Errorf("%d: %v bodies went on with their token ids, want %v", i, n, injected)
		}
	}
	if _, n, err := s.Logs(skipped); err != nil || float64(n) != injected {
		t.Errorf("the frontend tokenized not %d times, want %v (%v)", n, injected, err)
	}

	// What is refused is not repeated either.
	for _, body := range []string{`{"prompt": "` + secrets["no JSON"], `{"model":"nobody","messages":[{"role":"user","content":"` + secrets["prompt"] + `"}],"nvext":{"routing_constraints":{"required_taints":["` +
		secrets["a name of a pin"] + `"]}}}`} {
		resp, err := http.Post(s.Envoy.URL+"/v1/chat/completions?key="+secrets["query"], "application/json", strings.NewReader(body))
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
		a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, header, []stack.Message{{Role: "user", Content: secrets["prompt"]}}, false, nil)
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
	log, _, err := s.Logs(skipped)
	if err != nil || !strings.Contains(log, "request refused") {
		t.Fatalf("%v; the log says nothing of refused requests:\n%s", err, log)
	}
	for where, secret := range secrets {
		if strings.Contains(log, secret) {
			t.Errorf("the log holds %s:\n%s", where, log)
		}
	}
}

// promptTokens are the ids that the engine was sent, as the frontend reports them.
func promptTokens(t *testing.T, body string) string {
	t.Helper()
	var answer struct {
		Nvext struct {
			IDs []int `json:"prompt_token_ids"`
		}
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || len(answer.Nvext.IDs) == 0 {
		t.Fatalf("no token ids are reported (%v): %s", err, body)
	}
	var b strings.Builder
	for _, id := range answer.Nvext.IDs {
		b.WriteString(strconv.Itoa(id) + " ")
	}
	return b.String()
}
