package prompt

import (
	"math/big"
	"slices"
	"strings"

	"kvepp/prompt/values"
)

// Helpers for JSON values, which all engines' rules use. Every accessor takes a nil object for an empty one.

// get returns a field if the object has it and its value is of type T.
func get[T any](d *values.Dict, key string) (T, bool) {
	v, _ := d.Get(key)
	t, ok := v.(T)
	return t, ok
}

// field returns a field's value; nil if it is absent or null.
func field(d *values.Dict, name string) any { v, _ := d.Get(name); return v }

// firstField returns the first of the named fields that is not null; nil if there is none.
func firstField(d *values.Dict, names ...string) any {
	for _, name := range names {
		if v := field(d, name); v != nil {
			return v
		}
	}
	return nil
}

// copyFields copies the named fields that are not null.
func copyFields(to, from *values.Dict, names ...string) {
	for _, name := range names {
		if v := field(from, name); v != nil {
			to.Set(name, v)
		}
	}
}

// objectField returns a field that is an object; nil if it is absent or null.
func objectField(d *values.Dict, name string) (*values.Dict, error) {
	v := field(d, name)
	object, ok := v.(*values.Dict)
	if v != nil && !ok {
		return nil, errRefused("%s is not an object", name)
	}
	return object, nil
}

// onlyFields reports whether an object has no fields except the named ones.
func onlyFields(d *values.Dict, names ...string) bool {
	for k := range d.All() {
		if name, _ := k.(string); !slices.Contains(names, name) {
			return false
		}
	}
	return true
}

// without returns an object without the named fields.
func without(d *values.Dict, names ...string) *values.Dict {
	kept := values.NewDict()
	for k, v := range d.All() {
		if name, _ := k.(string); !slices.Contains(names, name) {
			kept.Set(name, v)
		}
	}
	return kept
}

// inOrder returns an object with the named fields first, in that order, and then the others. Pydantic orders a
// TypedDict that allows further fields like this.
func inOrder(d *values.Dict, names ...string) *values.Dict {
	ordered := values.NewDict()
	for _, name := range names {
		if v, ok := d.Get(name); ok {
			ordered.Set(name, v)
		}
	}
	for k, v := range d.All() {
		if name, _ := k.(string); !slices.Contains(names, name) {
			ordered.Set(name, v)
		}
	}
	return ordered
}

// dict returns an object of alternating keys, which are strings, and values.
func dict(keysAndValues ...any) *values.Dict { return values.DictOf(keysAndValues...) }

// listOrNone returns nil, Python's None, for a nil list.
func listOrNone(list *values.List) any {
	if list == nil {
		return nil
	}
	return list
}

// role returns a message's role; "" if it has none.
func role(message any) string {
	d, _ := message.(*values.Dict)
	role, _ := get[string](d, "role")
	return role
}

// textPart returns a content part that holds a text.
func textPart(text string) *values.Dict { return dict("type", "text", "text", text) }

// isText reports whether a content part is of type text.
func isText(part *values.Dict) bool { return field(part, "type") == "text" }

// joinTexts joins the texts of a list of text parts; false if the list has another part.
func joinTexts(list *values.List, separator string) (string, bool) {
	texts := make([]string, len(list.Items))
	for i, item := range list.Items {
		part, _ := item.(*values.Dict)
		if !isText(part) {
			return "", false
		}
		texts[i], _ = get[string](part, "text")
	}
	return strings.Join(texts, separator), true
}

// functionCall returns a tool call as the chat API has it.
func functionCall(id, name, arguments any) *values.Dict {
	return dict("id", id, "type", "function", "function", dict("name", name, "arguments", arguments))
}

// convertToolCalls returns a message's tool calls as convert returns each. Every call has a function.
func convertToolCalls(
	value any, convert func(i int, call, function *values.Dict) (*values.Dict, error),
) (*values.List, error) {
	given, ok := value.(*values.List)
	if !ok {
		return nil, errRefused("tool_calls is not a list")
	}
	calls := make([]any, len(given.Items))
	for i, item := range given.Items {
		call, _ := item.(*values.Dict)
		function, ok := get[*values.Dict](call, "function")
		if !ok {
			return nil, errRefused("tool_calls[%d] has no function", i)
		}
		converted, err := convert(i, call, function)
		if err != nil {
			return nil, err
		}
		calls[i] = converted
	}
	return values.NewList(calls...), nil
}

// toolFields are the fields of a tool that vLLM's and SGLang's models know; nil where the tool has none.
type toolFields struct {
	name, description, parameters, strict any
	// deferTool and deferFunction are defer_loading of the tool and of its function, which inherits the tool's.
	deferTool, deferFunction any
}

// readToolFields reads tool, whose function is function.
func readToolFields(tool, function *values.Dict) (toolFields, error) {
	f := toolFields{
		name: field(function, "name"), description: field(function, "description"),
		parameters: field(function, "parameters"), strict: field(function, "strict"),
		deferTool: field(tool, "defer_loading"), deferFunction: field(function, "defer_loading"),
	}
	if f.deferFunction == nil {
		f.deferFunction = f.deferTool
	}
	for _, flag := range []any{f.strict, f.deferFunction, f.deferTool} {
		if _, isBool := flag.(bool); flag != nil && !isBool {
			return f, errNotReproduced("a tool's strict or defer_loading that is not a boolean")
		}
	}
	return f, nil
}

// setFlag sets a field unless the value is nil.
func setFlag(d *values.Dict, name string, value any) {
	if value != nil {
		d.Set(name, value)
	}
}

// hasBigInteger reports whether a value holds an integer that orjson would read as a float.
func hasBigInteger(v any) bool {
	switch v := v.(type) {
	case *big.Int:
		return !v.IsUint64()
	case *values.List:
		return slices.ContainsFunc(v.Items, hasBigInteger)
	case *values.Dict:
		for _, value := range v.All() {
			if hasBigInteger(value) {
				return true
			}
		}
	}
	return false
}

// errBigInteger says that a tool call's arguments hold an integer for which hasBigInteger is true.
var errBigInteger = errNotReproduced("tool call arguments with an integer beyond 64 bits")
