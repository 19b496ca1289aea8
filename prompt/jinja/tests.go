package jinja

import (
	"math/big"

	"kvepp/prompt/values"
)

// tests are Jinja2's tests, without missingTests.
var tests map[string]builtin

// The table is filled in init because select and similar filters look up tests.
func init() {
	tests = map[string]builtin{
		"boolean":   kindTest(func(v any) bool { _, ok := v.(bool); return ok }),
		"defined":   kindTest(func(v any) bool { return !isUndefined(v) }),
		"escaped":   kindTest(func(v any) bool { _, ok := v.(markup); return ok }),
		"even":      parityTest(0),
		"false":     kindTest(func(v any) bool { return v == false }),
		"float":     kindTest(func(v any) bool { _, ok := v.(float64); return ok }),
		"in":        testIn,
		"integer":   kindTest(isInteger),
		"iterable":  kindTest(isIterable),
		"mapping":   kindTest(func(v any) bool { _, ok := v.(*values.Dict); return ok }),
		"none":      kindTest(func(v any) bool { return v == nil }),
		"number":    kindTest(isNumber),
		"odd":       parityTest(1),
		"sequence":  kindTest(isSequence),
		"string":    kindTest(func(v any) bool { _, ok := v.(string); return ok }),
		"true":      kindTest(func(v any) bool { return v == true }),
		"undefined": kindTest(isUndefined),
	}
	for op, names := range map[string][]string{
		"==": {"==", "eq", "equalto"},
		"!=": {"!=", "ne"},
		">":  {">", "gt", "greaterthan"},
		">=": {">=", "ge"},
		"<":  {"<", "lt", "lessthan"},
		"<=": {"<=", "le"},
	} {
		for _, name := range names {
			tests[name] = compareTest(op)
		}
	}
}

// missingTests are Jinja2's tests that no known chat template uses and this package does not have.
var missingTests = []string{"callable", "divisibleby", "filter", "lower", "sameas", "test", "upper"}

func kindTest(is func(any) bool) builtin {
	return func(_ *execution, v any, a *arguments) any {
		a.bind()
		return is(v)
	}
}

func isUndefined(v any) bool { _, ok := v.(Undefined); return ok }

func isInteger(v any) bool {
	switch v.(type) {
	case int64, *big.Int:
		return true
	}
	return false
}

func isIterable(v any) bool {
	switch v.(type) {
	case string, *values.List, *values.Dict, Undefined, *loop, *generator:
		return true
	}
	return false
}

func isSequence(v any) bool {
	switch c := v.(type) {
	case string, *values.Dict, Undefined:
		return true
	case *values.List:
		return c.Kind != values.View
	}
	return false
}

func parityTest(want int64) builtin {
	return func(x *execution, v any, a *arguments) any {
		a.bind()
		remainder := x.arithmetic("%", v, int64(2))
		return x.equal(remainder, want)
	}
}

func compareTest(op string) builtin {
	return func(x *execution, v any, a *arguments) any {
		p := a.bind("other")
		return x.compare(op, v, p[0])
	}
}

func testIn(x *execution, v any, a *arguments) any {
	p := a.bind("seq")
	return x.contains(p[0], v)
}
