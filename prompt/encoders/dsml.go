package encoders

import (
	"kvepp/prompt/values"
)

// What the encoders of DeepSeek V3.2, V4 and V4.1 share: the special tokens, and the markup of tool calls, which they
// call DSML.

// The special tokens, and the texts that frame a chat.
const (
	dsBegin     = "<｜begin▁of▁sentence｜>"
	dsEnd       = "<｜end▁of▁sentence｜>"
	dsUser      = "<｜User｜>"
	dsAssistant = "<｜Assistant｜>"
	dsThink     = "<think>"
	dsThinkEnd  = "</think>"
	dsml        = "｜DSML｜"
)

// dsMessage holds the fields of a message that DeepSeek's encoders read.
type dsMessage struct {
	role      string
	content   string
	reasoning string
	id        string // the call that a tool's message answers
	// task is one of the tasks that V4 classifies with a token of their own; nil for none.
	task  any
	tools *values.List
	calls []dsCall
}

// dsCall is a tool call.
type dsCall struct {
	id, name  string
	arguments *values.Dict
}

// readDSMessage reads a message whose content is text. reasoning is the name of the field of its reasoning.
func readDSMessage(item any, reasoning string) (m dsMessage, err error) {
	given, _ := item.(*values.Dict)
	if m.role, err = textField(given, "role"); err != nil {
		return m, err
	}
	if m.reasoning, err = textField(given, reasoning); err != nil {
		return m, err
	}
	m.id, _ = get[string](given, "tool_call_id")
	m.task = field(given, "task")
	if m.tools, err = listField(given, "tools"); err != nil {
		return m, err
	}
	calls, err := listField(given, "tool_calls")
	if err != nil || calls.Len() == 0 {
		return m, err
	}
	m.calls = make([]dsCall, calls.Len())
	for i, item := range calls.Items {
		call, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](call, "function")
		c := &m.calls[i]
		var hasName, hasArguments bool
		c.id, _ = get[string](call, "id")
		c.name, hasName = get[string](function, "name")
		c.arguments, hasArguments = get[*values.Dict](function, "arguments")
		if !hasName || m.role == "assistant" && !hasArguments {
			return m, Unknown("a tool call that is not a function's with a name and arguments")
		}
	}
	return m, nil
}

// listField returns a field that is a list; nil if it is absent or null. Another value is an error.
func listField(d *values.Dict, name string) (*values.List, error) {
	value := field(d, name)
	list, ok := value.(*values.List)
	if value != nil && !ok {
		return nil, Unknown("a message's " + name + " that is not a list")
	}
	return list, nil
}

// dsInvocations appends tool calls, without the block around them.
func (p *prompt) dsInvocations(calls []dsCall, m dsMarkup) {
	for i, call := range calls {
		if i > 0 {
			p.add("\n")
		}
		p.add("<"+dsml, m.invoke, ` name="`, call.name, "\">\n")
		first := true
		for key, value := range call.arguments.All() {
			if !first {
				p.add("\n")
			}
			first = false
			name, _ := key.(string)
			text, isText := value.(string)
			p.add("<"+dsml, m.parameter, ` name="`, name)
			if isText {
				p.add(`" string="true">`, text)
			} else {
				p.add(`" string="false">`)
				p.json(value)
			}
			p.add("</"+dsml, m.parameter, ">")
		}
		p.add("\n</"+dsml, m.invoke, ">")
	}
}

// dsSchemas appends the functions of tools as JSON, one a line.
func (p *prompt) dsSchemas(tools *values.List) {
	for i, item := range tools.Items {
		tool, _ := item.(*values.Dict)
		function, ok := tool.Get("function")
		if !ok {
			p.fail(refused("a tool without a function"))
			return
		}
		if i > 0 {
			p.add("\n")
		}
		p.json(function)
	}
}

// fail sets the error, unless there is one.
func (p *prompt) fail(err error) {
	if p.err == nil {
		p.err = err
	}
}

// dsLastUser returns the position of the last message of the user or the developer; -1 if there is none.
func dsLastUser(messages []dsMessage) int {
	for i := len(messages) - 1; i >= 0; i-- {
		if role := messages[i].role; role == "user" || role == "developer" {
			return i
		}
	}
	return -1
}
