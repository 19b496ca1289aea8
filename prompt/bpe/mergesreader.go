package bpe

import (
	"bytes"
	"fmt"

	"kvepp/kvblock"
)

// merge is a pair of tokens and the token that they become.
type merge struct{ left, right, into kvblock.Token }

// mergesReader looks up the tokens of merges while it reads them. Nearly every lookup in the vocabulary is a cache
// miss. The reader therefore collects some merges and touches the memory of all of them before the lookups, so that the
// misses overlap.
type mergesReader struct {
	vocab   *vocabIndex
	merges  []merge // by rank
	made    int     // the place in vocab of the last merge's result
	waiting [64]writtenMerge
	count   int    // how many of waiting are in use
	text    []byte // the texts of waiting, concatenated
	touched uint64 // keeps the compiler from removing the touches
}

// writtenMerge is a merge of text[start:middle] with text[middle:end].
type writtenMerge struct {
	start, middle, end int
	hash               [2]uint64
}

// readMerges reads merges in both forms: ["a b"] and [["a","b"]].
func readMerges(r *jsonReader, vocab *vocabIndex) ([]merge, error) {
	m := &mergesReader{vocab: vocab, merges: make([]merge, 0, min(len(r.data)/48, 1<<20))}
	entries := 0
	err := r.array(func() error {
		if m.count == len(m.waiting) {
			if err := m.resolve(); err != nil {
				return err
			}
		}
		w := &m.waiting[m.count]
		m.count++
		w.start = len(m.text)
		entries++
		if r.peek() == '[' {
			parts := 0
			if err := r.array(func() error {
				part, err := r.text()
				m.text = append(m.text, part...)
				if parts++; parts == 1 {
					w.middle = len(m.text)
				}
				return err
			}); err != nil {
				return err
			}
			if parts != 2 {
				return fmt.Errorf("entry %d has %d parts instead of two", entries-1, parts)
			}
		} else {
			line, err := r.text()
			if err != nil {
				return err
			}
			space := bytes.IndexByte(line, ' ')
			if space < 0 || bytes.IndexByte(line[space+1:], ' ') >= 0 {
				return fmt.Errorf("entry %d, %q, is not two parts with a space between", entries-1, line)
			}
			w.middle = w.start + space
			m.text = append(append(m.text, line[:space]...), line[space+1:]...)
		}
		w.end = len(m.text)
		return nil
	})
	if err == nil {
		err = m.resolve()
	}
	if err != nil {
		return nil, fmt.Errorf("merges: %w", err)
	}
	return m.merges, nil
}

// resolve looks up the tokens of the waiting merges.
func (m *mergesReader) resolve() error {
	waiting := m.waiting[:m.count]
	all := alias(m.text)
	for i := range waiting {
		w := &waiting[i]
		w.hash = [2]uint64{hashText(all[w.start:w.middle]), hashText(all[w.middle:w.end])}
	}
	for touch := range 3 { // slot, token, text: each names the address of the next
		for i := range waiting {
			for _, hash := range waiting[i].hash {
				m.touched += m.vocab.touch(hash, touch)
			}
		}
	}
	for i := range waiting {
		w := &waiting[i]
		left, okLeft := m.vocab.find(all[w.start:w.middle], w.hash[0])
		right, okRight := m.vocab.find(all[w.middle:w.end], w.hash[1])
		into, okInto := m.vocab.findNear(all[w.start:w.end], m.made)
		if !okLeft || !okRight || !okInto {
			return fmt.Errorf("%q and %q, or what they merge into, are not in vocab",
				all[w.start:w.middle], all[w.middle:w.end])
		}
		m.made = into
		m.merges = append(m.merges, merge{m.vocab.tokens[left].id, m.vocab.tokens[right].id, m.vocab.tokens[into].id})
	}
	m.count, m.text = 0, m.text[:0]
	return nil
}
