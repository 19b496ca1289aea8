package selector

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"kvepp/pool"
	"kvepp/router/queue"
	"kvepp/scoring"
	"kvepp/serve/api"
)

// tick is how often waiting selections are checked if no load is released: reservations can expire.
const tick = time.Second

// waitingSelection is what the waiting room keeps of a selection. The selection's goroutine does not use d, which
// waitingJudge writes, until it has the turn or has left the room.
type waitingSelection struct {
	d *scratch
	q *selectRequest
	p *prepared
}

// waitingRoom holds the selections that wait for the workers of one group.
type waitingRoom struct {
	profile *queue.Profile
	*queue.Room[waitingSelection]
}

// newRoom returns the waiting room of a model's group; nil: selections never wait.
func (s *Selector) newRoom(model string) *waitingRoom {
	if s.cfg.Queue == nil {
		return nil
	}
	profile, _ := s.cfg.Queue.Profiles.Of(model)
	return &waitingRoom{profile, queue.NewRoom(s.cfg.Queue, &waitingJudge{selector: s}, tick)}
}

// waitingJudge tells the waiting room of a group which selections can go. The room's lock guards it.
type waitingJudge struct {
	selector *Selector
	snapshot *pool.Snapshot // the current workers, from Begin to End
}

func (j *waitingJudge) Begin() { j.snapshot = j.selector.pool.Acquire() }
func (j *waitingJudge) End()   { j.snapshot.Release() }

// State says whether each eligible worker has more tokens to prefill than the selection's class allows.
func (j *waitingJudge) State(c *queue.Class, w waitingSelection) queue.State {
	if j.selector.eligible(w.d, w.q, w.p.group, sessionBinding{}, j.snapshot) != nil {
		return queue.Ready // it fails with that error when it has the turn
	}
	for _, x := range w.d.workers {
		if !c.Busy(j.selector.loadBook.Load(x.Worker).PrefillTokens, x.BatchedTokens()) {
			return queue.Ready
		}
	}
	return queue.Busy
}

// queueing reports whether selections for the model can wait.
func (s *Selector) queueing(model string) bool {
	if s.cfg.Queue == nil {
		return false
	}
	profile, _ := s.cfg.Queue.Profiles.Of(model)
	return profile.Waits()
}

// rejected returns the response to a selection that left the waiting room without the turn. Source: the responses of
// dynamo.select_service.
func rejected(err error) error {
	limit := (*queue.LimitError)(nil)
	switch {
	case errors.Is(err, queue.ErrTimeout):
		return api.Refuse(http.StatusTooManyRequests, "no worker was ready for this selection in time; try again later")
	case errors.Is(err, queue.ErrFull):
		return api.Refuse(http.StatusTooManyRequests, "%v", err)
	case !errors.As(err, &limit):
		return errClientGone
	}
	return &api.Refusal{Status: http.StatusTooManyRequests,
		Text: fmt.Sprintf("router policy class %q queue %s limit reached (current=%d, limit=%d)",
			limit.Class, limit.Kind, limit.Current, limit.Limit),
		Details: map[string]any{
			"policy_class": limit.Class,
			"limit_kind":   limit.Kind,
			"current":      limit.Current,
			"limit":        limit.Limit,
		}}
}

// inTurn prepares and decides a selection, which may wait in between. class is the policy class that the request asks
// for. If inTurn returns an error, nothing is booked.
func (s *Selector) inTurn(ctx context.Context, d *scratch, q *selectRequest, id, class string) (*selection, error) {
	p, err := s.prepare(d, q, id)
	if err != nil {
		return nil, err
	}
	room := p.group.room
	if room == nil || !room.profile.Waits() || q.Advisory && id == "" {
		return s.decide(d, q, p, id)
	}
	if id != "" {
		if _, taken := s.claims.LoadOrStore(id, true); taken {
			return nil, conflict(id)
		}
		defer s.claims.Delete(id)
	}
	entry, err := s.entry(d, q, p, class)
	if err != nil {
		return nil, err
	}
	w, err := room.Enter(entry, waitingSelection{d, q, p})
	if err == nil && w != nil {
		err = room.Await(ctx, w)
	}
	if err != nil {
		return nil, rejected(err)
	}
	defer room.Pass() // also after an error or a panic
	return s.decide(d, q, p, id)
}

// errClientGone is the result if the client closed the connection. Its status appears in metrics only. Source: nginx.
var errClientGone = api.Refuse(499, "the client has gone")

// entry describes a selection for the waiting room.
func (s *Selector) entry(d *scratch, q *selectRequest, p *prepared, class string) (queue.Entry, error) {
	snapshot := s.pool.Acquire()
	defer snapshot.Release()
	if err := s.eligible(d, q, p.group, sessionBinding{}, snapshot); err != nil {
		return queue.Entry{}, err
	}
	s.match(d, p.group, q.constraints())
	most := 0
	for i := range d.candidates {
		c := &d.candidates[i]
		most = max(
			most,
			p.cfg.CachedTokens(
				&scoring.Terms{BlockSize: p.group.blockSize, ISLTokens: d.prompt.isl, DeviceBlocks: c.DeviceBlocks,
					HostBlocks: c.HostBlocks, DiskBlocks: c.DiskBlocks}),
		)
	}
	e := queue.Entry{
		Profile: p.group.room.profile,
		Workers: p.group.workers,
		Request: queue.Request{
			Lane:           queue.Any,
			Tokens:         d.prompt.isl,
			CachedTokens:   most,
			Jump:           max(deref(q.PriorityJump, 0), 0),
			StrictPriority: deref(q.StrictPriority, 0),
		},
	}
	e.Class = e.Profile.Class(class, d.prompt.isl-most)
	if q.Pinned != nil {
		e.Lane = int(d.workers[0].Worker)
	}
	return e, nil
}

// released lets the selections go for which a worker has capacity, after load was released.
func (s *Selector) released() {
	if s.cfg.Queue == nil {
		return
	}
	for _, room := range s.rooms() {
		room.Released()
	}
}

// rooms returns the waiting room of each group. All are nil if selections never wait.
func (s *Selector) rooms() []*waitingRoom {
	s.mu.RLock()
	defer s.mu.RUnlock()
	rooms := make([]*waitingRoom, 0, len(s.groups))
	for _, g := range s.groups {
		rooms = append(rooms, g.room)
	}
	return rooms
}

// pending returns the number of waiting selections in the room, and the tokens of their prompts.
func (m *waitingRoom) pending() (selections, tokens int) {
	if m == nil {
		return 0, 0
	}
	for _, l := range m.Loads() {
		selections, tokens = selections+l.Requests, tokens+l.Tokens
	}
	return selections, tokens
}
