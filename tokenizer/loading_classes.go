package tokenizer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"kvepp/tokenizer/bpe"
)

// class is what a class of Transformers makes of a tokenizer.json. The zero class takes the file as it is.
// Source: transformers 5.12.1 to 5.20.2, models/*/tokenization_*, the constructors.
type class struct {
	// components sets the components that the class has of its own; nil for none.
	components func(f *folder, d *bpe.Description) error
	pieces     bool // the model has fuse_unk and byte_fallback
	unknown    bool // the model has unk_token
	// tokens are the constructor's special tokens, and pads says that it has a pad_token.
	tokens orderedJSON
	pads   bool
	bos    bool // texts begin with bos_token
	again  again
}

// again says whether a class adds its special tokens a second time, which gives them new flags.
type again string

const (
	againPlain again = "plain" // with the flags of a text
	againKept  again = "kept"  // with the flags of a text where a file has it as a text
)

// tokenizersBackend is the class that takes tokenizer.json as it is.
const tokenizersBackend = "TokenizersBackend"

// classes are the classes that are reproduced here, by their names without Fast.
var classes = map[string]class{
	tokenizersBackend: {},
	"LlamaTokenizer": {components: llamaComponents, pieces: true,
		tokens: named("unk_token", "<unk>", "bos_token", "<s>", "eos_token", "</s>")},
	"CodeLlamaTokenizer": {components: codeLlamaComponents, pieces: true, unknown: true, bos: true,
		tokens: named("unk_token", "<unk>", "bos_token", "<s>", "eos_token", "</s>", "prefix_token", "▁<PRE>",
			"middle_token", "▁<MID>", "suffix_token", "▁<SUF>", "eot_token", "▁<EOT>", "fill_token", fillMe)},
	"GemmaTokenizer": {components: gemmaComponents, pieces: true, unknown: true, pads: true,
		tokens: named("unk_token", "<unk>", "bos_token", "<bos>", "eos_token", "<eos>", "pad_token", "<pad>",
			"mask_token", "<mask>")},
	"GPT2Tokenizer": {components: byteLevelComponents("null", ""), pads: true,
		tokens: named("unk_token", endOfText, "bos_token", endOfText, "eos_token", endOfText)},
	"CodeGenTokenizer": {components: byteLevelComponents("null", ""), pads: true,
		tokens: named("unk_token", endOfText, "bos_token", endOfText, "eos_token", endOfText)},
	"GPTNeoXTokenizer": {components: byteLevelComponents(nfc, ""), pads: true, tokens: named("unk_token", endOfText,
		"bos_token", endOfText, "eos_token", endOfText, "pad_token", "<|padding|>")},
	"CohereTokenizer": {components: byteLevelComponents(nfc, `{"type":"Digits","individual_digits":true}`),
		pads: true, again: againKept,
		tokens: named("unk_token", "<UNK>", "bos_token", "<BOS_TOKEN>", "eos_token", "<|END_OF_TURN_TOKEN|>",
			"pad_token", "<PAD>", "cls_token", "<CLS>", "sep_token", "<SEP>", "mask_token", "<MASK_TOKEN>")},
	"Qwen2Tokenizer": {components: byteLevelComponents(nfc, split(`(?i:'s|'t|'re|'ve|'m|'ll|'d)|`+
		`[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`)),
		pads: true, again: againPlain,
		tokens: named("unk_token", endOfText, "eos_token", endOfText, "pad_token", endOfText)},
	"Qwen3_5Tokenizer": {components: byteLevelComponents(nfc, split(`(?i:'s|'t|'re|'ve|'m|'ll|'d)|`+
		`[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`)),
		pads: true, tokens: named("unk_token", endOfText, "eos_token", endOfText, "pad_token", endOfText)},
}

const (
	endOfText = "<|endoftext|>"
	fillMe    = "<FILL_ME>" // CodeLlamaTokenizer makes two texts of one with this in between
	nfc       = `{"type":"NFC"}`
)

// named returns special tokens by name: each a name and a token.
func named(pairs ...string) (o orderedJSON) {
	o.values = map[string]json.RawMessage{}
	for i := 0; i < len(pairs); i += 2 {
		o.keys = append(o.keys, pairs[i])
		o.values[pairs[i]], _ = json.Marshal(pairs[i+1])
	}
	return o
}

// otherClasses are the other classes of Transformers, without Tokenizer at their ends. What they make of a folder is
// not reproduced here.
const otherClasses = " Albert Auto Bart Barthez Bartpho Basic Bert BertGeneration BertJapanese BertTokenizerLegacy " +
	"Bertweet BigBird BioGpt Blenderbot BlenderbotSmall ByT5 CLIP CTRL Camembert Canine Clvp ConvBert Cpm CpmAnt " +
	"DPRContextEncoder DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Electra Esm Esmc FNet FSMT " +
	"FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED Lasr LayoutLM LayoutLMv2 LayoutLMv3 " +
	"LayoutXLM Longformer Luke Lxmert M2M100 MBart MBart50 MLuke MPNet MT5 Marian MarkupLM Mgpstr MistralCommon " +
	"MistralCommonBackend MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Parakeet Pegasus Perceiver Phobert " +
	"Pop2Piano PreTrainedTokenizerBase ProphetNet PythonBackend Rag Reformer RemBert RetriBert RoCBert RoFormer " +
	"Roberta SeamlessM4T SentencePieceBackend Siglip Siglip2 Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas " +
	"Tipsv2 Udop VideoPrism Vits Wav2Vec2 Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM XLM XLMRoberta XLNet "

