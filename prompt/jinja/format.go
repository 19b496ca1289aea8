package jinja

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// floatText is Python's repr of a float.
func floatText(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	case math.IsNaN(f):
		return "nan"
	}
	a := math.Abs(f)
	if a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	if f == math.Trunc(f) {
		return strconv.FormatFloat(f, 'f', 1, 64)
	}
	return strconv.FormatFloat(f, 'f', -1, 64)
}

// intText returns the digits of an integer. Like Python, it refuses more than 4,300.
func intText(n *big.Int) string {
	text := n.String()
	if len(text) > values.MaxIntDigits+1 {
		panic(failure{errors.New("exceeds the limit for integer string conversion")})
	}
	return text
}

// str is Python's str(), the text that a template prints.
func (x *execution) str(v any) string {
	switch c := v.(type) {
	case string:
		return c
	case markup:
		return string(c)
	case Undefined:
		return ""
	}
	if n, ok := v.(*big.Int); ok {
		x.chargeDigits(n)
	}
	if text, ok := scalarText(v); ok {
		return text
	}
	if n, ok := v.(*namespace); ok && x.mini && n.values.Len() < 2 {
		v = n.values
	}
	out := &output{x: x}
	x.repr(out, v)
	return out.text()
}

// chargeDigits counts the work of formatting an integer.
func (x *execution) chargeDigits(n *big.Int) {
	x.chargeBigInt(n)
	x.step(n.BitLen() / charactersPerStep)
}

// scalarText returns the text of None, a bool or a number; ok is false for other values.
func scalarText(v any) (text string, ok bool) {
	switch c := v.(type) {
	case nil:
		return "None", true
	case bool:
		if c {
			return "True", true
		}
		return "False", true
	case int64:
		return strconv.FormatInt(c, 10), true
	case *big.Int:
		return intText(c), true
	case float64:
		return floatText(c), true
	}
	return "", false
}

// repr writes Python's repr().
func (x *execution) repr(out *output, v any) {
	x.step(1)
	if x.mini {
		if s, ok := v.(string); ok {
			x.debugString(out, s)
			return
		}
		if text, ok := miniDebug(v); ok {
			out.write(text)
			return
		}
	}
	if n, ok := v.(*big.Int); ok {
		x.chargeDigits(n)
	}
	if text, ok := scalarText(v); ok {
		out.write(text)
		return
	}
	switch c := v.(type) {
	case string:
		x.reprString(out, c)
	case markup:
		out.write("Markup(")
		x.reprString(out, string(c))
		out.write(")")
	case Undefined:
		out.write("Undefined")
	case *values.List:
		x.reprList(out, c)
	case *values.Dict:
		x.reprDict(out, c)
	case *namespace:
		if x.mini {
			panic(failure{unsupported("the order of a namespace's names")})
		}
		out.write("<Namespace ")
		x.reprDict(out, c.values)
		out.write(">")
	case *loop:
		c.has(x, math.MaxInt)
		out.write(fmt.Sprintf("<LoopContext %d/%d>", c.index+1, len(c.items)))
	default:
		f, ok := v.(*function)
		if !ok || !f.macro {
			panic(failure{unsupported("a %s prints as its address, which is different in each process", kindName(v))})
		}
		out.write("<Macro ")
		x.reprString(out, f.name)
		out.write(">")
	}
}

func (x *execution) reprList(out *output, l *values.List) {
	open, end := "[", "]"
	kind := l.Kind
	if x.mini {
		kind = values.PlainList
	}
	switch kind {
	case values.Tuple:
		open, end = "(", ")"
		if len(l.Items) == 1 {
			end = ",)"
		}
	case values.Range, values.View:
		panic(failure{unsupported("printing a %s", kindName(l))})
	}
	x.enter()
	defer x.leave()
	out.write(open)
	for i, item := range l.Items {
		if i > 0 {
			out.write(", ")
		}
		x.repr(out, item)
	}
	out.write(end)
}

func (x *execution) reprDict(out *output, d *values.Dict) {
	x.enter()
	defer x.leave()
	separator := "{"
	for key, value := range d.All() {
		out.write(separator)
		separator = ", "
		x.repr(out, key)
		out.write(": ")
		x.repr(out, value)
	}
	if d.Len() == 0 {
		out.write("{")
	}
	out.write("}")
}

// reprString writes Python's repr() of a string.
func (x *execution) reprString(out *output, s string) {
	x.chargeBytes(2 * len(s))
	quote := "'"
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = `"`
	}
	out.write(quote)
	out.writeEach(s, func(to []byte, s string) []byte { return appendRepr(to, s, rune(quote[0])) })
	out.write(quote)
}

