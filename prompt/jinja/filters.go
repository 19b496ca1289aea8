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
		"abs":         filterAbs,
		"attr":        filterAttr,
		"batch":       filterBatch,
		"capitalize":  textFilter((*execution).capitalize),
		"center":      filterCenter,
		"count":       filterLength,
		"d":           filterDefault,
		"default":     filterDefault,
		"dictsort":    filterDictSort,
		"e":           filterEscape,
		"escape":      filterEscape,
		"first":       filterFirst,
		"float":       filterFloat,
		"forceescape": filterForceEscape,
		"format":      filterFormat,
		"indent":      filterIndent,
		"int":         filterInt,
		"items":       filterItems,
		"join":        filterJoin,
		"last":        filterLast,
		"length":      filterLength,
		"list":        filterList,
		"lower":       textFilter((*execution).lower),
		"map":         filterMap,
		"max":         extremeFilter(func(order int) bool { return order > 0 }),
		"min":         extremeFilter(func(order int) bool { return order < 0 }),
		"reject":      selectFilter(false, false),
		"rejectattr":  selectFilter(true, false),
		"replace":     filterReplace,
		"reverse":     filterReverse,
		"round":       filterRound,
		"safe":        filterSafe,
		"select":      selectFilter(false, true),
		"selectattr":  selectFilter(true, true),
		"slice":       filterSlice,
		"sort":        filterSort,
		"string":      filterString,
		"sum":         filterSum,
		"title":       textFilter((*execution).titleWords),
		"tojson":      filterToJSON,
		"trim":        filterTrim,
		"truncate":    filterTruncate,
		"unique":      filterUnique,
		"upper":       textFilter((*execution).upper),
		"urlencode":   filterURLEncode,
		"wordcount":   filterWordCount,
	}
}

// missingFilters are Jinja2's filters that no known chat template uses and this package does not have.
var missingFilters = []string{
	"filesizeformat", "groupby", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr",
}

func filterString(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	if m, ok := v.(markup); ok {
		return m, nil
	}
	return x.str(v)
}

// textFilter returns a filter without arguments on a value's text.
func textFilter(f func(x *execution, s string) (string, error)) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		if _, err := a.bind(); err != nil {
			return nil, err
		}
		s, err := x.display(v)
		if err != nil {
			return nil, err
		}
		return f(x, s)
	}
}

var htmlEscaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "'", "&#39;", `"`, "&#34;")

func (x *execution) escape(s string) (string, error) {
	if err := x.step(1 + len(s)/charactersPerStep); err != nil {
		return "", err
	}
	size := len(s)
	for i := range len(s) {
		switch s[i] {
		case '&', '\'', '"':
			size += 4
		case '<', '>':
			size += 3
		}
	}
	if err := x.chargeString(size); err != nil {
		return "", err
	}
	return htmlEscaper.Replace(s), nil
}

// titleWords is the filter title. Unlike str.title, it starts words only at spaces, hyphens and opening brackets.
func (x *execution) titleWords(s string) (string, error) {
	within, rest := false, 0 // rest is the position of the word's second character
	return x.recase(s, func(w *rewriter, i int, r rune) error {
		first := !within
		if within = !isTitleBreak(r); !within {
			w.WriteRune(r)
			return nil
		}
		if first {
			w.writeUpper(r)
			rest = i + utf8.RuneLen(r)
			return nil
		}
		return w.writeLower(s[rest:], i-rest, r)
	})
}

func isTitleBreak(r rune) bool { return IsSpace(r) || strings.ContainsRune("-({[<", r) }

func filterAbs(_ *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	if f, ok := v.(float64); ok {
		return math.Abs(f), nil
	}
	n, ok := asInt(v)
	if !ok {
		return nil, fmt.Errorf("bad operand type for abs(): '%s'", kindName(v))
	}
	return values.NormalInt(new(big.Int).Abs(n)), nil
}

