package jinja

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"kvepp/prompt/values"
)

// globals are the names that every template sees: Jinja2's and Transformers'.
var globals = map[string]any{
	"dict":            dictType,
	"namespace":       &function{name: "namespace", call: globalNamespace},
	"raise_exception": &function{name: "raise_exception", call: globalRaise},
	"range":           &function{name: "range", call: globalRange},
	"strftime_now":    &function{name: "strftime_now", call: globalStrftimeNow},
	"cycler":          &function{name: "cycler", call: globalUnsupported},
	"joiner":          &function{name: "joiner", call: globalUnsupported},
	"lipsum":          &function{name: "lipsum", call: globalUnsupported},
}

// dictType is Python's type dict.
var dictType = &function{name: "dict", call: globalDict}

func globalUnsupported(*execution, *arguments) (any, error) {
	return nil, unsupported("this function")
}

// maxRange is the longest range that the sandbox allows. Source: Jinja2 3.1.6, sandbox.
const maxRange = 100_000

func globalRange(x *execution, a *arguments) (any, error) {
	var n [3]int
	if len(a.names) > 0 || len(a.positional) < 1 || len(a.positional) > 3 {
		return nil, errors.New("range expects 1 to 3 arguments")
	}
	for i, v := range a.positional {
		var ok bool
		if n[i], ok = smallInt(v); !ok {
			return nil, fmt.Errorf("range: '%s' cannot be interpreted as a small integer", kindName(v))
		}
	}
	start, stop, step := n[0], n[1], n[2]
	switch len(a.positional) {
	case 1:
		start, stop, step = 0, n[0], 1
	case 2:
		step = 1
	}
	if step == 0 {
		return nil, errors.New("range() arg 3 must not be zero")
	}
	count := 0
	if step > 0 && start < stop {
		count = (stop-start-1)/step + 1
	} else if step < 0 && start > stop {
		count = (start-stop-1)/-step + 1
	}
	if count > maxRange {
		return nil, fmt.Errorf("range too big. The sandbox blocks ranges larger than %d", maxRange)
	}
	if err := x.chargeList(count); err != nil {
		return nil, err
	}
	out := &values.List{Kind: values.Range, Items: make([]any, count)}
	for i := range out.Items {
		out.Items[i] = int64(start + i*step)
	}
	return out, nil
}

// dictArguments builds the result of dict() from a mapping or pairs, and from keyword arguments.
func dictArguments(x *execution, a *arguments) (*values.Dict, error) {
	if err := x.chargeDict(len(a.names)); err != nil {
		return nil, err
	}
	d := values.NewDict()
	if len(a.positional) > 1 {
		return nil, errors.New("expected at most 1 positional argument")
	}
	for _, v := range a.positional {
		if from, ok := v.(*values.Dict); ok {
			if err := x.chargeDict(from.Len()); err != nil {
				return nil, err
			}
			for key, value := range from.All() {
				d.Put(key, value)
			}
			continue
		}
		pairs, err := x.iterate(v)
		if err != nil {
			return nil, err
		}
		for _, v := range pairs {
			pair, err := x.iterate(v)
			if err == nil {
				err = x.chargeDict(1)
			}
			if err != nil {
				return nil, err
			}
			if len(pair) != 2 {
				return nil, errors.New("expected pairs of a key and a value")
			}
			if !hashable(pair[0]) {
				return nil, unhashable(pair[0])
			}
			if err := x.chargeLookup(pair[0]); err != nil {
				return nil, err
			}
			d.Put(pair[0], pair[1])
		}
	}
	for i, name := range a.names {
		d.Set(name, a.values[i])
	}
	return d, nil
}

func globalDict(x *execution, a *arguments) (any, error) { return dictArguments(x, a) }

