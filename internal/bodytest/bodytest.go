// Package bodytest generates request bodies of many shapes, hostile ones among them, and measures the memory of reading
// one. It is for tests.
package bodytest

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"time"
)

// Body is a request body for a test.
type Body struct {
	// Name describes its shape.
	Name string
	// Path is the path of its API.
	Path string
	JSON []byte
}

// The paths of the APIs.
const (
	Chat        = "/v1/chat/completions"
	Completions = "/v1/completions"
	Responses   = "/v1/responses"
	Messages    = "/v1/messages"
)

// places are the places of a value in the body of an API: the text before it and after it.
var places = []struct{ name, path, before, after string }{
	{"prompt", Completions, `{"model":"m","prompt":`, `}`},
	{"unread field", Completions, `{"model":"m","prompt":"x","logit_bias":`, `}`},
	{"token_data", Completions, `{"model":"m","prompt":"x","nvext":{"token_data":`, `}}`},
	{"unread field of nvext", Completions, `{"model":"m","prompt":"x","nvext":{"other":`, `}}`},
	{"agent_hints", Completions, `{"model":"m","prompt":"x","nvext":{"agent_hints":`, `}}`},
	{"content", Chat, `{"model":"m","messages":[{"role":"user","content":`, `}]}`},
	{"messages", Chat, `{"model":"m","messages":`, `}`},
	{"tools", Chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":`, `}`},
	{
		"parameters",
		Chat,
		`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",` +
			`"parameters":{"type":"object","properties":`,
		`}}}]}`,
	},
	{
		"chat_template_kwargs",
		Chat,
		`{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"x":`,
		`}}`,
	},
	{"input_ids", Chat, `{"model":"m","messages":[{"role":"user","content":"x"}],"input_ids":`, `}`},
	{"input", Responses, `{"model":"m","input":`, `}`},
	{"input content", Responses, `{"model":"m","input":[{"type":"message","role":"user","content":`, `}]}`},
	{"instructions", Responses, `{"model":"m","input":"x","instructions":`, `}`},
	{"system", Messages, `{"model":"m","messages":[{"role":"user","content":"x"}],"system":`, `}`},
	{"blocks", Messages, `{"model":"m","messages":[{"role":"user","content":`, `}]}`},
	{
		"tool_use",
		Messages,
		`{"model":"m","messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"x":`,
		`}}]}]}`,
	},
}

// shapes generate values of about n bytes.
var shapes = []struct {
	name string
	of   func(n int) string
}{
	{"empty lists", func(n int) string { return list(`[]`, n) }},
	{"empty objects", func(n int) string { return list(`{}`, n) }},
	{"empty strings", func(n int) string { return list(`""`, n) }},
	{"zeros", func(n int) string { return list(`0`, n) }},
	{"lists of a zero", func(n int) string { return list(`[0]`, n) }},
	{"nulls", func(n int) string { return list(`null`, n) }},
	{"numbers", func(n int) string { return list(`999`, n) }},
	{"floats", func(n int) string { return list(`0.5`, n) }},
	{"integers of 20 digits", func(n int) string { return list(`99999999999999999999`, n) }},
	{"integers of 4,000 digits", func(n int) string { return list(strings.Repeat("9", 4000), n) }},
	{"strings of an escape", func(n int) string { return list(`"\n"`, n) }},
	{"strings of 1,000 escapes", func(n int) string { return list(`"`+strings.Repeat(`x\u0041`, 1000)+`"`, n) }},
	{
		"strings of 40,000 bytes and an escape",
		func(n int) string { return list(`"`+strings.Repeat(`x`, 40000)+`\n"`, n) },
	},
	{"lists of 499 levels", func(n int) string { return list(strings.Repeat("[", 490)+strings.Repeat("]", 490), n) }},
	{
		"objects of 499 levels",
		func(n int) string { return list(strings.Repeat(`{"":`, 490)+"0"+strings.Repeat("}", 490), n) },
	},
	{"levels of 500 items", func(n int) string {
		return list(strings.Repeat("["+strings.Repeat("0,", 500), 490)+"0"+strings.Repeat("]", 490), n)
	}},
	{"objects of a key", func(n int) string { return list(`{"a":0}`, n) }},
	{"objects of 17 keys", func(n int) string { return list(object(17, 0), n) }},
	{"an object of many keys", func(n int) string { return object(n/9, 0) }},
	{"a repeated key", func(n int) string { return "{" + strings.Repeat(`"a":[],`, n/7) + `"a":0}` }},
	{"messages of two bytes", func(n int) string { return list(`{"role":"user","content":"hi"}`, n) }},
	{"messages, content first", func(n int) string { return list(`{"content":"hi","role":"user"}`, n) }},
	{"tool calls", func(n int) string {
		return list(
			`{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f",`+
				`"arguments":"{}"}}]}`,
			n,
		)
	}},
	{"parts without text", func(n int) string { return list(`{"type":"text","text":""}`, n) }},
	{"parts of a letter", func(n int) string { return list(`{"type":"text","text":"x"}`, n) }},
	{
		"messages of users",
		func(n int) string { return list(`{"role":"user","content":[{"type":"text","text":"x"}]}`, n) },
	},
	{"arguments that are zeros", func(n int) string {
		return list(
			`{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f",`+
				`"arguments":"{\"x\":`+list(
				"0",
				n,
			)+`}"}}]}`,
			n,
		)
	}},
	{"input parts", func(n int) string { return list(`{"type":"input_text","text":"x"}`, n) }},
	{"input items", func(n int) string { return list(`{"type":"message","role":"user","content":"x"}`, n) }},
	{"calls among input items", func(n int) string {
		return list(`{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}`, n)
	}},
	{"reasoning among input items", func(n int) string {
		return list(`{"type":"reasoning","content":[{"text":"x"}]}`, n)
	}},
	{"blocks of thinking", func(n int) string { return list(`{"type":"thinking","thinking":"x"}`, n) }},
	{"blocks of tool results", func(n int) string {
		return list(`{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"x"}]}`, n)
	}},
	{"functions", func(n int) string { return list(`{"type":"function","function":{"name":"f"}}`, n) }},
	{"one word", func(n int) string { return `"` + strings.Repeat("a", n) + `"` }},
	{"one word of two letters", func(n int) string { return `"` + strings.Repeat("ab", n/2) + `"` }},
	{"one word of many letters", func(n int) string { return `"` + letters(n) + `"` }},
	{"punctuation", func(n int) string { return `"` + strings.Repeat("!a?b", n/4) + `"` }},
	{"spaces", func(n int) string { return `"` + strings.Repeat(" ", n) + `"` }},
	{"line breaks", func(n int) string { return `"` + strings.Repeat(`\n`, n/2) + `"` }},
	{"escaped letters", func(n int) string { return `"` + strings.Repeat(`\u0041`, n/6) + `"` }},
	{"special tokens", func(n int) string { return `"` + strings.Repeat(`<|im_start|>`, n/12) + `"` }},
	{"letters that normalize to many", func(n int) string { return `"` + strings.Repeat("\ufdfa", n/3) + `"` }},
	{"letters outside most vocabularies", func(n int) string { return `"` + strings.Repeat("\U000132a4", n/4) + `"` }},
}

func list(item string, n int) string {
	count := max(1, n/(len(item)+1))
	return "[" + strings.Repeat(item+",", count-1) + item + "]"
}

func object(keys, value int) string {
	var b strings.Builder
	b.WriteByte('{')
	for i := range keys {
		fmt.Fprintf(&b, `"%x":%d,`, i, value)
	}
	return strings.TrimSuffix(b.String(), ",") + "}"
}

func letters(n int) string {
	b := make([]byte, n)
	for i, x := 0, uint32(1); i < n; i++ {
		x = x*1664525 + 1013904223
		b[i] = 'a' + byte(x>>24)%26
	}
	return string(b)
}

// All returns bodies of about n bytes: each shape in each place.
func All(n int) []Body {
	var all []Body
	for _, shape := range shapes {
		value := shape.of(n)
		for _, place := range places {
			all = append(
				all,
				Body{place.name + ": " + shape.name, place.path, []byte(place.before + value + place.after)},
			)
		}
	}
	return all
}

// Random returns a body of about n bytes whose shape chance decides: nested and adjacent values, some of them repeated.
func Random(chance *rand.Rand, n int) Body {
	place := places[chance.IntN(len(places))]
	var b strings.Builder
	b.WriteString(place.before)
	value(&b, chance, n, 0)
	b.WriteString(place.after)
	return Body{"random in " + place.name, place.path, []byte(b.String())}
}

// keysOfBodies are keys that readers look for at some depth.
var keysOfBodies = []string{
	"role",
	"content",
	"type",
	"text",
	"name",
	"tool_calls",
	"function",
	"arguments",
	"parameters",
	"properties",
	"id",
	"input",
	"summary",
	"thinking",
	"tool_use_id",
	"output",
	"call_id",
	"x",
}

func value(b *strings.Builder, chance *rand.Rand, n, depth int) {
	end := b.Len() + n
	switch kind := chance.IntN(8); {
	case n < 40 || depth > 40 || kind == 0: // one of the shapes
		b.WriteString(shapes[chance.IntN(len(shapes))].of(max(n, 1)))
	case kind <= 2: // one value, repeated
		var item strings.Builder
		value(&item, chance, chance.IntN(min(n, 200)), depth+1)
		b.WriteByte('[')
		for b.Len() < end {
			b.WriteString(item.String())
			b.WriteByte(',')
		}
		b.WriteString("0]")
	case kind <= 4:
		b.WriteByte('[')
		for b.Len() < end {
			value(b, chance, chance.IntN(n), depth+1)
			b.WriteByte(',')
		}
		b.WriteString("0]")
	default:
		b.WriteByte('{')
		for i := 0; b.Len() < end; i++ {
			key := keysOfBodies[chance.IntN(len(keysOfBodies))]
			if chance.IntN(3) == 0 {
				key += fmt.Sprint(i)
			}
			fmt.Fprintf(b, "%q:", key)
			value(b, chance, chance.IntN(n), depth+1)
			b.WriteByte(',')
		}
		b.WriteString(`"":0}`)
	}
}

// Allocated returns the number of bytes that do allocated.
func Allocated(do func()) int {
	const name = "/gc/heap/allocs:bytes"
	before, after := []metrics.Sample{{Name: name}}, []metrics.Sample{{Name: name}}
	metrics.Read(before)
	do()
	metrics.Read(after)
	return int(after[0].Value.Uint64() - before[0].Value.Uint64())
}

// Peak returns the largest growth of the heap while do ran, in bytes. It includes garbage that was not collected yet.
func Peak(do func()) int {
	defer debug.SetGCPercent(debug.SetGCPercent(5))
	runtime.GC()
	const name = "/memory/classes/heap/objects:bytes"
	read := func() int {
		sample := []metrics.Sample{{Name: name}}
		metrics.Read(sample)
		return int(sample[0].Value.Uint64())
	}
	before, peak := read(), 0
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(50 * time.Microsecond)
		defer tick.Stop()
		for {
			peak = max(peak, read())
			select {
			case <-done:
				return
			case <-tick.C:
			}
		}
	})
	do()
	peakAtEnd := read()
	close(done)
	watching.Wait()
	return max(peak, peakAtEnd) - before
}
