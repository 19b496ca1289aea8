package prompt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync/atomic"

	"kvepp/internal/boundedfile"
	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/bpe"
	"kvepp/prompt/encoders"
	"kvepp/prompt/values"
)

// The reasons why a request has no token ids here. The router then routes it by load.
var (
	// ErrMedia says that the prompt holds something other than text.
	ErrMedia = errors.New("prompt: the prompt is not text alone")
	// ErrNoChatTemplate says that the model has no chat template.
	ErrNoChatTemplate = errors.New("prompt: the model has no chat template")
	// ErrMemory says that reading the body would take more memory than body.ReadCost allows for its size.
	ErrMemory = bpe.ErrMemory
	// ErrInvalidUTF8 says that the text is not valid UTF-8.
	ErrInvalidUTF8 = bpe.ErrInvalidUTF8
)

// Model is a loaded tokenizer with its chat template.
type Model struct {
	encoder *bpe.Encoder
	// chat is the template for chats, and chatTools the one for chats with tools. Either may be nil.
	chat, chatTools *chatTemplate
	// dynamo renders chats if the engine is Dynamo; else it is nil.
	dynamo *dynamoChat
	// native encodes chats as the engine's own code does, without a template; nil if the engine uses a template.
	native *encoders.Encoder
	// efforts4 is the wording of reasoning efforts that SGLang finds in a checkpoint of DeepSeek V4.
	efforts4 encoders.Efforts
	// specialNames are the model's named special tokens, such as "bos_token": "<s>", as templates see them.
	specialNames map[string]string
	// modelType and architecture are those of config.json; empty without that file.
	modelType, architecture string
	// multimodal says that config.json names an encoder of images or sound, and nested that it holds the configuration
	// of a text model.
	multimodal, nested bool
	// configured says that there is a config.json, and sglangHybrid what isSGLangHybrid returned.
	configured, sglangHybrid bool
	layers                   Layers // see Layers
	layersKnown              bool
	// mistralCommon says that vLLM encodes with mistral-common instead of tokenizer.json. mistral are its rules; nil if
	// it encodes with Mistral's SentencePiece tokenizer.
	mistralCommon bool
	mistral       *mistralTokenizer
	// media are the marks of images, video and sound in the model's prompts. certain finds the ids before a mark that
	// do not depend on it. Both are nil if the marks are not known.
	media   *mediaMarks
	certain *bpe.CertainPrefix
	// loads are the tokenizers as each release of the engine loads them. unknown says why only the engine knows the
	// tokens of m's release; nil if they are known here too.
	loads   []*loaded
	unknown error
	// responseTemplate says that tokenizer_config.json has a response_template, by which SGLang 0.5.23 may begin the
	// response that continues a message.
	responseTemplate bool
	// messages holds what the engine finds out about the templates for Anthropic's API.
	messages *messagesProbe
	options  Options
	// release is the engine's version. family are the models by each of its releases, in their order.
	release release
	family  []*Model
	// dynamoWorkers are the settings that SetDynamo set; nil before. The family shares them.
	dynamoWorkers *atomic.Pointer[[]DynamoSettings]
	// defaultKwargs is Options.DefaultChatTemplateKwargs; nil for none.
	defaultKwargs *values.Dict
	// efforts is Options.ReasoningEffortMap; nil for none.
	efforts map[string]string
}

// The files of a model's folder.
const (
	tokenizerFile       = "tokenizer.json"
	tokenizerConfigFile = "tokenizer_config.json"
	tiktokenFile        = "tiktoken.model"
	chatTemplateFile    = "chat_template.jinja"
	chatTemplateJSON    = "chat_template.json"
	modelConfigFile     = "config.json"
	// Older folders have these instead of added_tokens_decoder in tokenizer_config.json.
	specialTokensMapFile = "special_tokens_map.json"
	addedTokensFile      = "added_tokens.json"
)

