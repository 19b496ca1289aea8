package prompt

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"kvepp/internal/boundedfile"
	"kvepp/kvblock"
	"kvepp/prompt/bpe"
)

// How an engine loads the tokenizer of a folder. vLLM and SGLang call Transformers' AutoTokenizer, which chooses a
// class. Most classes take only vocabulary, merges and post-processor from tokenizer.json and have other components of
// their own. All add tokens that other files name. SGLang then puts some components back. A folder whose class is not
// reproduced here gives an error that names it. Dynamo's frontend takes tokenizer.json as it is; so does
// TensorRT-LLM, but for the tokens. Source: transformers 5.12.1 to 5.20.2, AutoTokenizer.from_pretrained,
// tokenization_utils_base (_from_pretrained), tokenization_utils_tokenizers (TokenizersBackend).

// loaded is a tokenizer as one version of an engine loads it.
type loaded struct {
	encoder     *bpe.Encoder
	description *bpe.Description
	names       map[string]string // the named special tokens
	unknown     error             // why only the engine knows the tokens; nil if they are known here too
}

// folder is what the files of a model's folder say of its tokenizer.
type folder struct {
	file   *bpe.File
	config orderedJSON // tokenizer_config.json
	// older is special_tokens_map.json, and olderAdded added_tokens.json: ids by token. They count without decoder.
	older      orderedJSON
	olderAdded map[string]int64
	decoder    map[int64]configToken // added_tokens_decoder; nil for none
	model      modelConfig
	multimodal bool // also takes images or sound
	tekken     bool // has Mistral's tekken.json
}

// modelConfig is what config.json says of the model's kind.
type modelConfig struct {
	ModelType      string   `json:"model_type"`
	Architectures  []string `json:"architectures"`
	TokenizerClass any      `json:"tokenizer_class"`
	ModelName      any      `json:"model_name"`
}

// orderedJSON is a JSON object that keeps the order of its keys.
type orderedJSON struct {
	keys   []string
	values map[string]json.RawMessage
}

func (o *orderedJSON) UnmarshalJSON(raw []byte) error {
	if err := json.Unmarshal(raw, &o.values); err != nil || o.values == nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.Token() // the object is valid, and so is each of its parts
	for d.More() {
		key, _ := d.Token()
		o.keys = append(o.keys, key.(string))
		var value json.RawMessage
		d.Decode(&value)
	}
	return nil
}

// has reports whether the object has a key with another value than null.
func (o *orderedJSON) has(key string) bool {
	return o.values[key] != nil && string(o.values[key]) != "null"
}

// text returns a value that is a text; "" for none.
func (o *orderedJSON) text(key string) (text string) {
	if json.Unmarshal(o.values[key], &text) != nil {
		return ""
	}
	return text
}

// configToken is a token in a file other than tokenizer.json. One that is written as a text alone is plain. Without
// content there is no token.
type configToken struct {
	Kind       string  `json:"__type"`
	Content    *string `json:"content"`
	SingleWord bool    `json:"single_word"`
	LStrip     bool    `json:"lstrip"`
	RStrip     bool    `json:"rstrip"`
	Normalized *bool   `json:"normalized"`
	Special    bool    `json:"special"`
	plain      bool
}

func (t *configToken) UnmarshalJSON(raw []byte) error {
	switch raw[0] {
	case '"':
		t.plain = true
		return json.Unmarshal(raw, &t.Content)
	case '{':
		type object configToken
		err := json.Unmarshal(raw, (*object)(t))
		if err == nil && t.Content == nil {
			err = errors.New("neither a string nor an object with content")
		}
		return err
	}
	return nil // null, or a setting such as add_bos_token
}

// text returns the token's content; "" for none.
func (t *configToken) text() string {
	if t.Content == nil {
		return ""
	}
	return *t.Content
}

// added returns the token as Transformers adds it.
func (t *configToken) added(special bool) bpe.AddedToken {
	special = special || t.Special || t.plain
	normalized := t.Normalized != nil && *t.Normalized || t.Normalized == nil && !special
	return bpe.AddedToken{Content: t.text(), SingleWord: t.SingleWord, LStrip: t.LStrip, RStrip: t.RStrip,
		Normalized: normalized, Special: special}
}

