package feed

import (
	"encoding/binary"
	"fmt"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// planeTopic is the topic of KV events on a publisher's own socket.
const planeTopic = "kv-events"

// joinPlane subscribes to a worker's events on Dynamo's event plane. There is no replay: Dynamo replays past events
// over its own request protocol only.
func (f *Feed) joinPlane(w pool.Worker, c pool.EventChannel) {
	if transport := c.Transport(); f.config.EventPlane != "" && f.config.EventPlane != transport {
		f.log.Warn(
			"a worker's KV events are on another event plane than --event-plane, so kvepp does not know its cache",
			"worker",
			w.String(),
			"its_plane",
			transport,
			"event_plane",
			f.config.EventPlane,
		)
		return
	}
	s := &planeSubscriber{subscriber: f.subscriber(w), instance: w.InstanceID, eagle: w.EAGLE}
	var leave func()
	var err error
	if c.ZMQ == "" {
		s.hold = f.never // a subject carries the messages of many workers, also of some that join later
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

// planeSubscriber applies one worker's events from the event plane, which have local hashes already. It skips those of
// other instances and ranks.
type planeSubscriber struct {
	*subscriber
	instance uint64
	eagle    bool // of its blocks, as the pool knows
	warned   bool // already logged that the plane does not have all of the model's layers
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

// events applies the message in d.plane. It is called between begin and end.
func (s *planeSubscriber) events(seq uint64, d *decoding) {
	s.feed.enter()
	defer s.feed.leave()
	m := s.feed.metrics
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
		d.operations = append(d.operations, e.Operation)
	}
	if s.apply(d.operations) && s.layers.Other {
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
