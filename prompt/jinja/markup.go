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
func (x *execution) escaped(v any) markup {
	if m, ok := v.(markup); ok {
		return m
	}
	return markup(x.escape(x.str(v)))
}

// addMarkup is left + right if one of them is markup.
func (x *execution) addMarkup(left, right any) any {
	_, ok := textOf(left)
	_, both := textOf(right)
	if !ok || !both {
		panic(failure{unsupportedOperands("+", left, right)})
	}
	a, b := x.escaped(left), x.escaped(right)
	return markup(x.concat(len(a)+len(b), string(a), string(b)))
}

func filterEscape(x *execution, v any, a *arguments) any {
	a.bind()
	return x.escaped(v)
}

func filterSafe(x *execution, v any, a *arguments) any {
	return marked(filterString(x, v, a))
}

// callMarked calls a filter of Python. Most filters take markup as a string. Some return markup for it.
func (x *execution) callMarked(name string, f builtin, v any, a *arguments) any {
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
	result := callNamed(x, name, f, unmarked(v), a)
	switch name {
	case "capitalize", "center", "indent", "last", "lower", "reverse", "trim", "upper":
		if isMarkup {
			result = marked(result)
		}
	}
	return result
}

// callTest calls a test. Only the test escaped tells markup from a string.
func (x *execution) callTest(name string, f builtin, v any, a *arguments) any {
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
func callMarkup(x *execution, name string, method builtin, v any, a *arguments) any {
	var inserted []any
	switch name {
	case "replace", "center", "ljust", "rjust":
		if len(a.names) > 0 {
			panic(failure{errors.New("takes no keyword arguments")})
		}
		inserted = a.positional[min(1, len(a.positional)):min(2, len(a.positional))]
	case "join": // of any values
		if len(a.positional) != 1 {
			break
		}
		items := x.iterate(a.positional[0])
		x.chargeList(len(items))
		inserted = slices.Clone(items)
		a.positional[0] = &values.List{Items: inserted}
	}
	for i, value := range inserted {
		inserted[i] = x.escaped(value)
	}
	return marked(method(x, v, a))
}