// specials are special tokens: those with names in an order, and the others.
type specials struct {
	names  []string
	tokens map[string]configToken // by name
	extra  []configToken
}

func (s *specials) set(name string, token configToken) {
	if _, again := s.tokens[name]; !again {
		s.names = append(s.names, name)
	}
	s.tokens[name] = token
}

// byName returns the texts of the tokens with names.
func (s *specials) byName() map[string]string {
	texts := make(map[string]string, len(s.names))
	for name, token := range s.tokens {
		texts[name] = token.text()
	}
	return texts
}

// readJSON reads a file of the folder that need not exist.
func readJSON(dir, name string, into any) error {
	raw, found, err := readOptional(filepath.Join(dir, name))
	if err == nil && found {
		err = json.Unmarshal(raw, into)
	}
	if err != nil {
		return fmt.Errorf("prompt: %s: %w", filepath.Join(dir, name), err)
	}
	return nil
}

// loadFolder loads the folder as each release of the engine does, and uses the tokenizer of the one that m follows. It
// fails if no release's tokens are known.
func (m *Model) loadFolder(dir string, f *folder) error {
	if err := readJSON(dir, tokenizerConfigFile, &f.config); err != nil {
		return err
	}
	if decoder := f.config.values["added_tokens_decoder"]; decoder != nil {
		if err := json.Unmarshal(decoder, &f.decoder); err != nil {
			return fmt.Errorf("prompt: %s: added_tokens_decoder: %w", filepath.Join(dir, tokenizerConfigFile), err)
		}
	}
	path := filepath.Join(dir, tokenizerFile)
	raw, err := boundedfile.Read(path, maxTokenizerFile)
	if errors.Is(err, fs.ErrNotExist) {
		if found, otherErr := m.loadTiktoken(dir, f); found || otherErr != nil {
			return otherErr
		}
	}
	if err != nil {
		return fmt.Errorf("prompt: %w", err)
	}
	if f.file, err = bpe.ReadTokenizerJSON(raw); err != nil {
		return fmt.Errorf("prompt: %s: %w", path, err)
	}
	if m.options.Engine != Dynamo && f.decoder == nil {
		if err := readJSON(dir, specialTokensMapFile, &f.older); err != nil {
			return err
		}
		if err := readJSON(dir, addedTokensFile, &f.olderAdded); err != nil {
			return err
		}
	}
	_, err = os.Stat(filepath.Join(dir, tekkenFile))
	f.tekken = err == nil
	known, own := false, 0
	for i, r := range releases[m.options.Engine] {
		m.loads = append(m.loads, f.loadOnce(m.options.Engine, r, m.loads))
		known = known || m.loads[i].unknown == nil
		if r.version == m.release.version {
			own = i
		}
	}
	switch err := m.loads[own].unknown; {
	case !known && IsUnknown(err):
		return err
	case !known:
		return fmt.Errorf("prompt: %s: %w", path, err)
	}
	for _, l := range m.loads {
		l.description = nil // it refers to the whole file
	}
	m.use(m.loads[own])
	return nil
}

// loadOnce returns the tokenizer that a release of the engine loads: one of earlier if that is the same.
func (f *folder) loadOnce(engine Engine, r release, earlier []*loaded) *loaded {
	d, s, err := f.load(engine, r)
	if err != nil {
		return &loaded{unknown: err}
	}
	l := &loaded{description: d, names: s.byName()}
	for _, other := range earlier {
		if reflect.DeepEqual(d, other.description) && maps.Equal(l.names, other.names) {
			return other
		}
	}
	l.encoder, l.unknown = f.file.Encoder(d)
	return l
}

// use makes m use a loaded tokenizer. If its tokens are unknown, no request gets as far as the encoder.
func (m *Model) use(l *loaded) {
	m.specialNames, m.unknown, m.media, m.certain = l.names, l.unknown, nil, nil
	if l.unknown != nil {
		l = m.loads[slices.IndexFunc(m.loads, func(l *loaded) bool { return l.unknown == nil })]
	}
	m.encoder = l.encoder
	m.findMarks()
}

