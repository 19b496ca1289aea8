package parity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/indexer"
	"kvepp/internal/apibody"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/tokenizer"
)

// vllmBlock is the least block size of vLLM on a CPU; vllmBlocks is small, so that blocks are evicted.
const (
	vllmBlock  = 32
	vllmBlocks = 72
)

// vllm is a whole vLLM that serves a tiny model of random weights.
type vllm struct {
	t        *testing.T
	url      string
	endpoint pool.Endpoint
	log      string
}

// startVLLM starts vLLM with its events on and waits until it serves. folder is a model's tokenizer.
func startVLLM(t *testing.T, folder string) *vllm {
	t.Helper()
	model := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if err := os.Symlink(filepath.Join(folder, name), filepath.Join(model, name)); err != nil {
			t.Fatal(err)
		}
	}
	config, err := json.Marshal(map[string]any{"architectures": []string{"Qwen3ForCausalLM"}, "model_type": "qwen3", "hidden_size": 128,
		"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 151936,
		"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "torch_dtype": "float32",
		"hidden_act": "silu", "bos_token_id": 151643, "eos_token_id": 151645})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(model, "config.json"), config, 0o644); err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	sockets := t.TempDir() // vLLM would bind ports on every interface
	v := &vllm{t: t, url: fmt.Sprintf("http://127.0.0.1:%d", port), log: filepath.Join(t.TempDir(), "vllm.log"), endpoint: pool.Endpoint{
		Name: "vllm", Address: fmt.Sprintf("127.0.0.1:%d", port),
		KVEvents: "ipc://" + sockets + "/events", KVReplay: "ipc://" + sockets + "/replay"}}
	out, err := os.Create(v.log)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(environment(t, "KVEPP_VLLM"), "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", model,
		"--served-model-name", "m", "--load-format", "dummy", "--dtype", "float32", "--block-size", fmt.Sprint(vllmBlock), "--max-model-len", "2048",
		"--num-gpu-blocks-override", fmt.Sprint(vllmBlocks), "--host", "127.0.0.1", "--port", fmt.Sprint(port), "--enforce-eager", "--enable-prompt-tokens-details",
		"--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q}`, v.endpoint.KVEvents, v.endpoint.KVReplay))
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_HOST_IP=127.0.0.1")
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its children too
		<-ended
	})
	for deadline := time.Now().Add(6 * time.Minute); ; <-time.After(200 * time.Millisecond) {
		if resp, err := http.Get(v.url + "/health"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return v
			}
		}
		select {
		case <-ended:
			deadline = time.Time{}
		default:
		}
		if time.Now().After(deadline) {
			text, _ := os.ReadFile(v.log)
			t.Fatalf("vLLM does not serve; the end of its output:\n%s", text[max(0, len(text)-4000):])
		}
	}
}

// ask sends a request and returns how many tokens its prompt has and how many of them vLLM says were cached.
func (v *vllm) ask(path string, body map[string]any) (prompt, cached int, answer string) {
	v.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		v.t.Fatal(err)
	}
	resp, err := http.Post(v.url+path, "application/json", bytes.NewReader(text))
	if err != nil {
		v.t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		v.t.Fatalf("status %d, %v: %s", resp.StatusCode, err, got)
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
		v.t.Fatal(err)
	}
	return r.Usage.PromptTokens, r.Usage.Details.Cached, r.Choices[0].Message.Content
}

// TestVLLM: conversations with a whole vLLM whose cache is too small for them. What the index says before each request is
// what vLLM reports after it.
func TestVLLM(t *testing.T) {
	folder := strings.Fields(environment(t, "KVEPP_MODELS"))[0]
	model, err := tokenizer.Load(folder, tokenizer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	v, h := startVLLM(t, folder), newHouse(t)
	rng := rand.New(rand.NewPCG(1, 2))
	words := strings.Fields("the quick brown fox jumps over a lazy dog while seven wizards quietly mix vexing potions beneath old stone bridges")
	text := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString(words[rng.IntN(len(words))] + " ")
		}
		return b.String()
	}
	// predicted is how many tokens of a request the index says are cached, of which vLLM always computes the last.
	predicted := func(body map[string]any) (cached, all int) {
		t.Helper()
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		request, err := apibody.ParseRequest("/v1/chat/completions", raw)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := model.Tokenize(request)
		if err != nil {
			t.Fatal(err)
		}
		s := h.pool.Acquire()
		defer s.Release()
		o := kvblock.HashOptions{BlockSize: vllmBlock, CacheNamespace: request.CacheSalt}
		var scores indexer.OverlapScores
		h.index.FindMatches(kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, ids[0].IDs, o)), &scores)
		return min(scores.Blocks(s.Workers[0].Worker)*vllmBlock, (len(ids[0].IDs)-1)/vllmBlock*vllmBlock), len(ids[0].IDs)
	}
	chat := func(salt string, messages []any) map[string]any {
		body := map[string]any{"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
		if salt != "" {
			body["cache_salt"] = salt
		}
		return body
	}
	user := func(n int) any { return map[string]any{"role": "user", "content": text(n)} }

	early := chat("", []any{user(200)})
	v.ask("/v1/chat/completions", early)
	h.pool.Update([]pool.Endpoint{v.endpoint})
	eventually(t, "what vLLM computed before anybody listened", func() bool { cached, all := predicted(early); return cached == (all-1)/vllmBlock*vllmBlock })

	conversations := map[string][]any{"": {user(150)}, "tenant-a": {user(150)}, "tenant-b": {user(150)}}
	conversations["again"] = conversations[""]
	requests, hits, evicted := 0, 0, 0
	computed := map[string]int{} // tokens of each conversation that were in full blocks
	for range 12 {
		for _, name := range []string{"", "tenant-a", "tenant-b", "again"} {
			salt := strings.TrimPrefix(name, "again")
			body := chat(salt, conversations[name])
			want, all := predicted(body)
			prompt, cached, answer := v.ask("/v1/chat/completions", body)
			if prompt != all || cached != want {
				t.Fatalf("request %d of %q: vLLM reports %d of %d tokens cached, the index said %d of %d", requests, name, cached, prompt, want, all)
			}
			requests++
			hits += cached
			if cached < computed[name] {
				evicted++
			}
			computed[name] = (all - 1) / vllmBlock * vllmBlock
			conversations[name] = append(conversations[name], map[string]any{"role": "assistant", "content": answer}, user(40))
			if all > 1000 {
				conversations[name], computed[name] = []any{user(150)}, 0
			}
			// Its events come a moment after the answer.
			eventually(t, "the events of a request", func() bool { cached, _ := predicted(body); return cached == (all-1)/vllmBlock*vllmBlock })
		}
	}
	if held := h.index.Stats().Entries; held > vllmBlocks {
		t.Errorf("the index holds %d blocks, vLLM has %d", held, vllmBlocks)
	}
	if hits == 0 || evicted == 0 {
		t.Errorf("%d cached tokens, %d evictions, want some of both", hits, evicted)
	}
	t.Logf("%d requests, %d cached tokens, every one predicted; %d times a conversation had lost blocks", requests, hits, evicted)
}
