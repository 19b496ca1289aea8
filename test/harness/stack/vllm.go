package stack

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"kvepp/test/harness/process"
)

// VLLM is a whole vLLM on the CPU. It serves a tiny model of random weights under the name Model, so its answers are
// meaningless; the rest is real.
type VLLM struct {
	Address            string // host:port of its HTTP server
	KVEvents, KVReplay string // its sockets

	stack   *Stack
	process *process.Process
}

// VLLMBlockSize is its KV block size in tokens: the smallest that vLLM has on a CPU.
const VLLMBlockSize = 32

// StartVLLM starts vLLM with KV events and waits until it serves. python is the interpreter for which
// test/tools/install.sh vllm installed it, folder a tokenizer of Qwen's, blocks the size of its cache. Its log and
// model go to dir.
func StartVLLM(ctx context.Context, python, dir, folder string, blocks int, flags ...string) (*VLLM, error) {
	model := filepath.Join(dir, "model")
	if err := os.MkdirAll(model, 0o755); err != nil {
		return nil, err
	}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if err := os.Symlink(filepath.Join(folder, name), filepath.Join(model, name)); err != nil {
			return nil, err
		}
	}
	config, err := json.Marshal(
		map[string]any{
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
		},
	)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(model, "config.json"), config, 0o644); err != nil {
		return nil, err
	}
	port, err := process.Ports(3)
	if err != nil {
		return nil, err
	}
	v := &VLLM{
		Address:  fmt.Sprintf("127.0.0.1:%d", port),
		KVEvents: fmt.Sprintf("tcp://127.0.0.1:%d", port+1),
		KVReplay: fmt.Sprintf("tcp://127.0.0.1:%d", port+2),
		stack:    &Stack{dir: dir},
	}
	// vLLM binds to an address with a star. To the address of one interface it would connect.
	events, err := json.Marshal(map[string]any{"enable_kv_cache_events": true, "publisher": "zmq",
		"endpoint": fmt.Sprintf("tcp://*:%d", port+1), "replay_endpoint": fmt.Sprintf("tcp://*:%d", port+2)})
	if err != nil {
		return nil, err
	}
	argv := append(
		[]string{
			python,
			"-m",
			"vllm.entrypoints.cli.main",
			"serve",
			model,
			"--served-model-name",
			Model,
			"--load-format",
			"dummy",
			"--dtype",
			"float32",
			"--block-size",
			strconv.Itoa(VLLMBlockSize),
			"--num-gpu-blocks-override",
			strconv.Itoa(blocks),
			"--host",
			"127.0.0.1",
			"--port",
			strconv.Itoa(port),
			"--enforce-eager",
			"--enable-prompt-tokens-details",
			"--kv-events-config",
			string(events),
		},
		flags...)
	v.process, err = v.stack.spawn(
		"vllm",
		[]string{"HF_HUB_OFFLINE=1", "VLLM_TARGET_DEVICE=cpu", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1",
			"VLLM_HOST_IP=127.0.0.1"},
		argv...)
	if err != nil {
		return nil, err
	}
	err = v.stack.up(ctx, "vLLM", process.Healthy("http://"+v.Address), v.process)
	if err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// Close ends vLLM and its children.
func (v *VLLM) Close() { v.process.Kill() }

// Entry returns vLLM's entry for the endpoints file.
func (v *VLLM) Entry() string {
	return fmt.Sprintf(
		"- name: vllm\n  address: %s\n  kvEvents: %s\n  kvReplay: %s\n  blockSize: %d\n",
		v.Address,
		v.KVEvents,
		v.KVReplay,
		VLLMBlockSize,
	)
}
