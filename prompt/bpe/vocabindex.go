package bpe

import (
	"unsafe"

	"kvepp/kvblock"
)

// vocabIndex is a vocabulary in the order of its file. Only loading uses it.
type vocabIndex struct {
	tokens []vocabEntry   // each text once
	places map[string]int // in tokens
}

type vocabEntry struct {
	text string
	id   kvblock.Token
}

// newVocabIndex returns an empty vocabulary with room for about size tokens.
func newVocabIndex(size int) vocabIndex {
	return vocabIndex{make([]vocabEntry, 0, size), make(map[string]int, size)}
}

// add adds a token. Of equal texts the last counts.
func (v *vocabIndex) add(text string, id kvblock.Token) {
	if at, twice := v.places[text]; twice {
		v.tokens[at].id = id
		return
	}
	v.places[text] = len(v.tokens)
	v.tokens = append(v.tokens, vocabEntry{text, id})
}

// id returns the token of a text.
func (v *vocabIndex) id(text string) (kvblock.Token, bool) {
	at, found := v.places[text]
	if !found {
		return 0, false
	}
	return v.tokens[at].id, true
}

// highestID returns the highest id of the tokens; 0 without any.
func (v *vocabIndex) highestID() (highest kvblock.Token) {
	for i := range v.tokens {
		highest = max(highest, v.tokens[i].id)
	}
	return highest
}

// alias returns a string that shares the memory of b. It is valid until b changes.
func alias(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
