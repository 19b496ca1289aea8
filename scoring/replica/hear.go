package replica

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"time"

	"kvepp/scoring"
)

const (
	pingEvery    = 250 * time.Millisecond
	suspectAfter = time.Second
	againAfter   = time.Second // between two snapshots that are asked for
	firstRetry   = 100 * time.Millisecond
	lastRetry    = time.Second
	refusedRetry = 5 * time.Second // after a refusal

	// Bounds of all copies. Each of N peers has one Nth: a booking must not be left out because of another peer's.
	maxBookings = 1 << 18
	maxBytes    = 1 << 28
	maxPeers    = 256
)

// ErrBusy means that a peer cannot give its index now and may later.
var ErrBusy error = refused(Busy)

// Cause says why copies were freed. It is a label's value.
type Cause string

// The causes.
const (
	PeerDead Cause = "peer_dead"
	PeerLeft Cause = "goodbye"
)

// Causes returns all causes.
func Causes() []Cause { return []Cause{PeerDead, PeerLeft} }

// State is a peer's. It is a label's value.
type State string

// The states.
const (
	Joining State = "joining" // its snapshot has not come whole
	Live    State = "live"
	Suspect State = "suspect" // its connection ended, or it is silent
)

// States returns all states.
func States() []State { return []State{Joining, Live, Suspect} }

// Peer is what a process knows of another one.
type Peer struct {
	Origin, Name, Address string
	State                 State
	Bookings              int
	HeardAgo              time.Duration // since its latest message
	Staleness             time.Duration // of its changes when they are applied; 0: not measured yet
}

// peer is another process and what this one holds of it.
type peer struct {
	origin        uint64
	name, address string
	copies        *scoring.Copies
	connected     bool
	open, synced  bool          // a snapshot has begun, or has come whole
	heard         time.Duration // when the latest message came
	staleness     time.Duration
	round         time.Duration // the least time from a ping to its echo on this connection; 0: none
	missed        bool          // changes were left out since the latest snapshot, because their worker is not known
	again         bool          // a snapshot is to be asked for
}

// address is where a peer may be.
type address struct {
	cancel           context.CancelFunc
	responded        bool // a snapshot came from it, or it is no peer's
	gone, self, live bool
	failed           bool   // it is logged that it cannot be reached
	why              Reason // of the latest refusal, that is logged
}

// SetPeers gives the addresses of all peers, HOST:PORT. This process's own may be among them. A connection to one that
// is no peer's any more stays until its process ends it: that may end its requests first.
func (n *Node) SetPeers(addresses []string) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	if n.ctx.Err() != nil {
		return
	}
	n.given = true
	for at, a := range n.addresses {
		if !slices.Contains(addresses, at) {
			delete(n.addresses, at)
			if a.gone = true; !a.live {
				a.cancel()
			}
		}
	}
	for _, at := range addresses {
		if n.addresses[at] == nil {
			a := &address{}
			ctx, cancel := context.WithCancel(n.ctx)
			a.cancel = cancel
			n.addresses[at] = a
			n.running.Go(func() { n.follow(ctx, at, a) })
		}
	}
}

// Addresses returns the addresses of the peers in order, this process's own left out where it is known.
func (n *Node) Addresses() (all []string) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	for at, a := range n.addresses {
		if !a.self {
			all = append(all, at)
		}
	}
	slices.Sort(all)
	return all
}

// follow hears the process at an address until ctx ends or the address is no peer's any more.
func (n *Node) follow(ctx context.Context, at string, a *address) {
	defer a.cancel()
	for wait := firstRetry; ; {
		begin := time.Now()
		err := n.hear(ctx, at, a)
		why := reasonOf(err)
		n.hearing.Lock()
		if why != "" {
			n.counts.add(Closed, string(why))
		}
		welcomed := a.live
		a.self, a.live = why == Self, false
		gone := a.gone || ctx.Err() != nil
		switch {
		case gone:
		case slices.Contains(refusals, why) || why == Duplicate:
			if a.why != why && why != Self && why != Duplicate {
				n.config.Log.Warn("this replica and a peer share nothing", "address", at, "reason", why, "fix",
					why.Fix())
			}
			a.why, a.responded, wait = why, true, refusedRetry
		case welcomed && time.Since(begin) > 2*lastRetry:
			wait = firstRetry
		default:
			if why == "" {
				n.counts.add(Failed, "")
				if !a.failed {
					a.failed = true
					n.config.Log.Warn("a peer cannot be reached; this replica tries again every second", "address", at,
						"error", err)
				}
			}
			wait = min(2*wait, lastRetry)
		}
		n.hearing.Unlock()
		if gone {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
	}
}

// connect connects to the process at an address, and exchanges greetings.
func (c *Config) connect(ctx context.Context, at string, own greeting) (conn net.Conn, peer greeting, err error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeIn)
	defer cancel()
	raw, err := c.Dial(ctx, at)
	if err != nil {
		return nil, peer, err
	}
	defer func() {
		if err != nil {
			raw.Close()
		}
	}()
	_ = raw.SetDeadline(time.Now().Add(handshakeIn))
	if conn, err = c.Security.client(ctx, raw); err != nil {
		return nil, peer, err
	}
	own.Group = c.Group
	if own.Proof, err = c.Security.proof(conn, clientProof); err != nil {
		return nil, peer, err
	}
	if err = own.send(conn); err != nil {
		return nil, peer, err
	}
	if peer, err = receiveGreeting(conn); err == nil && !c.Security.proves(conn, serverProof, peer.Proof) {
		err = refused(BadToken)
	}
	return conn, peer, err
}

