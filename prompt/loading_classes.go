package prompt

import (
	_ "embed" // autoTokenizer
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"kvepp/prompt/bpe"
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
	if slices.Contains(autoLists[otherClasses], strings.TrimSuffix(short, "Tokenizer")) {
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

// What AutoTokenizer knows: for each class the model types that it takes the class for, and further lists. An entry is
// a type, and >17 or <17 behind it if that holds since transformers 5.17 or before.
// Source: transformers 5.12.1, 5.17.0, 5.19.0 and 5.20.2, models/auto/tokenization_auto (TOKENIZER_MAPPING_NAMES,
// MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS); vLLM 0.33.0, tokenizers/registry, config/model.
//
//go:embed loading_classes.txt
var autoTokenizer string

// The lists in autoTokenizer that are not of a class in classes.
const (
	mistralBackend = "MistralCommonBackend" // types of Mistral's own tokenizer
	otherClass     = "?"                    // types of other classes, or whose configuration an engine has itself
	wrongClass     = "wrong class"          // types whose tokenizer_class AutoTokenizer replaces
	vllmAsItIs     = "vllm as it is"        // types and architectures whose file vLLM takes as it is
	otherClasses   = "other classes"        // the other classes of Transformers, without Tokenizer at their ends
)

// autoLists are the entries of autoTokenizer by list.
var autoLists = func() map[string][]string {
	lists, name := map[string][]string{}, ""
	for line := range strings.Lines(autoTokenizer) {
		if !strings.HasPrefix(line, " ") {
			name = strings.TrimSpace(line)
		}
		lists[name] = append(lists[name], strings.Fields(strings.TrimPrefix(line, name))...)
	}
	return lists
}()

// hasType reports whether a list of types has one for a version 5.v of Transformers.
func hasType(list, model string, v int) bool {
	for _, entry := range autoLists[list] {
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
	for _, class := range slices.Concat([]string{mistralBackend, otherClass}, slices.Collect(maps.Keys(classes))) {
		if hasType(class, model, v) {
			return class
		}
	}
	return ""
}
