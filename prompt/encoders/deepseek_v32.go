package encoders

import (
	"context"
	"slices"

	"kvepp/prompt/values"
)

// DeepSeek V3.2. Source: vLLM 0.33.0, tokenizers/deepseek_v32 and deepseek_v32_encoding; SGLang 0.5.21 to 0.5.23,
// entrypoints/openai/serving_chat and encoding_dsv32.

// ds32Tools are the words around the functions of tools.
const (
	ds32ToolsBefore = "## Tools\n" +
		"You have access to a set of tools you can use to answer the user's question.\n" +
		"You can invoke functions by writing a \"<" + dsml + "function_calls>\" block like the following as part of " +
		"your reply to the user:\n" +
		"<" + dsml + "function_calls>\n" +
		"<" + dsml + "invoke name=\"$FUNCTION_NAME\">\n" +
		"<" + dsml + "parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</" + dsml +
		"parameter>\n" +
		"...\n" +
		"</" + dsml + "invoke>\n" +
		"<" + dsml + "invoke name=\"$FUNCTION_NAME2\">\n" +
		"...\n" +
		"</" + dsml + "invoke>\n" +
		"</" + dsml + "function_calls>\n" +
		"String and scalar parameters should be specified as is without any escaping or quotes, while lists and " +
		"objects should use JSON format. The \"string\" attribute should be set to \"true\" for string type " +
		"parameters and \"false\" for other types (numbers, booleans, arrays, objects).\n" +
		"If the thinking_mode is enabled, then after function results you should strongly consider outputting a " +
		"thinking block. Here is an example:\n" +
		"<" + dsml + "function_calls>\n" +
		"...\n" +
		"</" + dsml + "function_calls>\n" +
		"<function_results>\n" +
		"...\n" +
		"</function_results>\n" +
		dsThink + "...thinking about results" + dsThinkEnd + "\n" +
		"Here are the functions available in JSONSchema format:\n" +
		"<functions>\n"
	ds32ToolsAfter = "\n</functions>\n"
)

// deepSeekV32VLLM puts the request's tools into a system message of their own before the others. It drops the reasoning
// before the last user's message if that message is the last one.
func deepSeekV32VLLM(ctx context.Context, chat *Chat) ([]Piece, error) {
	messages, err := readDS32(chat.Messages, "reasoning")
	if err != nil {
		return nil, err
	}
	if chat.Tools.Len() > 0 {
		messages = slices.Insert(messages, 0, dsMessage{role: "system", tools: chat.Tools})
	}
	thinking := flag(chat.Variables, "thinking", "enable_thinking")
	if thinking && messages[len(messages)-1].role == "user" {
		if err := ds32Drop(messages); err != nil {
			return nil, err
		}
	}
	return encodeDS32(ctx, chat, messages, thinking)
}

// deepSeekV32SGLang puts the request's tools into the first system message, which it adds if the chat does not begin
// with one. The last message must not be an assistant's. It drops the reasoning before the last user's message.
func deepSeekV32SGLang(ctx context.Context, chat *Chat) ([]Piece, error) {
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
	thinking := flag(chat.Variables, "thinking")
	if thinking {
		if err := ds32Drop(messages); err != nil {
			return nil, err
		}
	}
	return encodeDS32(ctx, chat, messages, thinking)
}

// readDS32 reads the messages. There is room for one more.
func readDS32(items []any, reasoning string) ([]dsMessage, error) {
	messages := make([]dsMessage, len(items), len(items)+1)
	for i, item := range items {
		var err error
		if messages[i], err = readDSMessage(item, reasoning); err != nil {
			return nil, err
		}
		given, _ := item.(*values.Dict)
		if messages[i].content, err = textField(given, "content"); err != nil {
			return nil, err
		}
	}
	if len(messages) == 0 {
		return nil, refused("a chat without messages")
	}
	return messages, nil
}

// ds32Drop removes the reasoning of the assistant's messages before the last user's. A message there that the engine
// would drop as a whole makes it fail.
func ds32Drop(messages []dsMessage) error {
	for i := range dsLastUser(messages) {
		switch messages[i].role {
		case "user", "system", "tool":
		case "assistant":
			messages[i].reasoning = ""
		default:
			return refused("a message of the role %s before the last user's while thinking", messages[i].role)
		}
	}
	return nil
}

// encodeDS32 writes the prompt.
func encodeDS32(ctx context.Context, chat *Chat, messages []dsMessage, thinking bool) ([]Piece, error) {
	p := newPrompt(ctx, chat)
	p.add(dsBegin)
	last, asker := dsLastUser(messages), -1
	for i := range messages {
		p.ds32Message(messages, i, last, asker, thinking)
		if p.err != nil {
			return nil, p.err
		}
		if messages[i].role != "tool" {
			asker = i
		}
	}
	return p.done()
}

// ds32Message writes the message at a position. last is the position of the last user's message, asker that of the last
// message before this one that is not a tool's; -1 if there is none.
func (p *prompt) ds32Message(messages []dsMessage, at, last, asker int, thinking bool) {
	m := &messages[at]
	opening := dsThinkEnd // what begins the response to a message
	switch m.role {
	case "system":
		p.add(m.content)
		if m.tools.Len() > 0 {
			p.add("\n\n")
			p.ds32Tools(m.tools)
		}
	case "developer", "user":
		p.add(dsUser)
		if m.role == "developer" {
			if m.content == "" {
				p.fail(refused("an empty developer's message"))
				return
			}
			if m.tools.Len() > 0 {
				p.add("\n\n")
				p.ds32Tools(m.tools)
			}
			p.add("\n\n# The user's message is: ")
		}
		if at == last && thinking {
			opening = dsThink
		}
		p.add(m.content, dsAssistant, opening)
	case "tool":
		order, calls := ds32Asked(messages, at, asker)
		if order < 0 || calls < order {
			p.fail(refused("a tool's message without a tool call before it"))
			return
		}
		if order == 1 {
			p.add("\n\n<function_results>")
		}
		p.add("\n<result>", m.content, "</result>")
		if order == calls {
			if at >= last && thinking {
				opening = dsThink
			}
			p.add("\n</function_results>\n\n", opening)
		}
	case "assistant":
		if thinking && at > last {
			if m.reasoning == "" && len(m.calls) == 0 {
				p.fail(refused("an assistant's message without reasoning and tool calls after the last user's message"))
				return
			}
			p.add(m.reasoning, dsThinkEnd)
		}
		p.add(m.content)
		if len(m.calls) > 0 {
			p.add("\n\n<" + dsml + "function_calls>\n")
			p.dsInvocations(m.calls, dsMarkupV32)
			p.add("\n</" + dsml + "function_calls>")
		}
		p.add(dsEnd)
	default:
		p.fail(refused("the role %q", m.role))
	}
}

func (p *prompt) ds32Tools(tools *values.List) {
	p.add(ds32ToolsBefore)
	p.dsSchemas(tools)
	p.add(ds32ToolsAfter)
}

// ds32Asked returns which of an assistant's tool calls the tool's message at a position answers, from 1, and how many
// calls there are; a negative number if no assistant's message precedes it. For the first message of a chat, the
// engines look at the last one, by Python's negative index.
func ds32Asked(messages []dsMessage, at, asker int) (order, calls int) {
	switch {
	case at == 0:
		return 1, len(messages[len(messages)-1].calls)
	case asker < 0 || messages[asker].role != "assistant":
		return -1, 0
	}
	return at - asker, len(messages[asker].calls)
}
