package jinja

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// stringMethods are the methods of str. The receiver is always a string.
var stringMethods map[string]builtin

// dictMethods, listMethods and tupleMethods are the methods of these types. A nil method would change the value, which
// the sandbox does not allow.
var dictMethods, listMethods, tupleMethods map[string]builtin

// The tables are filled in init because methods call functions that look up methods.
func init() {
	stringMethods = map[string]builtin{
		"capitalize":   textMethod((*execution).capitalize),
		"casefold":     methodCasefold,
		"center":       padMethod('^'),
		"count":        methodCount,
		"endswith":     affixMethod(strings.HasSuffix),
		"expandtabs":   unsupportedMethod,
		"encode":       unsupportedMethod,
		"find":         findMethod(strings.Index, false),
		"format":       methodFormat,
		"format_map":   unsupportedMethod,
		"index":        findMethod(strings.Index, true),
		"isalnum":      testMethod(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }),
		"isalpha":      testMethod(unicode.IsLetter),
		"isascii":      methodIsASCII,
		"isdecimal":    testMethod(unicode.IsDigit),
		"isdigit":      testMethod(isDigitRune),
		"isidentifier": unsupportedMethod,
		"islower":      caseMethod(isLowerText),
		"isnumeric":    unsupportedMethod,
		"isprintable":  unsupportedMethod,
		"isspace":      testMethod(IsSpace),
		"istitle":      unsupportedMethod,
		"isupper":      caseMethod(isUpperText),
		"join":         methodJoin,
		"ljust":        padMethod('<'),
		"lower":        textMethod((*execution).lower),
		"lstrip":       stripMethod(true, false),
		"maketrans":    unsupportedMethod,
		"partition":    methodPartition,
		"removeprefix": methodRemovePrefix,
		"removesuffix": methodRemoveSuffix,
		"replace":      methodReplace,
		"rfind":        findMethod(strings.LastIndex, false),
		"rindex":       findMethod(strings.LastIndex, true),
		"rjust":        padMethod('>'),
		"rpartition":   methodRPartition,
		"rsplit":       splitMethod(true),
		"rstrip":       stripMethod(false, true),
		"split":        splitMethod(false),
		"splitlines":   methodSplitLines,
		"startswith":   affixMethod(strings.HasPrefix),
		"strip":        stripMethod(true, true),
		"swapcase":     textMethod((*execution).swapcase),
		"title":        textMethod((*execution).title),
		"translate":    unsupportedMethod,
		"upper":        textMethod((*execution).upper),
		"zfill":        methodZfill,
	}
	dictMethods = map[string]builtin{
		"copy":   func(_ *execution, v any, a *arguments) (any, error) { _, err := a.bind(); return v, err },
		"get":    methodGet,
		"items":  methodItems,
		"keys":   methodKeys,
		"values": methodValues,
		"clear":  nil, "pop": nil, "popitem": nil, "setdefault": nil, "update": nil,
		"fromkeys": methodFromKeys,
	}
	tupleMethods = map[string]builtin{"count": methodListCount, "index": methodListIndex}
	listMethods = map[string]builtin{
		"count": methodListCount, "index": methodListIndex,
		"copy":   func(_ *execution, v any, a *arguments) (any, error) { _, err := a.bind(); return v, err },
		"append": nil, "clear": nil, "extend": nil, "insert": nil, "pop": nil, "remove": nil, "reverse": nil,
		"sort": nil,
	}
}

// text returns a value that is known to be a string.
func text(v any) string {
	s, _ := textOf(v)
	return s
}

// wantString returns an argument that must be a string.
func wantString(name string, v any) (string, error) {
	s, ok := textOf(v)
	if !ok {
		return "", fmt.Errorf("%s must be str, not %s", name, kindName(v))
	}
	return s, nil
}

// wantInt returns an argument that must be an integer, or fallback if it is absent.
func wantInt(name string, v any, fallback int) (int, error) {
	if v == (any)(absent{}) {
		return fallback, nil
	}
	n, ok := smallInt(v)
	if !ok {
		return 0, fmt.Errorf("%s must be a small integer, not %s", name, kindName(v))
	}
	return n, nil
}

func unsupportedMethod(*execution, any, *arguments) (any, error) {
	return nil, unsupported("this method")
}