func filterAttr(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("name")
	if err != nil {
		return nil, err
	}
	name, err := x.str(p[0])
	if err != nil {
		return nil, err
	}
	if u, ok := v.(Undefined); ok {
		return nil, u.err()
	}
	if found, ok, err := x.typeAttribute(v, name); ok || err != nil { // attributes only, never items
		return found, err
	}
	return Undefined{Name: name, missingFrom: kindName(v)}, nil
}

// countAndFill returns the arguments of the filters batch and slice: the number of that name, which is at least 1, and
// the value that fills an incomplete list, or nil.
func countAndFill(a *arguments, name string) (n int, fill any, err error) {
	p, err := a.bind(name, "fill_with=")
	if err != nil {
		return 0, nil, err
	}
	if n, err = wantInt(name, p[0], 0); err == nil && n < 1 {
		err = fmt.Errorf("%s must be positive", name)
	}
	return n, orDefault(p[1], nil), err
}

func filterBatch(x *execution, v any, a *arguments) (any, error) {
	size, fill, err := countAndFill(a, "linecount")
	if err != nil {
		return nil, err
	}
	return x.lazily(func() (nextItem, error) {
		next, err := x.iterator(v)
		if err != nil {
			return nil, err
		}
		ahead, more, err := next() // the first item of the next batch
		return func() (any, bool, error) {
			batch := &pieces{x: x}
			for more && err == nil && len(batch.items) < size {
				if err = batch.add(ahead); err == nil {
					ahead, more, err = next()
				}
			}
			if n := len(batch.items); fill != nil && n > 0 && n < size && err == nil {
				err = x.chargeList(size)
				for err == nil && len(batch.items) < size {
					batch.items = append(batch.items, fill)
				}
			}
			return batch.list(), len(batch.items) > 0, err
		}, err
	})
}

func filterSlice(x *execution, v any, a *arguments) (any, error) {
	n, fill, err := countAndFill(a, "slices")
	if err != nil {
		return nil, err
	}
	return x.lazily(func() (nextItem, error) {
		items, err := x.iterate(v)
		if err != nil {
			return nil, err
		}
		if err := x.chargeList(5*n + len(items)); err != nil { // including the lists
			return nil, err
		}
		each, extra := len(items)/n, len(items)%n
		var out []any
		for i := range n {
			size := each
			if i < extra {
				size++
			}
			part := &values.List{Items: slices.Clone(items[:size])}
			items = items[size:]
			if fill != nil && i >= extra {
				part.Items = append(part.Items, fill)
			}
			out = append(out, part)
		}
		return nextOf(out), nil
	})
}

func filterCenter(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("width=")
	if err != nil {
		return nil, err
	}
	width, err := wantInt("width", p[0], 80)
	if err != nil {
		return nil, err
	}
	s, err := x.str(v)
	if err != nil {
		return nil, err
	}
	return x.center(s, " ", width)
}

func filterDefault(_ *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("default_value=", "boolean=")
	if err != nil {
		return nil, err
	}
	_, undefined := v.(Undefined)
	if undefined || truth(orDefault(p[1], false)) && !truth(v) {
		return orDefault(p[0], ""), nil
	}
	return v, nil
}

// sortKey prepares a value for comparison: text in lower case, unless caseSensitive.
func (x *execution) sortKey(v any, caseSensitive bool) (any, error) {
	if s, ok := textOf(v); ok && !caseSensitive {
		return x.lower(s)
	}
	return v, nil
}

// sortItems returns items sorted by their keys. The sort is stable, also in reverse.
func (x *execution) sortItems(items, keys []any, reverse bool) ([]any, error) {
	order, err := x.sorted(len(items), func(i, j int) (bool, error) {
		left, right := keys[i], keys[j]
		if reverse {
			left, right = right, left
		}
		order, _, err := x.order("<", left, right)
		return order < 0, err
	})
	if err != nil {
		return nil, err
	}
	return pick(items, order), nil
}

