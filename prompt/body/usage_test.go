package body

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"kvepp/internal/bodytest"
	"kvepp/prompt/values"
)

const stream = "text/event-stream; charset=utf-8"

func event(data string) string { return "data: " + data + "\n\n" }

// read feeds a body to a reader in pieces of the given size.
func read(contentType, body string, piece int) *UsageReader {
	r := NewUsageReader(contentType)
	for len(body) > 0 {
		n := min(piece, len(body))
		p := []byte(body[:n])
		r.Write(p)
		for i := range p {
			p[i] = '#' // the reader must not keep p
		}
		body = body[n:]
	}
	return r
}

const usageJSON = `{"prompt_tokens":100,"completion_tokens":7,"total_tokens":107,` +
	`"prompt_tokens_details":{"cached_tokens":64}}`

func TestUsageReader(t *testing.T) {
	full := Usage{PromptTokens: 100, CompletionTokens: 7, CachedTokens: 64, HasCached: true}
	long := strings.Repeat(`x\"usage\": {}, {[`, 300_000)
	for name, c := range map[string]struct {
		contentType, body string
		want              Usage
		found, content    bool
	}{
		"stream": {stream, event(`{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}`) +
			event(`{"choices":[{"delta":{"content":"Hi"}}],"usage":null}`) +
			event(`{"choices":[],"usage":`+usageJSON+`}`) + event("[DONE]"), full, true, true},
		"stream, CR LF and comments": {stream, ": ping\r\nid: 1\r\ndata:{\"choices\":[],\"usage\" : " + usageJSON +
			"}\r\n\r\n", full, true, false},
		"stream, last line without newline": {stream, `data: {"usage":` + usageJSON + `}`, full, true, false},
		"stream, latest counts": {stream, event(`{"usage":{"prompt_tokens":1}}`) +
			event(`{"usage":`+usageJSON+`}`), full, true, false},
		"stream, role only": {stream,
			event(`{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}`), Usage{}, false,
			false},
		"stream, vLLM's generate": {stream, event(`{"choices":[{"index":0,"token_ids":[]}]}`) +
			event(`{"choices":[{"index":0,"token_ids":[5]}]}`), Usage{}, false, true},
		"stream, generate without tokens": {stream, event(`{"choices":[{"token_ids":[]}],"output_ids":[1]}`) +
			event(`{"text":"","output_ids":[]}`), Usage{}, false, false},
		"stream, SGLang's generate": {stream, event(`{"text":"x","output_ids":[5],"meta_info":{}}`), Usage{}, false,
			true},
		"stream, text": {stream, event(`{"choices":[{"text":"x"}]}`), Usage{}, false, true},
		"stream, reasoning": {stream, event(`{"choices":[{"delta":{"reasoning_content":"x"}}]}`), Usage{},
			false, true},
		"stream, tool call": {stream, event(`{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}`), Usage{},
			false, true},
		"stream, finished": {stream, event(`{"choices":[{"delta":{},"finish_reason":"length"}]}`), Usage{},
			false, true},
		"stream, quoted usage": {stream,
			event(`{"choices":[{"delta":{"content":"\"usage\": {\"prompt_tokens\": 5}"}}]}`), Usage{}, false, true},
		"stream, long line first": {stream, "data: " + long + "\n" + event(`{"usage":`+usageJSON+`}`), full, true,
			false},
		"stream, responses": {stream, "event: response.created\n" +
			event(`{"type":"response.created","response":{"usage":null}}`) +
			event(`{"type":"response.completed","response":{"usage":{"input_tokens":100,"output_tokens":7,`+
				`"input_tokens_details":{"cached_tokens":64}}}}`), full, true, true},
		"stream, messages": {stream, event(`{"type":"message_start","message":{"usage":{"input_tokens":3}}}`) +
			event(`{"type":"message_delta","delta":{},"usage":{"input_tokens":36,"output_tokens":7,`+
				`"cache_creation_input_tokens":0,"cache_read_input_tokens":64}}`), full, true, true},
		"stream, message start": {stream, event(`{"type":"message_start","message":{"usage":{"input_tokens":3}}}`),
			Usage{PromptTokens: 3}, true, false},
		"stream, messages, the prompt in message_start alone": {stream, event(`{"type":"message_start","message":{`+
			`"usage":{"input_tokens":36,"cache_read_input_tokens":64,"output_tokens":0}}}`) +
			event(`{"type":"content_block_delta","delta":{"text":"x"}}`) +
			event(`{"type":"message_delta","delta":{},"usage":{"output_tokens":7}}`), full, true, true},
		"stream, messages, some counts repeated": {stream, event(`{"type":"message_start","message":{`+
			`"usage":{"input_tokens":3,"cache_read_input_tokens":64,"output_tokens":0}}}`) +
			event(`{"type":"message_delta","delta":{},"usage":{"input_tokens":36,"cache_read_input_tokens":null,`+
				`"output_tokens":7}}`), full, true, true},
		"stream, messages, nothing cached": {stream, event(`{"type":"message_start","message":{`+
			`"usage":{"input_tokens":100,"cache_read_input_tokens":0,"output_tokens":0}}}`) +
			event(`{"type":"message_delta","delta":{},"usage":{"output_tokens":7}}`),
			Usage{PromptTokens: 100, CompletionTokens: 7, HasCached: true}, true, true},
		"stream, messages, no cache report": {stream, event(`{"type":"message_start","message":{`+
			`"usage":{"input_tokens":100,"output_tokens":0}}}`) +
			event(`{"type":"message_delta","delta":{},"usage":{"output_tokens":7}}`),
			Usage{PromptTokens: 100, CompletionTokens: 7}, true, true},
		"stream, messages, some put into the cache": {stream, event(`{"type":"message_start","message":{`+
			`"usage":{"input_tokens":0,"output_tokens":0}}}`) +
			event(`{"type":"message_delta","delta":{},"usage":{"input_tokens":6,"cache_creation_input_tokens":30,`+
				`"cache_read_input_tokens":64,"output_tokens":7}}`), full, true, true},
		"body, responses": {"application/json",
			`{"usage":{"input_tokens":100,"output_tokens":7,"input_tokens_details":{"cached_tokens":64}}}`, full, true,
			true},
		"body, messages": {"application/json",
			`{"usage":{"input_tokens":5,"output_tokens":2,"cache_creation_input_tokens":0}}`,
			Usage{PromptTokens: 5, CompletionTokens: 2, HasCached: true}, true, true},
		"stream, malformed events": {stream, event(`{"usage":{`) + event("[]") + event(`"usage":{`) +
			"data\ndata:\n\n\n",
			Usage{}, false, false},

		"body": {"application/json", `{"id":"x","choices":[{"message":{"content":"hi"}}],"usage":` +
			usageJSON + `}`, full, true, true},
		"body, no content type": {"", ` { "usage" : ` + usageJSON + ` , "z":1}`, full, true, true},
		"body, no details": {"application/json", `{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}`,
			Usage{PromptTokens: 3}, true, true},
		"body, nothing cached": {"application/json",
			`{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}}`,
			Usage{PromptTokens: 3, HasCached: true}, true, true},
		"body, inner usage": {"application/json", `{"choices":[{"usage":` + usageJSON +
			`}],"a":{"usage":{"prompt_tokens":1}}}`, Usage{}, false, true},
		"body, usage as a value": {"application/json", `{"a":"usage","b":` + usageJSON + `}`, Usage{}, false, true},
		"body, null usage":       {"application/json", `{"usage":null,"x":` + usageJSON + `}`, Usage{}, false, true},
		"body, list usage":       {"application/json", `{"usage":[` + usageJSON + `]}`, Usage{}, false, true},
		"body, a key similar to usage": {"application/json", `{"usage\"":` + usageJSON +
			`,"usages":{},"usag":{},"\\usage":{}}`, Usage{}, false, true},
		"body, megabytes": {"application/json", `{"choices":[{"text":"` + long + `\\"}],"usage":` + usageJSON +
			`}`, full, true, true},
		"body, huge usage": {"application/json", `{"usage":{"prompt_tokens":5,"x":"` + long + `"}}`, Usage{},
			false, true},
		"body, a list":   {"application/json", `[{"usage":` + usageJSON + `}]`, Usage{}, false, true},
		"body, cut off":  {"application/json", `{"usage":{"prompt_tokens":5`, Usage{}, false, true},
		"body, not JSON": {"text/html", `<html>}}}]"usage":{`, Usage{}, false, true},
		"empty":          {"application/json", ``, Usage{}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			pieces := []int{1, 2, 3, 7, 61, 4096, 1 << 30}
			if len(c.body) > 1<<20 {
				pieces = pieces[4:]
			}
			for _, piece := range pieces {
				r := read(c.contentType, c.body, piece)
				for range 2 { // Usage has no side effects
					if got, found := r.Usage(); got != c.want || found != c.found || r.SawContent() != c.content {
						t.Errorf("pieces of %d: got %+v, %v, content %v", piece, got, found, r.SawContent())
					}
				}
				if cap(r.carry) > 2*maxCarry {
					t.Errorf("pieces of %d: the reader keeps %d bytes", piece, cap(r.carry))
				}
			}
		})
	}
}

