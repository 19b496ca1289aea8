package jinja

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
	"unsafe"

	"kvepp/prompt/values"
)

// Dialect is an implementation of Jinja whose rules a template follows.
type Dialect uint8

// The dialects. MiniJinja differs from Python in these points that a template can observe:
//
//	what                               Python                     MiniJinja
//	{{ ["a", {"b": "c"}] }}            ['a', {'b': 'c'}]          ["a", {"b": "c"}]
//	{{ ("a", "b") }}                   ('a', 'b')                 ["a", "b"], and equal to that list
//	{{ 1e-7 ~ "" }}                    1e-07                      0.0000001; {{ 1e-7 }} is 1e-07 in both
//	schema.items                       the method                 the key; methods exist only where they are called
//	tojson(separators=.., sort_keys=.) as json.dumps              both are ignored; undefined is null
//	none|length, for x in none         errors                     0, no rounds
//	[] + [], x[1:], d.items(), range   lists and others           not "is sequence"
//	"a" is sequence, true is number    true                       false
//	select, map, ...                   generators, true           lists, true when not empty, read often
//	none[1:]                           an error                   an empty list
//	1 in "a1"                          an error                   true
//	"éx".find("x")                     1                          2: bytes
//	2.5|round                          2.0                        3.0
//	{% set x %}{% set y = 1 %}...      y ends with the block      y stays
//	a macro's default                  sees the parameters        does not; also replaces undefined arguments
//
// If MiniJinja has a result that this package does not know, the render ends with ErrUnsupported.
const (
	Python    Dialect = iota // Jinja2 3.1.6 as Transformers runs it
	MiniJinja                // minijinja 2.24.0 with pycompat and the filters of dynamo-renderer 8.0.3
)

// ErrUnsupported is wrapped by the error of a render whose result this package cannot reproduce.
var ErrUnsupported = values.ErrUnsupported

