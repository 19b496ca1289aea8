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

func globalUnsupported(*execution, *arguments) any {
	panic(failure{unsupported("this function")})
}

// maxRange is the longest range that the sandbox allows. Source: Jinja2 3.1.6, sandbox.
const maxRange = 100_000

func globalRange(x *execution, a *arguments) any {
	var n [3]int
	if len(a.names) > 0 || len(a.positional) < 1 || len(a.positional) > 3 {
		panic(failure{errors.New("range expects 1 to 3 arguments")})
	}
	for i, v := range a.positional {
		var ok bool
		if n[i], ok = smallInt(v); !ok {
			panic(failure{fmt.Errorf("range: '%s' cannot be interpreted as a small integer", kindName(v))})
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
		panic(failure{errors.New("range() arg 3 must not be zero")})
	}
	count := 0
	if step > 0 && start < stop {
		count = (stop-start-1)/step + 1
	} else if step < 0 && start > stop {
		count = (start-stop-1)/-step + 1
	}
	if count > maxRange {
		panic(failure{fmt.Errorf("range too big. The sandbox blocks ranges larger than %d", maxRange)})
	}
	x.chargeList(count)
	out := &values.List{Kind: values.Range, Items: make([]any, count)}
	for i := range out.Items {
		out.Items[i] = int64(start + i*step)
	}
	return out
}

// dictArguments builds the result of dict() from a mapping or pairs, and from keyword arguments.
func dictArguments(x *execution, a *arguments) *values.Dict {
	x.chargeDict(len(a.names))
	d := values.NewDict()
	if len(a.positional) > 1 {
		panic(failure{errors.New("expected at most 1 positional argument")})
	}
	for _, v := range a.positional {
		if from, ok := v.(*values.Dict); ok {
			x.chargeDict(from.Len())
			for key, value := range from.All() {
				d.Put(key, value)
			}
			continue
		}
		for _, v := range x.iterate(v) {
			pair := x.iterate(v)
			x.chargeDict(1)
			if len(pair) != 2 {
				panic(failure{errors.New("expected pairs of a key and a value")})
			}
			x.put(d, pair[0], pair[1])
		}
	}
	for i, name := range a.names {
		d.Set(name, a.values[i])
	}
	return d
}

func globalDict(x *execution, a *arguments) any { return dictArguments(x, a) }

func globalNamespace(x *execution, a *arguments) any {
	given := dictArguments(x, a)
	ns := &namespace{values.NewDict()}
	for key, value := range given.All() {
		name, ok := textOf(key)
		if !ok {
			panic(failure{errors.New("a namespace's names must be strings")})
		}
		ns.set(x, name, value)
	}
	return ns
}

func globalRaise(x *execution, a *arguments) any {
	p := a.bind("message")
	panic(failure{&RaiseError{Message: x.str(p[0])}})
}

func globalStrftimeNow(x *execution, a *arguments) any {
	p := a.bind("format")
	format := wantString("format", p[0])
	if x.mini {
		miniStrftime(format)
	}
	return x.strftime(x.template.now(), format)
}

// strftime is datetime.strftime in the C locale, for a time without a zone.
func (x *execution) strftime(t time.Time, format string) string {
	b := &output{x: x}
	for format != "" {
		text, rest, found := strings.Cut(format, "%")
		b.write(text)
		if !found {
			break
		}
		x.step(4)                                // a directive takes a few hundred nanoseconds
		unpadded := strings.HasPrefix(rest, "-") // an extension of the C library: no padding
		if unpadded {
			rest = rest[1:]
		}
		if rest == "" {
			panic(failure{errors.New("strftime_now: format ends in %")})
		}
		s := strftimeOne(t, rest[0])
		if unpadded {
			if trimmed := strings.TrimLeft(s, "0 "); trimmed != "" {
				s = trimmed
			} else {
				s = "0"
			}
		}
		b.write(s)
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

func strftimeOne(t time.Time, directive byte) string {
	if layout, ok := strftimeLayouts[directive]; ok {
		return t.Format(layout)
	}
	switch directive {
	case '%':
		return "%"
	case 'n':
		return "\n"
	case 't':
		return "\t"
	case 'Z', 'z': // datetime.now() has no zone
		return ""
	case 'f':
		return fmt.Sprintf("%06d", t.Nanosecond()/1000)
	case 'u':
		return strconv.Itoa((int(t.Weekday())+6)%7 + 1)
	case 'w':
		return strconv.Itoa(int(t.Weekday()))
	case 'U':
		return fmt.Sprintf("%02d", (t.YearDay()+6-int(t.Weekday()))/7)
	case 'W':
		return fmt.Sprintf("%02d", (t.YearDay()+6-(int(t.Weekday())+6)%7)/7)
	case 'G':
		year, _ := t.ISOWeek()
		return strconv.Itoa(year)
	case 'V':
		_, week := t.ISOWeek()
		return fmt.Sprintf("%02d", week)
	}
	panic(failure{fmt.Errorf("strftime_now: %w", unsupported("directive %%%c", directive))})
}
