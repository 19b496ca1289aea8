package values

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestParseJSONValues(t *testing.T) {
	big30, _ := new(big.Int).SetString("123456789012345678901234567890", 10)
	for body, want := range map[string]any{
		`null`:                           nil,
		` true `:                         true,
		`false`:                          false,
		`0`:                              int64(0),
		`-0`:                             int64(0),
		`-12`:                            int64(-12),
		`9223372036854775807`:            int64(1<<63 - 1),
		`1.0`:                            1.0,
		`1e2`:                            100.0,
		`-1.5E-3`:                        -0.0015,
		`""`:                             "",
		`"plain text that is long"`:      "plain text that is long",
		`"\"\\\/\b\f\n\r\t"`:             "\"\\/\b\f\n\r\t",
		`"\u0041\u00e9\u2028"`:           "A\u00e9\u2028",
		`"\ud83d\ude00"`:                 "😀",
		`"日本 \n 日本"`:                     "日本 \n 日本",
		`123456789012345678901234567890`: big30,
	} {
		got, err := ParseJSON([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			continue
		}
		if fmt.Sprintf("%T %v", got, got) != fmt.Sprintf("%T %v", want, want) {
			t.Errorf("%s: got %T %v, want %T %v", body, got, got, want, want)
		}
	}
}

func TestParseJSONErrors(t *testing.T) {
	for _, c := range []struct {
		body   string
		offset int
		reason string
	}{
		{``, 0, "unexpected end"},
		{`  `, 2, "unexpected end"},
		{`{"a":1} x`, 8, "unexpected text after the value"},
		{`{"a":1,}`, 7, "expected a key"},
		{`{a:1}`, 1, "expected a key"},
		{`{"a" 1}`, 5, "expected ':'"},
		{`{"a":1 "b":2}`, 7, "expected ',' or '}'"},
		{`[1,]`, 3, "expected a value"},
		{`[1 2]`, 3, "expected ',' or ']'"},
		{`[1`, 2, "unexpected end"},
		{`tru`, 0, "expected true"},
		{`nan`, 0, "expected null"},
		{`NaN`, 0, "expected a value"},
		{`01`, 1, "must not start with 0"},
		{`-01`, 2, "must not start with 0"},
		{`1.`, 2, "unexpected end"},
		{`1.x`, 2, "digit after '.'"},
		{`.5`, 0, "expected a value"},
		{`+1`, 0, "expected a value"},
		{`-`, 1, "unexpected end"},
		{`-x`, 1, "expected a digit"},
		{`1e+]`, 3, "exponent"},
		{`1e999`, 0, "out of range"},
		{strings.Repeat("9", 4301), 0, "too long"},
		{`"abc`, 4, "unexpected end"},
		{`"a\`, 2, "unfinished escape"},
		{`"a\x"`, 2, "unknown escape"},
		{`"\u12g4"`, 1, "hexadecimal"},
		{`"\ud800"`, 1, "lone surrogate"},
		{`"\udc00\ud800"`, 1, "lone surrogate"},
		{`"\ud800\u0041"`, 1, "lone surrogate"},
		{"\"a\x01b\"", 2, "control character"},
		{"\"a\nb\"", 2, "control character"},
		{"\"12345678901\x1f3456789\"", 12, "control character"},
		{"[\"a\xffb\"]", 3, "UTF-8"},
		{"\"\xed\xa0\x80\"", 1, "UTF-8"},
		{strings.Repeat("[", 501), 500, "nested deeper than 500"},
		{strings.Repeat(`{"a":`, 501), 2500, "nested deeper than 500"},
	} {
		v, err := ParseJSON([]byte(c.body))
		var syntax *SyntaxError
		if !errors.As(err, &syntax) || syntax.Offset != c.offset || !strings.Contains(syntax.Reason, c.reason) {
			t.Errorf("%.40q: got %v, %v; want byte %d: %s", c.body, v, err, c.offset, c.reason)
		}
	}
	if _, err := ParseJSON([]byte(strings.Repeat("[", 500) + strings.Repeat("]", 500))); err != nil {
		t.Errorf("500 levels: %v", err)
	}
}

func TestParseJSONObjects(t *testing.T) {
	v, err := ParseJSON([]byte(`{"b":1,"a":2,"b":3,"":4}`))
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for key, value := range v.(*Dict).All() {
		order = append(order, fmt.Sprint(key, "=", value))
	}
	if got := strings.Join(order, " "); got != "b=3 a=2 =4" {
		t.Errorf("got %s", got)
	}
}

// TestParseJSONEscapes reads many strings with escapes in one body. They share memory, so it compares them only after
// all are read.
func TestParseJSONEscapes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	pieces := []string{
		"\n",
		"\"",
		"\\",
		"\x00",
		"\t",
		"a",
		"plain text",
		"é",
		"日本語",
		"😀",
		"\u2028",
		strings.Repeat("long and plain ", 10),
	}
	var want []string
	for length := range 400 {
		var b strings.Builder
		for b.Len() < length {
			b.WriteString(pieces[random.IntN(len(pieces))])
		}
		want = append(want, b.String())
	}
	for _, size := range []int{decodedChunk - 20, decodedChunk, 3 * decodedChunk} {
		for _, at := range []int{0, size / 2, size} {
			want = append(want, strings.Repeat("x", at)+"\n"+strings.Repeat("y", size-at))
		}
		want = append(want, strings.Repeat("\"", size))
	}
	body, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	v, err := ParseJSON(body)
	if err != nil {
		t.Fatal(err)
	}
	for i, got := range v.(*List).Items {
		if got != want[i] {
			t.Fatalf("string %d: got %.100q, want %.100q", i, got, want[i])
		}
	}
}

// TestParseJSONObjectSizes reads objects below and above the size at which a dict gets an index, with one duplicate
// key.
func TestParseJSONObjectSizes(t *testing.T) {
	for size := range 4 * smallDict {
		for twice := range max(size, 1) {
			var members []string
			for i := range size {
				members = append(members, fmt.Sprintf(`"k%d":{"n":%d}`, i, i))
			}
			if size > 0 {
				members = append(members, fmt.Sprintf(`"k%d":"again"`, twice))
			}
			v, err := ParseJSON([]byte("{" + strings.Join(members, ",") + "}"))
			if err != nil {
				t.Fatal(err)
			}
			d := v.(*Dict)
			at := 0
			for key, value := range d.All() {
				n := any("again")
				if at != twice {
					n, _ = value.(*Dict).Get("n")
					value = int64(at)
				}
				if found, _ := d.Get(fmt.Sprint("k", at)); key != fmt.Sprint("k", at) || n != value || found == nil {
					t.Fatalf("%d keys, %d twice: item %d is %v=%v", size, twice, at, key, value)
				}
				at++
			}
			if at != size || d.Len() != size {
				t.Fatalf("%d keys, want %d", d.Len(), size)
			}
		}
	}
}

// TestDictAgainstMap applies the same operations to a dict and to a map with a list of keys, below and above the size
// at which a dict gets an index.
func TestDictAgainstMap(t *testing.T) {
	d := NewDict()
	want := map[string]int{}
	var keys []string
	for i := range 200 {
		key := fmt.Sprint("key", i*7%31)
		if _, ok := want[key]; !ok {
			keys = append(keys, key)
		}
		want[key] = i
		d.Set(key, i)
		if d.Len() != len(want) {
			t.Fatalf("step %d: %d keys, want %d", i, d.Len(), len(want))
		}
		at := 0
		for key, value := range d.All() {
			if key != keys[at] || value != want[keys[at]] {
				t.Fatalf("step %d: item %d is %v=%v, want %s=%d", i, at, key, value, keys[at], want[keys[at]])
			}
			at++
		}
		for _, key := range append(keys, "missing") {
			v, ok := d.Get(key)
			if w, wantOK := want[key]; ok != wantOK || ok && v != w {
				t.Fatalf("step %d: %s is %v, %v", i, key, v, ok)
			}
		}
	}
	clone := d.Clone()
	clone.Set("new", 1)
	if _, ok := d.Get("new"); ok {
		t.Error("a key added to a clone is in the original")
	}
}

func TestDictKeysEqualInPython(t *testing.T) {
	for _, filler := range []int{0, 20} {
		d := NewDict()
		for i := range filler {
			d.Set(fmt.Sprint("filler", i), i)
		}
		d.Put(int64(1), "int")
		d.Put(1.0, "float")
		d.Put(true, "bool")
		d.Put("1", "text")
		if d.Len() != filler+2 {
			t.Errorf("%d keys in addition to %d", d.Len()-filler, filler)
		}
		if v, ok := d.Lookup(int64(1)); !ok || v != "bool" {
			t.Errorf("1 is %v, %v", v, ok)
		}
	}
}

var benchmarkBody = []byte(
	`{"model":"m","messages":[` + strings.Repeat(
		`{"role":"user","content":"`+strings.Repeat("The harbour was quiet. ", 80)+`\n"},`,
		19,
	) +
		`{"role":"assistant","content":"end"}],"stream":true,"max_tokens":100,"temperature":0.7}`,
)

func TestJSONAsWritten(t *testing.T) {
	long, short := strings.Repeat(`a\n`, 200), strings.Repeat(`a\n`, 20)
	body := `{"left":{"long":"` + long + `","short":"` + short + `"},"read":"` + long + `"}`
	asWritten := JSONReader{Field: func(_, key string) JSONField {
		if key == "left" {
			return JSONAsWritten
		}
		return 0
	}}
	v, _, err := asWritten.Parse([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	left, _ := v.(*Dict).Get("left")
	for name, want := range map[string]string{"long": long, "short": strings.ReplaceAll(short, `\n`, "\n")} {
		if got, _ := left.(*Dict).Get(name); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
	if got, _ := v.(*Dict).Get("read"); got != strings.ReplaceAll(long, `\n`, "\n") {
		t.Errorf("the field without JSONAsWritten is %q", got)
	}
	for _, bad := range []string{`\x`, `\ud800`, "\x01", `\`, ""} {
		body := `{"left":"` + long + bad
		if bad != "" {
			body += `"}`
		}
		_, want := ParseJSON([]byte(body))
		_, _, err := asWritten.Parse([]byte(body))
		if want == nil || err == nil || err.Error() != want.Error() {
			t.Errorf("%q: %v, want %v", bad, err, want)
		}
	}
}

// TestPythonJSON: what Python's json reads beyond RFC 8259. Python 3.11 and pydantic 2.14 gave the values.
func TestPythonJSON(t *testing.T) {
	fields := func(_, key string) JSONField {
		return map[string]JSONField{"skipped": JSONSkip, "written": JSONAsWritten, "ids": JSONTokenIDs}[key]
	}
	deep := func(key string, n int) string {
		return `{"` + key + `":` + strings.Repeat("[", n) + strings.Repeat("]", n) + "}"
	}
	long := strings.Repeat("x", 300)
	const python, syntax = "python", "syntax"
	for _, c := range []struct{ body, want string }{
		{"\ufeff {\"a\":1}", "map[a:1]"},
		{"\ufeff\ufeff{}", syntax},
		{" \ufeff{}", syntax},
		{`{"a":NaN,"b":Infinity,"c":-Infinity,"d":1e400,"e":-1e400,"skipped":[NaN,Infinity,-Infinity,1e400]}`,
			"map[a:NaN b:+Inf c:-Inf d:+Inf e:-Inf]"},
		{`{"a":nan}`, syntax},
		{`{"a":-NaN}`, syntax},
		{`{"a":+Infinity}`, syntax},
		{`{"a":-Inf}`, syntax},
		{`{"skipped":-Inf}`, syntax},
		{`{"skipped":Nan}`, syntax},
		{`{"skipped":"\ud800","a":1}`, "map[a:1]"},
		{`{"skipped":{"\ud800":"\udc00\ud800"},"a":1}`, "map[a:1]"},
		{`{"written":"` + long + `\ud800"}`, "map[written:" + long + `\ud800]`},
		{`{"a":"\ud800"}`, python},
		{`{"\ud800":1}`, python},
		{`{"a":"\ud83d\ude00"}`, "map[a:\U0001f600]"},
		{`{"a":"\ud80"}`, syntax},
		{`{"ids":[1.0,2e0,30E-1,-0.0,4294967295.0]}`, "map[ids:[1 2 3 0 4294967295]]"},
		{`{"ids":[[1.0],[2]]}`, "map[ids:[[1] [2]]]"},
		{`{"ids":[1,1.5]}`, "map[ids:bad 1]"},
		{`{"ids":[1,4294967296.0]}`, "map[ids:bad 1]"},
		{`{"ids":[1,1e400,NaN,-Infinity]}`, "map[ids:bad 1]"},
		{`{"ids":[1,null]}`, "map[ids:bad 1]"},
		{`{"ids":[1,true]}`, python},
		{`{"ids":[false]}`, python},
		{`{"ids":[1,"2"]}`, python},
		{"{\"a\":\"\xed\xa0\x80\"}", python},
		{"{\"a\":\"\xed\xa0\x80\xff\"}", syntax},
		{"{\"a\":\"\xed\x9f\x80\xed\"}", syntax},
		{"{\x00\"\x00", python},
		{"\x00{\x00}", python},
		{"\xff\xfe{\x00}\x00", python},
		{"\xfe\xff\x00{", python},
		{"\x00\x00\xfe\xff", python},
		{"{\"a\":\"\x00\"}", syntax},
		{deep("a", MaxJSONDepth-1), "read"},
		{deep("a", MaxJSONDepth), python},
		{deep("skipped", MaxSkippedDepth-1), "map[]"},
		{deep("skipped", MaxSkippedDepth), python},
		{`{"skipped":` + strings.Repeat(`{"a":`, 1<<20), python},
		{`{"a":` + strings.Repeat("9", 4301) + `}`, syntax},
		{`{"a":1}` + "\x00", syntax},
		{`{"a":1,"a":NaN}`, "map[a:NaN]"},
	} {
		v, _, err := JSONReader{Field: fields, Python: true}.Parse([]byte(c.body))
		var wrong *SyntaxError
		got := fmt.Sprint(plain(v))
		switch {
		case errors.Is(err, ErrPythonJSON):
			got = python
		case errors.As(err, &wrong):
			got = syntax
		case err != nil:
			got = err.Error()
		case c.want == "read":
			got = c.want
		}
		if got != c.want {
			t.Errorf("%.60q: %s, want %s (%v)", c.body, got, c.want, err)
		}
		// Strict JSON has none of these, but for the pair of surrogates.
		if _, _, err := (JSONReader{Field: fields}).Parse([]byte(c.body)); errors.Is(err, ErrPythonJSON) {
			t.Errorf("%.60q: strict JSON is Python's", c.body)
		}
	}
}

// plain returns a value with Go's maps and slices.
func plain(v any) any {
	switch x := v.(type) {
	case *Dict:
		m := map[string]any{}
		for key, v := range x.All() {
			m[key.(string)] = plain(v)
		}
		return m
	case *List:
		items := []any{}
		for _, v := range x.Items {
			items = append(items, plain(v))
		}
		return items
	case *TokenIDs:
		if x.Bad >= 0 {
			return fmt.Sprint("bad ", x.Bad)
		}
		return x.IDs
	}
	return v
}

func BenchmarkParseJSON(b *testing.B) {
	b.SetBytes(int64(len(benchmarkBody)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseJSON(benchmarkBody); err != nil {
			b.Fatal(err)
		}
	}
}
