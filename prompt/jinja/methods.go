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
		"casefold":     unsupportedMethod,
		"center":       unsupportedMethod,
		"count":        methodCount,
		"endswith":     affixMethod(strings.HasSuffix),
		"expandtabs":   unsupportedMethod,
		"encode":       unsupportedMethod,
		"find":         findMethod(strings.Index, false),
		"format":       methodFormat,
		"format_map":   unsupportedMethod,
		"index":        findMethod(strings.Index, true),
		"isalnum":      unsupportedMethod,
		"isalpha":      testMethod(unicode.IsLetter),
		"isascii":      unsupportedMethod,
		"isdecimal":    unsupportedMethod,
		"isdigit":      testMethod(isDigitRune),
		"isidentifier": unsupportedMethod,
		"islower":      unsupportedMethod,
		"isnumeric":    unsupportedMethod,
		"isprintable":  unsupportedMethod,
		"isspace":      testMethod(IsSpace),
		"istitle":      unsupportedMethod,
		"isupper":      unsupportedMethod,
		"join":         methodJoin,
		"ljust":        unsupportedMethod,
		"lower":        textMethod((*execution).lower),
		"lstrip":       stripMethod(true, false),
		"maketrans":    unsupportedMethod,
		"partition":    unsupportedMethod,
		"removeprefix": removeMethod("prefix", strings.TrimPrefix),
		"removesuffix": removeMethod("suffix", strings.TrimSuffix),
		"replace":      methodReplace,
		"rfind":        findMethod(strings.LastIndex, false),
		"rindex":       findMethod(strings.LastIndex, true),
		"rjust":        unsupportedMethod,
		"rpartition":   unsupportedMethod,
		"rsplit":       splitMethod(true),
		"rstrip":       stripMethod(false, true),
		"split":        splitMethod(false),
		"splitlines":   methodSplitLines,
		"startswith":   affixMethod(strings.HasPrefix),
		"strip":        stripMethod(true, true),
		"swapcase":     unsupportedMethod,
		"title":        textMethod((*execution).title),
		"translate":    unsupportedMethod,
		"upper":        textMethod((*execution).upper),
		"zfill":        unsupportedMethod,
	}
	dictMethods = map[string]builtin{
		"copy":   methodCopy,
		"get":    methodGet,
		"items":  methodItems,
		"keys":   methodKeys,
		"values": methodValues,
		"clear":  nil, "pop": nil, "popitem": nil, "setdefault": nil, "update": nil,
		"fromkeys": unsupportedMethod,
	}
	tupleMethods = map[string]builtin{"count": methodListCount, "index": methodListIndex}
	listMethods = map[string]builtin{
		"count": methodListCount, "index": methodListIndex,
		"copy":   methodCopy,
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
func wantString(name string, v any) string {
	s, ok := textOf(v)
	if !ok {
		panic(failure{fmt.Errorf("%s must be str, not %s", name, kindName(v))})
	}
	return s
}

// wantInt returns an argument that must be an integer, or fallback if it is absent.
func wantInt(name string, v any, fallback int) int {
	if v == (any)(absent{}) {
		return fallback
	}
	n, ok := smallInt(v)
	if !ok {
		panic(failure{fmt.Errorf("%s must be a small integer, not %s", name, kindName(v))})
	}
	return n
}

func unsupportedMethod(*execution, any, *arguments) any {
	panic(failure{unsupported("this method")})
}

func textMethod(f func(x *execution, s string) string) builtin {
	return func(x *execution, v any, a *arguments) any {
		a.bind()
		return f(x, text(v))
	}
}

func testMethod(kind func(rune) bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		a.bind()
		return x.allRunes(text(v), kind)
	}
}

// substring returns the part of s between optional positions in characters, and the number of characters before it. ok
// is false if the part starts behind the end of s.
func (x *execution) substring(s string, start, end any) (part string, before int, ok bool) {
	if start == (any)(absent{}) && end == (any)(absent{}) {
		return s, 0, true
	}
	var at [3]int
	var set [3]bool
	for i, v := range [2]any{start, end} {
		if v == (any)(absent{}) || v == nil {
			continue
		}
		n, isInt := smallInt(v)
		if !isInt {
			panic(failure{errors.New("slice indices must be integers or None")})
		}
		at[i], set[i] = n, true
	}
	x.chargeBytes(len(s))
	n := utf8.RuneCountInString(s)
	if set[0] && at[0] > n {
		return "", 0, false
	}
	low, high := sliceBounds(n, at, set, 1)
	if low > high {
		return "", 0, false
	}
	from := x.offset(s, low)
	return s[from : from+x.offset(s[from:], high-low)], low, true
}

