package bpe

import (
	"strings"
	"unicode/utf8"

	"kvepp/kvblock"
)

// addedToken is a token that is cut out of the text before any other step, such as <|im_start|>.
type addedToken struct {
	id         kvblock.Token
	content    string // as it is matched: normalized, if the token asks for that
	singleWord bool   // only where no word character is next to it
	stripLeft  bool   // takes the white space before it
	stripRight bool   // and after it
}

// addedTokens is a trie over bytes that finds added tokens in text: the leftmost, and of those at one place the
// longest. A nil *addedTokens finds none.
type addedTokens struct {
	tokens   []addedToken
	root     [256]int32 // node after the first byte; 0: none
	onlyByte int        // the only first byte, so that finding candidates is one IndexByte; else -1
	nodes    []addedNode
	edges    []addedEdge // those of a node are together
}

// addedNode is a common prefix of tokens.
type addedNode struct {
	token       int32 // index of the token that ends here; -1: none
	edges, more int32 // edges[edges:edges+more] lead on
}

type addedEdge struct {
	node int32
	next byte
}

// newAddedTokens takes tokens whose contents differ.
func newAddedTokens(tokens []addedToken) *addedTokens {
	if len(tokens) == 0 {
		return nil
	}
	t := &addedTokens{tokens: tokens, onlyByte: -1, nodes: []addedNode{{token: -1}}}
	children := [][]addedEdge{nil} // by node
	newNode := func() int32 {
		t.nodes = append(t.nodes, addedNode{token: -1})
		children = append(children, nil)
		return int32(len(t.nodes) - 1)
	}
	firstBytes := 0
	for i := range tokens {
		content := tokens[i].content
		if content == "" {
			continue
		}
		node := t.root[content[0]]
		if node == 0 {
			node = newNode()
			t.root[content[0]] = node
			firstBytes++
			t.onlyByte = int(content[0])
		}
	next:
		for j := 1; j < len(content); j++ {
			for _, edge := range children[node] {
				if edge.next == content[j] {
					node = edge.node
					continue next
				}
			}
			child := newNode()
			children[node] = append(children[node], addedEdge{child, content[j]})
			node = child
		}
		t.nodes[node].token = int32(i)
	}
	for node, edges := range children {
		t.nodes[node].edges, t.nodes[node].more = int32(len(t.edges)), int32(len(edges))
		t.edges = append(t.edges, edges...)
	}
	if firstBytes != 1 {
		t.onlyByte = -1
	}
	return t
}

// step returns the node that a byte leads to from another; 0: none.
func (t *addedTokens) step(node int32, next byte) int32 {
	n := &t.nodes[node]
	for _, edge := range t.edges[n.edges : n.edges+n.more] {
		if edge.next == next {
			return edge.node
		}
	}
	return 0
}

// find returns the first added token in s at or after i, and where it starts; nil if there is none.
func (t *addedTokens) find(s string, i int) (int, *addedToken) {
	for i = t.candidate(s, i); i < len(s); i = t.candidate(s, i+1) {
		node := t.root[s[i]]
		longest := t.nodes[node].token
		for j := i + 1; j < len(s); j++ {
			if node = t.step(node, s[j]); node == 0 {
				break
			}
			if token := t.nodes[node].token; token >= 0 {
				longest = token
			}
		}
		if longest >= 0 {
			return i, &t.tokens[longest]
		}
	}
	return len(s), nil
}

// candidate returns the first place from i on with a byte that begins a token, or len(s).
func (t *addedTokens) candidate(s string, i int) int {
	if t.onlyByte >= 0 {
		n := strings.IndexByte(s[i:], byte(t.onlyByte))
		if n < 0 {
			return len(s)
		}
		return i + n
	}
	for ; i+8 <= len(s); i += 8 {
		w := load64(s, i, 8)
		if t.root[byte(w)]|t.root[byte(w>>8)]|t.root[byte(w>>16)]|t.root[byte(w>>24)]|
			t.root[byte(w>>32)]|t.root[byte(w>>40)]|t.root[byte(w>>48)]|t.root[byte(w>>56)] != 0 {
			break
		}
	}
	for i < len(s) && t.root[s[i]] == 0 {
		i++
	}
	return i
}

// addedCuts iterates over the added tokens of a text.
type addedCuts struct {
	added *addedTokens
	text  string
	from  int // where the search for the next token begins
	done  int // the end of the text already returned
}

// cuts starts an iteration over text, which must be valid UTF-8.
func (t *addedTokens) cuts(text string) addedCuts { return addedCuts{added: t, text: text} }

// next returns the next added token and the text before it, text[start:end], which may be empty. At the end it returns
// nil and the rest of the text.
func (c *addedCuts) next() (start, end int, token *addedToken) {
	for c.added != nil {
		at, found := c.added.find(c.text, c.from)
		if found == nil {
			break
		}
		after := at + len(found.content)
		c.from = after
		if found.singleWord && (wordEndsAt(c.text, at) || wordStartsAt(c.text, after)) {
			continue
		}
		start, end = c.done, at
		if found.stripLeft {
			end = trimSpaceLeft(c.text, start, end)
		}
		if found.stripRight {
			after = skip(c.text, after, len(c.text), classSpace)
		}
		// White space taken by stripRight can itself hold an added token; Hugging Face tokenizers emits that too.
		c.done = after
		return start, max(start, end), found
	}
	start = c.done
	c.done = len(c.text)
	return start, max(start, len(c.text)), nil
}

// boundaries separates the tokens that always cut a text from the others. No other token overlaps a boundary: none
// begins before it and reaches into it, begins with it, or begins within it and reaches beyond it. No token of the set
// depends on its neighbours. A token that is a run of white space is not a boundary, because its end depends on the
// next characters.
func (t *addedTokens) boundaries() (boundaries, others []addedToken) {
	if t == nil {
		return nil, nil
	}
	joined := make([]bool, len(t.nodes)) // every token from this node on
	entangled := make([]bool, len(t.tokens))
	for i := range t.tokens {
		token := &t.tokens[i]
		if token.singleWord || token.stripLeft || token.stripRight {
			return t.tokens, nil
		}
		for from := range len(token.content) {
			node := t.root[token.content[from]]
			j := from + 1
			for ; node != 0; j++ {
				if j == len(token.content) { // what is left of the token begins all tokens from here on
					if from > 0 {
						joined[node] = true
					}
					break
				}
				if inside := t.nodes[node].token; inside >= 0 {
					entangled[inside] = true
				}
				node = t.step(node, token.content[j])
			}
		}
	}
	for node := range t.nodes { // a node is older than those it leads to
		n := &t.nodes[node]
		if !joined[node] {
			continue
		}
		if n.token >= 0 {
			entangled[n.token] = true
		}
		for _, edge := range t.edges[n.edges : n.edges+n.more] {
			joined[edge.node] = true
		}
	}
	for i, token := range t.tokens {
		if entangled[i] {
			others = append(others, token)
		} else {
			boundaries = append(boundaries, token)
		}
	}
	return boundaries, others
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
