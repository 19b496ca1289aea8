package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// speaking starts a stand-in for a vLLM with this list of models and these lines on its metrics page.
func speaking(t *testing.T, models, page string) string {
	t.Helper()
	var server *httptest.Server
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("x-server", server.Listener.Addr().String())
		switch r.URL.Path {
		case "/metrics":
			fmt.Fprint(w, "vllm:num_requests_running{engine=\"0\"} 0\n"+page)
		case "/v1/models":
			fmt.Fprint(w, models)
		default:
			w.Header().Set("content-type", "application/json")
			fmt.Fprint(w, `{"choices":[{"text":"ok"}]}`)
		}
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// TestEnginesSpeakForThemselves: block size, number of KV blocks and adapters come from the engines, without a setting.
// Token ids in a request need no tokenizer.
func TestEnginesSpeakForThemselves(t *testing.T) {
	const cache = `vllm:cache_config_info{block_size="16",num_gpu_blocks="%d",engine="0"} 1` + "\n"
	const room = `vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""} 1e9` + "\n"
	servers := []string{
		speaking(t, `{"data":[{"id":"tiny"}]}`, fmt.Sprintf(cache, 100)+room),
		speaking(t, `{"data":[{"id":"tiny"},{"id":"sql","parent":"tiny"}]}`, fmt.Sprintf(cache, 200)),
		speaking(t, `{"data":`+strings.Repeat("[", 1000), fmt.Sprintf(cache, -5)),
	}
	var list strings.Builder
	list.WriteString("endpoints:\n")
	for i, address := range servers {
		own := []string{"", ", totalKvBlocks: 50", ", blockSize: 16"}[i]
		fmt.Fprintf(&list, "- {name: e%d, address: %q, model: tiny%s}\n", i, address, own)
	}
	s := start(t, stack.Config{Workers: -1, Servers: servers, Endpoints: list.String(), KveppFlags: []string{
		"--engine=vllm", "--router-kv-events=false", "--router-approximate-cache-policy=lru",
		"--refresh-metrics-interval=200ms", "--lora=new=tiny"}})
	logLine(t, s, "configured number of KV blocks", "worker=e1/0", "configured=50", "engine=200")
	eventually(t, func() error {
		resp, err := http.Get(s.Admin() + "/debug/fleet")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		var fleet struct {
			Workers []struct {
				Capacity int `json:"capacity_blocks"`
			}
		}
		err = json.NewDecoder(resp.Body).Decode(&fleet)
		if got := fmt.Sprint(fleet.Workers); err != nil || got != "[{100} {50} {0}]" {
			return fmt.Errorf("capacities %s, %v", got, err)
		}
		return nil
	})
	ask := func(path, body string) string {
		t.Helper()
		resp, err := http.Post(s.Envoy.URL+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s %s: %s", path, body, resp.Status)
		}
		return resp.Header.Get("x-server")
	}
	eventually(t, func() error { // kvepp has read the list of models
		if m, err := s.Metrics(t.Context()); err != nil || m["kvepp_lora_adapters"] != 2 {
			return fmt.Errorf("%v adapters, %w", m["kvepp_lora_adapters"], err)
		}
		return nil
	})
	for i := range 6 {
		if at := ask("/v1/completions", fmt.Sprintf(`{"model":"sql","prompt":[%d]}`, i)); at != servers[1] {
			t.Errorf("a request for the adapter went to %s", at)
		}
		if at := ask("/v1/completions", fmt.Sprintf(`{"model":"new","prompt":[%d]}`, i)); at == servers[2] {
			t.Errorf("an adapter that no engine has went to %s, whose engine says nothing", at)
		}
	}
	before, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const decisions = `kvepp_decisions_total{reason="approximate"}`
	ids := strings.TrimSuffix(strings.Repeat("7,", 64), ",")
	first := ask("/inference/v1/generate", `{"token_ids":[`+ids+`],"sampling_params":{"max_tokens":1}}`)
	for _, body := range []string{`{"token_ids":[` + ids + `],"sampling_params":{}}`, `{"token_ids":[` + ids + `,1]}`} {
		if at := ask("/inference/v1/generate", body); at != first {
			t.Errorf("the same token ids went to %s and %s", first, at)
		}
	}
	if at := ask("/generate", `{"input_ids":[`+ids+`]}`); at != first {
		t.Errorf("the same token ids went to %s and %s", first, at)
	}
	after, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := after[decisions] - before[decisions]; n != 4 {
		t.Errorf("%v decisions by token ids", n)
	}
	if after["kvepp_lora_adapter_loads_total"] != 1 || after[`kvepp_engine_readings_total{outcome="models"}`] == 0 {
		t.Errorf("%v loads, %v bad lists", after["kvepp_lora_adapter_loads_total"],
			after[`kvepp_engine_readings_total{outcome="models"}`])
	}
}