// load returns what a release of an engine makes of the folder.
func (f *folder) load(engine Engine, r release) (*bpe.Description, *specials, error) {
	switch engine {
	case Dynamo:
		s, _, err := f.specialTokens(&class{}, r.transformers)
		return &f.file.Description, s, err
	case TRTLLM:
		return f.build(tokenizersBackend, r.transformers)
	}
	class, err := f.autoClass(engine, r.transformers)
	switch {
	case err != nil:
		return nil, nil, err
	case engine == VLLM:
		return f.build(class, r.transformers)
	}
	d, s, err := f.loadSGLang(class, r.transformers)
	if err != nil || !f.multimodal || class == tokenizersBackend {
		return d, s, err
	}
	// SGLang takes the tokenizer of a model's processor, if it takes the model for one with media.
	if other, _, err := f.build(class, r.transformers); err != nil || !reflect.DeepEqual(d, other) {
		return nil, nil, errNotReproduced("the tokenizer of class " + class + " of a model with media on SGLang")
	}
	return d, s, nil
}

// loadSGLang returns what SGLang makes of a tokenizer of the class that AutoTokenizer chose.
// Source: SGLang 0.5.21 to 0.5.23, srt/utils/hf_transformers/tokenizer (get_tokenizer, _fix_v5_tokenizer_components,
// _fix_v5_add_bos_eos_token).
func (f *folder) loadSGLang(class string, v int) (*bpe.Description, *specials, error) {
	declared := f.config.text("tokenizer_class")
	if class == tokenizersBackend {
		known, err := classNamed(declared)
		if err != nil {
			return nil, nil, err
		}
		class = cmp.Or(known, class)
	}
	d, s, err := f.build(class, v)
	if err != nil {
		return nil, nil, err
	}
	own, is := bpe.Kind(f.file.PreTokenizer), bpe.Kind(d.PreTokenizer)
	if own != "" && is != "" && own != is {
		d.PreTokenizer, d.Decoder = f.file.PreTokenizer, f.file.Decoder
	}
	wanted := string(f.config.values["add_bos_token"]) != "false"
	if slices.Contains(sglangBOSClasses, declared) && wanted != classes[class].bos {
		d.Prefix, d.Suffix = nil, nil
		if wanted {
			d.Prefix = prefix(d, s)
		}
	}
	return d, s, nil
}

// prefix returns the id of bos_token; nil if there is none.
func prefix(d *bpe.Description, s *specials) []kvblock.Token {
	bos := s.tokens["bos_token"]
	i := slices.IndexFunc(d.Added, func(token bpe.AddedToken) bool { return token.Content == bos.text() })
	if i < 0 {
		return nil
	}
	return []kvblock.Token{kvblock.Token(d.Added[i].ID)}
}

// modelType returns the model type as AutoTokenizer sees it.
func (f *folder) modelType(engine Engine, v int) string {
	if engine == VLLM && v < 19 && f.model.ModelType == "cosmos3_omni" {
		return "" // vLLM 0.31.0 has a configuration of its own for it, which AutoTokenizer does not know
	}
	return f.model.ModelType
}

// autoClass returns the class that AutoTokenizer of Transformers 5.v chooses, one of classes.
func (f *folder) autoClass(engine Engine, v int) (string, error) {
	model := f.modelType(engine, v)
	asItIs := func(name string) bool { return hasType(vllmAsItIs, name, v) }
	if engine == VLLM && (asItIs(model) || slices.ContainsFunc(f.model.Architectures, asItIs)) {
		return tokenizersBackend, nil
	}
	class := f.config.text("tokenizer_class")
	var remote map[string]any
	if f.config.has("auto_map") &&
		(json.Unmarshal(f.config.values["auto_map"], &remote) != nil || remote["AutoTokenizer"] != nil) {
		return "", errNotReproduced("a tokenizer of class " + strconv.Quote(class) + " in Python (auto_map)")
	}
	onlyInModel := class == ""
	if onlyInModel {
		class, _ = f.model.TokenizerClass.(string)
	}
	name, _ := f.model.ModelName.(string)
	mapped := mappedClass(model, v)
	switch {
	case mapped == mistralBackend && f.tekken && engine == SGLang:
		return "", errNotReproduced("Mistral's own tokenizer on SGLang")
	case mapped == mistralBackend || mapped == tokenizersBackend || mapped == "" && class == "":
		return tokenizersBackend, nil
	case mappedClass(name, v) == tokenizersBackend || hasType(wrongClass, name, v):
		return "", errNotReproduced("a tokenizer of a model with the model_name " + strconv.Quote(name))
	case mapped != "" && (class == "" || hasType(wrongClass, model, v)):
		class = mapped
	}
	known, err := classNamed(class)
	switch {
	case engine == VLLM && (v < 19 || model == "") && known == "LlamaTokenizer" &&
		bytes.Contains(f.file.PreTokenizer, []byte("ByteLevel")):
		// DeepSeek's model types take it as it is, and vLLM 0.31 some models' names.
		err = errNotReproduced("a byte-level tokenizer of class LlamaTokenizer, which depends on the model's name " +
			"(vLLM 0.31) and on model_type in config.json")
	case class == otherClass:
		err = errNotReproduced("the tokenizer class of the model type " + strconv.Quote(model))
	case err == nil && known == "" && onlyInModel && mapped == "":
		err = errNotReproduced("a tokenizer of class " + strconv.Quote(class) + ", which only config.json names")
	}
	return cmp.Or(known, tokenizersBackend), err
}

