package encoders

import (
	"context"
	"slices"
	"strings"

	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// GLM-5.3 and GLM-5.3-Flash, whose templates SGLang replaces by code of its own. Source: SGLang 0.5.23,
// parser/glm53_chat_template and python_chat_template.

// isGLM53 reports whether SGLang replaces a model's template. GLM-5, 5.1 and 5.2 have the same architecture and other
// templates. The block for images must be in the template of the model that takes them.
func isGLM53(architecture, template string) bool {
	for _, text := range []string{"[gMASK]<sop>", "Reasoning Effort:", "<tool_call>", "<arg_key>", "<arg_value>"} {
		if !strings.Contains(template, text) {
			return false
		}
	}
	takesImages := strings.Contains(template, "<|begin_of_image|>")
	return !strings.Contains(template, "enable_thinking") &&
		(architecture == "GlmMoeDsaForCausalLM" && !takesImages ||
			architecture == "Glm5NextForConditionalGeneration" && takesImages)
}

var sglangGLM53 = Encoder{
	Name: "GLM-5.3 (SGLang's glm-5.3)", WantsParts: true, LikeTemplate: true, KeepsLateSystem: true, AlwaysThinks: true,
	Encode: glm53SGLang,
}

const (
	glmToolsBefore = "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" +
		"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
	glmToolsAfter = "</tools>\n\nFor each function call, output the function name and arguments within the following " +
		"XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>" +
		"<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)

// glmChat is a chat for the encoder of GLM-5.3.
type glmChat struct {
	messages []*values.Dict
	// keep says that reasoning before the last user's message stays.
	keep bool
	// last is the position of the last user's message; -1 if there is none.
	last int
	// reasoning is the variable that stands for a reasoning that an assistant's message does not have; nil for none.
	reasoning any
}

func glm53SGLang(ctx context.Context, chat *Chat) ([]Piece, error) {
	c := &glmChat{keep: !flag(chat.Variables, "clear_thinking"), last: -1}
	c.messages = make([]*values.Dict, len(chat.Messages))
	for i, item := range chat.Messages {
		c.messages[i], _ = item.(*values.Dict)
		if field(c.messages[i], "role") == "user" {
			c.last = i
		}
	}
	if own, given := chat.Variables.Get("reasoning_content"); given {
		if _, isText := own.(string); !isText {
			return nil, Unknown("the variable reasoning_content, which is not text")
		}
		c.reasoning = own
	}
	p := newPrompt(ctx, chat)
	p.add("[gMASK]<sop><|system|>Reasoning Effort: ")
	switch field(chat.Variables, "reasoning_effort") {
	case "low":
		p.add("Low")
	case "high":
		p.add("High")
	default:
		p.add("Max")
	}
	if chat.Tools.Len() > 0 {
		p.add("<|system|>", glmToolsBefore)
		for _, item := range chat.Tools.Items {
			p.glmTool(item)
		}
		p.add(glmToolsAfter)
	}
	for i := 0; i < len(c.messages) && p.err == nil; {
		i = p.glmMessage(c, i)
	}
	p.add("<|assistant|><think>")
	return p.done()
}

// glmTool writes a tool that is not to be loaded later.
func (p *prompt) glmTool(item any) {
	tool, _ := item.(*values.Dict)
	if function, wrapped := tool.Get("function"); wrapped {
		tool, _ = function.(*values.Dict)
	}
	if tool == nil {
		p.fail(refused("a tool that is not an object"))
		return
	}
	if jinja.Truth(field(tool, "defer_loading")) {
		return
	}
	before := "{"
	for key, value := range tool.All() {
		name, _ := key.(string)
		if name == "defer_loading" || name == "strict" {
			continue
		}
		p.add(before, `"`, name, `": `) // the key is not escaped
		p.json(value)
		before = ", "
	}
	if before == "{" {
		p.add("{")
	}
	p.add("}\n")
}

// glmMessage writes the message at a position, and returns the position of the next one. The messages of tools that
// follow each other are written at once.
func (p *prompt) glmMessage(c *glmChat, at int) int {
	m := c.messages[at]
	switch field(m, "role") {
	case "user":
		p.add("<|user|>", p.glmText(m))
	case "system":
		p.add("<|system|>", p.glmText(m))
	case "assistant":
		p.glmAssistant(c, at)
	case "tool":
		end := at + 1
		for end < len(c.messages) && field(c.messages[end], "role") == "tool" {
			end++
		}
		p.add("<|observation|>")
		p.glmResults(c, at, end)
		return end
	}
	return at + 1
}

// glmText returns a message's text: its string, or its texts without anything between them.
func (p *prompt) glmText(m *values.Dict) string {
	switch content := field(m, "content").(type) {
	case nil:
		return ""
	case string:
		return content
	case *values.List:
		texts := make([]string, content.Len())
		for i, item := range content.Items {
			part, _ := item.(*values.Dict)
			text, isText := get[string](part, "text")
			if field(part, "type") != "text" || !isText {
				p.fail(Unknown("a part that is not text"))
			}
			texts[i] = text
		}
		return strings.Join(texts, "")
	}
	p.fail(Unknown("content that is neither text nor parts"))
	return ""
}

func (p *prompt) glmAssistant(c *glmChat, at int) {
	m := c.messages[at]
	content := p.glmText(m)
	reasoning, hasReasoning := get[string](m, "reasoning_content")
	if !hasReasoning && strings.Contains(content, dsThinkEnd) {
		first, _, _ := strings.Cut(content, dsThinkEnd)
		reasoning, hasReasoning = first[max(0, afterLast(first, dsThink)):], true
		content = content[afterLast(content, dsThinkEnd):]
	} else if !hasReasoning {
		reasoning, hasReasoning = c.reasoning.(string)
	}
	p.add("<|assistant|><think>")
	if hasReasoning && (c.keep || at > c.last) {
		p.add(reasoning)
	}
	p.add(dsThinkEnd, strings.TrimFunc(content, jinja.IsSpace))
	calls, err := listField(m, "tool_calls")
	if err != nil {
		p.fail(err)
		return
	}
	for i := range calls.Len() {
		call, _ := calls.Items[i].(*values.Dict)
		if function, _ := get[*values.Dict](call, "function"); function.Len() > 0 {
			call = function
		}
		name, named := get[string](call, "name")
		arguments, ok := get[*values.Dict](call, "arguments")
		if !named || !ok {
			p.fail(refused("a tool call without a name and arguments that are an object"))
			return
		}
		p.add("<tool_call>", name)
		for key, value := range arguments.All() {
			name, _ := key.(string)
			p.add("<arg_key>", name, "</arg_key><arg_value>")
			if text, isText := value.(string); isText {
				p.add(text)
			} else {
				p.json(value)
			}
			p.add("</arg_value>")
		}
		p.add("</tool_call>")
	}
}

// afterLast returns the position behind the last occurrence of a word in a text; -1 if there is none.
func afterLast(text, word string) int {
	if at := strings.LastIndex(text, word); at >= 0 {
		return at + len(word)
	}
	return -1
}

// glmResults writes the messages of tools from a position to before another: in the order of the calls, if each answers
// one call and both have ids that occur once.
func (p *prompt) glmResults(c *glmChat, from, to int) {
	results := slices.Clone(c.messages[from:to])
	if order := glmOrder(c, from, to); order != nil {
		slices.SortStableFunc(results, func(a, b *values.Dict) int { return order[glmID(a)] - order[glmID(b)] })
	}
	for _, m := range results {
		text, isText := get[string](m, "content")
		if !isText {
			p.fail(Unknown("a tool's result that is not text"))
			return
		}
		p.add("<tool_response>", text, "</tool_response>")
	}
}

// glmOrder returns the positions of the calls that the results at these positions answer, by their ids; nil if the
// results stay in their order.
func glmOrder(c *glmChat, from, to int) map[string]int {
	if from == 0 || field(c.messages[from-1], "role") != "assistant" {
		return nil
	}
	calls, _ := get[*values.List](c.messages[from-1], "tool_calls")
	order := map[string]int{}
	for i := range calls.Len() {
		call, _ := calls.Items[i].(*values.Dict)
		id := glmID(call)
		if _, twice := order[id]; twice || id == "" {
			return nil
		}
		order[id] = i
	}
	responded := map[string]bool{}
	for _, m := range c.messages[from:to] {
		id := glmID(m)
		if _, asked := order[id]; !asked || responded[id] {
			return nil
		}
		responded[id] = true
	}
	return order
}

// glmID returns the id of a tool call, or of the call that a tool's message answers; "" for none.
func glmID(d *values.Dict) string {
	if id, _ := get[string](d, "tool_call_id"); id != "" {
		return id
	}
	id, _ := get[string](d, "id")
	return id
}
