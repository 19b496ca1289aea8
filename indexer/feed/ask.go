package feed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"kvepp/internal/requestplane"
	"kvepp/kvblock"
)

// A Dynamo worker says which blocks it holds, and which events followed one. kvepp asks it for its blocks when it is
// connected to its events, and for the events after the last one that it has when the id of an event shows that some
// are missing. Messages that arrive meanwhile wait, and are applied after the response: their ids tell which of them it
// includes. While kvepp does not have all blocks of the worker anyway, it also applies them at once.
//
// A worker that does not respond costs what a worker that cannot be asked costs: kvepp knows only what its events say,
// and clears its blocks when events were lost. kvepp then asks again after a pause that grows.

// The bounds of questions.
const (
	maxQuestions    = 8 // at once, to different workers
	maxResponse     = 256 << 20
	maxWaiting      = 4096 // messages of a worker, until its response is applied
	maxWaitingBytes = 64 << 20
	questionTries   = 3
	responseTimeout = 5 * time.Second
)

// questionTiming holds the durations for which questions wait.
type questionTiming struct {
	response        time.Duration // for a response
	interval        time.Duration // between two questions to a worker
	pause, pauseMax time.Duration // after questionTries failures; doubles
}

var defaultQuestionTiming = questionTiming{responseTimeout, time.Second, 30 * time.Second, 8 * time.Minute}

// recovery is the state of the questions to a worker. The lock applying of its subscriber guards it.
type recovery struct {
	at string // pool.EventChannel.Query; empty: the worker cannot be asked

	follows bool   // next is known
	next    uint64 // id of the event after the last one in the index
	whole   bool   // the index has all blocks that the worker held after event next-1

	asking    bool // a question is under way: messages wait
	again     bool // ask once more after it
	waiting   []waitingMessage
	bytes     int // of waiting
	timer     *time.Timer
	notBefore time.Time // of the next question
	pausing   bool      // until notBefore events that are missing are lost
	pause     time.Duration
	stuckAt   uint64 // next at the last gap, and how often there was a gap at it
	stuck     int
}

type waitingMessage struct {
	seq      uint64
	envelope []byte
	applied  bool // also at once
}

// ask puts a question as soon as one may be put.
func (s *planeSubscriber) ask() {
	r := &s.recovery
	wait := time.Until(r.notBefore)
	switch {
	case r.at == "" || s.feed.config.ask == nil || !s.online || s.ctx.Err() != nil:
	case r.asking:
		r.again = true
	case wait <= 0:
		r.asking = true
		go s.questions(0)
	case r.timer == nil:
		r.timer = time.AfterFunc(wait, func() {
			s.applying.Lock()
			defer s.applying.Unlock()
			r.timer = nil
			s.ask()
		})
	}
}

// missing handles a message whose first event that is not in the index has the id. It returns true if the message
// waits for a response, and clears the worker's blocks if it cannot.
func (s *planeSubscriber) missing(seq, id uint64, envelope []byte) (waits bool) {
	r := &s.recovery
	if r.stuckAt != r.next {
		r.stuckAt, r.stuck = r.next, 0
	}
	r.stuck++
	wait := time.Until(r.notBefore)
	if s.feed.config.ask == nil || r.asking || r.stuck > questionTries || r.pausing && wait > 0 {
		s.gap(r.next, id)
		return false
	}
	s.wait(seq, envelope)
	r.asking = true
	go s.questions(wait)
	return true
}

// wait keeps a message until the response is applied. Beyond the bound it is lost, and the next question brings it.
func (s *planeSubscriber) wait(seq uint64, envelope []byte) {
	r := &s.recovery
	if len(r.waiting) >= maxWaiting || r.bytes+len(envelope) > maxWaitingBytes {
		r.again = true
		return
	}
	r.waiting = append(r.waiting, waitingMessage{seq, bytes.Clone(envelope), r.asking && !r.whole})
	r.bytes += len(envelope)
}

// questions asks until a response is applied, or questionTries failed. It runs without a lock, while asking is set.
func (s *planeSubscriber) questions(wait time.Duration) {
	select {
	case <-s.hold:
	case <-s.ctx.Done():
		return
	}
	for try := 1; ; try++ {
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return
		}
		if s.question(try == questionTries) {
			return
		}
		wait = s.feed.timing.interval/10 + rand.N(s.feed.timing.interval/4*time.Duration(try))
	}
}

