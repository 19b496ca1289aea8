package jinja

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/prompt/values"
)

// These tests run every filter, test, method, function, operator and statement on values of hostile sizes, and compare
// the CPU time and memory with the steps and memory that the render counted.

// threadCPU returns the CPU time of this thread. The goroutine must be locked to it.
func threadCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(1, &u); err != nil { // RUSAGE_THREAD
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

var heapMetrics = []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}}

func allocated() int {
	metrics.Read(heapMetrics[:1])
	return int(heapMetrics[0].Value.Uint64())
}

func inUse() int {
	metrics.Read(heapMetrics[1:])
	return int(heapMetrics[1].Value.Uint64())
}

// hostile returns variables that cause much work. n is the approximate length of the longest text, in bytes.
func hostile(n int) *values.Dict {
	vars := values.NewDict()
	texts := map[string]string{
		"ascii": "x", "wide": "é", "control": "\x01", "digit": "7", "words": "a ", "lines": "\n", "quotes": `"`,
		"html": "<'", "percent": "%s",
		"braces": "{}", "spaces": " ", "upper": "ǅA", "marks": "'", "emoji": "😀", "long": "ΐ", "directives": "%c",
		"dots": "a.", "commas": "a,",
	}
	for name, unit := range texts {
		vars.Set(name, strings.Repeat(unit, n/len(unit)))
	}
	vars.Set("sigma", "a"+strings.Repeat("'", n)+"Σ")
	vars.Set("json", `"`+strings.Repeat(`[],`, 0)+strings.Repeat("x", n/2)+`"`)
	vars.Set("marked", markup(strings.Repeat("<'", n/2)))
	items := n / 64
	ints, strs, pairs, big16 := values.NewList(), values.NewList(), values.NewList(), values.NewList()
	dict, longKeys := values.NewDict(), values.NewDict()
	for i := range items {
		ints.Items = append(ints.Items, int64(i*7919%items))
		strs.Items = append(strs.Items, fmt.Sprint("Item", i*7919%items))
		pairs.Items = append(pairs.Items, values.NewList(fmt.Sprint(i), int64(i)))
		dict.Set(fmt.Sprint("key", i), int64(i))
	}
	// Texts and dict keys that differ only in their last character.
	for i := range 14 {
		s := strings.Repeat("k", n/16) + string(rune('a'+i))
		big16.Items = append(big16.Items, s)
		longKeys.Set(s, s)
	}
	vars.Set("ints", ints)
	vars.Set("strs", strs)
	vars.Set("pairs", pairs)
	vars.Set("mapping", dict)
	vars.Set("longkeys", longKeys)
	vars.Set("longlist", big16)
	vars.Set("longkey", strings.Repeat("k", n/16)+"m")
	integer, integers := new(big.Int).Exp(big.NewInt(7), big.NewInt(5000), nil), values.NewDict()
	for i := range 14 {
		integers.Put(new(big.Int).Add(integer, big.NewInt(int64(i))), int64(i))
	}
	vars.Set("integer", integer)
	vars.Set("integers", integers)
	vars.Set("float", 1.2345e300)
	vars.Set("small", int64(3))
	vars.Set("none", nil)
	vars.Set("chars", strings.Repeat("xyz", 100)+"é")
	return vars
}

var (
	textNames = []string{
		"ascii",
		"wide",
		"control",
		"digit",
		"words",
		"lines",
		"quotes",
		"html",
		"percent",
		"braces",
		"spaces",
		"upper",
		"marks",
		"emoji",
		"long",
		"directives",
		"dots",
		"commas",
		"sigma",
		"json",
		"marked",
	}
	listNames  = []string{"ints", "strs", "pairs", "longlist"}
	dictNames  = []string{"mapping", "longkeys", "integers"}
	valueNames = slices.Concat(textNames, listNames, dictNames, []string{"integer", "float", "small", "none"})
)