func filterDictSort(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("case_sensitive=", "by=", "reverse=")
	if err != nil {
		return nil, err
	}
	d, ok := v.(*values.Dict)
	if !ok {
		return nil, fmt.Errorf("'%s' object has no items", kindName(v))
	}
	part := 0
	switch orDefault(p[1], "key") {
	case "key":
	case "value":
		part = 1
	default:
		return nil, errors.New(`you can only sort by either "key" or "value"`)
	}
	if err := x.chargeList(8 * d.Len()); err != nil { // including the pairs
		return nil, err
	}
	items := make([]any, 0, d.Len())
	keys := make([]any, 0, d.Len())
	for key, value := range d.All() {
		items = append(items, newTuple(key, value))
		by, err := x.sortKey([2]any{key, value}[part], truth(orDefault(p[0], false)))
		if err != nil {
			return nil, err
		}
		keys = append(keys, by)
	}
	sorted, err := x.sortItems(items, keys, truth(orDefault(p[2], false)))
	return &values.List{Items: sorted}, err
}

func filterSort(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("reverse=", "case_sensitive=", "attribute=")
	if err != nil {
		return nil, err
	}
	items, err := x.iterate(v)
	if err != nil {
		return nil, err
	}
	paths := []any{nil}
	switch attribute := orDefault(p[2], nil).(type) {
	case nil:
	case string:
		paths = paths[:0]
		if err := x.chargeList(1 + len(attribute)); err != nil {
			return nil, err
		}
		for _, path := range strings.Split(attribute, ",") {
			paths = append(paths, path)
		}
	default:
		paths[0] = attribute
	}
	// including the lists of keys and the values of absent keys
	if err := x.chargeList(len(items) * (4 + 3*len(paths))); err != nil {
		return nil, err
	}
	keys := make([]any, len(items))
	for i, item := range items {
		key := &values.List{Items: make([]any, 0, len(paths))}
		for _, path := range paths {
			value, err := x.follow(item, path)
			if err != nil {
				return nil, err
			}
			if value, err = x.sortKey(value, truth(orDefault(p[1], false))); err != nil {
				return nil, err
			}
			key.Items = append(key.Items, value)
		}
		keys[i] = key
	}
	sorted, err := x.sortItems(items, keys, truth(orDefault(p[0], false)))
	return &values.List{Items: sorted}, err
}

