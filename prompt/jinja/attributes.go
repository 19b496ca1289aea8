package jinja

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// namespace is the result of namespace(), the only value that a template can change.
type namespace struct{ values *values.Dict }

// set sets an attribute. Python's sandbox hides names that begin with an underscore. Transformers 5.23 rejects these
// names, but no engine has it yet.
func (n *namespace) set(x *execution, name string, value any) {
	if _, exists := n.values.Get(name); !exists {
		x.alloc(entrySize)
	}
	n.values.Set(name, value)
}

// attribute is v.name. Attributes and methods take precedence over items.
func (x *execution) attribute(v any, name string) any {
	if u, ok := v.(Undefined); ok {
		panic(failure{u.err()})
	}
	if found, ok := x.typeAttribute(v, name); ok {
		return found
	}
	if v == any(dictType) && !x.mini {
		return v // dict[name], a types.GenericAlias; a call of it makes a dict
	}
	if d, ok := v.(*values.Dict); ok &&
		(x.mini || !strings.HasPrefix(name, "__") || !slices.Contains(dictInternals, name)) {
		if value, ok := d.Get(name); ok {
			return value
		}
	}
	return Undefined{Name: name, missingFrom: kindName(v)}
}

// item is v[key]. Items take precedence; then, if key is a name, attributes and methods.
func (x *execution) item(v, key any) any {
	switch c := v.(type) {
	case Undefined:
		panic(failure{c.err()})
	case *values.Dict:
		if hashable(key) {
			x.chargeLookup(key)
			if value, ok := c.Lookup(key); ok {
				return value
			}
		}
	case *values.List:
		if f, isFloat := key.(float64); isFloat && x.mini && f == math.Trunc(f) && math.Abs(f) < 1<<31 {
			key = int64(f)
		}
		n, ok := smallInt(key)
		if ok && (x.mini || c.Kind != values.View) {
			if n < 0 {
				n += len(c.Items)
			}
			if n >= 0 && n < len(c.Items) {
				return c.Items[n]
			}
		}
	case *function:
		if c == dictType && !x.mini {
			return c // as in attribute
		}
	case markup:
		if n, ok := smallInt(key); ok {
			return marked(x.character(string(c), n))
		}
	case string:
		if n, ok := smallInt(key); ok {
			return x.character(c, n)
		}
	}
	if name, ok := textOf(key); ok {
		if found, ok := x.typeAttribute(v, name); ok {
			return found
		}
		return Undefined{Name: name, missingFrom: kindName(v)}
	}
	if isNumber(key) {
		return Undefined{Name: x.str(key), missingFrom: kindName(v)}
	}
	return Undefined{Name: kindName(key), missingFrom: kindName(v)}
}

// character is text[n].
func (x *execution) character(text string, n int) any {
	if n < 0 {
		x.chargeBytes(len(text))
		n += utf8.RuneCountInString(text)
	}
	if n >= 0 && n < len(text) {
		at := x.offset(text, n)
		if at < len(text) {
			r, _ := utf8.DecodeRuneInString(text[at:])
			return character(r)
		}
	}
	return Undefined{Name: "index", missingFrom: "str"}
}

// dictInternals are the names that every dict has for Python's own use. The sandbox hides them, even from a key.
var dictInternals = strings.Fields(`__class__ __class_getitem__ __contains__ __delattr__ __delitem__ __dir__ __doc__
	__eq__ __format__ __ge__ __getattribute__ __getitem__ __getstate__ __gt__ __hash__ __init__ __init_subclass__
	__ior__ __iter__ __le__ __len__ __lt__ __ne__ __new__ __or__ __reduce__ __reduce_ex__ __repr__ __reversed__
	__ror__ __setattr__ __setitem__ __sizeof__ __str__ __subclasshook__`)

var numberAttributes = strings.Fields(`as_integer_ratio bit_count bit_length conjugate denominator from_bytes fromhex
	hex imag is_integer numerator real to_bytes`)

