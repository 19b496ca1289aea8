package replica

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"kvepp/kvblock"
	"kvepp/scoring"
)

const (
	// flushEvery is how long changes are collected under constant load. After a pause, flushBurst changes go at once:
	// requests that come together shall know of each other soon.
	flushEvery = 4 * time.Millisecond
	flushBurst = 32

	maxQueued    = 16 << 20        // bytes that wait for a peer
	stalledAfter = 2 * time.Second // a peer that takes nothing for so long is disconnected
	silentAfter  = 10 * time.Second
	handshakeIn  = 3 * time.Second
	dumpWithin   = 5 * time.Minute // for a peer to read the index
	maxReaders   = 64
	maxSaid      = 1024
	keptHashes   = 1 << 20 // of pending, whose memory is kept
)

// pending are changes that no peer was told yet.
type pending struct {
	book     []scoring.Change
	hashes   []kvblock.SequenceHash
	chains   [][]kvblock.SequenceHash
	sessions []Session
}

func (p *pending) clear() {
	if cap(p.hashes) > keptHashes {
		*p = pending{}
		return
	}
	p.book, p.hashes, p.chains, p.sessions = p.book[:0], p.hashes[:0], p.chains[:0], p.sessions[:0]
}

// observe takes a change of the book, under the book's lock.
func (n *Node) observe(c *scoring.Change) {
	n.mu.Lock()
	p := &n.pending
	kept := *c
	if len(c.Chains) > 0 {
		first := len(p.chains)
		for _, chain := range c.Chains {
			from := len(p.hashes)
			p.hashes = append(p.hashes, chain...)
			p.chains = append(p.chains, p.hashes[from:len(p.hashes):len(p.hashes)])
		}
		kept.Chains = p.chains[first:len(p.chains):len(p.chains)]
	}
	p.book = append(p.book, kept)
	n.mu.Unlock()
	token(n.wake)
}

// TellSession tells the peers of a session. It may be called under any lock.
func (n *Node) TellSession(s *Session) {
	n.mu.Lock()
	n.pending.sessions = append(n.pending.sessions, *s)
	n.mu.Unlock()
	token(n.wake)
}

