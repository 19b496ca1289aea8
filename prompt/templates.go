package prompt

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"kvepp/internal/boundedfile"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// chatTemplate is a compiled template and how the engine calls it.
type chatTemplate struct {
	*jinja.Template
	source string
	// wantsParts says that the template gets content as a list of parts, never as a string.
	wantsParts bool
	// memory bounds what one render allocates in total, in bytes; 0 means jinja's default.
	memory int
	// broken says why the template does not compile; nil if it does. Chats that it does not render do not matter.
	broken error
}

// requestTemplateMemory bounds what one render of a request's own template allocates in total, in bytes. It does not
// depend on the request's size.
const requestTemplateMemory = 32 << 20

// namedTemplate is a template's source.
type namedTemplate struct{ Name, Template string }

// The names of the templates that Transformers uses.
const (
	templateDefault = "default"
	templateTools   = "tool_use"
)

// additionalTemplates is the folder of further templates beside chat_template.jinja. A file's name is the template's.
const additionalTemplates = "additional_chat_templates"

// namedTemplates reads a chat_template: a string, a list of names and templates, or an object.
func namedTemplates(raw json.RawMessage) ([]namedTemplate, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return []namedTemplate{{templateDefault, one}}, nil
	}
	var list []namedTemplate
	if json.Unmarshal(raw, &list) == nil {
		return list, nil
	}
	value, err := values.ParseJSON(raw) // it keeps the order of the names
	byName, ok := value.(*values.Dict)
	if err != nil || !ok {
		return nil, errors.New("neither a string nor a list of named templates")
	}
	for key, value := range byName.All() {
		name, _ := key.(string)
		source, ok := value.(string)
		if !ok {
			return nil, fmt.Errorf("the template %q is not a string", name)
		}
		list = append(list, namedTemplate{name, source})
	}
	return list, nil
}

// readTemplates compiles the chat templates. Precedence: Options.ChatTemplate, chat_template.jinja,
// tokenizer_config.json, chat_template.json. For Dynamo, the last two change places. If the model also takes images or
// sound, they change places for chats without tools, because chat_template.json belongs to its processor.
func (m *Model) readTemplates(dir string, inConfig []namedTemplate) error {
	if m.options.ChatTemplate != "" {
		raw, err := boundedfile.Read(m.options.ChatTemplate, maxConfigFile)
		if err != nil {
			return err
		}
		source := string(raw)
		if m.options.Engine == SGLang {
			if !strings.HasSuffix(m.options.ChatTemplate, ".jinja") {
				return fmt.Errorf("%s: SGLang takes it for one of its conversation templates, which kvepp does not "+
					"know; the name of a Jinja template must end in .jinja", m.options.ChatTemplate)
			}
			// Source: SGLang 0.5.21, parser/template_manager, _load_jinja_template.
			source = strings.ReplaceAll(strings.Trim(source, "\n"), `\n`, "\n")
		}
		return m.useTemplates(m.options.ChatTemplate, []namedTemplate{{templateDefault, source}})
	}
	path := filepath.Join(dir, chatTemplateFile)
	raw, found, err := readOptional(path)
	if err != nil {
		return err
	}
	if found {
		templates := []namedTemplate{{templateDefault, string(raw)}}
		more, err := filepath.Glob(filepath.Join(dir, additionalTemplates, "*.jinja"))
		if err != nil {
			return err
		}
		for _, path := range more {
			raw, err := boundedfile.Read(path, maxConfigFile)
			if err != nil {
				return err
			}
			templates = append(templates, namedTemplate{strings.TrimSuffix(filepath.Base(path), ".jinja"), string(raw)})
		}
		return m.useTemplates(path, templates)
	}
	path = filepath.Join(dir, chatTemplateJSON)
	var inJSON []namedTemplate
	if raw, found, err = readOptional(path); err != nil {
		return err
	}
	if found {
		var file struct {
			ChatTemplate json.RawMessage `json:"chat_template"`
		}
		if err := json.Unmarshal(raw, &file); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if inJSON, err = namedTemplates(file.ChatTemplate); err != nil {
			return fmt.Errorf("%s: chat_template: %w", path, err)
		}
	}
	config := filepath.Join(dir, tokenizerConfigFile)
	switch {
	case inConfig == nil || m.options.Engine == Dynamo && inJSON != nil:
		return m.useTemplates(path, inJSON)
	case inJSON != nil && m.multimodal:
		if err := m.useTemplates(config, inConfig); err != nil {
			return err
		}
		withTools := m.chatTools
		if withTools == nil {
			withTools = m.chat
		}
		if err := m.useTemplates(path, inJSON); err != nil {
			return err
		}
		m.chatTools = withTools
		return nil
	}
	return m.useTemplates(config, inConfig)
}

