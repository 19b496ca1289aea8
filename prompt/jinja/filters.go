package jinja

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// filters are Jinja2's filters and Transformers' tojson, without missingFilters. There is no autoescape, so that only
// safe and the escape filters make markup.
var filters map[string]builtin

// The table is filled in init because filters call functions that look up filters.
func init() {
	filters = map[string]builtin{
		"abs":        filterAbs,
		"capitalize": textFilter((*execution).capitalize),
		"count":      filterLength,
		"d":          filterDefault,
		"default":    filterDefault,
		"dictsort":   filterDictSort,
		"e":          filterEscape,
		"escape":     filterEscape,
		"first":      filterFirst,
		"float":      filterFloat,
		"format":     filterFormat,
		"indent":     filterIndent,
		"int":        filterInt,
		"items":      filterItems,
		"join":       filterJoin,
		"last":       filterLast,
		"length":     filterLength,
		"list":       filterList,
		"lower":      textFilter((*execution).lower),
		"map":        filterMap,
		"max":        extremeFilter(func(order int) bool { return order > 0 }),
		"min":        extremeFilter(func(order int) bool { return order < 0 }),
		"reject":     selectFilter(false, false),
		"rejectattr": selectFilter(true, false),
		"replace":    filterReplace,
		"reverse":    filterReverse,
		"round":      filterRound,
		"safe":       filterSafe,
		"select":     selectFilter(false, true),
		"selectattr": selectFilter(true, true),
		"sort":       filterSort,
		"string":     filterString,
		"title":      textFilter((*execution).titleWords),
		"tojson":     filterToJSON,
		"trim":       filterTrim,
		"unique":     filterUnique,
		"upper":      textFilter((*execution).upper),
	}
}

// missingFilters are Jinja2's filters that no known chat template uses and this package does not have.
var missingFilters = []string{
	"attr", "batch", "center", "filesizeformat", "forceescape", "groupby", "pprint", "random", "slice", "striptags",
	"sum", "truncate", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr",
}

func filterString(x *execution, v any, a *arguments) any {
	a.bind()
	if m, ok := v.(markup); ok {
		return m
	}
	return x.str(v)
}

// textFilter returns a filter without arguments on a value's text.
func textFilter(f func(x *execution, s string) string) builtin {
	return func(x *execution, v any, a *arguments) any {
		a.bind()
		return f(x, x.display(v))
	}
}

var htmlEscaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "'", "&#39;", `"`, "&#34;")

func (x *execution) escape(s string) string {
	x.step(1 + len(s)/charactersPerStep)
	size := len(s)
	for i := range len(s) {
		switch s[i] {
		case '&', '\'', '"':
			size += 4
		case '<', '>':
			size += 3
		}
	}
	x.chargeString(size)
	return htmlEscaper.Replace(s)
}

// titleWords is the filter title. Unlike str.title, it starts words only at spaces, hyphens and opening brackets.
func (x *execution) titleWords(s string) string {
	within, rest := false, 0 // rest is the position of the word's second character
	return x.recase(s, func(w *rewriter, i int, r rune) {
		first := !within
		within = !isTitleBreak(r)
		switch {
		case !within:
			w.WriteRune(r)
		case first:
			w.writeUpper(r)
			rest = i + utf8.RuneLen(r)
		default:
			w.writeLower(s[rest:], i-rest, r)
		}
	})
}

func isTitleBreak(r rune) bool { return IsSpace(r) || strings.ContainsRune("-({[<", r) }

func filterAbs(_ *execution, v any, a *arguments) any {
	a.bind()
	if f, ok := v.(float64); ok {
		return math.Abs(f)
	}
	n, ok := asInt(v)
	if !ok {
		panic(failure{fmt.Errorf("bad operand type for abs(): '%s'", kindName(v))})
	}
	return values.NormalInt(new(big.Int).Abs(n))
}

func filterDefault(_ *execution, v any, a *arguments) any {
	p := a.bind("default_value=", "boolean=")
	_, undefined := v.(Undefined)
	if undefined || truth(orDefault(p[1], false)) && !truth(v) {
		return orDefault(p[0], "")
	}
	return v
}

// sortKey prepares a value for comparison: text in lower case, unless caseSensitive.
func (x *execution) sortKey(v any, caseSensitive bool) any {
	if s, ok := textOf(v); ok && !caseSensitive {
		return x.lower(s)
	}
	return v
}