// searchArguments binds the arguments of a search: the text to find, the part of v to search, and the number of
// characters before that part. ok is false if there is no such part.
func (x *execution) searchArguments(v any, a *arguments) (sub, part string, before int, ok bool) {
	p := a.bind("sub", "start=", "end=")
	sub = wantString("sub", p[0])
	part, before, ok = x.substring(text(v), p[1], p[2])
	x.chargeBytes(2 * (len(part) + len(sub)))
	return sub, part, before, ok
}

func findMethod(search func(s, substring string) int, must bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		sub, part, before, ok := x.searchArguments(v, a)
		at := -1
		if ok {
			at = search(part, sub)
		}
		if at >= 0 {
			return int64(before + utf8.RuneCountInString(part[:at]))
		}
		if must {
			panic(failure{errors.New("substring not found")})
		}
		return int64(-1)
	}
}

func methodCount(x *execution, v any, a *arguments) any {
	sub, part, _, ok := x.searchArguments(v, a)
	if !ok {
		return int64(0)
	}
	return int64(x.count(part, sub))
}

// count is strings.Count. It also counts the work for each occurrence.
func (x *execution) count(s, sub string) int {
	x.chargeBytes(len(s))
	n := strings.Count(s, sub)
	x.step(n / 4)
	return n
}

func affixMethod(has func(s, affix string) bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		p := a.bind("affix", "start=", "end=")
		affixes := []any{p[0]}
		if l, ok := p[0].(*values.List); ok && l.Kind == values.Tuple {
			affixes = l.Items
		}
		part, _, ok := x.substring(text(v), p[1], p[2])
		for _, affix := range affixes {
			s := wantString("first arg", affix)
			x.chargeBytes(min(len(s), len(part)))
			if ok && has(part, s) {
				return true
			}
		}
		return false
	}
}

func stripMethod(left, right bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		p := a.bind("chars=")
		return x.strip(text(v), p[0], left, right)
	}
}

// strip strips the characters in chars, or white space if it is None or absent.
func (x *execution) strip(s string, chars any, left, right bool) any {
	if chars = orDefault(chars, nil); chars == nil {
		return x.trim(s, IsSpace, left, right)
	}
	set := wantString("strip arg", chars)
	if len(set) <= bytesPerStep {
		return x.trim(s, func(r rune) bool { return strings.ContainsRune(set, r) }, left, right)
	}
	x.step(len(set))
	x.alloc(8 * len(set))
	members := map[rune]bool{}
	for _, r := range set {
		members[r] = true
	}
	return x.trim(s, func(r rune) bool { return members[r] }, left, right)
}

func splitMethod(fromRight bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		p := a.bind("sep=", "maxsplit=")
		limit := wantInt("maxsplit", p[1], -1)
		s := text(v)
		separator := orDefault(p[0], nil)
		if separator == nil {
			return x.splitSpace(s, limit, fromRight)
		}
		return x.split(s, wantSeparator(separator), limit, fromRight)
	}
}

func methodSplitLines(x *execution, v any, a *arguments) any {
	p := a.bind("keepends=")
	return x.splitLines(text(v), truth(orDefault(p[0], false)))
}

// wantSeparator returns an argument that must be a string and not empty.
func wantSeparator(v any) string {
	sep := wantString("sep", v)
	if sep == "" {
		panic(failure{errors.New("empty separator")})
	}
	return sep
}

// removeMethod is removeprefix or removesuffix, by the name of its argument.
func removeMethod(name string, trim func(s, affix string) string) builtin {
	return func(x *execution, v any, a *arguments) any {
		affix := wantString(name, a.bind(name)[0])
		x.chargeBytes(len(affix))
		return trim(text(v), affix)
	}
}

func methodReplace(x *execution, v any, a *arguments) any {
	p := a.bind("old", "new", "count=")
	old := wantString("old", p[0])
	replacement := wantString("new", p[1])
	count := wantInt("count", p[2], -1)
	return x.replace(text(v), old, replacement, count)
}

// replace is str.replace. It checks the size of the result before making it.
func (x *execution) replace(s, old, replacement string, count int) any {
	n := x.count(s, old)
	if count >= 0 {
		n = min(n, count)
	}
	grow := len(replacement) - len(old)
	if grow > 0 && n > x.limits.OutputBytes/grow {
		x.checkSize(x.limits.OutputBytes + 1)
	}
	x.chargeString(len(s) + n*grow)
	return strings.Replace(s, old, replacement, count)
}

func methodJoin(x *execution, v any, a *arguments) any {
	p := a.bind("iterable")
	items := x.iterate(p[0])
	x.step(1 + len(items))
	for i, item := range items {
		if _, ok := textOf(item); !ok {
			panic(failure{fmt.Errorf("sequence item %d: expected str instance, %s found", i, kindName(item))})
		}
	}
	return x.join(text(v), items)
}

