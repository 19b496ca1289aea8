package jinja

import (
	"errors"
	"fmt"
	"math/big"

	"kvepp/prompt/values"
)

// During a render, a value may also be Undefined, markup, a generator, a namespace, a loop, or a callable.

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

// Key says that all are equal as keys of a dict.
func (Undefined) Key() any { return Undefined{} }

func newTuple(items ...any) *values.List { return &values.List{Items: items, Kind: values.Tuple} }

// hashable reports whether a value may be a dict key. Python also allows tuples; no known chat template uses them.
func hashable(v any) bool {
	switch v.(type) {
	case nil, bool, int64, *big.Int, float64, string, markup, Undefined:
		return true
	}
	return false
}

func unhashable(v any) error { return unsupported("a %s as a key", kindName(v)) }

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
	case *values.List:
		return len(x.Items) > 0
	case *values.Dict:
		return len(x.Keys()) > 0
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
	case *values.List:
		return [...]string{"list", "tuple", "range", "dict view"}[x.Kind]
	case *values.Dict:
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
