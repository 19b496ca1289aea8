package jinja

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"kvepp/prompt/values"
)

// nestedValue returns a list nested to this depth.
func nestedValue(depth int) *values.List {
	l := values.NewList()
	for range depth {
		l = values.NewList(l)
	}
	return l
}

func TestLimits(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	// A stack overflow ends the process, so the test sets a small stack: a missing limit then fails quickly.
	defer debug.SetMaxStack(debug.SetMaxStack(64 << 20))
	vars := values.NewDict()
	vars.Set("deep", nestedValue(100_000))
	vars.Set("s", strings.Repeat("x", 1000))
	vars.Set("l", values.NewList(make([]any, 1000)...))
	for name, source := range map[string]string{
		"macro recursion":       "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
		"macro recursion, args": "{% macro f(x) %}{{ f(x + [((((((1))))))]) }}{% endmacro %}{{ f([]) }}",
		"mutual recursion": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ " +
			"f() }}",
		"caller recursion":    "{% macro f() %}{% call f() %}{% endcall %}{{ caller() }}{% endmacro %}{{ f() }}",
		"recursive loop":      "{% set x = [1] %}{% for a in x recursive %}{{ loop(x) }}{% endfor %}",
		"default arguments":   "{% macro f(x=f()) %}{% endmacro %}{{ f() }}",
		"deep value printed":  "{{ deep }}",
		"deep value as JSON":  "{{ deep|tojson }}",
		"deep value compared": "{{ deep == [deep] }}",
		"deep value ordered":  "{{ deep < [deep] }}",
		"namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
		"shared value printed": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] " +
			"%}{% endfor %}{{ n.x }}",
		"shared value compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, " +
			"n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
		"loops in loops":    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"string times":      "{{ 'x' * 1000000000000 }}",
		"string times, big": "{{ 'x' * 10 ** 30 }}",
		"list times":        "{{ ([1] * 100000000)|length }}",
		"doubling string": "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s " +
			"%}{% endfor %}",
		"doubling by plus": "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s + n.s " +
			"%}{% endfor %}",
		"doubling list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% " +
			"endfor %}",
		"replace grows": "{% set n = namespace(s=s) %}{% for i in range(99) %}{% set n.s = n.s|replace('x', " +
			"s) %}{% endfor %}",
		"replace of nothing": "{% set n = namespace(s=s) %}{% for i in range(99) %}{% set n.s = n.s.replace('', " +
			"s) %}{% endfor %}",
		"join grows": "{% set n = namespace(s=s) %}{% for i in range(99) %}{% set n.s = " +
			"n.s.join(l|map('string')) %}{% endfor %}",
		"percent width":   "{{ '%2000000000d' % 5 }}",
		"percent wider":   "{{ '%99999999999999999999d' % 5 }}",
		"indent":          "{{ 'a\nb'|indent(2000000000) }}",
		"JSON indent":     "{{ [1]|tojson(indent=2000000000) }}",
		"JSON separators": "{{ l|tojson(separators=(s * 1000, s)) }}",
		"power":           "{{ 10 ** (10 ** 10) }}",
		"factorial": "{% set n = namespace(x=1) %}{% for i in range(1, 9999) %}{% set n.x = n.x * i * " +
			"999999999 %}{% endfor %}",
		"capturing output": "{% set x %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
		"output":           "{% for i in range(99999) %}{{ s }}{% endfor %}",
		"generators of generators": "{% set n = namespace(g=[1]) %}{% for i in range(9999) %}{% set n.g = " +
			"n.g|map('string') %}{% endfor %}{{ n.g|list }}",
		"generator in itself": "{% set n = namespace(g=[1]) %}{% for x in l if x|d(n.g|list) is undefined %}" +
			"{% set n.g = [n.g]|map('join', n.g) %}{% endfor %}{{ n.g|list }}{{ 'x' * 2000000000 }}",
		"escaping grows": "{% set n = namespace(s=s|safe) %}{% for i in range(99) %}{% set n.s = " +
			"n.s.replace('x', s + '<') %}{% endfor %}",
		"sorting lists of lists": "{% for i in range(9999) %}{{ l|map('string')|list|sort|length }}{% endfor %}",
	} {
		t.Run(name, func(t *testing.T) {
			tmpl, err := Compile("t", source)
			if err != nil {
				t.Fatal(err)
			}
			// No time limit: counted steps, bytes and calls must end it.
			text, err := tmpl.Render(t.Context(), vars, Limits{Timeout: time.Hour})
			if !errors.Is(err, ErrLimit) {
				t.Errorf("got %.50q, %v; want ErrLimit", text, err)
			}
		})
	}
}

func TestTimeout(t *testing.T) {
	tmpl, err := Compile("t", "{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}")
	if err != nil {
		t.Fatal(err)
	}
	_, err = tmpl.Render(t.Context(), nil, Limits{Steps: 1 << 60, Timeout: time.Millisecond})
	if !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), "1ms") {
		t.Errorf("got %v; want the time limit", err)
	}
}

