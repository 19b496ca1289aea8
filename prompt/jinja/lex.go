package jinja

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/unicode/runenames"

	"kvepp/prompt/values"
)

// tokenKind is the kind of a token.
type tokenKind uint8

const (
	tokenEnd           tokenKind = iota // the end of the source
	tokenData                           // text outside tags
	tokenBlockBegin                     // {%
	tokenBlockEnd                       // %}
	tokenVariableBegin                  // {{
	tokenVariableEnd                    // }}
	tokenName
	tokenOperator
	tokenString
	tokenNumber
)

// token is one token of a template's source.
type token struct {
	kind  tokenKind
	text  string // of a name, operator, string (decoded) or data
	value any    // of a number: int64, *big.Int or float64
	line  int
}

func (t token) describe() string {
	switch t.kind {
	case tokenEnd:
		return "end of template"
	case tokenData:
		return "text"
	case tokenBlockBegin:
		return "{%"
	case tokenBlockEnd:
		return "%}"
	case tokenVariableBegin:
		return "{{"
	case tokenVariableEnd:
		return "}}"
	case tokenString:
		return "a string"
	case tokenNumber:
		return "a number"
	}
	return strconv.Quote(short(t.text))
}

// lexer splits a source into tokens with trim_blocks and lstrip_blocks enabled: it removes the newline after a block
// tag or comment, and the white space before a tag that starts a line. A minus sign at a tag's edge strips all white
// space on that side; a plus sign keeps it. Source: Jinja2 3.1.6, lexer.
type lexer struct {
	source    string
	dialect   Dialect
	pos       int
	tokens    []token
	lineStart bool // pos is 0 or follows a newline
	line      int  // line of the position counted
	counted   int  // newlines are counted up to this position
}

// maxTokens bounds the tokens of a source. The longest known templates have about ten thousand.
const maxTokens = 1 << 17

var errTokens = fmt.Errorf("source of more than %d tokens", maxTokens)

// lex returns the tokens of a source; the last one is tokenEnd.
func lex(source string, d Dialect) ([]token, *Error) {
	if !utf8.ValidString(source) {
		return nil, &Error{Line: 1, Err: errors.New("source is not valid UTF-8")}
	}
	source = strings.ReplaceAll(source, "\r\n", "\n")
	source = strings.ReplaceAll(source, "\r", "\n")
	source = strings.TrimSuffix(source, "\n")
	l := &lexer{source: source, dialect: d, lineStart: true, line: 1}
	for l.pos < len(source) {
		err := l.next()
		if err == nil && len(l.tokens) > maxTokens {
			err = errTokens
		}
		if err != nil {
			return nil, &Error{Line: l.lineAt(l.pos), Err: err}
		}
	}
	l.add(token{kind: tokenEnd}, l.pos)
	return l.tokens, nil
}

// lineAt returns the line of a position, which must not be before the position of an earlier call.
func (l *lexer) lineAt(pos int) int {
	pos = min(pos, len(l.source))
	if pos > l.counted {
		l.line += strings.Count(l.source[l.counted:pos], "\n")
		l.counted = pos
	}
	return l.line
}

func (l *lexer) add(t token, pos int) {
	t.line = l.lineAt(pos)
	l.tokens = append(l.tokens, t)
}

// next reads the text up to the next tag, and the tag.
func (l *lexer) next() error {
	start := l.pos
	at := findTag(l.source, start)
	if at < 0 {
		l.add(token{kind: tokenData, text: l.source[start:]}, start)
		l.pos = len(l.source)
		return nil
	}
	kind := l.source[at+1]
	inside := at + 2
	sign := byte(0)
	if inside < len(l.source) && (l.source[inside] == '-' || l.source[inside] == '+') {
		sign = l.source[inside]
		inside++
	}
	text := l.stripBefore(l.source[start:at], sign, kind)
	if text != "" {
		l.add(token{kind: tokenData, text: text}, start)
	}
	l.lineStart = false
	l.pos = inside
	switch kind {
	case '#':
		return l.comment()
	case '%':
		if end, ok := l.rawBegin(); ok {
			return l.raw(end)
		}
		l.add(token{kind: tokenBlockBegin}, at)
	default:
		l.add(token{kind: tokenVariableBegin}, at)
	}
	return l.tag(kind)
}

