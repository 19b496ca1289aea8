package prompt

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// Engine names the program that tokenizes the requests. kvepp follows its rules.
type Engine string

// The engines whose rules are known. The empty Engine means VLLM.
const (
	VLLM   Engine = "vllm"   // vLLM's OpenAI server
	SGLang Engine = "sglang" // SGLang's
	TRTLLM Engine = "trtllm" // TensorRT-LLM's, by its source
	Dynamo Engine = "dynamo" // Dynamo's frontend, which sends token ids to its workers
)

// Engines lists the known engines, the default first.
var Engines = []Engine{VLLM, SGLang, TRTLLM, Dynamo}

// ParseEngine returns the engine of that name; "" is VLLM.
func ParseEngine(name string) (Engine, error) {
	if name == "" {
		return VLLM, nil
	}
	for _, e := range Engines {
		if name == string(e) {
			return e, nil
		}
	}
	return "", fmt.Errorf("prompt: %q is not an engine: must be one of %v", name, Engines)
}

// The values of Options.ChatTemplateContentFormat.
const (
	ContentAuto   = "auto"   // detected in the template's source
	ContentString = "string" // a message's content is one string
	ContentOpenAI = "openai" // a message's content is a list of parts, as in OpenAI's API
)

// Options are the engine's flags that change prompts. The zero Options are those of a vLLM without flags.
type Options struct {
	// Engine is the program that tokenizes; "" means VLLM.
	Engine Engine
	// Version is the engine's version, treated as MatchVersion says; "" means the newest of Versions.
	Version string
	// ChatTemplate is the path of a template that replaces the folder's, like the engines' --chat-template; "" means
	// the folder's own.
	ChatTemplate string
	// ChatTemplateContentFormat is ContentAuto (also ""), ContentString or ContentOpenAI: the form of message content
	// that the template gets, like vLLM's --chat-template-content-format. SGLang and Dynamo have no such flag.
	ChatTemplateContentFormat string
	// DefaultChatTemplateKwargs is a JSON object of template variables for requests that do not give them, like the
	// engines' --default-chat-template-kwargs; "" means none. Dynamo has no such flag.
	DefaultChatTemplateKwargs string
	// TokenizerMode is TokenizerAuto (also ""), TokenizerHF or TokenizerMistral: which of the folder's tokenizers to
	// use, like vLLM's --tokenizer-mode. Other engines have no such flag.
	TokenizerMode string
	// RequestChatTemplate lets a request bring a template of its own, like vLLM's --trust-request-chat-template.
	// Without it, such a request gets an error.
	RequestChatTemplate bool
	// ExcludeToolsWhenToolChoiceNone hides tools from templates if tool_choice is none, like vLLM's flag of that name.
	ExcludeToolsWhenToolChoiceNone bool
	// ReasoningEffortMap is a JSON object of reasoning efforts and what a template gets instead of each, like vLLM's
	// --reasoning-effort-map; "" means none.
	ReasoningEffortMap string
	// AnthropicDisabledThinkingEffort is the reasoning effort that stands for disabled thinking in /v1/messages, like
	// vLLM's flag of that name; "" and "auto" mean that the template decides.
	AnthropicDisabledThinkingEffort string
	// HFChatTemplateName is the name of the folder's template to use, like SGLang's --hf-chat-template-name; "" means
	// the first.
	HFChatTemplateName string
	// Dynamo are the settings of Dynamo's workers until SetDynamo is called.
	Dynamo DynamoSettings
}

// autoEffort is the value of AnthropicDisabledThinkingEffort that leaves the effort to the template.
const autoEffort = "auto"

// check sets the defaults and returns an error for options that exclude each other or are unknown.
func (o *Options) check() error {
	var err error
	if o.Engine, err = ParseEngine(string(o.Engine)); err != nil {
		return err
	}
	if o.Version == "" {
		known := Versions(o.Engine)
		o.Version = known[len(known)-1]
	}
	switch o.ChatTemplateContentFormat {
	case "":
		o.ChatTemplateContentFormat = ContentAuto
	case ContentAuto, ContentString, ContentOpenAI:
	default:
		return fmt.Errorf("prompt: chat template content format %q is none of %s, %s, %s",
			o.ChatTemplateContentFormat, ContentAuto, ContentString, ContentOpenAI)
	}
	switch o.TokenizerMode {
	case "":
		o.TokenizerMode = TokenizerAuto
	case TokenizerAuto, TokenizerHF, TokenizerMistral:
	default:
		return fmt.Errorf("prompt: tokenizer mode %q is none of %s, %s, %s", o.TokenizerMode, TokenizerAuto,
			TokenizerHF, TokenizerMistral)
	}
	if o.TokenizerMode != TokenizerAuto && o.Engine != VLLM {
		return errors.New("prompt: only vLLM has tokenizer modes")
	}
	if o.HFChatTemplateName != "" && o.Engine != SGLang {
		return errors.New("prompt: only SGLang chooses a Hugging Face chat template by name")
	}
	if o.AnthropicDisabledThinkingEffort == autoEffort {
		o.AnthropicDisabledThinkingEffort = ""
	}
	if (o.ExcludeToolsWhenToolChoiceNone || o.ReasoningEffortMap != "" || o.AnthropicDisabledThinkingEffort != "") &&
		o.Engine != VLLM {
		return errors.New("prompt: only vLLM excludes tools and maps reasoning efforts")
	}
	if e := o.AnthropicDisabledThinkingEffort; e != "" &&
		(e == "minimal" || !slices.Contains(reasoningEfforts, e)) {
		return fmt.Errorf("prompt: vLLM does not take the effort %q for disabled thinking", e)
	}
	return nil
}

// unknownError names the part of a request that only its engine knows how to tokenize.
type unknownError string

