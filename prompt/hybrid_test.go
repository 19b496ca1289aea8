package prompt

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
)

// TestOverlapIsUpperBound: which models are hybrids on SGLang, by their config.json. test/parity compares the lists
// with SGLang's code.
func TestOverlapIsUpperBound(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for _, c := range []struct {
		config string
		want   bool
	}{
		{`{"model_type":"llama","architectures":["LlamaForCausalLM"]}`, false},
		{`{"model_type":"gpt_oss","architectures":["GptOssForCausalLM"]}`, true},
		{`{"architectures":["Gemma4ForConditionalGeneration"]}`, true},
		// SGLang keeps all of it
		{`{"model_type":"gemma3_text","architectures":["Gemma3ForCausalLM"],"sliding_window":1024}`, false},
		{`{"architectures":["Other","Llama4ForConditionalGeneration"]}`, true},
		{`{"architectures":["LagunaForCausalLM"]}`, false},
		{`{"architectures":["LagunaForCausalLM"],"sliding_window":0}`, false},
		{`{"architectures":["LagunaForCausalLM"],"sliding_window":512}`, true},
		{`{"architectures":["LagunaForCausalLM"],"sliding_window":512,"text_config":{}}`, false},
		{`{"architectures":["Custom"],"is_hybrid_swa":true}`, true},
		{`{"architectures":["Custom"],"text_config":{"is_hybrid_swa":true}}`, true},
		{`{"architectures":["Custom"],"text_config":null,"is_hybrid_swa":true}`, true},
		{`{"architectures":["Qwen3NextForCausalLM"]}`, true},
		{`{"model_type":"nemotron_h"}`, true},
		{`{"model_type":"a_wrapper","text_config":{"model_type":"kimi_linear"}}`, true},
		{`{"model_type":"a_wrapper","thinker_config":{"text_config":{"model_type":"qwen3_5_text"}}}`, true},
		{`{"model_type":"a_wrapper","llm_config":{"model_type":"qwen3"},"text_config":{"model_type":"qwen3_5_text"}}`,
			false},
		{`{"model_type":"granitemoehybrid","layer_types":["attention","mamba"]}`, true},
		{`{"model_type":"granitemoehybrid","layer_types":["attention"]}`, false},
		{`{"model_type":"granitemoehybrid"}`, true},
		{`{"model_type":"minicpm_sala","mixer_types":["minicpm4"]}`, false},
		{`{"model_type":"minicpm_sala","mixer_types":["minicpm4","lightning-attn"]}`, true},
		{`{"model_type":"zaya","sliding_window":"wide","layer_types":7}`, true},
		{`{}`, false},
		{"", true}, // none: it may be any
	} {
		dir := copyModel(t, "tiny-bytelevel", map[string]string{"config.json": c.config})
		for _, engine := range []Engine{SGLang, VLLM} {
			m, err := Load(dir, Options{Engine: engine})
			if err != nil {
				t.Fatalf("%s: %v", c.config, err)
			}
			want := c.want && engine == SGLang // vLLM's events tell
			if got := m.OverlapIsUpperBound(); got != want || m.HasConfig() != (c.config != "") {
				t.Errorf("%s on %s: %v, want %v", c.config, engine, got, want)
			}
		}
	}
}

// FuzzHybridConfig reads any content of config.json. Content other than a JSON object is not a hybrid, and no content
// panics.
func FuzzHybridConfig(f *testing.F) {
	f.Add([]byte(`{"architectures":["GptOssForCausalLM"],"text_config":{"model_type":"lfm2"}}`))
	f.Add([]byte(`{"thinker_config":{"text_config":[]},"architectures":"LagunaForCausalLM","sliding_window":1e999}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, config []byte) {
		if got := isSGLangHybrid(config); got && (len(config) == 0 || config[0] == '[') {
			t.Fatalf("%q is a hybrid", config)
		}
		text, err := json.Marshal(string(config))
		if err != nil {
			t.Fatal(err)
		}
		named := fmt.Appendf(nil, `{"architectures":["GptOssForCausalLM"],"x":%s}`, text)
		if !isSGLangHybrid(named) {
			t.Fatalf("%s is not a hybrid", named)
		}
	})
}

func TestLayers(t *testing.T) {
	for config, want := range map[string]struct {
		Layers
		known bool
	}{
		`{"text_config":{"attention_chunk_size":8192}}`:            {Layers{Chunk: 8192}, false},
		`{"attention_chunk_size":256}`:                             {Layers{Chunk: 256}, false},
		`{"text_config":null,"attention_chunk_size":-1}`:           {Layers{}, false},
		`{"attention_chunk_size":"wide"}`:                          {Layers{}, false},
		`{}`:                                                       {Layers{}, false},
		`{"layer_types":["full_attention"],"sliding_window":null}`: {Layers{}, true},
		`{"layer_types":["sliding_attention","full_attention"],` +
			`"sliding_window":128}`: {Layers{Windows: []int{128}}, true},
		`{"text_config":{"layer_types":["sliding_attention"],` +
			`"sliding_window":512}}`: {Layers{Windows: []int{512}}, true},
		`{"layer_types":["sliding_attention"]}`:                                            {Layers{}, false},
		`{"layer_types":["linear_attention","full_attention"]}`:                            {Layers{State: true}, true},
		`{"layer_types":["conv","attention"]}`:                                             {Layers{State: true}, true},
		`{"layer_types":["chunked_attention","full_attention"],"attention_chunk_size":64}`: {Layers{Chunk: 64}, true},
		`{"layer_types":["chunked_attention","full_attention"]}`:                           {Layers{}, false},
		`{"layer_types":["holographic"],"attention_chunk_size":64}`:                        {Layers{Chunk: 64}, false},
	} {
		m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{"config.json": config}), Options{Engine: VLLM})
		if err != nil {
			t.Fatal(err)
		}
		if got, known := m.Layers(); !reflect.DeepEqual(got, want.Layers) || known != want.known {
			t.Errorf("%s: %+v, %v, want %+v", config, got, known, want)
		}
	}
}