// appendRepr appends s in the format of Python's repr(), without the quotes.
func appendRepr(to []byte, s string, quote rune) []byte {
	for _, r := range s {
		switch {
		case r == quote || r == '\\':
			to = append(to, '\\', byte(r))
		case r == '\n':
			to = append(to, `\n`...)
		case r == '\r':
			to = append(to, `\r`...)
		case r == '\t':
			to = append(to, `\t`...)
		case unicode.IsPrint(r):
			to = utf8.AppendRune(to, r)
		case r < 0x100:
			to = values.AppendHex(append(to, `\x`...), r, 2)
		case r < 0x10000:
			to = values.AppendHex(append(to, `\u`...), r, 4)
		default:
			to = values.AppendHex(append(to, `\U`...), r, 8)
		}
	}
	return to
}

// join is Python's separator.join of the values' str().
func (x *execution) join(separator string, values []any) string {
	x.step(1 + len(values))
	if len(values) > 8 {
		x.alloc(16 * len(values))
	}
	texts := make([]string, 0, max(8, len(values)))
	total := 0
	for _, v := range values {
		s := x.display(v)
		texts = append(texts, s)
		total += len(s) + len(separator)
		x.checkSize(total - len(separator))
	}
	if separator == "" && len(texts) > 0 {
		return x.concat(total, texts...)
	}
	x.chargeString(total)
	return strings.Join(texts, separator)
}

// jsonWriter implements json.dumps.
type jsonWriter struct {
	x             *execution
	out           *output
	ascii         bool
	indented      bool
	indent        string
	itemSeparator string
	keySeparator  string
	sortKeys      bool
	depth         int
}

func (w *jsonWriter) newline() {
	if !w.indented {
		return
	}
	w.out.write("\n")
	for range w.depth {
		w.out.write(w.indent)
	}
}

func (w *jsonWriter) value(v any) {
	w.x.step(1)
	if _, undefined := v.(Undefined); undefined && w.x.mini {
		v = nil
	}
	switch c := v.(type) {
	case nil:
		w.out.write("null")
	case string:
		w.string(c)
	case markup:
		w.string(string(c))
	case *values.List:
		if c.Kind != values.PlainList && c.Kind != values.Tuple && !w.x.mini {
			panic(notSerializable(v))
		}
		w.list(c)
	case *values.Dict:
		w.dict(c)
	case *big.Int:
		w.x.chargeDigits(c)
		w.out.write(jsonScalar(c))
	case float64:
		if w.x.mini && (math.IsNaN(c) || math.IsInf(c, 0)) {
			w.out.write("null")
		} else {
			w.out.write(jsonScalar(c))
		}
	case bool, int64:
		w.out.write(jsonScalar(c))
	default:
		panic(notSerializable(v))
	}
}

func notSerializable(v any) failure {
	return failure{fmt.Errorf("object of type %s is not JSON serializable", kindName(v))}
}

// jsonScalar returns the JSON of a number or bool. For values that JSON does not have it returns Python's names.
func jsonScalar(v any) string {
	switch c := v.(type) {
	case bool:
		return strconv.FormatBool(c)
	case float64:
		switch {
		case math.IsNaN(c):
			return "NaN"
		case math.IsInf(c, 1):
			return "Infinity"
		case math.IsInf(c, -1):
			return "-Infinity"
		}
	}
	text, _ := scalarText(v)
	return text
}

// nested writes n elements between brackets.
func (w *jsonWriter) nested(open, end string, n int, element func(i int)) {
	if n == 0 {
		w.out.write(open + end)
		return
	}
	w.x.enter()
	defer w.x.leave()
	w.out.write(open)
	w.depth++
	for i := range n {
		if i > 0 {
			w.out.write(w.itemSeparator)
		}
		w.newline()
		element(i)
	}
	w.depth--
	w.newline()
	w.out.write(end)
}

func (w *jsonWriter) list(l *values.List) {
	w.nested("[", "]", len(l.Items), func(i int) { w.value(l.Items[i]) })
}

func (w *jsonWriter) dict(d *values.Dict) {
	keys, values := d.Keys(), d.Values()
	if w.sortKeys {
		w.x.chargeList(2 * len(keys))
		order := w.x.sorted(len(keys), func(i, j int) bool {
			order, _ := w.x.order("<", keys[i], keys[j])
			return order < 0
		})
		keys, values = pick(keys, order), pick(values, order)
	}
	w.nested("{", "}", len(keys), func(i int) {
		w.x.chargeLookup(keys[i]) // counts the digits of a large integer
		w.string(jsonKey(keys[i]))
		w.out.write(w.keySeparator)
		w.value(values[i])
	})
}