// sortItems returns items sorted by their keys. The sort is stable, also in reverse.
func (x *execution) sortItems(items, keys []any, reverse bool) []any {
	return pick(items, x.sorted(len(items), func(i, j int) bool {
		left, right := keys[i], keys[j]
		if reverse {
			left, right = right, left
		}
		order, _ := x.order("<", left, right)
		return order < 0
	}))
}

func filterDictSort(x *execution, v any, a *arguments) any {
	p := a.bind("case_sensitive=", "by=", "reverse=")
	d, ok := v.(*values.Dict)
	if !ok {
		panic(failure{fmt.Errorf("'%s' object has no items", kindName(v))})
	}
	part := 0
	switch orDefault(p[1], "key") {
	case "key":
	case "value":
		part = 1
	default:
		panic(failure{errors.New(`you can only sort by either "key" or "value"`)})
	}
	x.chargeList(8 * d.Len()) // including the pairs
	items := make([]any, 0, d.Len())
	keys := make([]any, 0, d.Len())
	for key, value := range d.All() {
		items = append(items, newTuple(key, value))
		keys = append(keys, x.sortKey([2]any{key, value}[part], truth(orDefault(p[0], false))))
	}
	return &values.List{Items: x.sortItems(items, keys, truth(orDefault(p[2], false)))}
}

func filterSort(x *execution, v any, a *arguments) any {
	p := a.bind("reverse=", "case_sensitive=", "attribute=")
	items := x.iterate(v)
	paths := []any{nil}
	switch attribute := orDefault(p[2], nil).(type) {
	case nil:
	case string:
		paths = paths[:0]
		x.chargeList(1 + len(attribute))
		for _, path := range strings.Split(attribute, ",") {
			paths = append(paths, path)
		}
	default:
		paths[0] = attribute
	}
	// including the lists of keys and the values of absent keys
	x.chargeList(len(items) * (4 + 3*len(paths)))
	keys := make([]any, len(items))
	for i, item := range items {
		key := &values.List{Items: make([]any, 0, len(paths))}
		for _, path := range paths {
			key.Items = append(key.Items, x.sortKey(x.follow(item, path), truth(orDefault(p[1], false))))
		}
		keys[i] = key
	}
	return &values.List{Items: x.sortItems(items, keys, truth(orDefault(p[0], false)))}
}

// follow looks up a path such as "function.name" or "0.role" in a value. A nil path returns the value itself.
func (x *execution) follow(v, path any) any {
	if path == nil {
		return v
	}
	s, ok := path.(string)
	if !ok {
		x.step(1)
		return x.item(v, path)
	}
	for more := true; more; {
		var part string
		part, s, more = strings.Cut(s, ".")
		x.step(1 + len(part)/charactersPerStep)
		key := any(part)
		if n, err := strconv.ParseInt(part, 10, 32); err == nil && strings.Trim(part, "0123456789") == "" {
			key = n
		}
		v = x.item(v, key)
	}
	return v
}

func filterFirst(x *execution, v any, a *arguments) any {
	a.bind()
	first := any(Undefined{reason: "no first item, sequence was empty"})
	if g, ok := v.(*generator); ok {
		if item, ok := x.pull(g); ok {
			first = item
		}
	} else if items := x.iterate(v); len(items) > 0 {
		first = items[0]
	}
	return first
}

func filterLast(x *execution, v any, a *arguments) any {
	a.bind()
	if _, ok := v.(*generator); ok {
		panic(failure{errors.New("'generator' object is not reversible")})
	}
	items := x.iterate(v)
	if len(items) == 0 {
		return Undefined{reason: "no last item, sequence was empty"}
	}
	return items[len(items)-1]
}

// pythonNumberText removes what float() and int() allow in the text of a number: white space around it and underscores
// between digits. ok is false if the text is not a number.
func pythonNumberText(s string) (string, bool) {
	s = strings.TrimFunc(s, IsSpace)
	if strings.HasPrefix(s, "_") || strings.HasSuffix(s, "_") || strings.Contains(s, "__") ||
		strings.ContainsAny(s, "xXpP") {
		return "", false
	}
	for i := 1; i+1 < len(s); i++ {
		if s[i] == '_' && (!isDigit(s[i-1]) || !isDigit(s[i+1])) {
			return "", false
		}
	}
	return strings.ReplaceAll(s, "_", ""), s != ""
}

// mostNumberText is the longest text of digits that is converted to a number, in bytes. A longer one is an error.
const mostNumberText = 64 << 10