// The tables list the arguments for each filter, test, method and function. One that is missing in its table fails the
// test: add it with arguments that cause the most work.
var (
	filterArguments = map[string][]string{
		"abs": {
			"",
		}, "capitalize": {""}, "count": {""},
		"d": {
			"ascii",
			"ascii, true",
		}, "default": {"ascii, true"}, "dictsort": {"", "false, 'value', true"}, "e": {""}, "escape": {""},
		"first": {""},
		"float": {
			"",
			"1",
		}, "format": {"ascii", "*strs", "a=ascii"}, "from_json": {""}, "fromjson": {""},
		"indent": {"", "1000, true, true", "ascii", "100000"},
		"int": {
			"",
			"1",
		}, "items": {""}, "join": {"", "ascii", "', '", "', ', 1", "', ', dots"}, "last": {""}, "length": {""},
		"list": {""}, "lower": {""},
		"map": {
			"'upper'",
			"'int'",
			"'length'",
			"attribute=1",
			"attribute=dots",
			"attribute=dots, default=1",
			"'join', ascii",
			"'replace', '', 'yy'",
		},
		"max": {
			"",
			"true",
			"attribute=0",
		}, "min": {"", "true", "attribute=0"}, "reject": {"", "'upper'", "'in', strs"},
		"rejectattr": {"0", "dots", "0, 'eq', ascii"},
		"replace": {
			"'x', 'yy'",
			"'', 'y'",
			"'é', ''",
			"ascii, wide",
			"'7', '8', 5",
		}, "reverse": {""}, "round": {"", "300", "2, 'ceil'"}, "safe": {""},
		"select": {
			"",
			"'upper'",
			"'in', strs",
		}, "selectattr": {"0", "dots", "0, 'eq', ascii"},
		"sort": {
			"",
			"true, true",
			"attribute=0",
			"attribute='0,1'",
			"attribute=commas",
		}, "string": {""}, "title": {""},
		"tojson": {
			"",
			"true, 4",
			"sort_keys=true",
			"indent=ascii",
			"separators=(ascii, ascii)",
		}, "trim": {"", "ascii", "chars", "'x '"},
		"unique": {"", "true", "attribute=0"}, "upper": {""},
	}
	testArguments = map[string][]string{
		"boolean": {
			"",
		}, "defined": {""}, "escaped": {""}, "even": {""},
		"false": {""}, "float": {""},
		"in": {
			"ascii",
			"strs",
			"mapping",
			"longkeys",
			"longlist",
			"integers",
		}, "integer": {""}, "iterable": {""}, "mapping": {""}, "none": {""}, "number": {""}, "odd": {""},
		"sequence": {""}, "string": {""}, "true": {""}, "undefined": {""},
		// names that a template cannot write; they come last
		"==": {}, "!=": {}, ">": {}, ">=": {}, "<": {}, "<=": {},
		"eq": {
			"ascii",
			"ints",
			"longkeys",
		}, "equalto": {"wide"}, "ne": {"ascii"}, "gt": {"ascii", "longlist"}, "greaterthan": {"ascii"},
		"ge": {"integer"}, "lt": {"ints"}, "lessthan": {"ascii"}, "le": {"ascii"},
	}
	methodArguments = map[string][]string{
		"capitalize": {
			"",
		}, "casefold": {""}, "center": {"200000", "200000, 'é'", "3, ascii"},
		"count": {"'x'", "''", "ascii", "'x', 5, 100000"}, "endswith": {"ascii", "('x',) * 2000", "'x', 5, 100000"},
		"expandtabs": {
			"",
		}, "encode": {""}, "find": {"'y'", "ascii", "'y', 3", "'y', 5, 100000"},
		"format": {"ascii", "*strs", "x=ascii"}, "format_map": {"mapping"}, "index": {"'y'"}, "isalnum": {""},
		"isalpha": {
			"",
		}, "isascii": {""}, "isdecimal": {""}, "isdigit": {""}, "isidentifier": {""}, "islower": {""},
		"isnumeric": {""}, "isprintable": {""}, "isspace": {""}, "istitle": {""}, "isupper": {""},
		"join": {
			"strs",
			"ascii",
			"longlist",
		}, "ljust": {"200000", "200000, 'é'"}, "lower": {""}, "lstrip": {"", "ascii", "chars", "'x'"},
		"maketrans": {""}, "partition": {"'y'", "'x'", "ascii"},
		"removeprefix": {
			"ascii",
		}, "removesuffix": {"ascii"}, "replace": {"'x', 'yy'", "'', 'y'", "ascii, wide", "'x', 'yy', 5"},
		"rfind": {"'y'", "ascii", "'y', 5, 100000"}, "rindex": {"'y'"}, "rjust": {"200000"},
		"rpartition": {
			"'y'",
			"ascii",
		}, "rsplit": {"", "none, 3", "'x'", "'x', 3", "ascii"}, "rstrip": {"", "ascii", "chars", "'x'"},
		"split": {"", "none, 3", "'x'", "'x', 3", "ascii"}, "splitlines": {"", "true"},
		"startswith": {
			"ascii",
			"('x',) * 2000",
			"'x', 5, 100000",
		}, "strip": {"", "ascii", "chars", "'x'"}, "swapcase": {""}, "title": {""}, "translate": {"mapping"},
		"upper": {""}, "zfill": {"200000"},
		"copy": {
			"",
		}, "get": {"'x'", "longkey", "integer"}, "items": {""}, "keys": {""}, "values": {""}, "clear": {}, "pop": {},
		"popitem": {}, "setdefault": {}, "update": {}, "fromkeys": {"strs", "longlist", "ascii, 1"},
		"append": {}, "extend": {}, "insert": {}, "remove": {}, "reverse": {}, "sort": {},
	}
	// methods whose arguments depend on the type of the receiver
	listMethodArguments = map[string][]string{"count": {"'x'", "longkey", "ints"}, "index": {"'x'", "longkey"}}
	globalArguments     = map[string][]string{
		"dict": {
			"pairs",
			"mapping",
			"longkeys",
			"**mapping",
			"a=1",
		}, "namespace": {"mapping", "**mapping"}, "raise_exception": {"ascii"}, "range": {"99999", "0, 99999, 2"},
		"strftime_now": {"directives", "ascii"}, "cycler": {""}, "joiner": {""}, "lipsum": {""},
	}
	// expressions are the operators and other parts of expressions, with V for a value and W for another.
	expressions = []string{
		"V + W", "V - W", "V * W", "V / W", "V // W", "V % W", "V ** W", "V ~ W ~ V", "-V", "+V", "V == W", "V != W",
		"V < W", "V <= W", "V > W", "V >= W", "V in W", "V not in W", "not V",
		"V and W", "V or W", "V if W else V", "V[small]", "V[-1]", "V[W]", "V[:5]", "V[5:]", "V[::-1]", "V[::3]",
		"V[-3:5:-2]", "V.x", "V['x']", "[V, W]", "(V, W)", "{'a': V, small: W}", "{V: W}",
		"V * 1000", "small * V", "[V] * 1000", "(V,) * 1000", "V.upper", "V(W)", "'%s%9s' % (V, W)",
		"'%9d' % V", "'{0}{1}'.format(V, W)",
	}
	// pieces are the statements.
	statements = []string{
		"{% if V %}{{ W }}{% elif W %}{% else %}{{ V }}{% endif %}",
		"{% for a in V %}{{ loop.index }}{{ loop.nextitem }}{% endfor %}",
		"{% for a in V if a == W %}{{ a }}{% else %}x{% endfor %}",
		"{% for a, b in V %}{{ b }}{% endfor %}",
		"{% for a in V %}{{ loop.previtem }}{% break %}{% endfor %}",
		"{% for a in [V, [W]] recursive %}{{ loop(a) }}{% continue %}{% endfor %}",
		"{% set x = V %}{{ x }}{% set x %}{{ W }}{% endset %}{{ x }}", "{% set x | upper %}{{ V }}{% endset %}",
		"{% set ns = namespace(a=V, b='') %}{% for i in range(20) %}{% set ns.a = [ns.a, W] %}{% set ns.b = ns.b ~ W " +
			"%}{% endfor %}",
		"{% filter upper %}{{ V }}{% endfilter %}",
		"{% macro m(a, b=V) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(W, *V) }}{{ m(W, c=V) }}",
		"{% macro m() %}{{ caller(V) }}{% endmacro %}{% call(a) m() %}{{ a }}{{ W }}{% endcall %}",
		"{% generation %}{{ V }}{% endgeneration %}", "{% print V, W %}", "{{ V }}",
		"{% set a, b = V, W %}{{ a }}{{ b }}",
		"{% macro m(d) %}{{ d }}{% endmacro %}{{ m(**V) }}",
	}
)

