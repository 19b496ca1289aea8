package jinja

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"math/big"
)

// A template value is one of:
//
//	nil                Python's None, JSON's null
//	bool
//	int64              an integer that fits
//	*big.Int           an integer that does not fit int64; never one that does
//	float64
//	string             valid UTF-8
//	*List              a list, or a tuple
//	*Dict              a dict, in insertion order
//	Undefined          a name or item that does not exist
//
// and, only during a render: markup, a generator, a namespace, a loop, or a callable.

// Undefined is the value of a name, attribute or item that does not exist. It prints as nothing, is false and iterates
// as empty. Arithmetic, ordering, calls and look-ups on it are errors.
type Undefined struct {
	// Name is the name that was looked up, for messages; empty if unknown.
	Name string
	// missingFrom is the type of the value that has no attribute Name; empty for a variable.
	missingFrom string
	// reason replaces the usual message if a value exists but must not be used.
	reason string
}

func (u Undefined) err() error {
	switch {
	case u.reason != "":
		return errors.New(u.reason)
	case u.Name == "":
		return errors.New("value is undefined")
	case u.missingFrom != "":
		return fmt.Errorf("'%s object' has no attribute '%s'", u.missingFrom, short(u.Name))
	}
	return fmt.Errorf("'%s' is undefined", short(u.Name))
}

// List is a Python list. Inside a template, it may also be another of Python's sequences.
type List struct {
	Items []any
	kind  listKind
}

// listKind is the Python sequence that a List represents. The kinds differ in equality, indexing and printing.
type listKind uint8

const (
	kindList listKind = iota
	kindTuple
	kindRange
	kindView // the result of dict.keys, dict.values and dict.items
)

// NewList returns a list of items. It owns the slice.
func NewList(items ...any) *List { return &List{Items: items} }

// Len returns the number of items; a nil list has none.
func (l *List) Len() int {
	if l == nil {
		return 0
	}
	return len(l.Items)
}

func newTuple(items ...any) *List { return &List{Items: items, kind: kindTuple} }

// Dict is a Python dict: keys in the order of their first insertion. The zero Dict is empty and ready to use. Keys that
// are equal in Python (1, 1.0, True) are one key.
type Dict struct {
	keys   []any
	values []any
	index  *dictIndex // finds the position of a key; nil while the dict has at most smallDict keys
}

// smallDict is the size up to which a linear search is faster than an index. Most JSON objects are smaller.
const smallDict = 16

// NewDict returns an empty dict.
func NewDict() *Dict { return &Dict{} }

// DictOf returns a dict of alternating keys and values. The keys are distinct strings. It takes DictBytes of memory.
func DictOf(keysAndValues ...any) *Dict {
	n := len(keysAndValues) / 2
	both := make([]any, 2*n)
	d := &Dict{keys: both[:n:n], values: both[n:]}
	for i := range n {
		d.keys[i], d.values[i] = keysAndValues[2*i], keysAndValues[2*i+1]
	}
	return d
}

// DictBytes returns the memory of a dict of n keys without the keys and values themselves, in bytes.
func DictBytes(n int) int { return dictBytes + 8 + 2*anyBytes*n }

// Len returns the number of keys; a nil dict has none.
func (d *Dict) Len() int {
	if d == nil {
		return 0
	}
	return len(d.keys)
}

// Get returns the value of a string key, and whether the key exists. A nil dict has no keys.
func (d *Dict) Get(key string) (any, bool) {
	if i := d.findString(key); i >= 0 {
		return d.values[i], true
	}
	return nil, false
}

// Set sets the value of a string key. An existing key keeps its position.
func (d *Dict) Set(key string, value any) {
	if i := d.findString(key); i >= 0 {
		d.values[i] = value
		return
	}
	d.append(boxed(key), value)
}

// boxed returns a string as an any. Strings of nearly every chat need no allocation.
func boxed(s string) any {
	switch s {
	case "role":
		return "role"
	case "content":
		return "content"
	case "system":
		return "system"
	case "user":
		return "user"
	case "assistant":
		return "assistant"
	case "type":
		return "type"
	case "text":
		return "text"
	}
	return s
}

