package tokenizer

import (
	"strings"
	"unicode/utf8"

	"kvepp/kvblock"
)

// addedToken is a token that is cut out of the text before anything else looks at it, such as <|im_start|>.
type addedToken struct {
	id         kvblock.Token
	content    string // as it is matched: normalized, if the token asks for that
	singleWord bool   // only where no word character is next to it
	stripLeft  bool   // takes the white space before it
	stripRight bool   // and after it
}

// addedTokens finds added tokens in text, leftmost first and the longest of those that start together: a trie over
// bytes. nil finds none.
type addedTokens struct {
	root     [256]int32 // node after the first byte; 0: none
	onlyByte int        // the only first byte, so that finding candidates is one IndexByte; else -1
	children map[trieEdge]int32
	token    []*addedToken // by node: the token that ends there
}

type trieEdge struct {
	node int32
	next byte
}

func newAddedTokens(tokens []addedToken) *addedTokens {
	if len(tokens) == 0 {
		return nil
	}
	t := &addedTokens{onlyByte: -1, children: map[trieEdge]int32{}, token: []*addedToken{nil}}
	for i := range tokens {
		content := tokens[i].content
		if content == "" {
			continue
		}
		node := t.root[content[0]]
		if node == 0 {
			node = t.newNode()
			t.root[content[0]] = node
		}
		for j := 1; j < len(content); j++ {
			edge := trieEdge{node, content[j]}
			child := t.children[edge]
			if child == 0 {
				child = t.newNode()
				t.children[edge] = child
			}
			node = child
		}
		if t.token[node] == nil { // of equal contents the first counts
			t.token[node] = &tokens[i]
		}
	}
	firstBytes := 0
	for b, node := range t.root {
		if node != 0 {
			firstBytes++
			t.onlyByte = b
		}
	}
	if firstBytes != 1 {
		t.onlyByte = -1
	}
	return t
}

func (t *addedTokens) newNode() int32 {
	t.token = append(t.token, nil)
	return int32(len(t.token) - 1)
}

// find returns the first added token in s at or after i, and where it starts; nil if there is none.
func (t *addedTokens) find(s string, i int) (int, *addedToken) {
	for ; i < len(s); i++ {
		if t.onlyByte >= 0 {
			n := strings.IndexByte(s[i:], byte(t.onlyByte))
			if n < 0 {
				break
			}
			i += n
		}
		node := t.root[s[i]]
		if node == 0 {
			continue
		}
		longest := t.token[node]
		for j := i + 1; j < len(s); j++ {
			if node = t.children[trieEdge{node, s[j]}]; node == 0 {
				break
			}
			if t.token[node] != nil {
				longest = t.token[node]
			}
		}
		if longest != nil {
			return i, longest
		}
	}
	return len(s), nil
}

// split calls text for each stretch of s between added tokens and token for each added token, in order. s must be valid
// UTF-8.
func (t *addedTokens) split(s string, text func(start, end int), token func(id kvblock.Token)) {
	done := 0
	if t != nil {
		for i := 0; ; {
			start, found := t.find(s, i)
			if found == nil {
				break
			}
			end := start + len(found.content)
			i = end
			if found.singleWord && (wordEndsAt(s, start) || wordStartsAt(s, end)) {
				continue
			}
			if found.stripLeft {
				start = trimSpaceLeft(s, done, start)
			}
			if found.stripRight {
				end = skip(s, end, len(s), classSpace)
			}
			if start > done {
				text(done, start)
			}
			token(found.id)
			// White space taken by stripRight can itself hold an added token; Hugging Face tokenizers emits that too.
			done = end
		}
	}
	if done < len(s) {
		text(done, len(s))
	}
}

func wordEndsAt(s string, i int) bool {
	if i == 0 {
		return false
	}
	r, _ := utf8.DecodeLastRuneInString(s[:i])
	return classOfRune(r)&classWord != 0
}

func wordStartsAt(s string, i int) bool {
	if i >= len(s) {
		return false
	}
	c, _ := classAt(s, i)
	return c&classWord != 0
}

// trimSpaceLeft returns where the white space that ends at i begins, not before from.
func trimSpaceLeft(s string, from, i int) int {
	for i > from {
		r, n := utf8.DecodeLastRuneInString(s[from:i])
		if classOfRune(r)&classSpace == 0 {
			break
		}
		i -= n
	}
	return i
}
