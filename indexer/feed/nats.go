package feed

import (
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"kvepp/kvblock"
	"kvepp/pool"
)

// natsPlane is Dynamo's event plane over core NATS: one connection, and one subscription for each subject, which all
// workers of a Dynamo component share. The connection is made when the first worker needs it.
//
// NATS forgets: what a subscriber was too slow for, or not connected for, is gone. The numbers of a publisher's messages
// show it, and the worker is emptied.
type natsPlane struct {
	server string
	log    *slog.Logger

	mu       sync.Mutex
	conn     *nats.Conn          // nil until it is needed; guarded by mu
	subjects map[string]*subject // guarded by mu
}

// subject is one subscription, read by one goroutine of package nats.
type subject struct {
	subscription *nats.Subscription

	mu      sync.Mutex              // held while events are applied
	workers map[uint64]*natsChannel // by publisher; guarded by mu
	batch   kvblock.PlaneBatch      // guarded by mu
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
		if err := p.connect(); err != nil {
			return nil, err
		}
	}
	subj := p.subjects[c.Subject]
	if subj == nil {
		subj = &subject{workers: map[uint64]*natsChannel{}}
		if subj.subscription, err = p.conn.Subscribe(c.Subject, subj.message); err != nil {
			return nil, fmt.Errorf("feed: NATS subject %s: %w", c.Subject, err)
		}
		p.subjects[c.Subject] = subj
	}
	subj.mu.Lock()
	defer subj.mu.Unlock()
	subj.workers[c.Publisher] = &natsChannel{planeSubscriber: s}
	if p.conn.IsConnected() {
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
		_ = subj.subscription.Unsubscribe() // fails only on a connection that was closed
	}
}

// connect starts connecting; the server need not be there yet. The caller holds p.mu.
func (p *natsPlane) connect() (err error) {
	p.conn, err = nats.Connect(p.server, nats.Name("kvepp"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1),
		nats.ConnectHandler(func(*nats.Conn) { p.changed(true) }),
		nats.ReconnectHandler(func(*nats.Conn) { p.changed(true) }),
		nats.DisconnectErrHandler(func(c *nats.Conn, err error) {
			if !c.IsClosed() {
				p.log.Warn("the connection to NATS ended; it is made again", "server", p.redacted(), "error", err)
			}
			p.changed(false)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			p.log.Warn("NATS reports an error", "server", p.redacted(), "error", err)
		}))
	if err != nil {
		p.conn = nil
		return fmt.Errorf("feed: NATS server %s: %w; correct --nats-server", p.redacted(), err)
	}
	return nil
}

// redacted is the server, or the several of them, without passwords.
func (p *natsPlane) redacted() string {
	servers := strings.Split(p.server, ",")
	for i, server := range servers {
		servers[i] = "(not a URL)"
		if u, err := url.Parse(server); err == nil {
			servers[i] = u.Redacted()
		}
	}
	return strings.Join(servers, ",")
}

// changed tells every worker of the connection's state. Package nats calls it from one goroutine.
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
func (j *subject) message(msg *nats.Msg) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := kvblock.DecodePlane(msg.Data, &j.batch); err != nil {
		// Whose it was cannot be said, and it may have held removals: everybody's blocks are in doubt.
		for _, c := range j.workers {
			c.Malformed(fmt.Errorf("NATS subject %s: %w", msg.Subject, err))
		}
		return
	}
	c := j.workers[j.batch.Publisher]
	if c == nil {
		return // of a worker that is not in the pool
	}
	if !c.begin() {
		return
	}
	defer c.end()
	seq := j.batch.Sequence
	switch {
	case seq < c.next:
		c.restart()
	case seq > c.next:
		c.gap(c.next, seq)
	}
	c.next = seq + 1
	c.events(seq, &j.batch)
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
