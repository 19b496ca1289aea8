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
	BlockSize int        `json:"block_size"`                  // tokens
	Workers   []WorkerID `json:"workers"`                     // in the order of their ids
	Reported  int        `json:"with_reported_cached_tokens"` // requests
	// Reuse: the engines found responses in their caches when the next turn of the conversation repeated them.
	Reuse   bool   `json:"reuse_of_responses"`
	Engines string `json:"engines"` // what Fit found; lines
	Shadow

	sample      []Request // the first ones, for Replayed
	found, lost int       // responses, of those that Reuse tells of
}

// Bounds of Recording.sample. A replay of the last one, tokens of responses, takes about 0.3 s.
const maxSample, maxSampleBlocks, maxSampleOutput = 1000, 4 << 20, 1 << 20

// ReadRecording reads a recording whole. next gives its requests in the order of arrival; see [Sorted].
func ReadRecording(next func() (*Request, error)) (*Recording, error) {
	r := &Recording{}
	blocks, output := 0, 0
	turns := r.Replayed(next)
	q, err := turns()
	for ; err == nil; q, err = turns() {
		v := q.Served
		if v.Prefilled {
			return nil, errors.New("prefill workers computed prompts: a recording can only be repeated if each " +
				"worker computes prompt and response; leave out recorded, and set --prefill-workers")
		}
		if r.BlockSize = cmp.Or(r.BlockSize, v.block); v.block != r.BlockSize {
			return nil, fmt.Errorf("the recording has blocks of %d and of %d tokens: replay its files apart",
				r.BlockSize, v.block)
		}
		if v.Cached >= 0 {
			r.Reported++
		}
		if !slices.Contains(r.Workers, v.Worker) {
			r.Workers = append(r.Workers, v.Worker)
		}
		blocks, output = blocks+len(q.Chain), output+q.Output
		if len(r.sample) < maxSample && blocks < maxSampleBlocks && output < maxSampleOutput {
			again := *q
			again.Session, again.Delay = "", -1
			r.sample = append(r.sample, again)
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, err
	}
	if r.Workers == nil {
		return nil, errors.New("no request of the recording names its worker: record with kvepp serve --record")
	}
	r.Reuse = r.found > r.lost
	slices.SortFunc(r.Workers, func(a, b WorkerID) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.Rank, b.Rank))
	})
	return r, nil
}

// Replayed returns the requests of next that can be repeated. A prompt that goes on where an earlier one stopped is a
// later turn of its conversation: it arrives as long after that response as in the recording, so that a faster fleet
// gets it sooner. With Reuse, it begins with the blocks of that response.
func (r *Recording) Replayed(next func() (*Request, error)) func() (*Request, error) {
	tails := map[kvblock.SequenceHash]*Request{} // by the last full block of the prompt
	sessions, kept, unknown := 0, 0, uint64(0)
	return func() (*Request, error) {
		q, err := next()
		for err == nil && q.Served == nil {
			q, err = next()
		}
		if err != nil || q.Session != "" || len(q.Chain) == 0 {
			return q, err
		}
		var before *Request
		end := q.Chain[len(q.Chain)-1]
		for _, h := range slices.Backward(q.Chain[:len(q.Chain)-1]) {
			if t := tails[h]; t != nil && t.ended <= q.At {
				before = t
				break
			}
		}
		if before != nil && !before.continued {
			before.continued = true
			q.Session, q.Delay = before.Session, q.At-before.ended
			r.compare(before, q)
		} else {
			sessions++
			q.Session = strconv.Itoa(sessions)
		}
		if r.Reuse {
			if before != nil {
				copy(q.Locals, before.Locals)
			}
			for n := (q.Prompt + q.Output) / q.Served.block; len(q.Locals) < n; unknown++ {
				q.Locals = append(q.Locals, kvblock.LocalHash(math.MaxUint64-unknown*0x9e3779b97f4a7c15))
			}
			q.Chain = kvblock.AppendSequenceHashes(nil, q.Locals)
		}
		if kept += len(q.Locals) + 1; kept > maxSessionBlocks { // conversations that go on are taken for new ones
			clear(tails)
			kept = len(q.Locals) + 1
		}
		tails[end] = q
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
