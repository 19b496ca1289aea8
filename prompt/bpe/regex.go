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

// refusal is the panic that ends the parsing of a pattern. compilePattern recovers it.
type refusal struct{ err error }

// refuse returns the refusal of a construct that cannot be translated.
func (p *patternParser) refuse(what string) refusal {
	return refusal{errUnsupported("in a pattern,", what+" at byte "+strconv.Itoa(p.at))}
}

// compilePattern compiles a pattern in Oniguruma's syntax.
func compilePattern(source string) (compiled *pattern, err error) {
	if len(source) > maxPattern || !utf8.ValidString(source) {
		return nil, errUnsupported("a pattern", "of "+strconv.Itoa(len(source))+" bytes")
	}
	defer func() {
		if cause := recover(); cause != nil {
			refused, ok := cause.(refusal)
			if !ok {
				panic(cause)
			}
			compiled, err = nil, refused.err
		}
	}()
	p := &patternParser{source: source}
	nullable := p.alternatives()
	if p.at < len(p.source) {
		panic(p.refuse("an unmatched )"))
	}
	compiled = p.compile()
	compiled.nullable = nullable
	return compiled, nil
}

func (p *patternParser) emit(text string)   { p.parts = append(p.parts, patternPart{text: text}) }
func (p *patternParser) emitSet(s set)      { p.parts = append(p.parts, patternPart{set: s, isSet: true}) }
func (p *patternParser) more() bool         { return p.at < len(p.source) }
func (p *patternParser) peek(s string) bool { return strings.HasPrefix(p.source[p.at:], s) }
func (p *patternParser) next() rune {
	if !p.more() {
		panic(p.refuse("an end in the middle"))
	}
	r, n := utf8.DecodeRuneInString(p.source[p.at:])
	p.at += n
	return r
}

func (p *patternParser) take(s string) bool {
	if p.peek(s) {
		p.at += len(s)
		return true
	}
	return false
}

// alternatives reads a|b|c, up to ")" or the end. nullable says that one of them can match the empty text.
func (p *patternParser) alternatives() (nullable bool) {
	if p.depth++; p.depth > maxPatternDepth {
		panic(p.refuse("deep nesting"))
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
		empty = p.repeated() && empty
	}
	p.previous = 0
	return nullable || empty
}

// repeated reads one atom with its quantifiers. nullable says that it can match the empty text.
func (p *patternParser) repeated() (nullable bool) {
	start := len(p.parts)
	repeatable, nullable := p.atom()
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
			quantifier = p.interval()
			interval = true
		default:
			return nullable
		}
		if quantifier == "?" || quantifier == "*" || strings.HasPrefix(quantifier, "{0") {
			nullable = true
		}
		if p.fold && (p.previous == 's' || p.previous == 'f') {
			panic(p.refuse("a repeated s or f, where case is ignored,"))
		}
		if !repeatable {
			panic(p.refuse("a repeated assertion"))
		}
		p.previous = 0
		p.parts = slices.Insert(p.parts, start, patternPart{text: "(?:"})
		switch {
		case p.take("?"):
			if interval && !strings.Contains(quantifier, ",") {
				panic(p.refuse("{n}?"))
			}
			p.emit(")" + quantifier + "?")
		case !interval && p.take("+"):
			p.parts = slices.Insert(p.parts, start, patternPart{text: "(?>"})
			p.emit(")" + quantifier + ")")
		default:
			p.emit(")" + quantifier)
		}
	}
	return nullable
}

// interval reads {n}, {n,} or {n,m}.
func (p *patternParser) interval() string {
	end := strings.IndexByte(p.source[p.at:], '}')
	if end < 0 {
		panic(p.refuse("{"))
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
		panic(p.refuse("{"))
	}
	if ranged && high != "" {
		a, _ := strconv.Atoi(low)
		b, _ := strconv.Atoi(high)
		if a > b {
			panic(p.refuse("{n,m} with n above m"))
		}
	}
	p.at += end + 1
	if ranged {
		return "{" + low + "," + high + "}"
	}
	return "{" + low + "}"
}

// atom reads a character, a class, a group or an assertion.
func (p *patternParser) atom() (repeatable, nullable bool) {
	if p.peek("(") {
		return p.group()
	}
	if p.peek("[") {
		s := p.class()
		if p.fold {
			panic(p.refuse("a class where case is ignored"))
		}
		p.emitSet(s)
		return true, false
	}
	switch r := p.next(); r {
	case '.':
		p.emitSet(newSet('\n', '\n').not())
		p.previous = 0
		return true, false
	case '^': // the beginning of every line, but not after a newline at the end
		p.emit("(?:\\A|(?<=")
		p.emitSet(newSet('\n', '\n'))
		p.emit(")(?!\\z))")
		p.previous = 0
		return false, true
	case '$':
		p.emit("(?=\\z|")
		p.emitSet(newSet('\n', '\n'))
		p.emit(")")
		p.previous = 0
		return false, true
	case '*', '+', '?', '{':
		panic(p.refuse("a quantifier of nothing"))
	case '\\':
		repeatable := p.escape()
		return repeatable, !repeatable
	default:
		p.literal(r)
		return true, false
	}
}

