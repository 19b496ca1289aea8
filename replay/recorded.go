package replay

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"kvepp/kvblock"
)

// Recorded is the policy that sends each request where the recording did. It obeys no queue, threshold or session.
const Recorded = "recorded"

type recorded struct{ unlearning }

func (recorded) choose(v *view) int {
	if v.served < 0 { // the request does not fit into its worker
		return v.leastRequests()
	}
	return v.served
}

// Recording is what a recording says of its fleet.
type Recording struct {
	// BlockSize is in tokens. Workers are in the order of their ids.
	BlockSize int
	Workers   []WorkerID
	// Requests is how many can be replayed, and Cached how many of these have reported cached tokens. LeftOut is how
	// many others there are: no worker is named for them.
	Requests, Cached, LeftOut int
	// Reuse: the engines found responses in their caches when the next turn of the conversation repeated them.
	Reuse bool

	numbers     map[WorkerID]int
	sample      []*Request // the first ones
	found, lost int        // responses, of those that Reuse tells of
}

// Bounds of Recording.sample. A replay of the last one, tokens of responses, takes about 0.3 s.
const maxSample, maxSampleBlocks, maxSampleOutput = 1000, 4 << 20, 1 << 20

// ReadRecording reads a recording whole. next gives its requests in the order of arrival; see [Sorted].
func ReadRecording(next func() (*Request, error)) (*Recording, error) {
	r := &Recording{numbers: map[WorkerID]int{}}
	blocks, output, separate := 0, 0, 0
	turns := r.Replayed(func() (*Request, error) {
		q, err := next()
		if err != nil {
			return nil, err
		}
		if q.Served == nil {
			r.LeftOut++
			return q, nil
		}
		blocks, output = blocks+len(q.Chain), output+q.Output
		if len(r.sample) < maxSample && blocks < maxSampleBlocks && output < maxSampleOutput {
			q.Served.sample = len(r.sample)
			as := *q
			r.sample = append(r.sample, &as)
		}
		return q, nil
	})
	for {
		q, err := turns()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		v := q.Served
		if r.BlockSize = cmp.Or(r.BlockSize, v.block); r.BlockSize != v.block {
			return nil, fmt.Errorf("the recording has blocks of %d and of %d tokens: replay its files apart",
				r.BlockSize, v.block)
		}
		if r.Requests++; v.Cached >= 0 {
			r.Cached++
		}
		if v.Prefill != v.Worker {
			separate++
		}
		if _, ok := r.numbers[v.Worker]; !ok {
			r.numbers[v.Worker] = 0
			r.Workers = append(r.Workers, v.Worker)
		}
	}
	r.Reuse = r.found > r.lost
	switch {
	case r.Requests+r.LeftOut == 0:
		return nil, errors.New("the recording has no request")
	case r.Requests == 0:
		return nil, errors.New("no request of the recording names its worker: record with kvepp serve --record")
	case separate > 0:
		return nil, fmt.Errorf("prefill workers computed the prompts of %d requests: a recording can only be repeated "+
			"if each worker computes prompt and response; leave out recorded, and set --prefill-workers", separate)
	}
	slices.SortFunc(r.Workers, func(a, b WorkerID) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.Rank, b.Rank))
	})
	return r, nil
}

// Number says which worker of the recording each engine is. Engines may also be none of them.
func (r *Recording) Number(engines []Own) error {
	clear(r.numbers)
	for i, e := range engines {
		r.numbers[e.ID] = i
	}
	for _, w := range r.Workers {
		if _, ok := r.numbers[w]; !ok {
			return fmt.Errorf("no engine is the recording's worker %v", w)
		}
	}
	return nil
}

// tail is the end of a prompt that another one may continue.
type tail struct {
	of      *Request
	session string
	locals  []kvblock.LocalHash // of prompt and response, with Recording.Reuse
	taken   bool
}

// Replayed returns the requests of next that can be repeated. A prompt that goes on where an earlier one stopped is a
// later turn of its conversation: it arrives as long after that response as in the recording, so that a faster fleet
// gets it sooner. With Reuse, it begins with the blocks of that response.
func (r *Recording) Replayed(next func() (*Request, error)) func() (*Request, error) {
	tails := map[kvblock.SequenceHash]*tail{} // by the last full block of the prompt
	var oldest []kvblock.SequenceHash
	sessions, kept, unknown := 0, 0, uint64(0)
	return func() (*Request, error) {
		q, err := next()
		for err == nil && q.Served == nil {
			q, err = next()
		}
		if err != nil {
			return nil, err
		}
		q.Served.worker = r.numbers[q.Served.Worker]
		if q.Session != "" || len(q.Chain) == 0 {
			return q, nil
		}
		var before *tail
		end := q.Chain[len(q.Chain)-1]
		for _, h := range slices.Backward(q.Chain[:len(q.Chain)-1]) {
			if t := tails[h]; t != nil && t.of.ended <= q.At {
				before = t
				break
			}
		}
		now := &tail{of: q}
		if before != nil && !before.taken {
			before.taken = true
			now.session, q.Delay = before.session, q.At-before.of.ended
			r.compare(before.of, q)
		} else {
			sessions++
			now.session = strconv.Itoa(sessions)
		}
		q.Session = now.session
		if r.Reuse {
			if before != nil {
				copy(q.Locals, before.locals)
			}
			for n := (q.Prompt + q.Output) / q.Served.block; len(q.Locals) < n; unknown++ {
				q.Locals = append(q.Locals, kvblock.LocalHash(math.MaxUint64-unknown*0x9e3779b97f4a7c15))
			}
			q.Chain, now.locals = kvblock.AppendSequenceHashes(nil, q.Locals), q.Locals
		}
		if tails[end] == nil {
			oldest = append(oldest, end)
		} else {
			kept -= len(tails[end].locals) + 1
		}
		tails[end] = now
		for kept += len(now.locals) + 1; kept > maxSessionBlocks; oldest = oldest[1:] {
			kept -= len(tails[oldest[0]].locals) + 1
			delete(tails, oldest[0])
		}
		return q, nil
	}
}

// compare notes whether a turn's engine had the response before it cached.
func (r *Recording) compare(before, q *Request) {
	v := q.Served
	if v.Worker != before.Served.Worker || before.Output < 2*v.block || v.Cached < before.Prompt-2*v.block {
		return
	}
	if v.Cached > before.Prompt+before.Output/2 {
		r.found++
	} else {
		r.lost++
	}
}
