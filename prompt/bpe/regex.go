package bpe

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
)

// The general engine matches patterns without a hand-written scanner. Hugging Face tokenizers matches them with
// Oniguruma, in Ruby's syntax and Unicode 16. Here, a parser for that syntax resolves every set of characters with our
// own tables. Characters that are in the same sets become one letter of a small alphabet. This turns the pattern into
// one over that alphabet, without any syntax on which engines differ. regexp2 matches it: a backtracking engine with
// the same leftmost-first rule. A pattern that cannot be translated exactly is an error that names the construct.

// A backtracking engine can take exponential time on a hostile text. matchTimeout bounds all searches of one text, and
// searchPerByte those of a longer text. searchTimeout bounds one search.
const (
	matchTimeout  = 2 * time.Second
	searchPerByte = 4 * time.Microsecond
	searchTimeout = 400 * time.Millisecond
)

// maxPattern bounds a pattern's length in bytes, and maxPatternDepth its nesting.
const (
	maxPattern      = 16 << 10
	maxPatternDepth = 50
)

// errMatch is the error for a text on which the engine reached a time limit.
var errMatch = errors.New("bpe: a pre-tokenizer pattern takes too long on this text")

// pattern is a compiled expression of the general engine. It is safe for concurrent use.
type pattern struct {
	engine *regexp2.Regexp
	// starts and letters are the alphabet: character r is letters[i], where starts[i] <= r < starts[i+1].
	starts  []rune
	letters []rune
	ascii   [utf8.RuneSelf]rune // the letters of ASCII
	// nullable says that a match may be empty.
	nullable bool
}

// set is a set of characters: pairs of the first and last characters of ranges, in ascending order. Ranges do not
// touch.
type set []rune

// has reports whether a character is in the set.
func (s set) has(r rune) bool {
	i, found := slices.BinarySearch(s, r)
	return found || i%2 == 1
}

