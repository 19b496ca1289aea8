package bpe

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// jsonReader reads the large parts of tokenizer.json as a stream: hundreds of thousands of short strings. It takes a
// fifth of the time and memory of encoding/json. It returns small parts as text, which encoding/json reads.
type jsonReader struct {
	data []byte
	at   int
	buf  []byte // holds the last text if that has escapes
	// inBuffer says that the last text is in buf and not in data.
	inBuffer bool
}

// maxJSONDepth bounds nesting.
const maxJSONDepth = 200

// fail returns the error for the byte at r.at. want is what should be there.
func (r *jsonReader) fail(want string) error {
	if r.at >= len(r.data) {
		return errors.New("unexpected end of JSON input")
	}
	return fmt.Errorf("byte %d: %q instead of %s", r.at, r.data[r.at], want)
}

// peek returns the next byte that is not white space; 0 at the end.
func (r *jsonReader) peek() byte {
	for r.at < len(r.data) {
		switch b := r.data[r.at]; b {
		case ' ', '\t', '\n', '\r':
			r.at++
		default:
			return b
		}
	}
	return 0
}

// expect reads b, after white space.
func (r *jsonReader) expect(b byte) error {
	if r.peek() != b || r.at >= len(r.data) {
		return r.fail(strconv.Quote(string(b)))
	}
	r.at++
	return nil
}

// object reads an object. It calls each with every key, and each reads the value. A key is valid until the next text is
// read.
func (r *jsonReader) object(each func(key []byte) error) error {
	if err := r.expect('{'); err != nil {
		return err
	}
	if r.peek() == '}' {
		r.at++
		return nil
	}
	for {
		key, err := r.text()
		if err != nil {
			return err
		}
		if err := r.expect(':'); err != nil {
			return err
		}
		if err := each(key); err != nil {
			return err
		}
		if r.peek() == ',' {
			r.at++
			continue
		}
		return r.expect('}')
	}
}

// array reads a list. It calls each for every value, and each reads the value.
func (r *jsonReader) array(each func() error) error {
	if err := r.expect('['); err != nil {
		return err
	}
	if r.peek() == ']' {
		r.at++
		return nil
	}
	for {
		if err := each(); err != nil {
			return err
		}
		if r.peek() == ',' {
			r.at++
			continue
		}
		return r.expect(']')
	}
}

// text reads a string. The result is valid until the next call.
func (r *jsonReader) text() ([]byte, error) {
	if err := r.expect('"'); err != nil {
		return nil, err
	}
	start, ascii := r.at, true
	r.inBuffer = false // until there is an escape
	for ; r.at < len(r.data); r.at++ {
		switch b := r.data[r.at]; {
		case b == '"':
			text := r.data[start:r.at]
			r.at++
			if !r.inBuffer {
				if !ascii && !utf8.Valid(text) {
					return nil, errors.New("invalid UTF-8 in a string")
				}
				return text, nil
			}
			read, err := values.ParseJSON(r.data[start-1 : r.at])
			if err != nil {
				return nil, fmt.Errorf("the string that begins at byte %d: %w", start-1, err)
			}
			r.buf = append(r.buf[:0], read.(string)...)
			return r.buf, nil
		case b == '\\':
			r.inBuffer = true
			r.at++
		case b < ' ':
			return nil, r.fail("a character of a string")
		case b >= utf8.RuneSelf:
			ascii = false
		}
	}
	return nil, r.fail("\"")
}

// keep returns the text that was read last, as a string that is valid as long as data.
func (r *jsonReader) keep(text []byte) string {
	if r.inBuffer {
		return string(text)
	}
	return alias(text)
}

// integer reads a whole number.
func (r *jsonReader) integer() (int64, error) {
	r.peek()
	start := r.at
	if r.at < len(r.data) && r.data[r.at] == '-' {
		r.at++
	}
	for r.at < len(r.data) && r.data[r.at] >= '0' && r.data[r.at] <= '9' {
		r.at++
	}
	n, err := strconv.ParseInt(string(r.data[start:r.at]), 10, 64)
	if err != nil {
		r.at = start
		return 0, r.fail("a whole number")
	}
	return n, nil
}

// raw skips a value and returns its text. It checks only that brackets are balanced.
func (r *jsonReader) raw() ([]byte, error) {
	r.peek()
	start, depth := r.at, 0
	for {
		switch b := r.peek(); b {
		case '"':
			for r.at++; r.at < len(r.data) && r.data[r.at] != '"'; r.at++ {
				if r.data[r.at] == '\\' {
					r.at++
				}
			}
			r.at++
		case '{', '[':
			r.at++
			if depth++; depth > maxJSONDepth {
				return nil, errors.New("JSON nested too deeply")
			}
			continue
		case '}', ']':
			if depth == 0 {
				return nil, r.fail("a value")
			}
			r.at++
			depth--
		case ',', ':':
			if depth == 0 {
				return nil, r.fail("a value")
			}
			r.at++
			continue
		default:
			for r.at < len(r.data) && !bytes.ContainsRune([]byte(" \t\n\r,:[]{}\""), rune(r.data[r.at])) {
				r.at++
			}
		}
		if r.at > len(r.data) || r.at == start {
			r.at = len(r.data)
			return nil, r.fail("a value")
		}
		if depth == 0 {
			return r.data[start:r.at], nil
		}
		if r.at == len(r.data) {
			return nil, r.fail("a bracket")
		}
	}
}
