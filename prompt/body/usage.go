package body

import (
	"bytes"
	"math"
	"mime"
	"strings"

	"kvepp/prompt/values"
)

// Usage is the token counts that a response reports.
type Usage struct {
	PromptTokens     int
	CompletionTokens int
	// CachedTokens is how many of PromptTokens the engine found in its cache; valid only with HasCached.
	CachedTokens int
	HasCached    bool
}

// maxCarry bounds the bytes that a UsageReader keeps between writes: one line of a stream, or one usage object.
const maxCarry = 64 << 10

// maxResponseValues bounds the memory of the values of one event or usage object, in bytes. Engines need thousands.
const maxResponseValues = 256 << 10

// readResponse parses JSON from an endpoint, which is not trusted.
func readResponse(data []byte) (any, error) {
	value, _, err := values.JSONReader{Allowance: maxResponseValues}.Parse(data)
	return value, err
}

// UsageReader reads a response body in pieces and extracts the usage that it reports. It keeps at most 64 KiB: the
// unfinished line of a stream, or the usage object of a JSON body. It skips longer ones and those with too many values.
// A malformed body is not an error; it reports no usage. Not safe for concurrent use.
type UsageReader struct {
	streaming  bool
	usage      Usage
	found      bool
	sawContent bool
	events     int // since the content began

	// reported are the latest values of messageCounts: an event of a stream repeats only those that changed.
	reported [len(messageCounts)]any

	carry    []byte // streaming: the unfinished line; else: the usage object so far
	skipping bool   // streaming: skipping a line longer than maxCarry

	scan bodyScan // state of the JSON scanner, when not streaming
}

// NewUsageReader returns a reader for a response of the given content type: server-sent events for text/event-stream,
// one JSON object for anything else.
func NewUsageReader(contentType string) *UsageReader {
	media, _, _ := mime.ParseMediaType(contentType)
	return &UsageReader{streaming: media == "text/event-stream"}
}

// Usage returns the latest usage, and whether there was any.
func (r *UsageReader) Usage() (Usage, bool) {
	if r.streaming && !r.skipping && len(r.carry) > 0 {
		r.line(r.carry) // a last line without its newline; reading it twice is harmless
	}
	return r.usage, r.found
}

// SawContent reports whether generated content has begun: the first non-empty delta of a stream (text, reasoning, tool
// call or finish reason), or the first byte of a JSON body.
func (r *UsageReader) SawContent() bool { return r.sawContent }

// Streaming reports whether the response is an event stream.
func (r *UsageReader) Streaming() bool { return r.streaming }

// Generated returns how many tokens a stream has delivered: as its latest usage reports, and counted as one for each
// event from the first content on. That is too low for engines that put several tokens into one event, and the last
// events often have none. 0 for other responses.
func (r *UsageReader) Generated() (reported, counted int) {
	if !r.streaming {
		return 0, 0
	}
	return r.usage.CompletionTokens, r.events
}

// Write takes the next bytes of the body, in any chunking. It does not keep p.
func (r *UsageReader) Write(p []byte) {
	if !r.streaming {
		r.sawContent = r.sawContent || len(p) > 0
		r.body(p)
		return
	}
	for len(p) > 0 {
		end := bytes.IndexByte(p, '\n')
		if end < 0 {
			if len(r.carry)+len(p) > maxCarry {
				r.skipping = true
				r.carry = nil
			}
			if !r.skipping {
				r.carry = append(r.carry, p...)
			}
			return
		}
		switch {
		case r.skipping:
			r.skipping = false
		case len(r.carry)+end > maxCarry:
		case len(r.carry) == 0:
			r.line(p[:end])
		default:
			r.line(append(r.carry, p[:end]...))
		}
		r.carry = r.carry[:0]
		p = p[end+1:]
	}
}