// Load reads a model's Hugging Face folder: tokenizer.json, tiktoken.model or tekken.json, and the optional files
// tokenizer_config.json, config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja and
// chat_template.json. A folder without a chat template
// loads; its chats fail with ErrNoChatTemplate.
//
// Errors name the file and the component. Load also fails for what kvepp cannot reproduce exactly: an unknown
// normalizer, pre-tokenizer, expression, model type, post-processor or class of Transformers; a template that does not
// compile, unless the engine encodes chats beside it.
func Load(dir string, o Options) (*Model, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	m := &Model{options: o, dynamoWorkers: new(atomic.Pointer[[]DynamoSettings])}
	m.mistralCommon = usesMistralCommon(dir, &o)
	i, _, err := matchRelease(o.Engine, o.Version)
	if err != nil {
		return nil, err
	}
	m.release = releases[o.Engine][i]
	f := &folder{}
	if f.model, err = m.readModelConfig(dir); err != nil {
		return nil, fmt.Errorf("prompt: %s: %w", filepath.Join(dir, modelConfigFile), err)
	}
	f.multimodal = m.multimodal
	if err := m.loadTokenizer(dir, f); err != nil {
		return nil, err
	}
	if o.DefaultChatTemplateKwargs != "" {
		if m.defaultKwargs, err = parseKwargs(o.DefaultChatTemplateKwargs); err != nil {
			return nil, err
		}
	}
	if m.efforts, err = parseEfforts(o.ReasoningEffortMap); err != nil {
		return nil, err
	}
	var templates []namedTemplate
	if m.mistral == nil {
		if templates, err = m.readConfig(&f.config); err != nil {
			return nil, fmt.Errorf("prompt: %s: %w", filepath.Join(dir, tokenizerConfigFile), err)
		}
	}
	if m.mistral == nil || o.ChatTemplate != "" {
		if err := m.readTemplates(dir, templates); err != nil {
			return nil, fmt.Errorf("prompt: %w", err)
		}
	}
	if m.options.Engine == Dynamo {
		m.dynamo = m.newDynamoChat()
	}
	if m.efforts4, err = readEfforts(dir); err != nil {
		return nil, fmt.Errorf("prompt: %w", err)
	}
	m.native = m.chooseNative()
	m.messages = m.probeMessages()
	m.makeFamily()
	return m, nil
}

// loadTokenizer sets the encoder. A folder with Mistral's SentencePiece tokenizer loads by its tokenizer.json, and its
// prompts are not known.
func (m *Model) loadTokenizer(dir string, f *folder) error {
	if m.mistralCommon {
		err := m.loadMistral(dir)
		if err != nil && (!errors.Is(err, fs.ErrNotExist) || m.options.TokenizerMode == TokenizerMistral) {
			return fmt.Errorf("prompt: %w", err)
		}
		if err == nil {
			return nil
		}
	}
	return m.loadFolder(dir, f)
}

// loadTiktoken loads a folder with tiktoken.model, whose Python code adds no token of other files.
func (m *Model) loadTiktoken(dir string, f *folder) (found bool, err error) {
	path := filepath.Join(dir, tiktokenFile)
	tiktoken, found, err := readOptional(path)
	if err != nil || !found {
		return found, err
	}
	config, err := boundedfile.Read(filepath.Join(dir, tokenizerConfigFile), maxConfigFile)
	if err != nil {
		return true, fmt.Errorf("prompt: %w", err)
	}
	if m.encoder, err = bpe.ParseTiktoken(tiktoken, config); err != nil {
		return true, fmt.Errorf("prompt: %s: %w", path, err)
	}
	f.file = &bpe.File{}
	special, _, err := f.specialTokens(&class{}, 0)
	if err != nil {
		return true, fmt.Errorf("prompt: %s: %w", filepath.Join(dir, tokenizerConfigFile), err)
	}
	m.specialNames = special.byName()
	for name, token := range m.specialNames {
		if _, ok := m.encoder.AddedID(token); !ok {
			return true, fmt.Errorf("prompt: %s: %s: %q is not among its special tokens", path, name, token)
		}
	}
	m.findMarks()
	return true, nil
}