// follow looks up a path such as "function.name" or "0.role" in a value. A nil path returns the value itself.
func (x *execution) follow(v, path any) (any, error) {
	if path == nil {
		return v, nil
	}
	s, ok := path.(string)
	if !ok {
		if err := x.step(1); err != nil {
			return nil, err
		}
		return x.item(v, path)
	}
	for more := true; more; {
		var part string
		part, s, more = strings.Cut(s, ".")
		if err := x.step(1 + len(part)/charactersPerStep); err != nil {
			return nil, err
		}
		key := any(part)
		if n, err := strconv.ParseInt(part, 10, 32); err == nil && strings.Trim(part, "0123456789") == "" {
			key = n
		}
		var err error
		if v, err = x.item(v, key); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func filterFirst(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	first := any(Undefined{reason: "no first item, sequence was empty"})
	if g, ok := v.(*generator); ok {
		item, ok, err := x.pull(g)
		if ok {
			first = item
		}
		return first, err
	}
	items, err := x.iterate(v)
	if len(items) > 0 {
		first = items[0]
	}
	return first, err
}

func filterLast(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	if _, ok := v.(*generator); ok {
		return nil, errors.New("'generator' object is not reversible")
	}
	items, err := x.iterate(v)
	if err != nil {
		return nil, err
	}
	if len(items) == 0 {
		return Undefined{reason: "no last item, sequence was empty"}, nil
	}
	return items[len(items)-1], nil
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
func (x *execution) numberText(v any) (bool, error) {
	switch c := v.(type) {
	case string:
		if err := x.step(1 + min(len(c), mostNumberText)/2); err != nil {
			return false, err
		}
		if len(c) <= mostNumberText {
			return true, x.alloc(2 * len(c))
		}
		if c, err := x.trim(c, IsSpace, true, true); err != nil {
			return false, err
		} else if long, err := x.allRunes(c, func(r rune) bool {
			return strings.ContainsRune("0123456789+-._eE",
				r)
		}); err != nil || !long {
			return false, err
		}
		return false, fmt.Errorf("%w: a number of more than %d bytes of text", ErrLimit, mostNumberText)
	case *big.Int:
		return true, x.chargeBigInt(c)
	}
	return true, nil
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

func filterFloat(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("default=")
	if err != nil {
		return nil, err
	}
	if u, ok := v.(Undefined); ok {
		return nil, u.err()
	}
	possible, err := x.numberText(v)
	if err != nil {
		return nil, err
	}
	if f, ok := toFloat(v); possible && ok {
		return f, nil
	}
	return orDefault(p[0], 0.0), nil
}

func filterInt(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("default=", "base=")
	if err != nil {
		return nil, err
	}
	base, err := wantInt("base", p[1], 10)
	if err != nil {
		return nil, err
	}
	if base != 10 {
		return nil, unsupported("base %d", base)
	}
	if u, ok := v.(Undefined); ok {
		return nil, u.err()
	}
	if n, ok := asInt(v); ok {
		return values.NormalInt(n), nil
	}
	if possible, err := x.numberText(v); err != nil || !possible {
		return orDefault(p[0], int64(0)), err
	}
	if s, ok := v.(string); ok {
		if s, ok := pythonNumberText(s); ok && len(s) <= values.MaxIntDigits {
			if n, ok := new(big.Int).SetString(s, 10); ok {
				return values.NormalInt(n), nil
			}
		}
	}
	f, ok := toFloat(v)
	if !ok || math.IsNaN(f) || math.IsInf(f, 0) {
		return orDefault(p[0], int64(0)), nil
	}
	n, _ := new(big.Float).SetFloat64(math.Trunc(f)).Int(nil)
	return values.NormalInt(n), nil
}

func filterFormat(x *execution, v any, a *arguments) (any, error) {
	if _, ok := v.(markup); !ok {
		var err error
		if v, err = x.str(v); err != nil {
			return nil, err
		}
	}
	if len(a.names) == 0 {
		return x.arithmetic("%", v, newTuple(a.positional...))
	}
	if len(a.positional) > 0 {
		return nil, errors.New("can't handle positional and keyword arguments at the same time")
	}
	if err := x.chargeDict(len(a.names)); err != nil {
		return nil, err
	}
	named := values.NewDict()
	for i, name := range a.names {
		named.Set(name, a.values[i])
	}
	return x.arithmetic("%", v, named)
}

func filterIndent(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("width=", "first=", "blank=")
	if err != nil {
		return nil, err
	}
	s, ok := v.(string)
	if !ok {
		return nil, fmt.Errorf("can only indent str, not %s", kindName(v))
	}
	indent, isString := p[0].(string)
	if !isString {
		width, err := wantInt("width", p[0], 4)
		if err != nil {
			return nil, err
		}
		if width > x.limits.OutputBytes {
			return nil, x.chargeString(width)
		}
		if err := x.chargeString(max(width, 0)); err != nil {
			return nil, err
		}
		indent = strings.Repeat(" ", max(width, 0))
	}
	first, blank := truth(orDefault(p[1], false)), truth(orDefault(p[2], false))
	if err := x.chargeString(len(s)); err != nil {
		return nil, err
	}
	split, err := x.splitLines(s+"\n", false)
	if err != nil {
		return nil, err
	}
	lines := split.Items
	if len(indent) > 0 && len(lines) > x.limits.OutputBytes/len(indent) {
		return nil, x.chargeString(x.limits.OutputBytes + 1)
	}
	if err := x.chargeString(len(s) + len(lines)*len(indent)); err != nil {
		return nil, err
	}
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
	return b.String(), nil
}

func filterItems(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	return x.lazily(func() (nextItem, error) {
		switch v.(type) {
		case Undefined:
			return nextOf(nil), nil
		case *values.Dict:
			view, err := methodItems(x, v, a)
			if err != nil {
				return nil, err
			}
			return x.iterator(view)
		}
		return nil, errors.New("can only get item pairs from a mapping")
	})
}

func filterJoin(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("d=", "attribute=")
	if err != nil {
		return nil, err
	}
	items, err := x.iterate(v)
	if err != nil {
		return nil, err
	}
	if attribute := orDefault(p[1], nil); attribute != nil {
		if items, err = x.followAll(items, attribute); err != nil {
			return nil, err
		}
	}
	separator, err := x.str(orDefault(p[0], ""))
	if err != nil {
		return nil, err
	}
	return x.join(separator, items)
}

func (x *execution) followAll(items []any, path any) ([]any, error) {
	if path == nil {
		return items, nil
	}
	if err := x.chargeList(len(items)); err != nil {
		return nil, err
	}
	values := make([]any, len(items))
	for i, item := range items {
		var err error
		if values[i], err = x.follow(item, path); err != nil {
			return nil, err
		}
	}
	return values, nil
}

func filterLength(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	switch c := v.(type) {
	case string:
		if err := x.chargeBytes(len(c)); err != nil {
			return nil, err
		}
		return int64(utf8.RuneCountInString(c)), nil
	case *values.List:
		return int64(len(c.Items)), nil
	case *values.Dict:
		return int64(c.Len()), nil
	case Undefined:
		return int64(0), nil
	case *loop:
		_, err := c.has(x, math.MaxInt)
		return int64(len(c.items)), err
	}
	return nil, fmt.Errorf("object of type '%s' has no len()", kindName(v))
}

func filterList(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	items, err := x.iterate(v)
	if err != nil {
		return nil, err
	}
	if err := x.chargeList(len(items)); err != nil {
		return nil, err
	}
	return &values.List{Items: slices.Clone(items)}, nil
}

func filterMap(x *execution, v any, a *arguments) (any, error) {
	if !x.mini && !truth(v) {
		return x.transform(newTuple(), nil)
	}
	if len(a.positional) == 0 {
		return x.transform(v, func(item any) (any, bool, error) {
			p, err := a.bind("attribute", "default=")
			if err != nil {
				return nil, false, err
			}
			value, err := x.followOr(item, unmarked(p[0]), orDefault(p[1], nil))
			return value, false, err
		})
	}
	name := text(a.positional[0])
	filter, known := x.template.dialect.filter(name)
	rest := &arguments{positional: a.positional[1:], names: a.names, values: a.values}
	return x.transform(v, func(item any) (any, bool, error) {
		if !known {
			return nil, false, fmt.Errorf("unknown filter %q", short(name))
		}
		value, err := x.callFilter(name, filter, item, rest)
		return value, false, err
	})
}

// followOr is follow with a value that replaces an undefined result at each step, unless fallback is None.
func (x *execution) followOr(v, path, fallback any) (any, error) {
	if fallback == nil {
		return x.follow(v, path)
	}
	s, ok := path.(string)
	for more := true; more; {
		part := path
		if more = false; ok {
			part, s, more = strings.Cut(s, ".")
		}
		var err error
		if v, err = x.follow(v, part); err != nil {
			return nil, err
		}
		if _, undefined := v.(Undefined); undefined {
			v = fallback
		}
	}
	return v, nil
}

// extremeFilter is min or max. better reports whether a value of this order replaces the best value so far.
func extremeFilter(better func(order int) bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
		p, err := a.bind("case_sensitive=", "attribute=")
		if err != nil {
			return nil, err
		}
		items, err := x.iterate(v)
		if err != nil {
			return nil, err
		}
		if len(items) == 0 {
			return Undefined{reason: "no aggregated item, sequence was empty"}, nil
		}
		var best, bestKey any
		for i, item := range items {
			key, err := x.follow(item, orDefault(p[1], nil))
			if err != nil {
				return nil, err
			}
			if key, err = x.sortKey(key, truth(orDefault(p[0], false))); err != nil {
				return nil, err
			}
			if i > 0 {
				order, ordered, err := x.order("<", key, bestKey)
				if err != nil {
					return nil, err
				}
				if !ordered || !better(order) {
					continue
				}
			}
			best, bestKey = item, key
		}
		return best, nil
	}
}

// selectFilter is one of select, reject, selectattr and rejectattr.
func selectFilter(byAttribute, keep bool) builtin {
	return func(x *execution, v any, a *arguments) (any, error) {
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
		return x.transform(v, func(item any) (any, bool, error) {
			switch {
			case missing:
				return nil, false, errors.New("missing parameter for attribute name")
			case !known:
				return nil, false, fmt.Errorf("unknown test %q", short(name))
			}
			value, err := x.follow(item, path)
			if err == nil && test != nil {
				value, err = x.callTest(name, test, value, rest)
			}
			return item, truth(value) != keep, err
		})
	}
}

func filterReplace(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("old", "new", "count=")
	if err != nil {
		return nil, err
	}
	var texts [3]string
	for i, value := range [3]any{v, p[0], p[1]} {
		if texts[i], err = x.display(value); err != nil {
			return nil, err
		}
	}
	count := -1
	if given := orDefault(p[2], nil); given != nil {
		if count, err = wantInt("count", given, -1); err != nil {
			return nil, err
		}
	}
	return x.replace(texts[0], texts[1], texts[2], count)
}

func filterReverse(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	if s, ok := v.(string); ok {
		return x.sliceString(s, [3]int{0, 0, -1}, [3]bool{}, -1)
	}
	if _, isList := v.(*values.List); x.mini && !isList {
		return nil, unsupported("the filter reverse of a %s", kindName(v))
	}
	items, err := x.iterate(v)
	if err != nil {
		return nil, err
	}
	if err := x.chargeList(len(items)); err != nil {
		return nil, err
	}
	items = slices.Clone(items)
	slices.Reverse(items)
	if _, ok := v.(*generator); ok { // not reversible, so that the filter makes a list
		return &values.List{Items: items}, nil
	}
	return x.generate(nextOf(items))
}

func filterRound(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("precision=", "method=")
	if err != nil {
		return nil, err
	}
	precision, err := wantInt("precision", p[0], 0)
	if err != nil {
		return nil, err
	}
	f, ok := asFloat(v)
	if !ok {
		return nil, fmt.Errorf("type %s cannot be rounded", kindName(v))
	}
	if precision < 0 || precision > 300 {
		return nil, unsupported("precision %d", precision)
	}
	n, isInt := asInt(v)
	if isInt {
		if err := x.chargeBigInt(n); err != nil {
			return nil, err
		}
	}
	if err := x.step(1 + precision); err != nil {
		return nil, err
	}
	scale := math.Pow(10, float64(precision))
	switch orDefault(p[1], "common") {
	case "ceil":
		return math.Ceil(f*scale) / scale, nil
	case "floor":
		return math.Floor(f*scale) / scale, nil
	case "common":
	default:
		return nil, errors.New("method must be common, ceil or floor")
	}
	if isInt {
		return values.NormalInt(n), nil
	}
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return f, nil
	}
	// The nearest decimal; ties depend on the exact binary value. Python's round gives the same.
	return strconv.ParseFloat(strconv.FormatFloat(f, 'f', precision, 64), 64)
}

func filterSum(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("attribute=", "start=")
	if err != nil {
		return nil, err
	}
	items, err := x.iterate(v)
	if err != nil {
		return nil, err
	}
	if items, err = x.followAll(items, orDefault(p[0], nil)); err != nil {
		return nil, err
	}
	total := orDefault(p[1], int64(0))
	if _, isString := textOf(total); isString {
		return nil, errors.New("sum() can't sum strings")
	}
	for _, item := range items {
		if total, err = x.arithmetic("+", total, item); err != nil {
			return nil, err
		}
	}
	return total, nil
}

// filterToJSON is Transformers' tojson: json.dumps that does not escape HTML, nor by default text beyond ASCII.
func filterToJSON(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("ensure_ascii=", "indent=", "separators=", "sort_keys=")
	if err != nil {
		return nil, err
	}
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
			return nil, fmt.Errorf("indent must be an integer or str, not %s", kindName(indent))
		}
		if n > x.limits.OutputBytes {
			return nil, x.chargeString(n)
		}
		if err := x.chargeString(max(n, 0)); err != nil {
			return nil, err
		}
		w.indented, w.indent, w.itemSeparator = true, strings.Repeat(" ", max(n, 0)), ","
	}
	if separators := orDefault(p[2], nil); separators != nil {
		pair, err := x.iterate(separators)
		if err != nil {
			return nil, err
		}
		if len(pair) != 2 {
			return nil, errors.New("separators must be two strings")
		}
		if w.itemSeparator, err = wantString("separator", pair[0]); err != nil {
			return nil, err
		}
		if w.keySeparator, err = wantString("separator", pair[1]); err != nil {
			return nil, err
		}
	}
	if err := w.value(v); err != nil {
		return nil, err
	}
	return w.out.text()
}

