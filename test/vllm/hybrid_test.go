package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// hybrid is a tiny hybrid model of random weights.
type hybrid struct {
	name    string
	config  map[string]any
	numbers string   // their type; "": float32
	blocks  int      // of vLLM's cache, which is too small for all prompts, but holds what four running requests need
	block   int      // tokens of full attention's blocks, as vLLM chooses them
	classes string   // as kvepp says them
	flags   []string // of vLLM
	release bool     // tested before a release only: another one has such layers
}

// common are properties that all of these models have.
var common = map[string]any{
	"vocab_size": 151936, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
	"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "bos_token_id": 151643,
	"eos_token_id": 151645, "attention_bias": false, "tie_word_embeddings": true,
}

// model returns the configuration of a tiny model with these layers; nil: more says what they are.
func model(architecture, kind string, layers []string, more map[string]any) map[string]any {
	c := maps.Clone(common)
	maps.Copy(c, map[string]any{"architectures": []string{architecture}, "model_type": kind, "intermediate_size": 256})
	if layers != nil {
		maps.Copy(c, map[string]any{"layer_types": layers, "num_hidden_layers": len(layers)})
	}
	maps.Copy(c, more)
	return c
}

// float is a number that Go would write without its fraction of zero. Transformers takes that for an integer, and
// refuses it.
func float(text string) json.Number { return json.Number(text) }

// layers repeats a kind of layer, before one of full attention.
func layers(n int, kind string) []string {
	return append(slices.Repeat([]string{kind}, n), "full_attention")
}

var hybrids = []hybrid{
	{
		name: "gemma3",
		config: model("Gemma3ForCausalLM", "gemma3_text", layers(5, "sliding_attention"), map[string]any{
			"hidden_activation": "gelu_pytorch_tanh", "rope_theta": float("1000000.0"),
			"rope_local_base_freq":  float("10000.0"),
			"query_pre_attn_scalar": 32, "sliding_window": 128, "sliding_window_pattern": 6,
		}),
		blocks: 800, block: 32, classes: "window of 128 tokens in blocks of 32",
	},
	{
		name: "gpt-oss",
		config: model("GptOssForCausalLM", "gpt_oss",
			slices.Repeat(layers(1, "sliding_attention"), 2), map[string]any{
				"intermediate_size": 128, "hidden_act": "silu", "rope_theta": float("150000.0"), "sliding_window": 128,
				"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "attention_bias": true,
				"attention_dropout": float("0.0"), "swiglu_limit": float("7.0"), "torch_dtype": "bfloat16",
				"tie_word_embeddings": false, "initial_context_length": 4096,
				"rope_scaling": map[string]any{"rope_type": "yarn", "factor": float("2.0"),
					"beta_fast": float("32.0"), "beta_slow": float("1.0"),
					"original_max_position_embeddings": 4096, "truncate": false},
				"router_aux_loss_coef": 0.9, "output_router_logits": false,
			}),
		numbers: "bfloat16", blocks: 400, block: 32, classes: "window of 128 tokens in blocks of 32", release: true,
	},
	{
		name: "llama4",
		config: model("Llama4ForCausalLM", "llama4_text", layers(3, "chunked_attention"), map[string]any{
			"intermediate_size": 128, "intermediate_size_mlp": 256, "hidden_act": "silu",
			"rope_theta":           float("500000.0"),
			"attention_chunk_size": 256, "no_rope_layers": []int{1, 1, 1, 0}, "interleave_moe_layer_step": 0,
			"moe_layers": []int{}, "num_local_experts": 1, "num_experts_per_tok": 1, "use_qk_norm": true,
			"attn_temperature_tuning": false, "for_llm_compressor": false,
		}),
		blocks: 640, block: 32, classes: "chunk in blocks of 32",
	},
	{
		name: "qwen3-next",
		config: model("Qwen3NextForCausalLM", "qwen3_next", layers(3, "linear_attention"), map[string]any{
			"num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu", "rope_theta": float("10000.0"),
			"partial_rotary_factor": 0.5, "attention_dropout": float("0.0"), "linear_conv_kernel_dim": 4,
			"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
			"linear_num_value_heads": 1, "decoder_sparse_step": 1, "moe_intermediate_size": 64,
			"shared_expert_intermediate_size": 64, "num_experts_per_tok": 2, "num_experts": 4, "norm_topk_prob": true,
			"output_router_logits": false, "mlp_only_layers": []int{}, "full_attention_interval": 4, "use_cache": true,
		}),
		numbers: "bfloat16", blocks: 160, block: 64, classes: "state in blocks of 64",
		// Without this flag vLLM keeps states in float32 on CPUs with AVX-512 BF16, and its blocks have 96 tokens.
		flags:   []string{"--mamba-ssm-cache-dtype", "bfloat16"},
		release: true,
	},
	{
		name: "lfm2",
		config: model("Lfm2ForCausalLM", "lfm2", []string{"conv", "conv", "full_attention", "conv"}, map[string]any{
			"block_ff_dim": 256, "block_multiple_of": 32, "block_ffn_dim_multiplier": float("1.0"),
			"block_auto_adjust_ff_dim": false, "norm_eps": 1e-5, "rope_theta": float("1000000.0"), "conv_bias": false,
			"conv_L_cache": 3, "block_dim": 128, "conv_dim": 128, "conv_dim_out": 128, "conv_use_xavier_init": true,
			"full_attn_idxs": []int{2}, "tie_embedding": true,
		}),
		blocks: 300, block: 32, classes: "state in blocks of 32",
	},
}

