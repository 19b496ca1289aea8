package check

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/zmqsub"
)

// engine answers HTTP as an engine with blocks of 16 tokens. responses holds fixed bodies by path; an empty body
// means 404. It tokenizes prompts with model, and reports the blocks of earlier prompts as cached.
type engine struct {
	responses map[string]string
	model     *prompt.Model

	mu   sync.Mutex
	seen [][]kvblock.Token
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	fixed, found := e.responses[r.URL.Path]
	switch {
	case fixed != "":
		fmt.Fprint(w, fixed)
		return
	case found:
		http.NotFound(w, r)
		return
	}
	var body map[string]any
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.NotFound(w, r)
		return
	}
	path := completionsPath
	if body["messages"] != nil {
		path = chatPath
	}
	ids, _, _, err := kveppIDs(e.model, path, body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	_, several := body["prompt"].([]any)
	switch {
	case r.URL.Path == "/tokenize" && several:
		json.NewEncoder(w).Encode(map[string]any{"tokens": [][]kvblock.Token{ids}, "count": []int{len(ids)}})
	case r.URL.Path == "/tokenize":
		json.NewEncoder(w).Encode(map[string]any{"tokens": ids, "count": len(ids)})
	case r.URL.Path == path:
		fmt.Fprintf(
			w,
			`{"choices":[{"text":"so"}],"usage":{"prompt_tokens":%d,"completion_tokens":1,`+
				`"prompt_tokens_details":{"cached_tokens":%d}}}`,
			len(ids),
			e.cached(ids),
		)
	default:
		http.NotFound(w, r)
	}
}

// cached records a prompt, and returns how many of its tokens were cached.
func (e *engine) cached(ids []kvblock.Token) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, before := range e.seen {
		at := difference(ids, before)
		if at < 0 {
			at = len(ids)
		}
		n = max(n, min(at, len(ids)-1)/16*16)
	}
	e.seen = append(e.seen, ids)
	return n
}

func (e *engine) with(path, response string) *engine {
	other := &engine{responses: maps.Clone(e.responses), model: e.model}
	other.responses[path] = response
	return other
}

func (e *engine) serving(m *prompt.Model) *engine {
	other := e.with("", "")
	other.model = m
	return other
}

const vLLMCache = "# HELP vllm:cache_config_info " +
	"x\nvllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",user_block_size=\"1\"} 1.0\n"