// newSet returns the set of pairs of first and last characters in any order.
func newSet(ranges ...rune) set {
	var joined set
	type edge struct {
		at    rune
		delta int
	}
	edges := make([]edge, 0, len(ranges))
	for i := 0; i+1 < len(ranges); i += 2 {
		edges = append(edges, edge{ranges[i], 1}, edge{ranges[i+1] + 1, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return b.delta - a.delta // starts first, so that adjacent ranges join
	})
	depth := 0
	for _, e := range edges {
		if depth == 0 {
			joined = append(joined, e.at)
		}
		if depth += e.delta; depth == 0 {
			joined = append(joined, e.at-1)
		}
	}
	return joined
}

// not returns the complement.
func (s set) not() set {
	var out set
	next := rune(0)
	for i := 0; i < len(s); i += 2 {
		if s[i] > next {
			out = append(out, next, s[i]-1)
		}
		next = s[i+1] + 1
	}
	if next <= maxRune {
		out = append(out, next, maxRune)
	}
	return out
}

// or returns the union.
func (s set) or(t set) set { return newSet(slices.Concat(s, t)...) }

// and returns the intersection.
func (s set) and(t set) set { return s.not().or(t.not()).not() }

// patternPart is a piece of a translated pattern: text in the engine's syntax, or a set of characters, which compile
// writes in the alphabet.
type patternPart struct {
	text  string
	set   set
	isSet bool
}

// patternParser translates a pattern into parts.
type patternParser struct {
	source string
	at     int
	depth  int
	parts  []patternPart
	// fold says that case is ignored.
	fold bool
	// previous is the previous character while case is ignored, else 0. Some pairs of letters match one character.
	previous rune
}

// refuse returns the error for a construct that cannot be translated.
func (p *patternParser) refuse(what string) error {
	return errUnsupported("in a pattern,", what+" at byte "+strconv.Itoa(p.at))
}

// compilePattern compiles a pattern in Oniguruma's syntax.
func compilePattern(source string) (*pattern, error) {
	if len(source) > maxPattern || !utf8.ValidString(source) {
		return nil, errUnsupported("a pattern", "of "+strconv.Itoa(len(source))+" bytes")
	}
	p := &patternParser{source: source}
	nullable, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	if p.at < len(p.source) {
		return nil, p.refuse("an unmatched )")
	}
	compiled, err := p.compile()
	if err != nil {
		return nil, err
	}
	compiled.nullable = nullable
	return compiled, nil
}

func (p *patternParser) emit(text string)   { p.parts = append(p.parts, patternPart{text: text}) }
func (p *patternParser) emitSet(s set)      { p.parts = append(p.parts, patternPart{set: s, isSet: true}) }
func (p *patternParser) more() bool         { return p.at < len(p.source) }
func (p *patternParser) peek(s string) bool { return strings.HasPrefix(p.source[p.at:], s) }
func (p *patternParser) next() (rune, error) {
	if !p.more() {
		return 0, p.refuse("an end in the middle")
	}
	r, n := utf8.DecodeRuneInString(p.source[p.at:])
	p.at += n
	return r, nil
}

func (p *patternParser) take(s string) bool {
	if p.peek(s) {
		p.at += len(s)
		return true
	}
	return false
}

// alternatives reads a|b|c, up to ")" or the end. nullable says that one of them can match the empty text.
func (p *patternParser) alternatives() (nullable bool, err error) {
	if p.depth++; p.depth > maxPatternDepth {
		return false, p.refuse("deep nesting")
	}
	defer func() { p.depth-- }()
	empty := true // whether the alternative can match the empty text so far
	p.previous = 0
	for p.more() && !p.peek(")") {
		if p.take("|") {
			p.emit("|")
			p.previous = 0
			nullable, empty = nullable || empty, true
			continue
		}
		can, err := p.repeated()
		if err != nil {
			return false, err
		}
		empty = empty && can
	}
	p.previous = 0
	return nullable || empty, nil
}

// repeated reads one atom with its quantifiers. nullable says that it can match the empty text.
func (p *patternParser) repeated() (nullable bool, err error) {
	start := len(p.parts)
	repeatable, nullable, err := p.atom()
	if err != nil {
		return false, err
	}
	for p.more() {
		quantifier := ""
		interval := false
		switch {
		case p.take("?"):
			quantifier = "?"
		case p.take("*"):
			quantifier = "*"
		case p.take("+"):
			quantifier = "+"
		case p.peek("{"):
			if quantifier, err = p.interval(); err != nil {
				return false, err
			}
			interval = true
		default:
			return nullable, nil
		}
		if quantifier == "?" || quantifier == "*" || strings.HasPrefix(quantifier, "{0") {
			nullable = true
		}
		if p.fold && (p.previous == 's' || p.previous == 'f') {
			return false, p.refuse("a repeated s or f, where case is ignored,")
		}
		if !repeatable {
			return false, p.refuse("a repeated assertion")
		}
		p.previous = 0
		p.parts = slices.Insert(p.parts, start, patternPart{text: "(?:"})
		switch {
		case p.take("?"):
			if interval && !strings.Contains(quantifier, ",") {
				return false, p.refuse("{n}?")
			}
			p.emit(")" + quantifier + "?")
		case !interval && p.take("+"):
			p.parts = slices.Insert(p.parts, start, patternPart{text: "(?>"})
			p.emit(")" + quantifier + ")")
		default:
			p.emit(")" + quantifier)
		}
	}
	return nullable, nil
}

// interval reads {n}, {n,} or {n,m}.
func (p *patternParser) interval() (string, error) {
	end := strings.IndexByte(p.source[p.at:], '}')
	if end < 0 {
		return "", p.refuse("{")
	}
	low, high, ranged := strings.Cut(p.source[p.at+1:p.at+end], ",")
	if ranged && low == "" {
		low = "0"
	}
	number := func(s string) bool {
		n, err := strconv.ParseUint(s, 10, 32)
		return err == nil && n <= 1000 && strconv.FormatUint(n, 10) == s
	}
	if !number(low) || ranged && high != "" && !number(high) {
		return "", p.refuse("{")
	}
	if ranged && high != "" {
		a, _ := strconv.Atoi(low)
		b, _ := strconv.Atoi(high)
		if a > b {
			return "", p.refuse("{n,m} with n above m")
		}
	}
	p.at += end + 1
	if ranged {
		return "{" + low + "," + high + "}", nil
	}
	return "{" + low + "}", nil
}

// atom reads a character, a class, a group or an assertion.
func (p *patternParser) atom() (repeatable, nullable bool, err error) {
	if p.peek("(") {
		return p.group()
	}
	if p.peek("[") {
		s, err := p.class()
		if err != nil {
			return false, false, err
		}
		if p.fold {
			return false, false, p.refuse("a class where case is ignored")
		}
		p.emitSet(s)
		return true, false, nil
	}
	r, err := p.next()
	if err != nil {
		return false, false, err
	}
	switch r {
	case '.':
		p.emitSet(newSet('\n', '\n').not())
		p.previous = 0
		return true, false, nil
	case '^': // the beginning of every line, but not after a newline at the end
		p.emit("(?:\\A|(?<=")
		p.emitSet(newSet('\n', '\n'))
		p.emit(")(?!\\z))")
		p.previous = 0
		return false, true, nil
	case '$':
		p.emit("(?=\\z|")
		p.emitSet(newSet('\n', '\n'))
		p.emit(")")
		p.previous = 0
		return false, true, nil
	case '*', '+', '?', '{':
		return false, false, p.refuse("a quantifier of nothing")
	case '\\':
		repeatable, err := p.escape()
		return repeatable, !repeatable, err
	}
	return true, false, p.literal(r)
}

// literal emits a character, with its other cases if case is ignored.
func (p *patternParser) literal(r rune) error {
	if !p.fold {
		p.emitSet(newSet(r, r))
		return nil
	}
	if r >= utf8.RuneSelf {
		return p.refuse("a letter beyond ASCII where case is ignored")
	}
	lower := rune(lowerASCII(byte(r)))
	// Oniguruma also matches ß for ss, and ligatures for the letters that they join.
	switch string([]rune{p.previous, lower}) {
	case "ss", "st", "ff", "fi", "fl":
		return p.refuse("letters that a ligature joins, where case is ignored,")
	}
	p.previous = lower
	s := newSet(r, r)
	if lower >= 'a' && lower <= 'z' {
		s = newSet(lower, lower, lower-'a'+'A', lower-'a'+'A')
	}
	switch lower {
	case 's':
		s = s.or(newSet(0x17F, 0x17F))
	case 'k':
		s = s.or(newSet(0x212A, 0x212A))
	}
	p.emitSet(s)
	return nil
}

// group reads a group or a lookaround.
func (p *patternParser) group() (repeatable, nullable bool, err error) {
	p.previous = 0
	p.at++
	repeatable = true
	open := "(?:"
	fold := p.fold
	switch {
	case p.take("?:"):
	case p.take("?>"):
		open = "(?>"
	case p.take("?="):
		open, repeatable = "(?=", false
	case p.take("?!"):
		open, repeatable = "(?!", false
	case p.take("?<="):
		open, repeatable = "(?<=", false
	case p.take("?<!"):
		open, repeatable = "(?<!", false
	case p.take("?i:"):
		p.fold = true
	case p.take("?-i:"):
		p.fold = false
	case p.peek("?<") || p.peek("?P") || p.peek("?"):
		return false, false, p.refuse("(?" + p.source[p.at+1:min(len(p.source), p.at+3)])
	}
	p.emit(open)
	nullable, err = p.alternatives()
	if err != nil {
		return false, false, err
	}
	if !p.take(")") {
		return false, false, p.refuse("an unclosed (")
	}
	p.emit(")")
	p.fold = fold
	return repeatable, nullable || !repeatable, nil
}

// escape reads the rest of an escape outside of a class.
func (p *patternParser) escape() (repeatable bool, err error) {
	if !p.more() {
		return false, p.refuse("an end in the middle")
	}
	anchors := map[byte]string{'A': "\\A", 'z': "\\z"}
	c := p.source[p.at]
	if anchor, ok := anchors[c]; ok {
		p.at++
		p.emit(anchor)
		p.previous = 0
		return false, nil
	}
	if c == 'b' || c == 'B' {
		p.at++
		word := set(onigWordRanges)
		look := func(behind, ahead string) {
			p.emit(behind)
			p.emitSet(word)
			p.emit(")" + ahead)
			p.emitSet(word)
			p.emit(")")
		}
		p.emit("(?:")
		if c == 'b' {
			look("(?<=", "(?!")
			p.emit("|")
			look("(?<!", "(?=")
		} else {
			look("(?<=", "(?=")
			p.emit("|")
			look("(?<!", "(?!")
		}
		p.emit(")")
		p.previous = 0
		return false, nil
	}
	s, char, err := p.escaped()
	if err != nil {
		return false, err
	}
	if s == nil {
		return true, p.literal(char)
	}
	if p.fold && !s.caseless() {
		return false, p.refuse("a class where case is ignored")
	}
	p.emitSet(s)
	p.previous = 0
	return true, nil
}

// caseless reports whether no character of a set has another case.
func (s set) caseless() bool {
	for i := 0; i < len(s); i += 2 {
		for _, cased := range [][]rune{categoryRanges["Lu"], categoryRanges["Ll"], categoryRanges["Lt"],
			categoryRanges["Mn"], categoryRanges["Nl"], categoryRanges["So"]} {
			if len(s.and(set(cased))) > 0 {
				return false
			}
		}
	}
	return true
}

// escaped reads the rest of an escape: a set, or, if the set is nil, a character.
func (p *patternParser) escaped() (set, rune, error) {
	r, err := p.next()
	if err != nil {
		return nil, 0, err
	}
	switch r {
	case 's':
		return spaceRanges, 0, nil
	case 'S':
		return set(spaceRanges).not(), 0, nil
	case 'd':
		return categoryRanges["Nd"], 0, nil
	case 'D':
		return set(categoryRanges["Nd"]).not(), 0, nil
	case 'w':
		return onigWordRanges, 0, nil
	case 'W':
		return set(onigWordRanges).not(), 0, nil
	case 'p', 'P':
		return p.property(r == 'P')
	case 'n':
		return nil, '\n', nil
	case 'r':
		return nil, '\r', nil
	case 't':
		return nil, '\t', nil
	case 'f':
		return nil, '\f', nil
	case 'v':
		return nil, '\v', nil
	case 'a':
		return nil, '\a', nil
	case 'e':
		return nil, 0x1B, nil
	case 'x', 'u':
		return p.hexadecimal(r)
	}
	if r >= utf8.RuneSelf || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
		return nil, 0, p.refuse("\\" + string(r))
	}
	return nil, r, nil
}

