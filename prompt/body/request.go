// Package body reads the fields that routing needs from the bodies of OpenAI-style requests and responses.
//
// It owns the request's fields that decide its tokens (messages, prompt, tools, template arguments), the few that
// decide its route (model, cache salt), and the token counts that a response reports. A request is parsed once, into
// values of package values, which the chat template then renders.
//
// A body is never changed in place: changes are spliced into a copy. The package never checks what only the engine can
// check (sampling parameters, roles, tool schemas), and never decides an HTTP status. A Request is read-only after
// ParseRequest. One goroutine may use a UsageReader.
package body

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"kvepp/internal/overrides"
	"kvepp/prompt/values"
)

// API is the kind of endpoint that a request calls.
type API uint8

// The APIs whose prompts kvepp understands. The zero API is not one of them. The engines' own /generate counts as
// Completions: its prompts only have other names.
const (
	ChatCompletions API = iota + 1
	Completions
	Responses // OpenAI's /v1/responses
	Messages  // Anthropic's /v1/messages
)

func (a API) String() string {
	switch a {
	case ChatCompletions:
		return "chat completions"
	case Completions:
		return "completions"
	case Responses:
		return "responses"
	case Messages:
		return "messages"
	}
	return "unknown API"
}

// ErrUnknownAPI says that the path is not one of a known API. Such a request is routed by load alone.
var ErrUnknownAPI = errors.New("body: path is not one of chat completions, completions, responses or messages")

// Error is a client error: no engine can serve the request. Its message is for the client.
type Error struct {
	// Code is one of the Code constants, for programs.
	Code string
	// Message says what is wrong and what is expected, for people.
	Message string
	// Param is the offending field, such as "messages"; empty if the whole body is wrong.
	Param string
}

func (e *Error) Error() string { return e.Message }

// The values of Error.Code.
const (
	CodeInvalidJSON  = "invalid_json"
	CodeMissingField = "missing_required_parameter"
	CodeInvalidType  = "invalid_type"
	CodeInvalidValue = "invalid_value"
)

// Request is the part of a request that routing reads. Its strings and values alias the body.
type Request struct {
	API    API
	Model  string // empty only if a request to /generate names none
	Stream bool
	// MaxTokens is the first given of max_completion_tokens, max_tokens and max_output_tokens: the most tokens to
	// generate. 0: absent. For /generate those of sampling_params count.
	MaxTokens int
	// PreviousResponse is previous_response_id, and Stores says that the engine may store its response: of the
	// Responses API alone.
	PreviousResponse string
	Stores           bool
	choices          int // responses to each prompt that it asks for
	// CacheSalt is nvext.cache_salt, else cache_salt. Requests with different salts share no cache. Empty: none.
	CacheSalt string
	// HasMedia says that the prompt is not only text (it has an image, audio, video, file or embedding), so that only
	// the engine knows its tokens.
	HasMedia bool
	// Hints are the hints of the body. ParseRequest does not see headers.
	Hints Hints
	// Overrides are the router settings that the request changes for itself, and Pins the workers that it selects.
	Overrides overrides.Overrides
	Pins      Pins
	// Constraints are the request's constraints on its workers' taints.
	Constraints Constraints
	// TokenData is nvext.token_data: the prompt's token ids, computed by the client. nil when absent.
	TokenData []uint32
	// AddSpecialTokens is add_special_tokens; nil means the API's default (chat: false, completions: true).
	AddSpecialTokens *bool

	// Prompts are a completion's prompts, at least one unless HasMedia; nil for chat.
	Prompts []Prompt

	// Messages are a chat's messages, at least one; nil for completions. The fields below belong to chat too. For the
	// APIs Responses and Messages they hold the chat that Dynamo's frontend derives from the request.
	Messages *values.List
	// Unmapped names a part of a Responses or Messages request that has no place in a chat; empty if there is none.
	Unmapped string
	// Tools and Documents are nil when absent or null.
	Tools, Documents *values.List
	// AddGenerationPrompt is nil when absent; the default is then the opposite of ContinueFinalMessage.
	AddGenerationPrompt  *bool
	ContinueFinalMessage bool
	// ChatTemplateKwargs is chat_template_kwargs (or chat_template_args, Dynamo's name); nil when absent.
	ChatTemplateKwargs *values.Dict
	// ChatTemplate is a template in the request itself; empty when absent.
	ChatTemplate string
	// ReasoningEffort is empty when absent.
	ReasoningEffort string
	// Thinking is the field thinking: a boolean, or an object with a type. nil when absent.
	Thinking any
	// ToolChoiceNone says that no tool may be called.
	ToolChoiceNone bool

	// Body is the whole object, for fields that have no field here. It holds only those fields that any code reads; the
	// others were checked and skipped.
	Body *values.Dict

	// TooLarge is nil if the prompt was read. Otherwise it says why not: the prompt takes too much memory for its size
	// (ErrTooManyValues), has too many parts, or is ErrPythonJSON. The fields of Completions and chats are then empty.
	TooLarge error
	// RemainingCost is the part of ReadCost that the values of the body left for the next steps, in bytes.
	RemainingCost int
	// remainingForValues is the part of it that further values may take.
	remainingForValues int
}

