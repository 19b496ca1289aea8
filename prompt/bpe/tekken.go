package bpe

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"kvepp/kvblock"
)

// Tekken is what a tekken.json says besides its vocabulary.
type Tekken struct {
	// Version is the number of the version of mistral-common's rules for chats, such as 13.
	Version int
	// Image and Audio say that the file configures an encoder of images and of sound.
	Image, Audio bool
	// Settings is the model_settings_builder; nil without one.
	Settings json.RawMessage
}

const (
	// maxTekkenToken bounds a token, in bytes: the tokens of known files have at most 128.
	maxTekkenToken = 4096
	// tekkenBOS is the token that begins each prompt.
	tekkenBOS = "<s>"
	// tekkenListed is the last version whose files may leave the special tokens out.
	tekkenListed = 7
	// tekkenMultimodal is the last version whose files may call the configuration of images "multimodal".
	tekkenMultimodal = 11
)

// tekkenSpecials are the special tokens, in the order of their ids, of files that do not list them.
var tekkenSpecials = []string{
	"<unk>", tekkenBOS, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
	"[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
	"[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
}

// tekkenJSON is the form of tekken.json.
type tekkenJSON struct {
	Config struct {
		Pattern  string `json:"pattern"`
		Size     int    `json:"default_vocab_size"`
		Specials int    `json:"default_num_special_tokens"`
		Version  string `json:"version"`
	} `json:"config"`
	Vocab []struct {
		Rank  int    `json:"rank"`
		Bytes []byte `json:"token_bytes"`
	} `json:"vocab"`
	Specials   []tekkenSpecial `json:"special_tokens"`
	Multimodal json.RawMessage `json:"multimodal"`
	Image      json.RawMessage `json:"image"`
	Audio      json.RawMessage `json:"audio"`
	Settings   json.RawMessage `json:"model_settings_builder"`
}

type tekkenSpecial struct {
	Rank int    `json:"rank"`
	Text string `json:"token_str"`
}

// ParseTekken builds an encoder from the content of tekken.json, the file of Mistral's own tokenizer. The encoder
// recognises no special token in a text. AddedID returns the ids of the special tokens by name.
//
// The vocabulary has the ids behind those of the special tokens, in the order of the ranks, which is also the order of
// merging. Source: mistral-common 1.13.1, tokens/tokenizers/tekken.
func ParseTekken(raw []byte) (*Encoder, Tekken, error) {
	var file tekkenJSON
	if err := json.Unmarshal(raw, &file); err != nil {
		return nil, Tekken{}, err
	}
	info, err := file.info()
	if err != nil {
		return nil, info, err
	}
	if file.Config.Pattern != regexTekken {
		return nil, info, errUnsupported("the pattern", strconv.Quote(file.Config.Pattern))
	}
	e := newEncoder()
	e.scan, e.windows = scanners[regexTekken], windows[regexTekken]
	if err := e.addTekkenSpecials(&file); err != nil {
		return nil, info, err
	}
	if e.model, err = file.model(); err != nil {
		return nil, info, err
	}
	return e, info, nil
}

// info reads what the file says besides its vocabulary.
func (f *tekkenJSON) info() (Tekken, error) {
	version, err := strconv.Atoi(strings.TrimPrefix(f.Config.Version, "v"))
	if err != nil || !strings.HasPrefix(f.Config.Version, "v") {
		return Tekken{}, fmt.Errorf("config.version %q is not a version such as v13", f.Config.Version)
	}
	given := func(raw json.RawMessage) bool {
		return len(raw) > 0 && string(raw) != "null" && string(raw) != "{}"
	}
	if given(f.Multimodal) && version > tekkenMultimodal {
		return Tekken{}, fmt.Errorf("a file of version v%d has no field multimodal", version)
	}
	info := Tekken{Version: version, Image: given(f.Multimodal) || given(f.Image), Audio: given(f.Audio)}
	if string(f.Settings) != "null" {
		info.Settings = f.Settings
	}
	return info, nil
}

