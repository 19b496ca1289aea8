package apibody

import (
	"bytes"
	"math"
	"mime"
	"strings"

	"kvepp/chattemplate"
)

// Usage is what a response says about its tokens.
type Usage struct {
	PromptTokens     int
	CompletionTokens int
	// CachedTokens is how many of PromptTokens the engine found in its cache; only meaningful when HasCached.
	CachedTokens int
	HasCached    bool
}

// maxCarry bounds the bytes that a UsageReader keeps between writes: one line of a stream, or one usage object.
const maxCarry = 64 << 10

// maxAnswerValues bounds the memory of the values of an event, or of a usage object, in bytes. Those of engines take a
// few thousand.
const maxAnswerValues = 256 << 10

// readAnswer reads JSON of an endpoint, which may be anybody's.
func readAnswer(data []byte) (any, error) {
	value, _, err := chattemplate.JSONReader{Allowance: maxAnswerValues}.Parse(data)
	return value, err
}

// UsageReader watches a response body go by and picks up the usage it reports. It keeps at most 64 KiB of it: of a
// stream the unfinished line, of a JSON body the usage object. What is longer, or has too many values, is passed over.
// Broken bodies are no error; they report no usage. Not safe for concurrent use.
type UsageReader struct {
	streaming  bool
	usage      Usage
	found      bool
	sawContent bool
	events     int // since the content began

	carry    []byte // streaming: the unfinished line; else: the usage object so far
	skipping bool   // streaming: passing over a line longer than maxCarry

	scan bodyScan // state of the JSON scanner, when not streaming
}

// NewUsageReader returns a reader for a response of the given content type: server-sent events for text/event-stream,
// one JSON object for anything else.
func NewUsageReader(contentType string) *UsageReader {
	media, _, _ := mime.ParseMediaType(contentType)
	return &UsageReader{streaming: media == "text/event-stream"}
}

// Usage returns the latest usage seen so far and whether there was any.
func (r *UsageReader) Usage() (Usage, bool) {
	if r.streaming && !r.skipping && len(r.carry) > 0 {
		r.line(r.carry) // a last line without its newline; reading it twice does no harm
	}
	return r.usage, r.found
}

// SawContent reports whether generated content has begun: the first non-empty delta of a stream (text, reasoning, a
// tool call or a finish reason), or the first byte of a JSON body.
func (r *UsageReader) SawContent() bool { return r.sawContent }

// Streaming reports whether the response is an event stream.
func (r *UsageReader) Streaming() bool { return r.streaming }

// Generated returns how many tokens a stream has brought: what its latest usage says, or else one for each event since
// the first with content, which is too few from engines that put several into one. 0 for other responses.
func (r *UsageReader) Generated() int {
	if !r.streaming {
		return 0
	}
	return max(r.events, r.usage.CompletionTokens)
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

// line reads one line of an event stream. Only lines that can matter are parsed: those before the first content, and
// those that hold a usage object. (Inside a JSON string the quotes of "usage" would be escaped.)
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
	value, err := readAnswer(data)
	if err != nil {
		return // also "[DONE]"
	}
	event, ok := value.(*chattemplate.Dict)
	if !ok {
		return
	}
	if usage {
		r.take(event)
		if response, ok := field[*chattemplate.Dict](event, "response"); ok { // the last event of /v1/responses
			r.take(response)
		}
	}
	if !r.sawContent && hasContent(event) {
		r.sawContent = true
		r.events++
	}
}

// holdsUsage reports whether data has a key "usage" whose value is an object: engines send "usage":null in every event.
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

// take reads the usage object of a response or event.
func (r *UsageReader) take(response *chattemplate.Dict) {
	usage, ok := field[*chattemplate.Dict](response, "usage")
	if !ok {
		return
	}
	r.found = true
	r.usage = Usage{
		PromptTokens:     positiveInt(usage, "prompt_tokens") + positiveInt(usage, "input_tokens"),
		CompletionTokens: positiveInt(usage, "completion_tokens") + positiveInt(usage, "output_tokens"),
	}
	for _, name := range [...]string{"prompt_tokens_details", "input_tokens_details"} { // the latter of /v1/responses
		if details, ok := field[*chattemplate.Dict](usage, name); ok {
			if cached, ok := field[int64](details, "cached_tokens"); ok && cached >= 0 {
				r.usage.CachedTokens = int(min(cached, math.MaxInt32)) // as positiveInt: sums stay in range
				r.usage.HasCached = true
			}
		}
	}
	for _, name := range [...]string{"cache_creation_input_tokens", "cache_read_input_tokens"} { // of /v1/messages
		_, ok := field[int64](usage, name)
		r.usage.HasCached = r.usage.HasCached || ok
		if name == "cache_read_input_tokens" { // which input_tokens leaves out
			r.usage.CachedTokens += positiveInt(usage, name)
			r.usage.PromptTokens += positiveInt(usage, name)
		}
	}
}

func hasContent(event *chattemplate.Dict) bool {
	kind, _ := field[string](event, "type") // of events of /v1/responses and /v1/messages
	if strings.HasSuffix(kind, ".delta") || kind == "content_block_delta" || kind == "message_delta" ||
		kind == "response.completed" {
		return true
	}
	choices, _ := field[*chattemplate.List](event, "choices")
	if choices == nil {
		return false
	}
	for _, c := range choices.Items {
		choice, ok := c.(*chattemplate.Dict)
		if !ok {
			continue
		}
		if text, _ := field[string](choice, "text"); text != "" {
			return true
		}
		if finish, _ := choice.Get("finish_reason"); finish != nil {
			return true
		}
		delta, _ := field[*chattemplate.Dict](choice, "delta")
		for _, key := range [...]string{"content", "reasoning_content", "reasoning", "refusal"} {
			if text, _ := field[string](delta, key); text != "" {
				return true
			}
		}
		if calls, _ := field[*chattemplate.List](delta, "tool_calls"); calls.Len() > 0 {
			return true
		}
	}
	return false
}

// bodyScan follows the structure of a JSON object just closely enough to find the value of its key "usage", in constant
// memory and without looking at the bytes inside strings.
type bodyScan struct {
	depth     int  // of braces and brackets
	inString  bool // inside a string literal
	escaped   bool // in a string, after an odd number of backslashes
	wantKey   bool // at depth 1, where a key comes next
	isKey     bool // the current string is such a key
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
				r.captured()
			}
		case ',':
			s.wantKey = s.depth == 1
		}
	}
	if s.capturing {
		r.capture(p[start:])
	}
}

// skipString moves to the end of a string, or of p, from position i inside it.
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
			s.key = append(s.key, '"') // it cannot be "usage" any more
		}
	}
	return i + n + 1
}

// capture keeps bytes of the usage object, up to the bound.
func (r *UsageReader) capture(p []byte) {
	if room := maxCarry - len(r.carry); len(p) > room {
		p = p[:room] // no longer JSON: captured will find no usage
	}
	r.carry = append(r.carry, p...)
}

// captured reads the finished usage object.
func (r *UsageReader) captured() {
	value, err := readAnswer(r.carry)
	if err == nil {
		response := chattemplate.NewDict()
		response.Set(usageKey, value)
		r.take(response)
	}
	r.carry = nil
}