// line reads one line of an event stream. It parses only lines that can matter: those before the first content, and
// those with a usage object. (Inside a JSON string, the quotes of "usage" are escaped.)
func (r *UsageReader) line(line []byte) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return
	}
	usage := holdsUsage(data)
	if r.sawContent {
		r.events++
		if !usage {
			return
		}
	}
	value, err := readResponse(data)
	if err != nil {
		return // "[DONE]", for example
	}
	event, ok := value.(*values.Dict)
	if !ok {
		return
	}
	if usage {
		r.readUsage(event)
		// The last event of /v1/responses, the first of /v1/messages.
		for _, name := range [...]string{"response", "message"} {
			if inner, ok := field[*values.Dict](event, name); ok {
				r.readUsage(inner)
			}
		}
	}
	if !r.sawContent && hasContent(event) {
		r.sawContent = true
		r.events++
	}
}

// holdsUsage reports whether data has a key "usage" with an object as its value. Engines send "usage":null in every
// event.
func holdsUsage(data []byte) bool {
	for {
		_, rest, ok := bytes.Cut(data, []byte(`"usage"`))
		if !ok {
			return false
		}
		if after, ok := bytes.CutPrefix(bytes.TrimLeft(rest, " \t"), []byte(":")); ok {
			if bytes.HasPrefix(bytes.TrimLeft(after, " \t"), []byte("{")) {
				return true
			}
		}
		data = rest
	}
}

// messageCounts are the parts of a prompt's tokens in /v1/messages: those computed, those put into the cache and those
// found there. A stream has them in message_start. vLLM repeats them in message_delta, SGLang does not.
//
// Sources: vLLM 0.33.0, entrypoints/anthropic/serving, _build_anthropic_usage; SGLang 0.5.23, entrypoints/anthropic/
// serving, _anthropic_usage.
var messageCounts = [...]string{"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"}

// readUsage reads the usage object of a response or event.
func (r *UsageReader) readUsage(response *values.Dict) {
	usage, ok := field[*values.Dict](response, "usage")
	if !ok {
		return
	}
	for i, name := range messageCounts {
		if count, ok := field[int64](usage, name); ok {
			r.reported[i] = count
		} else if r.reported[i] != nil {
			usage.Set(name, r.reported[i])
		}
	}
	r.found = true
	r.usage = Usage{
		PromptTokens:     positiveInt(usage, "prompt_tokens"),
		CompletionTokens: positiveInt(usage, "completion_tokens") + positiveInt(usage, "output_tokens"),
	}
	for i, name := range messageCounts {
		_, ok := field[int64](usage, name)
		r.usage.PromptTokens += positiveInt(usage, name)
		r.usage.HasCached = r.usage.HasCached || ok && i > 0 // input_tokens is in /v1/responses too
	}
	r.usage.CachedTokens = positiveInt(usage, "cache_read_input_tokens")
	// input_tokens_details: /v1/responses
	for _, name := range [...]string{"prompt_tokens_details", "input_tokens_details"} {
		if details, ok := field[*values.Dict](usage, name); ok {
			if cached, ok := field[int64](details, "cached_tokens"); ok && cached >= 0 {
				r.usage.CachedTokens += int(min(cached, math.MaxInt32)) // keeps sums in range, like positiveInt
				r.usage.HasCached = true
			}
		}
	}
}

func hasContent(event *values.Dict) bool {
	kind, _ := field[string](event, "type") // in events of /v1/responses and /v1/messages
	if strings.HasSuffix(kind, ".delta") || kind == "content_block_delta" || kind == "message_delta" ||
		kind == "response.completed" {
		return true
	}
	ids, _ := field[*values.List](event, "output_ids") // of SGLang's /generate
	choices, _ := field[*values.List](event, "choices")
	if choices == nil {
		return ids.Len() > 0
	}
	for _, c := range choices.Items {
		choice, ok := c.(*values.Dict)
		if !ok {
			continue
		}
		if text, _ := field[string](choice, "text"); text != "" {
			return true
		}
		if finish, _ := choice.Get("finish_reason"); finish != nil {
			return true
		}
		if ids, _ := field[*values.List](choice, "token_ids"); ids.Len() > 0 { // of vLLM's /inference/v1/generate
			return true
		}
		delta, _ := field[*values.Dict](choice, "delta")
		for _, key := range [...]string{"content", "reasoning_content", "reasoning", "refusal"} {
			if text, _ := field[string](delta, key); text != "" {
				return true
			}
		}
		if calls, _ := field[*values.List](delta, "tool_calls"); calls.Len() > 0 {
			return true
		}
	}
	return false
}