func unsupported(format string, args ...any) error {
	return fmt.Errorf("jinja: %w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

// checkSource rejects source that the lexer reads differently from the dialect.
func (d Dialect) checkSource(source string) error {
	if d != MiniJinja {
		return nil
	}
	if strings.Contains(source, "\r") {
		return unsupported("a carriage return in a template")
	}
	for rest := source; ; {
		_, tag, found := strings.Cut(rest, "{%")
		if !found {
			return nil
		}
		if strings.HasPrefix(strings.TrimLeft(tag, "-+ \t\n"), "raw") {
			return unsupported("a raw block")
		}
		rest = tag
	}
}

func (d Dialect) filter(name string) (builtin, bool) {
	if d == MiniJinja {
		if f, ok := miniFilters[name]; ok {
			return f, true
		}
	}
	if slices.Contains(missingFilters, name) {
		return unsupportedFilter, true
	}
	f, ok := filters[name]
	return f, ok
}

func (d Dialect) test(name string) (builtin, bool) {
	if d == MiniJinja {
		if f, ok := miniTests[name]; ok {
			return f, true
		}
	}
	if slices.Contains(missingTests, name) {
		return unsupportedFilter, true
	}
	f, ok := tests[name]
	return f, ok
}

// MiniJinja's own filters, tests and methods. Other filters and tests are Python's. Methods that are neither here nor
// in miniStringMethod do not exist.
var miniFilters, miniTests, miniStringMethods, miniDictMethods map[string]builtin

func init() {
	miniFilters = map[string]builtin{
		"capitalize": asciiFilter("capitalize"),
		"d":          miniDefault,
		"default":    miniDefault,
		"e":          unsupportedFilter,
		"escape":     unsupportedFilter,
		"float":      miniNumber("float"),
		"format":     unsupportedFilter,
		"from_json":  miniFromJSON,
		"fromjson":   miniFromJSON,
		"indent":     miniIndent,
		"int":        miniNumber("int"),
		"length":     miniLength,
		"max":        miniExtreme("max"),
		"min":        miniExtreme("min"),
		"round":      miniRound,
		"safe":       filterString,
		"title":      miniTitle,
		"tojson":     miniToJSON,
	}
	miniTests = map[string]builtin{
		"escaped":  unsupportedFilter,
		"iterable": kindTest(func(v any) bool { return v == nil || isIterable(v) }),
		"number": kindTest(func(v any) bool {
			_, isBool := v.(bool)
			return !isBool && isNumber(v)
		}),
		"sequence": kindTest(func(v any) bool {
			l, ok := v.(*values.List)
			return ok && (l.Kind == values.PlainList || l.Kind == values.Tuple)
		}),
		"mapping": kindTest(func(v any) bool {
			switch v.(type) {
			case *values.Dict, *namespace:
				return true
			}
			return false
		}),
	}
	miniStringMethods = map[string]builtin{
		"capitalize": miniFilters["capitalize"],
		"find":       miniFind(strings.Index),
		"format":     miniFormat,
		"isalnum":    unsupportedMethod,
		"isalpha":    miniRunes(unicode.IsLetter),
		"isdigit":    miniRunes(unicode.IsNumber),
		"islower":    unsupportedMethod,
		"isnumeric":  unsupportedMethod,
		"isupper":    unsupportedMethod,
		"join":       miniJoin,
		"rfind":      miniFind(strings.LastIndex),
		"title":      miniTitle,
	}
	miniDictMethods = map[string]builtin{
		"get":    methodGet,
		"items":  methodItems,
		"keys":   methodKeys,
		"values": methodValues,
	}
}

// miniStringMethod returns a method of strings, or nil. The methods named here are Python's.
func miniStringMethod(name string) builtin {
	switch name {
	case "count", "endswith", "isspace", "lower", "lstrip", "replace", "rstrip", "split", "splitlines",
		"startswith", "strip", "upper":
		return stringMethods[name]
	}
	return miniStringMethods[name]
}

func unsupportedFilter(*execution, any, *arguments) any {
	panic(failure{unsupported("this filter, test or method")})
}

// callFilter calls a filter.
func (x *execution) callFilter(name string, f builtin, v any, a *arguments) any {
	if !x.mini {
		return x.callMarked(name, f, v, a)
	}
	result := callNamed(x, name, f, v, a)
	if l, ok := result.(*values.List); ok && (name == "items" || name == "reverse") {
		l.Kind = values.View
	}
	return result
}

// applyMini calls a method of a value in MiniJinja.
func (l *methodLink) applyMini(s *scope, v any) any {
	a := l.arguments.eval(s)
	var method builtin
	switch c := v.(type) {
	case string:
		s.x.step(1)
		method = miniStringMethod(l.name)
	case *values.Dict:
		if method = miniDictMethods[l.name]; method == nil {
			if own, ok := c.Get(l.name); ok {
				return s.x.call(own, a)
			}
		}
	case *values.List:
		if l.name == "count" && (c.Kind == values.PlainList || c.Kind == values.Tuple) {
			method = methodListCount
		}
	default:
		return s.x.call(s.x.attribute(v, l.name), a)
	}
	if method == nil {
		panic(failure{fmt.Errorf("%s has no method named %s", kindName(v), l.name)})
	}
	return callNamed(s.x, l.name, method, v, a)
}

func allLiterals(items []expression) bool {
	for _, item := range items {
		if _, ok := item.(literal); !ok {
			return false
		}
	}
	return true
}

// miniDefault evaluates a macro's default value in the scope that defines the macro.
func (m *macro) miniDefault(s *scope, fallback expression) any {
	outer := &scope{x: s.x, frame: s.frame.parent, out: s.out}
	return fallback.eval(outer)
}

// display is the text of a value that becomes part of another text. In MiniJinja such floats have no exponent.
func (x *execution) display(v any) string {
	if f, ok := v.(float64); ok && x.mini && !math.IsInf(f, 0) {
		if math.IsNaN(f) {
			return "NaN"
		}
		text := strconv.FormatFloat(f, 'f', -1, 64)
		if !strings.Contains(text, ".") {
			text += ".0"
		}
		return text
	}
	return x.str(v)
}

// miniDebug is the text of a value within a list or dict, in the format of Rust's Debug. ok is false for lists and
// dicts, and for values whose text is the same in Python.
func miniDebug(v any) (text string, ok bool) {
	switch c := v.(type) {
	case float64:
		a := math.Abs(c)
		switch {
		case math.IsNaN(c):
			return "NaN", true
		case a != 0 && (a < 1e-4 || a >= 1e16) && !math.IsInf(c, 0):
			text = strconv.FormatFloat(c, 'e', -1, 64)
			mantissa, exponent, _ := strings.Cut(text, "e")
			n, _ := strconv.Atoi(exponent)
			return mantissa + "e" + strconv.Itoa(n), true
		}
		return "", false
	case Undefined:
		return "undefined", true
	case *loop, *function:
		panic(failure{unsupported("printing a %s", kindName(v))})
	}
	return "", false
}

// debugString writes a string in the format of Rust's Debug.
func (x *execution) debugString(out *output, s string) {
	out.write(`"`)
	out.writeEach(s, appendDebug)
	out.write(`"`)
}

// appendDebug appends s in the format of Rust's Debug, without the quotes.
func appendDebug(b []byte, s string) []byte {
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == 0:
			b = append(b, `\0`...)
		case r >= 0x20 && r < 0x7F:
			b = append(b, byte(r))
		case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cc, unicode.Cf, unicode.Co, unicode.Zs, unicode.Zl,
			unicode.Zp):
			b = append(strconv.AppendInt(append(b, `\u{`...), int64(r), 16), '}')
		case unicode.In(r, unicode.L, unicode.N, unicode.P, unicode.S):
			b = utf8.AppendRune(b, r)
		default: // some of Mc, and characters that a newer Unicode may assign
			panic(failure{unsupported("printing U+%04X within a list or dict", r)})
		}
	}
	return b
}