func textMethod(f func(x *execution, s string) (string, error)) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		return f(x, text(v))
	}
}

func testMethod(kind func(rune) bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		return x.allRunes(text(v), kind)
	}
}

func caseMethod(test func(x *execution, s string) (bool, error)) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		return test(x, text(v))
	}
}

func isLowerText(x *execution, s string) (bool, error) {
	return x.isCase(s, unicode.Lower, unicode.Upper)
}
func isUpperText(x *execution, s string) (bool, error) {
	return x.isCase(s, unicode.Upper, unicode.Lower)
}

func methodIsASCII(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	return isASCII(text(v)), x.chargeBytes(len(text(v)))
}

func methodCasefold(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	if !isASCII(text(v)) {
		return nil, unsupported("casefold of more than ASCII")
	}
	return x.lower(text(v))
}

func padMethod(align byte) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("width", "fillchar=")
		if err != nil {
			return nil, err
		}
		width, err := wantInt("width", p[0], 0)
		if err != nil {
			return nil, err
		}
		fill, err := wantString("fillchar", orDefault(p[1], " "))
		if err != nil {
			return nil, err
		}
		if len(fill) > utf8.UTFMax || utf8.RuneCountInString(fill) != 1 {
			return nil, errors.New("the fill character must be exactly one character long")
		}
		if align == '^' {
			return x.center(text(v), fill, width)
		}
		return x.pad(text(v), fill, align, strconv.Itoa(max(width, 0)))
	}
}

// center is str.center. It puts an odd space to the left if the text has odd length and the field even length, and to
// the right otherwise.
func (x *execution) center(s, fill string, width int) (any, error) {
	if err := x.chargeBytes(len(s)); err != nil {
		return nil, err
	}
	n := utf8.RuneCountInString(s)
	missing := width - n
	if missing <= 0 {
		return s, nil
	}
	if missing > x.limits.OutputBytes {
		return nil, x.chargeString(missing)
	}
	if err := x.chargeString(len(s) + missing*len(fill)); err != nil {
		return nil, err
	}
	if err := x.alloc(missing * len(fill)); err != nil { // the padding on both sides
		return nil, err
	}
	left := missing/2 + missing&width&1
	return strings.Repeat(fill, left) + s + strings.Repeat(fill, missing-left), nil
}

func methodZfill(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("width")
	if err != nil {
		return nil, err
	}
	width, err := wantInt("width", p[0], 0)
	if err != nil {
		return nil, err
	}
	s := text(v)
	if strings.HasPrefix(s, "+") || strings.HasPrefix(s, "-") {
		return x.pad(s, "0", '=', strconv.Itoa(max(width, 0)))
	}
	return x.pad(s, "0", '>', strconv.Itoa(max(width, 0)))
}

// substring returns the part of s between optional positions in characters, and the number of characters before it. ok
// is false if the part starts behind the end of s.
func (x *execution) substring(s string, start, end any) (part string, before int, ok bool, err error) {
	if start == (any)(absent{}) && end == (any)(absent{}) {
		return s, 0, true, nil
	}
	var at [3]int
	var set [3]bool
	for i, v := range [2]any{start, end} {
		if v == (any)(absent{}) || v == nil {
			continue
		}
		n, isInt := smallInt(v)
		if !isInt {
			return "", 0, false, errors.New("slice indices must be integers or None")
		}
		at[i], set[i] = n, true
	}
	if err := x.chargeBytes(len(s)); err != nil {
		return "", 0, false, err
	}
	n := utf8.RuneCountInString(s)
	if set[0] && at[0] > n {
		return "", 0, false, nil
	}
	low, high := sliceBounds(n, at, set, 1)
	if low > high {
		return "", 0, false, nil
	}
	from, err := x.offset(s, low)
	if err != nil {
		return "", 0, false, err
	}
	size, err := x.offset(s[from:], high-low)
	return s[from : from+size], low, err == nil, err
}

