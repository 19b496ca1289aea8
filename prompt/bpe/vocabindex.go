package bpe

import (
	"unsafe"

	"kvepp/kvblock"
)

// vocabIndex is a vocabulary in the order of its file, with a hash table from text to token. Only loading uses it:
// three lookups for each of up to half a million merges. The zero value is empty.
type vocabIndex struct {
	tokens []vocabEntry // in the order of the file, each text once
	slots  []uint64     // see index
}

type vocabEntry struct {
	text string
	id   kvblock.Token
}

// add adds a token. find returns it only after a call of index.
func (v *vocabIndex) add(text string, id kvblock.Token) {
	v.tokens = append(v.tokens, vocabEntry{text, id})
}

// index builds the hash table. Of equal texts the last counts. A slot holds the upper half of a text's hash and, below
// it, the text's index in tokens plus one; 0 is a free slot.
func (v *vocabIndex) index() {
	v.slots = make([]uint64, tableSize(len(v.tokens)))
	kept := 0
	for _, token := range v.tokens {
		hash := hashText(token.text)
		slot := v.search(token.text, hash)
		if entry := v.slots[slot]; entry != 0 {
			v.tokens[place(entry)].id = token.id
			continue
		}
		v.tokens[kept] = token
		kept++
		v.slots[slot] = hash>>32<<32 | uint64(kept)
	}
	v.tokens = v.tokens[:kept]
}

// place returns the index in tokens that a used slot names.
func place(entry uint64) int { return int(uint32(entry)) - 1 }

// search returns the slot of a text, or the free slot where it belongs. index must have been called.
func (v *vocabIndex) search(text string, hash uint64) int {
	mask := len(v.slots) - 1
	for slot := int(hash) & mask; ; slot = (slot + 1) & mask {
		entry := v.slots[slot]
		if entry == 0 || (entry^hash)>>32 == 0 && v.tokens[place(entry)].text == text {
			return slot
		}
	}
}

// touch reads the memory that find will read first for a hash. what is 0 for the slot, 1 for the token that the slot
// names, or 2 for that token's text. Touching the same level for many hashes in a row overlaps their cache misses.
func (v *vocabIndex) touch(hash uint64, what int) uint64 {
	entry := v.slots[int(hash)&(len(v.slots)-1)]
	if what == 0 || entry == 0 {
		return entry
	}
	token := &v.tokens[place(entry)]
	if what == 1 || token.text == "" {
		return uint64(token.id)
	}
	return uint64(token.text[0])
}

// find returns a text's index in tokens. hash is its hashText.
func (v *vocabIndex) find(text string, hash uint64) (at int, found bool) {
	if len(v.slots) == 0 {
		return 0, false
	}
	entry := v.slots[v.search(text, hash)]
	return place(entry), entry != 0
}

// id returns the token of a text.
func (v *vocabIndex) id(text string) (kvblock.Token, bool) {
	at, found := v.find(text, hashText(text))
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

// findNear is find for a text that is probably at this index or the next: files list merges in the order of their
// results.
func (v *vocabIndex) findNear(text string, near int) (at int, found bool) {
	for at := near; at < near+2 && at < len(v.tokens); at++ {
		if v.tokens[at].text == text {
			return at, true
		}
	}
	return v.find(text, hashText(text))
}

// alias returns a string that shares the memory of b. It is valid until b changes.
func alias(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