func filterTrim(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("chars=")
	if err != nil {
		return nil, err
	}
	s, err := x.display(v)
	if err != nil {
		return nil, err
	}
	return x.strip(s, p[0], true, true)
}

func filterTruncate(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("length=", "killwords=", "end=", "leeway=")
	if err != nil {
		return nil, err
	}
	s, ok := textOf(v)
	if !ok {
		return nil, unsupported("truncate of a %s", kindName(v))
	}
	length, err := wantInt("length", p[0], 255)
	if err != nil {
		return nil, err
	}
	suffix := orDefault(p[2], "...")
	end, err := wantString("end", suffix)
	if err != nil {
		return nil, err
	}
	leeway := 5
	if given := orDefault(p[3], nil); given != nil {
		if leeway, err = wantInt("leeway", given, 5); err != nil {
			return nil, err
		}
	}
	if err := x.chargeBytes(len(s) + len(end)); err != nil {
		return nil, err
	}
	keep := length - utf8.RuneCountInString(end)
	if keep < 0 || leeway < 0 {
		return nil, errors.New("length or leeway is too small")
	}
	if utf8.RuneCountInString(s) <= length+leeway {
		return v, nil
	}
	at, err := x.offset(s, keep)
	if err != nil {
		return nil, err
	}
	s = s[:at]
	if !truth(orDefault(p[1], false)) {
		if at := strings.LastIndexByte(s, ' '); at >= 0 {
			s = s[:at]
		}
	}
	if _, ok := v.(markup); ok {
		return x.addMarkup(markup(s), suffix)
	}
	return x.add(s, suffix)
}