// findTag returns the position of the next {%, {{ or {#, or -1.
func findTag(s string, from int) int {
	for {
		i := strings.IndexByte(s[from:], '{')
		if i < 0 || from+i+1 >= len(s) {
			return -1
		}
		from += i
		switch s[from+1] {
		case '%', '{', '#':
			return from
		}
		from++
	}
}

// stripBefore strips the text before a tag according to the tag's sign and kind.
func (l *lexer) stripBefore(text string, sign, kind byte) string {
	switch {
	case sign == '-':
		return strings.TrimRightFunc(text, IsSpace)
	case sign == '+' || kind == '{':
		return text
	}
	line := strings.LastIndexByte(text, '\n') + 1
	if (line > 0 || l.lineStart) && strings.TrimFunc(text[line:], IsSpace) == "" {
		return text[:line]
	}
	return text
}

// after moves behind a tag's closing delimiter, which ends at end. The sign decides which white space is skipped.
func (l *lexer) after(end int, sign byte, trimNewline bool) {
	l.pos = end
	switch {
	case sign == '-':
		l.pos += len(l.source[end:]) - len(strings.TrimLeftFunc(l.source[end:], IsSpace))
	case sign != '+' && trimNewline && end < len(l.source) && l.source[end] == '\n':
		l.pos++
	}
	l.lineStart = l.source[l.pos-1] == '\n'
}

// signBefore returns the minus or plus sign directly before position i, but not before from; 0 if there is none.
func (l *lexer) signBefore(i, from int) byte {
	if i > from && (l.source[i-1] == '-' || l.source[i-1] == '+') {
		return l.source[i-1]
	}
	return 0
}

func (l *lexer) comment() error {
	n := strings.Index(l.source[l.pos:], "#}")
	if l.pos == len(l.source) {
		return nil // as in Jinja2, an unclosed empty comment or raw block is not an error
	}
	if n < 0 {
		return errors.New("comment is not closed")
	}
	end := l.pos + n
	l.after(end+2, l.signBefore(end, l.pos), true)
	return nil
}

// rawBegin reports whether the tag at pos is {% raw %}, and returns its end.
func (l *lexer) rawBegin() (int, bool) {
	rest := strings.TrimLeftFunc(l.source[l.pos:], IsSpace)
	rest, ok := strings.CutPrefix(rest, "raw")
	if !ok {
		return 0, false
	}
	rest = strings.TrimLeftFunc(rest, IsSpace)
	if after, ok := strings.CutPrefix(rest, "-%}"); ok {
		return len(l.source) - len(strings.TrimLeftFunc(after, IsSpace)), true
	}
	after, ok := strings.CutPrefix(rest, "%}")
	return len(l.source) - len(after), ok
}

// raw reads the text up to {% endraw %} unchanged.
func (l *lexer) raw(start int) error {
	l.lineStart = l.source[start-1] == '\n'
	if start == len(l.source) {
		l.pos = start
		return nil
	}
	for from := start; ; {
		n := strings.Index(l.source[from:], "{%")
		if n < 0 {
			return errors.New("raw without endraw")
		}
		at := from + n
		from = at + 2
		inside := from
		sign := byte(0)
		if inside < len(l.source) && (l.source[inside] == '-' || l.source[inside] == '+') {
			sign = l.source[inside]
			inside++
		}
		rest, ok := strings.CutPrefix(strings.TrimLeftFunc(l.source[inside:], IsSpace), "endraw")
		if !ok {
			continue
		}
		rest = strings.TrimLeftFunc(rest, IsSpace)
		close := byte(0)
		if rest != "" && (rest[0] == '-' || rest[0] == '+') {
			close = rest[0]
			rest = rest[1:]
		}
		if !strings.HasPrefix(rest, "%}") {
			continue
		}
		if text := l.stripBefore(l.source[start:at], sign, '%'); text != "" {
			l.add(token{kind: tokenData, text: text}, start)
		}
		l.after(len(l.source)-len(rest)+2, close, true)
		return nil
	}
}