// searchArguments binds the arguments of a search: the text to find, the part of v to search, and the number of
// characters before that part. ok is false if there is no such part.
func (x *execution) searchArguments(v any, a *arguments) (sub, part string, before int, ok bool, err error) {
	p, err := a.bind("sub", "start=", "end=")
	if err != nil {
		return "", "", 0, false, err
	}
	if sub, err = wantString("sub", p[0]); err != nil {
		return "", "", 0, false, err
	}
	if part, before, ok, err = x.substring(text(v), p[1], p[2]); err == nil {
		err = x.chargeBytes(2 * (len(part) + len(sub)))
	}
	return sub, part, before, ok, err
}

func findMethod(search func(s, substring string) int, must bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		sub, part, before, ok, err := x.searchArguments(v, a)
		if err != nil {
			return nil, err
		}
		at := -1
		if ok {
			at = search(part, sub)
		}
		if at >= 0 {
			return int64(before + utf8.RuneCountInString(part[:at])), nil
		}
		if must {
			return nil, errors.New("substring not found")
		}
		return int64(-1), nil
	}
}

func methodCount(x *execution, v any, a *arguments) (any, error) {
	sub, part, _, ok, err := x.searchArguments(v, a)
	if err != nil || !ok {
		return int64(0), err
	}
	n, err := x.count(part, sub)
	return int64(n), err
}

// count is strings.Count. It also counts the work for each occurrence.
func (x *execution) count(s, sub string) (int, error) {
	if err := x.chargeBytes(len(s)); err != nil {
		return 0, err
	}
	n := strings.Count(s, sub)
	return n, x.step(n / 4)
}

func affixMethod(has func(s, affix string) bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("affix", "start=", "end=")
		if err != nil {
			return nil, err
		}
		affixes := []any{p[0]}
		if l, ok := p[0].(*values.List); ok && l.Kind == values.Tuple {
			affixes = l.Items
		}
		part, _, ok, err := x.substring(text(v), p[1], p[2])
		if err != nil {
			return nil, err
		}
		for _, affix := range affixes {
			s, err := wantString("first arg", affix)
			if err != nil {
				return nil, err
			}
			if err := x.chargeBytes(min(len(s), len(part))); err != nil {
				return nil, err
			}
			if ok && has(part, s) {
				return true, nil
			}
		}
		return false, nil
	}
}

func stripMethod(left, right bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("chars=")
		if err != nil {
			return nil, err
		}
		return x.strip(text(v), p[0], left, right)
	}
}

// strip strips the characters in chars, or white space if it is None or absent.
func (x *execution) strip(s string, chars any, left, right bool) (any, error) {
	if chars = orDefault(chars, nil); chars == nil {
		return x.trim(s, IsSpace, left, right)
	}
	set, err := wantString("strip arg", chars)
	if err != nil {
		return nil, err
	}
	if len(set) <= bytesPerStep {
		return x.trim(s, func(r rune) bool { return strings.ContainsRune(set, r) }, left, right)
	}
	if err := x.step(len(set)); err != nil {
		return nil, err
	}
	if err := x.alloc(8 * len(set)); err != nil {
		return nil, err
	}
	members := map[rune]bool{}
	for _, r := range set {
		members[r] = true
	}
	return x.trim(s, func(r rune) bool { return members[r] }, left, right)
}

func splitMethod(fromRight bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("sep=", "maxsplit=")
		if err != nil {
			return nil, err
		}
		limit, err := wantInt("maxsplit", p[1], -1)
		if err != nil {
			return nil, err
		}
		s := text(v)
		separator := orDefault(p[0], nil)
		if separator == nil {
			return x.splitSpace(s, limit, fromRight)
		}
		sep, err := wantString("sep", separator)
		if err != nil {
			return nil, err
		}
		if sep == "" {
			return nil, errors.New("empty separator")
		}
		return x.split(s, sep, limit, fromRight)
	}
}

func methodSplitLines(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("keepends=")
	if err != nil {
		return nil, err
	}
	return x.splitLines(text(v), truth(orDefault(p[0], false)))
}

func separatorArgument(a *arguments) (string, error) {
	p, err := a.bind("sep")
	if err != nil {
		return "", err
	}
	sep, err := wantString("sep", p[0])
	if err == nil && sep == "" {
		err = errors.New("empty separator")
	}
	return sep, err
}

