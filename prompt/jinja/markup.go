package jinja

import (
	"errors"
	"slices"

	"kvepp/prompt/values"
)

// markup is markupsafe's Markup: text that is safe to insert into HTML. The filter safe makes it of any text. Its
// operators and methods escape the text that they add to it, although the template's own output is never escaped.
// Source: markupsafe 3.0.4, Markup.
type markup string

// Key says that markup equals its text as the key of a dict.
func (m markup) Key() any { return string(m) }

// textOf returns the text of a string or of markup.
func textOf(v any) (string, bool) {
	switch s := v.(type) {
	case string:
		return s, true
	case markup:
		return string(s), true
	}
	return "", false
}

// unmarked returns markup as a string, and any other value as it is.
func unmarked(v any) any {
	if m, ok := v.(markup); ok {
		return string(m)
	}
	return v
}

// marked returns a string, or a list's strings, as markup, and any other value as it is.
func marked(v any) any {
	switch s := v.(type) {
	case string:
		return markup(s)
	case *values.List: // of split and similar methods: no other value refers to it
		for i, item := range s.Items {
			s.Items[i] = marked(item)
		}
	}
	return v
}

// escaped is markupsafe's escape.
func (x *execution) escaped(v any) (markup, error) {
	if m, ok := v.(markup); ok {
		return m, nil
	}
	s, err := x.str(v)
	if err == nil {
		s, err = x.escape(s)
	}
	return markup(s), err
}

// addMarkup is left + right if one of them is markup.
func (x *execution) addMarkup(left, right any) (any, error) {
	_, ok := textOf(left)
	_, both := textOf(right)
	if !ok || !both {
		return nil, unsupportedOperands("+", left, right)
	}
	a, err := x.escaped(left)
	if err != nil {
		return nil, err
	}
	b, err := x.escaped(right)
	if err != nil {
		return nil, err
	}
	s, err := x.concat(len(a)+len(b), string(a), string(b))
	return markup(s), err
}

func filterEscape(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	return x.escaped(v)
}

func filterForceEscape(x *execution, v any, a *arguments) (any, error) {
	return filterEscape(x, unmarked(v), a)
}

func filterSafe(x *execution, v any, a *arguments) (any, error) {
	s, err := filterString(x, v, a)
	return marked(s), err
}

// callMarked calls a filter of Python. Most filters take markup as a string. Some return markup for it.
func (x *execution) callMarked(name string, f builtin, v any, a *arguments) (any, error) {
	_, isMarkup := v.(markup)
	if !isMarkup && len(a.positional)+len(a.values) == 0 { // nothing to do in most calls
		return callNamed(x, name, f, v, a)
	}
	switch name {
	case "attr", "d", "default", "e", "escape", "forceescape", "format", "map", "safe", "string", "truncate":
		return callNamed(x, name, f, v, a) // these look at it themselves
	case "batch", "indent", "slice", "sum":
	default:
		a.unmark()
	}
	result, err := callNamed(x, name, f, unmarked(v), a)
	switch name {
	case "capitalize", "center", "indent", "last", "lower", "reverse", "trim", "upper":
		if isMarkup {
			result = marked(result)
		}
	}
	return result, err
}

// callTest calls a test. Only the test escaped tells markup from a string.
func (x *execution) callTest(name string, f builtin, v any, a *arguments) (any, error) {
	if name != "escaped" {
		v = unmarked(v)
		a.unmark()
	}
	return callNamed(x, name, f, v, a)
}

// unmark makes strings of the arguments that are markup.
func (a *arguments) unmark() {
	for _, list := range [2][]any{a.positional, a.values} {
		for i, v := range list {
			list[i] = unmarked(v)
		}
	}
}

// callMarkup calls a string's method on markup. It escapes the texts that the method puts into its result.
func callMarkup(x *execution, name string, method builtin, v any, a *arguments) (result any, err error) {
	var inserted []any
	switch name {
	case "replace", "center", "ljust", "rjust":
		if len(a.names) > 0 {
			return nil, errors.New("takes no keyword arguments")
		}
		inserted = a.positional[min(1, len(a.positional)):min(2, len(a.positional))]
	case "join": // of any values
		if len(a.positional) != 1 {
			break
		}
		items, err := x.iterate(a.positional[0])
		if err == nil {
			err = x.chargeList(len(items))
		}
		if err != nil {
			return nil, err
		}
		inserted = slices.Clone(items)
		a.positional[0] = &values.List{Items: inserted}
	}
	for i, value := range inserted {
		if inserted[i], err = x.escaped(value); err != nil {
			return nil, err
		}
	}
	result, err = method(x, v, a)
	return marked(result), err
}
