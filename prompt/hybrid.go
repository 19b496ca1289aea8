package prompt

import (
	"encoding/json"
	"slices"
)

// Hybrid models have layers with full attention, and layers that keep only a window or a state of the prompt. SGLang
// evicts windows and states independently, but announces only the blocks of full attention. So it may reuse less of a
// prompt than its events say. vLLM announces each group of layers, and kvblock.Traits reads that.

// OverlapIsUpperBound reports whether the engine may have less of a prompt cached than its KV events announce, without
// a sign of it in the events. This is true for hybrid models on SGLang, and for models on SGLang without a config.json,
// which may be hybrid.
func (m *Model) OverlapIsUpperBound() bool {
	return m.options.Engine == SGLang && (!m.configured || m.sglangHybrid)
}

// HasConfig reports whether the model's folder has a config.json.
func (m *Model) HasConfig() bool { return m.configured }

// Layers describe the layers of a model that do not have full attention.
type Layers struct {
	Windows []int // of layers with a sliding window, in tokens, ascending
	Chunk   int   // of layers that attend to a chunk of the prompt, in tokens; 0: there are none
	State   bool  // some keep a state: recurrent, linear or convolutional
}

// Layers returns what config.json says about the model's layers. known is false if it does not list the types of
// layers, as older models' do not; then only Chunk is set, if config.json has it.
func (m *Model) Layers() (l Layers, known bool) { return m.layers, m.layersKnown }

// readLayerTypes reads Layers from the content of config.json.
//
// Source: layer_types of transformers' configurations; vLLM 0.33.0, config/model.py
// (ModelConfig.attention_chunk_size) and models/llama4.py.
func readLayerTypes(config []byte) (l Layers, known bool) {
	type part struct {
		Chunk  int      `json:"attention_chunk_size"`
		Window *int     `json:"sliding_window"`
		Types  []string `json:"layer_types"`
	}
	var whole part
	var nested struct {
		Text part `json:"text_config"`
	}
	_ = json.Unmarshal(config, &whole)
	_ = json.Unmarshal(config, &nested)
	text := nested.Text
	if text.Types == nil {
		text.Types, text.Window = whole.Types, whole.Window
	}
	l.Chunk = max(nested.Text.Chunk, whole.Chunk, 0)
	chunked := false
	for _, kind := range text.Types {
		switch kind {
		case "sliding_attention":
			if text.Window == nil || *text.Window < 1 {
				return l, false
			}
			l.Windows = []int{*text.Window}
		case "chunked_attention":
			chunked = true
		case "linear_attention", "conv", "mamba", "recurrent":
			l.State = true
		case "full_attention", "attention":
		default:
			return Layers{Chunk: l.Chunk}, false // of a kind that this version of kvepp does not know
		}
	}
	if len(text.Types) == 0 || chunked != (l.Chunk > 0) {
		return Layers{Chunk: l.Chunk}, false
	}
	return l, true
}

// sglangWindows are the architectures whose windows SGLang keeps in separate memory. LagunaForCausalLM is one only if
// its text configuration has a sliding_window, and BeamForCausalLM in one of its forms.
//
// Source: SGLang 0.5.21 to 0.5.23, configs/model_config.py (is_hybrid_swa_model).
var sglangWindows = []string{
	"BeamForCausalLM", "EmbeddingGemma2Model", "MuseSparkForConditionalGeneration",
	"DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMDSpark", "DeepseekV4ForCausalLMNextN",
	"DiffusionGemmaForBlockDiffusion", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
	"Gemma4UnifiedForConditionalGeneration", "GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM",
	"IQuestQ1ForCausalLM", "IQuestQ1MTP", "InklingForConditionalGeneration", "InklingForConditionalGenerationMTP",
	"LagunaForCausalLM", "Llama4ForConditionalGeneration", "MellumForCausalLM", "MiMoV2FlashForCausalLM",
	"MiMoV2ForCausalLM", "MiMoV2MTP", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
	"Step3p5ForCausalLM", "Step3p5MTP", "Step3p7ForConditionalGeneration", "UnlimitedOCRForCausalLM",
}