func jsonKey(key any) string {
	switch k := key.(type) {
	case string:
		return k
	case markup:
		return string(k)
	case nil:
		return "null"
	case Undefined:
		panic(failure{errors.New("keys must be str, int, float, bool or None, not Undefined")})
	}
	return jsonScalar(key)
}

// pick returns the items at the given positions.
func pick(items []any, order []int) []any {
	picked := make([]any, len(order))
	for i, at := range order {
		picked[i] = items[at]
	}
	return picked
}

// sorted returns the positions 0 to n-1 in a stable sorted order.
func (x *execution) sorted(n int, less func(i, j int) bool) []int {
	x.chargeList(n)
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		switch {
		case less(i, j):
			return -1
		case less(j, i):
			return 1
		}
		return 0
	})
	return order
}

// string writes a string as JSON.
func (w *jsonWriter) string(s string) {
	w.x.chargeBytes(len(s))
	if values.CleanJSON(s, w.ascii) {
		w.out.write(`"`, s, `"`)
		return
	}
	w.out.write(`"`)
	escape := func(to []byte, s string) []byte { return values.AppendJSON(to, s, w.ascii) }
	w.out.writeEach(s, escape)
	w.out.write(`"`)
}

// percentFormat is format % operands, for the conversions that templates use: s and d, with width. If the format is
// marked, it escapes the values' texts.
func (x *execution) percentFormat(format string, operands any, marked bool) string {
	single := []any{operands}
	if l, ok := operands.(*values.List); ok && l.Kind == values.Tuple {
		single = l.Items
	}
	used := 0
	next := func() any {
		if used >= len(single) {
			panic(failure{errors.New("not enough arguments for format string")})
		}
		used++
		return single[used-1]
	}
	out := &output{x: x}
	for format != "" {
		text, rest, found := strings.Cut(format, "%")
		x.step(2)
		out.write(text)
		if !found {
			break
		}
		if rest, ok := strings.CutPrefix(rest, "%"); ok {
			format = rest
			out.write("%")
			continue
		}
		text, format = x.percentOne(rest, next, marked)
		out.write(text)
	}
	// Python takes a value with items for a mapping, which may stay unused.
	if used < len(single) && !slices.Contains([]string{"dict", "list", "range", "Undefined"}, kindName(operands)) {
		panic(failure{errors.New("not all arguments converted during string formatting")})
	}
	return out.text()
}

// maxFormatSpec bounds the width of a conversion, in bytes.
const maxFormatSpec = 256

// percentOne formats one conversion, after its percent sign.
func (x *execution) percentOne(spec string, next func() any, marked bool) (text, rest string) {
	if len(spec) > maxFormatSpec && strings.Trim(spec[:maxFormatSpec], "0123456789") == "" {
		panic(failure{unsupported("a format specification of more than %d bytes", maxFormatSpec)})
	}
	zeros := strings.HasPrefix(spec, "0")
	conversion := strings.TrimLeft(spec, "0123456789")
	width := strings.TrimLeft(spec[:len(spec)-len(conversion)], "0")
	if conversion == "" {
		panic(failure{errors.New("incomplete format")})
	}
	switch conversion[0] {
	case 's':
		v := next()
		if text = x.str(v); marked {
			text = string(x.escaped(v))
		}
		zeros = false
	case 'd':
		n, ok := next().(int64)
		if !ok {
			panic(failure{unsupported("%%d of what is no integer of 64 bits")})
		}
		text = strconv.FormatInt(n, 10)
	default:
		panic(failure{unsupported("format character %q", conversion[0])})
	}
	if zeros {
		return x.pad(text, "0", width), conversion[1:]
	}
	return x.pad(text, " ", width), conversion[1:]
}

// pad widens text to a width in characters, with fill before it; zeros come behind a sign.
func (x *execution) pad(text, fill, width string) string {
	if width == "" {
		return text
	}
	columns, err := strconv.Atoi(width)
	if err != nil {
		columns = math.MaxInt
	}
	x.chargeBytes(len(text))
	missing := columns - utf8.RuneCountInString(text)
	if missing <= 0 {
		return text
	}
	x.checkSize(missing)
	x.chargeString(len(text) + missing)
	x.alloc(missing) // the padding
	if rest, negative := strings.CutPrefix(text, "-"); negative && fill == "0" {
		return "-" + strings.Repeat(fill, missing) + rest
	}
	return strings.Repeat(fill, missing) + text
}