func (e unknownError) Error() string {
	return "prompt: " + string(e) + ": only the engine knows its tokens"
}

// errNotReproduced returns the error for a request with a part that only its engine knows how to tokenize.
func errNotReproduced(what string) error { return unknownError(what) }

// IsUnknown reports whether err says that the engine would serve the request, but kvepp does not know its tokens.
func IsUnknown(err error) bool {
	var unknown unknownError
	return errors.As(err, &unknown) || errors.Is(err, ErrMedia)
}

// errRefused says why the engine answers a request with an error of its own. Such a request has no token ids.
func errRefused(format string, args ...any) error {
	return fmt.Errorf("prompt: the engine refuses this: "+format, args...)
}

// given returns the prompts that a request brings in the fields where its engine looks for them; nil if it brings none.
// It returns an error if the engine would make something of the request that is not known here.
func (m *Model) given(request *body.Request) ([]Prompt, error) {
	var ids [][]kvblock.Token
	var err error
	switch m.options.Engine {
	case VLLM:
		ids, err = m.givenVLLM(request)
	case SGLang:
		ids, err = m.givenSGLang(request)
	case TRTLLM:
		ids, err = givenTRTLLM(request)
	}
	if ids != nil || err != nil {
		return Certain(ids), err
	}
	if request.TokenData != nil && m.options.Engine != Dynamo { // only Dynamo reads it
		withoutIDs := *request
		withoutIDs.TokenData = nil
		request = &withoutIDs
	}
	prompts, err := Given(request)
	if err != nil {
		return nil, m.unknown
	}
	return prompts, nil
}

// tokenizeChat returns a chat's prompt as the engine will see it.
func (m *Model) tokenizeChat(ctx context.Context, request *body.Request) (Prompt, error) {
	switch {
	case m.mistralCommon:
		return m.tokenizeMistral(ctx, request)
	case request.HasMedia && (m.media == nil || m.marksMediaOtherwise()) && (m.native == nil || !m.native.Media):
		return Prompt{}, fmt.Errorf("%w, and where %s puts it is not known for models of the architecture %q",
			ErrMedia, m.options.Engine, m.architecture)
	case m.inHarmony(request):
		ids, err := m.harmonyIDs(ctx, request, time.Now())
		return Prompt{IDs: ids, Certain: len(ids)}, err
	case m.options.Engine == SGLang:
		return m.tokenizeSGLang(ctx, request)
	case m.native != nil:
		return m.tokenizeNative(ctx, request)
	}
	prompt, _, err := m.tokenizeText(ctx, request)
	return prompt, err
}

// tokenizeText renders a chat to one text, and returns its prompt and the text.
func (m *Model) tokenizeText(ctx context.Context, request *body.Request) (prompt Prompt, text string, err error) {
	if text, err = m.renderChat(ctx, request); err != nil {
		return Prompt{}, "", err
	}
	special := request.AddSpecialTokens != nil && *request.AddSpecialTokens && m.options.Engine != SGLang
	budget := budgetFor(ctx, request, len(text))
	ids, err := m.encoder.Encode(&budget, text, special)
	if err != nil || !request.HasMedia {
		return Prompt{IDs: ids, Certain: len(ids)}, text, err
	}
	if m.options.Engine == Dynamo && !(m.encoder.RoundTrips() && m.encoder.IsNormalized(text)) {
		return Prompt{}, "", fmt.Errorf("%w, and a worker may read the text back from ids and encode it again",
			ErrMedia)
	}
	place, err := m.media.place(text)
	if err != nil {
		return Prompt{}, "", err
	}
	certain, err := m.certainIDs(&budget, text, place, special)
	return Prompt{IDs: ids, Certain: certain}, text, err
}

// marksMediaOtherwise reports whether this version of vLLM marks the model's media by another text than newer ones do.
func (m *Model) marksMediaOtherwise() bool {
	return m.release.rules.softImageTokens && m.architecture == "Gemma4ForConditionalGeneration"
}

// usesHarmony reports whether the engine encodes the model's chats in OpenAI's harmony format instead of a template.
func (m *Model) usesHarmony() bool { return m.options.Engine == VLLM && m.modelType == "gpt_oss" }

// inHarmony reports whether the engine encodes a request in the harmony format. SGLang does so for Responses only.
func (m *Model) inHarmony(request *body.Request) bool {
	return m.usesHarmony() ||
		m.options.Engine == SGLang && m.modelType == "gpt_oss" && request.API == body.Responses
}

// renderChat returns the text that the engine makes of a chat; "" for a chat in harmony or in Mistral's
// own format, which never is one text.
func (m *Model) renderChat(ctx context.Context, request *body.Request) (string, error) {
	if m.inHarmony(request) || m.mistralCommon {
		return "", nil
	}
	if m.native != nil {
		return m.renderNative(ctx, request)
	}
	switch m.options.Engine {
	case SGLang:
		return m.renderSGLang(ctx, request)
	case TRTLLM:
		return m.renderTRTLLM(ctx, request)
	case Dynamo:
		return m.renderDynamo(ctx, request)
	}
	return m.renderVLLM(ctx, request)
}

// convertMessages returns a chat's messages as convert returns each. parts says that the template gets content as a
// list of parts.
func convertMessages(
	request *body.Request, convert func(message *values.Dict, parts bool) (*values.Dict, error), parts bool,
) ([]any, error) {
	messages := make([]any, len(request.Messages.Items))
	for i, item := range request.Messages.Items {
		given, _ := item.(*values.Dict)
		message, err := convert(given, parts)
		if err != nil {
			return nil, fmt.Errorf("%w (message %d)", err, i)
		}
		messages[i] = message
	}
	return messages, nil
}
