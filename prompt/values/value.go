// Package values has the values of JSON as Python has them, and reads and writes them.
//
// It owns the values, a reader of JSON that bounds their memory, and the JSON that the Rust crate serde_json writes.
// What else a template can make of values is prompt/jinja's. It never trusts its input. No goroutine may change a List
// or a Dict while another reads it.
package values

import (
	"fmt"
	"iter"
	"math"
	"math/big"
)

// A value is one of:
//
//	nil                Python's None, JSON's null
//	bool
//	int64              an integer that fits
//	*big.Int           an integer that does not fit int64; never one that does
//	float64
//	string             valid UTF-8
//	*List              a list, or a tuple
//	*Dict              a dict, in insertion order
//
// or one of a template's own, which may be Keyed.

// List is a Python list. Inside a template, it may also be another of Python's sequences.
type List struct {
	Items []any
	Kind  ListKind
}

// ListKind is the Python sequence that a List represents. The kinds differ in equality, indexing and printing.
type ListKind uint8

const (
	PlainList ListKind = iota
	Tuple
	Range
	View // the result of dict.keys, dict.values and dict.items
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

// Keyed is a value of a template that equals another value as the key of a dict: the result of Key.
type Keyed interface{ Key() any }

// textOf returns the text of a key that is or equals a string.
func textOf(key any) (s string, ok bool) {
	if s, ok = key.(string); !ok {
		if k, keyed := key.(Keyed); keyed {
			s, ok = k.Key().(string)
		}
	}
	return s, ok
}

// Keys and Values return the keys and the values in order. The dict owns both slices.
func (d *Dict) Keys() []any   { return d.keys }
func (d *Dict) Values() []any { return d.values }

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

// Find returns the position of any hashable key, or -1.
func (d *Dict) Find(key any) int {
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

// Lookup is Get for any hashable key.
func (d *Dict) Lookup(key any) (any, bool) {
	if i := d.Find(key); i >= 0 {
		return d.values[i], true
	}
	return nil, false
}

// Put is Set for any hashable key.
func (d *Dict) Put(key, value any) {
	if i := d.Find(key); i >= 0 {
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
	case string:
	case bool:
		if k {
			return int64(1)
		}
		return int64(0)
	case float64:
		if k == math.Trunc(k) && math.Abs(k) < 1<<63 {
			return int64(k)
		}
	case *big.Int:
		return bigKey(fmt.Sprint(k.Sign(), " ") + string(k.Bytes()))
	case Keyed:
		return k.Key()
	}
	return key
}

// NormalInt returns n as an int64 if it fits, else n itself.
func NormalInt(n *big.Int) any {
	if n.IsInt64() {
		return n.Int64()
	}
	return n
}
