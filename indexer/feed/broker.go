package feed

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"kvepp/internal/loglimit"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// brokerPlane is Dynamo's event plane over ZMQ brokers. Each broker passes on all messages, so that one may fail: those
// that come again are dropped by their numbers. All workers of a Dynamo component share a subscription to each broker.
type brokerPlane struct {
	mu     sync.Mutex
	groups map[string]*brokerGroup // by brokers and subject; guarded by mu
}

// brokerGroup is a subject at some brokers.
type brokerGroup struct {
	subject
	subscriptions []*zmqsub.Subscription // guarded by brokerPlane.mu
	connected     int                    // how many are; guarded by subject.mu
	lines         loglimit.Limiter
}

// subscribe passes the events of c to s until leave returns.
func (p *brokerPlane) subscribe(hub *zmqsub.Hub, c pool.EventChannel, s *planeSubscriber) (leave func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := c.Brokers + " " + c.Subject
	g := p.groups[name]
	if g == nil {
		g = &brokerGroup{subject: subject{name: c.Subject, workers: map[uint64]*natsChannel{}},
			lines: loglimit.Limiter{Burst: workerLines, Interval: linesInterval, Within: &s.feed.lines}}
		for address := range strings.SplitSeq(c.Brokers, ";") {
			one, err := hub.Subscribe(zmqsub.Config{Endpoint: address, Topic: c.Subject, Many: true},
				brokerLink{g, s.feed, address})
			if err != nil {
				g.close()
				return nil, err
			}
			g.subscriptions = append(g.subscriptions, one)
		}
		if p.groups == nil {
			p.groups = map[string]*brokerGroup{}
		}
		p.groups[name] = g
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.workers[c.Publisher] = &natsChannel{planeSubscriber: s, repeats: true}
	if g.connected > 0 {
		s.Connected()
	}
	return func() { p.unsubscribe(name, c.Publisher) }, nil
}

func (p *brokerPlane) unsubscribe(name string, publisher uint64) {
	p.mu.Lock()
	g := p.groups[name]
	g.mu.Lock()
	delete(g.workers, publisher)
	last := len(g.workers) == 0
	g.mu.Unlock()
	if last {
		delete(p.groups, name)
	}
	p.mu.Unlock()
	if last {
		g.close()
	}
}

// close ends the subscriptions. No lock may be held: it waits for messages that are being applied.
func (g *brokerGroup) close() {
	for _, s := range g.subscriptions {
		s.Close()
	}
}

// brokerLink is one of a group's subscriptions.
type brokerLink struct {
	*brokerGroup
	feed    *Feed
	address string
}

// Message passes a message to the worker whose publisher sent it.
func (l brokerLink) Message(_ uint64, publisher, payload []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.workers[binary.BigEndian.Uint64(publisher)]
	if c == nil {
		return // its worker is not in the pool
	}
	envelope, err := decodeFrame(payload, &l.decoding.plane)
	if err == nil && l.decoding.plane.Publisher != binary.BigEndian.Uint64(publisher) {
		err = errors.New("the envelope names another publisher")
	}
	if err != nil {
		c.Malformed(fmt.Errorf("broker %s: %w", l.address, err))
		return
	}
	l.deliver(c, envelope)
}

// Connected and Disconnected count the workers' subscriptions as connected while one of the brokers is.
func (l brokerLink) Connected() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.connected++; l.connected > 1 {
		return
	}
	for _, c := range l.workers {
		c.Connected()
	}
}

func (l brokerLink) Disconnected() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.connected--; l.connected > 0 {
		return
	}
	for _, c := range l.workers {
		c.Disconnected()
	}
}

// Malformed and Cut lose messages, as their numbers show.
func (l brokerLink) Malformed(err error) { l.report(err) }
func (l brokerLink) Cut(err error)       { l.report(err) }

func (l brokerLink) report(err error) {
	l.feed.metrics.Event("batch", "malformed", 1)
	l.lines.Log(l.feed.log, slog.LevelWarn, "kvepp cannot read a message of a ZMQ broker and ignores it", "broker",
		l.address, "subject", l.name, "error", err)
}

// These are not called for many publishers.

func (l brokerLink) Gap(_, _ uint64)             {}
func (l brokerLink) Restart()                    {}
func (l brokerLink) Replayed(zmqsub.Replay, int) {}