// classNamed returns the name of a class in classes; "" if Transformers has no class of the name. Errors: a class that
// is not reproduced here.
func classNamed(name string) (string, error) {
	short := strings.TrimSuffix(name, "Fast")
	switch short {
	case "PreTrainedTokenizer", "BloomTokenizer":
		return tokenizersBackend, nil
	}
	if _, known := classes[short]; known {
		return short, nil
	}
	if short != "" && strings.Contains(otherClasses, " "+strings.TrimSuffix(short, "Tokenizer")+" ") {
		return "", errNotReproduced("a tokenizer of the class " + strconv.Quote(name) + " of Transformers")
	}
	return "", nil
}

// sglangBOSClasses are the values of tokenizer_class for which SGLang restores add_bos_token.
var sglangBOSClasses = []string{"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast",
	"GemmaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast"}

// component returns a component of tokenizer.json.
func component(format string, args ...any) json.RawMessage { return fmt.Appendf(nil, format, args...) }

// split returns a pre-tokenizer that isolates the matches of an expression.
func split(expression string) string {
	pattern, _ := json.Marshal(expression) // a string always has JSON
	return `{"type":"Split","pattern":{"Regex":` + string(pattern) + `},"behavior":"Isolated","invert":false}`
}

// byteLevelComponents returns the components of a byte-level class: ByteLevel, and before it another pre-tokenizer
// unless first is "". ByteLevel splits by GPT-2's pattern unless first is a Split.
func byteLevelComponents(normalizer, first string) func(f *folder, d *bpe.Description) error {
	return func(f *folder, d *bpe.Description) error {
		prefix, err := f.prefixSpace(false)
		d.Normalizer = json.RawMessage(normalizer)
		d.PreTokenizer = component(`{"type":"ByteLevel","add_prefix_space":%t,"use_regex":%t}`, prefix,
			!strings.Contains(first, "Split"))
		if first != "" {
			d.PreTokenizer = component(`{"type":"Sequence","pretokenizers":[%s,%s]}`, first, d.PreTokenizer)
		}
		return err
	}
}

