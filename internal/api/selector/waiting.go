package selector

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"kvepp/internal/api"
	"kvepp/queue"
	"kvepp/router"
	"kvepp/scoring"
)

// tick is how often waiting selections are checked if no load is released: reservations can expire.
const tick = time.Second

// waitingLine holds the selections that wait for the workers of one group. A selection waits while each eligible worker
// has more tokens to prefill than the selection's class allows. Waiting selections run one after the other, with mu
// held.
type waitingLine struct {
	mu      sync.Mutex // guards all below
	profile *queue.Profile
	queue   *queue.Queue[*waiting]
	ticking bool
}

// waiting is a selection in a line. It refers to memory of the waiting request. Only the goroutine that holds the
// line's lock uses that memory meanwhile.
type waiting struct {
	workers int                       // of the group
	busy    func(c *queue.Class) bool // whether all eligible workers are busy
	choose  func()
	done    chan struct{} // closed after choose
}

func newLine(c *router.Queue, model string) *waitingLine {
	if c == nil {
		return nil
	}
	profile, _ := c.Profiles.Of(model)
	return &waitingLine{profile: profile, queue: queue.New[*waiting](profile, c.Bound)}
}

// queueing reports whether selections for the model can wait.
func (s *Selector) queueing(model string) bool {
	if s.cfg.Queue == nil {
		return false
	}
	profile, _ := s.cfg.Queue.Profiles.Of(model)
	return profile.Waits()
}

// advance runs the selections whose turn it is.
func (l *waitingLine) advance() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.advanceLocked()
}

// advanceLocked is advance for a caller that holds l.mu.
func (l *waitingLine) advanceLocked() {
	for {
		item := l.queue.Pop(func(c *queue.Class, item *queue.Item[*waiting]) bool { return !item.Value.busy(c) })
		if item == nil {
			return
		}
		item.Value.decide()
	}
}

// decide runs choose. It closes done even after a panic, so that the waiting goroutine always continues.
func (w *waiting) decide() {
	defer close(w.done)
	w.choose()
}

// keepTicking checks the line periodically while selections wait. The caller holds l.mu.
func (l *waitingLine) keepTicking() {
	if l.ticking || l.queue.Len() == 0 {
		return
	}
	l.ticking = true
	time.AfterFunc(tick, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.ticking = false
		l.advanceLocked()
		l.keepTicking()
	})
}

// rejected returns the answer to a selection that may not wait. Source: the answers of dynamo.select_service.
func rejected(err error) error {
	limit := (*queue.LimitError)(nil)
	if !errors.As(err, &limit) {
		return api.Refuse(http.StatusTooManyRequests, "%v", err)
	}
	return &api.Refusal{Status: http.StatusTooManyRequests,
		Text: fmt.Sprintf(
			"router policy class %q queue %s limit reached (current=%d, limit=%d)",
			limit.Class,
			limit.Kind,
			limit.Current,
			limit.Limit,
		),
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
	l := p.group.line
	if l == nil || !l.profile.Waits() || q.Advisory && id == "" {
		return s.decide(d, q, p, id)
	}
	if id != "" {
		if _, taken := s.claims.LoadOrStore(id, true); taken {
			return nil, conflict(id)
		}
		defer s.claims.Delete(id)
	}
	entry, w, err := s.entry(d, q, p, class)
	if err != nil {
		return nil, err
	}
	var result *selection
	failed := errBroken // until choose has returned
	w.choose = func() { result, failed = s.decide(d, q, p, id) }

	item, err := l.enter(entry, w)
	if err != nil {
		return nil, rejected(err)
	}
	if item == nil {
		return result, failed
	}
	var late <-chan time.Time
	if timeout := s.cfg.Queue.Timeout; timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-w.done:
	case <-ctx.Done():
		if l.leave(item) {
			return nil, errClientGone
		}
		<-w.done // another goroutine has chosen for it
		if id != "" && result != nil {
			s.end(id) // the client is gone and cannot end it
		}
		return nil, errClientGone
	case <-late:
		if l.leave(item) {
			return nil, api.Refuse(
				http.StatusTooManyRequests,
				"no worker was ready for this selection in time; try again later",
			)
		}
		<-w.done
	}
	return result, failed
}

