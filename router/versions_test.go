package router

import (
	"os"
	"path/filepath"
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// sglang loads a small model by the rules of SGLang.
func (h *house) sglang() *prompt.Model {
	h.t.Helper()
	template := filepath.Join(h.t.TempDir(), "template.jinja")
	if err := os.WriteFile(template, []byte("{{ tools }}{{ messages }}"), 0o644); err != nil {
		h.t.Fatal(err)
	}
	model, err := prompt.Load(
		"../test/models/tiny-bytelevel",
		prompt.Options{Engine: prompt.SGLang, ChatTemplate: template},
	)
	if err != nil {
		h.t.Fatal(err)
	}
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	return model
}

// idsBy returns the token ids of a chat by the rules of a version.
func idsBy(t *testing.T, model *prompt.Model, version, payload string) []kvblock.Token {
	t.Helper()
	at, err := model.At(version)
	if err != nil {
		t.Fatal(err)
	}
	request, err := body.ParseRequest("/v1/chat/completions", []byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	prompts, err := at.Tokenize(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return prompts[0].IDs
}

// TestWorkersOfTwoVersions: a request whose token ids differ between the versions of its workers' engines goes by the
// version that most of the workers with its prefix run, and by load without one. Other requests do not notice.
func TestWorkersOfTwoVersions(t *testing.T) {
	const plain = `{"model":"m","messages":[{"role":"user","content":"What is the weather in Paris today, please?"}]}`
	const tools = `{"model":"m","messages":[{"role":"user","content":"What is the weather in Paris today?"}],` +
		`"tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}]}`
	// only 0.5.23 knows the role
	const root = `{"model":"m","messages":[{"role":"root","content":"You are a weather station, and nothing else."},` +
		`{"role":"user","content":"hi"}]}`
	endpoints := workers(4)
	for i, version := range []string{"0.5.21", "0.5.21", "0.5.23", ""} { // the last has the model's: the newest
		endpoints[i].EngineVersion = version
	}
	h := newHouse(t, endpoints...)
	model := h.sglang()
	route := func(body string) *Route {
		t.Helper()
		r := h.route(&Request{Path: "/v1/chat/completions", Body: []byte(body)})
		r.Free()
		return r
	}
	if r := route(tools); r.Reason != ReasonEngineVersions || r.PredictedCachedTokens != 0 || r.EngineVersion != "" {
		t.Errorf("without a warm worker: %+v", r.Decision)
	}
	if r := route(plain); r.Reason != ReasonKV || r.EngineVersion != "" {
		t.Errorf("equal ids: %+v", r.Decision)
	}
	if r := route(root); r.Reason != ReasonEngineVersions {
		t.Errorf("only one version takes it, and no worker of it is warm: %+v", r.Decision)
	}

	h.warm("w2", 0, idsBy(t, model, "0.5.23", tools), blocksOfFour)
	r := route(tools)
	if r.Name != "w2" || r.Reason != ReasonKV || r.EngineVersion != "0.5.23" || r.PredictedCachedTokens < 8 ||
		r.PromptTokens != len(idsBy(t, model, "0.5.23", tools)) {
		t.Errorf("one warm worker of 0.5.23: %+v", r.Decision)
	}
	h.warm("w0", 0, idsBy(t, model, "0.5.21", tools), blocksOfFour)
	if r := route(tools); r.Name != "w2" || r.EngineVersion != "0.5.23" {
		t.Errorf("one warm worker of each: %+v, want the newer version", r.Decision)
	}
	h.warm("w1", 0, idsBy(t, model, "0.5.21", tools), blocksOfFour)
	if r := route(tools); r.Name != "w0" && r.Name != "w1" || r.EngineVersion != "0.5.21" || r.Reason != ReasonKV {
		t.Errorf("two warm workers of 0.5.21: %+v", r.Decision)
	}

	// After the rollout all have one version.
	for i := range endpoints {
		endpoints[i].EngineVersion = "0.5.23"
	}
	h.pool.Update(endpoints)
	if r := route(tools); r.Name != "w2" || r.EngineVersion != "" || r.Reason != ReasonKV {
		t.Errorf("after the rollout: %+v", r.Decision)
	}
	if r := route(root); r.Reason != ReasonKV {
		t.Errorf("after the rollout: %+v", r.Decision)
	}
	for i := range endpoints {
		endpoints[i].EngineVersion = "0.5.21"
	}
	h.pool.Update(endpoints)
	if r := route(tools); r.Name != "w0" && r.Name != "w1" || r.EngineVersion != "" {
		t.Errorf("after a rollback: %+v", r.Decision)
	}
}

// TestPredictionsOfTwoVersions: kvepp does not assume that a worker holds the blocks of another version's token ids.
func TestPredictionsOfTwoVersions(t *testing.T) {
	p := &prepared{model: "m"}
	h := newHouse(t, workers(1)...)
	model := h.sglang()
	old, err := model.At("0.5.21")
	if err != nil {
		t.Fatal(err)
	}
	worker := func(version string) *pool.Worker {
		return &pool.Worker{Endpoint: &pool.Endpoint{EngineVersion: version}}
	}
	if !h.predictable(p, worker("0.5.21")) {
		t.Error("a prompt that is equal by all versions is not predicted")
	}
	p.version = old
	if !h.predictable(p, worker("0.5.21")) || h.predictable(p, worker("0.5.23")) || h.predictable(p, worker("")) {
		t.Error("predictions do not go by the worker's version")
	}
}