// methodFormat is str.format, with fields by number, name or neither. No known chat template has attributes of fields,
// conversions or format specifications.
func methodFormat(x *execution, v any, a *arguments) any {
	_, marked := v.(markup)
	out := &output{x: x}
	automatic := 0
	for s := text(v); s != ""; {
		at := x.leading(s, func(r rune) bool { return r != '{' && r != '}' })
		if at == len(s) {
			out.write(s)
			break
		}
		out.write(s[:at])
		if strings.HasPrefix(s[at+1:], s[at:at+1]) { // {{ or }}
			out.write(s[at : at+1])
			s = s[at+2:]
			continue
		}
		end := strings.IndexByte(s[at:], '}')
		x.chargeBytes(max(end, 0))
		if s[at] == '}' || end < 0 {
			panic(failure{errors.New("unbalanced brace in format string")})
		}
		field := s[at+1 : at+end]
		if strings.Contains(field, "{") {
			panic(failure{unsupported("nested replacement fields")})
		}
		s = s[at+end+1:]
		out.write(x.formatField(field, a, &automatic, marked))
	}
	return out.text()
}

// formatField formats one replacement field. automatic is the number of fields without a name so far, or -1 after a
// field with a number. If the format is marked, it escapes the text of the field.
func (x *execution) formatField(field string, a *arguments, automatic *int, marked bool) string {
	x.step(1 + len(field)/charactersPerStep)
	field, spec, _ := strings.Cut(field, ":")
	field, _, converted := strings.Cut(field, "!")
	if converted || strings.ContainsAny(field, ".[") {
		panic(failure{unsupported("a field with more than a name in format")})
	}
	v := formatArgument(field, a, automatic)
	if m, ok := v.(markup); ok && marked {
		return string(m)
	}
	if spec != "" {
		panic(failure{unsupported("format specification %q", short(spec))})
	}
	text := x.str(v)
	if marked {
		text = x.escape(text)
	}
	return text
}

func formatArgument(name string, a *arguments, automatic *int) any {
	if name == "" {
		if *automatic < 0 {
			panic(failure{errors.New("cannot switch from manual field specification to automatic field numbering")})
		}
		name = strconv.Itoa(*automatic)
		*automatic++
	} else if _, err := strconv.Atoi(name); err == nil {
		if *automatic > 0 {
			panic(failure{errors.New("cannot switch from automatic field numbering to manual field specification")})
		}
		*automatic = -1
	}
	if n, err := strconv.Atoi(name); err == nil {
		if n < 0 || n >= len(a.positional) {
			panic(failure{errors.New("replacement index out of range")})
		}
		return a.positional[n]
	}
	v, ok := a.named(name)
	if !ok {
		panic(failure{fmt.Errorf("no argument named %q", short(name))})
	}
	return v
}

// put sets an entry of a dict.
func (x *execution) put(d *values.Dict, key, value any) {
	if !hashable(key) {
		panic(failure{unhashable(key)})
	}
	x.chargeLookup(key)
	d.Put(key, value)
}

func methodCopy(_ *execution, v any, a *arguments) any {
	a.bind()
	return v
}

func methodGet(x *execution, v any, a *arguments) any {
	p := a.bind("key", "default=")
	if len(a.names) > 0 {
		panic(failure{errors.New("takes no keyword arguments")})
	}
	d, _ := v.(*values.Dict)
	if !hashable(p[0]) {
		panic(failure{unhashable(p[0])})
	}
	x.chargeLookup(p[0])
	if found, ok := d.Lookup(p[0]); ok {
		return found
	}
	return orDefault(p[1], nil)
}

func methodItems(x *execution, v any, a *arguments) any {
	a.bind()
	d, _ := v.(*values.Dict)
	x.chargeList(6 * d.Len()) // including the pairs
	view := &values.List{Kind: values.View, Items: make([]any, 0, d.Len())}
	for key, value := range d.All() {
		view.Items = append(view.Items, newTuple(key, value))
	}
	return view
}

func methodKeys(x *execution, v any, a *arguments) any {
	a.bind()
	x.chargeList(0)
	d, _ := v.(*values.Dict)
	return &values.List{Kind: values.View, Items: slices.Clip(d.Keys())}
}

func methodValues(x *execution, v any, a *arguments) any {
	a.bind()
	x.chargeList(0)
	d, _ := v.(*values.Dict)
	return &values.List{Kind: values.View, Items: slices.Clip(d.Values())}
}

func methodListCount(x *execution, v any, a *arguments) any {
	p := a.bind("value")
	l, _ := v.(*values.List)
	n := int64(0)
	for _, item := range l.Items {
		if x.equal(item, p[0]) {
			n++
		}
	}
	return n
}

func methodListIndex(x *execution, v any, a *arguments) any {
	p := a.bind("value")
	l, _ := v.(*values.List)
	for i, item := range l.Items {
		same := x.equal(item, p[0])
		if same {
			return int64(i)
		}
	}
	panic(failure{errors.New("value is not in list")})
}
