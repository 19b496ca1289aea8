package feed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/internal/requestplane"
	"kvepp/kvblock"
	"kvepp/kvblock/kvblocktest"
	"kvepp/pool"
)

// routerEvent returns an event as workers publish it and respond with it.
func routerEvent(id, instance uint64, rank int, data []byte) []byte {
	return dict("worker_id", instance, "storage_tier", "device", "residency_domain", "worker",
		"event", dict("event_id", id, "data", data, "dp_rank", rank))
}

func planeRemoved(engine uint64) []byte {
	return dict("removed", dict("block_hashes", append([]byte{0x91}, kvblocktest.Append(nil, engine)...)))
}

// array encodes elements that are encoded already.
func array(elements ...[]byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(len(elements))), slices.Concat(elements...)...)
}

// responseParts returns the parts of a response.
func responseParts(response []byte) [][]byte {
	return [][]byte{dict("data", response, "complete_final", false), dict("complete_final", true)}
}

// localIndexer is a Dynamo worker that holds blocks of one prompt each, whose tokens are four times the block's number.
type localIndexer struct {
	mu       sync.Mutex
	held     map[uint64]bool
	ring     [][]byte // of the latest events
	keeps    int      // bound of ring; 0: none
	last     uint64   // id of the latest event
	seq      uint64   // number of the next message
	instance uint64
	asked    []string                                         // what each question began with: all, or an id
	response func(question string) (response []byte, ok bool) // in place of the worker's own; may be nil
	fail     error
}

func promptOf(n uint64) []kvblock.Token {
	t := kvblock.Token(n)
	return []kvblock.Token{t, t, t, t}
}

// change stores block n, or removes it if it is held, and returns the message about it.
func (w *localIndexer) change(n uint64) (seq uint64, frame []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	data := planeRemoved(n)
	if !w.held[n] {
		data = planeStored(n, nil, promptOf(n)...)
		w.held[n] = true
	} else {
		delete(w.held, n)
	}
	w.last++
	event := routerEvent(w.last, w.instance, 0, data)
	if w.ring = append(w.ring, event); w.keeps > 0 && len(w.ring) > w.keeps {
		w.ring = w.ring[1:]
	}
	payload := array(event)
	message := dict("publisher_id", uint64(publisher), "sequence", w.seq, "published_at", 1, "topic", "kv-events",
		"payload", append(binary.BigEndian.AppendUint16([]byte{0xc5}, uint16(len(payload))), payload...))
	w.seq++
	return w.seq - 1, append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(message))), message...)
}

// ask is Config.ask.
func (w *localIndexer) ask(ctx context.Context, _ string, body []byte, _ int64) ([][]byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	question := "all"
	start := body[slices.Index(body, 0xae)+15:]
	if start[0] == 0xcf {
		question = fmt.Sprint(binary.BigEndian.Uint64(start[1:]))
	}
	w.asked = append(w.asked, question)
	if w.fail != nil {
		return nil, w.fail
	}
	if w.response != nil {
		if response, ok := w.response(question); ok {
			return responseParts(response), nil
		}
	}
	return responseParts(w.own(question)), nil
}

func (w *localIndexer) own(question string) []byte {
	var from uint64
	if _, err := fmt.Sscan(question, &from); err == nil {
		oldest := w.last - uint64(len(w.ring)) + 1
		switch {
		case from > w.last:
			return dict("TooNew", dict("requested_start", from, "requested_end", nil, "newest_available", w.last))
		case from >= oldest:
			return dict("Events", dict("events", array(w.ring[from-oldest:]...), "last_event_id", w.last))
		}
	}
	var events [][]byte
	for n := range w.held {
		events = append(events, routerEvent(uint64(len(events)), w.instance, 0, planeStored(n, nil, promptOf(n)...)))
	}
	return dict("TreeDump", dict("events", array(events...), "last_event_id", w.last, "reset_scope", "all"))
}

func (w *localIndexer) questions() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.asked)
}

// asking is a fixture with one worker on the event plane that can be asked.
type asking struct {
	*fixture
	*localIndexer
	subscriber *planeSubscriber
}