// charge counts the memory of values derived from the body's values, and reports whether there is enough left.
func (r *Request) charge(bytes int) bool {
	r.RemainingCost -= bytes
	r.remainingForValues -= bytes
	if r.remainingForValues < 0 && r.TooLarge == nil {
		r.TooLarge = fmt.Errorf("body: converting the request to a chat: %w", ErrTooManyValues)
	}
	return r.TooLarge == nil
}

// Prompt is one prompt of a completion: text, or token ids when HasTokens.
type Prompt struct {
	Text      string
	Tokens    []uint32
	HasTokens bool
}

// ParseRequest reads a request body. path is the HTTP path; it may have a query, and a prefix before /v1. If it is
// empty, because the proxy does not say it, the body's keys tell the API.
//
// It returns ErrUnknownAPI for an unknown path before it reads the body, and *Error for a body that is not a valid
// request. Without a path, and for /generate, which other servers have too, ErrUnknownAPI takes the place of *Error.
// Optional fields of a wrong type count as absent: engines differ in what they accept, and the client should see the
// engine's own response. The body must not be modified while the Request is in use.
func ParseRequest(path string, body []byte) (*Request, error) { return Parser{}.Parse(path, body) }

// Parser says how to read request bodies. The zero value reads strict JSON.
type Parser struct {
	// Python reads the JSON that servers in Python accept, those of vLLM, SGLang and TensorRT-LLM, see
	// values.JSONReader.
	Python bool
	// NoTokens is for callers that need no tokens. Long prompt texts are not decoded: if they have escapes, they stay
	// encoded as in the JSON.
	NoTokens bool
}

// ErrPythonJSON says that a Parser with Python cannot read a body that an engine may accept.
var ErrPythonJSON = values.ErrPythonJSON

// Parse is ParseRequest. Further error: ErrPythonJSON.
func (how Parser) Parse(path string, body []byte) (*Request, error) {
	if !Reads(path) {
		return nil, ErrUnknownAPI
	}
	api, ids := apiOfPath(path)
	r, err := how.parse(api, ids, body)
	if invalid := (*Error)(nil); (path == "" || ids == "input_ids") && errors.As(err, &invalid) {
		return nil, ErrUnknownAPI // the engine, which knows the path, may accept it
	}
	return r, err
}

