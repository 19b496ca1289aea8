package tokenizer

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"kvepp/kvblock"
)

// tiktokenFile is the vocabulary of models such as Kimi K2, which have no tokenizer.json: a token in base64 and its
// rank a line. The rank is the id, and the order of merging.
const tiktokenFile = "tiktoken.model"

// regexKimi is the pattern of Kimi K2's tokenizer class.
const regexKimi = `[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

const (
	// kimiClass is the tokenizer class whose pattern and special tokens are known here; others hide theirs in Python
	// code.
	kimiClass = "TikTokenTokenizer"
	// kimiReserved is the number of special tokens behind the vocabulary, named or not.
	kimiReserved = 256
	// That class cuts texts of more characters than these, and longer runs with or without white space, anywhere.
	kimiMaxText = 400_000
	kimiMaxRun  = 25_000
)

// parseTiktoken builds an encoder from tiktoken.model and tokenizer_config.json.
func parseTiktoken(model, config []byte) (*encoder, error) {
	var c struct {
		Class string `json:"tokenizer_class"`
		Added map[string]struct {
			Content string `json:"content"`
		} `json:"added_tokens_decoder"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", tokenizerConfigFile, err)
	}
	if c.Class != kimiClass {
		return nil, errUnsupported("a vocabulary of tokenizer_class", strconv.Quote(c.Class))
	}
	b := &bpe{byteLevel: true}
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
			return nil, fmt.Errorf("line %d is not a token in base64 and its rank", number)
		}
		if _, twice := ids[string(text)]; twice {
			return nil, fmt.Errorf("line %d has a token that was there before", number)
		}
		ids[string(text)] = kvblock.Token(id)
		tokens = append(tokens, vocabularyToken{string(text), kvblock.Token(id), true})
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	seen := make([]bool, len(tokens))
	for _, token := range tokens {
		if int(token.id) >= len(tokens) || seen[token.id] {
			return nil, fmt.Errorf("rank %d is there twice, or one before it is missing", token.id)
		}
		seen[token.id] = true
	}
	for c := range b.byteToken {
		id, ok := ids[string([]byte{byte(c)})]
		if !ok && !neverInUTF8(c) {
			return nil, fmt.Errorf("there is no token for byte %#02x", c)
		}
		b.byteToken[c] = id
	}
	var merges []merge
	for _, token := range tokens {
		for n := 1; n < len(token.text); n++ {
			left, okLeft := ids[token.text[:n]]
			right, okRight := ids[token.text[n:]]
			if okLeft && okRight {
				merges = append(merges, merge{left, right, token.id})
			}
		}
	}
	b.pairs = newPairTable(merges, true)
	b.bytePairs = newBytePairs(&b.pairs, &b.byteToken)
	b.vocabulary = newVocabulary(tokens)

	e := &encoder{
		idle:       make(chan *scratch, runtime.GOMAXPROCS(0)),
		bpe:        b,
		kimiLimits: true,
		addedIDs:   map[string]kvblock.Token{},
	}
	var special []addedToken
	for id := len(tokens); id < len(tokens)+kimiReserved; id++ {
		content := c.Added[strconv.Itoa(id)].Content
		if content == "" {
			content = fmt.Sprintf("<|reserved_token_%d|>", id)
		}
		for _, other := range special {
			if strings.HasPrefix(content, other.content) || strings.HasPrefix(other.content, content) {
				return nil, errUnsupported(
					"a special token that begins like another,",
					fmt.Sprintf("%q and %q", content, other.content),
				)
			}
		}
		special = append(special, addedToken{id: kvblock.Token(id), content: content})
		e.addedIDs[content] = kvblock.Token(id)
	}
	for id, token := range c.Added {
		if _, ok := e.addedIDs[token.Content]; !ok {
			return nil, fmt.Errorf(
				"%s: added_tokens_decoder: %q has id %s, which is not behind the vocabulary",
				tokenizerConfigFile,
				token.Content,
				id,
			)
		}
	}
	e.setRawAdded(special)
	compiled, err := compilePattern(regexKimi)
	if err != nil {
		return nil, err
	}
	e.stages = []stage{{find: compiled.matches, behavior: isolated, engine: true}}
	return e, nil
}

// withinKimiLimits reports whether Kimi's tokenizer class leaves a text in one.
func withinKimiLimits(text string) bool {
	if len(text) <= kimiMaxRun {
		return true
	}
	if utf8.RuneCountInString(text) > kimiMaxText {
		return false
	}
	run, wasSpace := 0, false
	for _, r := range text {
		// Python's white space has U+001C to U+001F, which Go's has not.
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
