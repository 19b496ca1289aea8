package check

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/tokenizer"
	"kvepp/zmqsub"
)

// engine answers for an engine. Paths that it has no answer for are not found.
type engine map[string]string

func (e engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, ok := e[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	fmt.Fprint(w, answer)
}

func (e engine) with(path, answer string) engine {
	other := maps.Clone(e)
	if other[path] = answer; answer == "" {
		delete(other, path)
	}
	return other
}

const vLLMCache = "# HELP vllm:cache_config_info x\nvllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",user_block_size=\"1\"} 1.0\n"

func aModel(t *testing.T, engine tokenizer.Engine) (*tokenizer.Model, []kvblock.Token) {
	t.Helper()
	m, err := tokenizer.Load("../../e2e/models/tiny-bytelevel", tokenizer.Options{Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	body, err := json.Marshal(map[string]string{"model": "m", "prompt": someText})
	if err != nil {
		t.Fatal(err)
	}
	request, err := apibody.ParseRequest("/v1/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	prompts, err := m.Tokenize(request)
	if err != nil {
		t.Fatal(err)
	}
	return m, prompts[0].IDs
}

func ids2json(t *testing.T, ids []kvblock.Token) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{"tokens": ids})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestEngines: each setting that an engine tells of, right and wrong. Its events are those of nobody.
func TestEngines(t *testing.T) {
	hub, err := zmqsub.NewHub()
	if err != nil {
		t.Fatal(err)
	}
	defer hub.Close()
	model, ids := aModel(t, tokenizer.VLLM)
	models := func(owner, id string) string { return fmt.Sprintf(`{"data":[{"id":%q,"owned_by":%q}]}`, id, owner) }
	vllm := engine{"/v1/models": models("vllm", "m"), "/metrics": vLLMCache, "/tokenize": ids2json(t, ids),
		"/v1/completions": `{"usage":{"prompt_tokens":400,"prompt_tokens_details":{"cached_tokens":384}}}`}
	sglang := engine{"/v1/models": models("sglang", "m"), "/server_info": `{"page_size":1,"disable_radix_cache":false,"enable_cache_report":true}`, "/tokenize": ids2json(t, ids)}
	const good = "http ok, model ok, events wrong, block size ok, prefix caching ok, tokenizer ok"
	for _, c := range []struct {
		name   string
		engine engine
		asks   tokenizer.Engine
		probe  bool
		edit   func(*pool.Endpoint)
		want   string // about and state
		says   string // one of the answers, or a fix
	}{
		{"vLLM", vllm, tokenizer.VLLM, false, nil, good, "no address"},
		{"vLLM, with a probe", vllm, tokenizer.VLLM, true, nil, good + ", cached tokens ok", "384 of 400"},
		{"taken for another engine", vllm, tokenizer.SGLang, false, nil, strings.Replace(good, "http ok", "http wrong", 1), "--engine vllm"},
		{"another model", vllm.with("/v1/models", models("vllm", "other")), tokenizer.VLLM, false, nil, "http ok, model wrong, events wrong, block size ok, prefix caching ok", "--model other=DIR"},
		{"no model yet", vllm.with("/v1/models", `{"data":[]}`), tokenizer.VLLM, false, nil, "http ok, model wrong, events wrong, block size unknown", "serves none"},
		{"the endpoint's model is another", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.Model = "n" }, "http ok, model wrong, events wrong, block size ok, prefix caching ok", "kvepp has it for n"},
		{"prefix caching off", vllm.with("/metrics", strings.Replace(vLLMCache, "True", "False", 1)), tokenizer.VLLM, false, nil, strings.Replace(good, "caching ok", "caching wrong", 1), "--enable-prefix-caching"},
		{"another block size", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.BlockSize = 64 }, strings.Replace(good, "size ok", "size wrong", 1), "blockSize 16"},
		{"another tokenizer", vllm.with("/tokenize", ids2json(t, append(ids[:4:4], 1))), tokenizer.VLLM, false, nil, strings.Replace(good, "tokenizer ok", "tokenizer wrong", 1), "at token 4"},
		{"no ids told", vllm.with("/tokenize", ""), tokenizer.VLLM, false, nil, strings.Replace(good, "tokenizer ok", "tokenizer unknown", 1), "404"},
		{"no cached tokens told", vllm.with("/v1/completions", `{"usage":{"prompt_tokens":400}}`), tokenizer.VLLM, true, nil, good + ", cached tokens wrong", "--enable-prompt-tokens-details"},
		{"nothing cached", vllm.with("/v1/completions", `{"usage":{"prompt_tokens":400,"prompt_tokens_details":{"cached_tokens":0}}}`), tokenizer.VLLM, true, nil, good + ", cached tokens wrong", "none of a prompt's 400"},
		{"a probe that fails", vllm.with("/v1/completions", ""), tokenizer.VLLM, true, nil, good + ", cached tokens wrong", "404"},
		{"nobody publishes", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.KVEvents, e.KVReplay = closedPort(t), closedPort(t) }, "http ok, model ok, events wrong, block size ok, prefix caching ok, tokenizer ok", "enable_kv_cache_events"},
		{"no such address", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.KVEvents = "tcp://" }, good, "correct the address"},
		{"a decode worker", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.Role = pool.Decode }, "http ok, model ok, events ok, prefix caching ok, tokenizer ok", "announces nothing of prompts"},
		{"events over Dynamo's plane", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.EventChannels = []pool.EventChannel{{Subject: "s"}} }, strings.Replace(good, "events wrong", "events unknown", 1), "nats"},
		{"without events", vllm, tokenizer.VLLM, false, func(e *pool.Endpoint) { e.KVEvents = withoutEvents }, "http ok, model ok, events ok, block size ok, prefix caching ok, tokenizer ok", "kvepp guesses"},
		{"nobody answers", engine{}, tokenizer.VLLM, true, nil, "http wrong, events wrong, block size unknown", "404"},
		{"what is no JSON", vllm.with("/v1/models", "<html>"), tokenizer.VLLM, false, nil, "http wrong, events wrong, block size unknown", "invalid character"},
		{"SGLang", sglang, tokenizer.SGLang, false, nil, good, "1 tokens"},
		{"SGLang of old", sglang.with("/get_server_info", sglang["/server_info"]).with("/server_info", ""), tokenizer.SGLang, false, nil, good, "1 tokens"},
		{"SGLang without radix cache", sglang.with("/server_info", `{"page_size":1,"disable_radix_cache":true}`), tokenizer.SGLang, false, nil, strings.Replace(good, "caching ok", "caching wrong", 1), "--disable-radix-cache"},
		{"SGLang without a report", sglang.with("/server_info", `{"page_size":1,"enable_cache_report":false}`), tokenizer.SGLang, false, nil, "http ok, model ok, events wrong, block size ok, tokenizer ok, cached tokens wrong", "--enable-cache-report"},
	} {
		server := httptest.NewServer(c.engine)
		e := pool.Endpoint{Name: "e", Address: strings.TrimPrefix(server.URL, "http://")}
		if c.edit != nil {
			c.edit(&e)
		}
		w := pool.Worker{Endpoint: &e, BlockSize: e.BlockSize}
		cfg := Config{Hub: hub, HTTP: server.Client(), Models: map[string]*tokenizer.Model{"m": model}, Engine: c.asks, Probe: c.probe, Wait: 2 * time.Second,
			WithoutEvents: e.KVEvents == withoutEvents}
		var got, all []string
		for _, f := range Worker(t.Context(), &cfg, &w) {
			got = append(got, f.About+" "+string(f.State))
			all = append(all, f.Says+" -> "+f.Fix)
			if f.Worker != "e/0" || f.Says == "" || f.State == Wrong && f.Fix == "" {
				t.Errorf("%s: %+v", c.name, f)
			}
		}
		if strings.Join(got, ", ") != c.want || !strings.Contains(strings.Join(all, "\n"), c.says) {
			t.Errorf("%s:\ngot  %s\nwant %s\n%q in:\n%s", c.name, strings.Join(got, ", "), c.want, c.says, strings.Join(all, "\n"))
		}
		server.Close()
	}
}

// withoutEvents stands in a case for kvepp's own setting.
const withoutEvents = "tcp://127.0.0.1:1"

// closedPort is an address that nobody listens at.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "tcp://" + l.Addr().String()
}