var allWork = flag.Bool(
	"all-work",
	false,
	"hold everything on all values against what it counts, not on some; takes minutes",
)

// cost is what a render consumed and what it counted.
type cost struct {
	cpu, gap time.Duration // in total, and the longest between two checks of the clock
	steps    int
	memory   int // allocated bytes
	counted  int
	peak     int // growth of the heap
	err      error
}

// measure renders a template on this thread.
func measure(t *testing.T, tmpl *Template, vars *values.Dict, limits Limits) (c cost) {
	t.Helper()
	x := newExecution(t.Context(), tmpl, limits.withDefaults())
	x.vars = vars
	memory := x.memory
	start := threadCPU()
	last, before, heap := start, allocated(), inUse()
	begin := time.Now()
	x.deadline = begin.Add(limits.withDefaults().Timeout)
	x.now = func() time.Time {
		now := threadCPU()
		c.gap = max(c.gap, now-last)
		c.peak = max(c.peak, inUse()-heap)
		last = now
		return begin.Add(now - start) // the thread's CPU time, which other processes do not affect
	}
	_, c.err = x.render()
	end := threadCPU()
	c.gap = max(c.gap, end-last)
	c.peak = max(c.peak, inUse()-heap)
	c.cpu, c.steps, c.memory = end-start, x.limits.Steps-x.steps, allocated()-before
	c.counted = memory - x.memory
	if x.extended {
		c.counted += MemoryPerByte * sizeOf(vars, 1<<30)
	}
	return c
}

