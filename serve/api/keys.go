package api

import (
	"encoding/json"
	"errors"
	"net/http"
	"reflect"
	"strings"
	"sync"
)

// encoding/json matches keys regardless of case, and uses the last of two equal keys. Dynamo's services (serde) do not:
// a key in another case is another key, and a repeated field is an error.

// decode is json.Unmarshal with serde's keys. v points to a zero value. decode may change body.
func decode(body []byte, v any) error {
	into := reflect.ValueOf(v).Elem()
	err := json.Unmarshal(body, v)
	if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
		return err
	}
	k := keyChecker{text: body}
	if _, twice := k.value(0, into.Type()); twice != nil {
		return twice
	}
	if k.changed {
		into.SetZero()
		err = json.Unmarshal(body, v)
	}
	return err
}

// keyChecker walks over a valid JSON text. It renames keys that encoding/json would match to a field although their
// case differs. It refuses a repeated field.
type keyChecker struct {
	text    []byte
	changed bool
}

// value walks over the value at i, which is decoded into a t (nil: ignored), and returns its end.
func (k *keyChecker) value(i int, t reflect.Type) (int, error) {
	i = k.space(i)
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch c := k.text[i]; {
	case t == nil || c != '{' && c != '[' || !holdsFields(t):
		return k.skip(i), nil
	case c == '[':
		if t.Kind() != reflect.Slice && t.Kind() != reflect.Array {
			return k.skip(i), nil
		}
		for i = k.space(i + 1); k.text[i] != ']'; i = k.next(i) {
			var err error
			if i, err = k.value(i, t.Elem()); err != nil {
				return i, err
			}
		}
		return i + 1, nil
	}
	var fields map[string]reflect.Type
	if t.Kind() == reflect.Struct {
		fields = fieldsOf(t)
	}
	seen := map[string]bool{}
	for i = k.space(i + 1); k.text[i] != '}'; i = k.next(i) {
		end := k.skip(i)
		of := reflect.Type(nil)
		if t.Kind() == reflect.Map {
			of = t.Elem()
		} else if fields != nil {
			var name string
			if err := json.Unmarshal(k.text[i:end], &name); err != nil {
				return i, err
			}
			if of = fields[name]; of == nil {
				k.annul(k.text[i+1:end-1], fields, name)
			} else if seen[name] {
				return i, Refuse(http.StatusUnprocessableEntity, "%s: the key is there twice", name)
			}
			if of != nil {
				seen[name] = true
			}
		}
		var err error
		if i, err = k.value(k.space(end)+1, of); err != nil { // behind the colon
			return i, err
		}
	}
	return i + 1, nil
}

// annul changes a key if encoding/json could match it to a field.
func (k *keyChecker) annul(key []byte, fields map[string]reflect.Type, name string) {
	for field := range fields {
		if strings.EqualFold(field, name) {
			for i := range key {
				key[i] = '-'
			}
			k.changed = true
			return
		}
	}
}

// space returns the end of the white space at i.
func (k *keyChecker) space(i int) int {
	for k.text[i] == ' ' || k.text[i] == '\n' || k.text[i] == '\t' || k.text[i] == '\r' {
		i++
	}
	return i
}

// next returns the position after a value's end, white space, a comma and more white space.
func (k *keyChecker) next(i int) int {
	if i = k.space(i); k.text[i] == ',' {
		i = k.space(i + 1)
	}
	return i
}

// skip returns the end of the value at i, of any type.
func (k *keyChecker) skip(i int) int {
	depth := 0
	for ; i < len(k.text); i++ {
		switch k.text[i] {
		case '"':
			for i++; k.text[i] != '"'; i++ {
				if k.text[i] == '\\' {
					i++
				}
			}
			if depth == 0 {
				return i + 1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			} else if depth < 0 {
				return i
			}
		case ',', ' ', '\n', '\t', '\r':
			if depth == 0 {
				return i
			}
		}
	}
	return i
}

var decodesItself = reflect.TypeFor[json.Unmarshaler]()

// holdsFields reports whether a t contains structs with fields.
func holdsFields(t reflect.Type) bool {
	if reflect.PointerTo(t).Implements(decodesItself) {
		return false
	}
	switch t.Kind() {
	case reflect.Struct:
		return true
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return holdsFields(t.Elem())
	}
	return false
}

var knownFields sync.Map // reflect.Type -> map[string]reflect.Type; one entry per type of body

// fieldsOf returns the types of a struct's fields by key.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	if known, ok := knownFields.Load(t); ok {
		return known.(map[string]reflect.Type)
	}
	fields := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			fields[name] = f.Type
		}
	}
	knownFields.Store(t, fields)
	return fields
}