func methodPartition(x *execution, v any, a *arguments) (any, error) {
	sep, err := separatorArgument(a)
	if err != nil {
		return nil, err
	}
	if err := x.chargeBytes(len(text(v)) + len(sep)); err != nil {
		return nil, err
	}
	if err := x.chargeList(3); err != nil {
		return nil, err
	}
	before, after, found := strings.Cut(text(v), sep)
	if !found {
		return newTuple(before, "", ""), nil
	}
	return newTuple(before, sep, after), nil
}

func methodRPartition(x *execution, v any, a *arguments) (any, error) {
	sep, err := separatorArgument(a)
	if err != nil {
		return nil, err
	}
	s := text(v)
	if err := x.chargeBytes(2 * (len(s) + len(sep))); err != nil {
		return nil, err
	}
	if err := x.chargeList(3); err != nil {
		return nil, err
	}
	at := strings.LastIndex(s, sep)
	if at < 0 {
		return newTuple("", "", s), nil
	}
	return newTuple(s[:at], sep, s[at+len(sep):]), nil
}

func methodRemovePrefix(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("prefix")
	if err != nil {
		return nil, err
	}
	prefix, err := wantString("prefix", p[0])
	if err != nil {
		return nil, err
	}
	if err := x.chargeBytes(len(prefix)); err != nil {
		return nil, err
	}
	return strings.TrimPrefix(text(v), prefix), err
}

func methodRemoveSuffix(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("suffix")
	if err != nil {
		return nil, err
	}
	suffix, err := wantString("suffix", p[0])
	if err != nil {
		return nil, err
	}
	if err := x.chargeBytes(len(suffix)); err != nil {
		return nil, err
	}
	return strings.TrimSuffix(text(v), suffix), err
}

func methodReplace(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("old", "new", "count=")
	if err != nil {
		return nil, err
	}
	old, err := wantString("old", p[0])
	if err != nil {
		return nil, err
	}
	replacement, err := wantString("new", p[1])
	if err != nil {
		return nil, err
	}
	count, err := wantInt("count", p[2], -1)
	if err != nil {
		return nil, err
	}
	return x.replace(text(v), old, replacement, count)
}

// replace is str.replace. It checks the size of the result before making it.
func (x *execution) replace(s, old, replacement string, count int) (any, error) {
	n, err := x.count(s, old)
	if err != nil {
		return nil, err
	}
	if count >= 0 {
		n = min(n, count)
	}
	if grow := len(replacement) - len(old); grow > 0 && n > x.limits.OutputBytes/grow {
		return nil, x.chargeString(x.limits.OutputBytes + 1)
	} else if err := x.chargeString(len(s) + n*grow); err != nil {
		return nil, err
	}
	return strings.Replace(s, old, replacement, count), nil
}

func methodJoin(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("iterable")
	if err != nil {
		return nil, err
	}
	items, err := x.iterate(p[0])
	if err != nil {
		return nil, err
	}
	if err := x.step(1 + len(items)); err != nil {
		return nil, err
	}
	for i, item := range items {
		if _, ok := textOf(item); !ok {
			return nil, fmt.Errorf("sequence item %d: expected str instance, %s found", i, kindName(item))
		}
	}
	return x.join(text(v), items)
}

// methodFormat is str.format. It supports fields by number, name or neither; attributes and items of fields; !s and !r;
// and the format specifications fill, alignment, sign, width, precision and the types s, d and f.
func methodFormat(x *execution, v any, a *arguments) (any, error) {
	_, marked := v.(markup)
	out := &output{x: x}
	automatic := 0
	for s := text(v); s != ""; {
		at, err := x.leading(s, func(r rune) bool { return r != '{' && r != '}' })
		if err != nil {
			return nil, err
		}
		if at == len(s) {
			if err := out.write(s); err != nil {
				return nil, err
			}
			break
		}
		if err := out.write(s[:at]); err != nil {
			return nil, err
		}
		if strings.HasPrefix(s[at+1:], s[at:at+1]) { // {{ or }}
			if err := out.write(s[at : at+1]); err != nil {
				return nil, err
			}
			s = s[at+2:]
			continue
		}
		end := strings.IndexByte(s[at:], '}')
		if err := x.chargeBytes(max(end, 0)); err != nil {
			return nil, err
		}
		if s[at] == '}' || end < 0 {
			return nil, errors.New("unbalanced brace in format string")
		}
		field := s[at+1 : at+end]
		if strings.Contains(field, "{") {
			return nil, unsupported("nested replacement fields")
		}
		s = s[at+end+1:]
		piece, err := x.formatField(field, a, &automatic, marked)
		if err != nil {
			return nil, err
		}
		if err := out.write(piece); err != nil {
			return nil, err
		}
	}
	return out.text()
}

