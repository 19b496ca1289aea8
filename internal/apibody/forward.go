package apibody

import (
	"bytes"
	"encoding/json"

	"kvepp/chattemplate"
)

// forKvepp are the keys of nvext that mean something to kvepp alone: a frontend of Dynamo 1.6.1 refuses requests with keys that
// it does not know.
var forKvepp = map[string]bool{"session_control": true, "router_config_override": true}

// forKveppHint is such a key of nvext.agent_hints.
const forKveppHint = "kv_overlap_score_weight"

// Forward returns the body without what is for kvepp alone, as a Dynamo frontend takes it; nil if the body can go as it is.
// body is what the Request was parsed from. Everything else stays, byte by byte.
func (r *Request) Forward(body []byte) []byte {
	nvext, ok := field[*chattemplate.Dict](r.Body, "nvext")
	if !ok {
		return nil
	}
	hints, _ := field[*chattemplate.Dict](nvext, "agent_hints")
	found := hints != nil && has(hints, forKveppHint)
	for key := range forKvepp {
		found = found || has(nvext, key)
	}
	if !found {
		return nil
	}
	body = bytes.TrimSpace(body)
	return edited(make([]byte, 0, len(body)), body, func(key string, value []byte) ([]byte, bool) {
		if key != "nvext" || value[0] != '{' {
			return value, true
		}
		return edited(nil, value, func(key string, value []byte) ([]byte, bool) {
			if key != "agent_hints" || value[0] != '{' {
				return value, !forKvepp[key]
			}
			return edited(nil, value, func(key string, value []byte) ([]byte, bool) { return value, key != forKveppHint }), true
		}), true
	})
}

func has(d *chattemplate.Dict, key string) bool {
	_, ok := d.Get(key)
	return ok
}

// edited appends to dst the text of an object in which each member's value is what edit makes of it, or which is without the
// member. text is one object of a valid JSON text.
func edited(dst, text []byte, edit func(key string, value []byte) ([]byte, bool)) []byte {
	dst = append(dst, '{')
	first := true
	for i := space(text, 1); i < len(text) && text[i] == '"'; {
		from := i
		i = value(text, i)
		var key string
		_ = json.Unmarshal(text[from:i], &key) // a string of a valid text
		i = space(text, space(text, i)+1)      // the colon
		at := i
		i = value(text, i)
		if changed, keep := edit(key, text[at:i]); keep {
			if !first {
				dst = append(dst, ',')
			}
			dst, first = append(append(dst, text[from:at]...), changed...), false
		}
		if i = space(text, i); i < len(text) && text[i] == ',' {
			i = space(text, i+1)
		}
	}
	return append(dst, '}')
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
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
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