// question asks once. It returns true if that ends the questions: its response was applied, or it was the last and
// failed.
func (s *planeSubscriber) question(last bool) (ended bool) {
	f, r := s.feed, &s.recovery
	select {
	case f.questions <- struct{}{}:
	case <-s.ctx.Done():
		return true
	}
	defer func() { <-f.questions }() // after the response was applied, which bounds the memory of responses
	began := time.Now()
	s.applying.Lock()
	var from *uint64
	if r.whole && r.next > 0 {
		next := r.next
		from = &next
	}
	s.applying.Unlock()
	response, err := s.query(from)
	s.applying.Lock()
	defer s.applying.Unlock()
	if s.ctx.Err() != nil {
		return true
	}
	if err == nil {
		err = s.applyResponse(response, from)
	}
	f.metrics.Event("query", outcomeOf(response, err), 1)
	if err != nil && !last {
		return false
	}
	now := time.Now()
	r.notBefore, r.pausing = now.Add(max(f.timing.interval, now.Sub(began))), err != nil
	if err == nil {
		r.pause = 0
	} else {
		s.giveUp(err)
	}
	s.proceed(err == nil)
	return true
}

// giveUp notes that the worker does not respond.
func (s *planeSubscriber) giveUp(err error) {
	f, r := s.feed, &s.recovery
	f.metrics.Event("query", "given_up", 1)
	s.unanswered.Log(f.log, slog.LevelWarn, "a Dynamo worker does not tell which blocks it holds, so kvepp knows only "+
		"those that its events name from now on, and clears them if events are lost. Can kvepp reach the worker's "+
		"request plane, and can the worker reach kvepp (--dynamo-callback-address)?", "worker", s.name,
		"request_plane", r.at, "error", err)
	r.pause = min(max(2*r.pause, f.timing.pause), f.timing.pauseMax)
	r.notBefore = r.notBefore.Add(r.pause)
	r.whole, r.again = false, true
}

// proceed applies the messages that waited, or those that were not applied yet. One of them may show that events are
// missing, and wait again.
func (s *planeSubscriber) proceed(all bool) {
	r := &s.recovery
	messages, again := r.waiting, r.again
	r.asking, r.again, r.waiting, r.bytes = false, false, nil, 0
	d := s.feed.decodings.Get().(*decoding)
	defer s.feed.decodings.Put(d)
	for _, m := range messages {
		if m.applied && !all {
			continue
		}
		if err := kvblock.DecodePlane(m.envelope, &d.plane); err == nil { // it was decoded before
			s.events(m.seq, m.envelope, d)
		}
	}
	if again {
		s.ask()
	}
}

// query puts a question, for all blocks or for the events from an id on.
func (s *planeSubscriber) query(from *uint64) (*kvblock.PlaneResponse, error) {
	ctx, cancel := context.WithTimeout(s.ctx, s.feed.timing.response)
	defer cancel()
	body := kvblock.AppendPlaneQuery(nil, s.instance, s.rank, from)
	parts, err := s.feed.config.ask(ctx, s.recovery.at, body, maxResponse)
	if err != nil {
		return nil, err
	}
	return kvblock.DecodePlaneResponse(parts)
}

// Errors of responses.
var (
	errRefused  = errors.New("the worker refuses")
	errOutdated = errors.New("the worker's blocks were cleared meanwhile")
)

// applyResponse applies a response to a question for the events from an id on, or for all blocks if that is nil.
func (s *planeSubscriber) applyResponse(a *kvblock.PlaneResponse, from *uint64) error {
	r := &s.recovery
	switch {
	case a.Kind == kvblock.PlaneTreeDump:
		return s.load(a)
	case a.Kind == kvblock.PlaneInvalidRange || a.Kind == kvblock.PlaneError || a.Kind == kvblock.PlaneTreeDumpFailed:
		return fmt.Errorf("%w: %s: %.200q", errRefused, a.Kind, a.Message)
	case from == nil:
		return fmt.Errorf("%w: %s in response to a question for all blocks", kvblock.ErrMalformed, a.Kind)
	case !r.whole || r.next != *from:
		return errOutdated
	case a.Kind == kvblock.PlaneTooNew:
		return nil
	}
	return s.catchUp(a)
}

