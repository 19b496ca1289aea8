package values

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrUnsupported is wrapped by the error of a result that kvepp cannot reproduce.
var ErrUnsupported = errors.New("not reproduced")

func unsupported(format string, args ...any) error {
	return fmt.Errorf("values: %w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

// appendJSONString appends a string as JSON.
func appendJSONString(b []byte, s string) []byte {
	if CleanJSON(s, false) {
		return append(append(append(b, '"'), s...), '"')
	}
	b = append(b, '"')
	b = AppendJSON(b, s, false)
	return append(b, '"')
}

// AppendJSON appends s as JSON without the quotes.
func AppendJSON(b []byte, s string, ascii bool) []byte {
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == '\b':
			b = append(b, `\b`...)
		case r == '\f':
			b = append(b, `\f`...)
		case r < 0x20 || ascii && r >= 0x7F && r < 0x10000:
			b = AppendHex(append(b, `\u`...), r, 4)
		case ascii && r >= 0x10000:
			r -= 0x10000
			b = AppendHex(append(b, `\u`...), 0xD800+r>>10, 4)
			b = AppendHex(append(b, `\u`...), 0xDC00+r&0x3FF, 4)
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return b
}

// CleanJSON reports whether a string needs no escapes in JSON.
func CleanJSON(s string, ascii bool) bool {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c == '"' || c == '\\' || ascii && c >= 0x7F {
			return false
		}
	}
	return true
}

// AppendHex appends the given number of lowest hexadecimal digits of n.
func AppendHex(to []byte, n rune, digits int) []byte {
	for digits--; digits >= 0; digits-- {
		to = append(to, "0123456789abcdef"[n>>(4*digits)&0xF])
	}
	return to
}