// testModel loads the test model, with another chat template if one is given.
func testModel(t *testing.T, engine prompt.Engine, template string) *prompt.Model {
	t.Helper()
	o := prompt.Options{Engine: engine}
	if template != "" {
		o.ChatTemplate = filepath.Join(t.TempDir(), "template.jinja")
		if err := os.WriteFile(o.ChatTemplate, []byte(template), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := prompt.Load("../../test/models/tiny-bytelevel", o)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// withoutTemplate loads the test model from a folder that has no chat template.
func withoutTemplate(t *testing.T) *prompt.Model {
	t.Helper()
	folder := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		text, err := os.ReadFile("../../test/models/tiny-bytelevel/" + name)
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := prompt.Load(folder, prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestEngines: each setting that an engine reports, right and wrong. No events come.
func TestEngines(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	hub, err := zmqsub.NewHub()
	if err != nil {
		t.Fatal(err)
	}
	defer hub.Close()
	const template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
	model := testModel(t, prompt.VLLM, "")
	other, bare := testModel(t, prompt.VLLM, template), withoutTemplate(t)
	noTools := testModel(t, prompt.VLLM, "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"+template)
	userOnly := testModel(
		t,
		prompt.VLLM,
		"{% if tools or messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"+template,
	)
	models := func(owner, id string) string { return fmt.Sprintf(`{"data":[{"id":%q,"owned_by":%q}]}`, id, owner) }
	vllm := &engine{
		responses: map[string]string{"/v1/models": models("vllm", "m"), "/metrics": vLLMCache},
		model:     model,
	}
	sglang := &engine{
		responses: map[string]string{
			"/v1/models":   models("sglang", "m"),
			"/server_info": `{"page_size":1,"disable_radix_cache":false,"enable_cache_report":true}`,
			"/model_info":  `{"has_image_understanding":false,"has_audio_understanding":false}`,
		},
		model: testModel(t, prompt.SGLang, ""),
	}
	dynamo := vllm.with("/v1/models", models("nvidia", "m")).with("/tokenize", "")
	const (
		good     = "http ok, model ok, events wrong, block size ok, prefix caching ok, tokenizer ok, chat ok"
		uncached = `{"usage":{"prompt_tokens":400}}`
		asDynamo = "http ok, model ok, instance unknown, events wrong, block size ok, tokenizer ok, chat ok, cached " +
			"tokens ok"
		noResponses = "http wrong, events wrong, block size unknown"
	)
	sized := func(e *pool.Endpoint) { e.BlockSize = 16 }
	type row struct {
		name   string
		engine *engine
		own    *prompt.Model // nil: model
		asks   prompt.Engine
		probe  bool
		edit   func(*pool.Endpoint)
		want   string // about and state
		says   string // one of the responses, or a fix
	}
	for _, c := range []row{
		{"vLLM", vllm, nil, prompt.VLLM, false, nil, good, "ids of a chat equal the engine's"},
		{"vLLM, with a probe", vllm, nil, prompt.VLLM, true, sized, good + ", cached tokens ok",
			"the second time, as predicted"},
		{"a block size that is not known", vllm, nil, prompt.VLLM, true, nil, good + ", cached tokens ok",
			"the second time"},
		{"taken for another engine", vllm, nil, prompt.SGLang, false, nil,
			strings.Replace(good, "http ok", "http wrong", 1), "--engine vllm"},
		{"another model", vllm.with("/v1/models", models("vllm", "other")), nil, prompt.VLLM, false, nil,
			"http ok, model wrong, events wrong, block size ok, prefix caching ok", "--model other=DIR"},
		{"no model yet", vllm.with("/v1/models", `{"data":[]}`), nil, prompt.VLLM, false, nil,
			"http ok, model wrong, events wrong, block size unknown", "the engine serves no model"},
		{"the endpoint's model is another", vllm, nil, prompt.VLLM, false, func(e *pool.Endpoint) { e.Model = "n" },
			"http ok, model wrong, events wrong, block size ok, prefix caching ok", "kvepp is configured with n"},
		{"an address by name", vllm, nil, prompt.VLLM, false, func(e *pool.Endpoint) { e.Name = byName },
			"address wrong, " + good, "or write the IP address, address: 127.0.0.1:"},
		{"prefix caching off", vllm.with("/metrics", strings.Replace(vLLMCache, "True", "False", 1)), nil,
			prompt.VLLM, false, nil, strings.Replace(good, "caching ok", "caching wrong", 1),
			"--enable-prefix-caching"},
		{"another block size", vllm, nil, prompt.VLLM, false, func(e *pool.Endpoint) { e.BlockSize = 64 },
			strings.Replace(good, "size ok", "size wrong", 1), "set blockSize to 16"},
		{"another number of blocks", vllm.with("/metrics", strings.Replace(vLLMCache, "enable",
			`num_gpu_blocks="100",enable`, 1)), nil, prompt.VLLM, false,
			func(e *pool.Endpoint) { e.BlockSize, e.TotalKVBlocks = 16, 50 },
			strings.Replace(good, "size ok", "size ok, KV blocks wrong", 1), "set totalKvBlocks to 100"},
		{"another tokenizer", vllm.with("/tokenize", `{"tokens":[1,2,3],"count":3}`), nil, prompt.VLLM, false, nil,
			strings.Replace(good, "tokenizer ok, chat ok", "tokenizer wrong, chat wrong", 1), "at token 0"},
		{"no ids returned", vllm.with("/tokenize", ""), nil, prompt.VLLM, false, nil,
			strings.Replace(good, "tokenizer ok, chat ok", "tokenizer unknown, chat unknown", 1), "404"},
		{"another template", vllm.serving(other), nil, prompt.VLLM, false, nil,
			strings.Replace(good, "chat ok", "chat wrong", 1), "--chat-template FILE"},
		{"another template, with a probe of chats alone", vllm.serving(other).with("/tokenize", ""), nil,
			prompt.VLLM, true, sized,
			strings.Replace(good, "tokenizer ok, chat ok", "tokenizer unknown, chat wrong, cached tokens ...", 1),
			"--chat-template FILE"},
		{"no template", vllm, bare, prompt.VLLM, false, nil, strings.Replace(good, "chat ok", "chat wrong", 1),
			"routes its chats by load"},
		{"no template, and no ids returned", vllm.with("/tokenize", ""), bare, prompt.VLLM, false, nil,
			strings.Replace(good, "tokenizer ok, chat ok", "tokenizer unknown, chat wrong", 1),
			"routes its chats by load"},
		{"no template on either side", vllm.serving(bare), bare, prompt.VLLM, true, sized,
			strings.Replace(good, "chat ok", "chat unknown", 1) + ", cached tokens ok", "neither kvepp nor the engine"},
		{"a template that refuses tools", vllm.serving(noTools), noTools, prompt.VLLM, true, sized,
			good + ", cached tokens ok", "a chat, without a tool, equal"},
		{"a template that refuses system prompts", vllm.serving(userOnly), userOnly, prompt.VLLM, true, sized,
			good + ", cached tokens ok", "without a tool and a system prompt, equal"},
		{"a template that refuses what the engine's takes", vllm, noTools, prompt.VLLM, false, nil,
			strings.Replace(good, "chat ok", "chat wrong", 1), "that the engine takes"},
		{"no cached tokens reported", vllm.with(chatPath, uncached), nil, prompt.VLLM, true, nil,
			good + ", cached tokens wrong", "--enable-prompt-tokens-details"},
		{"nothing cached", vllm.with(chatPath,
			`{"usage":{"prompt_tokens":400,"prompt_tokens_details":{"cached_tokens":0}}}`), nil, prompt.VLLM, true,
			nil, good + ", cached tokens wrong", "none of a prompt's 400"},
		{"more cached than predicted", vllm.with(chatPath,
			`{"usage":{"prompt_tokens":4000,"prompt_tokens_details":{"cached_tokens":3984}}}`), nil, prompt.VLLM,
			true, sized, good + ", cached tokens wrong", "predicts only"},
		{"a probe that fails", vllm.with(chatPath, "").with(completionsPath, ""), nil, prompt.VLLM, true, nil,
			good + ", cached tokens wrong", "404"},
		{"nothing publishes", vllm, nil, prompt.VLLM, false,
			func(e *pool.Endpoint) { e.KVEvents, e.KVReplay = closedPort(t), closedPort(t) }, good,
			"no publisher answers at"},
		{"the event port is one of HTTP", vllm, nil, prompt.VLLM, false,
			func(e *pool.Endpoint) { e.KVEvents, e.KVReplay = "tcp://"+e.Address, closedPort(t) }, good,
			"accepts connections, but publishes no KV events -> write the port"},
		{"no such event address", vllm, nil, prompt.VLLM, false, func(e *pool.Endpoint) { e.KVEvents = "tcp://" },
			good, "correct the address"},
		{"a decode worker", vllm, nil, prompt.VLLM, false, func(e *pool.Endpoint) { e.Role = pool.Decode },
			"http ok, model ok, events ok, prefix caching ok, tokenizer ok, chat ok", "sends no events about prompts"},
		{"events over Dynamo's plane", vllm, nil, prompt.VLLM, false,
			func(e *pool.Endpoint) { e.EventChannels = []pool.EventChannel{{Subject: "s"}} },
			strings.Replace(good, "events wrong", "events unknown", 1), "full attention's blocks alone"},
		{"without events", vllm, nil, prompt.VLLM, false, func(e *pool.Endpoint) { e.KVEvents = withoutEvents },
			strings.Replace(good, "events wrong", "events ok", 1), "kvepp predicts the worker's cache"},
		{"nothing answers", &engine{responses: map[string]string{"/v1/models": ""}}, nil, prompt.VLLM, true, nil,
			noResponses, "404"},
		{"what is no JSON", vllm.with("/v1/models", "<html>"), nil, prompt.VLLM, false, nil, noResponses,
			"invalid character"},
		{"SGLang", sglang, sglang.model, prompt.SGLang, false, nil, good, "1 tokens"},
		{"SGLang of old", sglang.with("/get_server_info", sglang.responses["/server_info"]).with("/server_info", ""),
			sglang.model, prompt.SGLang, false, nil, good, "1 tokens"},
		{"SGLang without radix cache", sglang.with("/server_info", `{"page_size":1,"disable_radix_cache":true}`),
			sglang.model, prompt.SGLang, false, nil, strings.Replace(good, "caching ok", "caching wrong", 1),
			"--disable-radix-cache"},
		{"SGLang without a report", sglang.with("/server_info", `{"page_size":1,"enable_cache_report":false}`),
			sglang.model, prompt.SGLang, false, nil,
			"http ok, model ok, events wrong, block size ok, tokenizer ok, chat ok, cached tokens wrong",
			"--enable-cache-report"},
		{"SGLang with a model of images",
			sglang.with("/model_info", `{"has_image_understanding":true,"has_audio_understanding":false}`),
			sglang.model, prompt.SGLang, false, nil, strings.Replace(good, "chat ok", "chat unknown", 1), "images"},
		{"an engine that tells no ids", dynamo, nil, prompt.Dynamo, true, sized, asDynamo,
			"kvepp and the engine count"},
		{"its template is another", dynamo.serving(other), nil, prompt.Dynamo, true, sized,
			strings.Replace(asDynamo, "chat ok, cached tokens ok", "chat wrong, cached tokens ...", 1),
			"--chat-template FILE"},
		{"kvepp has no template for it", dynamo, bare, prompt.Dynamo, true, sized,
			strings.Replace(asDynamo, "chat ok", "chat wrong", 1), "routes its chats by load"},
	} {
		e := &engine{responses: c.engine.responses, model: c.engine.model}
		server := httptest.NewServer(e)
		endpoint := pool.Endpoint{Name: "e", Address: strings.TrimPrefix(server.URL, "http://"), Role: pool.Aggregated}
		if c.edit != nil {
			c.edit(&endpoint)
		}
		own := c.own
		if own == nil {
			own = model
		}
		endpoints := pool.New(slog.New(slog.DiscardHandler))
		endpoints.Update([]pool.Endpoint{endpoint})
		index, err := indexer.New(indexer.Config{})
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{
			Hub:           hub,
			HTTP:          server.Client(),
			Models:        map[string]*prompt.Model{"m": own},
			Names:         map[string]string{byName: "engine:8000"},
			Engine:        c.asks,
			Probe:         c.probe,
			Wait:          2 * time.Second,
			WithoutEvents: endpoint.KVEvents == withoutEvents,
			Predictor:     &Predictor{Pool: endpoints, Index: index},
			Metrics:       metrics.New(),
			Log:           slog.New(slog.DiscardHandler),
		}
		s := endpoints.Acquire()
		result := Worker(t.Context(), &cfg, &s.Workers[0])
		s.Release()
		var got, all []string
		for _, f := range result.Findings {
			got = append(got, f.About+" "+string(f.State))
			all = append(all, f.Says+" -> "+f.Fix)
			if f.Worker != endpoint.Name+"/0" || f.Says == "" || f.State == Wrong && f.Fix == "" {
				t.Errorf("%s: %+v", c.name, f)
			}
		}
		want, states := c.want, strings.Join(got, ", ")
		if before, more := strings.CutSuffix(want, "..."); more && strings.HasPrefix(states, before) {
			want = states // where two templates part within a block decides whether predictions differ
		}
		if states != want || !strings.Contains(strings.Join(all, "\n"), c.says) {
			t.Errorf("%s:\ngot  %s\nwant %s\n%q in:\n%s", c.name, states, c.want, c.says, strings.Join(all, "\n"))
		}
		server.Close()
	}
}

// withoutEvents in a row stands for Config.WithoutEvents.
const withoutEvents = "tcp://127.0.0.1:1"

// byName is an endpoint whose address is a host name.
const byName = "named"

// closedPort is an address without a listener.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return "tcp://" + l.Addr().String()
}

// What the events show of a hybrid model's layers.
func TestOtherLayers(t *testing.T) {
	window := kvblock.Class{Kind: kvblock.ClassWindow, Window: 128, BlockSize: 16}
	for _, c := range []struct {
		traits kvblock.Traits
		says   string
	}{
		{kvblock.Traits{BlockSize: 16}, ""},
		{kvblock.Traits{BlockSize: 16, Classes: kvblock.Classes{window}},
			" of a hybrid model: beside full attention, window of 128 tokens in blocks of 16"},
		{kvblock.Traits{BlockSize: 16, UpperBound: true}, "predictions are an upper bound"},
	} {
		if got := otherLayers(c.traits); !strings.Contains(got, c.says) || (got == "") != (c.says == "") {
			t.Errorf("%+v: %q", c.traits, got)
		}
	}
}
