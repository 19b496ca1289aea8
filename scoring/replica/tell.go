package replica

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/time/rate"

	"kvepp/kvblock"
	"kvepp/router/session"
	"kvepp/scoring"
)

const (
	// flushEvery is how long changes are collected under constant load. After a pause, flushBurst changes go at once:
	// requests that come together shall know of each other soon.
	flushEvery = 4 * time.Millisecond
	flushBurst = 32

	chunkBytes  = 64 << 10
	maxBehind   = 256 // chunks that wait for a peer; beyond them it is disconnected
	handshakeIn = 3 * time.Second
	acceptAgain = 50 * time.Millisecond // after a connection could not be accepted
	silentAfter = 10 * time.Second      // a peer that takes nothing of the index for so long is disconnected
	dumpWithin  = 5 * time.Minute       // for a peer to read the index
	maxPeers    = 256
)

// chunk is a part of the log of what this process tells. A reader's place in it keeps the rest of the log in memory.
type chunk struct {
	data   []byte // grows
	next   *chunk
	number int
}

// reader is a peer that reads what this process tells. Node.mu guards its fields from at on.
type reader struct {
	conn   *link
	ctx    context.Context    // of the connection
	cancel context.CancelFunc // ends it
	pace   *rate.Limiter

	at     *chunk
	from   int    // of its data
	sent   int    // bytes of the log, including those before it came
	ping   uint64 // the peer's time, to say again; 0: none
	pinged int    // of the log then
	slow   bool   // too much waited, or it was silent
}

// tell appends a record to the log.
func (n *Node) tell(record func(b []byte) []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.readers) == 0 {
		return
	}
	if len(n.last.data) >= n.chunkBytes {
		n.last.next = &chunk{number: n.last.number + 1, data: make([]byte, 0, n.chunkBytes+n.chunkBytes/4)}
		n.last = n.last.next
		for _, r := range n.readers {
			if n.last.number-r.at.number > maxBehind {
				r.slow = true
				r.cancel()
			}
		}
	}
	before := len(n.last.data)
	n.last.data = record(n.last.data)
	n.logged += len(n.last.data) - before
	n.news.Broadcast()
}

// observe takes a change of the book, under the book's lock.
func (n *Node) observe(c *scoring.Change) {
	n.tell(func(b []byte) []byte { return appendChange(b, c, n.nameOf) })
}

// observeSession takes an event of a session, under the lock of its table.
func (n *Node) observeSession(e session.Event) {
	n.tell(func(b []byte) []byte { return appendEvent(b, &e, n.nameOf) })
}

// Charge tells the peers that a tenant was charged for tokens, for a request's turn or beside it, and whether requests
// of it wait. Peers that connect later do not hear of it: who is served next is a matter of the moment.
func (n *Node) Charge(tenant uint64, tokens int, turn, waits bool) {
	state := uint64(0)
	if turn {
		state |= chargedTurn
	}
	if waits {
		state |= tenantWaits
	}
	n.tell(func(b []byte) []byte {
		return appendRecord(b, chargedKind, binary.LittleEndian.AppendUint64(nil, tenant), uint64(tokens), state)
	})
}

// nameOf returns the name of a worker; empty: it has left.
func (n *Node) nameOf(w kvblock.Worker) Worker {
	if name, known := n.names.Load(w); known {
		return name.(Worker)
	}
	s := n.config.Pool.Acquire()
	defer s.Release()
	x := s.Worker(w)
	if x == nil {
		return Worker{}
	}
	n.names.Store(w, Worker{x.Name, x.Rank})
	return Worker{x.Name, x.Rank}
}

// Serve serves peers at a listener until Close.
func (n *Node) Serve(at net.Listener) error {
	defer context.AfterFunc(n.ctx, func() { at.Close() })()
	for {
		conn, err := at.Accept()
		switch {
		case n.ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil: // such as too many open files
			<-time.After(acceptAgain)
			continue
		}
		n.running.Go(func() {
			defer conn.Close()
			defer context.AfterFunc(n.ctx, func() { conn.Close() })()
			n.serve(conn)
		})
	}
}

// serve serves one connection.
func (n *Node) serve(raw net.Conn) {
	_ = raw.SetDeadline(time.Now().Add(handshakeIn))
	conn, err := n.config.Security.handshake(n.ctx, raw, tls.Server)
	var peer, own greeting
	if err == nil {
		peer, err = receiveGreeting(conn.in)
	}
	n.mu.Lock()
	full := n.readers[peer.Origin] == nil && len(n.readers) >= maxPeers
	n.mu.Unlock()
	switch {
	case err != nil:
	case peer.Origin == n.origin:
		err = refused(Self)
	case !n.config.Security.proves(conn.Conn, clientProof, peer.Proof):
		err = refused(BadToken)
	case peer.Group != n.config.Group:
		err = refused(OtherGroup)
	case !peer.Index && full:
		err = refused(TooMany)
	default:
		own.Proof, err = n.config.Security.proof(conn.Conn, serverProof)
	}
	if own.Refused = ReasonOf(err); own.Refused != "" {
		n.config.Count(Refused, string(own.Refused), 1)
	} else if err == nil {
		own.Origin, own.Name = n.origin, n.config.Name
	}
	if conn == nil || own.send(conn) != nil || err != nil {
		return
	}
	if c, ok := raw.(interface {
		Begin()
		End()
	}); ok { // connections that are in use make no room for others
		c.Begin()
		defer c.End()
	}
	if peer.Index {
		n.serveIndex(conn)
	} else {
		n.serveReader(conn, peer.Origin)
	}
}

