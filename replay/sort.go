package replay

import (
	"cmp"
	"errors"
	"io"
	"slices"
	"time"
)

// longestRequest is for how long Sorted waits for a request that is written at its end.
const longestRequest = 10 * time.Minute

// Sorted returns the requests of next in the order of arrival. A trace of [Dynamo] has them in the order of their ends.
// Requests that took more than 10 minutes may come too late; Run then refuses the trace. It holds the requests of the
// last 10 minutes.
func Sorted(next func() (*Request, error)) func() (*Request, error) {
	var held []*Request // by arrival
	var latest time.Duration
	var end error
	return func() (*Request, error) {
		for end == nil && (len(held) == 0 || latest <= held[0].At+longestRequest) {
			q, err := next()
			if err != nil {
				end = err
				break
			}
			latest = max(latest, q.ended)
			at, _ := slices.BinarySearchFunc(held, q.At+1, func(h *Request, t time.Duration) int {
				return cmp.Compare(h.At, t)
			})
			held = slices.Insert(held, at, q)
		}
		if len(held) == 0 || (end != nil && !errors.Is(end, io.EOF)) {
			return nil, end
		}
		q := held[0]
		held[0] = nil
		held = held[1:]
		return q, nil
	}
}