// miniArithmetic computes where MiniJinja differs from Python; done is false for other cases.
func miniArithmetic(op string, left, right any) (v any, done bool) {
	_, leftText := left.(string)
	switch op {
	case "%", "//", "/", "**":
	default:
		return nil, false
	}
	if leftText {
		panic(failure{unsupportedOperands(op, left, right)})
	}
	b, bNumber := asFloat(right)
	a, aNumber := asFloat(left)
	if !aNumber || !bNumber {
		return nil, false
	}
	_, leftFloat := left.(float64)
	_, rightFloat := right.(float64)
	switch {
	case op == "**" && b < 0, op != "**" && b == 0:
		panic(failure{unsupported("%v %s %v", left, op, right)})
	case op == "%" && (leftFloat || rightFloat):
		return math.Mod(a, b), true
	case (op == "//" || op == "%") && b < 0:
		panic(failure{unsupported("%v %s %v", left, op, right)})
	}
	return nil, false
}

// miniSlice slices values that Python cannot slice; done is false for other cases.
func (x *execution) miniSlice(v any, bounds [3]any) (out any, done bool) {
	for _, b := range bounds {
		if _, ok := b.(int64); b != nil && !ok {
			panic(failure{unsupported("a slice with a bound of %s", kindName(b))})
		}
	}
	empty := false
	switch c := v.(type) {
	case nil, Undefined:
		return &values.List{Kind: values.View}, true
	case string:
		empty = c == ""
	case *values.List:
		empty = len(c.Items) == 0
	default:
		panic(failure{fmt.Errorf("value of type %s cannot be sliced", kindName(v))})
	}
	if step, ok := bounds[2].(int64); ok && step < 0 && (step != -1 || bounds[0] != nil || bounds[1] != nil || empty) {
		panic(failure{unsupported("a slice with a negative step")})
	}
	return nil, false
}

// miniStrftime rejects directives that the Rust crate chrono formats differently from the C library.
func miniStrftime(format string) {
	for rest := format; ; {
		_, directive, found := strings.Cut(rest, "%")
		if !found {
			return
		}
		directive = strings.TrimPrefix(directive, "-")
		if directive == "" || !strings.ContainsRune("aAbBdeFHhIjmMpRSTyY%", rune(directive[0])) {
			panic(failure{unsupported("strftime_now(%q)", format)})
		}
		rest = directive[1:]
	}
}

