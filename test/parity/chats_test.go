package parity

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"

	"kvepp/prompt"
)

// chatGenerator makes random requests of conversations, most of them such as agents send.
type chatGenerator struct {
	*rand.Rand
	engine prompt.Engine
	calls  int
}

type object = map[string]any

// often is true in one of n cases.
func (g *chatGenerator) oneIn(n int) bool { return g.IntN(n) == 0 }

func choose[T any](g *chatGenerator, from ...T) T { return from[g.IntN(len(from))] }

// words are pieces of texts, with what trips up formatting, JSON and special tokens.
var words = []string{
	"Hello", "weather", "in Paris", " ", "\n", "\n\n", "{content}", "{0}", "%s", "\"quoted\"", "back\\slash",
	"tab\there", "naïve", "日本語", "😀", "\u2028", "\u0001",
	"<|im_end|>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>",
	"｜DSML｜", "a\r\nb", "&amp;", "'", "[IMG]", "12", "3.50", "null", "  lead", "trail  ", "<result>x</result>",
	"e\u0301",
}

func (g *chatGenerator) text() string {
	n := g.IntN(5)
	if g.oneIn(20) {
		n = 40
	}
	var b strings.Builder
	for range n {
		b.WriteString(choose(g, words...))
		if g.oneIn(2) {
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// said is a text that is not empty.
func (g *chatGenerator) said() string { return choose(g, "So", "The", "ok") + " " + g.text() }

// value is a random JSON value.
func (g *chatGenerator) value(depth int) any {
	n := 9
	if depth == 0 {
		n = 7
	}
	switch g.IntN(n) {
	case 0:
		return nil
	case 1:
		return g.oneIn(2)
	case 2:
		return g.IntN(2000) - 1000
	case 3:
		return choose[any](g, 0.5, 1e21, -2.25, json.Number("3.0"), json.Number("1e2"), json.Number("1.5e-7"), 1e-5,
			json.Number("9007199254740993"))
	case 7:
		list := make([]any, g.IntN(3))
		for i := range list {
			list[i] = g.value(depth - 1)
		}
		return list
	case 8:
		return g.object(depth - 1)
	}
	return g.text()
}

func (g *chatGenerator) object(depth int) any {
	var b strings.Builder // keys in a random order, which a map would sort
	b.WriteByte('{')
	used := map[string]bool{}
	for range g.IntN(4) {
		key := choose(g, "b", "a", "city", "päth", "q\"q", "", "n", "units")
		if used[key] {
			continue
		}
		if len(used) > 0 {
			b.WriteByte(',')
		}
		used[key] = true
		name, _ := json.Marshal(key)
		value, _ := json.Marshal(g.value(depth))
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return json.RawMessage(b.String())
}

var toolNames = []string{"get_weather", "search", "run", "no_such_tool"}

// function is a tool's function as OpenAI's chat API has it.
func (g *chatGenerator) function() object {
	f := object{"name": choose(g, toolNames...)}
	if !g.oneIn(4) {
		f["description"] = choose[any](g, g.text(), g.text(), nil)
	}
	if !g.oneIn(4) {
		f["parameters"] = choose[any](g, g.object(2), json.RawMessage(
			`{"type":"object","required":["city"],"properties":{"city":{"type":"string","description":"Stadt ü"},`+
				`"n":{"type":["integer","null"],"minimum":0.5}}}`))
	}
	if g.oneIn(4) {
		f["strict"] = g.oneIn(2)
	}
	return f
}

func (g *chatGenerator) tools() []any {
	tools := make([]any, 1+g.IntN(3))
	for i := range tools {
		tools[i] = object{"type": "function", "function": g.function()}
	}
	return tools
}

// content is a message's text, as a string or as parts.
func (g *chatGenerator) content(text string) any {
	if !g.oneIn(4) {
		return text
	}
	parts := []any{object{"type": "text", "text": text}}
	for g.oneIn(2) {
		parts = append(parts, object{"type": "text", "text": g.text()})
	}
	return parts
}

func (g *chatGenerator) callID() string {
	g.calls++
	return fmt.Sprintf("call_%d", g.calls)
}

// arguments is a tool call's arguments as JSON in a string.
func (g *chatGenerator) arguments() string {
	if g.oneIn(12) {
		return choose(g, "", "{}", "[1]", "{\"a\": 1, \"a\": 2}", " {\"z\":[ ]} ")
	}
	raw, _ := json.Marshal(g.object(2))
	return string(raw)
}

// turn appends a turn of the assistant, with the responses to its tool calls.
func (g *chatGenerator) turn(messages []any) []any {
	m := object{"role": "assistant"}
	if !g.oneIn(3) {
		m["content"] = g.content(g.said())
	} else if g.oneIn(2) {
		m["content"] = choose[any](g, "", nil)
	}
	if g.oneIn(2) {
		name := "reasoning_content"
		if g.engine == prompt.VLLM && g.oneIn(2) {
			name = "reasoning"
		}
		m[name] = g.said()
	}
	var ids []string
	if g.oneIn(2) {
		var calls []any
		for range 1 + g.IntN(3) {
			id := g.callID()
			ids = append(ids, id)
			calls = append(calls, object{"id": id, "type": "function", "function": object{
				"name": choose(g, toolNames...), "arguments": g.arguments()}})
		}
		m["tool_calls"] = calls
	} else if m["content"] == nil {
		m["content"] = g.said()
	}
	messages = append(messages, m)
	if g.oneIn(6) {
		g.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	}
	for _, id := range ids {
		messages = append(messages, object{"role": "tool", "tool_call_id": id, "content": g.content(g.text())})
		if g.oneIn(25) {
			break
		}
	}
	return messages
}

// conversation is a list of messages.
func (g *chatGenerator) conversation() []any {
	var messages []any
	if g.oneIn(2) {
		text := g.text()
		if g.engine == prompt.VLLM && g.oneIn(12) {
			text = "x-anthropic-billing-header: cch=1\n" + text
		}
		m := object{"role": "system", "content": g.content(text)}
		if g.engine == prompt.SGLang && g.oneIn(6) {
			m["tools"] = g.tools()
		}
		messages = append(messages, m)
	}
	if g.oneIn(8) {
		m := object{"role": "developer", "content": g.content(g.said())}
		if g.oneIn(3) {
			m["tools"] = g.tools()
		}
		messages = append(messages, m)
	}
	for range 1 + g.IntN(4) {
		if !g.oneIn(10) || len(messages) == 0 {
			m := object{"role": "user", "content": g.content(g.text())}
			if g.oneIn(10) {
				m["name"] = "Ann"
			}
			if g.engine == prompt.VLLM && g.oneIn(12) {
				m["task"] = choose(g, "action", "query", "read_url", "other")
			}
			messages = append(messages, m)
		}
		if g.oneIn(15) {
			messages = append(messages, object{"role": choose(g, "system", "latest_reminder"), "content": g.said()})
		}
		if g.oneIn(40) {
			messages = append(messages, object{"role": "developer", "content": g.content(g.said())})
		}
		if !g.oneIn(4) {
			messages = g.turn(messages)
		}
		for g.oneIn(5) {
			messages = g.turn(messages)
		}
	}
	if last, _ := messages[len(messages)-1].(object); last["role"] == "assistant" && g.oneIn(2) {
		messages = append(messages, object{"role": "user", "content": g.content(g.said())})
	}
	return messages
}

// variables are chat template variables that encoders read.
func (g *chatGenerator) variables() object {
	v := object{}
	for _, name := range []string{"thinking", "enable_thinking"} {
		if g.oneIn(2) {
			v[name] = choose[any](g, true, true, true, false, false, nil, 1, "")
		}
	}
	if g.oneIn(4) {
		v["drop_thinking"] = choose[any](g, true, false, 0)
	}
	if g.oneIn(4) {
		v["reasoning_effort"] = choose[any](g, "low", "high", "max", "none")
	}
	if g.oneIn(8) {
		v["custom"] = 1
	}
	if g.oneIn(6) {
		v["thinking_mode"] = choose(g, "enabled", "disabled", "adaptive")
	}
	if g.oneIn(4) {
		v["clear_thinking"] = choose[any](g, true, false)
	}
	return v
}

// chat is a request to /v1/chat/completions.
func (g *chatGenerator) chat() object {
	body := object{"model": "m", "messages": g.conversation()}
	if g.oneIn(2) {
		body["tools"] = g.tools()
		if g.oneIn(4) {
			body["tool_choice"] = choose[any](g, "auto", "none", object{"type": "function", "function": object{
				"name": "search"}})
		}
	}
	if g.oneIn(2) {
		body["chat_template_kwargs"] = g.variables()
	}
	if g.oneIn(4) {
		body["reasoning_effort"] = choose(g, "none", "minimal", "low", "medium", "high", "xhigh", "max")
	}
	if g.oneIn(6) {
		body["continue_final_message"], body["add_generation_prompt"] = true, false
	}
	if g.oneIn(10) {
		body["add_special_tokens"] = g.oneIn(2)
	}
	if g.engine == prompt.SGLang && g.oneIn(6) {
		body["thinking"] = object{"type": choose(g, "enabled", "disabled", "adaptive")}
	}
	if g.engine == prompt.SGLang && g.oneIn(10) {
		body["task"] = choose(g, "action", "query", "title")
	}
	if g.oneIn(10) {
		body["response_format"] = object{"type": "json_object"}
	}
	return body
}

// messages is a request to /v1/messages.
func (g *chatGenerator) messages() object {
	body := object{"model": "m", "max_tokens": 9}
	if g.oneIn(2) {
		body["system"] = choose[any](g, g.text(), []any{object{"type": "text", "text": g.said()},
			object{"type": "text", "text": g.said()}})
	}
	var messages []any
	for range 1 + g.IntN(4) {
		messages = append(messages, object{"role": "user", "content": choose[any](g, g.said(),
			[]any{object{"type": "text", "text": g.said()}, object{"type": "text", "text": g.text()}})})
		if g.oneIn(12) {
			messages = append(messages, object{"role": "system", "content": g.said()})
		}
		for !g.oneIn(3) {
			var blocks, results []any
			if g.oneIn(2) {
				blocks = append(blocks, object{"type": "thinking", "thinking": g.said(), "signature": "s"})
			}
			if !g.oneIn(3) {
				blocks = append(blocks, object{"type": "text", "text": g.said()})
			}
			for range 1 + g.IntN(2) {
				id := g.callID()
				blocks = append(blocks, object{"type": "tool_use", "id": id, "name": choose(g, toolNames...),
					"input": g.object(2)})
				results = append(results, object{"type": "tool_result", "tool_use_id": id, "content": choose[any](g,
					g.text(), []any{object{"type": "text", "text": g.said()},
						object{"type": "text", "text": g.said()}})})
			}
			if g.oneIn(3) {
				results = append(results, object{"type": "text", "text": g.said()})
			}
			messages = append(messages, object{"role": "assistant", "content": blocks},
				object{"role": "user", "content": results})
		}
	}
	body["messages"] = messages
	if g.oneIn(2) {
		var tools []any
		for range 1 + g.IntN(2) {
			tools = append(tools, object{"name": choose(g, toolNames...), "description": g.text(),
				"input_schema": g.object(2)})
		}
		body["tools"] = tools
	}
	if g.oneIn(6) {
		body["thinking"] = choose[any](g, object{"type": "disabled"}, object{"type": "enabled", "budget_tokens": 1024})
	}
	if g.oneIn(8) {
		body["output_config"] = object{"effort": choose(g, "low", "high", "max")}
	}
	return body
}

// responses is a request to /v1/responses.
func (g *chatGenerator) responses() object {
	body := object{"model": "m"}
	if g.oneIn(3) {
		body["instructions"] = g.text()
	}
	if g.oneIn(8) {
		body["input"] = g.said()
		return body
	}
	var items []any
	for range 1 + g.IntN(4) {
		items = append(items, object{"role": "user", "content": choose[any](g, g.said(),
			[]any{object{"type": "input_text", "text": g.said()}})})
		if g.oneIn(3) {
			continue
		}
		if g.oneIn(2) {
			items = append(items, object{"type": "reasoning", "id": "r", "summary": []any{
				object{"type": "summary_text", "text": g.said()}}})
		}
		if g.oneIn(2) {
			id := g.callID()
			items = append(items, object{"type": "function_call", "call_id": id, "name": choose(g, toolNames...),
				"arguments": g.arguments()}, object{"type": "function_call_output", "call_id": id, "output": g.text()})
		}
		if g.oneIn(2) {
			items = append(items, object{"type": "message", "id": "m", "status": "completed", "role": "assistant",
				"content": []any{object{"type": "output_text", "text": g.said(), "annotations": []any{}}}})
		}
	}
	if g.oneIn(2) {
		items = append(items, object{"role": "user", "content": g.said()})
	}
	body["input"] = items
	if g.oneIn(2) {
		f := g.function()
		f["type"] = "function"
		f["strict"] = g.oneIn(2)
		if f["parameters"] == nil {
			f["parameters"] = object{}
		}
		body["tools"] = []any{f}
	}
	if g.oneIn(4) {
		body["reasoning"] = object{"effort": choose(g, "low", "medium", "high", "none")}
	}
	if g.oneIn(4) {
		body["chat_template_kwargs"] = g.variables()
	}
	return body
}