// otherAttributes are attributes of Python's types that this package does not have.
var otherAttributes = map[string][]string{
	"bool": numberAttributes, "int": numberAttributes, "float": numberAttributes, "range": {"start", "step", "stop"},
	"Markup": {"escape", "striptags", "unescape"}, "dict view": {"isdisjoint", "mapping"},
	"generator": {"close", "gi_running", "gi_suspended", "gi_yieldfrom", "send", "throw"},
	"function":  {"arguments", "caller", "catch_kwargs", "catch_varargs", "explicit_caller", "name"},
}

// typeAttribute returns an attribute or method that belongs to the value's type.
func (x *execution) typeAttribute(v any, name string) (found any, ok bool) {
	var methods map[string]builtin
	switch v.(type) {
	case string, *values.Dict, *values.List:
		if x.mini { // methods are not attributes; see applyMini
			return nil, false
		}
	}
	call := callNamed
	switch c := v.(type) {
	case string:
		methods = stringMethods
	case markup:
		methods, call = stringMethods, callMarkup
	case *values.Dict:
		methods = dictMethods
	case *values.List:
		switch c.Kind {
		case values.PlainList:
			methods = listMethods
		case values.Tuple, values.Range:
			methods = tupleMethods
		}
	case *function:
		if _, exists := dictMethods[name]; exists && c == dictType && !x.mini {
			if methods = dictMethods; name != "fromkeys" {
				panic(failure{unsupported("the attribute %s of dict", name)})
			}
		}
	case *namespace:
		found, ok = c.values.Get(name)
		if !ok || x.mini || !strings.HasPrefix(name, "_") {
			return found, ok
		}
	case *loop:
		return c.attribute(x, name)
	}
	method, isMethod := methods[name]
	if !ok && !isMethod {
		if _, isDict := v.(*values.Dict); !isDict && slices.Contains(otherAttributes[kindName(v)], name) {
			panic(failure{unsupported("the attribute %s of a %s", name, kindName(v))})
		}
		return nil, false
	}
	if method == nil {
		// The sandbox hides private names, and the immutable one methods that would change a list or dict.
		return Undefined{
			Name:        name,
			missingFrom: kindName(v),
			reason:      fmt.Sprintf("access to attribute '%s' of '%s' object is unsafe", name, kindName(v)),
		}, true
	}
	return &function{name: name, call: func(x *execution, a *arguments) any {
		return call(x, name, method, v, a)
	}}, true
}

// attribute returns an attribute of the variable loop. Some need items that the loop has not reached.
func (l *loop) attribute(x *execution, name string) (v any, ok bool) {
	more, i := false, int64(l.index)
	switch name {
	case "revindex", "revindex0", "length":
		l.has(x, math.MaxInt)
	case "last", "nextitem":
		more = l.has(x, l.index+1)
	}
	n := int64(len(l.items))
	switch name {
	case "index":
		return i + 1, true
	case "index0":
		return i, true
	case "revindex":
		return n - i, true
	case "revindex0":
		return n - i - 1, true
	case "first":
		return i == 0, true
	case "last":
		return !more, true
	case "length":
		return n, true
	case "depth":
		return int64(l.depth + 1), true
	case "depth0":
		return int64(l.depth), true
	case "previtem":
		if i == 0 {
			return Undefined{Name: name, reason: "there is no previous item"}, true
		}
		return l.items[i-1], true
	case "nextitem":
		if !more {
			return Undefined{Name: name, reason: "there is no next item"}, true
		}
		return l.items[i+1], true
	case "cycle", "changed":
		return &function{name: name, call: globalUnsupported}, true
	}
	return nil, false
}