// formatField formats one replacement field. automatic is the number of fields without a name so far, or -1 after a
// field with a number. If the format is marked, it escapes the text of the field.
func (x *execution) formatField(field string, a *arguments, automatic *int, marked bool) (string, error) {
	if err := x.step(1 + len(field)/charactersPerStep); err != nil {
		return "", err
	}
	field, spec, _ := strings.Cut(field, ":")
	field, conversion, converted := strings.Cut(field, "!")
	nameEnd := strings.IndexAny(field, ".[")
	if nameEnd < 0 {
		nameEnd = len(field)
	}
	name, path := field[:nameEnd], field[nameEnd:]
	v, err := formatArgument(name, a, automatic)
	if err != nil {
		return "", err
	}
	for path != "" {
		if err := x.step(1); err != nil {
			return "", err
		}
		var key any
		if path[0] == '.' {
			end := strings.IndexAny(path[1:], ".[")
			if end < 0 {
				end = len(path) - 1
			}
			key, path = path[1:1+end], path[1+end:]
			v, err = x.attribute(v, text(key))
		} else {
			end := strings.IndexByte(path, ']')
			if end < 0 {
				return "", errors.New("missing ']' in format string")
			}
			key, path = path[1:end], path[end+1:]
			if n, numeric := strconv.ParseInt(text(key), 10, 32); numeric == nil {
				key = n
			}
			v, err = x.item(v, key)
		}
		if err != nil {
			return "", err
		}
	}
	if converted {
		if conversion != "s" && conversion != "r" {
			return "", unsupported("conversion %q", short(conversion))
		}
		if v, err = x.formatValue(v, conversion[0], ""); err != nil {
			return "", err
		}
	}
	if m, ok := v.(markup); ok && marked {
		if spec != "" {
			return "", errors.New("unsupported format specification for Markup")
		}
		return string(m), nil
	}
	text, err := x.formatSpec(v, spec)
	if err == nil && marked {
		text, err = x.escape(text)
	}
	return text, err
}

func formatArgument(name string, a *arguments, automatic *int) (any, error) {
	if name == "" {
		if *automatic < 0 {
			return nil, errors.New("cannot switch from manual field specification to automatic field numbering")
		}
		name = strconv.Itoa(*automatic)
		*automatic++
	} else if _, err := strconv.Atoi(name); err == nil {
		if *automatic > 0 {
			return nil, errors.New("cannot switch from automatic field numbering to manual field specification")
		}
		*automatic = -1
	}
	if n, err := strconv.Atoi(name); err == nil {
		if n < 0 || n >= len(a.positional) {
			return nil, errors.New("replacement index out of range")
		}
		return a.positional[n], nil
	}
	v, ok := a.named(name)
	if !ok {
		return nil, fmt.Errorf("no argument named %q", short(name))
	}
	return v, nil
}

// maxFormatSpec bounds a format specification, in bytes.
const maxFormatSpec = 256

