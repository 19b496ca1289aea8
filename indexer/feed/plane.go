package feed

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"kvepp/internal/loglimit"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// planeTopic is the topic of KV events on a publisher's own socket.
const planeTopic = "kv-events"

// joinPlane subscribes to a worker's events on Dynamo's event plane, and asks the worker for what it does not hear.
func (f *Feed) joinPlane(w pool.Worker, c pool.EventChannel) {
	s := f.planeSubscriber(w, c)
	var leave func()
	var err error
	switch {
	case c.Brokers != "":
		s.hold = f.never // as with NATS
		leave, err = f.brokers.subscribe(f.hub, c, s)
	case c.ZMQ == "":
		s.hold = f.never // a subject carries the messages of many workers, also of some that join later
		leave, err = f.nats.subscribe(c, s)
	default:
		s.connection = f.config.Connection
		var running *zmqsub.Subscription
		running, err = f.hub.Subscribe(zmqsub.Config{Endpoint: c.ZMQ, Topic: planeTopic,
			Publisher: binary.BigEndian.AppendUint64(nil, c.Publisher), Hold: s.hold}, s)
		if err == nil {
			leave = running.Close
		}
	}
	if err != nil {
		s.cancel()
	}
	f.joined(s.subscriber, func() { leave(); s.leave() }, err)
}

// planeSubscriber returns a subscriber for a worker on the event plane.
func (f *Feed) planeSubscriber(w pool.Worker, c pool.EventChannel) *planeSubscriber {
	s := &planeSubscriber{subscriber: f.subscriber(w), instance: w.InstanceID, eagle: w.EAGLE}
	s.recovery.at = c.Query
	s.ctx, s.cancel = context.WithCancel(f.ctx)
	s.unanswered = loglimit.Limiter{Burst: workerLines, Interval: linesInterval, Within: &f.lines}
	s.cleared = func() {
		s.recovery.follows, s.recovery.whole = false, false
		s.ask()
	}
	return s
}

// planeSubscriber applies one worker's events from the event plane, which have local hashes already. It skips those of
// other instances and ranks.
type planeSubscriber struct {
	*subscriber
	instance uint64
	eagle    bool // of its blocks, as the pool knows
	warned   bool // already logged that the plane does not have all of the model's layers

	ctx        context.Context // of questions; ends when the worker leaves
	cancel     func()
	unanswered loglimit.Limiter // of log lines
	recovery   recovery         // guarded by applying
}

// leave ends the questions. After it returned, no response is applied.
func (s *planeSubscriber) leave() {
	s.cancel()
	s.applying.Lock()
	defer s.applying.Unlock()
	if t := s.recovery.timer; t != nil {
		t.Stop()
	}
}

// Connected counts the subscription as connected, and asks the worker for what kvepp has not heard. The publisher may
// get the subscription only after it answered: kvepp asks once more.
func (s *planeSubscriber) Connected() {
	s.subscriber.Connected()
	s.applying.Lock()
	defer s.applying.Unlock()
	s.recovery.notBefore, s.recovery.pausing = time.Time{}, false
	s.ask()
	s.recovery.again = s.recovery.asking
}

// Gap clears the worker's blocks, unless it can be asked: then the ids of events tell which are missing.
func (s *planeSubscriber) Gap(expected, got uint64) {
	if s.recovery.at == "" {
		s.subscriber.Gap(expected, got)
	}
}

// Message decodes and applies one message of a publisher's own socket.
func (s *planeSubscriber) Message(seq uint64, _, payload []byte) {
	if !s.begin() {
		return
	}
	defer s.end()
	d := s.feed.decodings.Get().(*decoding)
	defer s.feed.decodings.Put(d)
	envelope, err := decodeFrame(payload, &d.plane)
	if err != nil {
		s.begun = true
		s.unreadable(fmt.Errorf("event plane message %d: %w", seq, err))
		return
	}
	s.events(seq, envelope, d)
}

// decodeFrame decodes a frame of the event plane over ZMQ into b, and returns the envelope in it.
func decodeFrame(frame []byte, b *kvblock.PlaneBatch) (envelope []byte, err error) {
	if envelope, err = kvblock.UnframePlane(frame); err == nil {
		err = kvblock.DecodePlane(envelope, b)
	}
	return envelope, err
}

// events applies the message in d.plane. It is called between begin and end.
func (s *planeSubscriber) events(seq uint64, envelope []byte, d *decoding) {
	r := &s.recovery
	if r.asking {
		if s.wait(seq, envelope); r.whole {
			return
		}
	}
	s.feed.enter()
	defer s.feed.leave()
	m := s.feed.metrics
	if r.at != "" && s.seeded && !s.begun && !s.bridged(seq) {
		s.gap(s.position.Next, seq)
	}
	if s.reached(seq, 0) { // no timestamp is needed: each process has another publisher id
		m.Event("batch", "in_dump", 1)
		return
	}
	m.Event("batch", "received", 1)
	d.operations = d.operations[:0]
	for i := range d.plane.Events {
		e := &d.plane.Events[i]
		if e.Instance != s.instance || e.Rank != s.rank {
			m.Event("batch", "other_rank", 1)
			continue
		}
		if r.at != "" && r.follows {
			if e.ID < r.next {
				m.Event("batch", "in_dump", 1)
				continue
			}
			if e.ID > r.next && !r.isFirst(e.ID) {
				s.applyPlane(d.operations)
				d.operations = d.operations[:0]
				if s.missing(seq, e.ID, envelope) {
					return
				}
			}
		}
		r.follows, r.next = true, e.ID+1
		d.operations = append(d.operations, e.Operation)
	}
	s.applyPlane(d.operations)
}

// applyPlane applies operations, and reports what the plane does not say of the worker's blocks.
func (s *planeSubscriber) applyPlane(operations []kvblock.Operation) {
	if s.apply(operations) && s.layers.Other {
		if !s.warned {
			s.warned = true
			s.feed.log.Warn(
				"a worker's model has layers with windows, chunks or states, but Dynamo's event plane has only full "+
					"attention's blocks: predictions are an upper bound. Give the worker kvEvents, the engine's own "+
					"socket",
				"worker",
				s.name,
			)
		}
		s.reportTraits(kvblock.Traits{EAGLE: s.eagle, UpperBound: true})
	}
}