// errBroken is the answer if choose, called by another goroutine, did not return.
var errBroken = api.Refuse(http.StatusInternalServerError, "the selection broke off: a defect, see the log")

// errClientGone is the result if the client closed the connection. Its status appears in metrics only. Source: nginx.
var errClientGone = api.Refuse(499, "the client has gone")

// enter puts a selection into the line. If it is its turn at once, enter runs it before it returns. Classes that never
// wait do not take turns: enter runs their selections at once, and returns a nil item.
func (l *waitingLine) enter(entry queue.Request, w *waiting) (*queue.Item[*waiting], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := &l.profile.Classes[entry.Class]; c.Rejects() {
		if w.busy(c) {
			return nil, l.queue.Limited(entry.Class, w.workers)
		}
		w.choose()
		return nil, nil
	}
	item, err := l.queue.Push(entry, w.workers, w)
	if err == nil {
		l.advanceLocked()
		l.keepTicking()
	}
	return item, err
}

// leave takes a selection out of its line. It returns false if the selection has run already.
func (l *waitingLine) leave(item *queue.Item[*waiting]) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.queue.Remove(item)
	if left {
		l.advanceLocked() // the next in line may have a free worker
	}
	return left
}

// entry describes a selection for the line.
func (s *Selector) entry(d *scratch, q *selectRequest, p *prepared, class string) (queue.Request, *waiting, error) {
	snapshot := s.pool.Acquire()
	defer snapshot.Release()
	if err := s.eligible(d, q, p.group, sessionBinding{}, snapshot); err != nil {
		return queue.Request{}, nil, err
	}
	s.match(d, p.group, q.constraints())
	most := 0
	for i := range d.candidates {
		c := &d.candidates[i]
		most = max(
			most,
			p.cfg.CachedTokens(
				&scoring.Terms{BlockSize: p.group.blockSize, ISLTokens: d.prompt.isl, DeviceBlocks: c.DeviceBlocks,
					HostBlocks: c.HostBlocks, DiskBlocks: c.DiskBlocks},
			),
		)
	}
	entry := queue.Request{
		Lane:           queue.Any,
		Tokens:         d.prompt.isl,
		CachedTokens:   most,
		Arrival:        time.Since(s.began).Seconds(),
		Jump:           max(deref(q.PriorityJump, 0), 0),
		StrictPriority: deref(q.StrictPriority, 0),
	}
	entry.Class = p.group.line.profile.Class(class, d.prompt.isl-most)
	if q.Pinned != nil {
		entry.Lane = int(d.workers[0].Worker)
	}
	w := &waiting{workers: p.group.workers, done: make(chan struct{})}
	w.busy = func(c *queue.Class) bool {
		snapshot := s.pool.Acquire()
		defer snapshot.Release()
		if s.eligible(d, q, p.group, sessionBinding{}, snapshot) != nil {
			return false // it fails with that error when it runs
		}
		for _, x := range d.workers {
			if !c.Busy(s.loadBook.Load(x.Worker).PrefillTokens, x.BatchedTokens()) {
				return false
			}
		}
		return true
	}
	return entry, w, nil
}

// end ends a reservation and all its claims.
func (s *Selector) end(id string) {
	s.leases.Release(id)
	if b, ok := s.loadBook.Named(id); ok {
		b.Free()
	}
	s.released()
}

// released runs the waiting selections for which a worker has capacity, after load was released.
func (s *Selector) released() {
	if s.cfg.Queue == nil {
		return
	}
	for _, l := range s.lines() {
		l.advance()
	}
}

// lines returns the line of each group. A line may be nil.
func (s *Selector) lines() []*waitingLine {
	s.mu.RLock()
	defer s.mu.RUnlock()
	lines := make([]*waitingLine, 0, len(s.groups))
	for _, g := range s.groups {
		lines = append(lines, g.line)
	}
	return lines
}

// pending returns the number of waiting selections in the line, and the tokens of their prompts.
func (l *waitingLine) pending() (selections, tokens int) {
	if l == nil {
		return 0, 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.profile.Classes {
		load := l.queue.Load(i)
		selections, tokens = selections+load.Requests, tokens+load.Tokens
	}
	return selections, tokens
}