// parse reads a request for an API; 0: the body's keys tell which. ids is as in apiOfPath.
func (how Parser) parse(api API, ids string, body []byte) (*Request, error) {
	fields := requestField
	if how.NoTokens {
		fields = routingField
	}
	if len(body) == 0 {
		return nil, &Error{Code: CodeInvalidJSON, Message: "The request body is empty: it must be a JSON object."}
	}
	allowance := valueCost(len(body))
	reader := values.JSONReader{Field: fields, Allowance: allowance, Python: how.Python}
	value, taken, err := reader.Parse(body)
	var unread error                                                       // of the prompt
	if errors.Is(err, ErrTooManyValues) || errors.Is(err, ErrPythonJSON) { // the routing fields may be readable
		unread = err
		reader.Field, reader.Allowance = routeOnlyField, routingCost(len(body))
		value, taken, err = reader.Parse(body)
	}
	switch {
	case errors.Is(err, ErrTooManyValues):
		return nil, tooManyValues(err, len(body))
	case errors.Is(err, ErrPythonJSON):
		return nil, err
	case err != nil:
		return nil, &Error{Code: CodeInvalidJSON, Message: "The request body is not valid: " + err.Error() + "."}
	}
	object, ok := value.(*values.Dict)
	if !ok {
		return nil, &Error{Code: CodeInvalidType, Message: "The request body must be a JSON object."}
	}
	if api == 0 && unread == nil {
		if api = apiOfBody(object); api == 0 {
			return nil, ErrUnknownAPI
		}
	}
	r := &Request{API: api, Body: object, RemainingCost: ReadCost(len(body)) - taken,
		remainingForValues: allowance - taken}
	switch model, _ := object.Get("model"); m := model.(type) {
	case nil:
		if ids == "" {
			return nil, missing("model", "the name of the model to use")
		}
	case string:
		if m == "" && ids == "" {
			return nil, &Error{Code: CodeInvalidValue, Param: "model", Message: "'model' must not be empty."}
		}
		r.Model = m
	default:
		return nil, wrongType("model", "a string")
	}
	if err := r.readShared(ids); err != nil {
		return nil, err
	}
	if unread != nil {
		if r.TooLarge = unread; errors.Is(unread, ErrTooManyValues) {
			r.TooLarge = tooManyValues(unread, len(body))
		}
		return r, nil
	}
	read := r.readChat
	switch api {
	case Completions:
		read = func() error { return r.readCompletion(ids) }
	case Responses:
		read = r.readResponses
	case Messages:
		read = r.readMessages
	}
	if err := read(); err != nil {
		return nil, err
	}
	if r.TooLarge != nil {
		r.Messages, r.Tools, r.Prompts = nil, nil, nil
	}
	return r, nil
}

func tooManyValues(err error, bytes int) error {
	return fmt.Errorf("%w, the limit for a body of %d bytes", err, bytes)
}

// Reads reports whether ParseRequest reads bodies of requests with this path: it is one of a known API, or empty.
func Reads(path string) bool {
	api, _ := apiOfPath(path)
	return path == "" || api != 0
}

// apiOfBody tells a request's API by the keys that only one API has; 0: unknown. A chat of Anthropic's API without a
// system prompt looks like one of OpenAI's, and an embedding like a request of the Responses API.
func apiOfBody(object *values.Dict) API {
	has := func(key string) bool {
		value, _ := object.Get(key)
		return value != nil
	}
	switch {
	case has("messages") && has("system"):
		return Messages
	case has("messages"):
		return ChatCompletions
	case has("prompt"):
		return Completions
	case has("input"):
		return Responses
	}
	return 0
}

// apiOfPath returns the API of a path; 0: unknown. ids is the field of token ids, for an engine's own endpoint.
//
// Source: vLLM 0.33.0, entrypoints/scale_out/token_in_token_out; SGLang 0.5.23, managers/io_struct, GenerateReqInput.
func apiOfPath(path string) (api API, ids string) {
	path, _, _ = strings.Cut(path, "?")
	switch {
	case strings.HasSuffix(path, "/v1/chat/completions"):
		return ChatCompletions, ""
	case strings.HasSuffix(path, "/v1/completions"):
		return Completions, ""
	case strings.HasSuffix(path, "/v1/responses"):
		return Responses, ""
	case strings.HasSuffix(path, "/v1/messages"):
		return Messages, ""
	case strings.HasSuffix(path, "/inference/v1/generate"):
		return Completions, "token_ids"
	case strings.HasSuffix(path, "/generate"):
		return Completions, "input_ids"
	}
	return 0, ""
}

// MostTokens returns the most tokens that all responses to the request can have together; 0: no limit. The tools of an
// engine may have it generate several times for one request of the Responses API, which then has none.
func (r *Request) MostTokens() int {
	if r.API == Responses {
		return 0
	}
	return r.MaxTokens * r.choices * max(len(r.Prompts), 1)
}

func missing(param, what string) *Error {
	return &Error{Code: CodeMissingField, Param: param, Message: fmt.Sprintf("'%s' is required: %s.", param, what)}
}

func wrongType(param, want string) *Error {
	return &Error{Code: CodeInvalidType, Param: param, Message: fmt.Sprintf("'%s' must be %s.", param, want)}
}

