package jinja

import (
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"kvepp/prompt/values"
)

// golden returns a field of a dict in a golden file.
func golden[T any](t *testing.T, d *values.Dict, key string) T {
	t.Helper()
	v, _ := d.Get(key)
	typed, ok := v.(T)
	if !ok {
		t.Fatalf("golden field %q is a %s", key, kindName(v))
	}
	return typed
}

// TestAgainstJinja2 renders the templates of testdata/jinja.json and compares with Jinja2's outputs. A template that
// fails in Jinja2 must fail here, in Compile or in Render.
func TestAgainstJinja2(t *testing.T) { againstJinja2(t, "testdata/jinja.json", 400) }

// TestSemantics does so for testdata/semantics.json: markup, generators, unknown filters, escapes and attributes.
func TestSemantics(t *testing.T) { againstJinja2(t, "testdata/semantics.json", 1100) }

var further = flag.String("golden", "", "a file that semantics_gen.py made, for TestFurther")

func TestFurther(t *testing.T) {
	if *further == "" {
		t.Skip("semantics_gen.py 10000 SEED FILE makes a file for -golden")
	}
	againstJinja2(t, *further, 1)
}

func againstJinja2(t *testing.T, path string, least int) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	v, err := values.ParseJSON(raw)
	if err != nil {
		t.Fatal(err)
	}
	file := v.(*values.Dict)
	vars := golden[*values.Dict](t, file, "vars")
	cases := golden[*values.List](t, file, "cases")
	if len(cases.Items) < least {
		t.Fatalf("only %d cases", len(cases.Items))
	}
	unknown := 0
	for _, item := range cases.Items {
		c := item.(*values.Dict)
		source := golden[string](t, c, "template")
		_, fails := c.Get("error")
		_, refused := c.Get("refused") // the output differs in each process
		got := ""
		tmpl, err := Compile("case", source)
		if err == nil {
			got, err = tmpl.Render(t.Context(), vars, Limits{})
		}
		switch {
		case refused && !errors.Is(err, ErrUnsupported):
			t.Errorf("%s: got %q, %v, want ErrUnsupported", source, got, err)
		case refused:
		case !fails && errors.Is(err, ErrUnsupported):
			unknown++
		case fails && err == nil:
			t.Errorf("%s\nrenders %q, where Jinja2 fails with %v", source, got, golden[string](t, c, "error"))
		case !fails && err != nil:
			t.Errorf("%s\nfails with %v, where Jinja2 renders %q", source, err, golden[string](t, c, "output"))
		case !fails && got != golden[string](t, c, "output"):
			t.Errorf("%s\n got %q\nwant %q", source, got, golden[string](t, c, "output"))
		}
	}
	if unknown > len(cases.Items)/500 {
		t.Errorf("%d of %d cases are not supported", unknown, len(cases.Items))
	}
}

// TestSums adds strings, which are not joined before they are printed, and other values between them. The first invalid
// addition ends the render.
func TestSums(t *testing.T) {
	vars := values.NewDict()
	vars.Set("s", strings.Repeat("x", 600))
	for source, want := range map[string]string{
		"{{ 'a' + 'b' + 'c' }}":                            "abc",
		"{% set x = 'a' + 'b' + 'c' %}{{ x + x }}":         "abcabc",
		"{{ 'a' + ('b' + 'c')|upper + 'd' }}":              "aBCd",
		"{{ '' + '' }}":                                    "",
		"{{ 1 + 2 + 3 - 4 }}":                              "2",
		"{{ [1] + [2] + [3] }}":                            "[1, 2, 3]",
		"{{ 'a' + 'b' + 1 }}":                              "can only concatenate str (not \"int\") to str",
		"{{ 'a' + 'b' - 'c' }}":                            "unsupported operand type(s) for -",
		"{{ 1 + 'a' + 'b' }}":                              "unsupported operand type(s) for +",
		"{{ 'a' + none + raise_exception('too late') }}":   "can only concatenate str (not \"None\") to str",
		"{{ 'a' + 'b' + raise_exception('in time') + 1 }}": "in time",
		"{{ 'a' + 'b' + missing + 'c' }}":                  "'missing' is undefined",
		"{{ s + s }}":                                      "a string of more than 1000 bytes",
		"{{ s + s + 1 }}":                                  "a string of more than 1000 bytes",
		"{{ s }}{{ 'a' + s }}":                             "more than 1000 bytes of text",
	} {
		tmpl, err := Compile("sums", source)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tmpl.Render(t.Context(), vars, Limits{OutputBytes: 1000})
		if err != nil {
			got = err.Error()
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%s: got %.100q, want %q", source, got, want)
		}
	}
}

// TestPythonNumbersInTemplates: numbers that are not finite print as Python prints them.
func TestPythonNumbersInTemplates(t *testing.T) {
	v, _, err := values.JSONReader{Python: true}.Parse([]byte(`{"a":[NaN,Infinity,-1e400]}`))
	if err != nil {
		t.Fatal(err)
	}
	template, err := Compile("numbers", "{{ a }} {{ a|tojson }} {{ a[0] == a[1] }}")
	if err != nil {
		t.Fatal(err)
	}
	got, err := template.Render(t.Context(), v.(*values.Dict), Limits{})
	if want := "[nan, inf, -inf] [NaN, Infinity, -Infinity] False"; err != nil || got != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

func BenchmarkRender(b *testing.B) {
	tmpl, err := Compile(
		"chatml",
		"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content|trim + '<|im_end|>\n' }}{% endfor %}{% "+
			"if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
	)
	if err != nil {
		b.Fatal(err)
	}
	v, err := values.ParseJSON([]byte(`{"messages":[` + strings.Repeat(
		`{"role":"user","content":"`+strings.Repeat("The harbour was quiet. ", 80)+`\n"},`, 19) +
		`{"role":"assistant","content":"end"}]}`))
	if err != nil {
		b.Fatal(err)
	}
	vars := v.(*values.Dict).Clone()
	vars.Set("add_generation_prompt", true)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tmpl.Render(b.Context(), vars, Limits{}); err != nil {
			b.Fatal(err)
		}
	}
}