// tag reads the tokens inside a tag and its end.
func (l *lexer) tag(kind byte) error {
	var open []byte // the closing brackets of the open ones
	for {
		rest := strings.TrimLeftFunc(l.source[l.pos:], IsSpace)
		l.pos = len(l.source) - len(rest)
		if rest == "" {
			return errors.New("tag is not closed")
		}
		if len(open) == 0 && l.tagEnd(rest, kind) {
			return nil
		}
		if len(l.tokens) > maxTokens {
			return errTokens
		}
		c := rest[0]
		var err error
		switch {
		case isDigit(c):
			err = l.number(rest)
		case c == '"' || c == '\'':
			err = l.string(rest)
		default:
			r, _ := utf8.DecodeRuneInString(rest)
			if isNameStart(r) {
				l.name(rest)
				continue
			}
			if open, err = l.operator(rest, open); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
}

// tagEnd reads the end of a tag if it is next, and reports whether it was.
func (l *lexer) tagEnd(rest string, kind byte) bool {
	sign := byte(0)
	delimiter := rest
	if rest[0] == '-' || rest[0] == '+' && kind == '%' {
		sign = rest[0]
		delimiter = rest[1:]
	}
	want, end := "}}", tokenVariableEnd
	if kind == '%' {
		want, end = "%}", tokenBlockEnd
	}
	if !strings.HasPrefix(delimiter, want) {
		return false
	}
	l.add(token{kind: end}, l.pos)
	l.after(len(l.source)-len(delimiter)+2, sign, kind == '%')
	return true
}

func isNameStart(r rune) bool { return r == '_' || unicode.IsLetter(r) }

func isNameRune(r rune) bool {
	return isNameStart(r) || unicode.IsDigit(r) || unicode.IsMark(r)
}

func (l *lexer) name(rest string) {
	end := strings.IndexFunc(rest, func(r rune) bool { return !isNameRune(r) })
	if end < 0 {
		end = len(rest)
	}
	l.add(token{kind: tokenName, text: rest[:end]}, l.pos)
	l.pos += end
}

// afterDot reports whether the last token is a dot. Then the digits of "x.0.1" are two items, not a float.
func (l *lexer) afterDot() bool {
	last := l.tokens[len(l.tokens)-1]
	return last.kind == tokenOperator && last.text == "."
}

// longOperators are the operators of two characters. All others have one.
var longOperators = []string{"//", "**", "==", "!=", ">=", "<="}

func (l *lexer) operator(rest string, open []byte) ([]byte, error) {
	text := rest[:1]
	for _, op := range longOperators {
		if strings.HasPrefix(rest, op) {
			text = op
		}
	}
	switch text {
	case "(", "[", "{":
		open = append(open, "])}"[strings.IndexByte("[({", text[0])])
	case ")", "]", "}":
		if len(open) == 0 || open[len(open)-1] != text[0] {
			return nil, fmt.Errorf("unexpected %q", text)
		}
		open = open[:len(open)-1]
	default:
		if len(text) == 1 && !strings.Contains("+-/*%~><=.:|,;", text) {
			r, _ := utf8.DecodeRuneInString(rest)
			return nil, fmt.Errorf("unexpected character %q", r)
		}
	}
	l.add(token{kind: tokenOperator, text: text}, l.pos)
	l.pos += len(text)
	return open, nil
}

// number reads an integer or a float in Python's forms, with underscores between digits.
func (l *lexer) number(rest string) error {
	end := 0
	digits := func(valid func(byte) bool) int {
		start := end
		for end < len(rest) && (valid(rest[end]) || rest[end] == '_' && end > start && end+1 < len(rest) &&
			valid(rest[end+1])) {
			end++
		}
		return end - start
	}
	base := 0
	if rest[0] == '0' && len(rest) > 1 {
		base = map[byte]int{'b': 2, 'o': 8, 'x': 16}[rest[1]|0x20]
	}
	if base != 0 {
		end = 2
		if end < len(rest) && rest[end] == '_' {
			end++
		}
		n := digits(func(c byte) bool {
			_, err := strconv.ParseUint(string(c), base, 8)
			return err == nil
		})
		if n == 0 {
			return errors.New("malformed number")
		}
		return l.addInteger(rest[2:end], base, end)
	}
	digits(isDigit)
	integer := true
	if end+1 < len(rest) && rest[end] == '.' && isDigit(rest[end+1]) && !l.afterDot() {
		integer = false
		end++
		digits(isDigit)
	}
	if end < len(rest) && rest[end]|0x20 == 'e' && !l.afterDot() {
		mark := end
		end++
		if end < len(rest) && (rest[end] == '+' || rest[end] == '-') {
			end++
		}
		if digits(isDigit) > 0 {
			integer = false
		} else {
			end = mark
		}
	}
	text := strings.ReplaceAll(rest[:end], "_", "")
	if !integer {
		f, err := strconv.ParseFloat(text, 64)
		if err != nil && !errors.Is(err, strconv.ErrRange) { // out of range is infinity, as in Python
			return fmt.Errorf("malformed number %s", short(text))
		}
		l.add(token{kind: tokenNumber, value: f}, l.pos)
		l.pos += end
		return nil
	}
	if strings.TrimLeft(text, "0") != text && strings.Trim(text, "0") != "" {
		return fmt.Errorf("number %s starts with 0", short(text))
	}
	return l.addInteger(text, 10, end)
}

func (l *lexer) addInteger(digits string, base, end int) error {
	digits = strings.ReplaceAll(digits, "_", "")
	if len(digits) > values.MaxIntDigits {
		return errors.New("number too long")
	}
	n, ok := new(big.Int).SetString(digits, base)
	if !ok {
		return errors.New("malformed number")
	}
	l.add(token{kind: tokenNumber, value: values.NormalInt(n)}, l.pos)
	l.pos += end
	return nil
}

func (l *lexer) string(rest string) error {
	var b strings.Builder
	for i := 1; i < len(rest); {
		switch c := rest[i]; c {
		case rest[0]:
			l.add(token{kind: tokenString, text: b.String()}, l.pos)
			l.pos += i + 1
			return nil
		case '\\':
			size, err := l.escape(&b, rest[i:])
			if err != nil {
				return err
			}
			i += size
		default:
			b.WriteByte(c)
			i++
		}
	}
	return errors.New("string is not closed")
}

// escape writes the value of the escape sequence at the start of s, and returns the sequence's length. Jinja2 spells
// out characters beyond ASCII as escapes before Python reads these. Source: Jinja2 3.1.6, lexer, wrap; minijinja
// 2.24.0, utils, Unescaper.
func (l *lexer) escape(b *strings.Builder, s string) (int, error) {
	if len(s) < 2 {
		return 0, errors.New("string is not closed")
	}
	names, values, mini := `abfnrtv\'"`, "\a\b\f\n\r\t\v\\'\"", l.dialect == MiniJinja
	if mini {
		names, values = `bfnrt\'"/`, "\b\f\n\r\t\\'\"/"
	}
	c := s[1]
	i := strings.IndexByte(names, c)
	digits, ok := map[byte]int{'x': 2, 'u': 4, 'U': 8}[c]
	switch {
	case i >= 0:
		b.WriteByte(values[i])
		return 2, nil
	case c == '\n' && !mini:
		return 2, nil
	case ok && (c != 'U' || !mini):
		r, err := hexCharacter(s, 2, digits)
		size := 2 + digits
		if mini && err == nil && utf16.IsSurrogate(r) && strings.HasPrefix(s[size:], `\u`) {
			low, _ := hexCharacter(s, size+2, digits)
			r, size = utf16.DecodeRune(r, low), 2*size
		}
		if err != nil || utf16.IsSurrogate(r) || size > 10 && r == unicode.ReplacementChar {
			return 0, fmt.Errorf(`\%c needs the %d hexadecimal digits of a character`, c, digits)
		}
		b.WriteRune(r)
		return size, nil
	case c == 'N' && !mini:
		r, size, err := namedCharacter(s)
		b.WriteRune(r)
		return size, err
	case c >= '0' && c <= '7':
		n, size := rune(0), 1
		for size < len(s) && size < 4 && s[size] >= '0' && s[size] <= '7' {
			n = n<<3 | rune(s[size]-'0')
			size++
		}
		if mini && n > 0xFF {
			return 0, errors.New("an octal escape above 377")
		}
		b.WriteRune(n)
		return size, nil
	}
	return l.keepBackslash(b, s), nil
}

// keepBackslash writes the backslash at the start of s, which begins no escape, and the character behind it.
func (l *lexer) keepBackslash(b *strings.Builder, s string) int {
	b.WriteByte('\\')
	r, size := utf8.DecodeRuneInString(s[1:])
	switch {
	case r < utf8.RuneSelf || l.dialect == MiniJinja:
		b.WriteRune(r)
	case r < 0x100:
		fmt.Fprintf(b, "x%02x", r)
	case r < 0x10000:
		fmt.Fprintf(b, "u%04x", r)
	default:
		fmt.Fprintf(b, "U%08x", r)
	}
	return 1 + size
}

// hexCharacter returns the character whose hexadecimal digits are at a position of s.
func hexCharacter(s string, from, digits int) (rune, error) {
	n, err := strconv.ParseUint(s[min(from, len(s)):min(from+digits, len(s))], 16, 32)
	if len(s) < from+digits || n > unicode.MaxRune {
		err = strconv.ErrRange
	}
	return rune(n), err
}

// characterNames are the characters by their Unicode names. Few templates need them, so they are made on first use.
var characterNames = sync.OnceValue(func() map[string]rune {
	names := map[string]rune{
		"TAB": '\t', "LF": '\n', "LINE FEED": '\n', "NEW LINE": '\n', "CR": '\r', "CARRIAGE RETURN": '\r',
		"NBSP": 0xA0, "ZWSP": 0x200B, "ZWNJ": 0x200C, "ZWJ": 0x200D, "BOM": 0xFEFF, "BYTE ORDER MARK": 0xFEFF,
	}
	for r := range rune(unicode.MaxRune + 1) {
		if name := runenames.Name(r); name != "" && name[0] != '<' {
			names[name] = r
		}
	}
	return names
})

// namedCharacter returns the character of the escape \N{NAME} at the start of s, and the escape's length. The name is
// one of Unicode's or a common alias, in any case.
func namedCharacter(s string) (r rune, size int, err error) {
	name, _, found := strings.Cut(s[2:], "}")
	size = len(`\N}`) + len(name)
	name, open := strings.CutPrefix(strings.ToUpper(name), "{")
	digits, unified := strings.CutPrefix(name, "CJK UNIFIED IDEOGRAPH-")
	r, known := characterNames()[name]
	if unified {
		r, err = hexCharacter(digits, 0, len(digits))
		known = err == nil && unicode.Is(unicode.Unified_Ideograph, r)
	}
	if !open || !found || !known {
		return 0, 0, fmt.Errorf(`\N%s is no known name of a character`, short(name))
	}
	return r, size, nil
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
