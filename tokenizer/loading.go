package tokenizer

import (
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

	"kvepp/chattemplate"
	"kvepp/kvblock"
	"kvepp/tokenizer/bpe"
)

// How an engine loads the tokenizer of a folder. vLLM and SGLang call Transformers' AutoTokenizer, which chooses a
// class. Some classes take only vocabulary, merges and post-processor from tokenizer.json and put their own components
// into the place of the others; all of them add tokens that other files name. SGLang then puts some back. A folder
// whose class is not reproduced here gives an error that names it. Dynamo's frontend takes tokenizer.json as it is.
// Source: transformers 5.12.1 to 5.20.2, AutoTokenizer.from_pretrained, tokenization_utils_base (_from_pretrained),
// tokenization_utils_tokenizers (TokenizersBackend) and models/*/tokenization_*.

// loaded is a tokenizer as one version of an engine loads it.
type loaded struct {
	encoder     *bpe.Encoder
	description *bpe.Description
	names       map[string]string // the named special tokens
	// unknown says why only the engine knows the tokens; nil if they are known here too.
	unknown error
}

// folder is what the files of a model's folder say of its tokenizer.
type folder struct {
	file   *bpe.File
	config *chattemplate.Dict // tokenizer_config.json
	// older is special_tokens_map.json, and olderAdded added_tokens.json: ids by token. Both are nil if there is none,
	// or if decoder takes their place.
	older      *chattemplate.Dict
	olderAdded map[string]int64
	decoder    map[string]configToken // added_tokens_decoder by id; nil for none
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

// configToken is a token in a file other than tokenizer.json. A token that is written as a text alone is plain.
type configToken struct {
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized *bool  `json:"normalized"`
	Special    bool   `json:"special"`
	plain      bool
}

// added returns the token as Transformers adds it.
func (t *configToken) added(special bool) bpe.AddedToken {
	special = special || t.Special || t.plain
	normalized := !special
	if t.Normalized != nil {
		normalized = *t.Normalized
	}
	return bpe.AddedToken{Content: t.Content, SingleWord: t.SingleWord, LStrip: t.LStrip, RStrip: t.RStrip,
		Normalized: normalized, Special: special}
}

// namedTokens are special tokens by name, in an order.
type namedTokens struct {
	names  []string
	tokens map[string]configToken
}

func (n *namedTokens) set(name string, token configToken) {
	if _, again := n.tokens[name]; !again {
		n.names = append(n.names, name)
	}
	n.tokens[name] = token
}

// contents returns the texts of the tokens by name.
func (n *namedTokens) contents() map[string]string {
	texts := make(map[string]string, len(n.names))
	for _, name := range n.names {
		texts[name] = n.tokens[name].Content
	}
	return texts
}

// readFolder reads the files beside config.json.
func (m *Model) readFolder(dir string, model modelConfig) (*folder, error) {
	f := &folder{model: model, multimodal: m.multimodal}
	raw, found, err := readOptional(filepath.Join(dir, tokenizerConfigFile))
	if err == nil && found {
		if f.config, err = asObject(raw); err == nil {
			err = json.Unmarshal(raw, &struct {
				Decoder *map[string]configToken `json:"added_tokens_decoder"`
			}{&f.decoder})
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, tokenizerConfigFile), err)
	}
	if field(f.config, "split_special_tokens") == true {
		return nil, fmt.Errorf("%s: split_special_tokens true is not supported, so ids could differ from the engine's",
			filepath.Join(dir, tokenizerConfigFile))
	}
	if f.decoder == nil && m.options.Engine != Dynamo {
		raw, found, err := readOptional(filepath.Join(dir, specialTokensMapFile))
		if err == nil && found {
			f.older, err = asObject(raw)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(dir, specialTokensMapFile), err)
		}
		raw, found, err = readOptional(filepath.Join(dir, addedTokensFile))
		if err == nil && found {
			err = json.Unmarshal(raw, &f.olderAdded)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(dir, addedTokensFile), err)
		}
	}
	_, err = os.Stat(filepath.Join(dir, tekkenFile))
	f.tekken = err == nil
	return f, nil
}