// Tokens are counted by events from the first content on, or taken from the engine's count.
func TestGenerated(t *testing.T) {
	for name, c := range map[string]struct {
		contentType, body string
		want              int
	}{
		"events": {stream, event(`{"choices":[{"delta":{"role":"assistant","content":""}}]}`) +
			event(`{"choices":[{"delta":{"content":"a"}}]}`) +
			": ping\n\n" + event(`{"choices":[{"delta":{"content":"b"}}]}`) +
			event(`{"choices":[{"delta":{"content":"c"}}]}`), 3},
		"usage in each event": {stream, event(
			`{"choices":[{"delta":{"content":"a b c"}}],"usage":{"completion_tokens":3}}`) +
			event(`{"choices":[{"delta":{"content":"d e"}}],"usage":{"completion_tokens":5}}`), 5},
		"no content": {stream, event(`{"choices":[]}`), 0},
		"one piece":  {"application/json", `{"usage":` + usageJSON + `}`, 0},
	} {
		if got := max(read(c.contentType, c.body, 7).Generated()); got != c.want {
			t.Errorf("%s: %d tokens, want %d", name, got, c.want)
		}
	}
}

// TestUsageReaderAgainstParser compares the body scanner with a full parse of random objects, cut at random places.
func TestUsageReaderAgainstParser(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var value func(depth int) string
	value = func(depth int) string {
		switch n := rng.IntN(8); {
		case n == 0 && depth > 0:
			return "[" + value(depth-1) + "," + value(depth-1) + "]"
		case n <= 3 && depth > 0:
			keys := []string{"usage", "usage", "a", `us\"age`, "prompt_tokens", `\\`}
			var fields []string
			for range rng.IntN(4) {
				fields = append(fields, fmt.Sprintf(`"%s" : %s`, keys[rng.IntN(len(keys))], value(depth-1)))
			}
			return "{" + strings.Join(fields, ", ") + "}"
		case n <= 5:
			return []string{`"usage"`, `"a\\"`, `"\"{["`, `""`, `"}\\\""`}[rng.IntN(5)]
		}
		return []string{"1", "null", "true", "-2.5e3", "17"}[rng.IntN(5)]
	}
	seen := 0
	for range 20_000 {
		body := value(5)
		v, err := values.ParseJSON([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		var want Usage
		found := false
		// the reader uses the last of duplicate keys
		if d, ok := v.(*values.Dict); ok && strings.Count(body, `"usage" :`) == 1 {
			oracle := &UsageReader{}
			oracle.readUsage(d)
			want, found = oracle.usage, oracle.found
		} else {
			continue
		}
		if found {
			seen++
		}
		r := read("application/json", body, 1+rng.IntN(20))
		if got, ok := r.Usage(); got != want || ok != found {
			t.Fatalf("%s\n got %+v, %v\nwant %+v, %v", body, got, ok, want, found)
		}
	}
	if seen < 100 {
		t.Errorf("only %d bodies contained a usage", seen)
	}
}

func FuzzUsageReader(f *testing.F) {
	f.Add(event(`{"choices":[{"delta":{"content":"Hi"}}],"usage":`+usageJSON+`}`), uint8(3), true)
	f.Add(`{"a":"\\\"","usage":`+usageJSON+`}`, uint8(5), false)
	f.Add("data: \"usage\":{\ndata:", uint8(1), true)
	f.Fuzz(func(t *testing.T, body string, piece uint8, streaming bool) {
		contentType := "application/json"
		if streaming {
			contentType = stream
		}
		whole := read(contentType, body, 1<<30)
		pieces := read(contentType, body, int(piece)+1)
		a, aFound := whole.Usage()
		b, bFound := pieces.Usage()
		if a != b || aFound != bFound || whole.SawContent() != pieces.SawContent() {
			t.Fatalf(
				"%q: in one piece %+v %v %v, in several %+v %v %v",
				body,
				a,
				aFound,
				whole.SawContent(),
				b,
				bFound,
				pieces.SawContent(),
			)
		}
	})
}

// Absurd numbers stay in range, alone and added up, so that counters never decrease.
func TestUsageOutOfRange(t *testing.T) {
	const huge = "9223372036854775807"
	for name, text := range map[string]string{
		"both names": `{"prompt_tokens":` + huge + `,"input_tokens":` + huge + `,"completion_tokens":` + huge +
			`,"output_tokens":` + huge +
			`,"prompt_tokens_details":{"cached_tokens":` + huge + `},"cache_read_input_tokens":` + huge + `}`,
		"a sum": `{"prompt_tokens_details":{"cached_tokens":` + huge + `},"cache_read_input_tokens":1}`,
		"below zero": `{"prompt_tokens":-1,"completion_tokens":-5,"prompt_tokens_details":{"cached_tokens":-7},` +
			`"cache_read_input_tokens":-1}`,
		"beyond": `{"prompt_tokens":1e300,"completion_tokens":99999999999999999999999,` +
			`"input_tokens_details":{"cached_tokens":99999999999999999999999}}`,
	} {
		for _, kind := range []string{"application/json", stream} {
			r := NewUsageReader(kind)
			if kind == stream {
				r.Write([]byte(event(`{"choices":[],"usage":` + text + `}`)))
			} else {
				r.Write([]byte(`{"usage":` + text + `}`))
			}
			u, _ := r.Usage()
			reported, counted := r.Generated()
			for _, n := range []int{u.PromptTokens, u.CompletionTokens, u.CachedTokens, reported, counted} {
				if n < 0 || n > 1<<42 {
					t.Errorf("%s, %s: %+v, %d and %d generated", name, kind, u, reported, counted)
					break
				}
			}
		}
	}
}

func BenchmarkUsageReaderStream(b *testing.B) {
	chunk := []byte(
		event(
			`{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,` +
				`"delta":{"content":" word"},"finish_reason":null}],"usage":null}`,
		),
	)
	r := NewUsageReader(stream)
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		r.Write(chunk)
	}
}

func BenchmarkUsageReaderBody(b *testing.B) {
	body := []byte(
		`{"id":"x","choices":[{"message":{"content":"` + strings.Repeat(
			`Some words and a \"quote\".\n`,
			2000,
		) + `"}}],"usage":` + usageJSON + `}`,
	)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		r := NewUsageReader("application/json")
		r.Write(body)
		if _, ok := r.Usage(); !ok {
			b.Fatal("no usage")
		}
	}
}