func filterUnique(x *execution, v any, a *arguments) (any, error) {
	p, err := a.bind("case_sensitive=", "attribute=")
	if err != nil {
		return nil, err
	}
	seen := values.NewDict()
	return x.transform(v, func(item any) (any, bool, error) {
		key, err := x.follow(item, orDefault(p[1], nil))
		if err == nil {
			key, err = x.sortKey(key, truth(orDefault(p[0], false)))
		}
		if err == nil {
			err = x.chargeLookup(key)
		}
		if err == nil && !hashable(key) {
			err = unhashable(key)
		}
		if err != nil || seen.Find(key) >= 0 {
			return nil, true, err
		}
		seen.Put(key, nil)
		return item, false, x.chargeDict(1)
	})
}

func filterURLEncode(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	switch v.(type) {
	case *values.List, *values.Dict, Undefined:
		return nil, unsupported("urlencode of %s", kindName(v))
	}
	s, err := x.str(v)
	if err != nil {
		return nil, err
	}
	w, err := x.rewrite(s)
	if err != nil {
		return nil, err
	}
	const digits = "0123456789ABCDEF"
	for i := range len(s) {
		if err := w.at(i); err != nil {
			return nil, err
		}
		c := s[i]
		if isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'z' || strings.IndexByte("_.-~/", c) >= 0 {
			w.WriteByte(c)
		} else {
			w.WriteByte('%')
			w.WriteByte(digits[c>>4])
			w.WriteByte(digits[c&0xF])
		}
	}
	return w.done()
}

func filterWordCount(x *execution, v any, a *arguments) (any, error) {
	if _, err := a.bind(); err != nil {
		return nil, err
	}
	s, err := x.str(v)
	if err != nil {
		return nil, err
	}
	count := x.meter(s)
	words, within := int64(0), false
	for i, r := range s {
		if err := count.at(i); err != nil {
			return nil, err
		}
		was := within
		if within = isNameRune(r); within && !was {
			words++
		}
	}
	return words, nil
}
