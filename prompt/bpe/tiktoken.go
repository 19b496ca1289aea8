package bpe

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"kvepp/kvblock"
)

// regexKimi is the pattern of Kimi K2's tokenizer class.
const regexKimi = `[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]` +
	`*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?` +
	`|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]` +
	`*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

const (
	// kimiClass is the tokenizer class whose pattern and special tokens are known here; others hide theirs in Python
	// code.
	kimiClass = "TikTokenTokenizer"
	// kimiReserved is the number of special tokens behind the vocabulary, named or not.
	kimiReserved = 256
	// That class cuts texts above these numbers of characters, and longer runs with or without white space, at
	// arbitrary places.
	kimiMaxText = 400_000
	kimiMaxRun  = 25_000
)

// ParseTiktoken builds an encoder from the contents of tiktoken.model and tokenizer_config.json. Models such as Kimi K2
// have these instead of tokenizer.json. Each line of tiktoken.model is a token in base64 and its rank. The rank is the
// id and the order of merging.
func ParseTiktoken(model, config []byte) (*Encoder, error) {
	var c tiktokenConfig
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	if c.Class != kimiClass {
		return nil, errUnsupported("a vocabulary of tokenizer_class", strconv.Quote(c.Class))
	}
	tokens, ids, err := readTiktoken(model)
	if err != nil {
		return nil, err
	}
	b := &bpeModel{byteLevel: true}
	for c := range b.byteToken {
		id, ok := ids[string([]byte{byte(c)})]
		if !ok && !neverInUTF8(c) {
			return nil, fmt.Errorf("there is no token for byte %#02x", c)
		}
		b.byteToken[c] = id
	}
	b.setRankedMerges(tokens, ids)

	e := newEncoder()
	e.model, e.kimiLimits = b, true
	if err := e.addTiktokenSpecials(&c, len(tokens)); err != nil {
		return nil, err
	}
	compiled, err := compilePattern(regexKimi)
	if err != nil {
		return nil, err
	}
	e.stages = []stage{{find: compiled.matches, behavior: isolated, general: true}}
	return e, nil
}

// tiktokenConfig is the part of tokenizer_config.json that names the special tokens.
type tiktokenConfig struct {
	Class string `json:"tokenizer_class"`
	Added map[string]struct {
		Content string `json:"content"`
	} `json:"added_tokens_decoder"` // by id
}

// readTiktoken reads the lines of tiktoken.model. It returns the tokens in their order, and their ids by text.
func readTiktoken(model []byte) ([]vocabularyToken, map[string]kvblock.Token, error) {
	ids := map[string]kvblock.Token{}
	var tokens []vocabularyToken
	lines := bufio.NewScanner(bytes.NewReader(model))
	for number := 1; lines.Scan(); number++ {
		encoded, rank, found := strings.Cut(lines.Text(), " ")
		if !found && encoded == "" {
			continue
		}
		text, err := base64.StdEncoding.DecodeString(encoded)
		id, idErr := strconv.ParseUint(rank, 10, 32)
		if err != nil || idErr != nil || len(text) == 0 || id > maxID {
			return nil, nil, fmt.Errorf("line %d is not a token in base64 and its rank", number)
		}
		if _, twice := ids[string(text)]; twice {
			return nil, nil, fmt.Errorf("line %d repeats the token of an earlier line", number)
		}
		ids[string(text)] = kvblock.Token(id)
		tokens = append(tokens, vocabularyToken{string(text), kvblock.Token(id), true})
	}
	if err := lines.Err(); err != nil {
		return nil, nil, err
	}
	seen := make([]bool, len(tokens))
	for _, token := range tokens {
		if int(token.id) >= len(tokens) || seen[token.id] {
			return nil, nil, fmt.Errorf("rank %d occurs twice, or a lower rank is missing", token.id)
		}
		seen[token.id] = true
	}
	return tokens, ids, nil
}

// addTiktokenSpecials adds the special tokens, whose ids follow those of the vocabulary.
func (e *Encoder) addTiktokenSpecials(c *tiktokenConfig, vocabulary int) error {
	e.addedIDs = map[string]kvblock.Token{}
	var special []addedToken
	for id := vocabulary; id < vocabulary+kimiReserved; id++ {
		content := c.Added[strconv.Itoa(id)].Content
		if content == "" {
			content = fmt.Sprintf("<|reserved_token_%d|>", id)
		}
		for _, other := range special {
			if strings.HasPrefix(content, other.content) || strings.HasPrefix(other.content, content) {
				return errUnsupported("a special token that begins like another,",
					fmt.Sprintf("%q and %q", content, other.content))
			}
		}
		special = append(special, addedToken{id: kvblock.Token(id), content: content})
		e.addedIDs[content] = kvblock.Token(id)
	}
	for id, token := range c.Added {
		if _, ok := e.addedIDs[token.Content]; !ok {
			return fmt.Errorf(
				"tokenizer_config.json: added_tokens_decoder: %q has id %s, which does not follow the vocabulary",
				token.Content, id)
		}
	}
	e.setRawAdded(special)
	return nil
}

// withinKimiLimits reports whether Kimi's tokenizer class leaves a text uncut.
func withinKimiLimits(text string) bool {
	if len(text) <= kimiMaxRun {
		return true
	}
	if utf8.RuneCountInString(text) > kimiMaxText {
		return false
	}
	run, wasSpace := 0, false
	for _, r := range text {
		// Python's white space includes U+001C to U+001F; Go's does not.
		space := unicode.IsSpace(r) || r >= 0x1C && r <= 0x1F
		if space != wasSpace {
			run, wasSpace = 0, space
		}
		if run++; run >= kimiMaxRun {
			return false
		}
	}
	return true
}