// serveReader tells a peer until its connection ends.
func (n *Node) serveReader(conn *link, origin uint64) {
	ctx, cancel := context.WithCancel(n.ctx)
	defer cancel()
	conn.within = n.config.Timeout
	r := &reader{conn: conn, ctx: ctx, cancel: cancel, pace: rate.NewLimiter(rate.Every(flushEvery), flushBurst)}
	context.AfterFunc(ctx, func() {
		conn.Close()
		n.mu.Lock()
		defer n.mu.Unlock()
		n.news.Broadcast()
	})
	n.mu.Lock()
	if former := n.readers[origin]; former != nil {
		former.cancel() // a peer reads once
	}
	r.at, r.from, r.sent = n.last, len(n.last.data), n.logged
	n.readers[origin] = r
	n.mu.Unlock()
	n.running.Go(func() {
		defer cancel()
		n.hearPings(r)
	})
	err := n.tellSnapshot(r)
	for err == nil {
		err = n.tellNews(r)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.slow || errors.Is(err, os.ErrDeadlineExceeded) {
		n.config.Count(Refused, string(Stalled), 1)
	}
	if n.readers[origin] == r {
		delete(n.readers, origin)
		n.news.Broadcast()
	}
}

// hearPings has a peer's pings said again, behind what waits for it, until its connection ends.
func (n *Node) hearPings(r *reader) {
	for ping := new(record); ; {
		err := ping.read(r.conn.in, 0)
		n.mu.Lock()
		r.slow = r.slow || errors.Is(err, os.ErrDeadlineExceeded)
		if err == nil && r.ping == 0 && ping.kind == pingKind {
			r.ping, r.pinged = ping.ints[0], n.logged
		}
		n.news.Broadcast()
		n.mu.Unlock()
		if err != nil || ping.kind != pingKind {
			return
		}
	}
}

// send sends records to a peer.
func (n *Node) send(r *reader, records []byte) error {
	n.config.Count(Sent, "", len(records))
	_, err := r.conn.Write(records)
	return err
}

// tellNews waits for something to tell a peer, and tells it. The error is net.ErrClosed when all is told.
func (n *Node) tellNews(r *reader) error {
	n.mu.Lock()
	for r.ctx.Err() == nil && r.sent == n.logged && r.ping == 0 && !n.closing {
		n.news.Wait()
	}
	if r.at.next == nil {
		n.mu.Unlock()
		if err := r.pace.Wait(r.ctx); err != nil {
			return err
		}
		n.mu.Lock()
	}
	part := r.at.data[r.from:]
	if r.from, r.sent = r.from+len(part), r.sent+len(part); len(part) == 0 && r.at.next != nil {
		r.at, r.from = r.at.next, 0
	}
	var echo []byte
	if r.ping != 0 && r.sent >= r.pinged {
		echo, r.ping = appendRecord(nil, pingKind, nil, r.ping), 0
	}
	goodbye := n.closing && r.sent == n.logged
	if goodbye {
		echo = appendRecord(nil, goodbyeKind, nil)
	}
	n.mu.Unlock()
	err := n.send(r, part)
	if echo != nil && err == nil {
		err = n.send(r, echo)
	}
	if goodbye && err == nil {
		err = net.ErrClosed
	}
	return err
}

// tellSnapshot sends all own bookings and all sessions. It holds few of the bookings in memory at a time, and the
// book's lock for few of them.
func (n *Node) tellSnapshot(r *reader) (err error) {
	var b []byte
	for place, more := 0, true; more && err == nil; {
		place, more = n.config.Book.Snapshot(place, func(c *scoring.Change) bool {
			b = appendChange(b, c, n.nameOf)
			return len(b) < chunkBytes
		})
		err, b = n.send(r, b), b[:0]
	}
	for _, table := range n.tables {
		for _, e := range table.Snapshot() {
			if b = appendEvent(b, &e, n.nameOf); len(b) > chunkBytes && err == nil {
				err, b = n.send(r, b), b[:0]
			}
		}
	}
	if err == nil {
		err = n.send(r, appendRecord(b, syncedKind, nil))
	}
	return err
}

// serveIndex sends this process's index to a peer; nothing if it cannot give it now.
func (n *Node) serveIndex(conn *link) {
	// A peer that does not read must not keep the index from others.
	ctx, cancel := context.WithTimeout(n.ctx, dumpWithin)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	defer conn.Close()
	if conn.within = silentAfter; n.config.Dump != nil {
		_ = n.config.Dump(ctx, conn)
	}
}