// build returns what a class of Transformers 5.v makes of the folder.
func (f *folder) build(name string, v int) (*bpe.Description, *specials, error) {
	class := classes[name]
	d := f.file.Description
	if class.components != nil {
		d.Added, d.Decoder = nil, json.RawMessage(`{"type":"ByteLevel"}`)
		d.Model = bpe.ModelOptions{Type: d.Model.Type, FuseUnknown: class.pieces, ByteFallback: class.pieces}
		if err := class.components(f, &d); err != nil {
			return nil, nil, err
		}
	}
	for _, key := range []string{"fix_mistral_regex", "fast_tokenizer_files", "tokenizer_file", "init_inputs"} {
		value := string(f.config.values[key])
		if f.config.has(key) && value != "false" && value != "[]" && (key != "tokenizer_file" || v < 17) {
			return nil, nil, errNotReproduced(key + " in " + tokenizerConfigFile)
		}
	}
	s, all, err := f.specialTokens(&class, v)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", tokenizerConfigFile, err)
	}
	d.Added = f.addTokens(d.Added, s, all, class.again)
	if class.unknown {
		unknown := s.tokens["unk_token"]
		d.Model.UnknownToken = unknown.Content
	}
	switch {
	case class.bos:
		d.Prefix, d.Suffix = prefix(&d, s), nil
	case name == "GPTNeoXTokenizer" && v >= 17:
		d.Prefix, d.Suffix = nil, nil
	}
	return &d, s, nil
}

// addTokens returns list with the tokens that Transformers adds, in its order: all, then new special tokens.
func (f *folder) addTokens(list []bpe.AddedToken, s *specials, all []configToken, again again) []bpe.AddedToken {
	named, has := map[string]bool{}, map[string]bool{}
	var special []configToken
	for _, name := range s.names {
		token := s.tokens[name]
		named[token.text()] = true
		special = append(special, token)
	}
	special = append(special, s.extra...)
	for i := range list {
		has[list[i].Content] = true
	}
	var more []bpe.AddedToken
	for _, token := range all {
		more = append(more, token.added(named[token.text()]))
		has[token.text()] = true
	}
	for _, token := range special {
		if !has[token.text()] {
			more = append(more, token.added(named[token.text()]))
		}
	}
	for _, token := range special {
		if again == againPlain || again == againKept && token.plain {
			token = configToken{Content: token.Content, plain: true}
		}
		if again != "" {
			more = append(more, token.added(true))
		}
	}
	return f.file.Extend(list, more...)
}

// addedByID returns the tokens of added_tokens_decoder in the order of their ids. Without it, those of
// added_tokens.json and tokenizer.json. special are the contents of special tokens.
func (f *folder) addedByID(special map[string]bool) []configToken {
	byID := f.decoder
	if byID == nil {
		byID = map[int64]configToken{}
		for content, id := range f.olderAdded {
			normalized := !special[content]
			byID[id] = configToken{Content: &content, Normalized: &normalized, Special: !normalized}
		}
		for i := range f.file.Added {
			t := &f.file.Added[i]
			byID[t.ID] = configToken{Content: &t.Content, SingleWord: t.SingleWord, LStrip: t.LStrip, RStrip: t.RStrip,
				Normalized: &t.Normalized, Special: t.Special}
		}
	}
	all := make([]configToken, 0, len(byID))
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		all = append(all, byID[id])
	}
	return all
}