// readOptional reads a file that need not exist.
func readOptional(path string) ([]byte, bool, error) {
	most := int64(maxConfigFile)
	if filepath.Base(path) == tiktokenFile {
		most = maxTokenizerFile
	}
	raw, err := boundedfile.Read(path, most)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	return raw, err == nil, err
}

const (
	// maxTokenizerFile is the largest tokenizer.json or tiktoken.model, in bytes. Models' are below 50 MB.
	maxTokenizerFile = 512 << 20
	// maxConfigFile is the largest of a folder's other files, in bytes.
	maxConfigFile = 32 << 20
)

// readModelConfig reads from config.json what kind of model the folder holds. Engines treat some kinds differently.
func (m *Model) readModelConfig(dir string) (config modelConfig, err error) {
	raw, found, err := readOptional(filepath.Join(dir, modelConfigFile))
	if err != nil {
		return config, err
	}
	if found {
		var parts map[string]json.RawMessage
		if err := errors.Join(json.Unmarshal(raw, &config), json.Unmarshal(raw, &parts)); err != nil {
			return config, err
		}
		for _, part := range []string{"vision_config", "audio_config", "thinker_config", "visual",
			"mm_tokens_per_image"} {
			m.multimodal = m.multimodal || len(parts[part]) > 0
		}
		for _, part := range []string{"text_config", "llm_config", "language_config", "thinker_config"} {
			m.nested = m.nested || len(parts[part]) > 0
		}
		m.configured, m.sglangHybrid = true, isSGLangHybrid(raw)
		m.layers, m.layersKnown = readLayerTypes(raw)
		m.modelType = config.ModelType
		if len(config.Architectures) > 0 {
			m.architecture = config.Architectures[0]
		}
	}
	return config, nil
}

// specialTokenNames are the named tokens that every tokenizer of Transformers may have, in its order. Models have more.
var specialTokenNames = []string{
	"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
}

// readConfig reads the other settings of tokenizer_config.json, and returns its chat templates.
func (m *Model) readConfig(config *orderedJSON) ([]namedTemplate, error) {
	if string(config.values["split_special_tokens"]) == "true" {
		return nil, errors.New("split_special_tokens true is not supported, so ids could differ from the engine's")
	}
	m.responseTemplate = bytes.HasPrefix(config.values["response_template"], []byte("{"))
	templates, err := namedTemplates(config.values["chat_template"])
	if err != nil {
		return nil, fmt.Errorf("chat_template: %w", err)
	}
	return templates, nil
}

// Encode returns the token ids of text. addSpecialTokens adds the model's special tokens around it, such as <s>, as
// completions do by default. Errors: ErrInvalidUTF8, or a text of more than 1 GiB.
func (m *Model) Encode(text string, addSpecialTokens bool) ([]kvblock.Token, error) {
	return m.encoder.Encode(&bpe.Budget{}, text, addSpecialTokens)
}

// AppendEncode is Encode that appends to ids and returns the longer slice; on error ids is returned unchanged.
func (m *Model) AppendEncode(ids []kvblock.Token, text string, addSpecialTokens bool) ([]kvblock.Token, error) {
	return m.encoder.AppendEncode(ids, text, addSpecialTokens)
}

// GeneralPattern reports whether the model's pre-tokenizer needs the general pattern engine.
func (m *Model) GeneralPattern() bool { return m.encoder.GeneralPattern() }

// budgetFor returns the memory budget for encoding a request. textBytes is the size of the rendered text, which counts
// against the request's memory; 0 if the text is part of the body.
func budgetFor(ctx context.Context, request *body.Request, textBytes int) bpe.Budget {
	room := 0
	if request.RemainingCost != 0 { // the request was parsed
		room = max(request.RemainingCost-textBytes-textBytes/4, 1)
	}
	return bpe.NewBudget(ctx, room)
}