// numberText counts the work of converting a value to a number, and reports whether it may be convertible.
func (x *execution) numberText(v any) bool {
	switch c := v.(type) {
	case string:
		x.step(1 + min(len(c), mostNumberText)/2)
		if len(c) <= mostNumberText {
			x.alloc(2 * len(c))
			return true
		}
		ofNumber := func(r rune) bool { return strings.ContainsRune("0123456789+-._eE", r) }
		if !x.allRunes(x.trim(c, IsSpace, true, true), ofNumber) {
			return false
		}
		panic(failure{fmt.Errorf("%w: a number of more than %d bytes of text", ErrLimit, mostNumberText)})
	case *big.Int:
		x.chargeBigInt(c)
		return true
	}
	return true
}

// toFloat is Python's float(); ok is false if that raises.
func toFloat(v any) (f float64, ok bool) {
	s, isString := v.(string)
	if !isString {
		return asFloat(v)
	}
	s, ok = pythonNumberText(s)
	if !ok {
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	return f, err == nil || errors.Is(err, strconv.ErrRange)
}

func filterFloat(x *execution, v any, a *arguments) any {
	p := a.bind("default=")
	if u, ok := v.(Undefined); ok {
		panic(failure{u.err()})
	}
	possible := x.numberText(v)
	if f, ok := toFloat(v); possible && ok {
		return f
	}
	return orDefault(p[0], 0.0)
}

func filterInt(x *execution, v any, a *arguments) any {
	p := a.bind("default=", "base=")
	base := wantInt("base", p[1], 10)
	if base != 10 {
		panic(failure{unsupported("base %d", base)})
	}
	if u, ok := v.(Undefined); ok {
		panic(failure{u.err()})
	}
	if n, ok := asInt(v); ok {
		return values.NormalInt(n)
	}
	if !x.numberText(v) {
		return orDefault(p[0], int64(0))
	}
	if s, ok := v.(string); ok {
		if s, ok := pythonNumberText(s); ok && len(s) <= values.MaxIntDigits {
			if n, ok := new(big.Int).SetString(s, 10); ok {
				return values.NormalInt(n)
			}
		}
	}
	f, ok := toFloat(v)
	if !ok || math.IsNaN(f) || math.IsInf(f, 0) {
		return orDefault(p[0], int64(0))
	}
	n, _ := new(big.Float).SetFloat64(math.Trunc(f)).Int(nil)
	return values.NormalInt(n)
}

func filterFormat(x *execution, v any, a *arguments) any {
	if _, ok := v.(markup); !ok {
		v = x.str(v)
	}
	if len(a.names) == 0 {
		return x.arithmetic("%", v, newTuple(a.positional...))
	}
	if len(a.positional) > 0 {
		panic(failure{errors.New("can't handle positional and keyword arguments at the same time")})
	}
	x.chargeDict(len(a.names))
	named := values.NewDict()
	for i, name := range a.names {
		named.Set(name, a.values[i])
	}
	return x.arithmetic("%", v, named)
}

func filterIndent(x *execution, v any, a *arguments) any {
	p := a.bind("width=", "first=", "blank=")
	s, ok := v.(string)
	if !ok {
		panic(failure{fmt.Errorf("can only indent str, not %s", kindName(v))})
	}
	indent, isString := p[0].(string)
	if !isString {
		width := wantInt("width", p[0], 4)
		x.chargeString(max(width, 0))
		indent = strings.Repeat(" ", max(width, 0))
	}
	first, blank := truth(orDefault(p[1], false)), truth(orDefault(p[2], false))
	x.chargeString(len(s))
	lines := x.splitLines(s+"\n", false).Items
	if len(indent) > 0 && len(lines) > x.limits.OutputBytes/len(indent) {
		x.checkSize(x.limits.OutputBytes + 1)
	}
	x.chargeString(len(s) + len(lines)*len(indent))
	var b strings.Builder
	b.Grow(len(s) + len(lines)*len(indent))
	for i, line := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		// first decides about the first line. Other lines are indented if they are not empty, or if blank is set.
		if i == 0 && first || i > 0 && (blank || line != "") {
			b.WriteString(indent)
		}
		b.WriteString(text(line))
	}
	return b.String()
}

func filterItems(x *execution, v any, a *arguments) any {
	a.bind()
	return x.lazily(func() nextItem {
		switch v.(type) {
		case Undefined:
			return nextOf(nil)
		case *values.Dict:
			return x.iterator(methodItems(x, v, a))
		}
		panic(failure{errors.New("can only get item pairs from a mapping")})
	})
}