// sglangStates are the architectures with layers that keep a state.
//
// Source: SGLang 0.5.21 to 0.5.23, arg_groups/overrides.py (_MAMBA_RADIX_CACHE_ARCHS) and configs/gigachat35.py.
var sglangStates = []string{
	"BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration",
	"FalconH1ForCausalLM", "GigaChat35ForCausalLM", "GigaChat35ForCausalLMNextN", "Glm5NextForConditionalGeneration",
	"InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration", "JetNemotronForCausalLM",
	"JetVLMForConditionalGeneration", "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "Lfm2ForCausalLM",
	"Lfm2MoeForCausalLM", "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration",
	"NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
	"NemotronH_Omni_Reasoning_V3", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
	"Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
	"ZayaForCausalLM",
}

// sglangStateTypes are the model types with such layers. SGLang decides by the class of the configuration, which the
// model type selects. Some models of granitemoehybrid and minicpm_sala have no such layers; hasState sees that in their
// types of layers.
//
// Source: SGLang 0.5.21 to 0.5.23, configs/hybrid_arch.py.
var sglangStateTypes = []string{
	"NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "bailing_hybrid", "falcon_h1", "falcon_mamba",
	"gigachat3_5", "glm5_next", "granitemoehybrid", "inkling_mm_model", "inkling_model", "intern_s2_preview",
	"interns2_mobius", "interns2_mobius_text", "jet_nemotron", "jet_vlm", "kimi_linear", "lfm2", "lfm2_moe", "lfm2_vl",
	"mamba", "mamba2", "minicpm_sala", "nemotron_h", "nemotron_h_omni", "nemotron_h_puzzle", "qwen3_5", "qwen3_5_moe",
	"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "zaya",
}

// layersConfig holds what config.json, or its part for the text model, says about layers.
type layersConfig struct {
	ModelType     string   `json:"model_type"`
	Architectures []string `json:"architectures"`
	SlidingWindow *float64 `json:"sliding_window"`
	IsHybridSWA   bool     `json:"is_hybrid_swa"`
	LayerTypes    []string `json:"layer_types"`
	MixerTypes    []string `json:"mixer_types"`
}

// hasState reports whether the model has layers that keep a state.
func (c *layersConfig) hasState() bool {
	switch {
	case c.ModelType == "granitemoehybrid" && c.LayerTypes != nil:
		return slices.Contains(c.LayerTypes, "mamba")
	case c.ModelType == "minicpm_sala" && c.MixerTypes != nil:
		return slices.Contains(c.MixerTypes, "lightning-attn")
	}
	return slices.Contains(sglangStateTypes, c.ModelType)
}

// isSGLangHybrid reports whether SGLang keeps windows or states of the model apart from the blocks of full attention.
// config is the content of config.json. Values of unexpected types count as absent.
func isSGLangHybrid(config []byte) bool {
	whole := readLayers(config)
	var nested struct {
		Thinker  json.RawMessage `json:"thinker_config"`
		LLM      json.RawMessage `json:"llm_config"`
		Language json.RawMessage `json:"language_config"`
		Text     json.RawMessage `json:"text_config"`
	}
	_ = json.Unmarshal(config, &nested)
	text := whole
	for _, part := range []json.RawMessage{nested.Thinker, nested.LLM, nested.Language, nested.Text} {
		if len(part) > 0 && string(part) != "null" {
			var inner struct {
				Text json.RawMessage `json:"text_config"`
			}
			if _ = json.Unmarshal(part, &inner); len(inner.Text) > 0 && string(inner.Text) != "null" {
				part = inner.Text
			}
			text = readLayers(part)
			break
		}
	}
	for _, a := range whole.Architectures {
		switch {
		case a == "LagunaForCausalLM":
			if text.SlidingWindow != nil && *text.SlidingWindow != 0 {
				return true
			}
		case slices.Contains(sglangWindows, a), slices.Contains(sglangStates, a):
			return true
		}
	}
	return text.IsHybridSWA || whole.hasState() || text.hasState()
}

// readLayers reads what config says about layers. It ignores errors.
func readLayers(config []byte) (c layersConfig) {
	_ = json.Unmarshal(config, &c)
	return c
}