const (
	hybridAlone    = 60 // requests of each model that are sent one at a time
	hybridTogether = 40 // and those that run four at once, in each round
	hybridRounds   = 4  // at most
	hybridLongest  = 1500
)

// release is for a release, and for who changes how kvepp follows such models.
var release = flag.Bool("full", false, "all hybrid models, not only one with each kind of layers; and 1,000 requests "+
	"of conversations, not 400")

// TestHybrids: kvepp predicts what vLLM reuses for hybrid models, whose layers evict what they keep on their own.
func TestHybrids(t *testing.T) {
	folder := strings.Fields(environment(t, "KVEPP_MODELS"))[0]
	began := time.Now()
	hybrids := hybrids
	if !*release {
		hybrids = slices.DeleteFunc(slices.Clone(hybrids), func(h hybrid) bool { return h.release })
	}
	var configs []stack.VLLMConfig
	for _, h := range hybrids {
		configs = append(configs, stack.VLLMConfig{Python: python(t), Dir: t.TempDir(), Tokenizer: folder,
			Model: h.config, Type: h.numbers, Blocks: h.blocks,
			Flags: append([]string{"--max-model-len", "2048", "--max-num-batched-tokens", "512"}, h.flags...)})
	}
	all, err := stack.StartVLLMs("serve.py", configs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(all[0].Close)
	cut := 0
	for i, h := range hybrids {
		t.Run(h.name, func(t *testing.T) {
			if err := all[i].Await(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Logf("it serves %v after the start", time.Since(began).Round(time.Second))
			b := newBench(t, all[i], configs[i].ModelFolder(), nil)
			r := &hybridRun{bench: b, hybrid: &h, traffic: newTraffic()}
			r.first()
			cut += r.alone()
			r.rounds()
			t.Logf("done %v after the start", time.Since(began).Round(time.Second))
		})
	}
	if t.Failed() {
		return
	}
	if cut < len(hybrids) {
		t.Errorf("the other layers cut only %d prompts: these requests do not show what this test is for", cut)
	}
}

// hybridRun sends prompts to a hybrid model.
type hybridRun struct {
	*bench
	*hybrid
	traffic *traffic
	reason  string // of kvepp's decisions; empty: any
}

// sent is a request with its response.
type sent struct {
	prompt, all         []kvblock.Token // all: with the response
	predicted, reported int             // cached tokens
	began, ended        time.Time
	evicted             bool // vLLM removed blocks meanwhile
}

// heldByFull is how much of a prompt full attention holds, and the classes that kvepp names.
func (r *hybridRun) heldByFull(ids []kvblock.Token) (tokens int, classes []string) {
	var response struct {
		Instances map[string]struct {
			Hybrid map[string]struct {
				Classes []string
				Full    int  `json:"full_attention"`
				Upper   bool `json:"upper_bound"`
			}
		}
	}
	r.post(r.stack.Admin()+"/query", map[string]any{"model_name": "", "token_ids": ids}, &response)
	for _, instance := range response.Instances {
		for _, rank := range instance.Hybrid {
			if rank.Upper {
				r.t.Fatalf("kvepp calls its prediction an upper bound; classes: %q", rank.Classes)
			}
			return rank.Full, rank.Classes
		}
	}
	return 0, nil
}

// settle waits until the index has all blocks of a request and its response. vLLM does not compute the last token.
func (r *hybridRun) settle(s *sent) {
	r.t.Helper()
	computed := s.all[:len(s.all)-1]
	want := len(computed) / r.block * r.block
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	err := process.Until(ctx, func() error {
		held, classes := r.heldByFull(computed)
		if held < want {
			return fmt.Errorf("the index has %d of %d tokens", held, want)
		}
		if want > 0 && strings.Join(classes, ", ") != r.classes {
			return fmt.Errorf("classes %q, want %q", classes, r.classes)
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// removals is how many removals of blocks kvepp has applied.
func (r *hybridRun) removals() float64 {
	m, err := r.stack.Metrics(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return m[`kvepp_events_total{kind="removed",outcome="applied"}`]
}

// send sends a prompt and reads what kvepp predicted and vLLM reports.
func (r *hybridRun) send(prompt []kvblock.Token, response int) (*sent, error) {
	s := &sent{prompt: prompt, began: time.Now()}
	a, err := stack.Post(r.t.Context(), http.DefaultClient, r.stack.Envoy.URL+"/v1/completions", nil, map[string]any{
		"model": stack.Model, "prompt": prompt, "max_tokens": response, "ignore_eos": true, "return_token_ids": true,
		"temperature": 0,
	})
	s.ended = time.Now()
	if err != nil || a.Status != http.StatusOK || r.reason != "" && a.Reason != r.reason ||
		a.KveppPrompt != len(prompt) || a.PromptTokens != len(prompt) {
		return nil, fmt.Errorf("a prompt of %d tokens: %v, %+v", len(prompt), err, a)
	}
	var body struct {
		Choices []struct {
			IDs []kvblock.Token `json:"token_ids"`
		}
	}
	if err := json.Unmarshal([]byte(a.Body), &body); err != nil || len(body.Choices) != 1 ||
		len(body.Choices[0].IDs) != response {
		return nil, fmt.Errorf("%v: no token ids in %s", err, a.Body)
	}
	s.all = append(slices.Clone(prompt), body.Choices[0].IDs...)
	s.predicted, s.reported = a.KveppCached, max(a.CachedTokens, 0)
	return s, nil
}

// first sends a request, before which kvepp does not know the worker's block size, so that its reason is another one
// than those of the others.
func (r *hybridRun) first() {
	s, err := r.send(r.traffic.fresh(2*r.block), 1)
	if err != nil {
		r.t.Fatal(err)
	}
	r.reason = "kv"
	r.settle(s)
}

// alone sends requests one at a time, each when the events of the one before have arrived. Each prediction is right.
// It returns for how many of them the other layers cut what full attention holds.
func (r *hybridRun) alone() (cut int) {
	t, cached, right := r.t, 0, 0
	before := r.removals()
	for n := range hybridAlone {
		prompt := r.traffic.next()
		full, _ := r.heldByFull(prompt)
		s, err := r.send(prompt, 1+r.traffic.IntN(6))
		if err != nil {
			t.Fatalf("request %d: %v", n, err)
		}
		if s.predicted == s.reported {
			right++
		} else {
			t.Errorf("request %d: vLLM reports %d of %d tokens cached, kvepp predicted %d; full attention holds %d",
				n, s.reported, len(prompt), s.predicted, full)
		}
		if cached += s.reported; min(full, (len(prompt)-1)/r.block*r.block) > s.reported {
			cut++
		}
		r.settle(s)
		r.traffic.done(s)
	}
	removed := r.removals() - before
	t.Logf("one at a time: %d of %d requests predicted exactly; of %d the other layers cut what full attention holds; "+
		"%d tokens cached, %.0f removals", right, hybridAlone, cut, cached, removed)
	if cached == 0 || removed < 50 {
		t.Error("these requests do not show what this test is for")
	}
	return cut
}

// rounds sends requests, four at once: 85 of 100 must be predicted exactly, and together finds the reason of each other
// one. How many race depends on the machine, so that there are more rounds if the first ones were unlucky.
func (r *hybridRun) rounds() {
	right, all := 0, 0
	for range hybridRounds {
		right, all = right+r.together(), all+hybridTogether
		if 100*right >= 85*all || r.t.Failed() {
			break
		}
	}
	r.t.Logf("four at once: %d of %d requests predicted exactly", right, all)
	if 100*right < 85*all {
		r.t.Errorf("four at once: 85 of 100 must be predicted exactly")
	}
}

// together sends requests, four at once. Few predictions are wrong, each for a reason that no router can
// know of: another request computed the blocks, or evicted them, between the decision and the engine's own lookup.
func (r *hybridRun) together() (right int) {
	t := r.t
	var mu sync.Mutex // guards traffic and all
	var all []*sent
	var running sync.WaitGroup
	left := make(chan struct{}, hybridTogether)
	for range hybridTogether {
		left <- struct{}{}
	}
	close(left)
	for range 4 {
		running.Go(func() {
			for range left {
				mu.Lock()
				prompt, response := r.traffic.next(), 1+r.traffic.IntN(6)
				mu.Unlock()
				before := r.removals()
				s, err := r.send(prompt, response)
				if err != nil {
					t.Error(err)
					return
				}
				if s.reported < s.predicted {
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					s.evicted = process.Until(ctx, func() error { // the events may come after the response
						if r.removals() == before {
							return errors.New("no removals")
						}
						return nil
					}) == nil
					cancel()
				}
				mu.Lock()
				r.traffic.done(s)
				all = append(all, s)
				mu.Unlock()
			}
		})
	}
	running.Wait()
	for _, s := range all {
		switch {
		case s.predicted == s.reported:
			right++
		case s.reported > s.predicted && slices.ContainsFunc(all, func(o *sent) bool { return o.filled(s) }):
			t.Logf("%d of %d tokens cached, predicted %d: another request computed them meanwhile", s.reported,
				len(s.prompt), s.predicted)
		case s.reported < s.predicted && s.evicted:
			t.Logf("%d of %d tokens cached, predicted %d: vLLM evicted blocks meanwhile", s.reported,
				len(s.prompt), s.predicted)
		default:
			t.Errorf("%d of %d tokens cached, predicted %d: no request explains that", s.reported, len(s.prompt),
				s.predicted)
		}
	}
	return right
}

// eventsTake is how long the events of a request may be on their way to kvepp, on a busy machine.
const eventsTake = 5 * time.Second

// filled reports whether o ran when s began, or had its events on the way, and has the tokens that s was found to have.
func (o *sent) filled(s *sent) bool {
	return o != s && o.began.Before(s.ended) && o.ended.Add(eventsTake).After(s.began) && len(o.all) >= s.reported &&
		slices.Equal(o.all[:s.reported], s.prompt[:s.reported])
}

// traffic makes prompts: with shared beginnings, conversations that grow by vLLM's own responses, repeats, and cuts and
// branches of earlier prompts.
type traffic struct {
	*rand.Rand
	shared [][]kvblock.Token
	past   []*sent
}

func newTraffic() *traffic {
	t := &traffic{Rand: rand.New(rand.NewPCG(20, 0))}
	for range 5 {
		t.shared = append(t.shared, t.fresh(60+t.IntN(700)))
	}
	return t
}

// fresh returns tokens that no other prompt has.
func (t *traffic) fresh(n int) []kvblock.Token {
	ids := make([]kvblock.Token, n)
	for i := range ids {
		ids[i] = kvblock.Token(1000 + t.IntN(149_000))
	}
	return ids
}

// next returns the next prompt.
func (t *traffic) next() []kvblock.Token {
	join := func(a, b []kvblock.Token) []kvblock.Token { return append(slices.Clone(a), b...) }
	prompt := join(t.shared[t.IntN(len(t.shared))], t.fresh(1+t.IntN(400)))
	if len(t.past) == 0 {
		return prompt
	}
	of := t.past[max(len(t.past)-1-t.IntN(20), 0)]
	from := prompt
	switch n := t.IntN(100); {
	case n < 25:
	case n < 60:
		from = join(of.all, t.fresh(1+t.IntN(200)))
	case n < 72:
		from = of.prompt
	case n < 88:
		from = join(of.prompt[:1+t.IntN(len(of.prompt))], t.fresh(1+t.IntN(300)))
	default:
		from = of.prompt[:1+t.IntN(len(of.prompt))]
	}
	if len(from) > hybridLongest {
		return prompt
	}
	return from
}

// done notes an answered prompt.
func (t *traffic) done(s *sent) { t.past = append(t.past, s) }
