package jinja

import (
	"cmp"
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
	f, ok := tests[name]
	return f, ok
}

// MiniJinja's own filters, tests and methods. Other filters and tests are Python's. Methods that are neither here nor
// in miniStringMethod do not exist.
var miniFilters, miniTests, miniStringMethods, miniDictMethods map[string]builtin

func init() {
	miniFilters = map[string]builtin{
		"attr":        func(x *execution, v any, a *arguments) (any, error) { return miniAttr(x, v, a) },
		"capitalize":  asciiFilter("capitalize"),
		"center":      unsupportedFilter,
		"d":           miniDefault,
		"default":     miniDefault,
		"e":           unsupportedFilter,
		"escape":      unsupportedFilter,
		"float":       miniNumber("float"),
		"forceescape": unsupportedFilter,
		"format":      unsupportedFilter,
		"from_json":   miniFromJSON,
		"fromjson":    miniFromJSON,
		"indent":      miniIndent,
		"int":         miniNumber("int"),
		"length":      miniLength,
		"max":         miniExtreme("max"),
		"min":         miniExtreme("min"),
		"round":       miniRound,
		"safe":        filterString,
		"title":       miniTitle,
		"tojson":      miniToJSON,
		"truncate":    unsupportedFilter,
		"urlencode":   unsupportedFilter,
		"wordcount":   unsupportedFilter,
	}
	miniTests = map[string]builtin{
		"callable": unsupportedFilter,
		"escaped":  unsupportedFilter,
		"iterable": kindTest(func(v any) bool { return v == nil || isIterable(v) }),
		"lower":    miniCaseTest(unicode.IsLower),
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
		"upper": miniCaseTest(unicode.IsUpper),
	}
	miniStringMethods = map[string]builtin{
		"capitalize": miniTextMethod(miniFilters["capitalize"]),
		"find":       miniFind(strings.Index),
		"format":     miniFormat,
		"isalnum":    miniRunes(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }),
		"isalpha":    miniRunes(unicode.IsLetter),
		"isdigit":    miniRunes(unicode.IsNumber),
		"islower":    miniRunes(unicode.IsLower),
		"isnumeric":  miniRunes(unicode.IsNumber),
		"isupper":    miniRunes(unicode.IsUpper),
		"join":       miniJoin,
		"rfind":      miniFind(strings.LastIndex),
		"title":      miniTextMethod(miniTitle),
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
	case "count", "endswith", "isascii", "isspace", "lower", "lstrip", "replace", "rstrip", "split", "splitlines",
		"startswith", "strip", "upper":
		return stringMethods[name]
	}
	return miniStringMethods[name]
}

func unsupportedFilter(*execution, any, *arguments) (any, error) {
	return nil, unsupported("this filter, test or method")
}

// callFilter calls a filter.
func (x *execution) callFilter(name string, f builtin, v any, a *arguments) (any, error) {
	if !x.mini {
		return x.callMarked(name, f, v, a)
	}
	result, err := callNamed(x, name, f, v, a)
	if l, ok := result.(*values.List); ok && (name == "items" || name == "reverse") {
		l.Kind = values.View
	}
	return result, err
}