// All iterates over keys and values in order. Keys from JSON are strings; a template can add keys of other types.
func (d *Dict) All() iter.Seq2[any, any] {
	return func(yield func(any, any) bool) {
		if d == nil {
			return
		}
		for i, k := range d.keys {
			if !yield(k, d.values[i]) {
				return
			}
		}
	}
}

// Clone returns a dict with the same keys and the same values (a shallow copy).
func (d *Dict) Clone() *Dict {
	c := &Dict{}
	for k, v := range d.All() {
		c.append(k, v)
	}
	return c
}

func (d *Dict) findString(key string) int {
	if d == nil {
		return -1
	}
	if d.index != nil {
		return d.index.findString(d, key)
	}
	for i, k := range d.keys {
		s, ok := k.(string)
		if !ok {
			s, ok = textOf(k)
		}
		if ok && s == key {
			return i
		}
	}
	return -1
}

// append adds a key that is not in the dict yet.
func (d *Dict) append(key, value any) {
	d.keys = append(d.keys, key)
	d.values = append(d.values, value)
	switch {
	case d.index != nil:
		d.index.add(d)
	case len(d.keys) > smallDict:
		d.index = &dictIndex{}
		d.index.add(d)
	}
}

// find returns the position of any hashable key, or -1.
func (d *Dict) find(key any) int {
	key = hashKey(key)
	if s, ok := key.(string); ok {
		return d.findString(s)
	}
	if d.index != nil {
		return d.index.find(d, key)
	}
	for i, k := range d.keys {
		if hashKey(k) == key {
			return i
		}
	}
	return -1
}

func (d *Dict) get(key any) (any, bool) {
	if i := d.find(key); i >= 0 {
		return d.values[i], true
	}
	return nil, false
}

func (d *Dict) set(key, value any) {
	if i := d.find(key); i >= 0 {
		d.values[i] = value
		return
	}
	d.append(key, value)
}

// bigKey is the map key of a big integer. Its type distinguishes it from a string with the same bytes.
type bigKey string

// hashKey maps keys that are equal in Python to one comparable Go value.
func hashKey(key any) any {
	switch k := key.(type) {
	case bool:
		if k {
			return int64(1)
		}
		return int64(0)
	case float64:
		if k == math.Trunc(k) && math.Abs(k) < 1<<63 {
			return int64(k)
		}
	case markup:
		return string(k)
	case Undefined:
		return Undefined{} // all are equal
	case *big.Int:
		return bigKey(fmt.Sprint(k.Sign(), " ") + string(k.Bytes()))
	}
	return key
}

// hashable reports whether a value may be a dict key. Python also allows tuples; no known chat template uses them.
func hashable(v any) bool {
	switch v.(type) {
	case nil, bool, int64, *big.Int, float64, string, markup, Undefined:
		return true
	}
	return false
}

func unhashable(v any) error { return unsupported("a %s as a key", kindName(v)) }

// normalInt returns n as an int64 if it fits, else n itself.
func normalInt(n *big.Int) any {
	if n.IsInt64() {
		return n.Int64()
	}
	return n
}

// truth is Python's bool().
func truth(v any) bool {
	switch x := v.(type) {
	case nil, Undefined:
		return false
	case bool:
		return x
	case int64:
		return x != 0
	case *big.Int:
		return x.Sign() != 0
	case float64:
		return x != 0
	case string:
		return x != ""
	case markup:
		return x != ""
	case *List:
		return len(x.Items) > 0
	case *Dict:
		return len(x.keys) > 0
	}
	return true
}

// kindName returns Python's name of a value's type, for error messages.
func kindName(v any) string {
	switch x := v.(type) {
	case nil:
		return "None"
	case bool:
		return "bool"
	case int64, *big.Int:
		return "int"
	case float64:
		return "float"
	case string:
		return "str"
	case markup:
		return "Markup"
	case *generator:
		return "generator"
	case *List:
		return [...]string{"list", "tuple", "range", "dict view"}[x.kind]
	case *Dict:
		return "dict"
	case Undefined:
		return "Undefined"
	case *namespace:
		return "Namespace"
	case *loop:
		return "LoopContext"
	case *function:
		return "function"
	}
	return "object"
}