// literal emits a character, with its other cases if case is ignored.
func (p *patternParser) literal(r rune) {
	if !p.fold {
		p.emitSet(newSet(r, r))
		return
	}
	if r >= utf8.RuneSelf {
		panic(p.refuse("a letter beyond ASCII where case is ignored"))
	}
	lower := rune(lowerASCII(byte(r)))
	// Oniguruma also matches ß for ss, and ligatures for the letters that they join.
	switch string([]rune{p.previous, lower}) {
	case "ss", "st", "ff", "fi", "fl":
		panic(p.refuse("letters that a ligature joins, where case is ignored,"))
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
}

// group reads a group or a lookaround.
func (p *patternParser) group() (repeatable, nullable bool) {
	p.previous = 0
	p.at++
	repeatable = true
	open := "(?:"
	fold := p.fold
	switch {
	case p.take("?:"):
	case p.take("?>"):
		open = "(?>"
	case p.take("?i:"):
		p.fold = true
	case p.take("?-i:"):
		p.fold = false
	default:
		for _, look := range []string{"?=", "?!", "?<=", "?<!"} {
			if repeatable && p.take(look) {
				open, repeatable = "("+look, false
			}
		}
		if repeatable && p.peek("?") {
			panic(p.refuse("(?" + p.source[p.at+1:min(len(p.source), p.at+3)]))
		}
	}
	p.emit(open)
	nullable = p.alternatives()
	if !p.take(")") {
		panic(p.refuse("an unclosed ("))
	}
	p.emit(")")
	p.fold = fold
	return repeatable, nullable || !repeatable
}

// escape reads the rest of an escape outside of a class.
func (p *patternParser) escape() (repeatable bool) {
	if !p.more() {
		panic(p.refuse("an end in the middle"))
	}
	anchors := map[byte]string{'A': "\\A", 'z': "\\z"}
	c := p.source[p.at]
	if anchor, ok := anchors[c]; ok {
		p.at++
		p.emit(anchor)
		p.previous = 0
		return false
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
		return false
	}
	s, char := p.escaped()
	if s == nil {
		p.literal(char)
		return true
	}
	if p.fold && !s.caseless() {
		panic(p.refuse("a class where case is ignored"))
	}
	p.emitSet(s)
	p.previous = 0
	return true
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
func (p *patternParser) escaped() (set, rune) {
	r := p.next()
	if at := strings.IndexRune("nrtfvae", r); at >= 0 {
		return nil, rune("\n\r\t\f\v\a\x1b"[at])
	}
	switch r {
	case 's':
		return spaceRanges, 0
	case 'S':
		return set(spaceRanges).not(), 0
	case 'd':
		return categoryRanges["Nd"], 0
	case 'D':
		return set(categoryRanges["Nd"]).not(), 0
	case 'w':
		return onigWordRanges, 0
	case 'W':
		return set(onigWordRanges).not(), 0
	case 'p', 'P':
		return p.property(r == 'P')
	case 'x', 'u':
		return p.hexadecimal(r)
	}
	if r >= utf8.RuneSelf || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
		panic(p.refuse("\\" + string(r)))
	}
	return nil, r
}

// hexadecimal reads the digits of \xHH, \x{H...} or \uHHHH.
func (p *patternParser) hexadecimal(kind rune) (set, rune) {
	digits := ""
	switch {
	case kind == 'x' && p.take("{"):
		end := strings.IndexByte(p.source[p.at:], '}')
		if end < 0 {
			panic(p.refuse("\\x{"))
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
		panic(p.refuse("\\" + string(kind) + digits))
	}
	return nil, rune(n)
}

// property reads the braces of \p{L}: a general category or a script.
func (p *patternParser) property(negated bool) (set, rune) {
	end := strings.IndexByte(p.source[p.at:], '}')
	if !p.peek("{") || end < 0 {
		panic(p.refuse("\\p without braces"))
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
		panic(p.refuse("\\p{" + name + "}"))
	}
	p.at += end + 1
	if negated {
		s = s.not()
	}
	return s, 0
}

// class reads [...], with nested classes and intersections.
func (p *patternParser) class() set {
	if p.depth++; p.depth > maxPatternDepth {
		panic(p.refuse("deep nesting"))
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
			panic(p.refuse("an unclosed ["))
		case p.peek("]"):
			if first {
				panic(p.refuse("[]"))
			}
			p.at++
			if intersected {
				current = result.and(current)
			}
			if len(current) == 0 {
				panic(p.refuse("an empty class"))
			}
			if negated {
				current = current.not()
			}
			return current
		case p.peek("[:"):
			panic(p.refuse("[:"))
		case p.peek("["):
			current = current.or(p.class())
		case p.take("&&"):
			if intersected {
				current = result.and(current)
			}
			result, current, intersected = current, nil, true
		default:
			s, low := p.classItem()
			if s != nil {
				current = current.or(s)
				if p.peek("-") && !p.peek("-]") {
					panic(p.refuse("a range that begins with a class"))
				}
				continue
			}
			high := low
			if p.peek("-") && !p.peek("-]") {
				if low == '-' {
					panic(p.refuse("a range that begins with -"))
				}
				p.at++
				if p.peek("[") {
					panic(p.refuse("a range that ends with a class"))
				}
				s, high = p.classItem()
				if s != nil || high < low {
					panic(p.refuse("a range"))
				}
			}
			current = current.or(newSet(low, high))
		}
	}
}

// classItem reads a set or a character within a class.
func (p *patternParser) classItem() (set, rune) {
	if r := p.next(); r != '\\' {
		return nil, r
	}
	if p.peek("b") {
		panic(p.refuse("\\b in a class"))
	}
	return p.escaped()
}

// firstLetter is the first letter of the alphabet. From there on, characters have no case and no meaning in patterns.
const firstLetter = 0x4E00

// maxLetters bounds the alphabet. Real patterns need a few dozen letters.
const maxLetters = 4096

// compile finds the alphabet and writes the pattern in that alphabet.
func (p *patternParser) compile() *pattern {
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
				panic(refusal{errUnsupported("a pattern", "of so many sets of characters")})
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
		panic(refusal{fmt.Errorf("pattern %q: %w", p.source, err)})
	}
	engine.MatchTimeout = searchTimeout
	compiled.engine = engine
	return compiled
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
