package tokenizer

import (
	"unsafe"

	"kvepp/kvblock"
)

// tokenTexts is a vocabulary as its file writes it. Loading asks it for the tokens of merges, three times for each of up to
// half a million; nobody asks it afterwards. The zero value is empty.
type tokenTexts struct {
	tokens []tokenText // in the order of the file, each text once
	slots  []uint64    // see index
}

type tokenText struct {
	text string
	id   kvblock.Token
}

// add adds a token. It is not found before index is called.
func (v *tokenTexts) add(text string, id kvblock.Token) {
	v.tokens = append(v.tokens, tokenText{text, id})
}

// index makes the tokens found. Of equal texts the last counts. A slot is the upper half of a text's hash and, below it, the
// text's place in tokens plus one; 0 is a free slot.
func (v *tokenTexts) index() {
	v.slots = make([]uint64, tableSize(len(v.tokens)))
	kept := 0
	for _, token := range v.tokens {
		slot, at, found := v.find(token.text)
		if found {
			v.tokens[at].id = token.id
			continue
		}
		v.tokens[kept] = token
		kept++
		v.slots[slot] = hashText(token.text)>>32<<32 | uint64(kept)
	}
	v.tokens = v.tokens[:kept]
}

// find returns a text's place in tokens; if it is not there, the slot where it would be.
func (v *tokenTexts) find(text string) (slot, at int, found bool) {
	if len(v.slots) == 0 {
		return 0, 0, false
	}
	h := hashText(text)
	mask := len(v.slots) - 1
	for i := int(h) & mask; ; i = (i + 1) & mask {
		entry := v.slots[i]
		if entry == 0 {
			return i, 0, false
		}
		if at := int(uint32(entry)) - 1; (entry^h)>>32 == 0 && v.tokens[at].text == text {
			return i, at, true
		}
	}
}

// id returns the token of a text.
func (v *tokenTexts) id(text string) (kvblock.Token, bool) {
	_, at, found := v.find(text)
	if !found {
		return 0, false
	}
	return v.tokens[at].id, true
}

// findNear is find for a text that is probably at a place or the one behind it: files have their merges in the order of what
// these make.
func (v *tokenTexts) findNear(text string, near int) (at int, found bool) {
	for at := near; at < near+2 && at < len(v.tokens); at++ {
		if v.tokens[at].text == text {
			return at, true
		}
	}
	_, at, found = v.find(text)
	return at, found
}

// alias returns bytes as a string that is valid only as long as they stay as they are.
func alias(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