// newAsking returns a worker and its feed, whose questions wait for milliseconds only.
func newAsking(t *testing.T, lines io.Writer) *asking {
	w := &localIndexer{held: map[uint64]bool{}, instance: instance}
	h := newFixtureWith(t, Config{ask: w.ask}, lines)
	h.timing = questionTiming{response: time.Second, interval: time.Millisecond, pause: 20 * time.Millisecond,
		pauseMax: 40 * time.Millisecond}
	h.plane(pool.EventChannel{})
	s := h.pool.Acquire()
	worker := s.Workers[0]
	s.Release()
	a := &asking{h, w, h.planeSubscriber(worker, pool.EventChannel{Publisher: publisher, Query: "w:1/q"})}
	h.joined(a.subscriber.subscriber, a.subscriber.leave, nil)
	return a
}

// hear passes a message to kvepp.
func (a *asking) hear(seq uint64, frame []byte) { a.subscriber.Message(seq, nil, frame) }

// agree reports whether the index has exactly the blocks that the worker holds.
func (a *asking) agree() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.index.WorkerEntries(0) != len(a.held) {
		return false
	}
	for n := range a.held {
		if a.match(4, promptOf(n)...) != 1 {
			return false
		}
	}
	return true
}

// TestAskForAll: kvepp begins with what the worker holds, and events that the response includes count once.
func TestAskForAll(t *testing.T) {
	a := newAsking(t, io.Discard)
	for n := range uint64(200) {
		a.change(n)
	}
	a.change(7)
	a.subscriber.Connected()
	eventually(t, "the worker's blocks", a.agree)
	a.hear(a.change(7))
	a.hear(a.change(8))
	eventually(t, "the worker's blocks after two events", a.agree)
	eventually(t, "a second question", func() bool { return len(a.questions()) == 2 })
	if got := a.count("query", "all_blocks"); got != 1 {
		t.Errorf("%v answers with all blocks, want 1; questions %q", got, a.questions())
	}
}

// TestAskWhileEventsCome: events that arrive while the worker answers are applied after the response, each once.
func TestAskWhileEventsCome(t *testing.T) {
	a := newAsking(t, io.Discard)
	for n := range uint64(50) {
		a.change(n)
	}
	var seq uint64
	var frame []byte
	a.response = func(string) ([]byte, bool) { // asked with mu held
		a.response = nil
		own := a.own("all")
		a.mu.Unlock()
		for n := range uint64(50) { // after the dump
			seq, frame = a.change(n)
			a.hear(seq, frame)
		}
		a.mu.Lock()
		return own, true
	}
	a.subscriber.Connected()
	eventually(t, "the worker's blocks", a.agree)
	if a.count("subscription", "gap") != 0 {
		t.Error("a gap was counted")
	}
}

// TestLostMessages: 1,000 lost messages cost nothing, whether the worker still has the events or not.
func TestLostMessages(t *testing.T) {
	for _, keeps := range []int{0, 100} {
		a := newAsking(t, io.Discard)
		a.keeps = keeps
		a.subscriber.Connected()
		eventually(t, "a first response", func() bool { return a.count("query", "all_blocks") > 0 })
		a.hear(a.change(1))
		for n := range uint64(1000) {
			a.change(n % 600)
		}
		a.hear(a.change(9999))
		eventually(t, "the worker's blocks", a.agree)
		want := map[int]string{0: "events", 100: "all_blocks"}[keeps]
		if a.count("query", want) == 0 || a.count("subscription", "gap")+a.count("query", "given_up") != 0 {
			t.Errorf("ring of %d: %v responses of kind %s, questions %q", keeps, a.count("query", want), want,
				a.questions())
		}
	}
}

// TestRandomLoss compares the index with the worker after random changes. Messages are lost, come twice or make kvepp
// connect again, at random.
func TestRandomLoss(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		a := newAsking(t, io.Discard)
		a.keeps = random.IntN(50) + 1
		a.subscriber.Connected()
		for range 500 {
			seq, frame := a.change(random.Uint64N(40))
			switch random.IntN(12) {
			case 0: // lost
			case 1:
				a.hear(seq, frame)
				a.hear(seq, frame)
			case 2:
				a.hear(seq, frame)
				a.subscriber.Disconnected()
				a.subscriber.Connected()
			default:
				a.hear(seq, frame)
			}
		}
		a.hear(a.change(1))
		eventually(t, fmt.Sprintf("the worker's blocks, seed %d", seed), a.agree)
		if a.count("query", "given_up") != 0 {
			t.Errorf("seed %d: kvepp gave up", seed)
		}
	}
}