// applyMini calls a method of a value in MiniJinja.
func (l *methodLink) applyMini(s *scope, v any) (any, error) {
	a, err := l.arguments.eval(s)
	if err != nil {
		return nil, err
	}
	var method builtin
	switch c := v.(type) {
	case string:
		if err := s.x.step(1); err != nil {
			return nil, err
		}
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
		f, err := s.x.attribute(v, l.name)
		if err != nil {
			return nil, err
		}
		return s.x.call(f, a)
	}
	if method == nil {
		return nil, fmt.Errorf("%s has no method named %s", kindName(v), l.name)
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
func (m *macro) miniDefault(s *scope, fallback expression) (any, error) {
	outer := &scope{x: s.x, frame: s.frame.parent, out: s.out}
	return fallback.eval(outer)
}

// display is the text of a value that becomes part of another text. In MiniJinja such floats have no exponent.
func (x *execution) display(v any) (string, error) {
	if f, ok := v.(float64); ok && x.mini && !math.IsInf(f, 0) {
		if math.IsNaN(f) {
			return "NaN", nil
		}
		text := strconv.FormatFloat(f, 'f', -1, 64)
		if !strings.Contains(text, ".") {
			text += ".0"
		}
		return text, nil
	}
	return x.str(v)
}

// miniDebug is the text of a value within a list or dict, in the format of Rust's Debug. ok is false for lists and
// dicts, and for values whose text is the same in Python.
func miniDebug(v any) (text string, ok bool, err error) {
	switch c := v.(type) {
	case float64:
		a := math.Abs(c)
		switch {
		case math.IsNaN(c):
			return "NaN", true, nil
		case a != 0 && (a < 1e-4 || a >= 1e16) && !math.IsInf(c, 0):
			text = strconv.FormatFloat(c, 'e', -1, 64)
			mantissa, exponent, _ := strings.Cut(text, "e")
			n, _ := strconv.Atoi(exponent)
			return mantissa + "e" + strconv.Itoa(n), true, nil
		}
		return "", false, nil
	case Undefined:
		return "undefined", true, nil
	case *loop, *function:
		return "", false, unsupported("printing a %s", kindName(v))
	}
	return "", false, nil
}

// debugString writes a string in the format of Rust's Debug.
func (x *execution) debugString(out *output, s string) error {
	if err := out.write(`"`); err != nil {
		return err
	}
	var unknown error
	err := out.writeEach(s, func(to []byte, s string) []byte {
		to, err := appendDebug(to, s)
		if unknown == nil {
			unknown = err
		}
		return to
	})
	if err != nil || unknown != nil {
		return cmp.Or(err, unknown)
	}
	return out.write(`"`)
}

// appendDebug appends s in the format of Rust's Debug, without the quotes.
func appendDebug(b []byte, s string) ([]byte, error) {
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
			return b, unsupported("printing U+%04X within a list or dict", r)
		}
	}
	return b, nil
}

// miniArithmetic computes where MiniJinja differs from Python; done is false for other cases.
func miniArithmetic(op string, left, right any) (v any, done bool, err error) {
	_, leftText := left.(string)
	switch op {
	case "%", "//", "/", "**":
	default:
		return nil, false, nil
	}
	if leftText {
		return nil, true, unsupportedOperands(op, left, right)
	}
	b, bNumber := asFloat(right)
	a, aNumber := asFloat(left)
	if !aNumber || !bNumber {
		return nil, false, nil
	}
	_, leftFloat := left.(float64)
	_, rightFloat := right.(float64)
	switch {
	case op == "**" && b < 0, op != "**" && b == 0:
		return nil, true, unsupported("%v %s %v", left, op, right)
	case op == "%" && (leftFloat || rightFloat):
		return math.Mod(a, b), true, nil
	case (op == "//" || op == "%") && b < 0:
		return nil, true, unsupported("%v %s %v", left, op, right)
	}
	return nil, false, nil
}

// miniSlice slices values that Python cannot slice; done is false for other cases.
func (x *execution) miniSlice(v any, bounds [3]any) (out any, done bool, err error) {
	for _, b := range bounds {
		if _, ok := b.(int64); b != nil && !ok {
			return nil, true, unsupported("a slice with a bound of %s", kindName(b))
		}
	}
	empty := false
	switch c := v.(type) {
	case nil, Undefined:
		return &values.List{Kind: values.View}, true, nil
	case string:
		empty = c == ""
	case *values.List:
		empty = len(c.Items) == 0
	default:
		return nil, true, fmt.Errorf("value of type %s cannot be sliced", kindName(v))
	}
	if step, ok := bounds[2].(int64); ok && step < 0 && (step != -1 || bounds[0] != nil || bounds[1] != nil || empty) {
		return nil, true, unsupported("a slice with a negative step")
	}
	return nil, false, nil
}

// miniStrftime rejects directives that the Rust crate chrono formats differently from the C library.
func miniStrftime(format string) error {
	for rest := format; ; {
		_, directive, found := strings.Cut(rest, "%")
		if !found {
			return nil
		}
		directive = strings.TrimPrefix(directive, "-")
		if directive == "" || !strings.ContainsRune("aAbBdeFHhIjmMpRSTyY%", rune(directive[0])) {
			return unsupported("strftime_now(%q)", format)
		}
		rest = directive[1:]
	}
}