// metaspace sets the components of the classes that write a space as ▁ and put one before texts as the scheme says,
// unless add_prefix_space is false.
func (f *folder) metaspace(d *bpe.Description, scheme string) error {
	prefix, err := f.prefixSpace(true)
	if !prefix {
		scheme = "never"
	}
	d.Normalizer, d.Decoder = nil, nil
	d.PreTokenizer = component(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"%s","split":false}`, scheme)
	return err
}

func llamaComponents(f *folder, d *bpe.Description) error {
	if string(f.config.values["legacy"]) == "true" {
		return f.metaspace(d, "always")
	}
	return f.metaspace(d, "first")
}

func codeLlamaComponents(f *folder, d *bpe.Description) error {
	d.CutAt = fillMe
	return f.metaspace(d, "first")
}

func gemmaComponents(_ *folder, d *bpe.Description) error {
	d.Normalizer = component(`{"type":"Replace","pattern":{"String":" "},"content":"▁"}`)
	d.PreTokenizer = component(
		`{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithPrevious","invert":false}`)
	d.Decoder = nil
	return nil
}

// What AutoTokenizer makes of a model type. An entry is a type, and >17 or <17 behind it if that holds since
// transformers 5.17 or before.
// Source: transformers 5.12.1, 5.17.0, 5.19.0 and 5.20.2, models/auto/tokenization_auto (TOKENIZER_MAPPING_NAMES,
// MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS).

// mistralBackend and otherClass stand for classes of model types: Mistral's own tokenizer, and those that are not in
// classes.
const (
	mistralBackend = "MistralCommonBackend"
	otherClass     = "?"
)

// classTypes are the model types by the class that AutoTokenizer has for them. The last have classes that are not
// reproduced here, but two, for which an engine has a configuration of its own.
var classTypes = map[string]string{
	tokenizersBackend: "EvollaModel>17 arctic aria>17 beam>20 bigbird_pegasus>17 camembertv2-base>17 canary>17 " +
		"chameleon chatlm cohere_asr deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 " +
		"deepseek_vl deepseek_vl_hybrid deepseek_vl_v2 ernie4_5>17 ernie4_5_moe>17 flex_olmo>17 fuyu glm glm4 " +
		"glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode>17 granite granitemoe " +
		"granitemoehybrid granitemoeshared h2ovl_chat hyperclovax>17 hyperclovax_vlm internlm2 jamba janus " +
		"kimi_k25>17 kimi_linear>17 kosmos-2>17 llava llava_next mimo_v2_flash>17 minicpm3>17 minicpmv " +
		"minicpmv4_6 minicpmv4_7>19 minimax_m2 modernbert modernbert-decoder>19 molmo molmo2 nemotron nvfp4 " +
		"nystromformer>17 olmo2>17 olmo3 olmo_hybrid opencua openvla paddleocr_vl>17 pegasus_x>17 persimmon>17 " +
		"phi3 phi3_v phimoe pix2struct>17 smolvlm>17 stablelm>17 step3_vl step3p5 umt5>17 unlimited_ocr>20 " +
		"vipllava xlm-roberta-xl>17",
	mistralBackend:    "ministral ministral3 mistral mistral3 mixtral pixtral voxtral voxtral_realtime",
	"CohereTokenizer": "aya_vision cohere cohere2",
	"GPT2Tokenizer": "blip-2 codegen dbrx emu3 flex_olmo<17 gpt2 gpt_bigcode<17 gpt_neo gptj " +
		"hyperclovax_vision_v2>19 instructblip instructblipvideo jais2 opt phi starcoder2",
	"GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmo2<17 olmoe rwkv stablelm<17 xlstm",
	"GemmaTokenizer": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma " +
		"shieldgemma2 t5gemma zaya>17",
	"LlamaTokenizer": "idefics idefics2",
	"Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni fun_asr_nano>17 hunyuan_vl>17 internvl lighton_ocr " +
		"ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_moe " +
		"qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice>17",
	"Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text>19 qwen3_5_text>17 qwen4_exp>17",
	otherClass: "aimv2 albert align bark bart bert bert-generation bigbird_pegasus<17 big_bird biogpt blenderbot " +
		"blenderbot-small blip bridgetower bros camembert canine chinese_clip clap clip clipseg clvp convbert " +
		"cpmant ctrl data2vec-audio data2vec-text deberta deberta-v2 dia distilbert dpr electra ernie esm " +
		"esmc>17 esmfold2>17 fastspeech2_conformer flaubert flava florence2 fnet fsmt funnel git gpt-sw3 " +
		"gpt_neox_japanese granite_speech5_ctc>17 grounding-dino groupvit gte>19 hubert ibert jina_embeddings_v3 " +
		"kosmos-2<17 lasr_ctc lasr_encoder layoutlm layoutlmv2 layoutlmv3 layoutxlm led lilt longformer luke " +
		"lxmert m2m_100 marian markuplm mbart megatron-bert metaclip_2 mgp-str mluke mm-grounding-dino " +
		"mobilebert moss_transcribe_diarize>20 mpnet mra mt5 musicgen musicgen_melody mvp nemotron3_5_asr>17 " +
		"nemotron_asr_streaming>17 nllb-moe nomic_bert nougat nystromformer<17 omdet-turbo oneformer openai-gpt " +
		"owlv2 owlvit parakeet_ctc parakeet_rnnt parakeet_tdt pegasus pegasus_x<17 perceiver pix2struct<17 " +
		"plbart pp_formulanet prophetnet qwen3_asr>17 rag reformer rembert roberta roberta-prelayernorm roc_bert " +
		"roformer sam3 sam3_video seamless_m4t seamless_m4t_v2 siglip siglip2 speech_to_text speecht5 splinter " +
		"squeezebert switch_transformers t5 tapas tipsv2>17 trocr tvp udop umt5<17 unispeech unispeech-sat " +
		"videoprism>17 vilt visual_bert vits wav2vec2 wav2vec2-bert wav2vec2-conformer whisper xclip xglm xlm " +
		"xlm-roberta xlm-roberta-xl<17 xlnet xmod yoso",
}

// wrongClass are the model types whose tokenizer_class AutoTokenizer replaces by that of classTypes.
const wrongClass = "hyperclovax_vision_v2>19 qwen2 qwen3_5>19 qwen3_5_moe>19 qwen3_5_moe_text>19 qwen4_exp>19 " +
	"siglip2>20"

// vllmTokenizersBackend are the model types whose file vLLM takes as it is.
// Source: vLLM 0.33.0, tokenizers/registry; 0.31.0 and 0.32.0 have fewer.
const vllmTokenizersBackend = "internlm2 step3_vl step3p7 unlimited-ocr unlimited_ocr>20 step5>20 step5_vl>20"

// hasType reports whether a list of types has one for a version 5.v of Transformers.
func hasType(list, model string, v int) bool {
	for _, entry := range strings.Fields(list) {
		if len(entry) >= len(model) && model != "" && entry[:len(model)] == model {
			switch rest := entry[len(model):]; {
			case rest == "":
				return true
			case rest[0] == '>' || rest[0] == '<':
				if limit, _ := strconv.Atoi(rest[1:]); (v >= limit) == (rest[0] == '>') {
					return true
				}
			}
		}
	}
	return false
}

// mappedClass returns the class that AutoTokenizer has for a model type; "" for none.
func mappedClass(model string, v int) string {
	for class, types := range classTypes {
		if hasType(types, model, v) {
			return class
		}
	}
	return ""
}