// asObject reads a JSON object.
func asObject(raw []byte) (*chattemplate.Dict, error) {
	value, err := chattemplate.ParseJSON(raw)
	if err != nil {
		return nil, err
	}
	object, ok := value.(*chattemplate.Dict)
	if !ok {
		return nil, errors.New("not a JSON object")
	}
	return object, nil
}

// loadFolder loads the folder as each release of the engine does, and uses the one that m follows. It fails if no
// release's tokens are known.
func (m *Model) loadFolder(dir string, model modelConfig) error {
	f, err := m.readFolder(dir, model)
	if err != nil {
		return fmt.Errorf("tokenizer: %w", err)
	}
	path := filepath.Join(dir, tokenizerFile)
	raw, err := readFile(path, maxTokenizerFile)
	if errors.Is(err, fs.ErrNotExist) {
		if found, otherErr := m.loadTiktoken(dir, f); found || otherErr != nil {
			return otherErr
		}
	}
	if err != nil {
		return fmt.Errorf("tokenizer: %w", err)
	}
	if f.file, err = bpe.ReadTokenizerJSON(raw); err != nil {
		return fmt.Errorf("tokenizer: %s: %w", path, err)
	}
	var failed, own error
	known := false
	for _, r := range releases[m.options.Engine] {
		l := &loaded{}
		if l.description, l.names, l.unknown = f.load(m.options.Engine, r); l.unknown == nil {
			for _, earlier := range m.loads {
				if reflect.DeepEqual(l.description, earlier.description) && maps.Equal(l.names, earlier.names) {
					l = earlier
				}
			}
		}
		if l.unknown == nil && l.encoder == nil {
			if l.encoder, err = f.file.Encoder(l.description); err != nil {
				l.unknown, failed = errNotReproduced(err.Error()), err
			}
		}
		known = known || l.unknown == nil
		if r.version == m.release.version {
			own = l.unknown
		}
		m.loads = append(m.loads, l)
	}
	switch {
	case failed != nil && !known:
		return fmt.Errorf("tokenizer: %s: %w", path, failed)
	case !known:
		return fmt.Errorf("%w (%s)", own, dir)
	}
	return nil
}

// use makes m use a loaded tokenizer.
func (m *Model) use(l *loaded) {
	m.encoder, m.specialNames, m.unknown, m.media, m.certain = l.encoder, l.names, l.unknown, nil, nil
	if m.encoder == nil { // no request gets as far as an encoder
		i := slices.IndexFunc(m.loads, func(l *loaded) bool { return l.encoder != nil })
		m.encoder = m.loads[i].encoder
	}
	m.findMarks()
}

// load returns what a release of an engine makes of the folder.
func (f *folder) load(engine Engine, r release) (*bpe.Description, map[string]string, error) {
	switch engine {
	case Dynamo:
		named, _, _, err := f.specialTokens(&class{})
		return &f.file.Description, named.contents(), err
	case TRTLLM:
		return f.build(tokenizersBackend, r.transformers)
	}
	class, err := f.autoClass(engine, r)
	if err != nil {
		return nil, nil, err
	}
	if engine == VLLM {
		return f.build(class, r.transformers)
	}
	d, names, err := f.loadSGLang(class, r)
	if err != nil || !f.multimodal || class == tokenizersBackend {
		return d, names, err
	}
	// SGLang takes the tokenizer of a model's processor, if it takes the model for one with media.
	other, _, err := f.build(class, r.transformers)
	if err == nil && !reflect.DeepEqual(d, other) {
		err = errNotReproduced("the tokenizer of class " + class + " of a model with media on SGLang")
	}
	return d, names, err
}

