package feed

import (
	"fmt"
	"log/slog"
	"sync"

	"kvepp/internal/natssub"
	"kvepp/kvblock"
	"kvepp/pool"
)

// natsPlane is Dynamo's event plane over core NATS. It has one connection, made when the first worker needs it, and one
// subscription for each subject, which all workers of a Dynamo component share.
//
// Core NATS may drop messages. The numbers of a publisher's messages show it, and the worker's blocks are cleared.
type natsPlane struct {
	server string
	log    *slog.Logger

	mu       sync.Mutex
	conn     *natssub.Conn       // nil until it is needed; guarded by mu
	subjects map[string]*subject // guarded by mu
}

// maxPendingEvents bounds the bytes of one subject's waiting messages.
const maxPendingEvents = 64 << 20

// subject is one subscription. Its messages come one at a time.
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
	next    uint64 // number of the next message
	repeats bool   // messages may come more than once
}

// subscribe passes the events of c to s until leave returns.
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

// changed reports the connection's state to every worker.
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

// message passes one message to the worker whose publisher sent it.
func (j *subject) message(data []byte) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := kvblock.DecodePlane(data, &j.decoding.plane); err != nil {
		// The sender is unknown, and the message may contain removals: clear the blocks of all workers.
		for _, c := range j.workers {
			c.Malformed(fmt.Errorf("NATS subject %s: %w", j.name, err))
		}
		return
	}
	if c := j.workers[j.decoding.plane.Publisher]; c != nil { // else its worker is not in the pool
		j.deliver(c, data)
	}
}

// deliver passes the decoded message to a worker.
func (j *subject) deliver(c *natsChannel, data []byte) {
	if !c.begin() {
		return
	}
	defer c.end()
	seq := j.decoding.plane.Sequence
	switch {
	case seq < c.next && c.repeats:
		return
	case seq < c.next:
		c.restart()
	case seq > c.next && c.recovery.at == "":
		c.gap(c.next, seq)
	}
	c.next = seq + 1
	c.events(seq, data, &j.decoding)
}

// close ends the connection. After it returned, no event is applied.
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
