package body

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"kvepp/prompt/values"
)

// Changes are the changes that Forward makes to a body. The zero value changes nothing.
type Changes struct {
	// RemovePins removes the keys of nvext with which a client selects workers.
	RemovePins bool
	// RemoveLegacy removes the keys of nvext that only kvepp uses. A frontend of Dynamo 1.6.1 refuses requests with
	// unknown keys, among them these keys of an earlier version.
	RemoveLegacy bool
	// Model replaces the model's name. Empty: unchanged.
	Model string
	// CacheSalt replaces or adds the body's cache_salt. Empty: unchanged.
	CacheSalt string
	// TokenData is added as nvext.token_data unless the body has one. nil: unchanged.
	TokenData []uint32
	// Decode is added as nvext.decode_worker_id and nvext.dp_rank, in place of the client's pins. nil: unchanged.
	Decode *Pin
}

var (
	pinKeys = []string{
		"backend_instance_id",
		"decode_worker_id",
		"prefill_worker_id",
		"dp_rank",
		"prefill_dp_rank",
	}
	legacyKeys    = []string{"session_control", "router_config_override"}
	legacyHints   = []string{"kv_overlap_score_weight"} // of nvext.agent_hints
	longestNumber = len("4294967295,")
)

// Forward returns a copy of the body with the changes, or nil if there is nothing to change. body is the one that the
// Request was parsed from. All other bytes stay as they are. If a key occurs twice, both occurrences are changed.
func (r *Request) Forward(body []byte, c Changes) []byte {
	nvext, isObject := field[*values.Dict](r.Body, "nvext")
	var keys, hintKeys []string // to remove
	if isObject {
		hints, _ := field[*values.Dict](nvext, "agent_hints")
		for _, set := range []struct {
			enabled bool
			in      *values.Dict
			keys    []string
			remove  *[]string
		}{{c.RemovePins || c.Decode != nil, nvext, pinKeys, &keys}, {c.RemoveLegacy, nvext, legacyKeys, &keys},
			{c.RemoveLegacy, hints, legacyHints, &hintKeys}} {
			if set.enabled && set.in != nil &&
				slices.ContainsFunc(set.keys, func(key string) bool { return has(set.in, key) }) {
				*set.remove = append(*set.remove, set.keys...)
			}
		}
	}
	other, _ := r.Body.Get("nvext")
	var members []byte // to add to nvext
	if isObject || other == nil {
		members = c.members(isObject && has(nvext, "token_data"))
	}
	inject := members != nil
	if len(keys) == 0 && len(hintKeys) == 0 && c.CacheSalt == "" && c.Model == "" && !inject {
		return nil
	}

	var s splice
	var model, salt []byte
	if c.Model != "" {
		model = plainJSON(c.Model)
	}
	if c.CacheSalt != "" {
		salt = quoted(c.CacheSalt)
	}
	top := start(body)
	newNvext, newSalt := inject, c.CacheSalt != ""
	s.object(body, top, func(key string, from, to int) bool {
		switch {
		case key == "model" && c.Model != "":
			s.replace(from, to, model)
		case key == "cache_salt" && c.CacheSalt != "":
			s.replace(from, to, salt)
			newSalt = false
		case key == "nvext" && inject && body[from] == 'n': // null
			s.replace(from, to, slices.Concat([]byte("{"), members, []byte("}")))
			newNvext = false
		case key == "nvext" && body[from] == '{':
			kept := 0
			at := s.mark()
			s.object(body, from, func(key string, from, to int) bool {
				if slices.Contains(keys, key) {
					return false
				}
				kept++
				if key == "agent_hints" && body[from] == '{' {
					s.object(body, from, func(key string, _, _ int) bool { return !slices.Contains(hintKeys, key) })
				}
				return true
			})
			if inject {
				if kept > 0 {
					members = append(members, ',')
				}
				s.insert(at, from+1, members)
				newNvext = false
			}
		}
		return true
	})
	var first []byte
	if newNvext {
		first = slices.Concat([]byte(`"nvext":{`), members, []byte("},"))
	}
	if newSalt {
		first = append(append(append(first, `"cache_salt":`...), salt...), ',')
	}
	if first != nil {
		s.insert(0, top+1, first) // the comma is right: the object has a model or a prompt
	}
	return s.apply(body)
}

// TakesTokenData reports whether a Dynamo frontend accepts the prompt's token ids in nvext.token_data without answering
// differently: the request has one text prompt, and does not ask for the frontend's own tokens.
func (r *Request) TakesTokenData() bool {
	switch {
	case r.HasMedia || r.TokenData != nil:
		return false
	case r.API == Completions:
		if _, ok := field[string](r.Body, "prompt"); !ok {
			return false
		}
	case r.API != ChatCompletions:
		return false
	}
	nvext, isObject := field[*values.Dict](r.Body, "nvext")
	if !isObject {
		other, _ := r.Body.Get("nvext")
		return other == nil
	}
	return !has(nvext, "token_data") && !has(nvext, "annotations")
}