// loadSGLang returns what SGLang makes of a tokenizer of the class that AutoTokenizer chose.
// Source: SGLang 0.5.21 to 0.5.23, srt/utils/hf_transformers/tokenizer (get_tokenizer, _fix_v5_tokenizer_components,
// _fix_v5_add_bos_eos_token).
func (f *folder) loadSGLang(class string, r release) (*bpe.Description, map[string]string, error) {
	declared := f.text("tokenizer_class")
	if class == tokenizersBackend {
		if known, err := classNamed(declared); err != nil {
			return nil, nil, err
		} else if known != "" {
			class = known
		}
	}
	d, names, err := f.build(class, r.transformers)
	if err != nil {
		return nil, nil, err
	}
	own := bpe.Kind(f.file.PreTokenizer)
	if is := bpe.Kind(d.PreTokenizer); own != "" && is != "" && own != is {
		d.PreTokenizer, d.Decoder = f.file.PreTokenizer, f.file.Decoder
	}
	if slices.Contains(sglangBOSClasses, declared) {
		wanted, isBool := field(f.config, "add_bos_token").(bool)
		if wanted = wanted || !isBool; wanted != (class == "CodeLlamaTokenizer") {
			d.Prefix, d.Suffix = nil, nil
			if wanted {
				d.Prefix = f.prefix(d, names)
			}
		}
	}
	return d, names, nil
}

// prefix returns the id of the token that begins texts; none if there is no such token.
func (f *folder) prefix(d *bpe.Description, names map[string]string) []kvblock.Token {
	for _, token := range d.Added {
		if bos := names["bos_token"]; bos != "" && token.Content == bos {
			return []kvblock.Token{kvblock.Token(token.ID)}
		}
	}
	return nil
}

// text returns a text of tokenizer_config.json; "" for none.
func (f *folder) text(key string) string {
	text, _ := field(f.config, key).(string)
	return text
}

// autoClass returns the class that AutoTokenizer chooses, without Fast at its end. tokenizersBackend follows the file.
func (f *folder) autoClass(engine Engine, r release) (string, error) {
	model, v := f.model.ModelType, r.transformers
	if engine == VLLM && hasType(vllmTokenizersBackend, model, v) {
		return tokenizersBackend, nil
	}
	if remote := field(f.config, "auto_map"); remote != nil {
		if byName, ok := remote.(*chattemplate.Dict); !ok || field(byName, "AutoTokenizer") != nil {
			return "", errNotReproduced("a tokenizer of class " + strconv.Quote(f.text("tokenizer_class")) +
				" in Python of the model's own (auto_map)")
		}
	}
	class, named := f.text("tokenizer_class"), field(f.config, "tokenizer_class") != nil
	if class == "" {
		class, _ = f.model.TokenizerClass.(string)
	}
	name, _ := f.model.ModelName.(string)
	mapped := mappedClass(model, v)
	switch {
	case mapped == mistralCommon && f.tekken && engine == SGLang:
		return "", errNotReproduced("Mistral's own tokenizer on " + string(engine))
	case mapped == mistralCommon || mapped == tokenizersBackend:
		return tokenizersBackend, nil
	case class == "" && slices.Contains(reconfigured, model):
		return "", errNotReproduced("the tokenizer of the model type " + model + " without a tokenizer_class")
	case class == "" && mapped == "":
		return tokenizersBackend, nil
	case mapped != "" && (class == "" || hasType(wrongClass, model, v) || hasType(wrongClass, name, v)):
		class = mapped
	}
	if class == otherClass {
		return "", errNotReproduced("the tokenizer class of the model type " + model)
	}
	known, err := classNamed(class)
	if known == "" && err == nil {
		if !named && mapped == "" {
			return "", errNotReproduced("a tokenizer of class " + strconv.Quote(class) + ", which only config.json names,")
		}
		known = tokenizersBackend
	}
	return known, err
}