// token puts a token into a channel that has room for one.
func token(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pump tells changes as they come.
func (n *Node) pump() {
	for pace := rate.NewLimiter(rate.Every(flushEvery), flushBurst); ; {
		select {
		case <-n.ctx.Done():
			return
		case <-n.wake:
		}
		if pace.Wait(n.ctx) != nil {
			return
		}
		n.telling.Lock()
		n.tell()
		n.telling.Unlock()
	}
}

// tell encodes what is pending, once for all readers. The caller holds n.telling.
func (n *Node) tell() {
	n.mu.Lock()
	n.pending, n.spare = n.spare, n.pending
	n.mu.Unlock()
	n.own.refresh(n.config.Pool) // after the swap, so that it knows the workers of all changes that have not left
	if len(n.readers) > 0 {
		var e encoder
		for i := range n.spare.book {
			c := &n.spare.book[i]
			e.change(n, c)
		}
		for i := range n.spare.sessions {
			e.session(n, &n.spare.sessions[i])
		}
		n.queue(&e)
	}
	n.spare.clear()
}

// encoder encodes changes into parts of about partBytes.
type encoder struct {
	full [][]byte
	part []byte
}

// change adds a change of the book. A change about a worker that left is none: its requests have ended.
func (e *encoder) change(n *Node, c *scoring.Change) {
	w, known := n.own.byNumber[c.Worker]
	if known || c.Kind != scoring.Booked && c.Kind != scoring.Moved {
		e.part = appendChange(e.part, c, w)
		e.cut()
	}
}

func (e *encoder) session(n *Node, s *Session) {
	if w, known := n.own.byNumber[s.Worker]; known || s.Kind != Bound {
		e.part = appendSession(e.part, s, w)
		e.cut()
	}
}

func (e *encoder) cut() {
	if len(e.part) >= partBytes {
		e.full, e.part = append(e.full, e.part), nil
	}
}

// parts returns all that was encoded.
func (e *encoder) parts() [][]byte {
	if len(e.part) > 0 {
		return append(e.full, e.part)
	}
	return e.full
}

// queue queues parts for all readers. They share the memory. The caller holds n.telling.
func (n *Node) queue(e *encoder) {
	parts := e.parts()
	if len(parts) == 0 {
		return
	}
	for _, r := range n.readers {
		for _, part := range parts {
			if r.due == "" {
				r.queue, r.queued = append(r.queue, part), r.queued+len(part)
			}
			if r.queued > n.maxQueued {
				r.snapshot(Fell)
			}
		}
	}
	n.wakeReaders()
}

func (n *Node) wakeReaders() {
	for _, r := range n.readers {
		token(r.wake)
	}
}

// teach tells the peers what the book has learned of workers. The caller holds n.telling.
func (n *Node) teach() {
	if len(n.readers) > 0 {
		var e encoder
		e.lessons(n, false)
		n.queue(&e)
	}
}

func (e *encoder) lessons(n *Node, all bool) {
	n.config.Book.Lessons(all, func(w kvblock.Worker, values []float64) {
		if name, known := n.own.byNumber[w]; known {
			e.part = appendLearned(e.part, name, values)
			e.cut()
		}
	})
}

// SnapshotReason says why a peer got a snapshot. It is a label's value.
type SnapshotReason string

// The reasons.
const (
	Joined SnapshotReason = "joined"      // it connected
	Fell   SnapshotReason = "fell_behind" // too much waited for it
	Asked  SnapshotReason = "asked"       // it left out changes about a worker that it knows now
)

// SnapshotReasons returns all reasons.
func SnapshotReasons() []SnapshotReason { return []SnapshotReason{Joined, Fell, Asked} }

// reader is a peer that reads what this process tells. Node.telling guards its fields from queue on.
type reader struct {
	origin uint64
	conn   net.Conn
	wake   chan struct{} // holds a token if there may be something to send
	done   chan struct{} // closed at the end
	queue  [][]byte      // parts to send
	queued int           // bytes
	due    SnapshotReason
	echo   uint64 // time of a ping that is not answered; 0: none
}

// snapshot makes a snapshot due, which has all that waits.
func (r *reader) snapshot(why SnapshotReason) { r.due, r.queue, r.queued = why, nil, 0 }

// Serve serves peers at a listener until Close.
func (n *Node) Serve(at net.Listener) error {
	defer context.AfterFunc(n.ctx, func() { at.Close() })()
	for {
		conn, err := at.Accept()
		switch {
		case n.ctx.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil:
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
	conn, err := n.config.Security.server(raw)
	var peer greeting
	if err == nil {
		peer, err = receiveGreeting(conn)
	}
	if err == nil {
		err = n.admit(&peer, conn)
	}
	if err != nil {
		n.refuse(conn, raw.RemoteAddr(), reasonOf(err))
		return
	}
	if c, ok := raw.(interface {
		Begin()
		End()
	}); ok { // connections that are in use make no room for others
		c.Begin()
		defer c.End()
	}
	proof, err := n.config.Security.proof(conn, serverProof)
	if err != nil {
		return
	}
	own := greeting{Origin: n.origin, Name: n.config.Name, Proof: proof}
	switch {
	case peer.Index:
		n.serveIndex(conn, &own)
	case own.send(conn) == nil:
		n.serveReader(&reader{origin: peer.Origin, conn: conn, wake: make(chan struct{}, 1), done: make(chan struct{}),
			due: Joined})
	}
}

// admit returns why a peer is refused; nil: it is not.
func (n *Node) admit(peer *greeting, conn net.Conn) error {
	n.telling.Lock()
	defer n.telling.Unlock()
	switch {
	case peer.Origin == n.origin:
		return refused(Self)
	case !n.config.Security.proves(conn, clientProof, peer.Proof):
		return refused(BadToken)
	case peer.Group != n.config.Group:
		return refused(OtherGroup)
	case !peer.Index && n.readers[peer.Origin] == nil && len(n.readers) >= maxReaders:
		return refused(TooMany)
	}
	return nil
}

// refuse tells a peer why it is refused. conn is nil if the handshake failed.
func (n *Node) refuse(conn net.Conn, from net.Addr, why Reason) {
	if why == "" {
		return
	}
	host, _, _ := net.SplitHostPort(from.String())
	n.telling.Lock()
	n.counts.add(Refused, string(why))
	known := n.said[host+string(why)] || len(n.said) >= maxSaid
	if !known {
		n.said[host+string(why)] = true
	}
	n.telling.Unlock()
	if why != Self && !known {
		n.warn("a peer that wants to read what this replica tells is refused", "peer", from.String(), "reason", why,
			"fix", why.Fix())
	}
	if conn != nil {
		_ = (&greeting{Refused: why}).send(conn)
	}
}

// serveReader tells a peer until its connection ends.
func (n *Node) serveReader(r *reader) {
	ctx, cancel := context.WithCancel(n.ctx)
	n.telling.Lock()
	if former := n.readers[r.origin]; former != nil {
		former.conn.Close() // a peer reads once
	}
	n.readers[r.origin] = r
	n.telling.Unlock()
	n.running.Go(func() {
		n.hearReader(r)
		cancel()
		r.conn.Close()
	})
	err := n.tellReader(ctx, r)
	close(r.done)
	n.telling.Lock()
	defer n.telling.Unlock()
	if n.readers[r.origin] == r {
		delete(n.readers, r.origin)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		n.counts.add(Refused, string(Stalled))
		n.warn("a peer reads too slowly what this replica tells; it is disconnected", "replica", originText(r.origin),
			"peer", r.conn.RemoteAddr().String())
	}
}

// hearReader takes a peer's pings and requests until its connection ends.
func (n *Node) hearReader(r *reader) {
	var message []byte
	for {
		_ = r.conn.SetReadDeadline(time.Now().Add(silentAfter))
		var err error
		if message, err = receive(r.conn, message, maxRequest); err != nil {
			return
		}
		d := decoder{data: message[1:]}
		n.telling.Lock()
		switch {
		case message[0] == typePing:
			r.echo = d.uint(math.MaxInt64, "time")
		case message[0] == typeAgain && r.due == "":
			r.snapshot(Asked)
		}
		n.telling.Unlock()
		if d.end() != nil {
			return
		}
		token(r.wake)
	}
}

// tellReader sends what waits for a peer until ctx or this process ends.
func (n *Node) tellReader(ctx context.Context, r *reader) (err error) {
	var message []byte
	for err == nil {
		n.telling.Lock()
		due, echo, closing := r.due, r.echo, n.closing
		message = binary.AppendUvarint(append(begin(message, typeChanges), 0), echo)
		head := len(message)
		if r.due, r.echo = "", 0; due != "" {
			n.counts.add(Snapshots, string(due))
		}
		for len(r.queue) > 0 && len(message) < partBytes {
			message = append(message, r.queue[0]...)
			r.queued -= len(r.queue[0])
			r.queue[0], r.queue = nil, r.queue[1:]
		}
		n.telling.Unlock()
		switch {
		case due != "":
			err = n.tellSnapshot(r)
		case len(message) > head || echo != 0:
			err = n.sendTo(r, message)
		case closing:
			return n.sendTo(r, begin(message, typeGoodbye))
		default:
			select {
			case <-r.wake:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return err
}

// sendTo sends a message to a peer.
func (n *Node) sendTo(r *reader, message []byte) error {
	n.counts.addN(Sent, "", len(message))
	return send(r.conn, stalledAfter, message)
}

// tellSnapshot sends all own bookings, what the book has learned, and all sessions. The changes that happen meanwhile
// are queued. It holds one part of the bookings in memory at a time, and the book's lock for few of them.
func (n *Node) tellSnapshot(r *reader) error {
	var message []byte
	sendParts := func(flags byte, parts [][]byte) error {
		for _, part := range parts {
			message = append(append(begin(message, typeChanges), flags, 0), part...)
			if err := n.sendTo(r, message); err != nil {
				return err
			}
		}
		return nil
	}
	if err := sendParts(flagFirst, [][]byte{nil}); err != nil {
		return err
	}
	for place, more := 0, true; more; {
		var e encoder
		n.telling.Lock()
		place, more = n.config.Book.Snapshot(place, func(c *scoring.Change) bool {
			e.change(n, c)
			return len(e.full) == 0
		})
		n.telling.Unlock()
		if err := sendParts(0, e.parts()); err != nil {
			return err
		}
	}
	var e encoder
	n.telling.Lock()
	e.lessons(n, true)
	if n.config.Sessions != nil {
		n.config.Sessions(func(s *Session) { e.session(n, s) })
	}
	n.telling.Unlock()
	if err := sendParts(0, e.parts()); err != nil {
		return err
	}
	return sendParts(flagLast, [][]byte{nil})
}

// serveIndex sends this process's index to a peer, after a greeting.
func (n *Node) serveIndex(conn net.Conn, own *greeting) {
	// A peer that does not read must not keep the index from others.
	ctx, cancel := context.WithTimeout(n.ctx, dumpWithin)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if n.config.Dump == nil || errors.Is(n.config.Dump(ctx, &indexWriter{conn, own}), ErrBusy) {
		_ = (&greeting{Refused: Busy}).send(conn)
	}
}

// indexWriter sends a greeting, and then what is written.
type indexWriter struct {
	net.Conn
	own *greeting // nil: it was sent
}

func (w *indexWriter) Write(p []byte) (written int, err error) {
	if w.own != nil {
		err, w.own = w.own.send(w.Conn), nil
	}
	for part := range slices.Chunk(p, partBytes) {
		if err == nil {
			err = w.SetWriteDeadline(time.Now().Add(silentAfter))
		}
		if err != nil {
			return written, err
		}
		var n int
		n, err = w.Conn.Write(part)
		written += n
	}
	return written, err
}