// hostileSources returns templates by operation: one for each operation and value.
func hostileSources(t *testing.T) map[string][]string {
	t.Helper()
	sources := map[string][]string{}
	add := func(what string, values []string, arguments []string, format string) {
		for _, v := range values {
			for _, a := range arguments {
				sources[what] = append(sources[what], strings.NewReplacer("V", v, "ARGS", a).Replace(format))
			}
		}
	}
	table := func(what string, registries []map[string]builtin, arguments map[string][]string, values []string,
		format string) {
		named := map[string]bool{}
		for _, registry := range registries {
			for name := range registry {
				named[name] = true
				args, ok := arguments[name]
				if !ok {
					t.Errorf(
						"%s %q is not in the table of this test: add the arguments that cause the most work",
						what,
						name,
					)
				}
				add(what+" "+name, values, args, strings.Replace(format, "NAME", name, 1))
			}
		}
		for name := range arguments {
			if !named[name] {
				t.Errorf("there is no %s %q", what, name)
			}
		}
	}
	table("filter", []map[string]builtin{filters, miniFilters}, filterArguments, valueNames, "{{ V|NAME(ARGS) }}")
	table("test", []map[string]builtin{tests, miniTests}, testArguments, valueNames, "{{ V is NAME(ARGS) }}")
	both := maps.Clone(methodArguments)
	table(
		"method",
		[]map[string]builtin{stringMethods, miniStringMethods, dictMethods, miniDictMethods, listMethods, tupleMethods},
		withDefaults(both, listMethodArguments),
		slices.Concat(textNames, listNames, dictNames),
		"{{ V.NAME(ARGS) }}",
	)
	for name := range globals {
		if _, ok := globalArguments[name]; !ok {
			t.Errorf("function %q is not in the table of this test", name)
		}
		add("function "+name, []string{""}, globalArguments[name], "{{ "+name+"(ARGS) }}")
	}
	for _, format := range slices.Concat(expressions, statements) {
		source := format
		if !strings.Contains(source, "{%") && !strings.Contains(source, "{{") {
			source = "{{ " + source + " }}"
		}
		for _, v := range valueNames {
			for _, w := range []string{"ascii", "ints", "longkeys", "integer", "small"} {
				sources[format] = append(sources[format], strings.NewReplacer("V", v, "W", w).Replace(source))
			}
		}
	}
	return sources
}

