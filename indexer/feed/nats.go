package feed

import (
	"fmt"
	"log/slog"
	"sync"

	"kvepp/kvblock"
	"kvepp/natssub"
	"kvepp/pool"
)

// natsPlane is Dynamo's event plane over core NATS: one connection, and one subscription for each subject, which all
// workers of a Dynamo component share. The connection is made when the first worker needs it.
//
// NATS forgets. The numbers of a publisher's messages show it, and the worker is emptied.
type natsPlane struct {
	server string
	log    *slog.Logger

	mu       sync.Mutex
	conn     *natssub.Conn       // nil until it is needed; guarded by mu
	subjects map[string]*subject // guarded by mu
}

// maxPendingEvents bounds the bytes of one subject's messages that wait to be applied.
const maxPendingEvents = 64 << 20

// subject is one subscription, whose messages come one after the other.
type subject struct {
	name         string
	subscription *natssub.Subscription

	mu       sync.Mutex              // held while events are applied
	workers  map[uint64]*natsChannel // by publisher; guarded by mu
	decoding decoding                // guarded by mu
}

// natsChannel is one publisher's messages.
type natsChannel struct {
	*planeSubscriber
	next uint64 // number of the next message
}

// subscribe gives the events of c to s, until leave is called; after that none.
func (p *natsPlane) subscribe(c pool.EventChannel, s *planeSubscriber) (leave func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		if p.conn, err = natssub.Connect(natssub.Config{Server: p.server, Purpose: "KV events", Changed: p.changed,
			Log: p.log}); err != nil {
			return nil, fmt.Errorf("feed: %w", err)
		}
	}
	subj := p.subjects[c.Subject]
	if subj == nil {
		subj = &subject{name: c.Subject, workers: map[uint64]*natsChannel{}}
		if subj.subscription, err = p.conn.Subscribe(c.Subject, maxPendingEvents, subj.message); err != nil {
			return nil, fmt.Errorf("feed: %w", err)
		}
		p.subjects[c.Subject] = subj
	}
	subj.mu.Lock()
	defer subj.mu.Unlock()
	subj.workers[c.Publisher] = &natsChannel{planeSubscriber: s}
	if p.conn.Connected() {
		s.Connected()
	}
	return func() { p.unsubscribe(c) }, nil
}

func (p *natsPlane) unsubscribe(c pool.EventChannel) {
	p.mu.Lock()
	defer p.mu.Unlock()
	subj := p.subjects[c.Subject]
	if subj == nil {
		return // closed
	}
	subj.mu.Lock()
	defer subj.mu.Unlock()
	if delete(subj.workers, c.Publisher); len(subj.workers) == 0 {
		delete(p.subjects, c.Subject)
		subj.subscription.Close()
	}
}

// changed tells every worker of the connection's state.
func (p *natsPlane) changed(connected bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, subj := range p.subjects {
		subj.mu.Lock()
		for _, c := range subj.workers {
			switch {
			case connected == c.online:
			case connected:
				c.Connected()
			default:
				c.Disconnected()
			}
		}
		subj.mu.Unlock()
	}
}

// message gives one message to the worker whose publisher sent it.
func (j *subject) message(data []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := kvblock.DecodePlane(data, &j.decoding.plane); err != nil {
		// Whose it was cannot be said, and it may have held removals: everybody's blocks are in doubt.
		for _, c := range j.workers {
			c.Malformed(fmt.Errorf("NATS subject %s: %w", j.name, err))
		}
		return
	}
	c := j.workers[j.decoding.plane.Publisher]
	if c == nil {
		return // of a worker that is not in the pool
	}
	if !c.begin() {
		return
	}
	defer c.end()
	seq := j.decoding.plane.Sequence
	switch {
	case seq < c.next:
		c.restart()
	case seq > c.next:
		c.gap(c.next, seq)
	}
	c.next = seq + 1
	c.events(seq, &j.decoding)
}

// close ends the connection. When it returns, no event is being applied, and none will be.
func (p *natsPlane) close() {
	p.mu.Lock()
	subjects := p.subjects
	p.subjects = map[string]*subject{}
	conn := p.conn
	p.mu.Unlock()
	if conn != nil {
		conn.Close()
	}
	for _, subj := range subjects {
		subj.mu.Lock()
		clear(subj.workers)
		subj.mu.Unlock()
	}
}
