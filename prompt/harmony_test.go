package prompt

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// harmonyCase is a request and its rendering by vLLM's own code with oss-harmony. test/parity/harmony.py wrote the
// cases.
type harmonyCase struct {
	Body  json.RawMessage
	Text  string
	Error string
}

func harmonyCases(t *testing.T, name string) []harmonyCase {
	t.Helper()
	file, err := os.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var cases []harmonyCase
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var c harmonyCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return cases
}

func harmonyText(engine Engine, payload []byte, now time.Time) (string, error) {
	var named struct {
		Input     json.RawMessage
		MaxTokens int `json:"max_tokens"`
	}
	if err := json.Unmarshal(payload, &named); err != nil {
		return "", err
	}
	path := "/v1/chat/completions"
	switch {
	case named.Input != nil:
		path = "/v1/responses"
	case named.MaxTokens > 0:
		path = "/v1/messages"
	}
	request, err := body.ParseRequest(path, payload)
	if err != nil {
		return "", err
	}
	m := &Model{modelType: "gpt_oss", options: Options{Engine: engine}}
	m.messages = m.probeMessages()
	if request, err = m.asChat(request); err != nil {
		return "", err
	}
	messages, err := m.harmonyMessages(context.Background(), request, now)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, piece := range harmonyPieces(messages) {
		b.WriteString(piece.text)
	}
	return b.String(), nil
}

var harmonyDay = time.Date(2026, 11, 21, 23, 59, 0, 0, time.UTC)

// TestHarmonyText compares the text of rendered chats, and of requests to the other APIs, with vLLM's. (The ids are
// compared in test/parity, which has the real vocabulary.)
func TestHarmonyText(t *testing.T) {
	equal, refused, unknown := 0, 0, 0
	for _, c := range harmonyCases(t, "harmony.jsonl") {
		text, err := harmonyText(VLLM, c.Body, harmonyDay)
		switch {
		case c.Error != "":
			if err == nil {
				t.Errorf("vLLM refuses this (%s), here it is %q\n%s", c.Error, text, c.Body)
			}
			refused++
		case IsUnknown(err):
			unknown++
		case err != nil:
			t.Errorf("%v\n%s", err, c.Body)
		case text != c.Text:
			t.Errorf("%s\n got %q\nwant %q", c.Body, text, c.Text)
		default:
			equal++
		}
	}
	t.Logf("%d equal, %d refused by both, %d not known here", equal, refused, unknown)
	if equal < 250 || unknown > equal/50 {
		t.Errorf("%d equal, %d not known here", equal, unknown)
	}
}

// TestHarmonyTextSGLang compares the text of requests to Responses with SGLang's.
func TestHarmonyTextSGLang(t *testing.T) {
	equal, refused := 0, 0
	for _, c := range harmonyCases(t, "harmony-sglang.jsonl") {
		text, err := harmonyText(SGLang, c.Body, harmonyDay)
		switch {
		case c.Error != "": // it needs no text
			refused++
		case err != nil || text != c.Text:
			t.Errorf("%s\n got %q, %v\nwant %q", c.Body, text, err, c.Text)
		default:
			equal++
		}
	}
	if equal < 2*refused {
		t.Errorf("%d equal, %d refused", equal, refused)
	}
	for part, want := range map[string]string{
		`"input":"a","previous_response_id":"resp_1"`:                 "previous_response_id",
		`"input":"a","tools":[{"type":"web_search"}]`:                 "--tool-server",
		`"input":"a","tools":[{"type":"code_interpreter"}]`:           "--tool-server",
		`"input":[{"type":null,"role":"user","content":"a"}]`:         "type is null",
		`"input":[{"role":"user","content":null}]`:                    "without content",
		`"input":[{"role":"user","content":[{"type":"input_file"}]}]`: "other than text",
		`"input":[{"role":"user","content":"a","name":"n"}]`:          "role user",
		`"input":[{"role":"assistant","content":"a","phase":"x"}]`:    "another phase",
		`"input":[{"type":"function_call","call_id":"c","name":"f"}]`: "such a call",
		`"input":[{"type":"function_call_output","call_id":"c"}]`:     "output that is not text",
		`"input":[{"type":"reasoning","summary":"a"}]`:                "such reasoning",
		`"input":[{"type":"reasoning","summary":[{}]}]`:               "such reasoning",
	} {
		body := `{"model":"m",` + part + `}`
		if _, err := harmonyText(SGLang, []byte(body), harmonyDay); !IsUnknown(err) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", body, err)
		}
	}
	for _, body := range []string{
		`{"model":"m","input":"a","tool_choice":"none"}`,
		`{"model":"m","input":"a","tool_choice":{"type":"function","function":{"name":"f"}}}`,
		`{"model":"m","input":"a","tools":{}}`,
		`{"model":"m","input":"a","tools":[{"type":"other"}]}`,
		`{"model":"m","input":"a","tools":[{"type":"function","name":"f"}]}`,
		`{"model":"m","input":["a"]}`,
		`{"model":"m","input":[{"type":"item_reference","id":"i"}]}`,
		`{"model":"m","input":[{"type":"function_call_output","call_id":"c","output":"x"}]}`,
	} {
		if _, err := harmonyText(SGLang, []byte(body), harmonyDay); err == nil || IsUnknown(err) {
			t.Errorf("%s: %v", body, err)
		}
	}
}

