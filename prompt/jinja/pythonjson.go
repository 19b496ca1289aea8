package jinja

import (
	"context"
	"fmt"
)

// JSONFormat are arguments of Python's json.dumps. The zero JSONFormat prints text beyond ASCII as it is, keys in their
// order, and a space after commas and colons.
type JSONFormat struct {
	// ASCII is ensure_ascii: text beyond ASCII becomes escapes.
	ASCII bool
	// Compact is separators=(",", ":"): no spaces.
	Compact bool
	// SortKeys is sort_keys.
	SortKeys bool
}

// PythonJSON formats a value as Python's json.dumps does. Errors: ErrLimit, ctx's error, and those of values that
// Python cannot print either.
func PythonJSON(ctx context.Context, v any, format JSONFormat, limits Limits) (string, error) {
	x := newExecution(ctx, pythonJSON, limits.withDefaults())
	w := &jsonWriter{
		x: x, out: &output{x: x}, ascii: format.ASCII, itemSeparator: ", ", keySeparator: ": ",
		sortKeys: format.SortKeys,
	}
	if format.Compact {
		w.itemSeparator, w.keySeparator = ",", ":"
	}
	text := ""
	err := x.try(func() {
		w.value(v)
		text = w.out.text()
	})
	if err != nil {
		return "", fmt.Errorf("JSON: %w", err)
	}
	return text, nil
}

// pythonJSON stands for a template where there is none.
var pythonJSON = &Template{name: "json.dumps", dialect: Python}

// Truth reports whether Python takes a value for true: not None, False, zero, or empty.
func Truth(v any) bool { return truth(v) }