// miniDefault is the filter default. The keyword argument boolean counts as true with any value.
func miniDefault(x *execution, v any, a *arguments) any {
	if len(a.names) == 0 {
		return filterDefault(x, v, a)
	}
	if len(a.names) == 1 && a.names[0] == "boolean" && len(a.positional) == 1 {
		return filterDefault(x, v, &arguments{positional: []any{a.positional[0], true}})
	}
	panic(failure{unsupported("the filter default with arguments by name")})
}

// miniNumber is the filter int or float. MiniJinja's fail where Python's return a default.
func miniNumber(kind string) builtin {
	python := filterInt
	if kind == "float" {
		python = filterFloat
	}
	return func(x *execution, v any, a *arguments) any {
		if len(a.names)+len(a.positional) > 0 {
			panic(failure{unsupported("the filter %s with arguments", kind)})
		}
		switch c := v.(type) {
		case int64, bool:
			return python(x, v, a)
		case float64:
			if math.Abs(c) < 1<<53 {
				return python(x, v, a)
			}
		case string:
			if c != "" && strings.Trim(c, "0123456789.") == "" && len(c) < 16 && strings.Count(c, ".") < 2 && c != "." {
				return python(x, v, a)
			}
		}
		panic(failure{unsupported("the filter %s of this value", kind)})
	}
}

func miniLength(x *execution, v any, a *arguments) any {
	switch v.(type) {
	case string, *values.List, *values.Dict:
		return filterLength(x, v, a)
	case nil, bool, int64, float64, Undefined:
		return int64(0)
	}
	panic(failure{unsupported("the length of a %s", kindName(v))})
}

// miniExtreme is the filter min or max. MiniJinja's are case-sensitive.
func miniExtreme(kind string) builtin {
	return func(x *execution, v any, a *arguments) any {
		if len(a.names)+len(a.positional) > 0 {
			panic(failure{unsupported("the filter %s with arguments", kind)})
		}
		return filters[kind](x, v, &arguments{positional: []any{true}})
	}
}

// miniRound rounds halves away from zero and does not change integers.
func miniRound(_ *execution, v any, a *arguments) any {
	p := a.bind("precision=")
	places, ok := smallInt(orDefault(p[0], int64(0)))
	if !ok || places < 0 || places > 15 {
		panic(failure{unsupported("the filter round with this precision")})
	}
	switch c := v.(type) {
	case int64:
		return c
	case float64:
		scale := math.Pow10(places)
		return math.Round(scale*c) / scale
	}
	panic(failure{fmt.Errorf("type %s cannot be rounded", kindName(v))})
}

func asciiFilter(name string) builtin {
	return func(x *execution, v any, a *arguments) any {
		s := x.display(v)
		if !isASCII(s) {
			panic(failure{unsupported("the filter %s of more than ASCII", name)})
		}
		return filters[name](x, s, a)
	}
}

// miniTitle starts words after white space and punctuation.
func miniTitle(x *execution, v any, a *arguments) any {
	a.bind()
	s := x.display(v)
	if !isASCII(s) {
		panic(failure{unsupported("the filter title of more than ASCII")})
	}
	x.chargeString(len(s))
	count := x.meter(s)
	b := []byte(s)
	start := true
	for i, c := range b {
		count.at(i)
		word := isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'z'
		switch {
		case word && start:
			b[i] = strings.ToUpper(s[i : i+1])[0]
		case word:
			b[i] = strings.ToLower(s[i : i+1])[0]
		}
		start = !word && c >= 0x20 && c != 0x7F || c == ' ' || c >= '\t' && c <= '\r'
	}
	return unsafe.String(unsafe.SliceData(b), len(b))
}

const (
	// mostFromJSON is the longest text that fromjson accepts, in bytes.
	mostFromJSON = 1 << 20
	// fromJSONMemory is the memory of the values for each byte of the text, in bytes.
	fromJSONMemory = 32
)