func miniAttr(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("name")
	if err != nil {
		return nil, err
	}
	return x.item(v, p[0])
}

// miniDefault is the filter default. The keyword argument boolean counts as true with any value.
func miniDefault(x *execution, v any, a *arguments) (any, error) {
	if len(a.names) == 0 {
		return filterDefault(x, v, a)
	}
	if len(a.names) == 1 && a.names[0] == "boolean" && len(a.positional) == 1 {
		return filterDefault(x, v, &arguments{positional: []any{a.positional[0], true}})
	}
	return nil, unsupported("the filter default with arguments by name")
}

// miniNumber is the filter int or float. MiniJinja's fail where Python's return a default.
func miniNumber(kind string) builtin {
	python := filterInt
	if kind == "float" {
		python = filterFloat
	}
	return func(x *execution, v any, a *arguments) (any, error) {
		if len(a.names)+len(a.positional) > 0 {
			return nil, unsupported("the filter %s with arguments", kind)
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
		return nil, unsupported("the filter %s of this value", kind)
	}
}

func miniLength(x *execution, v any, a *arguments) (any, error) {
	switch v.(type) {
	case string, *values.List, *values.Dict:
		return filterLength(x, v, a)
	case nil, bool, int64, float64, Undefined:
		return int64(0), nil
	}
	return nil, unsupported("the length of a %s", kindName(v))
}

// miniExtreme is the filter min or max. MiniJinja's are case-sensitive.
func miniExtreme(kind string) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if len(a.names)+len(a.positional) > 0 {
			return nil, unsupported("the filter %s with arguments", kind)
		}
		return filters[kind](x, v, &arguments{positional: []any{true}})
	}
}

// miniRound rounds halves away from zero and does not change integers.
func miniRound(_ *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("precision=")
	if err != nil {
		return nil, err
	}
	places, err := wantInt("precision", p[0], 0)
	if err != nil || places < 0 || places > 15 {
		return nil, unsupported("the filter round with this precision")
	}
	switch c := v.(type) {
	case int64:
		return c, nil
	case float64:
		scale := math.Pow10(places)
		return math.Round(scale*c) / scale, nil
	}
	return nil, fmt.Errorf("type %s cannot be rounded", kindName(v))
}

func asciiFilter(name string) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		s, err := x.display(v)
		if err != nil {
			return nil, err
		}
		if !isASCII(s) {
			return nil, unsupported("the filter %s of more than ASCII", name)
		}
		return filters[name](x, s, a)
	}
}

// miniTitle starts words after white space and punctuation.
func miniTitle(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	s, err := x.display(v)
	if err != nil {
		return nil, err
	}
	if !isASCII(s) {
		return nil, unsupported("the filter title of more than ASCII")
	}
	if err := x.chargeString(len(s)); err != nil {
		return nil, err
	}
	count := x.meter(s)
	b := []byte(s)
	start := true
	for i, c := range b {
		if err := count.at(i); err != nil {
			return nil, err
		}
		word := isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'z'
		switch {
		case word && start:
			b[i] = strings.ToUpper(s[i : i+1])[0]
		case word:
			b[i] = strings.ToLower(s[i : i+1])[0]
		}
		start = !word && c >= 0x20 && c != 0x7F || c == ' ' || c >= '\t' && c <= '\r'
	}
	return unsafe.String(unsafe.SliceData(b), len(b)), nil
}

func miniTextMethod(f builtin) builtin {
	return func(x *execution, v any, a *arguments) (any, error) { return f(x, v, a) }
}

const (
	// mostFromJSON is the longest text that fromjson accepts, in bytes.
	mostFromJSON = 1 << 20
	// fromJSONMemory is the memory of the values for each byte of the text, in bytes.
	fromJSONMemory = 32
)

func miniFromJSON(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	s, ok := v.(string)
	if !ok {
		return v, nil
	}
	if len(s) > mostFromJSON {
		return nil, fmt.Errorf("%w: fromjson of more than %d bytes", ErrLimit, mostFromJSON)
	}
	if err := x.step(1 + len(s)); err != nil {
		return nil, err
	}
	if err := x.alloc(fromJSONMemory * len(s)); err != nil {
		return nil, err
	}
	parsed, err := values.ParseJSON([]byte(s))
	if err != nil {
		return nil, unsupported("%v", err)
	}
	return parsed, values.CheckRustNumbers(parsed)
}

