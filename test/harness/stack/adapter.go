package stack

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// tinyQwen is the shape of the model that StartVLLM serves.
var tinyQwen = struct{ layers, hidden, heads, kvHeads, headSize int }{2, 128, 4, 2, 32}

// adapterRank is the rank of that model's LoRA adapters.
const adapterRank = 8

// WriteAdapter writes a LoRA adapter of that model into a new folder dir, in PEFT's format, with random weights from
// seed. The weights are large, so that the adapter changes the model's responses.
func WriteAdapter(dir string, seed uint64) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	m := tinyQwen
	type projection struct {
		name    string
		in, out int
	}
	adapted := []projection{
		{"q_proj", m.hidden, m.heads * m.headSize},
		{"v_proj", m.hidden, m.kvHeads * m.headSize},
		{"o_proj", m.heads * m.headSize, m.hidden},
	}
	var names []string
	for _, p := range adapted {
		names = append(names, p.name)
	}
	config, err := json.Marshal(
		map[string]any{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapterRank, "lora_alpha": 2 * adapterRank,
			"lora_dropout": 0, "bias": "none", "target_modules": names},
	)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "adapter_config.json"), config, 0o644); err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	header := map[string]any{}
	var weights []byte
	add := func(name string, rows, columns int) {
		from := len(weights)
		for range rows * columns {
			weights = binary.LittleEndian.AppendUint32(weights, math.Float32bits(2*rng.Float32()-1))
		}
		header[name] = map[string]any{
			"dtype":        "F32",
			"shape":        []int{rows, columns},
			"data_offsets": []int{from, len(weights)},
		}
	}
	for layer := range m.layers {
		for _, p := range adapted {
			name := fmt.Sprintf("base_model.model.model.layers.%d.self_attn.%s.lora_", layer, p.name)
			add(name+"A.weight", adapterRank, p.in)
			add(name+"B.weight", p.out, adapterRank)
		}
	}
	// A safetensors file: the length of its header in 8 bytes, the header in JSON with the position of each tensor, the
	// tensors.
	named, err := json.Marshal(header)
	if err != nil {
		return err
	}
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(named))), named...)
	return os.WriteFile(filepath.Join(dir, "adapter_model.safetensors"), append(file, weights...), 0o644)
}