func filterJoin(x *execution, v any, a *arguments) any {
	p := a.bind("d=", "attribute=")
	items := x.iterate(v)
	if attribute := orDefault(p[1], nil); attribute != nil {
		items = x.followAll(items, attribute)
	}
	return x.join(x.str(orDefault(p[0], "")), items)
}

func (x *execution) followAll(items []any, path any) []any {
	if path == nil {
		return items
	}
	x.chargeList(len(items))
	values := make([]any, len(items))
	for i, item := range items {
		values[i] = x.follow(item, path)
	}
	return values
}

func filterLength(x *execution, v any, a *arguments) any {
	a.bind()
	switch c := v.(type) {
	case string:
		x.chargeBytes(len(c))
		return int64(utf8.RuneCountInString(c))
	case *values.List:
		return int64(len(c.Items))
	case *values.Dict:
		return int64(c.Len())
	case Undefined:
		return int64(0)
	case *loop:
		c.has(x, math.MaxInt)
		return int64(len(c.items))
	}
	panic(failure{fmt.Errorf("object of type '%s' has no len()", kindName(v))})
}

func filterList(x *execution, v any, a *arguments) any {
	a.bind()
	items := x.iterate(v)
	x.chargeList(len(items))
	return &values.List{Items: slices.Clone(items)}
}

func filterMap(x *execution, v any, a *arguments) any {
	if !x.mini && !truth(v) {
		return x.transform(newTuple(), nil)
	}
	if len(a.positional) == 0 {
		return x.transform(v, func(item any) (any, bool) {
			p := a.bind("attribute", "default=")
			return x.followOr(item, unmarked(p[0]), orDefault(p[1], nil)), false
		})
	}
	name := text(a.positional[0])
	filter, known := x.template.dialect.filter(name)
	rest := &arguments{positional: a.positional[1:], names: a.names, values: a.values}
	return x.transform(v, func(item any) (any, bool) {
		if !known {
			panic(failure{fmt.Errorf("unknown filter %q", short(name))})
		}
		return x.callFilter(name, filter, item, rest), false
	})
}

// followOr is follow with a value that replaces an undefined result at each step, unless fallback is None.
func (x *execution) followOr(v, path, fallback any) any {
	if fallback == nil {
		return x.follow(v, path)
	}
	s, ok := path.(string)
	for more := true; more; {
		part := path
		if more = false; ok {
			part, s, more = strings.Cut(s, ".")
		}
		v = x.follow(v, part)
		if _, undefined := v.(Undefined); undefined {
			v = fallback
		}
	}
	return v
}

// extremeFilter is min or max. better reports whether a value of this order replaces the best value so far.
func extremeFilter(better func(order int) bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		p := a.bind("case_sensitive=", "attribute=")
		items := x.iterate(v)
		if len(items) == 0 {
			return Undefined{reason: "no aggregated item, sequence was empty"}
		}
		var best, bestKey any
		for i, item := range items {
			key := x.sortKey(x.follow(item, orDefault(p[1], nil)), truth(orDefault(p[0], false)))
			if i > 0 {
				order, ordered := x.order("<", key, bestKey)
				if !ordered || !better(order) {
					continue
				}
			}
			best, bestKey = item, key
		}
		return best
	}
}

// selectFilter is one of select, reject, selectattr and rejectattr.
func selectFilter(byAttribute, keep bool) builtin {
	return func(x *execution, v any, a *arguments) any {
		if !truth(v) {
			return x.transform(newTuple(), nil)
		}
		var path any
		rest := &arguments{positional: a.positional, names: a.names, values: a.values}
		missing := byAttribute && len(rest.positional) == 0
		if byAttribute && !missing {
			path = rest.positional[0]
			rest.positional = rest.positional[1:]
		}
		name, test, known := "", builtin(nil), true
		if len(rest.positional) > 0 {
			name = text(rest.positional[0])
			test, known = x.template.dialect.test(name)
			rest.positional = rest.positional[1:]
		}
		return x.transform(v, func(item any) (any, bool) {
			switch {
			case missing:
				panic(failure{errors.New("missing parameter for attribute name")})
			case !known:
				panic(failure{fmt.Errorf("unknown test %q", short(name))})
			}
			value := x.follow(item, path)
			if test != nil {
				value = x.callTest(name, test, value, rest)
			}
			return item, truth(value) != keep
		})
	}
}