// formatSpec is format(v, spec).
func (x *execution) formatSpec(v any, spec string) (string, error) {
	if spec == "" {
		return x.str(v)
	}
	if len(spec) > maxFormatSpec {
		return "", unsupported("a format specification of more than %d bytes", maxFormatSpec)
	}
	runes := []rune(spec)
	fill, align := " ", byte(0)
	isAlign := func(i int) bool { return i < len(runes) && strings.ContainsRune("<>^=", runes[i]) }
	switch {
	case isAlign(1):
		fill, align = string(runes[0]), byte(runes[1])
		runes = runes[2:]
	case isAlign(0):
		align = byte(runes[0])
		runes = runes[1:]
	}
	rest := string(runes)
	sign := ""
	if rest != "" && strings.Contains("+- ", rest[:1]) {
		sign, rest = strings.Trim(rest[:1], "-"), rest[1:]
	}
	if strings.HasPrefix(rest, "0") && align == 0 {
		fill, align = "0", '='
	}
	width := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	rest = rest[len(width):]
	precision := ""
	if strings.HasPrefix(rest, ".") {
		precision = rest[1 : len(rest)-len(strings.TrimLeft(rest[1:], "0123456789"))]
		rest = rest[1+len(precision):]
	}
	if n, ok := v.(bool); ok {
		i, _ := smallInt(n) // a number, if there is a specification
		v = int64(i)
	}
	_, isString := textOf(v)
	conversion := byte('s')
	switch {
	case rest == "" && (isString || precision == "" && isNumber(v)):
	case rest == "s" && isString, rest == "d" && isNumber(v), rest == "f" && isNumber(v):
		conversion = rest[0]
	default:
		return "", unsupported("format specification %q of %s", spec, kindName(v))
	}
	if _, isFloat := v.(float64); isFloat && conversion == 'd' {
		return "", errors.New("unknown format code 'd' for object of type 'float'")
	}
	formatted, err := x.formatValue(v, conversion, precision)
	if err != nil {
		return "", err
	}
	if isString && (sign != "" || align == '=') {
		return "", errors.New("sign or '=' alignment not allowed in string format specifier")
	}
	if !strings.HasPrefix(formatted, "-") {
		formatted = sign + formatted
	}
	if align == 0 {
		align = '>'
		if isString {
			align = '<'
		}
	}
	return x.pad(formatted, fill, align, width)
}

// methodFromKeys is dict.fromkeys, of the type or of any dict.
func methodFromKeys(x *execution, _ any, a *arguments) (any, error) {
	p, err := a.bind("iterable", "value=")
	if err != nil {
		return nil, err
	}
	keys, err := x.iterate(p[0])
	if err == nil {
		err = x.chargeDict(len(keys))
	}
	d := values.NewDict()
	for i := 0; i < len(keys) && err == nil; i++ {
		if !hashable(keys[i]) {
			return nil, unhashable(keys[i])
		}
		err = x.chargeLookup(keys[i])
		d.Put(keys[i], orDefault(p[1], nil))
	}
	return d, err
}

func methodGet(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("key", "default=")
	if err != nil {
		return nil, err
	}
	if len(a.names) > 0 {
		return nil, errors.New("takes no keyword arguments")
	}
	d, _ := v.(*values.Dict)
	if !hashable(p[0]) {
		return nil, unhashable(p[0])
	}
	if err := x.chargeLookup(p[0]); err != nil {
		return nil, err
	}
	if found, ok := d.Lookup(p[0]); ok {
		return found, nil
	}
	return orDefault(p[1], nil), nil
}

func methodItems(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	d, _ := v.(*values.Dict)
	if err := x.chargeList(6 * d.Len()); err != nil { // including the pairs
		return nil, err
	}
	view := &values.List{Kind: values.View, Items: make([]any, 0, d.Len())}
	for key, value := range d.All() {
		view.Items = append(view.Items, newTuple(key, value))
	}
	return view, nil
}

func methodKeys(x *execution, v any, a *arguments) (any, error) {
	_, err := a.bind()
	if err == nil {
		err = x.chargeList(0)
	}
	d, _ := v.(*values.Dict)
	return &values.List{Kind: values.View, Items: slices.Clip(d.Keys())}, err
}

func methodValues(x *execution, v any, a *arguments) (any, error) {
	_, err := a.bind()
	if err == nil {
		err = x.chargeList(0)
	}
	d, _ := v.(*values.Dict)
	return &values.List{Kind: values.View, Items: slices.Clip(d.Values())}, err
}

func methodListCount(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("value")
	if err != nil {
		return nil, err
	}
	l, _ := v.(*values.List)
	n := int64(0)
	for _, item := range l.Items {
		same, err := x.equal(item, p[0])
		if err != nil {
			return nil, err
		}
		if same {
			n++
		}
	}
	return n, nil
}

func methodListIndex(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("value")
	if err != nil {
		return nil, err
	}
	l, _ := v.(*values.List)
	for i, item := range l.Items {
		same, err := x.equal(item, p[0])
		if err != nil {
			return nil, err
		}
		if same {
			return int64(i), nil
		}
	}
	return nil, errors.New("value is not in list")
}