// useTemplates compiles the templates that the engine uses. path is the file that they come from.
func (m *Model) useTemplates(path string, templates []namedTemplate) error {
	compile := func(name string) (*chatTemplate, error) {
		i := slices.IndexFunc(templates, func(t namedTemplate) bool { return t.Name == name })
		if m.options.Engine == SGLang && len(templates) > 0 {
			// Source: SGLang 0.5.21, parser/template_manager, _select_named_template.
			wanted := m.options.HFChatTemplateName
			i = slices.IndexFunc(templates, func(t namedTemplate) bool { return t.Name == wanted })
			if wanted != "" && i < 0 && len(templates) > 1 {
				return nil, fmt.Errorf("%s: there is no chat template of the name %q", path, wanted)
			}
			i = max(i, 0)
		}
		if i < 0 {
			return nil, nil
		}
		c, err := m.compile(templates[i].Name, templates[i].Template)
		if err != nil && m.encodesBeside(templates[i].Template) {
			return &chatTemplate{source: templates[i].Template, broken: err}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: chat template %q: %w", path, templates[i].Name, err)
		}
		return c, nil
	}
	var err error
	if m.chat, err = compile(templateDefault); err != nil {
		return err
	}
	m.chatTools, err = compile(templateTools)
	return err
}

// encodesBeside reports whether the engine, in any version, encodes the model's chats with code of its own although the
// model has this template.
func (m *Model) encodesBeside(source string) bool {
	if m.options.ChatTemplate != "" {
		return false
	}
	if m.options.Engine == VLLM {
		return m.usesHarmony() || slices.Contains(vllmOwnEncoding, m.architecture)
	}
	with := *m
	with.chat = &chatTemplate{source: source}
	return slices.ContainsFunc(releases[m.options.Engine], func(r release) bool {
		with.release = r
		return with.chooseNative() != nil
	})
}

// compile compiles a template and finds out which form of content the engine gives it.
func (m *Model) compile(name, source string) (*chatTemplate, error) {
	if m.options.Engine == Dynamo {
		return &chatTemplate{source: source}, nil // newDynamoChat compiles it
	}
	t, err := jinja.Compile(name, source)
	if err != nil {
		return nil, err
	}
	return m.withForm(&chatTemplate{Template: t, source: source}), nil
}

// withForm returns the template with the form of content that the engine's version gives it; nil for nil.
func (m *Model) withForm(given *chatTemplate) *chatTemplate {
	if given == nil || given.Template == nil {
		return given
	}
	c := *given
	switch {
	case m.options.Engine == SGLang:
		c.wantsParts = sglangWantsParts(&c)
	case m.options.ChatTemplateContentFormat != ContentAuto:
		c.wantsParts = m.options.ChatTemplateContentFormat == ContentOpenAI
	default:
		c.wantsParts = c.LoopsOverContent(!m.release.rules.byNameOnly)
	}
	return &c
}

// ContentFormat returns the form in which the engine passes message content to the model's template: ContentString or
// ContentOpenAI. Without a template it is ContentString.
func (m *Model) ContentFormat() string {
	if m.chat != nil && m.chat.wantsParts || m.dynamo != nil && m.dynamo.wantsParts {
		return ContentOpenAI
	}
	return ContentString
}

// inJSON rewords an error of encoding/json, which names Go types if the JSON has another form than wanted. good is an
// example of the wanted form.
func inJSON(err error, good string) error {
	wrong := (*json.UnmarshalTypeError)(nil)
	switch {
	case !errors.As(err, &wrong):
		return fmt.Errorf("not JSON: %w; write an object such as %s", err, good)
	case wrong.Field == "":
		return fmt.Errorf("a JSON %s is in the wrong place; write an object such as %s", wrong.Value, good)
	}
	return fmt.Errorf("%s may not be a JSON %s; write an object such as %s", wrong.Field, wrong.Value, good)
}

// parseEfforts reads Options.ReasoningEffortMap; nil for "".
func parseEfforts(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	var efforts map[string]string
	if err := json.Unmarshal([]byte(text), &efforts); err != nil {
		return nil, fmt.Errorf("prompt: reasoning effort map: %w", inJSON(err, `{"max": "high"}`))
	}
	for effort := range efforts {
		if !slices.Contains(reasoningEfforts, effort) {
			return nil, fmt.Errorf("prompt: reasoning effort map: %q is none of %v", effort, reasoningEfforts)
		}
	}
	return efforts, nil
}

// parseKwargs reads Options.DefaultChatTemplateKwargs.
func parseKwargs(text string) (*values.Dict, error) {
	value, err := values.ParseJSON([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("prompt: default chat template kwargs: %w", err)
	}
	kwargs, ok := value.(*values.Dict)
	if !ok {
		return nil, errors.New("prompt: default chat template kwargs are not a JSON object")
	}
	return kwargs, nil
}
