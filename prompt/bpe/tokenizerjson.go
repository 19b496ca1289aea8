package bpe

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"kvepp/kvblock"
)

// File is a tokenizer.json, read but not yet an encoder. Truncation and padding are left out, because engines switch
// them off.
type File struct {
	Description
	PadToken string // the token of padding; "" for none
	model    modelJSON
}

// Description is what a tokenizer.json says beside its vocabulary and merges. Transformers' classes put other
// components into the place of the file's, so a caller of Encoder may change a copy.
type Description struct {
	Added                             []AddedToken
	Normalizer, PreTokenizer, Decoder json.RawMessage
	Prefix, Suffix                    []kvblock.Token // what the post-processor puts around a text; nil for none
	Model                             ModelOptions
	CutAt                             string // no text with this is encoded; "" for none
}

// AddedToken is an entry of added_tokens.
type AddedToken struct {
	ID         int64  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// ModelOptions are the fields of the component model beside vocab and merges.
type ModelOptions struct {
	Type                    string   `json:"type"`
	Dropout                 *float64 `json:"dropout"`
	UnknownToken            *string  `json:"unk_token"`
	ContinuingSubwordPrefix *string  `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string  `json:"end_of_word_suffix"`
	FuseUnknown             bool     `json:"fuse_unk"`
	ByteFallback            bool     `json:"byte_fallback"`
	IgnoreMerges            bool     `json:"ignore_merges"`
}

// modelJSON is the component model.
type modelJSON struct {
	ModelOptions
	vocab  vocabIndex
	merges []merge // by rank
}

// patternJSON is a pattern: a text or an expression.
type patternJSON struct {
	String *string
	Regex  *string
}

// errUnsupported returns the error for a component that this package cannot reproduce exactly.
func errUnsupported(what string, detail any) error {
	return fmt.Errorf("%s %v is not supported, so ids could differ from the engine's", what, detail)
}

// strictDecode decodes a component. Fields that dst does not know are an error, because they could change the ids.
func strictDecode(raw json.RawMessage, dst any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	return d.Decode(dst)
}

// components returns a component's parts: the items of a Sequence under the key, flattened and in order; the component
// itself if it is not a Sequence; none for null.
func components(raw json.RawMessage, key string) ([]json.RawMessage, error) {
	all, err := componentsWithin(raw, key, maxSequences)
	if err == nil && len(all) > maxComponents {
		return nil, fmt.Errorf("%d components are more than %d", len(all), maxComponents)
	}
	return all, err
}

const (
	// maxSequences is the deepest nesting of Sequences.
	maxSequences = 8
	// maxComponents bounds the components of a normalizer, pre-tokenizer or post-processor. Models have up to ten.
	maxComponents = 64
	// maxAddedToken is the longest added token, in bytes. Models' are below 100.
	maxAddedToken = 256
)

// componentsWithin is components for Sequences that nest at most depth levels.
func componentsWithin(raw json.RawMessage, key string, depth int) ([]json.RawMessage, error) {
	if depth == 0 {
		return nil, fmt.Errorf("a Sequence is nested deeper than %d", maxSequences)
	}
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, err
	}
	if Kind(raw) != "Sequence" {
		return []json.RawMessage{raw}, nil
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(object[key], &parts); err != nil {
		return nil, fmt.Errorf("%s of a Sequence: %w", key, err)
	}
	var all []json.RawMessage
	for _, part := range parts {
		inner, err := componentsWithin(part, key, depth-1)
		if err != nil {
			return nil, err
		}
		all = append(all, inner...)
	}
	return all, nil
}

// Kind returns a component's type; "" if it has none.
func Kind(raw json.RawMessage) string {
	var k struct{ Type string }
	if json.Unmarshal(raw, &k) != nil {
		return ""
	}
	return k.Type
}

// Encoder turns text into ids by the rules of one tokenizer.json or tiktoken.model. It is safe for concurrent use.
type Encoder struct {
	model      *bpeModel
	normalizer normalizer
	scan       scanner       // the scanner of a pre-tokenizer with one known pattern; nil for others
	windows    *windowRules  // the rules of scan for windows of ASCII; nil for none
	deepSeek   bool          // the pre-tokenizer is DeepSeek's
	stages     []stage       // any other pre-tokenizer
	spacing    *spacing      // if not nil, replaces normalizer and stages
	segments   *segmentCache // nil for none
	// firstDiffers is set if text at the beginning of a prompt has other ids than the same text later.
	firstDiffers bool
	roundTrips   bool          // decoding the ids of a normalized text returns this text
	kimiLimits   bool          // see withinKimiLimits
	cutAt        string        // see Description
	idle         chan *scratch // scratches for the next encodings

	boundaries      *addedTokens // the tokens of addedTokens.boundaries, found in the raw text
	addedRaw        *addedTokens // found in the raw text between boundaries
	addedNormalized *addedTokens // found in the normalized text
	addedIDs        map[string]kvblock.Token

	// prefix and suffix are the tokens that the post-processor puts around a text.
	prefix, suffix []kvblock.Token
}

// newEncoder returns an encoder with empty caches.
func newEncoder() *Encoder {
	return &Encoder{
		idle:     make(chan *scratch, runtime.GOMAXPROCS(0)),
		segments: newSegmentCache(segmentCacheBytes),
	}
}

// DisableCache switches the cache of segments off. Call it before the first encoding. Tests of memory need it.
func (e *Encoder) DisableCache() { e.segments = nil }

// AddedID returns the id of the added token with this content.
func (e *Encoder) AddedID(content string) (kvblock.Token, bool) {
	id, ok := e.addedIDs[content]
	return id, ok
}

// PrefixLen returns the number of tokens that the post-processor puts before a text.
func (e *Encoder) PrefixLen() int { return len(e.prefix) }

// IsNormalized reports whether text is in the normalizer's Unicode normalization forms. It ignores the normalizer's
// other steps.
func (e *Encoder) IsNormalized(text string) bool { return e.normalizer.keeps(text) }

// RoundTrips reports whether decoding the ids of a text for which IsNormalized is true returns this text.
func (e *Encoder) RoundTrips() bool { return e.roundTrips }

// GeneralPattern reports whether the pre-tokenizer needs the general pattern engine.
func (e *Encoder) GeneralPattern() bool {
	return slices.ContainsFunc(e.stages, func(s stage) bool { return s.general })
}

// Encoder builds an encoder of the file's vocabulary and merges by a description. Errors name the component.
func (f *File) Encoder(d *Description) (*Encoder, error) {
	e := newEncoder()
	var err error
	if e.normalizer, err = parseNormalizer(d.Normalizer); err != nil {
		return nil, fmt.Errorf("normalizer: %w", err)
	}
	byteLevel, err := e.parsePreTokenizer(d.PreTokenizer)
	if err != nil {
		return nil, fmt.Errorf("pre_tokenizer: %w", err)
	}
	normalized := func(token AddedToken) bool { return token.Normalized }
	if !byteLevel && !slices.ContainsFunc(d.Added, normalized) {
		e.spacing = spacingOf(e.normalizer, e.stages)
	}
	model := f.model
	model.ModelOptions = d.Model
	if err := e.parseModel(&model, byteLevel); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if err := e.addTokens(d.Added, &model.vocab); err != nil {
		return nil, fmt.Errorf("added_tokens: %w", err)
	}
	e.prefix, e.suffix, e.cutAt = d.Prefix, d.Suffix, d.CutAt
	e.roundTrips = byteLevel && Kind(d.Decoder) == "ByteLevel" && e.returnsText()
	return e, nil
}

// Extend returns list and behind it more tokens, each with the id that Hugging Face tokenizers would give it. A token
// whose content list has already keeps its id, and takes the new flags.
func (f *File) Extend(list []AddedToken, more ...AddedToken) []AddedToken {
	ids := newAddedIDs(&f.model.vocab)
	at := make(map[string]int, len(list)+len(more))
	for i := range list {
		if list[i].Content != "" {
			ids.add(list[i].Content)
			at[list[i].Content] = i
		}
	}
	list = slices.Clone(list)
	for _, token := range more {
		if token.Content == "" {
			continue
		}
		token.ID = int64(ids.add(token.Content))
		if i, again := at[token.Content]; again {
			list[i] = token
			continue
		}
		at[token.Content] = len(list)
		list = append(list, token)
	}
	return list
}

// returnsText reports whether decoding the ids of a normalized text returns this text, for a byte-level model.
func (e *Encoder) returnsText() bool {
	for i := range e.normalizer {
		if !e.normalizer[i].isForm {
			return false
		}
	}
	for i := range e.stages {
		if e.stages[i].rewrite != nil || e.stages[i].behavior == removed {
			return false
		}
	}
	for _, token := range slices.Concat(e.boundaries.all(), e.addedRaw.all(), e.addedNormalized.all()) {
		// Decoding turns characters that stand for bytes into those bytes, also in an added token.
		bytes := func(r rune) bool { return r > 0xA0 && r < 0x144 }
		if token.stripLeft || token.stripRight || token.content == "" || strings.ContainsFunc(token.content, bytes) {
			return false
		}
	}
	return len(e.prefix)+len(e.suffix) == 0
}

// ReadTokenizerJSON reads the content of tokenizer.json. Encoder checks its components but the post-processor.
func ReadTokenizerJSON(raw []byte) (*File, error) {
	var file File
	var postProcessor, padding, added json.RawMessage
	hasModel := false
	r := &jsonReader{data: raw}
	parts := map[string]*json.RawMessage{
		"normalizer":     &file.Normalizer,
		"pre_tokenizer":  &file.PreTokenizer,
		"post_processor": &postProcessor,
		"decoder":        &file.Decoder,
		"padding":        &padding,
		"added_tokens":   &added,
	}
	err := r.object(func(key []byte) error {
		if string(key) == "model" {
			hasModel = true
			if err := file.model.read(r); err != nil {
				return fmt.Errorf("model: %w", err)
			}
			return nil
		}
		value, err := r.raw()
		if part := parts[string(key)]; err == nil && part != nil {
			*part = value
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if r.peek(); r.at < len(r.data) {
		return nil, r.fail("the end")
	}
	if added != nil {
		if err := json.Unmarshal(added, &file.Added); err != nil {
			return nil, fmt.Errorf("added_tokens: %w", err)
		}
	}
	if !hasModel {
		return nil, errors.New("there is no model")
	}
	file.Model = file.model.ModelOptions
	if padding != nil {
		var pad struct {
			Token string `json:"pad_token"`
		}
		if err := json.Unmarshal(padding, &pad); err != nil {
			return nil, fmt.Errorf("padding: %w", err)
		}
		file.PadToken = pad.Token
	}
	if file.Prefix, file.Suffix, err = parsePostProcessor(postProcessor); err != nil {
		return nil, fmt.Errorf("post_processor: %w", err)
	}
	return &file, nil
}

// read reads a model: the vocabulary and the merges as a stream, and the other fields as one small object.
func (m *modelJSON) read(r *jsonReader) error {
	options := []byte{'{'}
	var early []byte // merges that stand before the vocabulary
	if r.peek() != '{' {
		return r.fail("{")
	}
	err := r.object(func(key []byte) error {
		switch string(key) {
		case "vocab":
			return m.readVocab(r)
		case "merges":
			if len(m.vocab.tokens) > 0 {
				var err error
				m.merges, err = readMerges(r, &m.vocab)
				return err
			}
			var err error
			early, err = r.raw()
			return err
		}
		if len(options) > 1 {
			options = append(options, ',')
		}
		options = strconv.AppendQuote(options, string(key))
		value, err := r.raw()
		options = append(append(options, ':'), value...)
		return err
	})
	if err != nil {
		return err
	}
	options = append(options, '}')
	if k := Kind(options); k != "BPE" && k != "" {
		return errUnsupported("type", strconv.Quote(k))
	}
	if err := strictDecode(options, m); err != nil {
		return err
	}
	if early != nil && len(m.vocab.tokens) > 0 {
		var err error
		m.merges, err = readMerges(&jsonReader{data: early}, &m.vocab)
		return err
	}
	return nil
}

// readVocab reads the vocabulary.
func (m *modelJSON) readVocab(r *jsonReader) error {
	if r.peek() != '{' { // a list, of a model that is not BPE: read refuses its type later
		_, err := r.raw()
		return err
	}
	m.vocab = newVocabIndex(min(len(r.data)/96, 1<<19))
	return r.object(func(key []byte) error {
		text := r.keep(key)
		id, err := r.integer()
		if err != nil {
			return fmt.Errorf("vocab: %w", err)
		}
		if id < 0 || id > maxID {
			return fmt.Errorf("vocab: id %d of %q is out of range", id, text)
		}
		m.vocab.add(text, kvblock.Token(id))
		return nil
	})
}

// parseNormalizer reads the normalizer.
func parseNormalizer(raw json.RawMessage) (normalizer, error) {
	parts, err := components(raw, "normalizers")
	if err != nil {
		return nil, err
	}
	var n normalizer
	for _, part := range parts {
		var c struct {
			Type       string      `json:"type"`
			Prepend    string      `json:"prepend"`
			Pattern    patternJSON `json:"pattern"`
			Content    string      `json:"content"`
			StripLeft  bool        `json:"strip_left"`
			StripRight bool        `json:"strip_right"`
		}
		form, isForm := normalForms[Kind(part)]
		character := characterNormalizers[Kind(part)]
		switch k := Kind(part); {
		case isForm, character != nil, k == "Prepend", k == "Replace", k == "Strip":
		default:
			return nil, errUnsupported("component", strconv.Quote(k))
		}
		if err := strictDecode(part, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", Kind(part), err)
		}
		switch {
		case isForm:
			n = append(n, normalizerStep{form: form, isForm: true})
		case character != nil:
			n = append(n, normalizerStep{character: character})
		case c.Type == "Strip":
			n = append(n, normalizerStep{left: c.StripLeft, right: c.StripRight})
		case c.Type == "Prepend":
			n = append(n, normalizerStep{prefix: c.Prepend})
		case c.Pattern.Regex != nil:
			compiled, err := compilePattern(*c.Pattern.Regex)
			if err != nil {
				return nil, fmt.Errorf("component Replace: %w", err)
			}
			if compiled.nullable {
				return nil, errUnsupported("Replace of a pattern that can match nothing,",
					strconv.Quote(*c.Pattern.Regex))
			}
			n = append(n, normalizerStep{pattern: compiled, new: c.Content})
		case c.Pattern.String == nil || *c.Pattern.String == "":
			return nil, errUnsupported("Replace of", string(part))
		default:
			n = append(n, normalizerStep{old: *c.Pattern.String, new: c.Content})
		}
	}
	return n, nil
}

var normalForms = map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}

var characterNormalizers = map[string]func(to []byte, r rune) []byte{
	"Lowercase":    lowerCase,
	"StripAccents": stripAccent,
	"Nmt":          nmt,
}

// parsePreTokenizer reads the pre-tokenizer. byteLevel says that text becomes bytes (ByteLevel) instead of characters.
func (e *Encoder) parsePreTokenizer(raw json.RawMessage) (byteLevel bool, err error) {
	parts, err := components(raw, "pretokenizers")
	if err != nil {
		return false, err
	}
	var patterns []string // the stages' patterns; "" for none
	for i, part := range parts {
		last := i == len(parts)-1
		var add []stage
		pattern := ""
		switch k := Kind(part); k {
		case "ByteLevel":
			if add, pattern, err = parseByteLevel(part); err != nil {
				return false, err
			}
			if last {
				byteLevel = true
			} else { // the next stages see the bytes as characters
				add = append(add, stage{rewrite: printableBytes, whole: true})
			}
		case "Split":
			var st stage
			if st, pattern, err = parseSplit(part); err != nil {
				return false, err
			}
			add = []stage{st}
		default:
			parse := preTokenizers[k]
			if parse == nil {
				return false, errUnsupported("component", strconv.Quote(k))
			}
			st, first, err := parse(part)
			if err != nil {
				return false, fmt.Errorf("component %s: %w", k, err)
			}
			if first && !e.normalizer.keepsStart() {
				return false, errUnsupported("Metaspace with prepend_scheme first", "after such a normalizer")
			}
			e.firstDiffers = e.firstDiffers || first
			add = st
		}
		for range add {
			patterns = append(patterns, pattern)
		}
		e.stages = append(e.stages, add...)
	}
	// Most models need no stages.
	switch {
	case !byteLevel:
	case slices.Equal(patterns, []string{regexDeepSeek1, regexDeepSeek2, regexDeepSeek3}):
		e.deepSeek, e.windows, e.stages = true, windowDeepSeek, nil
	case len(patterns) == 1 && scanners[patterns[0]] != nil:
		e.scan, e.windows, e.stages = scanners[patterns[0]], windows[patterns[0]], nil
	}
	return byteLevel, nil
}

// preTokenizers read the simpler pre-tokenizers. first says that the stages treat the beginning of a prompt
// differently.
var preTokenizers = map[string]func(raw json.RawMessage) (stages []stage, first bool, err error){
	"Metaspace": parseMetaspace,
	"Digits": func(raw json.RawMessage) ([]stage, bool, error) {
		var c struct {
			Type       string `json:"type"`
			Individual bool   `json:"individual_digits"`
		}
		st := stage{find: findClass(classNumeric), behavior: contiguous}
		err := strictDecode(raw, &c)
		if c.Individual {
			st.behavior = isolated
		}
		return []stage{st}, false, err
	},
	"Punctuation": func(raw json.RawMessage) ([]stage, bool, error) {
		c := struct {
			Type     string   `json:"type"`
			Behavior behavior `json:"behavior"`
		}{Behavior: isolated}
		if err := strictDecode(raw, &c); err != nil {
			return nil, false, err
		}
		return []stage{{find: findClass(classPunctuation), behavior: c.Behavior}}, false, c.Behavior.check()
	},
	"Whitespace": func(raw json.RawMessage) ([]stage, bool, error) {
		return []stage{{find: findWords, behavior: removed, invert: true}}, false, onlyType(raw)
	},
	"WhitespaceSplit": func(raw json.RawMessage) ([]stage, bool, error) {
		return []stage{{find: findClass(classSpace), behavior: removed}}, false, onlyType(raw)
	},
	"BertPreTokenizer": func(raw json.RawMessage) ([]stage, bool, error) {
		return []stage{
			{find: findClass(classSpace), behavior: removed},
			{find: findClass(classPunctuation), behavior: isolated},
		}, false, onlyType(raw)
	},
	"CharDelimiterSplit": func(raw json.RawMessage) ([]stage, bool, error) {
		var c struct {
			Type      string `json:"type"`
			Delimiter string `json:"delimiter"`
		}
		if err := strictDecode(raw, &c); err != nil {
			return nil, false, err
		}
		if utf8.RuneCountInString(c.Delimiter) != 1 {
			return nil, false, fmt.Errorf("delimiter %q is not one character", c.Delimiter)
		}
		return []stage{{find: findText(c.Delimiter), behavior: removed}}, false, nil
	},
}

// onlyType returns an error for a component with other fields than its type.
func onlyType(raw json.RawMessage) error {
	var c struct {
		Type string `json:"type"`
	}
	return strictDecode(raw, &c)
}

// check returns an error for an unknown behavior.
func (b behavior) check() error {
	switch b {
	case removed, isolated, mergedWithPrevious, mergedWithNext, contiguous:
		return nil
	}
	return errUnsupported("behavior", strconv.Quote(string(b)))
}

// parseMetaspace returns the stage of a Metaspace. first says that it treats the beginning of a prompt differently.
func parseMetaspace(raw json.RawMessage) (stages []stage, first bool, err error) {
	c := struct {
		Type           string `json:"type"`
		Replacement    string `json:"replacement"`
		AddPrefixSpace *bool  `json:"add_prefix_space"`
		PrependScheme  string `json:"prepend_scheme"`
		Split          *bool  `json:"split"`
		Text           string `json:"str_rep"`
	}{PrependScheme: "always"}
	if err := strictDecode(raw, &c); err != nil {
		return nil, false, err
	}
	if utf8.RuneCountInString(c.Replacement) != 1 {
		return nil, false, fmt.Errorf("replacement %q is not one character", c.Replacement)
	}
	switch c.PrependScheme {
	case "always", "first", "never":
	default:
		return nil, false, errUnsupported("prepend_scheme", strconv.Quote(c.PrependScheme))
	}
	if c.AddPrefixSpace != nil && !*c.AddPrefixSpace && c.PrependScheme != "never" {
		return nil, false, errors.New("add_prefix_space is false, and prepend_scheme is not never")
	}
	st := stage{rewrite: metaspace(c.Replacement, c.PrependScheme), whole: true}
	if c.Replacement == spaceMarker && c.Split != nil && !*c.Split {
		st.spacing = &spacing{
			prefix:     c.PrependScheme != "never",
			unlessOne:  true,
			onlyAtHead: c.PrependScheme == "first",
		}
	}
	if c.Split == nil || *c.Split {
		st.whole, st.find, st.behavior = false, findText(c.Replacement), mergedWithNext
	}
	return []stage{st}, c.PrependScheme == "first", nil
}

// parseByteLevel returns the stages of a ByteLevel without printableBytes. If these are one stage with a known pattern,
// it also returns the pattern, else "".
func parseByteLevel(raw json.RawMessage) (stages []stage, pattern string, err error) {
	c := struct {
		Type           string `json:"type"`
		AddPrefixSpace bool   `json:"add_prefix_space"`
		TrimOffsets    bool   `json:"trim_offsets"` // no effect on ids
		UseRegex       bool   `json:"use_regex"`
	}{AddPrefixSpace: true, UseRegex: true}
	if err := strictDecode(raw, &c); err != nil {
		return nil, "", fmt.Errorf("component ByteLevel: %w", err)
	}
	st := stage{whole: true}
	if c.AddPrefixSpace {
		st.rewrite = prefixSpace
	}
	if c.UseRegex {
		st.whole, st.find, st.behavior = false, findScanned(scanGPT2), isolated
		if !c.AddPrefixSpace {
			pattern = regexGPT2
		}
	}
	if st.whole && st.rewrite == nil {
		return nil, "", nil
	}
	return []stage{st}, pattern, nil
}

// parseSplit returns the stage of a Split. If its matches are isolated, it also returns the expression, else "".
func parseSplit(raw json.RawMessage) (stage, string, error) {
	var c struct {
		Type     string      `json:"type"`
		Pattern  patternJSON `json:"pattern"`
		Behavior behavior    `json:"behavior"`
		Invert   bool        `json:"invert"`
	}
	if err := strictDecode(raw, &c); err != nil {
		return stage{}, "", fmt.Errorf("component Split: %w", err)
	}
	if err := c.Behavior.check(); err != nil {
		return stage{}, "", fmt.Errorf("component Split: %w", err)
	}
	st := stage{behavior: c.Behavior, invert: c.Invert}
	switch {
	case c.Pattern.String != nil && *c.Pattern.String != "":
		st.find = findText(*c.Pattern.String)
		st.onSpace = *c.Pattern.String == " " && !c.Invert
		return st, "", nil
	case c.Pattern.Regex == nil:
		return stage{}, "", errUnsupported("Split on", string(raw))
	}
	expression := *c.Pattern.Regex
	if scan := scanners[expression]; scan != nil {
		st.find = findScanned(scan)
		// These expressions match at every position, so there is no text between matches to remove.
		if st.behavior == isolated || st.behavior == removed && st.invert {
			return st, expression, nil
		}
		return st, "", nil
	}
	compiled, err := compilePattern(expression)
	if err != nil {
		return stage{}, "", fmt.Errorf("component Split: pattern %q: %w", expression, err)
	}
	st.find, st.general = compiled.matches, true
	if st.behavior == isolated {
		return st, expression, nil
	}
	return st, "", nil
}

// parseModel builds the encoder's model.
func (e *Encoder) parseModel(m *modelJSON, byteLevel bool) error {
	switch {
	case m.Type != "BPE":
		return errUnsupported("type", strconv.Quote(m.Type))
	case m.Dropout != nil && *m.Dropout != 0:
		return errUnsupported("dropout", *m.Dropout)
	case m.ContinuingSubwordPrefix != nil && *m.ContinuingSubwordPrefix != "":
		return errUnsupported("continuing_subword_prefix", strconv.Quote(*m.ContinuingSubwordPrefix))
	case m.EndOfWordSuffix != nil && *m.EndOfWordSuffix != "":
		return errUnsupported("end_of_word_suffix", strconv.Quote(*m.EndOfWordSuffix))
	case len(m.vocab.tokens) == 0:
		return errors.New("vocab is empty")
	}
	b := &bpeModel{
		byteLevel: byteLevel,
		fallback:  m.ByteFallback,
		fuse:      m.FuseUnknown,
	}
	e.model = b
	if m.UnknownToken != nil {
		if b.unknown, b.hasUnknown = m.vocab.id(*m.UnknownToken); !b.hasUnknown {
			return fmt.Errorf("unk_token %q is not in vocab", *m.UnknownToken)
		}
	}
	if len(m.merges) > maxMerges {
		return errUnsupported("a model of", fmt.Sprint(len(m.merges), " merges"))
	}
	b.merges = newMergeTable(m.merges, false, m.vocab.highestID())
	if byteLevel {
		return b.initByteLevel(m.vocab.tokens, m.IgnoreMerges)
	}
	if !b.initRunes(m, e.spacing != nil) {
		e.spacing = nil
	}
	return nil
}

// neverInUTF8 reports whether no valid UTF-8 has a byte. A vocabulary need not have such a byte.
func neverInUTF8(b int) bool { return b == 0xC0 || b == 0xC1 || b >= 0xF5 }

// initByteLevel builds the tables of a byte-level model.
func (b *bpeModel) initByteLevel(vocab []vocabEntry, ignoreMerges bool) error {
	tokens := make([]vocabularyToken, 0, len(vocab))
	var known [256]bool
	size := 0
	for _, token := range vocab {
		size += len(token.text)
	}
	all := make([]byte, 0, size) // the bytes of all tokens, concatenated
next:
	for _, written := range vocab {
		start := len(all)
		for _, r := range written.text {
			c, ok := byteOfRune(r)
			if !ok {
				all = all[:start]
				continue next // no text becomes this token, such as a special token
			}
			all = append(all, c)
		}
		token := all[start:]
		if len(token) == 1 {
			b.byteToken[token[0]] = written.id
			known[token[0]] = true
		}
		tokens = append(tokens, vocabularyToken{alias(token), written.id, ignoreMerges})
	}
	for c, ok := range known {
		if !ok && !neverInUTF8(c) {
			return fmt.Errorf("vocab has no token for byte %#02x", c)
		}
	}
	b.byteMerges = newByteMerges(&b.merges, &b.byteToken)
	if !ignoreMerges {
		b.markDirect(tokens)
	}
	b.vocabulary = newVocabulary(tokens)
	return nil
}

// markDirect sets direct for the tokens that the merges produce from their own bytes. Merging the bytes of the others
// ends in other tokens.
func (b *bpeModel) markDirect(tokens []vocabularyToken) {
	// Tokens with adjacent ids share parts. In the order of the ids, lookups therefore hit the processor's caches.
	slices.SortFunc(tokens, func(x, y vocabularyToken) int { return cmp.Compare(x.id, y.id) })
	sc := newScratch()
	var ids []kvblock.Token
	for i := range tokens {
		token := &tokens[i]
		ids = b.encode(ids[:0], token.text, 0, len(token.text), sc)
		token.direct = len(ids) == 1 && ids[0] == token.id
	}
}

// byteTokenText returns the text of the token that stands for a byte.
func byteTokenText(b int) string { return fmt.Sprintf("<0x%02X>", b) }

// addedIDs gives added tokens their ids as Hugging Face tokenizers does: that of the vocabulary, else the next one that
// is above the number of the vocabulary's tokens and above every added token's.
type addedIDs struct {
	vocab     *vocabIndex
	byContent map[string]kvblock.Token
	next      kvblock.Token
}

func newAddedIDs(vocab *vocabIndex) *addedIDs {
	return &addedIDs{vocab, map[string]kvblock.Token{}, kvblock.Token(len(vocab.tokens))}
}

func (a *addedIDs) add(content string) kvblock.Token {
	id, again := a.byContent[content]
	if again {
		return id
	}
	id, inVocab := a.vocab.id(content)
	if !inVocab {
		id = a.next
	}
	a.byContent[content] = id
	a.next = max(a.next, id+1)
	return id
}

// addTokens sets the ids of added tokens, and builds the tables that find them in raw and in normalized text.
func (e *Encoder) addTokens(list []AddedToken, vocab *vocabIndex) error {
	ids := newAddedIDs(vocab) // like Hugging Face tokenizers, count them instead of trusting the file
	e.addedIDs = ids.byContent
	last := make(map[string]int, len(list)) // the last entry of each content, which counts
	for i, a := range list {
		if a.Content == "" {
			continue
		}
		if len(a.Content) > maxAddedToken {
			return fmt.Errorf("the token that begins with %.40q has %d bytes, more than %d",
				a.Content, len(a.Content), maxAddedToken)
		}
		last[a.Content] = i
		_, again := e.addedIDs[a.Content]
		if id := ids.add(a.Content); !again && int64(id) != a.ID {
			return fmt.Errorf("%q has id %d where Hugging Face tokenizers would give %d", a.Content, a.ID, id)
		}
	}
	var raw, normalized []addedToken
	sc := newScratch()
	byContent := map[string]string{}
	for i, a := range list {
		if a.Content == "" || last[a.Content] != i {
			continue
		}
		token := addedToken{
			id:         e.addedIDs[a.Content],
			content:    a.Content,
			singleWord: a.SingleWord,
			stripLeft:  a.LStrip,
			stripRight: a.RStrip,
		}
		if !a.Normalized {
			raw = append(raw, token)
			continue
		}
		// The token is found in normalized text, so it is normalized too: with Prepend, "x" becomes "▁x".
		content, err := e.normalizer.apply(a.Content, sc)
		if err != nil {
			return err
		}
		token.content = strings.Clone(content)
		if other, twice := byContent[content]; twice || content == "" {
			return errUnsupported("a token that normalizes to another's text or to none,",
				fmt.Sprintf("%q and %q", a.Content, other))
		}
		byContent[token.content] = a.Content
		normalized = append(normalized, token)
	}
	e.setRawAdded(raw)
	e.addedNormalized = newAddedTokens(normalized)
	return nil
}

// setRawAdded sets the tokens that are found in the raw text.
func (e *Encoder) setRawAdded(tokens []addedToken) {
	boundaries, others := newAddedTokens(tokens).boundaries()
	e.boundaries, e.addedRaw = newAddedTokens(boundaries), newAddedTokens(others)
}

// parsePostProcessor returns the tokens that the post-processor puts around a text.
func parsePostProcessor(raw json.RawMessage) (prefix, suffix []kvblock.Token, err error) {
	parts, err := components(raw, "processors")
	if err != nil {
		return nil, nil, err
	}
	adding := 0
	for _, part := range parts {
		k := Kind(part)
		if k != "ByteLevel" {
			if adding++; adding > 1 {
				return nil, nil, errUnsupported("a second component that adds tokens,", strconv.Quote(k))
			}
		}
		switch k {
		case "ByteLevel": // changes only offsets
		case "TemplateProcessing":
			if prefix, suffix, err = parseTemplateProcessing(part); err != nil {
				return nil, nil, fmt.Errorf("TemplateProcessing: %w", err)
			}
		case "RobertaProcessing", "BertProcessing":
			var c struct {
				Type           string `json:"type"`
				Sep            namedID
				Cls            namedID
				TrimOffsets    bool `json:"trim_offsets"`     // no effect on ids
				AddPrefixSpace bool `json:"add_prefix_space"` // no effect on ids
			}
			if err := strictDecode(part, &c); err != nil {
				return nil, nil, fmt.Errorf("%s: %w", k, err)
			}
			prefix, suffix = []kvblock.Token{c.Cls.id}, []kvblock.Token{c.Sep.id}
		default:
			return nil, nil, errUnsupported("component", strconv.Quote(k))
		}
	}
	return prefix, suffix, nil
}

// namedID is a token written as ["</s>", 2].
type namedID struct{ id kvblock.Token }

func (n *namedID) UnmarshalJSON(raw []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(raw, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("%s is not a token and its id", raw)
	}
	var id uint32
	if err := json.Unmarshal(pair[1], &id); err != nil {
		return err
	}
	n.id = kvblock.Token(id)
	return nil
}

// parseTemplateProcessing returns the tokens of a TemplateProcessing for one text.
func parseTemplateProcessing(raw json.RawMessage) (before, after []kvblock.Token, err error) {
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
		Pair          json.RawMessage `json:"pair"` // for two texts; a prompt is one text
		SpecialTokens map[string]struct {
			ID     string   `json:"id"`
			IDs    []uint32 `json:"ids"`
			Tokens []string `json:"tokens"`
		} `json:"special_tokens"`
	}
	if err := strictDecode(raw, &c); err != nil {
		return nil, nil, err
	}
	sequences := 0
	for _, p := range c.Single {
		if p.SpecialToken == nil {
			sequences++
			continue
		}
		special, ok := c.SpecialTokens[p.SpecialToken.ID]
		if !ok {
			return nil, nil, fmt.Errorf("special token %q has no ids", p.SpecialToken.ID)
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
		return nil, nil, fmt.Errorf("the template for one text holds it %d times", sequences)
	}
	return before, after, nil
}