// readShared reads what all APIs have. ids is as in apiOfPath.
func (r *Request) readShared(ids string) (err error) {
	b := r.Body
	if stream := optionalBool(b, "stream"); stream != nil {
		r.Stream = *stream
	}
	r.AddSpecialTokens = optionalBool(b, "add_special_tokens")
	for _, name := range []string{"max_completion_tokens", "max_tokens", "max_output_tokens"} {
		if r.MaxTokens == 0 {
			r.MaxTokens = positiveInt(b, name)
		}
	}
	r.choices = max(positiveInt(b, "n"), positiveInt(b, "best_of"), 1)
	if ids != "" {
		sampling, _ := field[*values.Dict](b, "sampling_params")
		r.MaxTokens = max(positiveInt(sampling, "max_tokens"), positiveInt(sampling, "max_new_tokens"))
		r.choices = max(positiveInt(sampling, "n"), 1)
	}
	if r.API == Responses {
		store := optionalBool(b, "store")
		r.Stores = store == nil || *store
		r.PreviousResponse, _ = field[string](b, "previous_response_id")
	}
	if nvext, ok := field[*values.Dict](b, "nvext"); ok {
		r.Hints, r.Pins = readHints(nvext), readPins(nvext)
		if r.Overrides, err = readOverrides(nvext); err != nil {
			return err
		}
		if r.Constraints, err = readConstraints(nvext); err != nil {
			return err
		}
		r.CacheSalt, _ = field[string](nvext, "cache_salt")
		if list, ok := field[*values.TokenIDs](nvext, "token_data"); ok && list.Bad < 0 {
			r.TokenData = list.IDs
		}
	}
	if r.CacheSalt == "" {
		r.CacheSalt, _ = field[string](b, "cache_salt")
	}
	return nil
}

func (r *Request) readChat() error {
	b := r.Body
	switch messages, _ := b.Get("messages"); m := messages.(type) {
	case nil:
		return missing("messages", "a list of messages")
	case *values.List:
		if len(m.Items) == 0 {
			return &Error{Code: CodeInvalidValue, Param: "messages",
				Message: "'messages' must hold at least one message."}
		}
		for i, item := range m.Items {
			message, ok := item.(*values.Dict)
			if !ok {
				return wrongType(fmt.Sprintf("messages[%d]", i), "an object with 'role' and 'content'")
			}
			r.HasMedia = r.HasMedia || hasMedia(message)
		}
		r.Messages = m
	default:
		return wrongType("messages", "a list of messages")
	}
	r.Tools, _ = field[*values.List](b, "tools")
	choice, _ := b.Get("tool_choice")
	r.ToolChoiceNone = choice == "none"
	r.Documents, _ = field[*values.List](b, "documents")
	r.AddGenerationPrompt = optionalBool(b, "add_generation_prompt")
	if c := optionalBool(b, "continue_final_message"); c != nil {
		r.ContinueFinalMessage = *c
	}
	r.readKwargs()
	r.Thinking, _ = b.Get("thinking")
	r.ChatTemplate, _ = field[string](b, "chat_template")
	r.ReasoningEffort, _ = field[string](b, "reasoning_effort")
	return nil
}

func (r *Request) readKwargs() {
	r.ChatTemplateKwargs, _ = field[*values.Dict](r.Body, "chat_template_kwargs")
	if r.ChatTemplateKwargs == nil {
		r.ChatTemplateKwargs, _ = field[*values.Dict](r.Body, "chat_template_args")
	}
}

// hasMedia reports whether a message's content has a part that is not text. A part of unknown type counts as media,
// because routing by load is better than guessing its tokens.
func hasMedia(message *values.Dict) bool {
	parts, _ := field[*values.List](message, "content")
	if parts == nil {
		return false
	}
	for _, p := range parts.Items {
		part, ok := p.(*values.Dict)
		if !ok {
			continue
		}
		switch kind, _ := part.Get("type"); kind {
		case "text", "refusal", "input_text", "output_text", "thinking":
		case nil:
			if _, ok := part.Get("text"); !ok {
				return true
			}
		default:
			return true
		}
	}
	return false
}

// readCompletion reads prompts. ids is as in apiOfPath.
func (r *Request) readCompletion(ids string) error {
	b := r.Body
	if ids == "" {
		given, _ := b.Get("prompt")
		return r.readPrompts("prompt", given)
	}
	for _, name := range []string{"features", "content_parts", "image_data", "video_data", "audio_data", "input_embeds",
		"session_params"} {
		if v, _ := b.Get(name); v != nil {
			r.HasMedia = true
			return nil
		}
	}
	if ids == "token_ids" {
		given, _ := b.Get("token_ids")
		return r.readPrompts(ids, given)
	}
	if given, _ := b.Get("input_ids"); given != nil {
		return r.readPrompts(ids, given)
	}
	text, _ := b.Get("text")
	return r.readPrompts("text", text)
}