// bodyScan tracks the structure of a JSON object just enough to find the value of its key "usage". It uses constant
// memory and does not look at the bytes inside strings.
type bodyScan struct {
	depth     int  // nesting of braces and brackets
	inString  bool // inside a string literal
	escaped   bool // in a string, after an odd number of backslashes
	wantKey   bool // at depth 1, before a key
	isKey     bool // the current string is a key at depth 1
	key       []byte
	isUsage   bool // the last key was "usage" and its value has not begun
	capturing bool // inside the usage object
}

const usageKey = "usage"

// body scans the next bytes of a JSON body.
func (r *UsageReader) body(p []byte) {
	s := &r.scan
	start := 0 // of the captured bytes in p
	for i := 0; i < len(p); {
		if s.inString {
			i = s.skipString(p, i)
			continue
		}
		c := p[i]
		i++
		switch c {
		case '"':
			s.inString, s.escaped = true, false
			s.isKey = s.depth == 1 && s.wantKey
			s.key = s.key[:0]
			s.wantKey = false
			s.isUsage = false
		case '{', '[':
			s.depth++
			if s.depth == 1 && c == '{' {
				s.wantKey = true
			}
			if s.depth == 2 && s.isUsage && c == '{' {
				s.capturing = true
				r.carry = r.carry[:0]
				start = i - 1
			}
			s.isUsage = false
		case '}', ']':
			s.depth--
			if s.capturing && s.depth == 1 {
				s.capturing = false
				r.capture(p[start:i])
				r.readCaptured()
			}
		case ',':
			s.wantKey = s.depth == 1
		}
	}
	if s.capturing {
		r.capture(p[start:])
	}
}

// skipString skips to the end of a string or of p, from position i inside the string.
func (s *bodyScan) skipString(p []byte, i int) int {
	n := bytes.IndexByte(p[i:], '"')
	part := p[i:]
	if n >= 0 {
		part = p[i : i+n]
	}
	if s.isKey && len(s.key) <= len(usageKey) {
		s.key = append(s.key, part[:min(len(part), len(usageKey)+1-len(s.key))]...)
	}
	slashes := len(part) - len(bytes.TrimRight(part, `\`))
	odd := slashes%2 == 1
	if slashes == len(part) {
		odd = odd != s.escaped
	}
	s.escaped = odd
	if n < 0 {
		return len(p)
	}
	if !s.escaped {
		s.inString = false
		if s.isKey {
			s.isUsage = string(s.key) == usageKey
			s.isKey = false
		}
	} else {
		s.escaped = false
		if s.isKey {
			s.key = append(s.key, '"') // so that it cannot equal "usage"
		}
	}
	return i + n + 1
}

// capture keeps bytes of the usage object, up to maxCarry.
func (r *UsageReader) capture(p []byte) {
	if room := maxCarry - len(r.carry); len(p) > room {
		p = p[:room] // no longer valid JSON: readCaptured will find no usage
	}
	r.carry = append(r.carry, p...)
}

// readCaptured reads the complete usage object.
func (r *UsageReader) readCaptured() {
	value, err := readResponse(r.carry)
	if err == nil {
		response := values.NewDict()
		response.Set(usageKey, value)
		r.readUsage(response)
	}
	r.carry = nil
}