// withDefaults returns the arguments of a, completed by those of more.
func withDefaults(a, more map[string][]string) map[string][]string {
	for name, args := range more {
		a[name] = slices.Concat(a[name], args)
	}
	return a
}

// TestWorkIsCounted compares the cost of each operation with its count.
func TestWorkIsCounted(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const (
		perStep = 2 * time.Microsecond * slower // an upper bound; on an ordinary machine most steps take a tenth
		noise   = 4 * time.Millisecond * slower
	)
	vars := hostile(128 << 10)
	sources := hostileSources(t)
	count, every := 0, 37*min(slower, 4)
	if *allWork {
		every = 1
	}
	for _, what := range slices.Sorted(maps.Keys(sources)) {
		for _, dialect := range []Dialect{Python, MiniJinja} {
			for i, source := range sources[what] {
				if (i+int(dialect))%every != 0 {
					continue
				}
				tmpl, err := dialect.Compile("t", source)
				if err != nil {
					continue // not in this dialect
				}
				count++
				var c cost
				ok := false
				for range 3 { // repeat: a busy machine or the garbage collector may add time
					c = measure(t, tmpl, vars, Limits{Memory: 64 << 20})
					if ok = c.cpu <= perStep*time.Duration(c.steps)+noise; ok {
						break
					}
				}
				if !ok {
					t.Errorf("%s: took %v for %d steps (%v)", source, c.cpu, c.steps, c.err)
				}
				// Counted memory may stay in use. Each step may also allocate something short-lived, such as the scope
				// of a loop iteration.
				if c.memory > 2*c.counted+192*c.steps+256<<10 {
					t.Errorf("%s: allocated %d bytes and counted %d", source, c.memory, c.counted)
				}
			}
		}
	}
	t.Logf("%d templates", count)
}

// templateGenerator generates random templates.
type templateGenerator struct {
	*rand.Rand
	dialect Dialect
	tiny    *values.Dict
	sources map[string][]string
	names   []string // keys of sources
}

func (g *templateGenerator) value() string {
	switch g.IntN(6) {
	case 0:
		return "a"
	case 1:
		return "ns.a"
	case 2:
		return "ns.b"
	}
	return valueNames[g.IntN(len(valueNames))]
}

// expression returns an expression of at most depth levels.
func (g *templateGenerator) expression(depth int) string {
	if depth <= 0 {
		return g.value()
	}
	one := func() string {
		format := expressions[g.IntN(len(expressions))]
		return strings.NewReplacer("V", g.expression(depth-1), "W", g.expression(depth-2)).Replace("(" + format + ")")
	}
	if g.IntN(2) == 0 {
		return one()
	}
	// a filter, test or method from the tables
	sources := g.sources[g.names[g.IntN(len(g.names))]]
	if len(sources) == 0 {
		return one()
	}
	source := strings.TrimSuffix(strings.TrimPrefix(sources[g.IntN(len(sources))], "{{ "), " }}")
	if strings.Contains(source, "{%") || strings.Contains(source, "{{") {
		return one()
	}
	return "(" + source + ")"
}

// statement returns a statement of at most depth levels.
func (g *templateGenerator) statement(depth int) string {
	e, f := g.expression(2), g.expression(1)
	if depth <= 0 {
		return fmt.Sprintf("{{ %s }}", e)
	}
	inner := g.block(depth - 1)
	switch g.IntN(9) {
	case 0:
		return fmt.Sprintf("{%% for a in %s %%}%s{%% endfor %%}", e, inner)
	case 1:
		return fmt.Sprintf("{%% for i in range(%d) %%}%s{%% endfor %%}", 1+g.IntN(99999), inner)
	case 2:
		return fmt.Sprintf("{%% set ns.a = %s %%}%s", e, inner)
	case 3:
		return fmt.Sprintf("{%% set ns.b = [ns.b, %s, %s] %%}%s", e, f, inner)
	case 4:
		return fmt.Sprintf("{%% set ns.a = ns.a ~ %s %%}%s", e, inner)
	case 5:
		return fmt.Sprintf("{%% set a %%}%s{%% endset %%}", inner)
	case 6:
		return fmt.Sprintf(
			"{%% macro m(a, b=none) %%}%s{%% endmacro %%}{%% for i in range(%d) %%}{%% set ns.b = m(%s, %s) %%}{%% "+
				"endfor %%}",
			inner,
			1+g.IntN(999),
			e,
			f,
		)
	case 7:
		format := statements[g.IntN(len(statements))]
		return strings.NewReplacer("V", e, "W", f).Replace(format)
	}
	return fmt.Sprintf("{%% if %s %%}%s{%% endif %%}", e, inner)
}