// build returns what a class of Transformers makes of the folder.
func (f *folder) build(name string, v int) (*bpe.Description, map[string]string, error) {
	class := classes[name]
	d := f.file.Description
	if class.components != nil {
		d.Added = nil
		d.Model = bpe.ModelOptions{Type: d.Model.Type, FuseUnknown: class.fuse, ByteFallback: class.fallback}
		d.Decoder = json.RawMessage(`{"type":"ByteLevel"}`)
		if err := class.components(f, &d); err != nil {
			return nil, nil, err
		}
	}
	switch {
	case field(f.config, "fix_mistral_regex") == true && f.file.VocabSize() > 100_000-len(f.file.Added):
		return nil, nil, errNotReproduced("fix_mistral_regex")
	case field(f.config, "fast_tokenizer_files") != nil, v < 17 && field(f.config, "tokenizer_file") != nil:
		return nil, nil, errNotReproduced("a tokenizer whose configuration names another file than tokenizer.json")
	}
	if list, ok := field(f.config, "init_inputs").(*chattemplate.List); ok && list.Len() > 0 {
		return nil, nil, errNotReproduced("init_inputs in " + tokenizerConfigFile)
	}
	named, extra, all, err := f.specialTokens(&class)
	if err != nil {
		return nil, nil, fmt.Errorf("tokenizer: %s: %w", tokenizerConfigFile, err)
	}
	d.Added = f.addTokens(d.Added, named, extra, all, &class)
	names := named.contents()
	if class.unknown {
		unknown := names["unk_token"]
		d.Model.UnknownToken = &unknown
	}
	switch {
	case class.bos:
		d.Prefix, d.Suffix = f.prefix(&d, names), nil
	case name == "GPTNeoXTokenizer" && v >= 17:
		d.Prefix, d.Suffix = nil, nil
	}
	return &d, names, nil
}

// addTokens returns list with the tokens that Transformers adds, in its order: all, then the special tokens that are
// new.
func (f *folder) addTokens(
	list []bpe.AddedToken, named namedTokens, extra, all []configToken, class *class,
) []bpe.AddedToken {
	has := make(map[string]bpe.AddedToken, len(list))
	for _, token := range list {
		token.ID = 0
		has[token.Content] = token
	}
	isNamed := make(map[string]bool, len(named.names))
	for _, token := range named.tokens {
		isNamed[token.Content] = true
	}
	var more []bpe.AddedToken
	for _, token := range all {
		if is, found := has[token.Content]; !found || is != token.added(false) {
			more = append(more, token.added(isNamed[token.Content]))
		}
	}
	for _, token := range more {
		has[token.Content] = token
	}
	special := slices.Clone(extra)
	for _, name := range slices.Backward(named.names) {
		special = slices.Insert(special, 0, named.tokens[name])
	}
	for _, token := range special {
		if _, found := has[token.Content]; !found {
			more = append(more, token.added(isNamed[token.Content]))
		}
	}
	for _, token := range special {
		if class.again == againPlain || class.again == againKept && token.plain {
			token = configToken{Content: token.Content, plain: true}
		}
		if class.again != "" {
			more = append(more, token.added(true))
		}
	}
	return f.file.Extend(list, more...)
}

// addedByID returns the tokens of added_tokens_decoder in the order of their ids. Without it, those of added_tokens.json
// and tokenizer.json.
// special are the contents of special tokens.
func (f *folder) addedByID(special map[string]bool) []configToken {
	byID := map[int64]configToken{}
	for id, token := range f.decoder {
		if n, err := strconv.ParseInt(id, 10, 64); err == nil {
			byID[n] = token
		}
	}
	if f.decoder == nil {
		for content, id := range f.olderAdded {
			normalized := !special[content]
			byID[id] = configToken{Content: content, Normalized: &normalized, Special: !normalized}
		}
		for i := range f.file.Added {
			t := &f.file.Added[i]
			byID[t.ID] = configToken{Content: t.Content, SingleWord: t.SingleWord, LStrip: t.LStrip, RStrip: t.RStrip,
				Normalized: &t.Normalized, Special: t.Special}
		}
	}
	all := make([]configToken, 0, len(byID))
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		all = append(all, byID[id])
	}
	return all
}

