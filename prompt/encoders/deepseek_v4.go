package encoders

import (
	"context"
	"slices"
	"strings"

	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// DeepSeek V4. Source: vLLM 0.33.0, tokenizers/deepseek_v4 and deepseek_v4_encoding; SGLang 0.5.21 and 0.5.22,
// entrypoints/openai/serving_chat, chat_encoding and encoding_dsv4.

const (
	dsReminder = "<｜latest_reminder｜>"
	dsImage    = "<｜deepseek_image｜>"

	dsEffortHigh = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n" +
		"You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root " +
		"cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial " +
		"scenarios.\n" +
		"Explicitly write out your entire deliberation process, documenting every intermediate step, considered " +
		"alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
	dsEffortMax = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n" +
		"You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively " +
		"decompose the problem into its most fundamental components, trace every causal chain to its root, and " +
		"resolve the underlying cause rather than any surface symptom.\n" +
		"Do not stop reasoning until you have independently verified the solution from multiple angles and are " +
		"certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)

// dsTasks are the tokens of the tasks that classify a message.
var dsTasks = map[string]string{
	"action": "<｜action｜>", "query": "<｜query｜>", "authority": "<｜authority｜>", "domain": "<｜domain｜>",
	"title": "<｜title｜>", "read_url": "<｜read_url｜>",
}

// dsMarkup holds the names of the elements of DSML.
type dsMarkup struct{ calls, invoke, parameter string }

var (
	dsMarkupV32 = dsMarkup{"function_calls", "invoke", "parameter"}
	dsMarkupV4  = dsMarkup{"tool_calls", "invoke", "parameter"}
)

// dsRules are the differences between the encoders of V4.
type dsRules struct {
	markup dsMarkup
	// beginAfterSystem says that a last system message, or one before an assistant's, begins a response.
	beginAfterSystem bool
}

// dsTurn is a message after the tools' messages have joined the user's.
type dsTurn struct {
	dsMessage
	blocks []dsBlock // the user's texts and tool results; nil for other roles
}

// dsBlock is a text, or the result of a tool.
type dsBlock struct {
	text     string
	isResult bool
	call     string // the id of the call that a result answers
}

// dsChat is a chat for the encoder of V4.
type dsChat struct {
	turns    []dsTurn
	rules    *dsRules
	thinking bool
	// drop removes the reasoning before the last user's message.
	drop bool
	// effort is the text before the first message while thinking.
	effort string
	last   int // the position of the last user's or developer's message; -1 if there is none
	images int // how many dsImage in the content stand for an image
}

// deepSeekV4VLLM gives the request's tools to the first system message, which it puts at the front if there is none. It
// thinks unless a variable says no.
func deepSeekV4VLLM(ctx context.Context, chat *Chat) ([]Piece, error) {
	messages := make([]dsMessage, len(chat.Messages), len(chat.Messages)+1)
	images := 0
	for i, item := range chat.Messages {
		var n int
		var err error
		if messages[i], err = readDSMessage(item, "reasoning"); err != nil {
			return nil, err
		}
		given, _ := item.(*values.Dict)
		content := field(given, "content")
		if _, isList := content.(*values.List); isList && messages[i].role == "tool" {
			return nil, Unknown("a tool's result that is not text")
		}
		if messages[i].content, n, err = dsFlatten(content); err != nil {
			return nil, err
		}
		images += n
	}
	if chat.Tools.Len() > 0 {
		isSystem := func(m dsMessage) bool { return m.role == "system" }
		at := slices.IndexFunc(messages, isSystem)
		if at < 0 {
			messages, at = slices.Insert(messages, 0, dsMessage{role: "system"}), 0
		}
		messages[at].tools = chat.Tools
	}
	c := &dsChat{turns: dsMerge(messages), rules: &dsVLLM, drop: true, images: images}
	_, given := chat.Variables.Get("thinking")
	_, alsoGiven := chat.Variables.Get("enable_thinking")
	c.thinking = !given && !alsoGiven || flag(chat.Variables, "thinking", "enable_thinking")
	if drop, given := chat.Variables.Get("drop_thinking"); given {
		c.drop = jinja.Truth(drop)
	}
	effort, isText := field(chat.Variables, "reasoning_effort").(string)
	switch {
	case !isText && !c.thinking:
	case !isText:
		c.effort = dsEffortHigh
	case effort == "none":
		c.thinking = false
	case effort == "max":
		c.effort = dsEffortMax
	case !slices.Contains([]string{"low", "minimal", "medium"}, effort):
		c.effort = dsEffortHigh
	}
	return encodeDSV4(ctx, chat, c)
}

var dsVLLM = dsRules{markup: dsMarkupV4, beginAfterSystem: true}

// dsFlatten returns a message's content as one text, in which dsImage stands for each of its images.
func dsFlatten(content any) (text string, images int, err error) {
	list, isList := content.(*values.List)
	if !isList {
		text, isText := content.(string)
		if content != nil && !isText {
			return "", 0, Unknown("content that is neither text nor parts")
		}
		return text, 0, nil
	}
	texts := make([]string, list.Len())
	for i, item := range list.Items {
		part, _ := item.(*values.Dict)
		switch kind := field(part, "type"); kind {
		case "text":
			text, isText := get[string](part, "text")
			if !isText {
				return "", 0, Unknown("a text part without text")
			}
			texts[i] = text
		case "image":
			texts[i] = dsImage
			images++
		default:
			return "", 0, refused("a part of type %v", kind)
		}
	}
	return strings.Join(texts, "\n\n"), images, nil
}

// deepSeekV4SGLang gives the request's tools to the first message, before which it puts a system's if it is none.
func deepSeekV4SGLang(ctx context.Context, chat *Chat) ([]Piece, error) {
	messages, err := readDS32(chat.Messages, "reasoning_content")
	if err != nil {
		return nil, err
	}
	if messages[0].role != "system" {
		messages = slices.Insert(messages, 0, dsMessage{role: "system"})
	}
	if chat.Tools.Len() > 0 {
		messages[0].tools = chat.Tools
	}
	if chat.Task != nil {
		at := dsLastUser(messages)
		if at < 0 {
			return nil, refused("a task without a user's message")
		}
		messages[at].task = chat.Task
	}
	c := &dsChat{
		turns: dsMerge(messages), rules: &dsSGLang, drop: true, thinking: flag(chat.Variables, "thinking"),
	}
	if effort := field(chat.Variables, "reasoning_effort"); c.thinking && (effort == "high" || effort == "max") {
		switch chat.Efforts {
		case EffortsPreview:
			if effort == "max" {
				c.effort = dsEffortHigh
			}
		case EffortsOfficial:
			if c.effort = dsEffortHigh; effort == "max" {
				c.effort = dsEffortMax
			}
		default:
			return nil, Unknown("a reasoning effort of DeepSeek V4, without encoding/encoding_dsv4.py in the folder,")
		}
	}
	return encodeDSV4(ctx, chat, c)
}

var dsSGLang = dsRules{markup: dsMarkupV4}

// dsMerge joins the messages of tools and of the user that follow each other into one of the user, and puts the tools'
// results into the order of the calls that they answer.
func dsMerge(messages []dsMessage) []dsTurn {
	turns := make([]dsTurn, 0, len(messages))
	for _, m := range messages {
		var before *dsTurn // a turn of the user that the message may join
		if len(turns) > 0 && turns[len(turns)-1].role == "user" {
			before = &turns[len(turns)-1]
		}
		switch m.role {
		case "tool":
			if before == nil {
				turns = append(turns, dsTurn{dsMessage: dsMessage{role: "user"}})
				before = &turns[len(turns)-1]
			}
			before.blocks = append(before.blocks, dsBlock{m.content, true, m.id})
		case "user":
			if before == nil || before.task != nil {
				turns = append(turns, dsTurn{dsMessage: dsMessage{role: "user", task: m.task}})
				before = &turns[len(turns)-1]
			}
			before.blocks = append(before.blocks, dsBlock{text: m.content})
		default:
			turns = append(turns, dsTurn{dsMessage: m})
		}
	}
	order := map[string]int{} // the positions of the last calls, by their id
	for i := range turns {
		t := &turns[i]
		if t.role == "assistant" && len(t.calls) > 0 {
			clear(order)
			for at, call := range t.calls {
				if call.id != "" {
					order[call.id] = at
				}
			}
		}
		if len(order) > 0 && len(t.blocks) > 1 {
			dsSortResults(t.blocks, order)
		}
	}
	return turns
}

// dsSortResults sorts the results among blocks by the calls that they answer. The other blocks stay in their places.
func dsSortResults(blocks []dsBlock, order map[string]int) {
	var results []dsBlock
	for _, b := range blocks {
		if b.isResult {
			results = append(results, b)
		}
	}
	slices.SortStableFunc(results, func(a, b dsBlock) int { return order[a.call] - order[b.call] })
	for i := range blocks {
		if blocks[i].isResult {
			blocks[i], results = results[0], results[1:]
		}
	}
}

// encodeDSV4 writes the prompt.
func encodeDSV4(ctx context.Context, chat *Chat, c *dsChat) ([]Piece, error) {
	for i := range c.turns {
		if c.turns[i].tools.Len() > 0 {
			c.drop = false
		}
	}
	c.last = dsLastTurn(c.turns)
	if c.thinking && c.drop {
		c.turns = dsDrop(c.turns, c.last)
		c.last = dsLastTurn(c.turns)
	}
	p := newPrompt(ctx, chat)
	p.media = c.images > 0
	p.add(dsBegin)
	if c.thinking && len(c.turns) > 0 {
		p.add(c.effort)
	}
	for i := range c.turns {
		p.dsTurn(c, i)
		p.dsTransition(c, i)
		if p.err != nil {
			return nil, p.err
		}
	}
	if c.images > 0 && (len(p.pieces) != 2*c.images || strings.Contains(string(p.text), dsImage)) {
		return nil, Unknown("images, and their token in a text or not in the prompt")
	}
	return p.done()
}

func dsLastTurn(turns []dsTurn) int {
	for i := len(turns) - 1; i >= 0; i-- {
		if role := turns[i].role; role == "user" || role == "developer" {
			return i
		}
	}
	return -1
}

// dsDrop removes what V4 forgets before the last user's message: reasoning, and messages of the developer and of
// unknown roles.
func dsDrop(turns []dsTurn, last int) []dsTurn {
	kept := turns[:0]
	for i, t := range turns {
		switch {
		case i >= last || t.role == "user" || t.role == "system" || t.role == "latest_reminder" ||
			t.role == "direct_search_results":
		case t.role == "assistant":
			t.reasoning = ""
		default:
			continue
		}
		kept = append(kept, t)
	}
	return kept
}

// dsTurn writes the turn at a position, without what begins the response to it.
func (p *prompt) dsTurn(c *dsChat, at int) {
	t := &c.turns[at]
	switch t.role {
	case "system":
		p.content(t.content)
		if t.tools.Len() > 0 {
			p.add("\n\n")
			p.ds4Tools(t.tools, c.rules.markup)
		}
	case "developer":
		if t.content == "" {
			p.fail(refused("an empty developer's message"))
			return
		}
		p.add(dsUser)
		p.content(t.content)
		if t.tools.Len() > 0 {
			p.add("\n\n")
			p.ds4Tools(t.tools, c.rules.markup)
		}
	case "user":
		p.add(dsUser)
		for i, block := range t.blocks {
			if i > 0 {
				p.add("\n\n")
			}
			if block.isResult {
				p.add("<tool_result>", block.text, "</tool_result>")
			} else {
				p.content(block.text)
			}
		}
	case "latest_reminder":
		p.add(dsReminder)
		p.content(t.content)
	case "assistant":
		afterTask := at > 0 && c.turns[at-1].task != nil
		if c.thinking && !afterTask && (!c.drop || at > c.last) {
			p.add(t.reasoning, dsThinkEnd)
		}
		p.content(t.content)
		if len(t.calls) > 0 {
			p.add("\n\n<"+dsml, c.rules.markup.calls, ">\n")
			p.dsInvocations(t.calls, c.rules.markup)
			p.add("\n</"+dsml, c.rules.markup.calls, ">")
		}
		p.add(dsEnd)
	default:
		p.fail(refused("the role %q", t.role))
	}
}

// dsTransition writes what begins the response to the turn at a position, if the assistant comes next.
func (p *prompt) dsTransition(c *dsChat, at int) {
	t, isLast := &c.turns[at], at == len(c.turns)-1
	if !isLast && c.turns[at+1].role != "assistant" && c.turns[at+1].role != "latest_reminder" {
		return
	}
	think := dsThinkEnd
	if c.thinking {
		think = dsThink
	}
	if t.task != nil {
		name, _ := t.task.(string)
		switch token, known := dsTasks[name]; {
		case !known:
			p.fail(refused("the task %q", name))
		case name == "action":
			p.add(dsAssistant, think, token)
		default:
			p.add(token)
		}
		return
	}
	begins := t.role == "user" || t.role == "developer" || c.rules.beginAfterSystem && t.role == "system" &&
		(isLast || c.turns[at+1].role == "assistant")
	if !begins {
		return
	}
	if c.drop && at < c.last {
		think = dsThinkEnd
	}
	p.add(dsAssistant, think)
}

// ds4Tools writes what explains tools.
func (p *prompt) ds4Tools(tools *values.List, m dsMarkup) {
	open, end := "<"+dsml, "</"+dsml
	p.add("## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by ",
		"writing a \"", open, m.calls, ">\" block like the following:\n\n",
		open, m.calls, ">\n",
		open, m.invoke, " name=\"$TOOL_NAME\">\n",
		open, m.parameter, " name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE", end, m.parameter, ">\n",
		"...\n", end, m.invoke, ">\n",
		open, m.invoke, " name=\"$TOOL_NAME2\">\n...\n", end, m.invoke, ">\n", end, m.calls, ">\n\n",
		"String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, ",
		"booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n\n",
		"If thinking_mode is enabled (triggered by "+dsThink+"), you MUST output your complete reasoning inside ",
		dsThink+"..."+dsThinkEnd+" BEFORE any tool calls or final response.\n\n",
		"Otherwise, output directly after "+dsThinkEnd+" with tool calls or final response.\n\n",
		"### Available Tool Schemas\n\n")
	p.dsSchemas(tools)
	p.add("\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n")
}