// hexadecimal reads the digits of \xHH, \x{H...} or \uHHHH.
func (p *patternParser) hexadecimal(kind rune) (set, rune, error) {
	digits := ""
	switch {
	case kind == 'x' && p.take("{"):
		end := strings.IndexByte(p.source[p.at:], '}')
		if end < 0 {
			return nil, 0, p.refuse("\\x{")
		}
		digits = p.source[p.at : p.at+end]
		p.at += end + 1
	case kind == 'x' && p.at+2 <= len(p.source):
		digits = p.source[p.at : p.at+2]
		p.at += 2
	case kind == 'u' && p.at+4 <= len(p.source):
		digits = p.source[p.at : p.at+4]
		p.at += 4
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	if err != nil || n > maxRune || n >= 0xD800 && n < 0xE000 || kind == 'x' && len(digits) == 2 && n >= utf8.RuneSelf {
		return nil, 0, p.refuse("\\" + string(kind) + digits)
	}
	return nil, rune(n), nil
}

// property reads the braces of \p{L}: a general category or a script.
func (p *patternParser) property(negated bool) (set, rune, error) {
	end := strings.IndexByte(p.source[p.at:], '}')
	if !p.peek("{") || end < 0 {
		return nil, 0, p.refuse("\\p without braces")
	}
	name := p.source[p.at+1 : p.at+end]
	if strings.HasPrefix(name, "^") {
		name, negated = name[1:], !negated
	}
	s := set(categoryRanges[name])
	if script, ok := scriptRanges[name]; ok {
		s = script
	}
	if len(name) == 1 {
		var all []rune
		for category, ranges := range categoryRanges {
			if category[:1] == name {
				all = append(all, ranges...)
			}
		}
		if name == "C" {
			all = nil // it also has the unassigned characters, which the tables lack
		}
		s = newSet(all...)
	}
	if len(s) == 0 {
		return nil, 0, p.refuse("\\p{" + name + "}")
	}
	p.at += end + 1
	if negated {
		s = s.not()
	}
	return s, 0, nil
}

// class reads [...], with nested classes and intersections.
func (p *patternParser) class() (set, error) {
	if p.depth++; p.depth > maxPatternDepth {
		return nil, p.refuse("deep nesting")
	}
	defer func() { p.depth-- }()
	p.at++ // [
	negated := p.take("^")
	var result, current set
	intersected := false
	first := true
	for ; ; first = false {
		switch {
		case !p.more():
			return nil, p.refuse("an unclosed [")
		case p.peek("]"):
			if first {
				return nil, p.refuse("[]")
			}
			p.at++
			if intersected {
				current = result.and(current)
			}
			if len(current) == 0 {
				return nil, p.refuse("an empty class")
			}
			if negated {
				current = current.not()
			}
			return current, nil
		case p.peek("[:"):
			return nil, p.refuse("[:")
		case p.peek("["):
			inner, err := p.class()
			if err != nil {
				return nil, err
			}
			current = current.or(inner)
		case p.take("&&"):
			if intersected {
				current = result.and(current)
			}
			result, current, intersected = current, nil, true
		default:
			s, low, err := p.classItem()
			if err != nil {
				return nil, err
			}
			if s != nil {
				current = current.or(s)
				if p.peek("-") && !p.peek("-]") {
					return nil, p.refuse("a range that begins with a class")
				}
				continue
			}
			high := low
			if p.peek("-") && !p.peek("-]") {
				if low == '-' {
					return nil, p.refuse("a range that begins with -")
				}
				p.at++
				if p.peek("[") {
					return nil, p.refuse("a range that ends with a class")
				}
				if s, high, err = p.classItem(); err != nil {
					return nil, err
				}
				if s != nil || high < low {
					return nil, p.refuse("a range")
				}
			}
			current = current.or(newSet(low, high))
		}
	}
}

// classItem reads a set or a character within a class.
func (p *patternParser) classItem() (set, rune, error) {
	r, err := p.next()
	if err != nil || r != '\\' {
		return nil, r, err
	}
	if p.peek("b") {
		return nil, 0, p.refuse("\\b in a class")
	}
	return p.escaped()
}

// firstLetter is the first letter of the alphabet. From there on, characters have no case and no meaning in patterns.
const firstLetter = 0x4E00

// maxLetters bounds the alphabet. Real patterns need a few dozen letters.
const maxLetters = 4096

// compile finds the alphabet and writes the pattern in that alphabet.
func (p *patternParser) compile() (*pattern, error) {
	var sets []set
	number := map[string]int{}
	for _, part := range p.parts {
		if !part.isSet {
			continue
		}
		key := string(part.set)
		if _, ok := number[key]; !ok {
			number[key] = len(sets)
			sets = append(sets, part.set)
		}
	}
	starts := []rune{0}
	for _, s := range sets {
		for i := 0; i < len(s); i += 2 {
			starts = append(starts, s[i], s[i+1]+1)
		}
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)
	compiled := &pattern{starts: starts}
	letterOf := map[string]rune{} // by the sets that a character is in
	members := make([][]rune, len(sets))
	signature := make([]byte, (len(sets)+7)/8)
	for _, start := range starts {
		clear(signature)
		for i, s := range sets {
			if s.has(start) {
				signature[i/8] |= 1 << (i % 8)
			}
		}
		letter, known := letterOf[string(signature)]
		if !known {
			if len(letterOf) == maxLetters {
				return nil, errUnsupported("a pattern", "of so many sets of characters")
			}
			letter = rune(firstLetter + len(letterOf))
			letterOf[string(signature)] = letter
			for i, b := range signature {
				for ; b != 0; b &= b - 1 {
					set := 8*i + bits.TrailingZeros8(b)
					members[set] = append(members[set], letter)
				}
			}
		}
		compiled.letters = append(compiled.letters, letter)
	}
	for r := range compiled.ascii {
		compiled.ascii[r] = compiled.letter(rune(r))
	}
	var b strings.Builder
	for _, part := range p.parts {
		if !part.isSet {
			b.WriteString(part.text)
			continue
		}
		letters := members[number[string(part.set)]]
		switch len(letters) {
		case 0:
			b.WriteString("(?!)")
		case 1:
			b.WriteRune(letters[0])
		default:
			b.WriteString("[" + string(letters) + "]")
		}
	}
	engine, err := regexp2.Compile(b.String(), regexp2.None)
	if err != nil {
		return nil, fmt.Errorf("pattern %q: %w", p.source, err)
	}
	engine.MatchTimeout = searchTimeout
	compiled.engine = engine
	return compiled, nil
}

// letter returns the letter of a character.
func (p *pattern) letter(r rune) rune {
	i, found := slices.BinarySearch(p.starts, r)
	if !found {
		i--
	}
	return p.letters[i]
}

// matches calls found with the byte offsets of each match in s, in order. Like Oniguruma's iterator, it skips an empty
// match at the end of the previous match.
func (p *pattern) matches(s string, sc *scratch, found func(start, end int)) error {
	// found may match patterns in the pieces of s. Their letters stand behind those of s in sc.letters.
	base := len(sc.letters)
	sc.letters = slices.Grow(sc.letters, utf8.RuneCountInString(s))
	for _, r := range s {
		letter := rune(0)
		if r < utf8.RuneSelf {
			letter = p.ascii[r]
		} else {
			letter = p.letter(r)
		}
		sc.letters = append(sc.letters, letter)
	}
	letters := sc.letters[base:]
	defer func() { sc.letters = sc.letters[:base] }()
	offset, passed := 0, 0 // letter number passed begins at byte offset
	at := func(letter int) int {
		for ; passed < letter; passed++ {
			_, n := utf8.DecodeRuneInString(s[offset:])
			offset += n
		}
		return offset
	}
	last := -1
	for from := 0; from <= len(letters) && sc.budget.err == nil; {
		begin := time.Now()
		m, err := p.engine.FindRunesMatchStartingAt(letters, from)
		if err != nil { // again: on a starved machine a search may reach its time limit without having run
			m, err = p.engine.FindRunesMatchStartingAt(letters, from)
		}
		if sc.searched += time.Since(begin); err != nil ||
			sc.searched > max(matchTimeout, time.Duration(sc.budget.total)*searchPerByte) {
			return errMatch
		}
		if sc.budget.stopped() {
			return sc.budget.err
		}
		if m == nil {
			return nil
		}
		start, end := m.Index, m.Index+m.Length
		if start == end && end == last {
			from++
			continue
		}
		from, last = end, end
		first := at(start)
		found(first, at(end))
	}
	return nil
}