const prelude = "{% set ns = namespace(a='', b='') %}{% set a = small %}"

// block returns statements of at most depth levels that do not fail at once.
func (g *templateGenerator) block(depth int) string {
	var b strings.Builder
	for range 1 + g.IntN(3) {
		for range 10 {
			source := g.statement(depth)
			tmpl, err := g.dialect.Compile("tried", prelude+source)
			if err == nil {
				_, err = tmpl.Render(context.Background(), g.tiny, Limits{Steps: 2000})
			}
			if err == nil || errors.Is(err, ErrLimit) {
				b.WriteString(source)
				break
			}
		}
	}
	return b.String()
}

func newGenerator(t *testing.T, seed uint64) *templateGenerator {
	g := &templateGenerator{Rand: rand.New(rand.NewPCG(seed, 16)), tiny: hostile(512), sources: hostileSources(t)}
	g.names = slices.Sorted(maps.Keys(g.sources))
	return g
}

// hold renders a random template and compares its CPU time and memory with the limits, in a build that runs slower
// times slower than an ordinary one.
func (g *templateGenerator) hold(t *testing.T, vars *values.Dict, slower time.Duration) (ended bool) {
	t.Helper()
	g.dialect = [...]Dialect{Python, Python, MiniJinja}[g.IntN(3)]
	source := prelude + g.block(3)
	tmpl, err := g.dialect.Compile("random", source)
	if err != nil {
		t.Fatal(err)
	}
	const (
		limit  = 50 * time.Millisecond
		memory = 24 << 20
	)
	// allowance for the longest single operation on texts of this size, and for the garbage collector
	slack := 40 * time.Millisecond * slower
	var c cost
	for range 3 {
		runtime.GC()
		c = measure(t, tmpl, vars, Limits{Timeout: limit, Memory: memory, Steps: 1 << 60})
		if c.cpu <= limit+limit/5+slack && c.gap <= slack && c.peak <= 2*memory {
			return c.err == nil || errors.Is(c.err, ErrLimit)
		}
	}
	t.Errorf(
		"%.2000s\ntook %v, %v between two checks of the clock, %d bytes of heap (%d counted): %v",
		source,
		c.cpu,
		c.gap,
		c.peak,
		c.counted,
		c.err,
	)
	return false
}

// TestRandomTemplates checks the limits with random templates of all language features.
func TestRandomTemplates(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(25))
	vars := hostile(1 << 20)
	g := newGenerator(t, 7)
	ended := 0
	n := 60 / min(slower, 4)
	for range n {
		if g.hold(t, vars, slower) {
			ended++
		}
	}
	if ended < n/5 {
		t.Errorf("only %d of %d completed or reached a limit", ended, n)
	}
}

// FuzzRandomTemplates is TestRandomTemplates without an end.
func FuzzRandomTemplates(f *testing.F) {
	f.Add(uint64(1))
	vars := hostile(1 << 20)
	f.Fuzz(func(t *testing.T, seed uint64) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer debug.SetGCPercent(debug.SetGCPercent(25))
		// The fuzzer's instrumentation slows the code down, and its processes share the cores.
		newGenerator(t, seed).hold(t, vars, 4*slower)
	})
}