// slice is v[start:stop:step].
func (x *execution) slice(v any, bounds [3]any) any {
	if x.mini {
		if v, done := x.miniSlice(v, bounds); done {
			return v
		}
	}
	if u, ok := v.(Undefined); ok {
		panic(failure{u.err()})
	}
	var set [3]bool
	var at [3]int
	for i, b := range bounds {
		switch n := b.(type) {
		case nil:
		case *big.Int:
			at[i], set[i] = n.Sign()*(1<<31-1), true
		default:
			index, ok := smallInt(n)
			if !ok {
				if wide, isInt := n.(int64); isInt { // beyond any length: clamp
					index, ok = 1<<31-1, true
					if wide < 0 {
						index = -index
					}
				}
			}
			if !ok {
				panic(failure{unsupported("a slice of a %s with these indices", kindName(v))})
			}
			at[i], set[i] = index, true
		}
	}
	step := 1
	if set[2] {
		if step = at[2]; step == 0 {
			panic(failure{errors.New("slice step cannot be zero")})
		}
	}
	switch c := v.(type) {
	case markup:
		return marked(x.sliceString(string(c), at, set, step))
	case string:
		return x.sliceString(c, at, set, step)
	case *values.List:
		kind := c.Kind
		if x.mini {
			kind = values.View
		} else if c.Kind == values.View {
			break
		}
		start, stop := sliceBounds(len(c.Items), at, set, step)
		n := 0
		if step > 0 && stop > start {
			n = (stop-start-1)/step + 1
		} else if step < 0 && start > stop {
			n = (start-stop-1)/-step + 1
		}
		if step == 1 { // lists never change, so that the slice can share the memory
			x.chargeList(0)
			start = min(start, len(c.Items))
			return &values.List{Kind: kind, Items: c.Items[start : start+n : start+n]}
		}
		x.chargeList(n)
		out := &values.List{Kind: kind, Items: make([]any, 0, n)}
		for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
			out.Items = append(out.Items, c.Items[i])
		}
		return out
	}
	panic(failure{unsupported("a slice of a %s with these indices", kindName(v))})
}

func (x *execution) sliceString(s string, at [3]int, set [3]bool, step int) any {
	x.chargeBytes(len(s))
	n := utf8.RuneCountInString(s)
	start, stop := sliceBounds(n, at, set, step)
	if step == 1 && n == len(s) { // ASCII
		return s[start:max(start, stop)]
	}
	if step == 1 {
		from := x.offset(s, start)
		size := x.offset(s[from:], max(stop-start, 0))
		return s[from : from+size]
	}
	w := x.rewrite(s)
	// One pass over s, forwards or backwards. next is the position of the next character to take.
	i, next := 0, start
	if step < 0 {
		i = n - 1
	}
	for done := 0; done < len(s) && (step > 0 && i < stop || step < 0 && i > stop); {
		w.at(done)
		var r rune
		var size int
		if step > 0 {
			r, size = utf8.DecodeRuneInString(s[done:])
		} else {
			r, size = utf8.DecodeLastRuneInString(s[:len(s)-done])
		}
		if i == next {
			w.WriteRune(r)
			next += step
		}
		done += size
		if step > 0 {
			i++
		} else {
			i--
		}
	}
	return w.done()
}

// offset returns the byte position of character n of s; len(s) if there is none.
func (x *execution) offset(s string, n int) int {
	if n <= 0 {
		return 0
	}
	count := x.meter(s)
	for i := range s {
		count.at(i)
		if n == 0 {
			return i
		}
		n--
	}
	return len(s)
}

// sliceBounds returns the first position of a slice of n items, and the position before which it stops.
func sliceBounds(n int, at [3]int, set [3]bool, step int) (start, stop int) {
	low, high := 0, n // the range of valid bounds
	if step < 0 {
		low, high = -1, n-1
	}
	bound := func(i, fallback int) int {
		if !set[i] {
			return fallback
		}
		b := at[i]
		if b < 0 {
			b += n
		}
		return min(max(b, low), high)
	}
	if step > 0 {
		return bound(0, 0), bound(1, n)
	}
	return bound(0, n-1), bound(1, -1)
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
