package jinja

import (
	"errors"
	"math/big"
	"slices"

	"kvepp/prompt/values"
)

// tests are Jinja2's tests.
var tests map[string]builtin

// The table is filled in init because select and similar filters look up tests.
func init() {
	tests = map[string]builtin{
		"boolean":     kindTest(func(v any) bool { _, ok := v.(bool); return ok }),
		"callable":    kindTest(isCallable),
		"defined":     kindTest(func(v any) bool { return !isUndefined(v) }),
		"divisibleby": testDivisibleBy,
		"escaped":     kindTest(func(v any) bool { _, ok := v.(markup); return ok }),
		"even":        parityTest(0),
		"false":       kindTest(func(v any) bool { return v == false }),
		"filter":      tableTest(isFilter),
		"float":       kindTest(func(v any) bool { _, ok := v.(float64); return ok }),
		"in":          testIn,
		"integer":     kindTest(isInteger),
		"iterable":    kindTest(isIterable),
		"lower":       textTest(isLowerText),
		"mapping":     kindTest(func(v any) bool { _, ok := v.(*values.Dict); return ok }),
		"none":        kindTest(func(v any) bool { return v == nil }),
		"number":      kindTest(isNumber),
		"odd":         parityTest(1),
		"sameas":      testSameAs,
		"sequence":    kindTest(isSequence),
		"string":      kindTest(func(v any) bool { _, ok := v.(string); return ok }),
		"test":        tableTest(func(name string) bool { return tests[name] != nil }),
		"true":        kindTest(func(v any) bool { return v == true }),
		"undefined":   kindTest(isUndefined),
		"upper":       textTest(isUpperText),
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

func kindTest(is func(any) bool) builtin {
	return func(_ *execution, v any, a *arguments) (any, error) {
		_, err := a.bind()
		return is(v), err
	}
}

func isFilter(name string) bool { return filters[name] != nil || slices.Contains(missingFilters, name) }

func isUndefined(v any) bool { _, ok := v.(Undefined); return ok }

func isInteger(v any) bool {
	switch v.(type) {
	case int64, *big.Int:
		return true
	}
	return false
}

func isCallable(v any) bool {
	switch v.(type) {
	case *function, *loop, Undefined: // Undefined has a __call__ that raises
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
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		remainder, err := x.arithmetic("%", v, int64(2))
		if err != nil {
			return nil, err
		}
		return x.equal(remainder, want)
	}
}

func testDivisibleBy(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("num")
	if err != nil {
		return nil, err
	}
	remainder, err := x.arithmetic("%", v, p[0])
	if err != nil {
		return nil, err
	}
	return x.equal(remainder, int64(0))
}

func compareTest(op string) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("other")
		if err != nil {
			return nil, err
		}
		return x.compare(op, v, p[0])
	}
}

func testIn(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("seq")
	if err != nil {
		return nil, err
	}
	return x.contains(p[0], v)
}

// testSameAs is Python's "is". For numbers and strings its result depends on how Python stores them.
func testSameAs(_ *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("other")
	if err != nil {
		return nil, err
	}
	switch v.(type) {
	case nil, bool, *values.List, *values.Dict, *namespace, *loop, *function, *generator:
		return v == p[0], nil
	}
	if kindName(v) != kindName(p[0]) {
		return false, nil
	}
	return nil, unsupported("the identity of a %s", kindName(v))
}

func textTest(test func(x *execution, s string) (bool, error)) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		s, err := x.str(v)
		if err != nil {
			return nil, err
		}
		return test(x, s)
	}
}

func tableTest(has func(string) bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		name, ok := v.(string)
		if !ok {
			return nil, errors.New("expected a name")
		}
		return has(name), x.chargeLookup(name)
	}
}
