package parity

import (
	"bytes"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/test/harness/stack"
)

// vllmBlocks is a small cache, so that blocks are evicted.
const vllmBlocks = 72

const vllmBlock = stack.VLLMBlockSize

// ask sends a request. It returns the prompt's tokens and how many of them vLLM reports as cached.
func ask(t *testing.T, v *stack.VLLM, path string, body map[string]any) (prompt, cached int, response string) {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post("http://"+v.Address+path, "application/json", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("status %d, %v: %s", resp.StatusCode, err, got)
	}
	var r struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			PromptTokens int `json:"prompt_tokens"`
			Details      struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal(got, &r); err != nil {
		t.Fatal(err)
	}
	return r.Usage.PromptTokens, r.Usage.Details.Cached, r.Choices[0].Message.Content
}

// TestVLLM holds conversations with a whole vLLM whose cache is too small for them. Before each request, the index
// predicts exactly the cached tokens that vLLM reports after it.
func TestVLLM(t *testing.T) {
	folder := strings.Fields(environment(t, "KVEPP_MODELS"))[0]
	model, err := prompt.Load(folder, prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	v, err := stack.StartVLLM(t.Context(), stack.VLLMConfig{
		Python: filepath.Join(environment(t, "KVEPP_VLLM"), "bin/python"), Dir: t.TempDir(), Tokenizer: folder,
		Blocks: vllmBlocks, Flags: []string{"--max-model-len", "2048"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	h := newFixture(t)
	rng := rand.New(rand.NewPCG(1, 2))
	words := strings.Fields(
		"the quick brown fox jumps over a lazy dog while seven wizards quietly mix vexing potions beneath old stone " +
			"bridges",
	)
	text := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString(words[rng.IntN(len(words))] + " ")
		}
		return b.String()
	}
	// predicted returns how many tokens of a request the index has as cached. vLLM always computes the last token.
	predicted := func(payload map[string]any) (cached, all int) {
		t.Helper()
		raw, err := json.Marshal(payload)
		if err != nil {
			t.Fatal(err)
		}
		request, err := body.ParseRequest("/v1/chat/completions", raw)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := model.Tokenize(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		s := h.pool.Acquire()
		defer s.Release()
		o := kvblock.HashOptions{BlockSize: vllmBlock, CacheNamespace: request.CacheSalt}
		var scores indexer.OverlapScores
		h.index.FindMatches(kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, ids[0].IDs, o)), &scores)
		return min(
				scores.Blocks(s.Workers[0].Worker)*vllmBlock,
				(len(ids[0].IDs)-1)/vllmBlock*vllmBlock,
			), len(
				ids[0].IDs,
			)
	}
	chat := func(salt string, messages []any) map[string]any {
		payload := map[string]any{"model": stack.Model, "messages": messages, "max_tokens": 4, "temperature": 0}
		if salt != "" {
			payload["cache_salt"] = salt
		}
		return payload
	}
	user := func(n int) any { return map[string]any{"role": "user", "content": text(n)} }

	early := chat("", []any{user(200)})
	ask(t, v, "/v1/chat/completions", early)
	h.pool.Update([]pool.Endpoint{{Name: "vllm", Address: v.Address, KVEvents: v.KVEvents, KVReplay: v.KVReplay}})
	eventually(
		t,
		"the blocks that vLLM computed before kvepp subscribed",
		func() bool { cached, all := predicted(early); return cached == (all-1)/vllmBlock*vllmBlock },
	)

	conversations := map[string][]any{"": {user(150)}, "tenant-a": {user(150)}, "tenant-b": {user(150)}}
	conversations["again"] = conversations[""]
	requests, hits, evicted := 0, 0, 0
	computed := map[string]int{} // tokens of each conversation that were in full blocks
	for range 12 {
		for _, name := range []string{"", "tenant-a", "tenant-b", "again"} {
			salt := strings.TrimPrefix(name, "again")
			payload := chat(salt, conversations[name])
			want, all := predicted(payload)
			input, cached, response := ask(t, v, "/v1/chat/completions", payload)
			if input != all || cached != want {
				t.Fatalf(
					"request %d of %q: vLLM reports %d of %d tokens cached, the index predicted %d of %d",
					requests,
					name,
					cached,
					input,
					want,
					all,
				)
			}
			requests++
			hits += cached
			if cached < computed[name] {
				evicted++
			}
			computed[name] = (all - 1) / vllmBlock * vllmBlock
			conversations[name] = append(
				conversations[name],
				map[string]any{"role": "assistant", "content": response},
				user(40),
			)
			if all > 1000 {
				conversations[name], computed[name] = []any{user(150)}, 0
			}
			// Its events come a moment after the response.
			eventually(
				t,
				"the events of a request",
				func() bool { cached, _ := predicted(payload); return cached == (all-1)/vllmBlock*vllmBlock },
			)
		}
	}
	if held := h.index.Stats().Entries; held > vllmBlocks {
		t.Errorf("the index has %d blocks, vLLM %d", held, vllmBlocks)
	}
	if hits == 0 || evicted == 0 {
		t.Errorf("%d cached tokens, %d evictions, want some of both", hits, evicted)
	}
	t.Logf(
		"%d requests, %d cached tokens, every one predicted; %d times a conversation had lost blocks",
		requests,
		hits,
		evicted,
	)
}
