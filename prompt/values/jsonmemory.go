package values

import "fmt"

// The memory of values, in bytes, rounded up to Go's size classes.
const (
	anyBytes    = 16
	stringBytes = 16 // the header of a boxed string
	numberBytes = 8
	dictBytes   = 56
	listBytes   = 32
	bigIntBytes = 96

	// mostOfSlab is the most values of a slab.
	mostOfSlab = 256
)

// indexBytes is the most memory of the index of a dict of n keys: four bytes a slot, for the table and its predecessor
// of half the size.
func indexBytes(n int) int { return 4 * 3 * max(leastSlots, 2*n) }

// jsonMemory allocates a parser's values and counts their bytes. Values of one type are allocated together, in slabs.
// Repeated short strings are shared, and so are the key lists of objects with the same keys.
type jsonMemory struct {
	taken, allowance int // bytes
	// decoded is the free rest of the buffer for strings with escapes; see room.
	decoded []byte

	dicts slab[Dict]
	lists slab[List]
	slots slab[any]

	texts  [64]any   // short strings by hash; the latest of each hash
	shapes [16][]any // key lists by hash
}

// slab is a block of memory for several values of one type.
type slab[T any] struct {
	left []T // free
	size int // of the latest block
}

// next returns memory for n values.
func (s *slab[T]) next(m *jsonMemory, n, bytes int) []T {
	if n > len(s.left) {
		if n > mostOfSlab/4 {
			m.take(n * bytes)
			return make([]T, n)
		}
		s.size = min(max(n, 2*s.size), mostOfSlab)
		m.take(s.size * bytes)
		s.left = make([]T, s.size)
	}
	taken := s.left[:n:n]
	s.left = s.left[n:]
	return taken
}

// take counts memory that is about to be allocated.
func (m *jsonMemory) take(bytes int) {
	if m.taken += bytes; m.taken > m.allowance {
		panic(failure{fmt.Errorf("%w: more than %d bytes", ErrTooManyValues, m.allowance)})
	}
}

// anys returns a slice of n values; nil if n is 0.
func (m *jsonMemory) anys(n int) []any {
	if n == 0 {
		return nil
	}
	return m.slots.next(m, n, anyBytes)
}

func (m *jsonMemory) newDict(keys, values []any) *Dict {
	d := m.dicts.next(m, 1, dictBytes)
	d[0].keys, d[0].values = keys, values
	return &d[0]
}

func (m *jsonMemory) newList(items []any) *List {
	l := m.lists.next(m, 1, listBytes)
	l[0].Items = items
	return &l[0]
}

// longestShared is the longest string that is shared with an earlier equal one, in bytes.
const longestShared = 24

// box returns a string as a value.
func (m *jsonMemory) box(s string) any {
	n := len(s)
	if n > longestShared {
		m.take(stringBytes)
		return s
	}
	if n == 0 {
		return ""
	}
	slot := &m.texts[(n*5+int(s[0])*7+int(s[n-1])*3+int(s[n/2]))%len(m.texts)]
	if known, ok := (*slot).(string); ok && known == s {
		return *slot
	}
	v := boxed(s)
	*slot = v
	m.take(stringBytes)
	return v
}

// sharedKeys returns the keys of an object, given as alternating keys and values. Objects can share a key list because
// it is never changed in place: append to it makes a copy.
func (m *jsonMemory) sharedKeys(both []any) []any {
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
		same := 0
		for same < n && (*shape)[same] == both[2*same] {
			same++
		}
		if same == n {
			return *shape
		}
	}
	keys := m.anys(n)
	for i := range keys {
		keys[i] = both[2*i]
	}
	*shape = keys
	return keys
}