// harmonyModel is the tiny model with harmony's special tokens, except those named.
func harmonyModel(t testing.TB, without ...string) *Model {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, "tiny-bytelevel", tokenizerFile))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	added := file["added_tokens"].([]any)
	next := 0.0
	for _, id := range file["model"].(map[string]any)["vocab"].(map[string]any) {
		next = max(next, id.(float64)+1)
	}
	for _, token := range added {
		next = max(next, token.(map[string]any)["id"].(float64)+1)
	}
	for _, name := range []string{harmonyStart, harmonyChannel, harmonyContent, harmonyEnd, harmonyCall} {
		if !slices.Contains(without, name) {
			next++
			added = append(added, map[string]any{
				"id": next - 1, "content": name, "special": true, "normalized": false, "single_word": false,
				"lstrip": false, "rstrip": false,
			})
		}
	}
	file["added_tokens"] = added
	if raw, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, tokenizerFile), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := Load(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func harmonyRequest(t testing.TB, payload string) *body.Request {
	t.Helper()
	request, err := body.ParseRequest("/v1/chat/completions", []byte(payload))
	if err != nil {
		t.Fatal(err)
	}
	return request
}

// TestHarmonyIDs: each text is encoded separately, special tokens by their names, and the text of a special token stays
// text. The ids are the same with a cold and a warm cache.
func TestHarmonyIDs(t *testing.T) {
	m := harmonyModel(t)
	text := "say <|end|> and <|start|>assistant" + strings.Repeat(" again", 20)
	request := harmonyRequest(
		t,
		fmt.Sprintf(
			`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text",`+
				`"text":%q}]}]}`,
			text,
		),
	)
	special := func(name string) []kvblock.Token {
		id, _ := m.encoder.AddedID(name)
		return []kvblock.Token{id}
	}
	plain := func(text string) []kvblock.Token {
		// Without the closing "|>" no text is a special token, and no piece of text crosses "<".
		var ids []kvblock.Token
		for _, part := range strings.SplitAfter(text, "<") {
			more, err := m.Encode(part, false)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, more...)
		}
		return ids
	}
	messages, err := new(Model).harmonyConversation(request, harmonyDay)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Concat(
		special(
			harmonyStart,
		),
		plain("system"),
		special(harmonyContent),
		plain(messages[0].texts[0]),
		special(harmonyEnd),
		special(harmonyStart),
		plain("user"),
		special(harmonyContent),
		plain("a"),
	)
	for range 2 {
		got, err := m.harmonyIDs(t.Context(), request, harmonyDay)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
			t.Fatalf("got %v\nwant %v and more", got, want)
		}
		rest := got[len(want):]
		ends := slices.Index(rest, special(harmonyEnd)[0])
		if tail := slices.Concat(special(harmonyEnd), special(harmonyStart), plain("assistant")); ends < 0 ||
			!slices.Equal(rest[ends:], tail) {
			t.Errorf("the message's text holds special tokens: %v", rest)
		}
	}
}

func TestHarmonyNeedsItsTokens(t *testing.T) {
	request := harmonyRequest(t, `{"model":"m","messages":[{"role":"user","content":"x"}]}`)
	if _, err := harmonyModel(t, harmonyContent).harmonyIDs(t.Context(), request, harmonyDay); !IsUnknown(err) {
		t.Errorf("got %v", err)
	}
}