// specialTokens returns the named special tokens, those of specialTokenNames first, the other special tokens, and all
// that addedByID returns.
func (f *folder) specialTokens(class *class) (named namedTokens, extra, all []configToken, err error) {
	named.tokens = map[string]configToken{}
	given := f.config.Clone() // what the files give the class
	// Names of the model's own whose tokens are texts come last, and take the places of the older file's.
	var last []string
	for key, value := range f.config.All() {
		name, _ := key.(string)
		if _, plain := value.(string); plain && strings.HasSuffix(name, "_token") && !isStandard(name) {
			last = append(last, name)
		}
	}
	for key, value := range f.older.All() {
		if name, _ := key.(string); !slices.Contains(last, name) {
			given.Set(name, value)
		}
	}
	merged := given.Clone()
	for i := 0; i < len(class.tokens); i += 2 {
		if _, found := merged.Get(class.tokens[i]); !found {
			merged.Set(class.tokens[i], class.tokens[i+1])
		}
	}
	if _, found := merged.Get("pad_token"); !found && f.file.PadToken != "" && !class.pads {
		merged.Set("pad_token", f.file.PadToken)
	}
	order := slices.Clone(specialTokenNames)
	for key, value := range merged.All() {
		name, _ := key.(string)
		object, _ := value.(*chattemplate.Dict)
		if strings.HasSuffix(name, "_token") && !isStandard(name) && !slices.Contains(last, name) &&
			(object == nil || field(object, "__type") != nil || field(f.older, name) != nil) {
			order = append(order, name)
		}
	}
	for _, name := range append(order, last...) {
		token, err := parseToken(field(merged, name))
		if err != nil {
			return named, nil, nil, fmt.Errorf("%s: %w", name, err)
		}
		if token.Content != "" {
			named.set(name, token)
		}
	}
	if extra, err = f.extraTokens(&named); err != nil {
		return named, nil, nil, err
	}
	special := map[string]bool{}
	for _, token := range extra {
		special[token.Content] = true
	}
	for _, name := range specialTokenNames {
		if field(given, name) != nil {
			special[named.tokens[name].Content] = true
		}
	}
	all = f.addedByID(special)
	for _, token := range all {
		for _, name := range specialTokenNames {
			if field(given, name) != nil && named.tokens[name].Content == token.Content {
				named.tokens[name] = token
			}
		}
	}
	return named, extra, all, nil
}

// isStandard reports whether a special token's name is one of specialTokenNames.
func isStandard(name string) bool { return slices.Contains(specialTokenNames, name) }

// extraTokens adds the tokens of extra_special_tokens to named if they have names, and returns them if not.
func (f *folder) extraTokens(named *namedTokens) (extra []configToken, err error) {
	value, given := f.config.Get("extra_special_tokens")
	if other := field(f.config, "additional_special_tokens"); other != nil && !chattemplate.Truth(value) {
		value, given = other, true
	}
	if !given {
		value, given = f.older.Get("additional_special_tokens")
	}
	for _, value := range []any{value, field(f.older, "extra_special_tokens")} {
		switch value := value.(type) {
		case *chattemplate.List:
			for _, item := range value.Items {
				token, err := parseToken(item)
				if err != nil {
					return nil, fmt.Errorf("extra_special_tokens: %w", err)
				}
				extra = append(extra, token)
			}
		case *chattemplate.Dict:
			for key, item := range value.All() {
				name, _ := key.(string)
				token, err := parseToken(item)
				if err != nil {
					return nil, fmt.Errorf("extra_special_tokens: %s: %w", name, err)
				}
				named.set(name, token)
			}
		}
	}
	return extra, nil
}

// parseToken reads a token, which is a text or an object; none for null and for other values.
func parseToken(value any) (t configToken, err error) {
	switch value := value.(type) {
	case string:
		t.Content, t.plain = value, true
	case *chattemplate.Dict:
		var ok bool
		if t.Content, ok = field(value, "content").(string); !ok {
			return t, errors.New("neither a string nor an object with content")
		}
		t.SingleWord = field(value, "single_word") == true
		t.LStrip, t.RStrip = field(value, "lstrip") == true, field(value, "rstrip") == true
		t.Special = field(value, "special") == true
		if normalized, given := field(value, "normalized").(bool); given {
			t.Normalized = &normalized
		}
	}
	return t, nil
}

// prefixSpace returns add_prefix_space. missing is its value if it is absent or null.
func (f *folder) prefixSpace(missing bool) (bool, error) {
	switch value := field(f.config, "add_prefix_space").(type) {
	case nil:
		return missing, nil
	case bool:
		return value, nil
	}
	return false, errNotReproduced("add_prefix_space that is neither true nor false")
}
