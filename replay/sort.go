package replay

import (
	"errors"
	"io"
	"time"
)

// longestRequest is for how long Sorted waits for a request that is written at its end.
const longestRequest = 10 * time.Minute

// Sorted returns the requests of next in the order of arrival. A trace of [Dynamo] has them in the order of their ends.
// It holds the requests of the last 10 minutes, and no more of them than may be open at once. A request that comes
// after that comes too late; Run then refuses the trace.
func Sorted(next func() (*Request, error)) func() (*Request, error) {
	var held minimum[comer]
	var latest time.Duration
	var end error
	read, blocks := 0, 0
	return func() (*Request, error) {
		for end == nil && (len(held) == 0 || latest <= held[0].At+longestRequest &&
			len(held) < maxOpen && blocks < maxOpenBlocks) {
			q, err := next()
			if err != nil {
				end = err
				break
			}
			latest = max(latest, q.ended)
			blocks += len(q.Chain)
			held.push(comer{q, read})
			read++
		}
		if len(held) == 0 || (end != nil && !errors.Is(end, io.EOF)) {
			return nil, end
		}
		q := held.pop().Request
		blocks -= len(q.Chain)
		return q, nil
	}
}

// comer is a request, and how many were read before it.
type comer struct {
	*Request
	order int
}

func (a comer) before(b comer) bool { return a.At < b.At || a.At == b.At && a.order < b.order }
