// Package ladder says where prompt tokens are lost on the way from a request to an engine's prefix cache: the hit-rate
// ladder.
//
// It owns the rungs, the causes of the losses between them, their sums for each model ([Ladder]), and the sketch that
// knows which blocks were requested before ([Seen]). It does not know workers, costs or engines: package router fills
// in a [Climb] for each request.
//
// Concurrency: a Ladder and a Seen are safe for concurrent use.
package ladder

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Rung is a stage at which prompt tokens are counted. Each rung has at most the tokens of the one before; only
// Delivered, which the engine reports, may have more.
type Rung uint8

// The rungs, from the top.
const (
	Prompt    Rung = iota // all prompt tokens
	Reusable              // requested before, by any request: what an unlimited cache would have
	Fleet                 // cached by some worker of the model
	Eligible              // cached by some candidate
	Chosen                // cached by the chosen worker
	Delivered             // reported by the engine as read from its cache
	Rungs                 // how many there are
)

var rungNames = [Rungs]string{"prompt", "reusable", "fleet", "eligible", "chosen", "delivered"}

// String returns the rung's name in metrics and JSON.
func (r Rung) String() string { return rungNames[r] }

// Cause is why tokens did not reach the next rung.
type Cause uint8

// The causes, in the order of the rungs that they separate.
const (
	BlocksUnknown Cause = iota // kvepp does not know the prompt's token ids
	FirstTime                  // no request had these tokens before
	OtherSalt                  // only requests with another cache salt, tenant or adapter had them before
	NotMatched                 // the mode of routing leaves the index out of the choice
	NoEvents                   // the worker sends no KV events and nothing is predicted for it
	Evicted                    // requested before, cached by no worker now
	Unusable                   // the blocks are there, without what a hybrid model's other layers need
	Role                       // a worker that has them takes no such request: role, pairing, or the proxy's subset
	Pinned                     // the request names another worker
	Taints                     // a worker that has them lacks a taint that the request requires
	Cordoned                   // a worker that has them is cordoned
	Ejected                    // a worker that has them is ejected
	Busy                       // a worker that has them is above a busy threshold
	Session                    // the request's session is bound to another worker
	NoAffinity                 // as the next three or Random, and the request names a session that kvepp does not keep
	Load                       // a candidate that has them has more active blocks
	Waiting                    // a candidate that has them has more prompt tokens to compute first
	Tier                       // a candidate has them in host memory or on disk, where they count less
	Preference                 // a preferred taint, or a trial of an endpoint, decides for another candidate
	OtherPicker                // in shadow, the picker in service chose another worker
	Random                     // the temperature, or a tie, decides for another candidate
	NotConfirmed               // the response does not report cached tokens
	IndexWrong                 // the engine reports fewer than the index has
	Causes                     // how many there are
)

var causeNames = [Causes]string{
	"blocks_unknown", "first_time", "other_salt", "not_matched", "no_events", "evicted", "unusable", "role", "pinned",
	"taints", "cordoned", "ejected", "busy", "session", "no_affinity", "load", "waiting", "tier",
	"preference", "other_picker", "random", "not_confirmed", "index_wrong",
}

// String returns the cause's name in metrics and JSON.
func (c Cause) String() string { return causeNames[c] }

// Below returns the rung that the tokens did not reach.
func (c Cause) Below() Rung {
	switch {
	case c <= OtherSalt:
		return Reusable
	case c <= Unusable:
		return Fleet
	case c <= Session:
		return Eligible
	case c <= Random:
		return Chosen
	}
	return Delivered
}

// Climb is one request on the ladder. The zero value is a request whose tokens are not known.
type Climb struct {
	Model string
	// Tokens counts the prompt tokens of each rung. Those of Delivered are -1 if the response does not report them.
	Tokens [Rungs]int
	// Known says that the prompt's blocks are known. Otherwise Tokens[Prompt] may be an estimate, and the others are 0.
	Known bool
	// OtherSalt counts, of the tokens that are not reusable, those that requests with another salt or adapter had.
	OtherSalt int
	// Unusable counts, of the reusable tokens that are not in the fleet, those that a hybrid model cannot reuse.
	Unusable int
	// NotInFleet, NotEligible and NotChosen are the causes of the losses before these rungs.
	NotInFleet, NotEligible, NotChosen Cause
}

