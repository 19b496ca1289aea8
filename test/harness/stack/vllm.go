package stack

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"kvepp/test/harness/process"
)

// VLLM is a whole vLLM on the CPU. It serves a tiny model of random weights under the name Model, so its responses are
// meaningless; the rest is real.
type VLLM struct {
	Address            string // host:port of its HTTP server
	KVEvents, KVReplay string // its sockets
	// BlockSize is for its entry in the endpoints file; 0: kvepp learns it from the events.
	BlockSize int

	stack   *Stack
	process *process.Process
}

// VLLMBlockSize is its KV block size in tokens: the smallest that vLLM has on a CPU. Some hybrid models get another.
const VLLMBlockSize = 32

// VLLMConfig says which vLLM to start. Python is the interpreter for which test/tools/install.sh vllm installed it. Its
// log goes to Dir, and its model to ModelFolder.
type VLLMConfig struct {
	Python, Dir string
	Tokenizer   string         // folder of a tokenizer of Qwen's
	Model       map[string]any // its config.json; nil: a tiny Qwen3
	Type        string         // of its numbers; "": float32
	Blocks      int            // size of the cache
	Flags       []string
}

// ModelFolder is the folder with the model's configuration and tokenizer.
func (c *VLLMConfig) ModelFolder() string { return filepath.Join(c.Dir, "model") }

// qwen is the configuration of a tiny Qwen3.
func qwen() map[string]any {
	return map[string]any{
		"architectures":           []string{"Qwen3ForCausalLM"},
		"model_type":              "qwen3",
		"hidden_size":             tinyQwen.hidden,
		"intermediate_size":       256,
		"num_hidden_layers":       tinyQwen.layers,
		"num_attention_heads":     tinyQwen.heads,
		"num_key_value_heads":     tinyQwen.kvHeads,
		"head_dim":                tinyQwen.headSize,
		"vocab_size":              151936,
		"max_position_embeddings": 8192,
		"rms_norm_eps":            1e-6,
		"rope_theta":              1e6,
		"tie_word_embeddings":     true,
		"torch_dtype":             "float32",
		"hidden_act":              "silu",
		"bos_token_id":            151643,
		"eos_token_id":            151645,
	}
}

// StartVLLM starts vLLM with KV events and waits until it serves.
func StartVLLM(ctx context.Context, c VLLMConfig) (*VLLM, error) {
	v, args, err := c.prepare()
	if err != nil {
		return nil, err
	}
	argv := append([]string{c.Python, "-m", "vllm.entrypoints.cli.main", "serve"}, args...)
	if v.process, err = v.stack.spawn("vllm", vllmEnvironment, argv...); err != nil {
		return nil, err
	}
	if err := v.Await(ctx); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// StartVLLMs starts several vLLMs with a script that takes a file with their arguments (test/vllm/serve.py), so that
// vLLM is imported once. Their log files are vllm.log in each config's Dir. The caller awaits and closes them. Closing
// one ends all.
func StartVLLMs(script string, configs []VLLMConfig) (all []*VLLM, err error) {
	var specs [][]string
	for _, c := range configs {
		v, args, err := c.prepare()
		if err != nil {
			return nil, err
		}
		all = append(all, v)
		specs = append(specs, append([]string{filepath.Join(c.Dir, "vllm.log")}, args...))
	}
	text, err := json.Marshal(specs)
	if err != nil {
		return nil, err
	}
	first := all[0].stack
	file := filepath.Join(first.dir, "servers.json")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		return nil, err
	}
	process, err := first.spawn("servers", vllmEnvironment, configs[0].Python, script, file)
	for _, v := range all {
		v.process = process
	}
	return all, err
}

// Await waits until vLLM serves.
func (v *VLLM) Await(ctx context.Context) error {
	return v.stack.up(ctx, "vLLM", process.Healthy("http://"+v.Address), v.process)
}

var vllmEnvironment = []string{"HF_HUB_OFFLINE=1", "VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1",
	"VLLM_NO_USAGE_STATS=1", "VLLM_HOST_IP=127.0.0.1"}

// prepare writes the model, and returns the arguments of "vllm serve".
func (c *VLLMConfig) prepare() (v *VLLM, args []string, err error) {
	model := c.ModelFolder()
	if err := os.MkdirAll(model, 0o755); err != nil {
		return nil, nil, err
	}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if err := os.Symlink(filepath.Join(c.Tokenizer, name), filepath.Join(model, name)); err != nil {
			return nil, nil, err
		}
	}
	properties, blockSize := c.Model, 0
	if properties == nil {
		properties, blockSize = qwen(), VLLMBlockSize
	}
	config, err := json.Marshal(properties)
	if err != nil {
		return nil, nil, err
	}
	if err := os.WriteFile(filepath.Join(model, "config.json"), config, 0o644); err != nil {
		return nil, nil, err
	}
	port, err := process.Ports(3)
	if err != nil {
		return nil, nil, err
	}
	v = &VLLM{
		Address:   fmt.Sprintf("127.0.0.1:%d", port),
		KVEvents:  fmt.Sprintf("tcp://127.0.0.1:%d", port+1),
		KVReplay:  fmt.Sprintf("tcp://127.0.0.1:%d", port+2),
		BlockSize: blockSize,
		stack:     &Stack{dir: c.Dir},
	}
	// vLLM binds to an address with a star. To the address of one interface it would connect.
	events, err := json.Marshal(map[string]any{"enable_kv_cache_events": true, "publisher": "zmq",
		"endpoint": fmt.Sprintf("tcp://*:%d", port+1), "replay_endpoint": fmt.Sprintf("tcp://*:%d", port+2)})
	if err != nil {
		return nil, nil, err
	}
	args = []string{model, "--served-model-name", Model, "--load-format", "dummy",
		"--dtype", cmp.Or(c.Type, "float32"), "--block-size", strconv.Itoa(VLLMBlockSize),
		"--num-gpu-blocks-override", strconv.Itoa(c.Blocks), "--host", "127.0.0.1", "--port", strconv.Itoa(port),
		"--enforce-eager", "--enable-prompt-tokens-details", "--kv-events-config", string(events)}
	return v, append(args, c.Flags...), nil
}

// Close ends vLLM and its children.
func (v *VLLM) Close() { v.process.Kill() }

// Entry returns vLLM's entry for the endpoints file.
func (v *VLLM) Entry() string {
	entry := fmt.Sprintf("- name: vllm\n  address: %s\n  kvEvents: %s\n  kvReplay: %s\n",
		v.Address, v.KVEvents, v.KVReplay)
	if v.BlockSize > 0 {
		entry += fmt.Sprintf("  blockSize: %d\n", v.BlockSize)
	}
	return entry
}