// addTekkenSpecials sets the ids of the special tokens and the token before each prompt.
func (e *Encoder) addTekkenSpecials(f *tekkenJSON) error {
	specials := f.Specials
	if specials == nil {
		if f.Config.Version != "v3" && f.Config.Version != "v"+strconv.Itoa(tekkenListed) {
			return fmt.Errorf("a file of version %s has no special_tokens", f.Config.Version)
		}
		for id, text := range tekkenSpecials {
			specials = append(specials, tekkenSpecial{id, text})
		}
	}
	if len(specials) > f.Config.Specials {
		return fmt.Errorf("%d special tokens are more than default_num_special_tokens, %d", len(specials),
			f.Config.Specials)
	}
	e.addedIDs = make(map[string]kvblock.Token, len(specials))
	for _, token := range specials {
		if _, twice := e.addedIDs[token.Text]; twice {
			return fmt.Errorf("two special tokens are %q", token.Text)
		}
		if token.Rank < 0 || token.Rank >= f.Config.Specials {
			return fmt.Errorf("the special token %q has the rank %d, which is not below %d", token.Text, token.Rank,
				f.Config.Specials)
		}
		e.addedIDs[token.Text] = kvblock.Token(token.Rank)
	}
	bos, ok := e.addedIDs[tekkenBOS]
	if !ok {
		return fmt.Errorf("there is no special token %q", tekkenBOS)
	}
	e.prefix = []kvblock.Token{bos}
	return nil
}

// model returns the model of the first tokens of the vocabulary: as many as config says.
func (f *tekkenJSON) model() (*bpeModel, error) {
	first, size := f.Config.Specials, f.Config.Size-f.Config.Specials
	if size < 0 || size > len(f.Vocab) || f.Config.Size > maxID {
		return nil, fmt.Errorf("default_vocab_size %d needs other than %d special tokens and %d tokens", f.Config.Size,
			first, len(f.Vocab))
	}
	b := &bpeModel{byteLevel: true}
	tokens := make([]vocabularyToken, size)
	ids := make(map[string]kvblock.Token, size)
	for i, token := range f.Vocab[:size] {
		id, text := kvblock.Token(first+i), string(token.Bytes)
		switch _, twice := ids[text]; {
		case token.Rank != i:
			return nil, fmt.Errorf("vocab[%d] has the rank %d", i, token.Rank)
		case i < 256 && text != string([]byte{byte(i)}):
			return nil, fmt.Errorf("vocab[%d] is not the byte %#02x", i, i)
		case text == "" || len(text) > maxTekkenToken:
			return nil, fmt.Errorf("vocab[%d] has %d bytes", i, len(text))
		case twice:
			return nil, fmt.Errorf("vocab[%d] repeats an earlier token", i)
		}
		if i < 256 {
			b.byteToken[i] = id
		}
		ids[text] = id
		tokens[i] = vocabularyToken{text, id, true}
	}
	if size < 256 {
		return nil, errors.New("there is not a token for each byte")
	}
	b.setRankedMerges(tokens, ids)
	return b, nil
}

// setRankedMerges sets the merges of a vocabulary whose ids are the order of merging: two neighbours merge if their
// bytes together are a token. It sets the vocabulary, too.
func (b *bpeModel) setRankedMerges(tokens []vocabularyToken, ids map[string]kvblock.Token) {
	var merges []merge
	largest := kvblock.Token(0)
	for _, token := range tokens {
		largest = max(largest, token.id)
		for n := 1; n < len(token.text); n++ {
			left, okLeft := ids[token.text[:n]]
			right, okRight := ids[token.text[n:]]
			if okLeft && okRight {
				merges = append(merges, merge{left, right, token.id})
			}
		}
	}
	b.merges = newMergeTable(merges, true, largest)
	b.byteMerges = newByteMerges(&b.merges, &b.byteToken)
	b.vocabulary = newVocabulary(tokens)
}