func TestSourceLimits(t *testing.T) {
	defer debug.SetMaxStack(debug.SetMaxStack(64 << 20))
	const n = 50_000
	for name, source := range map[string]string{
		"parentheses": "{{ " + strings.Repeat("(", n) + "1" + strings.Repeat(")", n) + " }}",
		"lists":       "{{ " + strings.Repeat("[", n) + strings.Repeat("]", n) + " }}",
		"signs":       "{{ " + strings.Repeat("-", n) + "1 }}",
		"ifs":         strings.Repeat("{% if a %}", n/2) + strings.Repeat("{% endif %}", n/2),
		"elses":       "{{ " + strings.Repeat("1 if 0 else ", n/2) + "1 }}",
		"targets":     "{% for " + strings.Repeat("(", n) + "a" + strings.Repeat(")", n) + " in x %}{% endfor %}",
		"tests":       "{{ 1 is in " + strings.Repeat("[", n) + " }}",
		"size":        strings.Repeat("x", maxSource+1),
	} {
		if _, err := Compile("t", source); err == nil {
			t.Errorf("%s: compiled", name)
		}
	}
	// Chains do not nest: they compile, and render with a small stack.
	for name, c := range map[string]struct{ source, want string }{
		"sum":       {"{{ 0" + strings.Repeat(" + 1", n) + " }}", fmt.Sprint(n)},
		"and":       {"{{ 1" + strings.Repeat(" and 1", n) + " }}", "1"},
		"not":       {"{{" + strings.Repeat(" not", n) + " 1 }}", "True"},
		"filters":   {"{{ 1" + strings.Repeat("|int", n) + " }}", "1"},
		"compare":   {"{{ 1" + strings.Repeat(" == 1", n) + " }}", "True"},
		"concat":    {"{{ ''" + strings.Repeat(" ~ 1", n) + " }}", strings.Repeat("1", n)},
		"elif":      {"{% if 0 %}" + strings.Repeat("{% elif 0 %}", n/2) + "{% else %}x{% endif %}", "x"},
		"condition": {"{{ 7" + strings.Repeat(" if 1", n) + " }}", "7"},
	} {
		tmpl, err := Compile("t", c.source)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := tmpl.Render(t.Context(), nil, Limits{}); err != nil || got != c.want {
			t.Errorf("%s: got %.40q, %v", name, got, err)
		}
	}
}

