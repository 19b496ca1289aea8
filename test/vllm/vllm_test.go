// Package vllm compares kvepp, behind a real Envoy, with a whole vLLM on the CPU: the token ids of requests, and the
// cached tokens of each.
package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

const (
	maxTokens = 1800 // of a conversation; then another one replaces it
	blocks    = 640  // of vLLM's cache, which is too small for all conversations
)

func environment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set: run `make test-vllm`, which fetches what this test needs and sets it", name)
	}
	return value
}

func python(t *testing.T) string { return filepath.Join(environment(t, "KVEPP_VLLM"), "bin/python") }

// adapters are the names of vLLM's LoRA adapters.
var adapters = []string{"sql", "legal"}

// TestVLLM compares kvepp with one vLLM in several ways, each with its own kvepp and Envoy. They share vLLM, because
// its start takes up to a minute.
func TestVLLM(t *testing.T) {
	folder := strings.Fields(environment(t, "KVEPP_MODELS"))[0]
	model, err := prompt.Load(folder, prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	flags := []string{"--max-model-len", "4096", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
		"--enable-lora", "--max-loras", fmt.Sprint(len(adapters)), "--max-lora-rank", "8", "--lora-modules"}
	for i, name := range adapters {
		weights := filepath.Join(dir, name)
		if err := stack.WriteAdapter(weights, uint64(i)); err != nil {
			t.Fatal(err)
		}
		flags = append(flags, name+"="+weights)
	}
	vllm, err := stack.StartVLLM(t.Context(), stack.VLLMConfig{Python: python(t), Dir: dir, Tokenizer: folder,
		Blocks: blocks, Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(vllm.Close)
	run := func(name string, test func(*bench), flags ...string) {
		t.Run(name, func(t *testing.T) { test(newBench(t, vllm, folder, model, flags...)) })
	}
	run("check", testCheck)
	run("load", testLoad, "--refresh-metrics-interval=2s")
	// Without metrics kvepp does not ask vLLM for its adapters either.
	run("adapters", testAdapters, "--lora=sql="+stack.Model, "--refresh-metrics-interval=0")
	run("tenants", testTenants, "--tenant-cache-salt")
	run("salts", testSalts)
	run("conversations", testConversations)
}

// bench is a vLLM with kvepp and Envoy in front of it.
type bench struct {
	t     *testing.T
	vllm  *stack.VLLM
	stack *stack.Stack
	model *prompt.Model
}

// newBench starts kvepp with these flags and Envoy, and waits until kvepp is subscribed to vLLM.
func newBench(t *testing.T, vllm *stack.VLLM, folder string, model *prompt.Model, flags ...string) *bench {
	t.Helper()
	b := &bench{t: t, vllm: vllm, model: model}
	var err error
	b.stack, err = stack.Start(
		t.Context(),
		stack.Config{Root: "../..", Tools: environment(t, "KVEPP_TOOLS"), Workers: -1,
			KveppModel: folder, KveppFlags: append([]string{"--engine=vllm"}, flags...), Manifest: "original-dst.yaml"},
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.stack.Close)
	if err := b.stack.ReplaceEndpoints("endpoints:\n" + vllm.Entry()); err != nil {
		t.Fatal(err)
	}
	if err := b.stack.Settled(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	return b
}

// conversation is one client's conversation: the common part of its requests, and its messages so far.
type conversation struct {
	salt     string
	with     map[string]any // further keys of its bodies
	messages []any
}

// words are pieces of text in many scripts, with characters that are hard for tokenizers.
var words = strings.Fields(
	`the quick brown fox jumps over a lazy dog while seven wizards quietly mix vexing potions beneath old stone bridges
	don't I'LL we've 3.14159 2026-11-21 10,000 0x7fff !!! ... ?! -- => {"key":[1,null]} <tag/> <|im_start|> ` +
		`</think> https://host/path?q=1&r=%20
	Grüße Ærøskøbing naïve İstanbul ſtraße Ελληνικά Привет мир Ҩ שָׁלוֹם مرحبا नमस्ते สวัสดี 你好世界 こんにちは 안녕하세요 ℌ𝔢𝔩𝔩𝔬 ` +
		`① ½ é e` + "\u0301" + ` 👍🏽 👨‍👩‍👧 🇳🇴 ` + "\u200b \ufeff ﷺ \u2028",
)

var spaces = []string{" ", " ", " ", " ", "  ", "\n", "\n\n", "\t", " \n ", "", "\u00a0", "\r\n"}

func text(rng *rand.Rand, n int) string {
	var b strings.Builder
	for range n {
		b.WriteString(words[rng.IntN(len(words))] + spaces[rng.IntN(len(spaces))])
	}
	return b.String()
}

// user returns a user's message, as a text or in parts.
func user(rng *rand.Rand, n int) any {
	if rng.IntN(4) == 0 {
		return map[string]any{
			"role": "user",
			"content": []any{
				map[string]any{"type": "text", "text": text(rng, n/2)},
				map[string]any{"type": "text", "text": text(rng, n/2)},
			},
		}
	}
	return map[string]any{"role": "user", "content": text(rng, n)}
}

// newConversation returns a conversation of a random kind: salted or not, with a system prompt, tools or template
// arguments, or none.
func newConversation(rng *rand.Rand) *conversation {
	c := &conversation{with: map[string]any{}}
	if rng.IntN(3) == 0 {
		c.salt = fmt.Sprintf("tenant-%d", rng.IntN(3))
	}
	if rng.IntN(2) == 0 { // one of a few, so that conversations share prefixes
		shared := rand.New(rand.NewPCG(uint64(rng.IntN(3)), 0))
		c.messages = append(c.messages, map[string]any{"role": "system", "content": text(shared, 120)})
	}
	if rng.IntN(3) == 0 {
		c.with["tools"] = []any{tool("weather", "place", "unit"), tool("Suche", "текст")}[:1+rng.IntN(2)]
	}
	if rng.IntN(4) == 0 {
		c.with["chat_template_kwargs"] = map[string]any{"enable_thinking": rng.IntN(2) == 0}
	}
	c.messages = append(c.messages, user(rng, 20+rng.IntN(100)))
	return c
}

func tool(name string, arguments ...string) any {
	properties := map[string]any{}
	for _, a := range arguments {
		properties[a] = map[string]any{"type": "string", "description": "the " + a + " – \"as given\""}
	}
	return map[string]any{"type": "function", "function": map[string]any{"name": name, "description": "Looks it up.",
		"parameters": map[string]any{"type": "object", "properties": properties, "required": arguments}}}
}

// grow adds a turn: vLLM's response, or a tool's calls and results, and the user's next message.
func (c *conversation) grow(rng *rand.Rand, response string) {
	if c.with["tools"] != nil && rng.IntN(2) == 0 {
		c.messages = append(
			c.messages,
			map[string]any{
				"role":    "assistant",
				"content": nil,
				"tool_calls": []any{map[string]any{"id": "call_1", "type": "function",
					"function": map[string]any{
						"name":      "weather",
						"arguments": `{"place": "Zürich", "unit": "°C", "n": 1.50}`,
					}}},
			},
			map[string]any{"role": "tool", "tool_call_id": "call_1", "content": text(rng, 10)},
		)
	} else {
		c.messages = append(c.messages, map[string]any{"role": "assistant", "content": response})
	}
	c.messages = append(c.messages, user(rng, 5+rng.IntN(40)))
}

func (c *conversation) body(stream bool) map[string]any {
	body := map[string]any{
		"model":       stack.Model,
		"messages":    c.messages,
		"max_tokens":  3,
		"temperature": 0,
		"stream":      stream,
	}
	maps.Copy(body, c.with)
	if stream {
		body["stream_options"] = map[string]any{"include_usage": true}
	}
	if c.salt != "" {
		body["cache_salt"] = c.salt
	}
	return body
}

// post sends a JSON body and decodes a JSON response.
func (b *bench) post(url string, body, into any) {
	b.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		b.t.Fatal(err)
	}
	resp, err := http.Post(url, "application/json", bytes.NewReader(raw))
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	response, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		b.t.Fatalf("%s: status %d, %v: %s", url, resp.StatusCode, err, response)
	}
	if err := json.Unmarshal(response, into); err != nil {
		b.t.Fatalf("%s: %v: %s", url, err, response)
	}
}

// ids returns kvepp's token ids of a chat.
func (b *bench) ids(payload map[string]any) []kvblock.Token {
	b.t.Helper()
	raw, err := json.Marshal(payload)
	if err != nil {
		b.t.Fatal(err)
	}
	request, err := body.ParseRequest("/v1/chat/completions", raw)
	if err != nil {
		b.t.Fatal(err)
	}
	prompts, err := b.model.Tokenize(b.t.Context(), request)
	if err != nil {
		b.t.Fatal(err)
	}
	return prompts[0].IDs
}

// vllmIDs returns vLLM's token ids of a chat.
func (b *bench) vllmIDs(body map[string]any) []kvblock.Token {
	b.t.Helper()
	asked := map[string]any{"add_generation_prompt": true}
	for _, key := range []string{"model", "messages", "tools", "chat_template_kwargs"} {
		if v, ok := body[key]; ok {
			asked[key] = v
		}
	}
	var response struct{ Tokens []kvblock.Token }
	b.post("http://"+b.vllm.Address+"/tokenize", asked, &response)
	return response.Tokens
}

// space separates blocks of the same tokens; empty: none.
type space struct{ lora, salt string }

// held returns how many tokens of a prompt kvepp's index has for vLLM.
func (b *bench) held(ids []kvblock.Token, in space) int {
	b.t.Helper()
	query := map[string]any{"model_name": "", "token_ids": ids}
	if in.lora != "" {
		query["lora_name"] = in.lora
	}
	if in.salt != "" {
		query["cache_salt"] = in.salt
	}
	var response struct {
		Scores map[string]map[string]int
	}
	b.post(b.stack.Admin()+"/query", query, &response)
	for _, ranks := range response.Scores {
		for _, tokens := range ranks {
			return tokens
		}
	}
	return 0
}

// await waits until the index has all full blocks of a request.
func (b *bench) await(request string, ids []kvblock.Token, in space) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	err := process.Until(ctx, func() error {
		if held := b.held(ids, in); held < full(len(ids)) {
			return fmt.Errorf("%s: the index has %d of its %d tokens", request, held, len(ids))
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// full returns how many of n prompt tokens vLLM may reuse for a prompt of n: full blocks, and never the last token.
func full(n int) int { return (n - 1) / stack.VLLMBlockSize * stack.VLLMBlockSize }

// testConversations holds many conversations, which are too large for vLLM's cache together. Each request's token ids
// equal vLLM's, and kvepp's predicted cached tokens equal what vLLM reports.
func testConversations(b *bench) {
	t := b.t
	rng := rand.New(rand.NewPCG(4, 0))
	var running [12]*conversation
	var prompted, cached, lost, streamed, missed int
	last := map[*conversation]int{} // tokens in full blocks after its latest request
	requests := 400
	if *release {
		requests = 1000
	}
	for n := range requests {
		if n%100 == 0 {
			t.Logf("%d of %d requests", n, requests)
		}
		at := rng.IntN(len(running))
		if running[at] == nil {
			running[at] = newConversation(rng)
		}
		c := running[at]
		body := c.body(rng.IntN(2) == 0)
		ids := b.ids(body)
		if theirs := b.vllmIDs(body); !slices.Equal(ids, theirs) {
			raw, _ := json.Marshal(body)
			t.Fatalf(
				"request %d: kvepp has %d token ids, vLLM %d, and they differ:\n%v\n%v\n%s",
				n,
				len(ids),
				len(theirs),
				ids,
				theirs,
				raw,
			)
		}
		a, err := stack.Post(t.Context(), http.DefaultClient, b.stack.Envoy.URL+"/v1/chat/completions", nil, body)
		if err != nil || a.Status != http.StatusOK || a.Reason != "kv" || a.KveppPrompt != len(ids) ||
			a.PromptTokens != len(ids) {
			t.Fatalf("request %d of %d tokens: %v, %+v", n, len(ids), err, a)
		}
		prompted, cached = prompted+a.PromptTokens, cached+a.CachedTokens
		if want := min(a.KveppCached, full(len(ids))); a.CachedTokens != want {
			missed++
			t.Logf(
				"request %d: vLLM reports %d of %d tokens cached, kvepp predicted %d",
				n,
				a.CachedTokens,
				len(ids),
				want,
			)
		}
		if a.CachedTokens < last[c] {
			lost++
		}
		if body["stream"] == true {
			streamed++
		}
		last[c] = full(len(ids))
		// Its events come a moment after the response.
		b.await(fmt.Sprintf("request %d", n), ids, space{salt: c.salt})
		c.grow(rng, a.Text)
		if len(ids) > maxTokens || rng.IntN(40) == 0 {
			running[at] = nil
			delete(last, c)
		}
	}
	t.Logf(
		"%d requests (%d streamed) with %d prompt tokens, each id vLLM's; %d tokens cached, predicted for all "+
			"requests but %d; %d times a conversation had lost blocks",
		requests,
		streamed,
		prompted,
		cached,
		missed,
		lost,
	)
	if missed > requests/100 {
		t.Errorf("%d of %d predictions were wrong", missed, requests)
	}
	if cached == 0 || lost == 0 || streamed == 0 {
		t.Error("the requests do not cover what this test needs")
	}
}