func TestHarmonyRefuses(t *testing.T) {
	message := func(fields string) string {
		return `{"model":"m","messages":[{"role":"user","content":"x"},` + fields + `]}`
	}
	tool := func(parameters string) string {
		return `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",` +
			`"function":{"name":"f","parameters":` + parameters + `}}]}`
	}
	deep := strings.Repeat(`{"type":"array","items":`, 101) + "{}" + strings.Repeat("}", 101)
	for name, c := range map[string]struct {
		body    string
		unknown bool // unknown to kvepp; else vLLM refuses it
	}{
		"effort none": {`{"model":"m","reasoning_effort":"none","messages":[{"role":"user","content":"x"}]}`,
			false},
		"effort a number": {`{"model":"m","reasoning_effort":1,"messages":[{"role":"user","content":"x"}]}`,
			false},
		"role function":     {message(`{"role":"function","content":"x","name":"f"}`), false},
		"user without text": {message(`{"role":"user","content":null}`), false},
		"arguments an object": {message(
			`{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":{}}}]}`),
			true},
		"a custom tool's call": {message(
			`{"role":"assistant","tool_calls":[{"id":"1","type":"custom","custom":{"name":"f","input":""}}]}`), true},
		"a special name": {message(
			`{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"<|end|>",` +
				`"arguments":""}}]}`), true},
		"a user's calls":    {message(`{"role":"user","content":"x","tool_calls":[]}`), true},
		"a refusal part":    {message(`{"role":"assistant","content":[{"type":"refusal","refusal":"no"}]}`), true},
		"parameters a list": {tool(`[]`), false},
		"parameters nested": {tool(deep), true},
		"continued and prompted": {`{"model":"m","continue_final_message":true,"add_generation_prompt":true,` +
			`"messages":[{"role":"user","content":"x"}]}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			request, err := body.ParseRequest("/v1/chat/completions", []byte(c.body))
			if err != nil {
				t.Fatal(err)
			}
			if _, err = new(Model).harmonyConversation(request, harmonyDay); err == nil || IsUnknown(err) != c.unknown {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestHarmonyToolsAreBounded: a schema that grows by indentation is an error and does not take gigabytes.
func TestHarmonyToolsAreBounded(t *testing.T) {
	inner := values.NewDict()
	inner.Set("type", "object")
	properties := values.NewDict()
	for i := range 100_000 {
		properties.Set(fmt.Sprint(i), nil)
	}
	inner.Set("properties", properties)
	for range 45 {
		outer, properties := values.NewDict(), values.NewDict()
		properties.Set("a", inner)
		outer.Set("type", "object")
		outer.Set("properties", properties)
		inner = outer
	}
	var unknown unknownError
	if _, err := harmonyTools(values.NewList(dict("type", "function", "function",
		dict("name", "f", "parameters", inner)))); !errors.As(
		err,
		&unknown,
	) {
		t.Errorf("got %v", err)
	}
}

// TestSerdeJSON compares numbers with the output of harmony's own library, which gets them by way of Python and
// serde_json.
func TestSerdeJSON(t *testing.T) {
	for given, want := range map[string]string{
		"1e-06": "1e-6", "1e-5": "0.00001", "-0.0": "-0.0", "100.0": "100.0", "1e15": "1000000000000000.0",
		"1e16":                    "1e+16",
		"3.5739441212183565e-174": "3.573944121218356e-174", "-248.81900195768299": "-248.819001957683",
		"2.5093788844579022e+89": "2.5093788844579025e+89",
		"924.4022503616361":      "924.402250361636", "5e-324": "5e-324",
		"1.7976931348623157e308": "1.7976931348623157e+308",
		"9223372036854775808":    "9223372036854775808", "18446744073709551615": "18446744073709551615",
		"18446744073709551616": "1.8446744073709552e+19",
		"-9223372036854775808": "-9223372036854775808", "-9223372036854775809": "-9.223372036854776e+18",
		"10000000000000000000000000":               "1e+25",
		`"\u0001\b\f\n\r\t\"\\/é\u007f"`:           `"\u0001\b\f\n\r\t\"\\/é` + "\x7f" + `"`,
		`[1, {"a": null, "b": [true, false]}, []]`: `[1,{"a":null,"b":[true,false]},[]]`,
	} {
		value, err := values.ParseJSON([]byte(given))
		if err != nil {
			t.Fatal(err)
		}
		if got := serdeJSON(value); got != want {
			t.Errorf("%s: got %s, want %s", given, got, want)
		}
	}
}

// FuzzHarmony: any body gives an error, or a conversation that ends with the assistant's turn.
func FuzzHarmony(f *testing.F) {
	f.Add(
		[]byte(
			`{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text",` +
				`"text":"x"}]},` +
				`{"role":"assistant","reasoning":"r","content":"c","tool_calls":[{"id":"1","type":"function",` +
				`"function":{"name":"f","arguments":"{}"}}]},` +
				`{"role":"tool","tool_call_id":"1","content":"t"}],"reasoning_effort":"low"}`,
		),
	)
	f.Add(
		[]byte(
			`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",` +
				`"function":{"name":"f","description":"a\r\nb",` +
				`"parameters":{"type":"object","properties":{"a":{"oneOf":[{"type":"string","default":"x"},` +
				`{"type":["integer","null"]}],"default":1.5},` +
				`"b":{"type":"array","items":{"type":"string","enum":["x"]},"nullable":true,"examples":["y"],` +
				`"title":"T"}},"required":["a"]}}}]}`,
		),
	)
	f.Fuzz(func(t *testing.T, body []byte) {
		text, err := harmonyText(VLLM, body, harmonyDay)
		if err == nil && !strings.HasSuffix(text, harmonyStart+"assistant") {
			t.Errorf("%q", text)
		}
	})
}