// specialTokens returns the special tokens, those of specialTokenNames first, and what addedByID returns. A class
// replaces no token that a file gives, not even null.
func (f *folder) specialTokens(class *class, v int) (s *specials, all []configToken, err error) {
	s = &specials{tokens: map[string]configToken{}}
	merged := map[string]json.RawMessage{}
	maps.Copy(merged, f.config.values)
	order := slices.Concat(specialTokenNames, class.tokens.keys)
	var last []string // names of the model's own whose tokens are texts: these win over the older file's
	for _, key := range f.config.keys {
		if strings.HasPrefix(string(merged[key]), `"`) && isOwnName(key) {
			last = append(last, key)
		} else if bytes.Contains(merged[key], []byte(`"__type"`)) {
			order = append(order, key)
		}
	}
	for _, key := range f.older.keys {
		if order = append(order, key); !slices.Contains(last, key) {
			merged[key] = f.older.values[key]
		}
	}
	given := maps.Clone(merged)
	if _, found := given["pad_token"]; !found && f.file.PadToken != "" && !class.pads {
		maps.Copy(merged, named("pad_token", f.file.PadToken).values)
	}
	for name, token := range class.tokens.values {
		if _, found := given[name]; !found {
			merged[name] = token
		}
	}
	for _, name := range slices.Concat(order, last) {
		var token configToken
		if merged[name] == nil || !isOwnName(name) && !slices.Contains(specialTokenNames, name) {
			continue
		}
		if err := json.Unmarshal(merged[name], &token); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", name, err)
		}
		if token.text() != "" {
			s.set(name, token)
		}
	}
	if err := f.extraTokens(s, v); err != nil {
		return nil, nil, fmt.Errorf("extra_special_tokens: %w", err)
	}
	special, standard := map[string]bool{}, map[string]string{}
	for _, token := range s.extra {
		special[token.text()] = true
	}
	for _, name := range specialTokenNames {
		if token, found := s.tokens[name]; found && given[name] != nil {
			special[token.text()], standard[name] = true, token.text()
		}
	}
	all = f.addedByID(special)
	for _, token := range all {
		for name, text := range standard {
			if text == token.text() {
				s.tokens[name] = token
			}
		}
	}
	return s, all, nil
}

// isOwnName reports whether a key names a special token of the model's own.
func isOwnName(key string) bool {
	return strings.HasSuffix(key, "_token") && !slices.Contains(specialTokenNames, key)
}

// extraTokens adds the tokens of extra_special_tokens: an object has names for them, a list has not. Before
// Transformers 5.19 an empty one hides additional_special_tokens.
func (f *folder) extraTokens(s *specials, v int) error {
	value, given := f.config.values["extra_special_tokens"]
	older := f.older.values["extra_special_tokens"]
	switch string(bytes.TrimSpace(value)) {
	case "", "null", "[]", "{}":
		if f.config.has("additional_special_tokens") && (!given || v == 0 || v >= 19) {
			value = f.config.values["additional_special_tokens"]
		} else if !given && older == nil {
			value = f.older.values["additional_special_tokens"]
		}
	}
	for _, value := range []json.RawMessage{value, older} {
		var list []configToken
		switch {
		case len(value) > 0 && value[0] == '[':
			if err := json.Unmarshal(value, &list); err != nil {
				return err
			}
			s.extra = append(s.extra, list...)
		case len(value) > 0 && value[0] == '{':
			var byName orderedJSON
			if err := json.Unmarshal(value, &byName); err != nil {
				return err
			}
			for _, name := range byName.keys {
				var token configToken
				if err := json.Unmarshal(byName.values[name], &token); err != nil {
					return err
				}
				s.set(name, token)
			}
		}
	}
	return nil
}

// prefixSpace returns add_prefix_space; missing if it is absent or null.
func (f *folder) prefixSpace(missing bool) (value bool, err error) {
	value = missing
	if f.config.has("add_prefix_space") {
		err = json.Unmarshal(f.config.values["add_prefix_space"], &value)
	}
	return value, err
}