// miniIndent removes one line end at the end of the text. Only \n separates lines.
func miniIndent(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("width=", "first=", "blank=")
	if err != nil {
		return nil, err
	}
	s, err := x.display(v)
	if err != nil {
		return nil, err
	}
	width, err := wantInt("width", p[0], 4)
	if err != nil || width < 0 {
		return nil, unsupported("the filter indent with this width")
	}
	first, blank := orDefault(p[1], false) == true, orDefault(p[2], false) == true
	s = strings.TrimSuffix(strings.TrimSuffix(s, "\n"), "\r")
	split, err := x.split(s, "\n", -1, false)
	if err != nil {
		return nil, err
	}
	lines := split.Items
	if width > x.limits.OutputBytes/len(lines) {
		return nil, x.chargeString(x.limits.OutputBytes + 1)
	}
	if err := x.chargeString(len(s) + len(lines)*width); err != nil {
		return nil, err
	}
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
	return strings.TrimSuffix(b.String(), "\r"), nil
}

// miniToJSON ignores all arguments except indent.
func miniToJSON(x *execution, v any, a *arguments) (any, error) {
	if len(a.positional) > 0 {
		return nil, errors.New("too many arguments")
	}
	w := &jsonWriter{x: x, out: &output{x: x}, itemSeparator: ", ", keySeparator: ": "}
	indent, _ := a.named("indent")
	switch n := indent.(type) {
	case int64:
		if n < 0 {
			break
		}
		if n > int64(x.limits.OutputBytes) {
			return nil, x.chargeString(int(n))
		}
		if err := x.chargeString(int(n)); err != nil {
			return nil, err
		}
		w.indented, w.indent, w.itemSeparator = true, strings.Repeat(" ", int(n)), ","
	case nil, string:
	default:
		return nil, unsupported("tojson(indent=%s)", kindName(indent))
	}
	err := w.value(v)
	switch {
	case errors.Is(err, ErrLimit) || x.ctx.Err() != nil:
		return nil, err
	case err != nil:
		return nil, unsupported("%v", err)
	}
	return w.out.text()
}

func miniCaseTest(is func(rune) bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		s, err := x.display(v)
		if err != nil {
			return nil, err
		}
		return miniRunes(is)(x, s, a)
	}
}

// miniRunes tests whether every character satisfies is. An empty text passes.
func miniRunes(is func(rune) bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		count := x.meter(text(v))
		for i, r := range text(v) {
			if err := count.at(i); err != nil {
				return nil, err
			}
			if !is(r) {
				if r >= 0x80 { // Rust's Unicode properties differ from Go's tables there
					return nil, unsupported("the kind of U+%04X", r)
				}
				return false, nil
			}
		}
		return true, nil
	}
}

// miniFind returns positions in bytes.
func miniFind(search func(s, substring string) int) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("sub")
		if err != nil {
			return nil, err
		}
		sub, err := wantString("sub", p[0])
		if err != nil {
			return nil, err
		}
		if err := x.chargeBytes(2 * (len(text(v)) + len(sub))); err != nil {
			return nil, err
		}
		return int64(search(text(v), sub)), nil
	}
}

// miniJoin joins values of any type.
func miniJoin(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("iterable")
	if err != nil {
		return nil, err
	}
	items, err := x.iterate(p[0])
	if err != nil {
		return nil, err
	}
	return x.join(text(v), items)
}

func miniFormat(x *execution, v any, a *arguments) (any, error) {
	for _, arg := range append(append([]any(nil), a.positional...), a.values...) {
		switch arg.(type) {
		case string, int64:
		default:
			return nil, unsupported("format of a %s", kindName(arg))
		}
	}
	if err := x.chargeBytes(2 * len(text(v))); err != nil {
		return nil, err
	}
	if strings.ContainsAny(text(v), ":!") {
		return nil, unsupported("a format specification")
	}
	return methodFormat(x, v, a)
}
