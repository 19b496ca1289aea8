package replay

// ordered is what a minimum heap holds.
type ordered[T any] interface{ before(T) bool }

// minimum is a heap: minimum[0] is the least. Unlike container/heap it boxes no value, which is most of the time of a
// replay's events otherwise.
type minimum[T ordered[T]] []T

func (m *minimum[T]) push(v T) {
	h := append(*m, v)
	i := len(h) - 1
	for ; i > 0; i = (i - 1) / 2 {
		up := (i - 1) / 2
		if !v.before(h[up]) {
			break
		}
		h[i] = h[up]
	}
	h[i] = v
	*m = h
}

// pop takes the least value; there must be one.
func (m *minimum[T]) pop() T {
	h := *m
	least, n := h[0], len(h)-1
	v := h[n]
	var none T
	h[n] = none
	h = h[:n]
	for i := 0; i < n; {
		down := 2*i + 1
		if down+1 < n && h[down+1].before(h[down]) {
			down++
		}
		if down >= n || !h[down].before(v) {
			h[i] = v
			break
		}
		h[i] = h[down]
		i = down
	}
	*m = h
	return least
}