func TestErrors(t *testing.T) {
	_, err := Compile("qwen", "line one\n\n{{ x|nosuch }}")
	var placed *Error
	if !errors.As(err, &placed) || placed.Template != "qwen" || placed.Line != 3 ||
		!strings.Contains(err.Error(), `unknown filter "nosuch"`) {
		t.Errorf("got %v", err)
	}
	for source, want := range map[string]string{
		"{% nosuch %}":             `unknown tag "nosuch"`,
		"{{ 1 is nosuch }}":        `unknown test "nosuch"`,
		"{{ 'a' 'b\\N{NOSUCH}' }}": `no known name of a character`,
		"{% for a in b %}":         `tag "for" is not closed: expected endfor or else`,
		"{% if a %}{% endfor %}":   `unexpected tag "endfor"`,
	} {
		if _, err := Compile("t", source); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", source, err, want)
		}
	}
	for source, want := range map[string]string{
		"{{ 1|pprint }}":                            "pprint: jinja: not reproduced",
		"{% include 'x' %}":                         "jinja: not reproduced: the tag include",
		"{{ [1]|map('string') }}":                   "a generator prints as its address",
		"{% if true %}{{ 1|nosuch }}{% endif %}":    `unknown filter "nosuch"`,
		"{% if true %}{{ 1 is nosuch }}{% endif %}": `unknown test "nosuch"`,
	} {
		tmpl, err := Compile("t", source)
		if err == nil {
			_, err = tmpl.Render(t.Context(), nil, Limits{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", source, err, want)
		}
	}
	tmpl, err := Compile("t", "a\n{% if true %}\n{{ raise_exception('roles must alternate') }}{% endif %}")
	if err != nil {
		t.Fatal(err)
	}
	_, err = tmpl.Render(t.Context(), nil, Limits{})
	var raised *RaiseError
	if !errors.As(err, &raised) || raised.Message != "roles must alternate" || !strings.HasPrefix(err.Error(), "t:3:") {
		t.Errorf("got %v", err)
	}
}

func TestStrftimeNow(t *testing.T) {
	tmpl, err := Compile("t", "{{ strftime_now(format) }}")
	if err != nil {
		t.Fatal(err)
	}
	tmpl.now = func() time.Time { return time.Date(2025, 3, 4, 5, 6, 7, 89_000, time.UTC) }
	for format, want := range map[string]string{
		"%Y-%m-%d":                "2025-03-04",
		"%d %b %Y":                "04 Mar 2025",
		"%-d. %B %y, %A %a":       "4. March 25, Tuesday Tue",
		"%H:%M:%S.%f %I %p %e|%%": "05:06:07.000089 05 AM  4|%",
		"%j %U %W %V %u %w %z%Z":  "063 09 09 10 2 2 ",
	} {
		vars := values.NewDict()
		vars.Set("format", format)
		if got, err := tmpl.Render(t.Context(), vars, Limits{}); err != nil || got != want {
			t.Errorf("%q: got %q, %v; want %q", format, got, err, want)
		}
	}
	vars := values.NewDict()
	vars.Set("format", "%Q")
	if got, err := tmpl.Render(t.Context(), vars, Limits{}); err == nil {
		t.Errorf("%%Q gives %q", got)
	}
}

// TestRenderLeavesVars renders templates that would modify their variables, and compares the variables.
func TestRenderLeavesVars(t *testing.T) {
	const body = `{"l": [3, 1, 2], "d": {"b": 1, "a": 2}}`
	v, err := values.ParseJSON([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := Compile(
		"t",
		"{{ l|sort }}{{ l|reverse|list }}{% set l = l + [4] %}{% set d = dict(d, c=3) %}{{ l }}{{ d }}{{ l.copy() "+
			"}}{% set x = l|list %}",
	)
	if err != nil {
		t.Fatal(err)
	}
	first, err := tmpl.Render(t.Context(), v.(*values.Dict), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := tmpl.Render(t.Context(), v.(*values.Dict), Limits{}); err != nil || again != first {
		t.Errorf("second render: %q, %v; first: %q", again, err, first)
	}
}

// TestContext ends a long render by its context.
func TestContext(t *testing.T) {
	tmpl, err := Compile("t", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tmpl.Render(ctx, nil, Limits{Steps: 1 << 60, Timeout: time.Minute}); !errors.Is(
		err,
		context.Canceled,
	) {
		t.Errorf("got %v; want the context's error", err)
	}
}

// TestHostileSources compiles the longest sources of several kinds for which a compiler may need more than linear time
// or much memory, and calls the inspection methods on them.
func TestHostileSources(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	each := func(size int, format string) string {
		var b strings.Builder
		for i := 0; b.Len() < size; i++ {
			b.WriteString(strings.ReplaceAll(strings.ReplaceAll(format, "J", fmt.Sprint(i+1)), "I", fmt.Sprint(i)))
		}
		return b.String()
	}
	const size = maxSource - 1000
	for name, source := range map[string]string{
		"names of messages": "{% set a0 = messages %}" + each(size, "{% set aJ = aI %}"),
		"many loops": each(size/2, "{% set aI = messages %}") +
			each(size/2, "{% for x in aI %}{{ x.content }}{% endfor %}"),
		"macros": each(size, "{% macro mI(p) %}{% for y in p %}{% endfor %}{% endmacro %}{{ mI(x.content) "+
			"}}"),
		"a repeated macro": each(size, "{% macro m(p) %}{% endmacro %}{{ m(x.content) }}"),
		"macros in macros": strings.Repeat("{% macro m(p) %}", 90) + each(size/2, "{% for y in p %}{% endfor %}") +
			strings.Repeat("{% endmacro %}", 90),
		"namespaces": each(size, "{% set nI = namespace(a=messages, b=nI.a) %}"),
		"keywords":   "{{ f(" + each(size, "kI=1,") + ") }}",
		"parameters": "{% macro m(" + each(size/2, "pI,") + "q) %}{% endmacro %}{{ m(" + each(size/3, "pI=1,") +
			"q=1) }}",
		"dotted":           "{{ 1|a" + strings.Repeat(".a", size/2) + " }}",
		"brackets":         "{{ " + strings.Repeat("[]", size/2) + " }}",
		"tokens":           "{{ " + strings.Repeat("a.", size/2) + "a }}",
		"tags":             strings.Repeat("{{a}}", size/5),
		"open tags":        strings.Repeat("{%", size/2),
		"spaces":           strings.Repeat("{{ a }}  \t", size/10),
		"raw":              "{% raw %}" + strings.Repeat("{% ", size/3),
		"comments":         strings.Repeat("{#", size/2),
		"strings":          "{{ " + strings.Repeat("''", size/2) + " }}",
		"digits":           "{{ " + strings.Repeat("7", size) + ".5 }}",
		"signs":            "{{ " + strings.Repeat("-", size) + "1 }}",
		"names":            each(size, "{% set aI = 1 %}") + "{{ a }}",
		"named characters": "{{ '" + strings.Repeat(`\N{BULLET}`, size/10) + "' }}",
		"unknown filters":  each(size, "{{ a|nI if a }}"),
		"generators":       "{{ 'a'" + strings.Repeat("|map('string')", size/20) + "|list }}",
	} {
		for _, dialect := range []Dialect{Python, MiniJinja} {
			before := allocated()
			tmpl, err := dialect.Compile("t", source)
			if err == nil {
				tmpl.LoopsOverContent(true)
				tmpl.LoopsOverContent(false)
				tmpl.LoopsOver("message", "content")
				_, err = tmpl.Render(t.Context(), values.NewDict(), Limits{})
			}
			if used := allocated() - before; used > 128<<20 {
				t.Errorf("%s: allocated %d bytes (%.100v)", name, used, err)
			}
			if err != nil && len(err.Error()) > 1000 {
				t.Errorf("%s: the error has %d bytes", name, len(err.Error()))
			}
		}
	}
}
