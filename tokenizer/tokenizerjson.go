package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"kvepp/kvblock"
)

// tokenizerJSON is tokenizer.json. Truncation and padding are not read: engines switch both off.
type tokenizerJSON struct {
	AddedTokens   []addedTokenJSON `json:"added_tokens"`
	Normalizer    json.RawMessage  `json:"normalizer"`
	PreTokenizer  json.RawMessage  `json:"pre_tokenizer"`
	PostProcessor json.RawMessage  `json:"post_processor"`
	Model         json.RawMessage  `json:"model"`
}

type addedTokenJSON struct {
	ID         int64  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type modelJSON struct {
	Type                    string           `json:"type"`
	Dropout                 *float64         `json:"dropout"`
	UnknownToken            *string          `json:"unk_token"`
	ContinuingSubwordPrefix *string          `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string          `json:"end_of_word_suffix"`
	FuseUnknown             bool             `json:"fuse_unk"`
	ByteFallback            bool             `json:"byte_fallback"`
	IgnoreMerges            bool             `json:"ignore_merges"`
	Vocab                   map[string]int64 `json:"vocab"`
	Merges                  json.RawMessage  `json:"merges"`
}

type patternJSON struct {
	String *string
	Regex  *string
}

// errUnsupported starts the error of a component that is not known exactly.
func errUnsupported(what string, detail any) error {
	return fmt.Errorf("%s %v is not supported, so ids could differ from the engine's", what, detail)
}

// strictDecode decodes a component and refuses fields that dst does not know: they could change the ids.
func strictDecode(raw json.RawMessage, dst any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	return d.Decode(dst)
}

// components returns a component's parts: those of a Sequence under the given key, in order and flattened; itself
// otherwise; none for null.
func components(raw json.RawMessage, key string) ([]json.RawMessage, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, err
	}
	if kind(raw) != "Sequence" {
		return []json.RawMessage{raw}, nil
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(object[key], &parts); err != nil {
		return nil, fmt.Errorf("%s of a Sequence: %w", key, err)
	}
	var all []json.RawMessage
	for _, part := range parts {
		inner, err := components(part, key)
		if err != nil {
			return nil, err
		}
		all = append(all, inner...)
	}
	return all, nil
}

// kind returns a component's type; "" if it has none.
func kind(raw json.RawMessage) string {
	var k struct{ Type string }
	if json.Unmarshal(raw, &k) != nil {
		return ""
	}
	return k.Type
}

// encoder is everything that tokenizer.json says: text to ids.
type encoder struct {
	bpe        *bpe
	normalizer normalizer
	scan       scanner // nil: see deepSeek and bpe.marker
	deepSeek   bool

	addedRaw        *addedTokens // looked for in the text as it is
	addedNormalized *addedTokens // looked for in normalized text
	addedIDs        map[string]kvblock.Token

	// prefix and suffix are what the post-processor puts around a text with special tokens.
	prefix, suffix []kvblock.Token
}

// parseTokenizerJSON builds an encoder. Errors name the component.
func parseTokenizerJSON(raw []byte) (*encoder, error) {
	var file tokenizerJSON
	if err := json.Unmarshal(raw, &file); err != nil {
		return nil, err
	}
	e := &encoder{}
	var err error
	if e.normalizer, err = parseNormalizer(file.Normalizer); err != nil {
		return nil, fmt.Errorf("normalizer: %w", err)
	}
	byteLevel, err := e.parsePreTokenizer(file.PreTokenizer)
	if err != nil {
		return nil, fmt.Errorf("pre_tokenizer: %w", err)
	}
	vocab, err := e.parseModel(file.Model, byteLevel)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if err := e.addTokens(file.AddedTokens, vocab); err != nil {
		return nil, fmt.Errorf("added_tokens: %w", err)
	}
	if err := e.parsePostProcessor(file.PostProcessor); err != nil {
		return nil, fmt.Errorf("post_processor: %w", err)
	}
	return e, nil
}

func parseNormalizer(raw json.RawMessage) (normalizer, error) {
	parts, err := components(raw, "normalizers")
	if err != nil {
		return nil, err
	}
	var n normalizer
	for _, part := range parts {
		var c struct {
			Type    string      `json:"type"`
			Prepend string      `json:"prepend"`
			Pattern patternJSON `json:"pattern"`
			Content string      `json:"content"`
		}
		switch kind(part) {
		case "NFC", "Prepend", "Replace":
		default:
			return nil, errUnsupported("component", strconv.Quote(kind(part)))
		}
		if err := strictDecode(part, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", kind(part), err)
		}
		switch {
		case c.Type == "NFC":
			n = append(n, normalizerStep{nfc: true})
		case c.Type == "Prepend":
			n = append(n, normalizerStep{prefix: c.Prepend})
		case c.Pattern.String == nil || *c.Pattern.String == "":
			return nil, errUnsupported("Replace of a pattern other than a String", string(part))
		default:
			n = append(n, normalizerStep{old: *c.Pattern.String, new: c.Content})
		}
	}
	return n, nil
}

// parsePreTokenizer finds the scanner and reports whether text becomes bytes (ByteLevel) or stays characters.
func (e *encoder) parsePreTokenizer(raw json.RawMessage) (byteLevel bool, err error) {
	parts, err := components(raw, "pretokenizers")
	if err != nil {
		return false, err
	}
	var patterns []string
	for _, part := range parts {
		if byteLevel {
			return false, errUnsupported("component after ByteLevel:", strconv.Quote(kind(part)))
		}
		switch kind(part) {
		case "ByteLevel":
			byteLevel = true
			useRegex, err := parseByteLevel(part)
			if err != nil {
				return false, err
			}
			if useRegex {
				patterns = append(patterns, regexGPT2)
			}
		case "Split":
			pattern, err := e.parseSplit(part)
			if err != nil {
				return false, err
			}
			if pattern != "" {
				patterns = append(patterns, pattern)
			}
		default:
			return false, errUnsupported("component", strconv.Quote(kind(part)))
		}
	}
	switch {
	case len(patterns) == 0 && !byteLevel:
		return false, nil
	case !byteLevel:
		return false, errUnsupported("Split without ByteLevel:", strconv.Quote(patterns[0]))
	case slices.Equal(patterns, []string{regexDeepSeek1, regexDeepSeek2, regexDeepSeek3}):
		e.deepSeek = true
	case len(patterns) == 1 && scanners[patterns[0]] != nil:
		e.scan = scanners[patterns[0]]
	case len(patterns) == 0:
		return false, errUnsupported("ByteLevel without a pattern", "")
	default:
		return false, errUnsupported("pattern of a Split,", fmt.Sprintf("%q", patterns))
	}
	return true, nil
}

func parseByteLevel(raw json.RawMessage) (useRegex bool, err error) {
	c := struct {
		Type           string `json:"type"`
		AddPrefixSpace bool   `json:"add_prefix_space"`
		TrimOffsets    bool   `json:"trim_offsets"` // no effect on ids
		UseRegex       bool   `json:"use_regex"`
	}{AddPrefixSpace: true, UseRegex: true}
	if err := strictDecode(raw, &c); err != nil {
		return false, fmt.Errorf("component ByteLevel: %w", err)
	}
	if c.AddPrefixSpace {
		return false, errUnsupported("ByteLevel with", "add_prefix_space")
	}
	return c.UseRegex, nil
}

// parseSplit returns a Split's expression, or "" for a Split that never matches.
func (e *encoder) parseSplit(raw json.RawMessage) (string, error) {
	var c struct {
		Type     string      `json:"type"`
		Pattern  patternJSON `json:"pattern"`
		Behavior string      `json:"behavior"`
		Invert   bool        `json:"invert"`
	}
	if err := strictDecode(raw, &c); err != nil {
		return "", fmt.Errorf("component Split: %w", err)
	}
	if c.Pattern.Regex == nil {
		// Gemma splits on spaces after its normalizer has replaced them all.
		if c.Pattern.String != nil && e.normalizer.removes(*c.Pattern.String) && !c.Invert {
			return "", nil
		}
		return "", errUnsupported("Split on a String:", string(raw))
	}
	pattern := *c.Pattern.Regex
	switch {
	case c.Behavior == "Isolated" && !c.Invert:
	case c.Behavior == "Removed" && c.Invert && scanners[pattern] != nil:
		// Removing what is between matches removes nothing: these expressions match everywhere.
	default:
		return "", errUnsupported("Split with", fmt.Sprintf("behavior %q, invert %v", c.Behavior, c.Invert))
	}
	return pattern, nil
}

// parseModel reads a BPE model and returns its vocabulary.
func (e *encoder) parseModel(raw json.RawMessage, byteLevel bool) (map[string]kvblock.Token, error) {
	var m modelJSON
	if k := kind(raw); k != "BPE" && k != "" {
		return nil, errUnsupported("type", strconv.Quote(k))
	}
	if err := strictDecode(raw, &m); err != nil {
		return nil, err
	}
	switch {
	case m.Type != "BPE":
		return nil, errUnsupported("type", strconv.Quote(m.Type))
	case m.Dropout != nil && *m.Dropout != 0:
		return nil, errUnsupported("dropout", *m.Dropout)
	case m.ContinuingSubwordPrefix != nil && *m.ContinuingSubwordPrefix != "":
		return nil, errUnsupported("continuing_subword_prefix", strconv.Quote(*m.ContinuingSubwordPrefix))
	case m.EndOfWordSuffix != nil && *m.EndOfWordSuffix != "":
		return nil, errUnsupported("end_of_word_suffix", strconv.Quote(*m.EndOfWordSuffix))
	case len(m.Vocab) == 0:
		return nil, errors.New("vocab is empty")
	}
	vocab := make(map[string]kvblock.Token, len(m.Vocab))
	for text, id := range m.Vocab {
		if id < 0 || id > math.MaxInt32 {
			return nil, fmt.Errorf("vocab: id %d of %q is out of range", id, text)
		}
		vocab[text] = kvblock.Token(id)
	}
	b := &bpe{
		byteLevel: byteLevel,
		fallback:  m.ByteFallback,
		fuse:      m.FuseUnknown,
		words:     make([]atomic.Pointer[cachedWord], wordSlots),
		seed:      maphash.MakeSeed(),
	}
	e.bpe = b
	if m.UnknownToken != nil {
		if b.unknown, b.hasUnknown = vocab[*m.UnknownToken]; !b.hasUnknown {
			return nil, fmt.Errorf("unk_token %q is not in vocab", *m.UnknownToken)
		}
	}
	merges, err := parseMerges(m.Merges)
	if err != nil {
		return nil, fmt.Errorf("merges: %w", err)
	}
	b.pairs = newPairTable(len(merges))
	for rank, merge := range merges {
		left, okLeft := vocab[merge[0]]
		right, okRight := vocab[merge[1]]
		into, okInto := vocab[merge[0]+merge[1]]
		if !okLeft || !okRight || !okInto {
			return nil, fmt.Errorf("merges: %q and %q, or what they merge into, are not in vocab", merge[0], merge[1])
		}
		b.pairs.set(left, right, into, uint32(rank))
	}
	if byteLevel {
		return vocab, b.initByteLevel(vocab, m.IgnoreMerges)
	}
	if err := b.initRunes(vocab, merges, m.IgnoreMerges); err != nil {
		return nil, err
	}
	return vocab, nil
}

// parseMerges reads merges in both forms: ["a b"] and [["a","b"]].
func parseMerges(raw json.RawMessage) ([][2]string, error) {
	var pairs [][]string
	if json.Unmarshal(raw, &pairs) == nil {
		merges := make([][2]string, len(pairs))
		for i, pair := range pairs {
			if len(pair) != 2 {
				return nil, fmt.Errorf("entry %d has %d parts instead of two", i, len(pair))
			}
			merges[i] = [2]string(pair)
		}
		return merges, nil
	}
	var lines []string
	if err := json.Unmarshal(raw, &lines); err != nil {
		return nil, err
	}
	merges := make([][2]string, len(lines))
	for i, line := range lines {
		left, right, found := strings.Cut(line, " ")
		if !found || strings.Contains(right, " ") {
			return nil, fmt.Errorf("entry %d, %q, is not two parts with a space between", i, line)
		}
		merges[i] = [2]string{left, right}
	}
	return merges, nil
}

// byteOfRune undoes ByteLevel's writing of bytes as printable characters: printable ones stand for themselves, the
// others for U+0100 and up, in order.
func byteOfRune() map[rune]byte {
	bytes := make(map[rune]byte, 256)
	others := rune(0x100)
	for b := range rune(256) {
		if b >= '!' && b <= '~' || b >= 0xA1 && b <= 0xAC || b >= 0xAE {
			bytes[b] = byte(b)
		} else {
			bytes[others] = byte(b)
			others++
		}
	}
	return bytes
}

// neverInUTF8 reports whether a byte occurs in no valid UTF-8, so that a vocabulary need not have it.
func neverInUTF8(b int) bool { return b == 0xC0 || b == 0xC1 || b >= 0xF5 }

func (b *bpe) initByteLevel(vocab map[string]kvblock.Token, ignoreMerges bool) error {
	decode := byteOfRune()
	tokens := make(map[string]longEntry, len(vocab))
	var known [256]bool
next:
	for text, id := range vocab {
		token := make([]byte, 0, len(text))
		for _, r := range text {
			c, ok := decode[r]
			if !ok {
				continue next // such as a special token: no text becomes it
			}
			token = append(token, c)
		}
		tokens[string(token)] = longEntry{id: id, direct: ignoreMerges}
		if len(token) == 1 {
			b.byteToken[token[0]] = id
			known[token[0]] = true
		}
	}
	for c, ok := range known {
		if !ok && !neverInUTF8(c) {
			return fmt.Errorf("vocab has no token for byte %#02x", c)
		}
	}
	if !ignoreMerges {
		b.markDirect(tokens)
	}
	b.vocabulary = newVocabulary(tokens)
	return nil
}

// markDirect finds out which tokens a piece with their bytes really becomes: merging may take another way.
func (b *bpe) markDirect(tokens map[string]longEntry) {
	sc := &scratch{}
	var ids []kvblock.Token
	for text, token := range tokens {
		ids = b.encode(ids[:0], text, 0, len(text), sc)
		token.direct = len(ids) == 1 && ids[0] == token.id
		tokens[text] = token
	}
}

func (b *bpe) initRunes(vocab map[string]kvblock.Token, merges [][2]string, ignoreMerges bool) error {
	if ignoreMerges {
		return errUnsupported("ignore_merges", "without ByteLevel")
	}
	b.runeToken = map[rune]kvblock.Token{}
	marker := &markerCut{joined: map[rune]struct{}{}}
	tokens := make(map[string]longEntry, len(vocab))
	for text, id := range vocab {
		previous := rune(-1)
		runes := 0
		for _, r := range text {
			if r == '▁' && runes > 0 {
				marker.joined[previous] = struct{}{}
			}
			previous = r
			runes++
		}
		if runes == 1 {
			b.runeToken[previous] = id
		}
		tokens[text] = longEntry{id: id}
	}
	if b.fallback {
		for c := range b.byteToken {
			id, ok := vocab[byteTokenText(c)]
			if !ok && !neverInUTF8(c) {
				return fmt.Errorf("byte_fallback, but vocab has no %s", byteTokenText(c))
			}
			b.byteToken[c] = id
		}
	}
	// A cut is exact if only text merges: not bytes of an unknown character, not the unknown token, and ▁ itself is known.
	_, known := vocab[spaceMarker]
	for _, merge := range merges {
		for _, part := range merge {
			if isByteTokenText(part) || b.hasUnknown && vocab[part] == b.unknown {
				known = false
			}
		}
	}
	if known {
		b.marker = marker
	}
	b.markDirect(tokens)
	b.vocabulary = newVocabulary(tokens)
	return nil
}

func byteTokenText(b int) string { return fmt.Sprintf("<0x%02X>", b) }

func isByteTokenText(s string) bool {
	return len(s) == len("<0x00>") && strings.HasPrefix(s, "<0x") && s[len(s)-1] == '>'
}

// addTokens gives added tokens their ids and sorts them by where they are looked for.
func (e *encoder) addTokens(list []addedTokenJSON, vocab map[string]kvblock.Token) error {
	e.addedIDs = make(map[string]kvblock.Token, len(list))
	var raw, normalized []addedToken
	next := int64(len(vocab)) // a new token's id, as Hugging Face tokenizers counts: it does not trust the file's
	for _, a := range list {
		if a.Content == "" {
			continue
		}
		if _, twice := e.addedIDs[a.Content]; twice {
			continue
		}
		id, inVocab := vocab[a.Content]
		if !inVocab {
			id = kvblock.Token(next)
		}
		if int64(id) != a.ID {
			return fmt.Errorf("%q has id %d where Hugging Face tokenizers would give %d", a.Content, a.ID, id)
		}
		next = max(next, a.ID+1)
		e.addedIDs[a.Content] = id
		token := addedToken{id: id, content: a.Content, singleWord: a.SingleWord, stripLeft: a.LStrip, stripRight: a.RStrip}
		if a.Normalized {
			// The token is sought in normalized text, so it is normalized itself: with Prepend, "x" becomes "▁x".
			token.content = strings.Clone(e.normalizer.apply(a.Content, &scratch{}))
			normalized = append(normalized, token)
		} else {
			raw = append(raw, token)
		}
	}
	e.addedRaw, e.addedNormalized = newAddedTokens(raw), newAddedTokens(normalized)
	return nil
}

func (e *encoder) parsePostProcessor(raw json.RawMessage) error {
	parts, err := components(raw, "processors")
	if err != nil {
		return err
	}
	templates := 0
	for _, part := range parts {
		switch kind(part) {
		case "ByteLevel": // moves offsets only
		case "TemplateProcessing":
			if templates++; templates > 1 {
				return errUnsupported("more than one", "TemplateProcessing")
			}
			if err := e.parseTemplateProcessing(part); err != nil {
				return fmt.Errorf("TemplateProcessing: %w", err)
			}
		default:
			return errUnsupported("component", strconv.Quote(kind(part)))
		}
	}
	return nil
}

func (e *encoder) parseTemplateProcessing(raw json.RawMessage) error {
	type piece struct {
		ID     string `json:"id"`
		TypeID int    `json:"type_id"`
	}
	var c struct {
		Type   string `json:"type"`
		Single []struct {
			SpecialToken *piece
			Sequence     *piece
		} `json:"single"`
		Pair          json.RawMessage `json:"pair"` // for two texts; prompts are one
		SpecialTokens map[string]struct {
			ID     string   `json:"id"`
			IDs    []uint32 `json:"ids"`
			Tokens []string `json:"tokens"`
		} `json:"special_tokens"`
	}
	if err := strictDecode(raw, &c); err != nil {
		return err
	}
	var before, after []kvblock.Token
	sequences := 0
	for _, p := range c.Single {
		if p.SpecialToken == nil {
			sequences++
			continue
		}
		special, ok := c.SpecialTokens[p.SpecialToken.ID]
		if !ok {
			return fmt.Errorf("special token %q has no ids", p.SpecialToken.ID)
		}
		for _, id := range special.IDs {
			if sequences == 0 {
				before = append(before, kvblock.Token(id))
			} else {
				after = append(after, kvblock.Token(id))
			}
		}
	}
	if sequences != 1 {
		return fmt.Errorf("the template for one text holds it %d times", sequences)
	}
	e.prefix, e.suffix = before, after
	return nil
}
