package jinja

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// FuzzTemplate compiles and renders arbitrary templates. Errors are allowed; panics, hangs and invalid UTF-8 are not.
func FuzzTemplate(f *testing.F) {
	raw, err := os.ReadFile("testdata/jinja.json")
	if err != nil {
		f.Fatal(err)
	}
	v, err := values.ParseJSON(raw)
	if err != nil {
		f.Fatal(err)
	}
	file := v.(*values.Dict)
	cases, _ := file.Get("cases")
	for _, c := range cases.(*values.List).Items {
		source, _ := c.(*values.Dict).Get("template")
		f.Add(source.(string))
	}
	vars, _ := file.Get("vars")
	f.Fuzz(func(t *testing.T, source string) {
		fuzzTemplate(t, Python, source, vars.(*values.Dict))
		fuzzTemplate(t, MiniJinja, source, vars.(*values.Dict))
	})
}

func fuzzTemplate(t *testing.T, d Dialect, source string, vars *values.Dict) {
	tmpl, err := d.Compile("fuzz", source)
	if err != nil {
		return
	}
	// No time limit: the steps alone must end it, well before the tests' own timeout.
	text, err := tmpl.Render(t.Context(), vars, Limits{Steps: 20_000, OutputBytes: 1 << 16, Timeout: time.Hour})
	if err == nil && (len(text) > 1<<16 || !utf8.ValidString(text)) {
		t.Fatalf("%d bytes of text, valid UTF-8: %v", len(text), utf8.ValidString(text))
	}
}

// sameOrAsWritten compares a value read with JSONAsWritten with ParseJSON's value.
func sameOrAsWritten(t *testing.T, got, want any, may bool) {
	t.Helper()
	switch w := want.(type) {
	case *values.Dict:
		g := got.(*values.Dict)
		if g.Len() != w.Len() {
			t.Fatalf("%d keys, want %d", g.Len(), w.Len())
		}
		for key, value := range w.All() {
			x, ok := g.Get(key.(string))
			if !ok {
				t.Fatalf("key %v is missing", key)
			}
			sameOrAsWritten(t, x, value, may)
		}
	case *values.List:
		g := got.(*values.List)
		if len(g.Items) != len(w.Items) {
			t.Fatalf("%d items, want %d", len(g.Items), len(w.Items))
		}
		for i := range w.Items {
			sameOrAsWritten(t, g.Items[i], w.Items[i], may)
		}
	case string:
		g := got.(string)
		if may && g != w && len(g) >= 256 {
			read, err := values.ParseJSON([]byte(`"` + g + `"`))
			if err != nil {
				t.Fatal(err)
			}
			g = read.(string)
		}
		if g != w {
			t.Fatalf("%q, want %q", g, w)
		}
	case *big.Int:
		if w.Cmp(got.(*big.Int)) != 0 {
			t.Fatalf("%v, want %v", got, w)
		}
	default:
		if got != want {
			t.Fatalf("%v, want %v", got, want)
		}
	}
}

// FuzzParseJSON compares the parser with encoding/json. Both accept the same texts, except for the documented
// differences.
func FuzzParseJSON(f *testing.F) {
	for _, seed := range []string{
		`{"a": [1, -2.5e3, "x\u00e9\ud83d\ude00\n", true, false, null], "b": {}}`, `[]`, `01`, `1.`, `-`, `"\ud800"`,
		"\"\x01\"", `{"a":1,}`,
		`[1,]`, `{"a" 1}`, `nul`, `1 2`, `"abc`, `123456789012345678901234567890`, `1e999`, "\xff", ` [ 1 ] `,
		`{"a":1,"a":2}`, `""`,
		`{"a":["` + strings.Repeat(`x\n`, 300) + `"],"decoded":"` + strings.Repeat(`x\n`, 300) + `"}`,
		`{"a":"` + strings.Repeat("x", 300) + `\ud800"}`,
		"\ufeff[NaN,-Infinity]", "\xff\xfe[\x00", `{"a":-Inf}`, "\"\xed\xa0\x80\"",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		v, err := values.ParseJSON(body)
		around, _, aroundErr := values.JSONReader{Field: func(_, key string) values.JSONField {
			if key != "decoded" {
				return values.JSONAsWritten
			}
			return 0
		}}.Parse(body)
		skips := values.JSONReader{Field: func(_, key string) values.JSONField { return values.JSONSkip }}
		if _, _, err := skips.Parse(body); fmt.Sprint(err) != fmt.Sprint(aroundErr) {
			t.Fatalf("%q: error %v, but %v when fields are skipped", body, aroundErr, err)
		}
		if fmt.Sprint(err) != fmt.Sprint(aroundErr) {
			t.Fatalf("%q: error %v, but %v when strings are not decoded", body, err, aroundErr)
		}
		if object, ok := v.(*values.Dict); err == nil && ok {
			for key, value := range object.All() {
				got, _ := around.(*values.Dict).Get(key.(string))
				sameOrAsWritten(t, got, value, key != "decoded")
			}
		}
		python, _, pythonErr := values.JSONReader{Python: true}.Parse(body)
		if err == nil && (pythonErr != nil || !reflect.DeepEqual(v, python)) {
			t.Fatalf("%q: %v to Python: %v", body, v, pythonErr)
		}
		var syntax *values.SyntaxError
		if pythonErr != nil && !errors.Is(pythonErr, values.ErrPythonJSON) && !errors.As(pythonErr, &syntax) {
			t.Fatalf("%q: error of type %T", body, pythonErr)
		}
		valid := json.Valid(body)
		switch {
		case err == nil && !valid:
			t.Fatalf("%q: accepted, but encoding/json rejects it", body)
		case err != nil && !errors.As(err, &syntax):
			t.Fatalf("%q: error of type %T", body, err)
		case err != nil && (syntax.Offset < 0 || syntax.Offset > len(body)):
			t.Fatalf("%q: offset %d", body, syntax.Offset)
		case err != nil && valid:
			for _, allowed := range []string{"UTF-8", "surrogate", "range", "nested", "too long"} {
				if strings.Contains(err.Error(), allowed) {
					return
				}
			}
			t.Fatalf("%q: %v, but encoding/json accepts it", body, err)
		case err == nil:
			x := newExecution(
				t.Context(),
				&Template{},
				Limits{
					Depth:       values.MaxJSONDepth + 1,
					OutputBytes: 1 << 30,
					Steps:       1 << 30,
					Timeout:     time.Hour,
					Memory:      1 << 30,
				},
			)
			w := &jsonWriter{x: x, out: &output{x: x}, itemSeparator: ",", keySeparator: ":"}
			w.value(v)
			written := w.out.text()
			again, err := values.ParseJSON([]byte(written))
			if err != nil {
				t.Fatalf("%q: written as %q: %v", body, written, err)
			}
			if !x.equal(v, again) {
				t.Fatalf("%q: written as %q: not the same value", body, written)
			}
		}
	})
}