func filterReplace(x *execution, v any, a *arguments) any {
	p := a.bind("old", "new", "count=")
	var texts [3]string
	for i, value := range [3]any{v, p[0], p[1]} {
		texts[i] = x.display(value)
	}
	count := -1
	if given := orDefault(p[2], nil); given != nil {
		count = wantInt("count", given, -1)
	}
	return x.replace(texts[0], texts[1], texts[2], count)
}

func filterReverse(x *execution, v any, a *arguments) any {
	a.bind()
	if s, ok := v.(string); ok {
		return x.sliceString(s, [3]int{0, 0, -1}, [3]bool{}, -1)
	}
	if _, isList := v.(*values.List); x.mini && !isList {
		panic(failure{unsupported("the filter reverse of a %s", kindName(v))})
	}
	items := x.iterate(v)
	x.chargeList(len(items))
	items = slices.Clone(items)
	slices.Reverse(items)
	if _, ok := v.(*generator); ok { // not reversible, so that the filter makes a list
		return &values.List{Items: items}
	}
	return x.generate(nextOf(items))
}

func filterRound(x *execution, v any, a *arguments) any {
	p := a.bind("precision=", "method=")
	precision := wantInt("precision", p[0], 0)
	f, ok := asFloat(v)
	if !ok {
		panic(failure{fmt.Errorf("type %s cannot be rounded", kindName(v))})
	}
	if precision < 0 || precision > 300 {
		panic(failure{unsupported("precision %d", precision)})
	}
	n, isInt := asInt(v)
	if isInt {
		x.chargeBigInt(n)
	}
	x.step(1 + precision)
	scale := math.Pow(10, float64(precision))
	switch orDefault(p[1], "common") {
	case "ceil":
		return math.Ceil(f*scale) / scale
	case "floor":
		return math.Floor(f*scale) / scale
	case "common":
	default:
		panic(failure{errors.New("method must be common, ceil or floor")})
	}
	if isInt {
		return values.NormalInt(n)
	}
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return f
	}
	// The nearest decimal; ties depend on the exact binary value. Python's round gives the same.
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(f, 'f', precision, 64), 64)
	if err != nil {
		panic(failure{err})
	}
	return rounded
}

// filterToJSON is Transformers' tojson: json.dumps that does not escape HTML, nor by default text beyond ASCII.
func filterToJSON(x *execution, v any, a *arguments) any {
	p := a.bind("ensure_ascii=", "indent=", "separators=", "sort_keys=")
	w := &jsonWriter{
		x:             x,
		out:           &output{x: x},
		ascii:         truth(orDefault(p[0], false)),
		itemSeparator: ", ",
		keySeparator:  ": ",
		sortKeys:      truth(orDefault(p[3], false)),
	}
	switch indent := orDefault(p[1], nil).(type) {
	case nil:
	case string:
		w.indented, w.indent, w.itemSeparator = true, indent, ","
	default:
		n, ok := smallInt(indent)
		if !ok {
			panic(failure{fmt.Errorf("indent must be an integer or str, not %s", kindName(indent))})
		}
		x.chargeString(max(n, 0))
		w.indented, w.indent, w.itemSeparator = true, strings.Repeat(" ", max(n, 0)), ","
	}
	if separators := orDefault(p[2], nil); separators != nil {
		pair := x.iterate(separators)
		if len(pair) != 2 {
			panic(failure{errors.New("separators must be two strings")})
		}
		w.itemSeparator = wantString("separator", pair[0])
		w.keySeparator = wantString("separator", pair[1])
	}
	w.value(v)
	return w.out.text()
}

func filterTrim(x *execution, v any, a *arguments) any {
	p := a.bind("chars=")
	return x.strip(x.display(v), p[0], true, true)
}

func filterUnique(x *execution, v any, a *arguments) any {
	p := a.bind("case_sensitive=", "attribute=")
	seen := values.NewDict()
	return x.transform(v, func(item any) (any, bool) {
		key := x.sortKey(x.follow(item, orDefault(p[1], nil)), truth(orDefault(p[0], false)))
		x.chargeLookup(key)
		if !hashable(key) {
			panic(failure{unhashable(key)})
		}
		if seen.Find(key) >= 0 {
			return nil, true
		}
		seen.Put(key, nil)
		x.chargeDict(1)
		return item, false
	})
}