// readPrompts reads the prompts in the field of a name.
func (r *Request) readPrompts(name string, prompt any) error {
	const want = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
	switch p := prompt.(type) {
	case nil:
		if embeds, _ := r.Body.Get("prompt_embeds"); embeds != nil {
			r.HasMedia = true
			return nil
		}
		return missing(name, want)
	case string:
		r.Prompts = []Prompt{{Text: p}}
		return nil
	case *values.TokenIDs:
		if len(p.IDs) == 0 && p.Bad < 0 {
			return emptyList(name)
		}
		ids, err := promptTokens(name, p)
		r.Prompts = []Prompt{{Tokens: ids, HasTokens: true}}
		return err
	case *values.List:
		if len(p.Items) == 0 { // of texts: that of token ids is not a List
			return emptyList(name)
		}
		if len(p.Items) > MaxPrompts {
			r.TooLarge = fmt.Errorf("body: '%s' holds %d prompts, more than %d: %w", name, len(p.Items), MaxPrompts,
				ErrTooManyValues)
			return nil
		}
		switch p.Items[0].(type) {
		case string:
			return r.readTextPrompts(p, name, want)
		case *values.TokenIDs, *values.List:
			return r.readTokenPrompts(p, name, want)
		}
	}
	return wrongType(name, want)
}

func emptyList(name string) error {
	return &Error{Code: CodeInvalidValue, Param: name, Message: fmt.Sprintf("'%s' must not be an empty list.", name)}
}

func (r *Request) readTextPrompts(list *values.List, name, want string) error {
	r.Prompts = make([]Prompt, len(list.Items))
	for i, item := range list.Items {
		text, ok := item.(string)
		if !ok {
			return wrongType(name, want)
		}
		r.Prompts[i].Text = text
	}
	return nil
}

func (r *Request) readTokenPrompts(list *values.List, name, want string) error {
	r.Prompts = make([]Prompt, len(list.Items))
	for i, item := range list.Items {
		param := fmt.Sprintf("%s[%d]", name, i)
		switch inner := item.(type) {
		case *values.TokenIDs:
			ids, err := promptTokens(param, inner)
			if err != nil {
				return err
			}
			r.Prompts[i] = Prompt{Tokens: ids, HasTokens: true}
		case *values.List: // its first item is not a number
			_, err := promptTokens(param, &values.TokenIDs{Bad: 0})
			return err
		default:
			return wrongType(name, want)
		}
	}
	return nil
}

func promptTokens(param string, list *values.TokenIDs) ([]uint32, error) {
	if list.Bad >= 0 {
		return nil, wrongType(fmt.Sprintf("%s[%d]", param, list.Bad), "a token id: an integer from 0 to 4294967295")
	}
	return list.IDs, nil
}

// Echo reports whether the request asks for its prompt in the response; of a chat, for its last message.
func (r *Request) Echo() bool {
	echo := optionalBool(r.Body, "echo")
	return echo != nil && *echo
}

// field returns an object's field if it is present and of type T.
func field[T any](d *values.Dict, key string) (T, bool) {
	v, _ := d.Get(key)
	t, ok := v.(T)
	return t, ok
}

// optionalBool reads a boolean as leniently as the engines' pydantic models ("true", 1); nil if absent or not a
// boolean.
func optionalBool(d *values.Dict, key string) *bool {
	v, _ := d.Get(key)
	var is bool
	switch x := v.(type) {
	case bool:
		is = x
	case int64:
		if x != 0 && x != 1 {
			return nil
		}
		is = x == 1
	case string:
		switch strings.ToLower(x) {
		case "1", "true", "t", "yes", "y", "on":
			is = true
		case "0", "false", "f", "no", "n", "off":
		default:
			return nil
		}
	default:
		return nil
	}
	b := is // on the heap, which an absent field need not take
	return &b
}

// positiveInt reads a count as leniently as pydantic (16.0, "16"); 0 if absent or not a positive number.
func positiveInt(d *values.Dict, key string) int {
	v, _ := d.Get(key)
	n := int64(0)
	switch x := v.(type) {
	case int64:
		n = x
	case float64:
		if x == math.Trunc(x) && math.Abs(x) < 1<<53 {
			n = int64(x)
		}
	case string:
		n, _ = strconv.ParseInt(x, 10, 64)
	}
	if n <= 0 || n > math.MaxInt32 {
		return 0
	}
	return int(n)
}