// WithoutFields returns a body without some fields of the outermost object. The body must have been parsed before. All
// other bytes stay as they are.
func WithoutFields(body []byte, fields []string) []byte {
	var s splice
	s.object(body, start(body), func(key string, _, _ int) bool { return !slices.Contains(fields, key) })
	return s.apply(body)
}

func has(d *values.Dict, key string) bool {
	_, ok := d.Get(key)
	return ok
}

// quoted returns a text as JSON.
func quoted(text string) []byte {
	q, _ := json.Marshal(text) // cannot fail for a string
	return q
}

// members returns the members to add to nvext; nil: none. given says that it has token_data.
func (c *Changes) members(given bool) (b []byte) {
	if c.Decode != nil {
		b = fmt.Appendf(nil, `"decode_worker_id":%d,"dp_rank":%d`, c.Decode.InstanceID, c.Decode.Rank)
	}
	if c.TokenData == nil || given {
		return b
	}
	if b != nil {
		b = append(b, ',')
	}
	b = append(slices.Grow(b, len(`"token_data":[],`)+len(c.TokenData)*longestNumber), `"token_data":[`...)
	for i, id := range c.TokenData {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(id), 10)
	}
	return append(b, ']')
}

// splice is a list of replacements in a text, in order of position.
type splice struct{ cuts []cut }

// cut replaces text[from:to].
type cut struct {
	from, to int
	text     []byte
}

func (s *splice) mark() int { return len(s.cuts) }

func (s *splice) replace(from, to int, text []byte) {
	if last := len(s.cuts) - 1; text == nil && last >= 0 && s.cuts[last].text == nil && s.cuts[last].to == from {
		s.cuts[last].to = to // adjacent removed members become one cut
		return
	}
	s.cuts = append(s.cuts, cut{from, to, text})
}

// insert inserts a text at position at, after the first mark cuts and before the later ones.
func (s *splice) insert(mark, at int, text []byte) {
	s.cuts = slices.Insert(s.cuts, mark, cut{at, at, text})
}

// apply returns the text with the replacements.
func (s *splice) apply(text []byte) []byte {
	size := len(text)
	for _, c := range s.cuts {
		size += len(c.text) - (c.to - c.from)
	}
	out, at := make([]byte, 0, size), 0
	for _, c := range s.cuts {
		out, at = append(append(out, text[at:c.from]...), c.text...), c.to
	}
	return append(out, text[at:]...)
}

// object calls keep for each member of the object at i, in order, with the bounds of its value. It removes the members
// for which keep returns false, and returns the position behind the object. text is valid JSON from i on.
func (s *splice) object(text []byte, i int, keep func(key string, from, to int) bool) int {
	open := i + 1
	end := open        // end of the last kept member, or of the brace
	marked := s.mark() // number of cuts up to end
	taken := -1        // start of the member being removed, or -1
	for i = space(text, open); i < len(text) && text[i] == '"'; {
		begins := i
		if taken >= 0 { // not the last member: remove the comma behind it too
			s.replace(taken, begins, nil)
			taken = -1
		}
		i = value(text, i)
		key := keyOf(text[begins:i])
		i = space(text, space(text, i)+1) // past the colon
		from := i
		i = value(text, i)
		if keep(key, from, i) {
			end, marked = i, s.mark()
		} else {
			taken = begins
		}
		last := i
		if i = space(text, i); i < len(text) && text[i] == ',' {
			i = space(text, i+1)
		} else if taken >= 0 { // the last member: remove everything behind the last kept one
			s.cuts = s.cuts[:marked]
			s.replace(end, last, nil)
		}
	}
	return i + 1
}

// keyOf decodes a string of a valid JSON text.
func keyOf(text []byte) string {
	if bytes.IndexByte(text, '\\') < 0 {
		return string(text[1 : len(text)-1])
	}
	var key string
	_ = json.Unmarshal(text, &key) // cannot fail: the text is valid
	return key
}

// start returns where the value of a text begins: behind a byte order mark and white space.
func start(text []byte) int {
	return space(text, len(text)-len(bytes.TrimPrefix(text, []byte("\ufeff"))))
}

// space returns the end of the white space that begins at i.
func space(text []byte, i int) int {
	for i < len(text) && (text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r') {
		i++
	}
	return i
}

// value returns the end of the value that begins at i.
func value(text []byte, i int) int {
	depth := 0
	for ; i < len(text); i++ {
		switch text[i] {
		case '"':
			i = stringEnd(text, i)
			if depth == 0 {
				return min(i+1, len(text))
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
			if depth < 0 {
				return i // the end of a number or a word
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return i
			}
		}
	}
	return i
}

// stringEnd returns the position of the closing quote of the string that begins at i. Most bytes of a body are strings.
func stringEnd(text []byte, i int) int {
	for from := i + 1; ; {
		n := bytes.IndexByte(text[from:], '"')
		if n < 0 {
			return len(text)
		}
		quote := from + n
		back := quote
		for back > from && text[back-1] == '\\' {
			back--
		}
		if (quote-back)%2 == 0 {
			return quote
		}
		from = quote + 1
	}
}
