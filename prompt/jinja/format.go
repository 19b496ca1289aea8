package jinja

import (
	"cmp"
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
func intText(n *big.Int) (string, error) {
	text := n.String()
	if len(text) > values.MaxIntDigits+1 {
		return "", errors.New("exceeds the limit for integer string conversion")
	}
	return text, nil
}

// str is Python's str(), the text that a template prints.
func (x *execution) str(v any) (string, error) {
	switch c := v.(type) {
	case string:
		return c, nil
	case markup:
		return string(c), nil
	case Undefined:
		return "", nil
	}
	if n, ok := v.(*big.Int); ok {
		if err := x.chargeDigits(n); err != nil {
			return "", err
		}
	}
	if text, ok, err := scalarText(v); ok {
		return text, err
	}
	if n, ok := v.(*namespace); ok && x.mini && n.values.Len() < 2 {
		v = n.values
	}
	out := &output{x: x}
	if err := x.repr(out, v); err != nil {
		return "", err
	}
	return out.text()
}

// chargeDigits counts the work of formatting an integer.
func (x *execution) chargeDigits(n *big.Int) error {
	if err := x.chargeBigInt(n); err != nil {
		return err
	}
	return x.step(n.BitLen() / charactersPerStep)
}

// scalarText returns the text of None, a bool or a number; ok is false for other values.
func scalarText(v any) (text string, ok bool, err error) {
	switch c := v.(type) {
	case nil:
		return "None", true, nil
	case bool:
		if c {
			return "True", true, nil
		}
		return "False", true, nil
	case int64:
		return strconv.FormatInt(c, 10), true, nil
	case *big.Int:
		text, err := intText(c)
		return text, true, err
	case float64:
		return floatText(c), true, nil
	}
	return "", false, nil
}

// repr writes Python's repr().
func (x *execution) repr(out *output, v any) error {
	if err := x.step(1); err != nil {
		return err
	}
	if x.mini {
		if s, ok := v.(string); ok {
			return x.debugString(out, s)
		}
		if text, ok, err := miniDebug(v); ok || err != nil {
			if err != nil {
				return err
			}
			return out.write(text)
		}
	}
	if n, ok := v.(*big.Int); ok {
		if err := x.chargeDigits(n); err != nil {
			return err
		}
	}
	if text, ok, err := scalarText(v); ok {
		if err != nil {
			return err
		}
		return out.write(text)
	}
	switch c := v.(type) {
	case string:
		return x.reprString(out, c)
	case markup:
		err := out.write("Markup(")
		if err == nil {
			err = x.reprString(out, string(c))
		}
		return cmp.Or(err, out.write(")"))
	case Undefined:
		return out.write("Undefined")
	case *values.List:
		return x.reprList(out, c)
	case *values.Dict:
		return x.reprDict(out, c)
	case *namespace:
		if x.mini {
			return unsupported("the order of a namespace's names")
		}
		if err := out.write("<Namespace "); err != nil {
			return err
		}
		if err := x.reprDict(out, c.values); err != nil {
			return err
		}
		return out.write(">")
	case *loop:
		if _, err := c.has(x, math.MaxInt); err != nil {
			return err
		}
		return out.write(fmt.Sprintf("<LoopContext %d/%d>", c.index+1, len(c.items)))
	case *function:
		if c.macro {
			if err := out.write("<Macro "); err != nil {
				return err
			}
			if err := x.reprString(out, c.name); err != nil {
				return err
			}
			return out.write(">")
		}
	}
	return unsupported("a %s prints as its address, which is different in each process", kindName(v))
}

func (x *execution) reprList(out *output, l *values.List) error {
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
		return unsupported("printing a %s", kindName(l))
	}
	if err := x.enter(); err != nil {
		return err
	}
	defer x.leave()
	if err := out.write(open); err != nil {
		return err
	}
	for i, item := range l.Items {
		if i > 0 {
			if err := out.write(", "); err != nil {
				return err
			}
		}
		if err := x.repr(out, item); err != nil {
			return err
		}
	}
	return out.write(end)
}

func (x *execution) reprDict(out *output, d *values.Dict) error {
	if err := x.enter(); err != nil {
		return err
	}
	defer x.leave()
	separator := "{"
	for key, value := range d.All() {
		if err := out.write(separator); err != nil {
			return err
		}
		separator = ", "
		if err := x.repr(out, key); err != nil {
			return err
		}
		if err := out.write(": "); err != nil {
			return err
		}
		if err := x.repr(out, value); err != nil {
			return err
		}
	}
	if d.Len() == 0 {
		return out.write("{}")
	}
	return out.write("}")
}