// hear hears a peer on one connection until it ends.
func (n *Node) hear(ctx context.Context, at string, a *address) error {
	conn, who, err := n.config.connect(ctx, at, greeting{Origin: n.origin})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	p, err := n.welcome(at, a, &who)
	if err != nil {
		return err
	}
	defer func() {
		n.hearing.Lock()
		p.connected = false
		n.hearing.Unlock()
	}()
	n.running.Go(func() { n.ping(ctx, conn, p) })
	for message := []byte(nil); ; {
		_ = conn.SetReadDeadline(time.Now().Add(n.config.Timeout))
		switch message, err = receive(conn, message, maxMessage); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return refused(Silent)
		case err != nil:
			return err
		case message[0] == typeGoodbye:
			n.hearing.Lock()
			defer n.hearing.Unlock()
			n.free(p, PeerLeft)
			return refused(Left)
		case message[0] != typeChanges:
			return errMalformed
		}
		if err := n.apply(p, a, message[1:]); err != nil {
			return err
		}
	}
}

// ping measures how late a peer's changes come, and asks it for snapshots, until ctx ends.
func (n *Node) ping(ctx context.Context, conn net.Conn, p *peer) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for asked := n.now() - againAfter; ; {
		now := n.now()
		message := binary.AppendUvarint(begin(nil, typePing), uint64(now/time.Microsecond)+1)
		err := send(conn, stalledAfter, message)
		n.hearing.Lock()
		again := p.again && now-asked >= againAfter
		if again {
			p.again, asked = false, now
		}
		n.hearing.Unlock()
		if again && err == nil {
			err = send(conn, stalledAfter, begin(nil, typeAgain))
		}
		if err != nil {
			conn.Close()
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// welcome returns the peer that answers at an address.
func (n *Node) welcome(at string, a *address, who *greeting) (*peer, error) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	p := n.peers[who.Origin]
	switch {
	case who.Origin == n.origin:
		return nil, refused(Self)
	case p != nil && p.connected:
		return nil, refused(Duplicate)
	}
	for _, former := range n.peers {
		if former != p && former.address == at && !former.connected {
			n.free(former, PeerDead) // another process answers at its address
		}
	}
	if p == nil {
		if len(n.peers) >= maxPeers {
			return nil, refused(TooMany)
		}
		p = &peer{origin: who.Origin, copies: n.config.Book.NewCopies()}
		n.peers[who.Origin] = p
		n.limit()
	}
	p.name, p.address, p.connected, p.open, p.synced, p.round, p.heard = who.Name, at, true, false, false, 0, n.now()
	a.live = true
	return p, nil
}

// limit shares the bounds of copies between the peers. The caller holds n.hearing.
func (n *Node) limit() {
	for _, p := range n.peers {
		p.copies.Limit(maxBookings/len(n.peers), maxBytes/len(n.peers))
	}
}

// apply applies a message of changes.
func (n *Node) apply(p *peer, a *address, data []byte) error {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	if n.peers[p.origin] != p {
		return refused(Silent) // it was freed meanwhile
	}
	n.refresh()
	m := &n.decoded
	if err := m.parse(data, &n.theirs); err != nil {
		return err
	}
	p.heard = n.now()
	if m.flags&flagFirst != 0 {
		p.copies.BeginSnapshot()
		p.open, p.missed = true, false
	}
	if !p.open && (!p.synced || m.flags != 0) {
		return errMalformed
	}
	p.missed = p.missed || m.missed > 0
	n.counts.addN(Limited, "", p.copies.Apply(m.book))
	had := [kinds]int{0: m.missed}
	for i := range m.book {
		had[m.book[i].Kind]++
	}
	for i := range m.sessions {
		had[m.sessions[i].Kind]++
		n.config.HeardSession(&m.sessions[i])
	}
	for _, l := range m.lessons {
		if p.copies.Learned(l.worker, l.values) {
			had[Learned]++
		} else {
			had[0]++
		}
	}
	for kind, count := range had {
		if count > 0 {
			n.counts.addN(Events, kindNames[kind], count)
		}
	}
	if m.flags&flagLast != 0 {
		p.copies.EndSnapshot()
		if p.open = false; !p.synced {
			n.config.Log.Info("this replica has a peer's bookings", "address", p.address, "name", p.name, "replica",
				originText(p.origin), "bookings", p.copies.Len())
		}
		p.synced, a.responded, a.why, a.failed = true, true, "", false
	}
	if len(m.book) > 0 {
		n.config.Heard(m.book)
		n.config.Released()
	}
	n.measure(p, m.echo)
	return nil
}

// measure notes how long an echo took behind what waits at the peer. The way there is taken to be half of the shortest
// round.
func (n *Node) measure(p *peer, echo uint64) {
	round := n.now() - time.Duration(echo-1)*time.Microsecond
	if echo == 0 || round <= 0 || round > time.Hour {
		return
	}
	if p.round == 0 || round < p.round {
		p.round = round
	}
	late := round - p.round/2
	if p.staleness == 0 {
		p.staleness = late
	}
	p.staleness += (late - p.staleness) / 4
	n.config.Measured(p.staleness)
}

// refresh follows the workers of the pool. The copies at one that left are gone, and what came of one before it joined
// was left out: a snapshot brings them back. The caller holds n.hearing.
func (n *Node) refresh() {
	joined, left := n.theirs.refresh(n.config.Pool)
	for _, p := range n.peers {
		p.missed = p.missed || left
		p.again = p.again || joined && p.missed
	}
}

// endSilent frees the copies of peers that are dead. The caller holds n.hearing.
func (n *Node) endSilent() {
	for _, p := range n.peers {
		if n.now()-p.heard > n.config.Timeout {
			n.free(p, PeerDead)
		}
	}
}

// free frees the copies of a peer. The caller holds n.hearing.
func (n *Node) free(p *peer, cause Cause) {
	if n.peers[p.origin] != p {
		return // it is freed already
	}
	delete(n.peers, p.origin)
	freed := p.copies.FreeAll()
	n.counts.addN(Freed, string(cause), freed)
	n.limit()
	n.config.Released()
	n.config.Log.Warn("a replica's bookings were freed", "replica", originText(p.origin), "cause", cause, "bookings",
		freed)
}

// Peers returns what this process knows of its peers, in the order of their origins.
func (n *Node) Peers() []Peer {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	return n.peerList()
}

func (n *Node) peerList() []Peer {
	all := make([]Peer, 0, len(n.peers))
	for _, p := range n.peers {
		x := Peer{originText(p.origin), p.name, p.address, Live, p.copies.Len(), n.now() - p.heard, p.staleness}
		switch {
		case !p.connected || x.HeardAgo > suspectAfter:
			x.State = Suspect
		case !p.synced:
			x.State = Joining
		}
		all = append(all, x)
	}
	slices.SortFunc(all, func(a, b Peer) int { return cmp.Compare(a.Origin, b.Origin) })
	return all
}

// Probe asks the process at an address, HOST:PORT, whether it would share with a replica of a group that has this
// security, and returns its name. It hears no bookings. The error says why it would not; if that is a [Reason],
// ReasonOf returns it.
func Probe(ctx context.Context, security Security, group, at string) (name string, err error) {
	dial := func(ctx context.Context, at string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", at)
	}
	c := Config{Group: group, Security: security, Dial: dial}
	conn, who, err := c.connect(ctx, at, greeting{Origin: rand.Uint64() | 1})
	if err == nil {
		conn.Close()
	}
	return who.Name, err
}

// ReasonOf returns the reason why a peer shares nothing; empty: it did not answer.
func ReasonOf(err error) Reason { return reasonOf(err) }

// OpenIndex asks the peer at an address for its index. ErrBusy: ask again later. It has no end of its own: that of the
// connection may be early.
func (n *Node) OpenIndex(ctx context.Context, at string) (io.ReadCloser, error) {
	conn, _, err := n.config.connect(ctx, at, greeting{Index: true, Origin: n.origin})
	if err != nil {
		return nil, err
	}
	return &indexReader{conn, context.AfterFunc(ctx, func() { conn.Close() })}, nil
}

// indexReader reads a peer's index.
type indexReader struct {
	net.Conn
	stop func() bool
}

func (r *indexReader) Read(p []byte) (int, error) {
	if err := r.SetReadDeadline(time.Now().Add(silentAfter)); err != nil {
		return 0, err
	}
	return r.Conn.Read(p)
}

func (r *indexReader) Close() error {
	r.stop()
	return r.Conn.Close()
}