// TestHostileAnswers: after any bad response kvepp falls back to its events, clears its blocks when events were
// lost, and takes the next good response.
func TestHostileAnswers(t *testing.T) {
	store := func(id, instance uint64, rank int) []byte {
		return routerEvent(id, instance, rank, planeStored(5, nil, promptOf(5)...))
	}
	dump := func(last uint64, events ...[]byte) []byte {
		return dict("TreeDump", dict("events", array(events...), "last_event_id", last, "reset_scope", "all"))
	}
	for name, c := range map[string]struct {
		response []byte
		fail     error
		outcome  string
	}{
		"garbage":       {response: []byte("\xc1garbage"), outcome: "malformed"},
		"no response":   {fail: context.DeadlineExceeded, outcome: "timed_out"},
		"no connection": {fail: errors.New("connection refused"), outcome: "unreachable"},
		"too long":      {fail: requestplane.ErrTooLong, outcome: "too_long"},
		"broken frames": {fail: requestplane.ErrMalformed, outcome: "malformed"},
		"refused":       {fail: requestplane.ErrRefused, outcome: "refused"},
		"error":         {response: dict("Error", "dp_rank mismatch"), outcome: "refused"},
		"dump failed": {response: dict("TreeDumpFailed", dict("last_event_id", 3, "message", "x")),
			outcome: "refused"},
		"invalid range":   {response: dict("InvalidRange", dict()), outcome: "refused"},
		"unknown kind":    {response: dict("Other", dict()), outcome: "malformed"},
		"other rank":      {response: dump(3, store(0, instance, 1)), outcome: "malformed"},
		"other worker":    {response: dump(3, store(0, instance+1, 0)), outcome: "malformed"},
		"half a dump":     {response: dump(3, store(0, instance, 0), []byte("\xc1")), outcome: "malformed"},
		"removal in dump": {response: dump(3, routerEvent(0, instance, 0, planeRemoved(5))), outcome: "malformed"},
		"clear in dump": {response: dump(3, routerEvent(0, instance, 0, kvblocktest.Append(nil, "cleared"))),
			outcome: "malformed"},
		"other scope": {outcome: "malformed",
			response: dict("TreeDump", dict("events", array(), "last_event_id", 3, "reset_scope", "disk"))},
		"no last event": {response: dict("TreeDump", dict("events", array())), outcome: "malformed"},
		"events":        {response: dict("Events", dict("events", array(), "last_event_id", 3)), outcome: "malformed"},
		"too new":       {response: dict("TooNew", dict("newest_available", 3)), outcome: "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			var lines lockedBuffer
			a := newAsking(t, &lines)
			a.mu.Lock()
			a.fail, a.response = c.fail, func(string) ([]byte, bool) { return c.response, true }
			a.mu.Unlock()
			a.hear(a.change(1))
			a.subscriber.Connected()
			a.hear(a.change(2))
			eventually(t, "that kvepp gave up", func() bool { return a.count("query", "given_up") > 0 })
			if a.count("query", c.outcome) < 3 {
				t.Errorf("%v answers counted as %s, want 3", a.count("query", c.outcome), c.outcome)
			}
			if a.match(4, promptOf(5)...) != 0 {
				t.Error("kvepp took a block from the response")
			}
			a.hear(a.change(3))
			eventually(t, "later events", func() bool { return a.match(4, promptOf(3)...) == 1 })
			a.change(3) // lost
			a.hear(a.change(4))
			eventually(t, "cleared blocks", func() bool {
				return a.match(4, promptOf(3)...) == 0 && a.match(4, promptOf(4)...) == 1
			})
			asked := a.count("query", c.outcome)
			eventually(t, "another question", func() bool { return a.count("query", c.outcome) > asked+1 })
			if a.match(4, promptOf(4)...) != 1 {
				t.Error("a bad response took a block that an event named")
			}
			if !strings.Contains(lines.String(), "does not tell which blocks it holds") {
				t.Error(lines.String())
			}
			a.mu.Lock()
			a.fail, a.response = nil, nil
			a.mu.Unlock()
			eventually(t, "the worker's blocks after a good response", a.agree)
		})
	}
}