func globalNamespace(x *execution, a *arguments) (any, error) {
	given, err := dictArguments(x, a)
	if err != nil {
		return nil, err
	}
	ns := &namespace{values.NewDict()}
	for key, value := range given.All() {
		name, ok := textOf(key)
		if !ok {
			return nil, errors.New("a namespace's names must be strings")
		}
		if err := ns.set(x, name, value); err != nil {
			return nil, err
		}
	}
	return ns, nil
}

func globalRaise(x *execution, a *arguments) (any, error) {
	p, err := a.bind("message")
	if err != nil {
		return nil, err
	}
	message, err := x.str(p[0])
	if err != nil {
		return nil, err
	}
	return nil, &RaiseError{Message: message}
}

func globalStrftimeNow(x *execution, a *arguments) (any, error) {
	p, err := a.bind("format")
	if err != nil {
		return nil, err
	}
	format, err := wantString("format", p[0])
	if err != nil {
		return nil, err
	}
	if x.mini {
		if err := miniStrftime(format); err != nil {
			return nil, err
		}
	}
	s, err := x.strftime(x.template.now(), format)
	if err != nil {
		return nil, fmt.Errorf("strftime_now: %w", err)
	}
	return s, nil
}

// strftime is datetime.strftime in the C locale, for a time without a zone.
func (x *execution) strftime(t time.Time, format string) (string, error) {
	b := &output{x: x}
	for format != "" {
		text, rest, found := strings.Cut(format, "%")
		if err := b.write(text); err != nil {
			return "", err
		}
		if !found {
			break
		}
		if err := x.step(4); err != nil { // a directive takes a few hundred nanoseconds
			return "", err
		}
		unpadded := strings.HasPrefix(rest, "-") // an extension of the C library: no padding
		if unpadded {
			rest = rest[1:]
		}
		if rest == "" {
			return "", errors.New("format ends in %")
		}
		s, err := strftimeOne(t, rest[0])
		if err != nil {
			return "", err
		}
		if unpadded {
			if trimmed := strings.TrimLeft(s, "0 "); trimmed != "" {
				s = trimmed
			} else {
				s = "0"
			}
		}
		if err := b.write(s); err != nil {
			return "", err
		}
		format = rest[1:]
	}
	return b.text()
}

// strftimeLayouts are the directives for which package time has a layout.
var strftimeLayouts = map[byte]string{
	'A': "Monday", 'a': "Mon", 'B': "January", 'b': "Jan", 'h': "Jan", 'c': "Mon Jan _2 15:04:05 2006", 'D': "01/02/06",
	'd': "02", 'e': "_2", 'F': "2006-01-02", 'H': "15", 'I': "03", 'j': "002", 'M': "04", 'm': "01", 'p': "PM",
	'R': "15:04",
	'S': "05", 'T': "15:04:05", 'X': "15:04:05", 'x': "01/02/06", 'Y': "2006", 'y': "06",
}

func strftimeOne(t time.Time, directive byte) (string, error) {
	if layout, ok := strftimeLayouts[directive]; ok {
		return t.Format(layout), nil
	}
	switch directive {
	case '%':
		return "%", nil
	case 'n':
		return "\n", nil
	case 't':
		return "\t", nil
	case 'Z', 'z': // datetime.now() has no zone
		return "", nil
	case 'f':
		return fmt.Sprintf("%06d", t.Nanosecond()/1000), nil
	case 'u':
		return strconv.Itoa((int(t.Weekday())+6)%7 + 1), nil
	case 'w':
		return strconv.Itoa(int(t.Weekday())), nil
	case 'U':
		return fmt.Sprintf("%02d", (t.YearDay()+6-int(t.Weekday()))/7), nil
	case 'W':
		return fmt.Sprintf("%02d", (t.YearDay()+6-(int(t.Weekday())+6)%7)/7), nil
	case 'G':
		year, _ := t.ISOWeek()
		return strconv.Itoa(year), nil
	case 'V':
		_, week := t.ISOWeek()
		return fmt.Sprintf("%02d", week), nil
	}
	return "", unsupported("directive %%%c", directive)
}
