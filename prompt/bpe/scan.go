package bpe

// Pre-tokenizers cut text into pieces with a regular expression. A general regex engine takes ten times as long as all
// other steps of the tokenizer together. Models use only a few expressions, so each of these has a hand-written scanner
// here, found by the expression's exact text. Any other expression runs on the general engine of regex.go.

// A scanner returns the end of the piece that starts at s[i]. It looks at s[i:end] only, returns more than i, and needs
// i < end and valid UTF-8.
type scanner func(s string, i, end int) int

// The expressions, named after the models that introduced them.
const (
	regexGPT2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

	// Llama 3: numbers in groups of up to three digits.
	regexCL100K = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ` +
		`?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	// Qwen 2 and 3: each digit alone.
	regexQwen = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ` +
		`?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	// Qwen 3.5: marks belong to words.
	regexQwen35 = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ` +
		`?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	// GPT-4o, gpt-oss.
	regexO200K = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m` +
		`|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re` +
		`|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	// Mistral's tekken.
	regexTekken = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+` +
		`|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}` +
		`| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	// DeepSeek V3: three expressions, applied in this order.
	regexDeepSeek1 = `\p{N}{1,3}`
	regexDeepSeek2 = "[一-龥\u3040-ゟ゠-ヿ]+"
	regexDeepSeek3 = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+" +
		"| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

// scanners maps an expression to its scanner. All of these expressions match at every position, so there is no text
// between matches. (DeepSeek's can leave some.)
var scanners = map[string]scanner{
	regexGPT2:   scanGPT2,
	regexCL100K: scanCL100K(3, classLetter),
	regexQwen:   scanCL100K(1, classLetter),
	regexQwen35: scanCL100K(1, classLetter|classMark),
	regexO200K:  scanO200K(3, true),
	regexTekken: scanO200K(1, false),
}

// skip returns the end of the run of characters with any of the bits, from i.
func skip(s string, i, end int, bits class) int {
	for i < end {
		if b := s[i]; b < 0x80 {
			if asciiClass[b]&bits == 0 {
				return i
			}
			i++
			continue
		}
		c, n := classAtWide(s, i)
		if c&bits == 0 {
			return i
		}
		i += n
	}
	return i
}

// skipNot returns the end of the run of characters with none of the bits, from i.
func skipNot(s string, i, end int, bits class) int {
	for i < end {
		c, n := classAt(s, i)
		if c&bits != 0 {
			return i
		}
		i += n
	}
	return i
}

// skipNumber returns the end of a number of at most limit digits; the one at s[i], n bytes long, is the first.
func skipNumber(s string, i, n, end, limit int) int {
	i += n
	for k := 1; k < limit && i < end; k++ {
		c, n := classAt(s, i)
		if c&classNumber == 0 {
			break
		}
		i += n
	}
	return i
}

// contraction matches (?i:'s|'t|'re|'ve|'m|'ll|'d) at i. It returns the end, or 0.
func contraction(s string, i, end int) int {
	if i+1 >= end || s[i] != '\'' {
		return 0
	}
	second := byte(0)
	if i+2 < end {
		second = lowerASCII(s[i+2])
	}
	switch lowerASCII(s[i+1]) {
	case 's', 't', 'm', 'd':
		return i + 2
	case 'r', 'v':
		if second == 'e' {
			return i + 3
		}
	case 'l':
		if second == 'l' {
			return i + 3
		}
	case 0xC5: // U+017F, the long s, is an s when case is ignored
		if second == 0xBF {
			return i + 3
		}
	}
	return 0
}

func lowerASCII(b byte) byte {
	if b >= 'A' && b <= 'Z' {
		return b + 'a' - 'A'
	}
	return b
}

// space matches \s*[\r\n]+|\s+(?!\S)|\s+ at i, where white space starts. newline is [\r\n], or 0 for \s+(?!\S)|\s+.
func space(s string, i, end int, newline class) int {
	j, last, afterNewline := i, i, -1
	for j < end {
		c, n := classAt(s, j)
		if c&classSpace == 0 {
			break
		}
		last = j
		j += n
		if c&newline != 0 {
			afterNewline = j
		}
	}
	if afterNewline >= 0 {
		return afterNewline
	}
	if j == end || last == i {
		return j
	}
	return last // leave one space for the following word
}

func scanGPT2(s string, i, end int) int {
	if s[i] == '\'' && i+1 < end {
		switch s[i+1] {
		case 's', 't', 'm', 'd':
			return i + 2
		case 'r', 'v':
			if i+2 < end && s[i+2] == 'e' {
				return i + 3
			}
		case 'l':
			if i+2 < end && s[i+2] == 'l' {
				return i + 3
			}
		}
	}
	j := i
	if s[i] == ' ' {
		j++
	}
	if j < end {
		c, n := classAt(s, j)
		switch {
		case c&classLetter != 0:
			return skip(s, j+n, end, classLetter)
		case c&classNumber != 0:
			return skip(s, j+n, end, classNumber)
		case c&classSpace == 0:
			return skipNot(s, j+n, end, classSpace|classLetter|classNumber)
		}
	}
	return space(s, i, end, 0)
}