// TestHostileResponses: for every response of an endpoint, reading takes a bounded amount of memory.
func TestHostileResponses(t *testing.T) {
	line := `data: {"usage":{},"x":[` + strings.Repeat(`{},`, maxCarry/3-20) + `0]}` + "\n"
	for name, c := range map[string]struct{ contentType, piece string }{
		"a line without an end":   {"text/event-stream", strings.Repeat("x", 64<<10)},
		"events of many values":   {"text/event-stream", line},
		"a deep object":           {"application/json", strings.Repeat(`{"usage":`, 1000)},
		"a usage without an end":  {"application/json", `{"usage":{"x":"` + strings.Repeat("x", 64<<10)},
		"a key without an end":    {"application/json", `{"` + strings.Repeat("x", 64<<10)},
		"a usage of many objects": {"application/json", `{"usage":{"x":[` + strings.Repeat(`{},`, 20000) + `0]}}`},
	} {
		piece := []byte(c.piece)
		const most = 3 << 20
		peak := math.MaxInt
		for try := 0; try < 5 && peak > most; try++ { // on a busy machine, garbage waits for its collection
			r := NewUsageReader(c.contentType)
			peak = bodytest.Peak(func() {
				for range 200 {
					r.Write(piece)
					r.Usage()
				}
			})
		}
		if peak > most {
			t.Errorf("%s: took %d bytes, want at most %d", name, peak, most)
		}
	}
	renamed := NewRenamer("m", strings.Repeat("long", 1<<18)).Next([]byte(strings.Repeat(`{"model":"m"}`, 1000)), true)
	if len(renamed) != 13_000 {
		t.Errorf("a response of 13,000 bytes grew to %d", len(renamed))
	}
}
