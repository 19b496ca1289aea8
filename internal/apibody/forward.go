package apibody

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"

	"kvepp/chattemplate"
)

// Changes are what Forward makes of a body. The zero value: nothing.
type Changes struct {
	// RemovePins takes out the keys of nvext by which a client names workers.
	RemovePins bool
	// RemoveLegacy takes out the keys of nvext that mean something to kvepp alone: a frontend of Dynamo 1.6.1 refuses
	// requests with keys that it does not know, these included, which an earlier one had.
	RemoveLegacy bool
	// Model goes in place of the model's name. Empty: it stays.
	Model string
	// CacheSalt goes into the body's own cache_salt, in place of one that is there. Empty: as it is.
	CacheSalt string
	// TokenData goes into nvext.token_data, unless something is there. nil: as it is.
	TokenData []uint32
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

// Forward returns the body with the changes; nil if there are none to make, and it can go as it is. body is what the
// Request was parsed from. The changes are spliced in, and everything else stays, byte for byte. Of a key that is there
// twice both are changed.
func (r *Request) Forward(body []byte, c Changes) []byte {
	nvext, isObject := field[*chattemplate.Dict](r.Body, "nvext")
	var keys, hintKeys []string // to be taken out
	if isObject {
		hints, _ := field[*chattemplate.Dict](nvext, "agent_hints")
		for _, set := range []struct {
			wanted   bool
			in       *chattemplate.Dict
			all      []string
			takesOut *[]string
		}{{c.RemovePins, nvext, pinKeys, &keys}, {c.RemoveLegacy, nvext, legacyKeys, &keys},
			{c.RemoveLegacy, hints, legacyHints, &hintKeys}} {
			if set.wanted && set.in != nil &&
				slices.ContainsFunc(set.all, func(key string) bool { return has(set.in, key) }) {
				*set.takesOut = append(*set.takesOut, set.all...)
			}
		}
	}
	other, _ := r.Body.Get("nvext")
	inject := c.TokenData != nil && (isObject && !has(nvext, "token_data") || other == nil)
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
	top := space(body, 0)
	newNvext, newSalt := inject, c.CacheSalt != ""
	s.object(body, top, func(key string, from, to int) bool {
		switch {
		case key == "model" && c.Model != "":
			s.put(from, to, model)
		case key == "cache_salt" && c.CacheSalt != "":
			s.put(from, to, salt)
			newSalt = false
		case key == "nvext" && inject && body[from] == 'n': // null
			s.put(from, to, tokenData("{", c.TokenData, "}"))
			newNvext = false
		case key == "nvext" && body[from] == '{':
			left := 0
			at := s.mark()
			s.object(body, from, func(key string, from, to int) bool {
				if slices.Contains(keys, key) {
					return false
				}
				left++
				if key == "agent_hints" && body[from] == '{' {
					s.object(body, from, func(key string, _, _ int) bool { return !slices.Contains(hintKeys, key) })
				}
				return true
			})
			if inject {
				end := ","
				if left == 0 {
					end = ""
				}
				s.insert(at, from+1, tokenData("", c.TokenData, end))
				newNvext = false
			}
		}
		return true
	})
	var first []byte
	if newNvext {
		first = tokenData(`"nvext":{`, c.TokenData, "},")
	}
	if newSalt {
		first = append(append(append(first, `"cache_salt":`...), salt...), ',')
	}
	if first != nil {
		s.insert(0, top+1, first) // before another member: there is a model
	}
	return s.apply(body)
}

// TakesTokenData reports whether a Dynamo frontend would take the prompt's token ids from nvext.token_data, and answer
// no differently for it: one prompt of text, and nobody who wants to see what the frontend makes of it.
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
	nvext, isObject := field[*chattemplate.Dict](r.Body, "nvext")
	if !isObject {
		other, _ := r.Body.Get("nvext")
		return other == nil
	}
	return !has(nvext, "token_data") && !has(nvext, "annotations")
}

// WithoutFields returns a body that was parsed without some fields of the outermost object. Everything else stays, byte
// for byte.
func WithoutFields(body []byte, fields []string) []byte {
	var s splice
	s.object(body, space(body, 0), func(key string, _, _ int) bool { return !slices.Contains(fields, key) })
	return s.apply(body)
}

func has(d *chattemplate.Dict, key string) bool {
	_, ok := d.Get(key)
	return ok
}

// quoted returns a text as JSON.
func quoted(text string) []byte {
	q, _ := json.Marshal(text) // of a string: never fails
	return q
}

// tokenData returns the member nvext.token_data between two texts.
func tokenData(before string, ids []uint32, after string) []byte {
	b := make([]byte, 0, len(before)+len(`"token_data":[]`)+len(ids)*longestNumber+len(after))
	b = append(append(b, before...), `"token_data":[`...)
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(id), 10)
	}
	return append(append(b, ']'), after...)
}

// splice is a list of changes of a text, in its order.
type splice struct{ cuts []cut }

// cut puts something in the place of text[from:to].
type cut struct {
	from, to int
	put      []byte
}

func (s *splice) mark() int { return len(s.cuts) }

func (s *splice) put(from, to int, text []byte) {
	if last := len(s.cuts) - 1; text == nil && last >= 0 && s.cuts[last].put == nil && s.cuts[last].to == from {
		s.cuts[last].to = to // members that go, one behind the other
		return
	}
	s.cuts = append(s.cuts, cut{from, to, text})
}

// insert puts a text at a place behind the changes before mark, and before those since.
func (s *splice) insert(mark, at int, text []byte) {
	s.cuts = slices.Insert(s.cuts, mark, cut{at, at, text})
}

// apply returns the text with the changes.
func (s *splice) apply(text []byte) []byte {
	size := len(text)
	for _, c := range s.cuts {
		size += len(c.put) - (c.to - c.from)
	}
	out, at := make([]byte, 0, size), 0
	for _, c := range s.cuts {
		out, at = append(append(out, text[at:c.from]...), c.put...), c.to
	}
	return append(out, text[at:]...)
}

// object shows each member of the object that begins at i, in order, with where its value begins and ends, and takes
// out those that keep refuses. It returns where the object ends. text is valid JSON from i on.
func (s *splice) object(text []byte, i int, keep func(key string, from, to int) bool) int {
	open := i + 1
	end := open        // of the last member that stays, or of the brace
	marked := s.mark() // the changes up to there
	taken := -1        // where the member begins that is being taken out
	for i = space(text, open); i < len(text) && text[i] == '"'; {
		begins := i
		if taken >= 0 { // not the last: gone with the comma behind it
			s.put(taken, begins, nil)
			taken = -1
		}
		i = value(text, i)
		key := keyOf(text[begins:i])
		i = space(text, space(text, i)+1) // the colon
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
		} else if taken >= 0 { // the last: gone with the comma before it, and so are those between
			s.cuts = s.cuts[:marked]
			s.put(end, last, nil)
		}
	}
	return i + 1
}

// keyOf reads a string of a valid JSON text.
func keyOf(text []byte) string {
	if bytes.IndexByte(text, '\\') < 0 {
		return string(text[1 : len(text)-1])
	}
	var key string
	_ = json.Unmarshal(text, &key) // valid
	return key
}

// space returns where the white space that begins at i ends.
func space(text []byte, i int) int {
	for i < len(text) && (text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r') {
		i++
	}
	return i
}

// value returns where the value that begins at i ends.
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
				return i // of a number or a word before it
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return i
			}
		}
	}
	return i
}

// stringEnd returns where the closing quote of the string is that begins at i. Strings are most of a body.
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