// scanCL100K scans regexCL100K, regexQwen and regexQwen35, which differ in the digits of a number and in the characters
// of a word.
func scanCL100K(digits int, word class) scanner {
	return func(s string, i, end int) int {
		c, n := classAt(s, i)
		if c&classLetter != 0 {
			return skip(s, i+n, end, word)
		}
		if j := contraction(s, i, end); j > 0 {
			return j
		}
		if c&classNumber != 0 {
			return skipNumber(s, i, n, end, digits)
		}
		if c&classNewline == 0 { // the optional first character; or, if it is a mark, the word itself
			if j := skip(s, i+n, end, word); j > i+n || c&word != 0 {
				return j
			}
		}
		j := i
		if s[i] == ' ' {
			j++
		}
		if k := skipNot(s, j, end, classSpace|classNumber|word); k > j {
			return skip(s, k, end, classNewline)
		}
		return space(s, i, end, classNewline)
	}
}

// upperLower matches [upper]*[lower]+ at i and returns the end, or 0. The classes overlap, so it backtracks like a
// regex engine.
func upperLower(s string, i, end int) int {
	giveBack := 0
	for i < end {
		c, n := classAt(s, i)
		if c&classUpper == 0 {
			if c&classLower != 0 {
				return skip(s, i+n, end, classLower)
			}
			break
		}
		i += n
		if c&classLower != 0 {
			giveBack = i
		}
	}
	return giveBack
}

// casedWord matches [^\r\n\p{L}\p{N}]?[upper]*[lower]+ or else [^\r\n\p{L}\p{N}]?[upper]+[lower]* at i, where a
// character of class c and n bytes is. It returns the end, or 0.
func casedWord(s string, i, end int, c class, n int) int {
	if c&(classNewline|classLetter|classNumber) == 0 {
		// Try with the optional first character, then without it, because a mark is also upper and lower.
		if j := upperLower(s, i+n, end); j > 0 {
			return j
		}
		if c&classMark != 0 {
			if j := upperLower(s, i, end); j > 0 {
				return j
			}
		}
		if j := skip(s, i+n, end, classUpper); j > i+n {
			return j
		}
		if c&classMark != 0 {
			return skip(s, i, end, classUpper)
		}
		return 0
	}
	if c&classLetter == 0 {
		return 0
	}
	if j := upperLower(s, i, end); j > 0 {
		return j
	}
	return skip(s, i, end, classUpper)
}

// scanO200K scans regexO200K and regexTekken, which differ in the digits of a number and in contractions.
func scanO200K(digits int, contractions bool) scanner {
	return func(s string, i, end int) int {
		c, n := classAt(s, i)
		if j := casedWord(s, i, end, c, n); j > i {
			if contractions {
				if k := contraction(s, j, end); k > 0 {
					return k
				}
			}
			return j
		}
		if c&classNumber != 0 {
			return skipNumber(s, i, n, end, digits)
		}
		j := i
		if s[i] == ' ' {
			j++
		}
		if k := skipNot(s, j, end, classSpace|classLetter|classNumber); k > j {
			for k < end && (s[k] == '\r' || s[k] == '\n' || s[k] == '/') {
				k++
			}
			return k
		}
		return space(s, i, end, classNewline)
	}
}

// scanDeepSeek3 matches regexDeepSeek3 at i. It returns -1 where that expression matches nothing.
func scanDeepSeek3(s string, i, end int) int {
	c, n := classAt(s, i)
	if c&classASCIIPunct != 0 && i+1 < end && s[i+1] < 0x80 && asciiClass[s[i+1]]&classASCII != 0 {
		return skip(s, i+1, end, classASCII)
	}
	const word = classLetter | classMark
	if c&(classNewline|classSymbol) == 0 { // the optional first character, or the first of the word
		if j := skip(s, i+n, end, word); j > i+n || c&word != 0 {
			return j
		}
	}
	j := i
	if s[i] == ' ' {
		j++
	}
	if k := skip(s, j, end, classSymbol); k > j {
		return skip(s, k, end, classNewline)
	}
	if c&classSpace != 0 {
		return space(s, i, end, classNewline)
	}
	return -1
}

// scanDeepSeek returns the end of the piece that starts at s[i], and the end of the part that contains it. It first
// cuts out numbers, then runs of CJK. Then it applies the third expression to each part alone, CJK runs included. Text
// between two matches is a piece too. part is the second result for the piece before, or i for the first piece.
func scanDeepSeek(s string, i, end, part int) (int, int) {
	c, n := classAt(s, i)
	if c&classNumber != 0 {
		j := skipNumber(s, i, n, end, 3)
		return j, j
	}
	if i >= part {
		if c&classCJK != 0 {
			part = skip(s, i+n, end, classCJK)
		} else {
			part = skipNot(s, i+n, end, classNumber|classCJK)
		}
	}
	j := scanDeepSeek3(s, i, part)
	if j > 0 {
		return j, part
	}
	for i += n; i < part && scanDeepSeek3(s, i, part) < 0; i += n {
		_, n = classAt(s, i)
	}
	return i, part
}