// TestLongTexts repeats operations that process a text of 16 MiB character by character. The clock was once checked
// only after a thousand of them.
func TestLongTexts(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	vars := hostile(16 << 20)
	const limit, slack = 100 * time.Millisecond, 100 * time.Millisecond * slower
	for _, operation := range []string{
		"ascii.isalpha()", "digit|int", "ascii|int", "digit|float", "[digit, digit]|map('int')|list",
		"wide|lower", "sigma|lower", "control|string", "[control]|string",
		"ascii.strip(wide)", "spaces|trim", "wide[::-1]", "wide[5:-5]", "ascii.count('x')",
		"directives|length", "strftime_now(directives)", "'%s' % (wide,)",
		"longlist|sort", "longlist|unique|list", "longkeys[longkey]", "longkey in longkeys", "ascii == ascii ~ ''",
		"ascii|escape|length",
	} {
		tmpl, err := Compile("t", "{% for i in range(99999) %}{% set x = "+operation+" %}{% endfor %}")
		if err != nil {
			t.Fatal(err)
		}
		var c cost
		for range 3 {
			c = measure(t, tmpl, vars, Limits{Timeout: limit, Steps: 1 << 60, Memory: 1 << 40})
			if c.cpu <= limit+limit/5+slack {
				break
			}
		}
		if c.cpu > limit+limit/5+slack {
			t.Errorf("%s: took %v, %v between two checks of the clock (%v)", operation, c.cpu, c.gap, c.err)
		}
	}
}

// TestHeldMemory checks the memory of templates that keep their values.
func TestHeldMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(25))
	vars := hostile(1 << 20)
	const memory = 32 << 20
	for _, source := range []string{
		"{% set n = namespace(l=[]) %}{% for i in range(999) %}{% set n.l = n.l + [ascii ~ i] %}{% endfor %}",
		"{% set n = namespace(l=none) %}{% for i in range(99999) %}{% set n.l = [n.l, i] %}{% endfor %}{% for i in " +
			"range(99999) %}{% set n.l = [n.l, i] %}{% endfor %}{% for i in range(99999) %}{% set n.l = [n.l, i] " +
			"%}{% endfor %}",
		"{% set n = namespace(l=none) %}{% for i in range(99999) %}{% set n.l = namespace(a=n.l) %}{% endfor %}{% " +
			"for i in range(99999) %}{% set n.l = namespace(a=n.l) %}{% endfor %}",
		"{% set n = namespace(l=none) %}{% for i in range(99999) %}{% set old = n.l %}{% macro m() %}{{ old }}{% " +
			"endmacro %}{% set n.l = m %}{% endfor %}{% for i in range(99999) %}{% set old = n.l %}{% macro m() %}{{ " +
			"old }}{% endmacro %}{% set n.l = m %}{% endfor %}",
		"{% set n = namespace(l=none) %}{% for i in range(99999) %}{% set n.l = {'a': n.l, i: i} %}{% endfor %}{% " +
			"for i in range(99999) %}{% set n.l = {'a': n.l, i: i} %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(999) %}{% set n.l = [n.l, ascii|list] %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(999) %}{% set n.l = [n.l, lines.split('\n')] %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(999) %}{% set n.l = [n.l, ascii|replace('x', 'yz')] %}{% " +
			"endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, range(99999)] %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, dict(mapping, a=i)] %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, mapping.items()] %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = [n.l, integer * i] %}{% endfor %}",
		"{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, loop] %}{% set n.l = [n.l, " +
			"pairs|map('list')|list] %}{% endfor %}",
		"{% for i in range(999) %}{{ ascii }}{% endfor %}",
		"{% macro m() %}{% for i in range(999) %}{{ ascii }}{% endfor %}{% endmacro %}{{ [m(), m(), m()] }}",
	} {
		tmpl, err := Compile("t", source)
		if err != nil {
			t.Fatal(err)
		}
		runtime.GC()
		c := measure(t, tmpl, vars, Limits{Memory: memory, Steps: 1 << 60, Timeout: time.Minute})
		if !errors.Is(c.err, ErrLimit) {
			t.Errorf("%s: %v", source, c.err)
		}
		if c.peak > memory*3/2 {
			t.Errorf("%s: %d bytes of heap", source, c.peak)
		}
	}
}