// reprString writes Python's repr() of a string.
func (x *execution) reprString(out *output, s string) error {
	if err := x.chargeBytes(2 * len(s)); err != nil {
		return err
	}
	quote := "'"
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = `"`
	}
	if err := out.write(quote); err != nil {
		return err
	}
	if err := out.writeEach(s, func(to []byte,
		s string) []byte {
		return appendRepr(to, s, rune(quote[0]))
	}); err != nil {
		return err
	}
	return out.write(quote)
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
func (x *execution) join(separator string, values []any) (string, error) {
	if err := x.step(1 + len(values)); err != nil {
		return "", err
	}
	if len(values) > 8 {
		if err := x.alloc(16 * len(values)); err != nil {
			return "", err
		}
	}
	texts := make([]string, 0, max(8, len(values)))
	total := 0
	for _, v := range values {
		s, err := x.display(v)
		if err != nil {
			return "", err
		}
		texts = append(texts, s)
		total += len(s) + len(separator)
		if err := x.checkSize(total - len(separator)); err != nil {
			return "", err
		}
	}
	if separator == "" && len(texts) > 0 {
		return x.concat(total, texts...)
	}
	if err := x.chargeString(total); err != nil {
		return "", err
	}
	return strings.Join(texts, separator), nil
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

func (w *jsonWriter) newline() error {
	if !w.indented {
		return nil
	}
	if err := w.out.write("\n"); err != nil {
		return err
	}
	for range w.depth {
		if err := w.out.write(w.indent); err != nil {
			return err
		}
	}
	return nil
}

func (w *jsonWriter) value(v any) error {
	if err := w.x.step(1); err != nil {
		return err
	}
	switch c := v.(type) {
	case nil:
		return w.out.write("null")
	case Undefined:
		if w.x.mini {
			return w.out.write("null")
		}
	case string:
		return w.string(c)
	case markup:
		return w.string(string(c))
	case *values.List:
		if c.Kind == values.PlainList || c.Kind == values.Tuple || w.x.mini {
			return w.list(c)
		}
	case *values.Dict:
		return w.dict(c)
	case bool, int64, *big.Int, float64:
		if n, ok := c.(*big.Int); ok {
			if err := w.x.chargeDigits(n); err != nil {
				return err
			}
		}
		if f, ok := c.(float64); ok && w.x.mini && (math.IsNaN(f) || math.IsInf(f, 0)) {
			return w.out.write("null")
		}
		text, err := jsonScalar(v)
		if err != nil {
			return err
		}
		return w.out.write(text)
	}
	return fmt.Errorf("object of type %s is not JSON serializable", kindName(v))
}

// jsonScalar returns the JSON of a number or bool. For values that JSON does not have it returns Python's names.
func jsonScalar(v any) (string, error) {
	switch c := v.(type) {
	case bool:
		return strconv.FormatBool(c), nil
	case float64:
		switch {
		case math.IsNaN(c):
			return "NaN", nil
		case math.IsInf(c, 1):
			return "Infinity", nil
		case math.IsInf(c, -1):
			return "-Infinity", nil
		}
	}
	text, _, err := scalarText(v)
	return text, err
}

// nested writes n elements between brackets.
func (w *jsonWriter) nested(open, end string, n int, element func(i int) error) error {
	if n == 0 {
		return w.out.write(open + end)
	}
	if err := w.x.enter(); err != nil {
		return err
	}
	defer w.x.leave()
	if err := w.out.write(open); err != nil {
		return err
	}
	w.depth++
	for i := range n {
		if i > 0 {
			if err := w.out.write(w.itemSeparator); err != nil {
				return err
			}
		}
		if err := w.newline(); err != nil {
			return err
		}
		if err := element(i); err != nil {
			return err
		}
	}
	w.depth--
	if err := w.newline(); err != nil {
		return err
	}
	return w.out.write(end)
}

func (w *jsonWriter) list(l *values.List) error {
	return w.nested("[", "]", len(l.Items), func(i int) error { return w.value(l.Items[i]) })
}

func (w *jsonWriter) dict(d *values.Dict) error {
	keys, values := d.Keys(), d.Values()
	if w.sortKeys {
		if err := w.x.chargeList(2 * len(keys)); err != nil {
			return err
		}
		order, err := w.x.sorted(len(keys), func(i, j int) (bool, error) {
			order, _, err := w.x.order("<", keys[i], keys[j])
			return order < 0, err
		})
		if err != nil {
			return err
		}
		keys, values = pick(keys, order), pick(values, order)
	}
	return w.nested("{", "}", len(keys), func(i int) error {
		if err := w.x.chargeLookup(keys[i]); err != nil { // counts the digits of a large integer
			return err
		}
		key, err := jsonKey(keys[i])
		if err == nil {
			err = w.string(key)
		}
		if err == nil {
			err = w.out.write(w.keySeparator)
		}
		if err != nil {
			return err
		}
		return w.value(values[i])
	})
}

func jsonKey(key any) (string, error) {
	switch k := key.(type) {
	case string:
		return k, nil
	case markup:
		return string(k), nil
	case nil:
		return "null", nil
	case Undefined:
		return "", errors.New("keys must be str, int, float, bool or None, not Undefined")
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

// sorted returns the positions 0 to n-1 in a stable sorted order. It stops at the first error of less.
func (x *execution) sorted(n int, less func(i, j int) (bool, error)) ([]int, error) {
	if err := x.chargeList(n); err != nil {
		return nil, err
	}
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var failed error
	slices.SortStableFunc(order, func(i, j int) int {
		if failed != nil {
			return 0
		}
		before, err := less(i, j)
		if err == nil && !before {
			var after bool
			if after, err = less(j, i); err == nil && !after {
				return 0
			}
		}
		if err != nil {
			failed = err
			return 0
		}
		if before {
			return -1
		}
		return 1
	})
	return order, failed
}

// string writes a string as JSON.
func (w *jsonWriter) string(s string) error {
	if err := w.x.chargeBytes(len(s)); err != nil {
		return err
	}
	if values.CleanJSON(s, w.ascii) {
		return w.out.write(`"`, s, `"`)
	}
	if err := w.out.write(`"`); err != nil {
		return err
	}
	escape := func(to []byte, s string) []byte { return values.AppendJSON(to, s, w.ascii) }
	if err := w.out.writeEach(s, escape); err != nil {
		return err
	}
	return w.out.write(`"`)
}

// percentFormat is format % operands, for the conversions that templates use: s, r, d, i, x and f, with width and
// flags. If the format is marked, it escapes the values' texts.
func (x *execution) percentFormat(format string, operands any, marked bool) (string, error) {
	single := []any{operands}
	if l, ok := operands.(*values.List); ok && l.Kind == values.Tuple {
		single = l.Items
	}
	used := 0
	next := func() (any, error) {
		if used >= len(single) {
			return nil, errors.New("not enough arguments for format string")
		}
		used++
		return single[used-1], nil
	}
	out := &output{x: x}
	for format != "" {
		text, rest, found := strings.Cut(format, "%")
		if err := x.step(2); err != nil {
			return "", err
		}
		if err := out.write(text); err != nil {
			return "", err
		}
		if !found {
			break
		}
		if rest, ok := strings.CutPrefix(rest, "%"); ok {
			format = rest
			if err := out.write("%"); err != nil {
				return "", err
			}
			continue
		}
		piece, rest, err := x.percentOne(rest, operands, next, marked)
		if err != nil {
			return "", err
		}
		if err := out.write(piece); err != nil {
			return "", err
		}
		format = rest
	}
	// Python takes a value with items for a mapping, which may stay unused.
	if used < len(single) && !slices.Contains([]string{"dict", "list", "range", "Undefined"}, kindName(operands)) {
		return "", errors.New("not all arguments converted during string formatting")
	}
	return out.text()
}

// percentOne formats one conversion, after its percent sign.
func (x *execution) percentOne(
	spec string,
	operands any,
	next func() (any, error),
	marked bool,
) (text, rest string, err error) {
	name := ""
	if len(spec) > maxFormatSpec && strings.Trim(spec[:maxFormatSpec], "-+ 0#.123456789") == "" {
		return "", "", unsupported("a format specification of more than %d bytes", maxFormatSpec)
	}
	if strings.HasPrefix(spec, "(") {
		var found bool
		if name, spec, found = strings.Cut(spec[1:], ")"); !found {
			return "", "", errors.New("incomplete format key")
		}
	}
	flags := spec[:len(spec)-len(strings.TrimLeft(spec, "-+ 0#"))]
	spec = spec[len(flags):]
	digits := spec[:len(spec)-len(strings.TrimLeft(spec, "0123456789"))]
	spec = spec[len(digits):]
	precision := ""
	if strings.HasPrefix(spec, ".") {
		precision = spec[1 : len(spec)-len(strings.TrimLeft(spec[1:], "0123456789"))]
		spec = spec[1+len(precision):]
		if precision == "" {
			precision = "0"
		}
	}
	if spec == "" {
		return "", "", errors.New("incomplete format")
	}
	var v any
	if name != "" {
		d, ok := operands.(*values.Dict)
		if !ok {
			return "", "", errors.New("format requires a mapping")
		}
		if err := x.chargeLookup(name); err != nil {
			return "", "", err
		}
		if v, ok = d.Get(name); !ok {
			return "", "", fmt.Errorf("key '%s' is missing", short(name))
		}
	} else if v, err = next(); err != nil {
		return "", "", err
	}
	numeric := spec[0] != 's' && spec[0] != 'r'
	conversion := spec[0]
	if marked {
		v, conversion, err = x.escapeFor(conversion, v)
	}
	if err == nil {
		text, err = x.formatValue(v, conversion, precision)
	}
	if err != nil {
		return "", "", err
	}
	align := byte('>')
	fill := " "
	sign := ""
	if numeric && !strings.HasPrefix(text, "-") {
		if strings.Contains(flags, "+") {
			sign = "+"
		} else if strings.Contains(flags, " ") {
			sign = " "
		}
	}
	switch {
	case strings.Contains(flags, "#"):
		return "", "", unsupported("the flag #")
	case strings.Contains(flags, "-"):
		align = '<'
	case strings.Contains(flags, "0") && numeric:
		align, fill = '=', "0"
	}
	text, err = x.pad(sign+text, fill, align, digits)
	return text, spec[1:], err
}

// escapeFor prepares a value for a conversion of a format that is markup.
func (x *execution) escapeFor(conversion byte, v any) (any, byte, error) {
	var err error
	switch conversion {
	case 'r':
		if v, err = x.formatValue(v, 'r', ""); err != nil {
			return nil, 0, err
		}
	case 's':
	case 'x':
		return nil, 0, errors.New("%x format: an integer is required, not _MarkupEscapeHelper")
	default:
		return v, conversion, nil
	}
	v, err = x.escaped(v)
	return v, 's', err
}

// formatValue formats a value by a conversion letter and an optional precision.
func (x *execution) formatValue(v any, conversion byte, precision string) (string, error) {
	if u, ok := v.(Undefined); ok && conversion != 's' && conversion != 'r' {
		return "", u.err()
	}
	places := 6
	if precision != "" {
		var err error
		if places, err = strconv.Atoi(precision); err != nil || places > 1000 {
			return "", errors.New("precision too big")
		}
	}
	if err := x.step(1 + places); err != nil {
		return "", err
	}
	if n, ok := v.(*big.Int); ok {
		if err := x.chargeDigits(n); err != nil {
			return "", err
		}
	}
	switch conversion {
	case 's', 'r':
		var text string
		var err error
		if conversion == 's' {
			text, err = x.str(v)
		} else {
			out := &output{x: x}
			if err = x.repr(out, v); err == nil {
				text, err = out.text()
			}
		}
		if precision != "" {
			text = firstRunes(text, places) // places is at most 1000
		}
		return text, err
	case 'd', 'i', 'x':
		n, ok := asInt(v)
		if f, isFloat := v.(float64); isFloat && conversion != 'x' && !math.IsNaN(f) && !math.IsInf(f, 0) {
			n, _ = new(big.Float).SetFloat64(math.Trunc(f)).Int(nil)
			ok = true
		}
		if !ok || precision != "" {
			return "", unsupported("%%%c of %s", conversion, kindName(v))
		}
		if conversion == 'x' {
			return n.Text(16), nil
		}
		return intText(n)
	case 'f':
		f, ok := asFloat(v)
		if !ok {
			return "", fmt.Errorf("must be real number, not %s", kindName(v))
		}
		if math.IsNaN(f) || math.IsInf(f, 0) {
			return floatText(f), nil
		}
		return strconv.FormatFloat(f, 'f', places, 64), nil
	}
	return "", unsupported("format character %q", conversion)
}

// firstRunes returns the first n characters of s.
func firstRunes(s string, n int) string {
	for i := range s {
		if n == 0 {
			return s[:i]
		}
		n--
	}
	return s
}

// pad widens text to a width in characters. align is '<' for left, '>' for right, '^' for centre, and '=' for fill
// behind the sign.
func (x *execution) pad(text, fill string, align byte, width string) (string, error) {
	if width == "" {
		return text, nil
	}
	columns, err := strconv.Atoi(width)
	if err != nil {
		return "", x.chargeString(math.MaxInt)
	}
	if err := x.chargeBytes(len(text)); err != nil {
		return "", err
	}
	missing := columns - utf8.RuneCountInString(text)
	if missing <= 0 {
		return text, nil
	}
	if missing > x.limits.OutputBytes {
		return "", x.chargeString(math.MaxInt)
	}
	if err := x.chargeString(len(text) + missing*len(fill)); err != nil {
		return "", err
	}
	if err := x.alloc(missing * len(fill)); err != nil { // the padding
		return "", err
	}
	switch align {
	case '<':
		return text + strings.Repeat(fill, missing), nil
	case '^':
		return strings.Repeat(fill, missing/2) + text + strings.Repeat(fill, missing-missing/2), nil
	case '=':
		if strings.IndexAny(text, "+- ") == 0 {
			return text[:1] + strings.Repeat(fill, missing) + text[1:], nil
		}
	}
	return strings.Repeat(fill, missing) + text, nil
}