// TestHostileEvents: answers about missing events that do not bring them are no endless loop, and end in cleared
// blocks.
func TestHostileEvents(t *testing.T) {
	event := func(id uint64) []byte { return routerEvent(id, instance, 0, planeStored(5, nil, promptOf(5)...)) }
	for name, response := range map[string][]byte{
		"none":        dict("Events", dict("events", array(), "last_event_id", 9)),
		"none at all": dict("Events", dict("events", array(), "last_event_id", 0)),
		"too new":     dict("TooNew", dict("newest_available", 1)),
		"later ones":  dict("Events", dict("events", array(event(9)), "last_event_id", 9)),
		"fewer":       dict("Events", dict("events", array(event(3)), "last_event_id", 9)),
		"greatest":    dict("Events", dict("events", array(event(1<<64-1)), "last_event_id", uint64(1<<64-1))),
	} {
		t.Run(name, func(t *testing.T) {
			a := newAsking(t, io.Discard)
			a.subscriber.Connected()
			eventually(t, "a first response", func() bool { return a.count("query", "all_blocks") > 0 })
			a.hear(a.change(1))
			a.mu.Lock()
			a.response = func(question string) ([]byte, bool) { return response, true }
			a.mu.Unlock()
			for n := range uint64(7) {
				a.change(n + 10) // lost
			}
			a.hear(a.change(20))
			eventually(t, "a gap", func() bool { return a.count("subscription", "gap") > 0 })
			if a.match(4, promptOf(1)...) != 0 {
				t.Error("the blocks of before the loss are still there")
			}
			a.mu.Lock()
			a.response = nil
			a.mu.Unlock()
			eventually(t, "the worker's blocks after a good response", a.agree)
		})
	}
}

// connectAndHold connects, and returns when kvepp has asked for all blocks. respond lets the worker respond with those
// that it held then.
func (a *asking) connectAndHold() (respond func()) {
	asked, release := make(chan struct{}), make(chan struct{})
	a.response = func(string) ([]byte, bool) {
		a.response = nil
		own := a.own("all")
		a.mu.Unlock()
		close(asked)
		<-release
		a.mu.Lock()
		return own, true
	}
	a.subscriber.Connected()
	<-asked
	return func() { close(release) }
}

// TestWaitingMessagesAreBounded: messages beyond the bound are lost while a worker answers, and asked for afterwards.
func TestWaitingMessagesAreBounded(t *testing.T) {
	a := newAsking(t, io.Discard)
	respond := a.connectAndHold()
	for n := range uint64(maxWaiting + 100) {
		a.hear(a.change(n))
	}
	a.subscriber.applying.Lock()
	if n := len(a.subscriber.recovery.waiting); n != maxWaiting {
		t.Errorf("%d messages wait", n)
	}
	a.subscriber.applying.Unlock()
	respond()
	eventually(t, "the worker's blocks", a.agree)
}

// TestQuestionsAtOnce: while one worker does not respond, others are asked; at most maxQuestions at once.
func TestQuestionsAtOnce(t *testing.T) {
	var mu sync.Mutex
	now, most := 0, 0
	release := make(chan struct{})
	ask := func(context.Context, string, []byte, int64) ([][]byte, error) {
		mu.Lock()
		now++
		most = max(most, now)
		mu.Unlock()
		<-release
		mu.Lock()
		now--
		mu.Unlock()
		return nil, errors.New("x")
	}
	h := newFixtureWith(t, Config{ask: ask}, io.Discard)
	h.timing.interval = time.Millisecond
	h.plane(pool.EventChannel{})
	s := h.pool.Acquire()
	worker := s.Workers[0]
	s.Release()
	for range 3 * maxQuestions {
		h.planeSubscriber(worker, pool.EventChannel{Query: "w:1/q"}).Connected()
	}
	eventually(t, "questions", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return now == maxQuestions
	})
	close(release)
	eventually(t, "the end", func() bool { return h.count("query", "given_up") == 3*maxQuestions })
	if most != maxQuestions {
		t.Errorf("%d questions at once", most)
	}
}

// TestEventsWhileAsking: while a worker does not respond, kvepp applies its events. A response that comes later does
// not undo them.
func TestEventsWhileAsking(t *testing.T) {
	a := newAsking(t, io.Discard)
	a.change(1)
	respond := a.connectAndHold()
	a.hear(a.change(2))
	a.hear(a.change(3))
	a.hear(a.change(2))
	if a.match(4, promptOf(3)...) != 1 || a.match(4, promptOf(2)...) != 0 {
		t.Error("events are not applied before the response")
	}
	respond()
	eventually(t, "the worker's blocks", a.agree)
}

// TestLeaveWhileAsking: no response is applied after a worker left.
func TestLeaveWhileAsking(t *testing.T) {
	a := newAsking(t, io.Discard)
	a.change(1)
	respond := a.connectAndHold()
	a.WorkerLeft(0)
	respond()
	a.subscriber.waitIdle()
	eventually(t, "the end of the question", func() bool { return len(a.Feed.questions) == 0 })
	if got := a.index.WorkerEntries(0); got != 0 {
		t.Errorf("%d blocks after the worker left", got)
	}
}