// load replaces the worker's blocks with those of a TreeDump. An error leaves them as they were: those that events
// named are still there.
func (s *planeSubscriber) load(a *kvblock.PlaneResponse) error {
	r := &s.recovery
	unread := *a
	err := s.each(&unread, func(e *kvblock.RouterEvent) (bool, error) {
		if e.Operation.Kind != kvblock.OpStored && e.Operation.Kind != kvblock.OpDropped {
			return false, fmt.Errorf("%w: a TreeDump that does not only store blocks", kvblock.ErrMalformed)
		}
		return false, nil
	})
	if err != nil {
		return err
	}
	again := r.again
	s.empty()
	if err := s.each(a, func(*kvblock.RouterEvent) (bool, error) { return true, nil }); err != nil {
		return err
	}
	if r.next = a.LastEvent + 1; a.LastEvent == 0 {
		r.next = 0 // there was no event: the first one may have the number 0 or 1
	}
	r.follows, r.whole, r.again, s.begun = true, true, again, true
	s.feed.log.Info("a Dynamo worker told which blocks it holds", "worker", s.name,
		"blocks", s.feed.index.WorkerEntries(s.worker))
	return nil
}

// catchUp applies the Events after the last one in the index.
func (s *planeSubscriber) catchUp(a *kvblock.PlaneResponse) error {
	r := &s.recovery
	err := s.each(a, func(e *kvblock.RouterEvent) (bool, error) {
		if e.ID > r.next && !r.isFirst(e.ID) {
			return false, fmt.Errorf("%w: event %d in place of %d", kvblock.ErrMalformed, e.ID, r.next)
		}
		isNext := e.ID >= r.next
		r.next = max(r.next, e.ID+1)
		return isNext, nil
	})
	if err == nil && r.next <= a.LastEvent {
		err = fmt.Errorf("%w: events up to %d, want %d", kvblock.ErrMalformed, r.next, a.LastEvent)
	}
	return err
}

// isFirst reports whether an event with this id is the worker's first one.
func (r *recovery) isFirst(id uint64) bool { return r.next == 0 && id == 1 }

// each applies the events of a response for which wanted returns true.
func (s *planeSubscriber) each(a *kvblock.PlaneResponse, wanted func(*kvblock.RouterEvent) (bool, error)) error {
	d := s.feed.decodings.Get().(*decoding)
	defer s.feed.decodings.Put(d)
	for {
		more, err := a.Next(&d.plane, 1024)
		d.operations = d.operations[:0]
		for i := range d.plane.Events {
			e, want := &d.plane.Events[i], false
			if err == nil && (e.Instance != s.instance || e.Rank != s.rank) {
				err = fmt.Errorf("%w: blocks of worker %d rank %d", kvblock.ErrMalformed, e.Instance, e.Rank)
			}
			if err == nil {
				want, err = wanted(e)
			}
			if want {
				d.operations = append(d.operations, e.Operation)
			}
		}
		if err != nil || !more {
			return err
		}
		s.feed.enter()
		s.applyPlane(d.operations)
		s.feed.leave()
	}
}

// outcomeOf names, for the metric, what a question led to.
func outcomeOf(a *kvblock.PlaneResponse, err error) string {
	switch {
	case errors.Is(err, errOutdated):
		return "outdated"
	case errors.Is(err, errRefused), errors.Is(err, requestplane.ErrRefused):
		return "refused"
	case errors.Is(err, kvblock.ErrMalformed), errors.Is(err, requestplane.ErrMalformed):
		return "malformed"
	case errors.Is(err, requestplane.ErrTooLong):
		return "too_long"
	case errors.Is(err, context.DeadlineExceeded):
		return "timed_out"
	case err != nil:
		return "unreachable"
	case a.Kind == kvblock.PlaneTreeDump:
		return "all_blocks"
	case a.Kind == kvblock.PlaneTooNew:
		return "nothing_missed"
	}
	return "events"
}
