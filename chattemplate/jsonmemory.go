package chattemplate

import "fmt"

// What values take, in bytes. Where Go rounds up, so do these.
const (
	anyBytes    = 16
	stringBytes = 16 // the box of a string: where it is and how long
	numberBytes = 8
	dictBytes   = 56
	listBytes   = 32
	bigIntBytes = 96

	// mostOfSlab is for how many values room is made at once, at most.
	mostOfSlab = 256
)

// indexBytes is what the index of a dict of n keys takes, at most: four bytes a slot, and beside the table the half as
// long one before it.
func indexBytes(n int) int { return 4 * 3 * max(leastSlots, 2*n) }

// memory is where a parser's values are, and what they take. Values of a kind lie beside each other, in slabs. Short
// strings that come again are there once, and so are the keys of objects that have the same keys.
type memory struct {
	taken, allowance int // bytes
	// decoded is what is left of the memory for strings with escapes; see room.
	decoded []byte

	dicts slab[Dict]
	lists slab[List]
	slots slab[any]

	texts  [64]any   // short strings, by their hash; the latest with each
	shapes [16][]any // keys, by their hash
}

// slab is what is left of room for values.
type slab[T any] struct {
	left []T
	size int // of the latest
}

// next returns room for n values.
func (s *slab[T]) next(m *memory, n, bytes int) ([]T, error) {
	if n > len(s.left) {
		if n > mostOfSlab/4 {
			if err := m.take(n * bytes); err != nil {
				return nil, err
			}
			return make([]T, n), nil
		}
		s.size = min(max(n, 2*s.size), mostOfSlab)
		if err := m.take(s.size * bytes); err != nil {
			return nil, err
		}
		s.left = make([]T, s.size)
	}
	some := s.left[:n:n]
	s.left = s.left[n:]
	return some, nil
}

// take counts memory that is about to be allocated.
func (m *memory) take(bytes int) error {
	if m.taken += bytes; m.taken > m.allowance {
		return fmt.Errorf("%w: more than %d bytes", ErrTooManyValues, m.allowance)
	}
	return nil
}

// anys returns a slice of n values, nil if n is 0.
func (m *memory) anys(n int) ([]any, error) {
	if n == 0 {
		return nil, nil
	}
	return m.slots.next(m, n, anyBytes)
}

func (m *memory) newDict(keys, values []any) (*Dict, error) {
	d, err := m.dicts.next(m, 1, dictBytes)
	if err != nil {
		return nil, err
	}
	d[0].keys, d[0].values = keys, values
	return &d[0], nil
}

func (m *memory) newList(items []any) (*List, error) {
	l, err := m.lists.next(m, 1, listBytes)
	if err != nil {
		return nil, err
	}
	l[0].Items = items
	return &l[0], nil
}

// longestShared is the longest string that is looked for among those that came before, in bytes.
const longestShared = 24

// box returns a string as a value.
func (m *memory) box(s string) (any, error) {
	n := len(s)
	if n > longestShared {
		return s, m.take(stringBytes)
	}
	if n == 0 {
		return "", nil
	}
	slot := &m.texts[(n*5+int(s[0])*7+int(s[n-1])*3+int(s[n/2]))%len(m.texts)]
	if known, ok := (*slot).(string); ok && known == s {
		return *slot, nil
	}
	v := boxed(s)
	*slot = v
	return v, m.take(stringBytes)
}

// sharedKeys returns the keys of an object that is given as keys and values in turn. Nobody changes keys in their
// place: a dict that gets another one gets a copy of them.
func (m *memory) sharedKeys(both []any) ([]any, error) {
	n := len(both) / 2
	hash := n
	for i := 0; i < len(both); i += 2 {
		key, _ := both[i].(string)
		hash = hash*3 + len(key)
		if key != "" {
			hash += int(key[0])
		}
	}
	shape := &m.shapes[uint(hash)%uint(len(m.shapes))]
	if len(*shape) == n {
		same := true
		for i, key := range *shape {
			if key != both[2*i] {
				same = false
				break
			}
		}
		if same {
			return *shape, nil
		}
	}
	keys, err := m.anys(n)
	for i := range keys {
		keys[i] = both[2*i]
	}
	*shape = keys
	return keys, err
}
