package bpe

import (
	"bytes"
	"fmt"

	"kvepp/kvblock"
)

// merge is a pair of tokens and the token that they become.
type merge struct{ left, right, into kvblock.Token }

// readMerges reads merges in both forms: ["a b"] and [["a","b"]]. They are ordered by rank.
func readMerges(r *jsonReader, vocab *vocabIndex) ([]merge, error) {
	merges := make([]merge, 0, min(len(r.data)/48, 1<<20))
	var text []byte // of the merge's result
	err := r.array(func() error {
		middle := 0
		text = text[:0]
		if r.peek() == '[' {
			parts := 0
			if err := r.array(func() error {
				part, err := r.text()
				text = append(text, part...)
				if parts++; parts == 1 {
					middle = len(text)
				}
				return err
			}); err != nil {
				return err
			}
			if parts != 2 {
				return fmt.Errorf("entry %d has %d parts instead of two", len(merges), parts)
			}
		} else {
			line, err := r.text()
			if err != nil {
				return err
			}
			middle = bytes.IndexByte(line, ' ')
			if middle < 0 || bytes.IndexByte(line[middle+1:], ' ') >= 0 {
				return fmt.Errorf("entry %d, %q, is not two parts with a space between", len(merges), line)
			}
			text = append(append(text, line[:middle]...), line[middle+1:]...)
		}
		left, okLeft := vocab.id(alias(text[:middle]))
		right, okRight := vocab.id(alias(text[middle:]))
		into, okInto := vocab.id(alias(text))
		if !okLeft || !okRight || !okInto {
			return fmt.Errorf("%q and %q, or what they merge into, are not in vocab", text[:middle], text[middle:])
		}
		merges = append(merges, merge{left, right, into})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("merges: %w", err)
	}
	return merges, nil
}