func miniFromJSON(x *execution, v any, a *arguments) any {
	a.bind()
	s, ok := v.(string)
	if !ok {
		return v
	}
	if len(s) > mostFromJSON {
		panic(failure{fmt.Errorf("%w: fromjson of more than %d bytes", ErrLimit, mostFromJSON)})
	}
	x.step(1 + len(s))
	x.alloc(fromJSONMemory * len(s))
	parsed, err := values.ParseJSON([]byte(s))
	if err != nil {
		panic(failure{unsupported("%v", err)})
	}
	if err := values.CheckRustNumbers(parsed); err != nil {
		panic(failure{err})
	}
	return parsed
}

// miniIndent removes one line end at the end of the text. Only \n separates lines.
func miniIndent(x *execution, v any, a *arguments) any {
	p := a.bind("width=", "first=", "blank=")
	s := x.display(v)
	width, ok := smallInt(orDefault(p[0], int64(4)))
	if !ok || width < 0 {
		panic(failure{unsupported("the filter indent with this width")})
	}
	first, blank := orDefault(p[1], false) == true, orDefault(p[2], false) == true
	s = strings.TrimSuffix(strings.TrimSuffix(s, "\n"), "\r")
	lines := x.split(s, "\n", -1, false).Items
	if width > x.limits.OutputBytes/len(lines) {
		x.checkSize(x.limits.OutputBytes + 1)
	}
	x.chargeString(len(s) + len(lines)*width)
	margin := strings.Repeat(" ", width)
	var b strings.Builder
	b.Grow(len(s) + len(lines)*width)
	for i, line := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		if (i > 0 || first) && (line != "" || blank) {
			b.WriteString(margin)
		}
		b.WriteString(text(line))
	}
	return strings.TrimSuffix(b.String(), "\r")
}

// miniToJSON ignores all arguments except indent.
func miniToJSON(x *execution, v any, a *arguments) any {
	if len(a.positional) > 0 {
		panic(failure{errors.New("too many arguments")})
	}
	w := &jsonWriter{x: x, out: &output{x: x}, itemSeparator: ", ", keySeparator: ": "}
	indent, _ := a.named("indent")
	switch n := indent.(type) {
	case int64:
		if n < 0 {
			break
		}
		x.chargeString(int(n))
		w.indented, w.indent, w.itemSeparator = true, strings.Repeat(" ", int(n)), ","
	case nil, string:
	default:
		panic(failure{unsupported("tojson(indent=%s)", kindName(indent))})
	}
	err := x.try(func() { w.value(v) })
	switch {
	case errors.Is(err, ErrLimit) || err != nil && x.ctx.Err() != nil:
		panic(failure{err})
	case err != nil:
		panic(failure{unsupported("%v", err)})
	}
	return w.out.text()
}

// miniRunes tests whether every character satisfies is. An empty text passes.
func miniRunes(is func(rune) bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		a.bind()
		count := x.meter(text(v))
		for i, r := range text(v) {
			count.at(i)
			if !is(r) {
				if r >= 0x80 { // Rust's Unicode properties differ from Go's tables there
					panic(failure{unsupported("the kind of U+%04X", r)})
				}
				return false
			}
		}
		return true
	}
}

// miniFind returns positions in bytes.
func miniFind(search func(s, substring string) int) builtin {
	return func(x *execution, v any, a *arguments) any {
		p := a.bind("sub")
		sub := wantString("sub", p[0])
		x.chargeBytes(2 * (len(text(v)) + len(sub)))
		return int64(search(text(v), sub))
	}
}

// miniJoin joins values of any type.
func miniJoin(x *execution, v any, a *arguments) any {
	p := a.bind("iterable")
	items := x.iterate(p[0])
	return x.join(text(v), items)
}

func miniFormat(x *execution, v any, a *arguments) any {
	for _, arg := range append(append([]any(nil), a.positional...), a.values...) {
		switch arg.(type) {
		case string, int64:
		default:
			panic(failure{unsupported("format of a %s", kindName(arg))})
		}
	}
	x.chargeBytes(2 * len(text(v)))
	if strings.ContainsAny(text(v), ":!") {
		panic(failure{unsupported("a format specification")})
	}
	return methodFormat(x, v, a)
}
