package feed

import (
	"encoding/binary"
	"fmt"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// planeTopic begins every message about KV events on a publisher's own socket.
const planeTopic = "kv-events"

// joinPlane subscribes to a worker's events on Dynamo's event plane. What was announced before cannot be asked for:
// Dynamo answers that over its own request protocol only.
func (f *Feed) joinPlane(w pool.Worker, c pool.EventChannel) {
	if transport := c.Transport(); f.config.EventPlane != "" && f.config.EventPlane != transport {
		f.log.Warn(
			"a worker's KV events are on another event plane than --event-plane: what it has cached is not known",
			"worker",
			w.String(),
			"its_plane",
			transport,
			"event_plane",
			f.config.EventPlane,
		)
		return
	}
	s := &planeSubscriber{subscriber: f.subscriber(w), instance: w.InstanceID}
	var leave func()
	var err error
	if c.ZMQ == "" {
		s.hold = f.never // a subject's messages are for many workers: holding them would hold those that join, too
		leave, err = f.nats.subscribe(c, s)
	} else {
		s.connection = f.config.Connection
		var running *zmqsub.Subscription
		running, err = f.hub.Subscribe(zmqsub.Config{Endpoint: c.ZMQ, Topic: planeTopic,
			Publisher: binary.BigEndian.AppendUint64(nil, c.Publisher), Hold: s.hold}, s)
		if err == nil {
			leave = running.Close
		}
	}
	f.joined(s.subscriber, leave, err)
}

// planeSubscriber applies one worker's events as the event plane brings them: hashed already, for this instance and
// rank.
type planeSubscriber struct {
	*subscriber
	instance uint64
}

// Message decodes and applies one message of a publisher's own socket.
func (s *planeSubscriber) Message(seq uint64, _, payload []byte) {
	if !s.begin() {
		return
	}
	defer s.end()
	d := s.feed.decodings.Get().(*decoding)
	defer s.feed.decodings.Put(d)
	envelope, err := kvblock.UnframePlane(payload)
	if err == nil {
		err = kvblock.DecodePlane(envelope, &d.plane)
	}
	if err != nil {
		s.begun = true
		s.unreadable(fmt.Errorf("event plane message %d: %w", seq, err))
		return
	}
	s.events(seq, d)
}

// events applies one message, which d.plane has. It is called between begin and end.
func (s *planeSubscriber) events(seq uint64, d *decoding) {
	s.feed.enter()
	defer s.feed.leave()
	m := s.feed.metrics
	if s.reached(seq, 0) { // a publisher's id is new with each process, and its numbers are enough
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
		d.operations = append(d.operations, e.Operation)
	}
	s.apply(d.operations)
}