// Losses returns the tokens lost by cause, and how many more the engine delivered than the chosen worker was known to
// have. The losses and the delivered tokens, less these, add up to the prompt's.
func (c *Climb) Losses() (lost [Causes]int, unpredicted int) {
	t := &c.Tokens
	if !c.Known {
		lost[BlocksUnknown] = t[Prompt]
		return lost, max(t[Delivered], 0)
	}
	lost[OtherSalt] = min(c.OtherSalt, t[Prompt]-t[Reusable])
	lost[FirstTime] = t[Prompt] - t[Reusable] - lost[OtherSalt]
	lost[Unusable] = min(c.Unusable, t[Reusable]-t[Fleet])
	lost[c.NotInFleet] += t[Reusable] - t[Fleet] - lost[Unusable]
	lost[c.NotEligible] += t[Fleet] - t[Eligible]
	lost[c.NotChosen] += t[Eligible] - t[Chosen]
	switch d := t[Delivered]; {
	case d < 0:
		lost[NotConfirmed] = t[Chosen]
	case d < t[Chosen]:
		lost[IndexWrong] = t[Chosen] - d
	default:
		unpredicted = d - t[Chosen]
	}
	return lost, unpredicted
}

// Fit makes each rung at most the one before, and at least 0.
func (c *Climb) Fit() {
	t := &c.Tokens
	t[Prompt] = max(t[Prompt], 0)
	for r := Reusable; r < Delivered; r++ {
		t[r] = min(max(t[r], 0), t[r-1])
	}
	t[Delivered] = min(max(t[Delivered], -1), t[Prompt])
}

// Sum is the ladder of one model, or of all: tokens since the start.
type Sum struct {
	Model       string // empty: all models
	Requests    uint64
	Tokens      [Rungs]uint64
	Lost        [Causes]uint64
	Unpredicted uint64 // delivered, but not expected of the chosen worker
}

// Ladder sums the climbs of each model. Models are few: the caller gives the names that the operator or an engine gave.
type Ladder struct {
	models sync.Map // model -> *sums
}

type sums struct {
	requests, unpredicted atomic.Uint64
	tokens                [Rungs]atomic.Uint64
	lost                  [Causes]atomic.Uint64
}

// Init makes a model's sums exist before its first request.
func (l *Ladder) Init(model string) { l.of(model) }

func (l *Ladder) of(model string) *sums {
	if s, ok := l.models.Load(model); ok {
		return s.(*sums)
	}
	s, _ := l.models.LoadOrStore(strings.Clone(model), new(sums))
	return s.(*sums)
}

// Add counts a request that has ended.
func (l *Ladder) Add(c *Climb) {
	c.Fit()
	lost, unpredicted := c.Losses()
	s := l.of(c.Model)
	s.requests.Add(1)
	for r, n := range c.Tokens {
		if n > 0 {
			s.tokens[r].Add(uint64(n))
		}
	}
	for cause, n := range lost {
		if n > 0 {
			s.lost[cause].Add(uint64(n))
		}
	}
	s.unpredicted.Add(uint64(unpredicted))
}

// Sums returns the ladder of each model, ordered by name.
func (l *Ladder) Sums() []Sum {
	var all []Sum
	l.models.Range(func(model, value any) bool {
		s := value.(*sums)
		sum := Sum{Model: model.(string), Requests: s.requests.Load(), Unpredicted: s.unpredicted.Load()}
		for r := range sum.Tokens {
			sum.Tokens[r] = s.tokens[r].Load()
		}
		for c := range sum.Lost {
			sum.Lost[c] = s.lost[c].Load()
		}
		all = append(all, sum)
		return true
	})
	slices.SortFunc(all, func(a, b Sum) int { return strings.Compare(a.Model, b.Model) })
	return all
}

// Total adds up the ladders of all models.
func Total(all []Sum) (total Sum) {
	for i := range all {
		s := &all[i]
		total.Requests += s.Requests
		total.Unpredicted += s.Unpredicted
		for r, n := range s.Tokens {
			total.Tokens[r] += n
		}
		for c, n := range s.Lost {
			total.Lost[c] += n
		}
	}
	return total
}
