package replica

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"math"
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
	firstRetry   = 100 * time.Millisecond
	lastRetry    = time.Second
	refusedRetry = 5 * time.Second // after a refusal
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
	Origin    string        `json:"replica"`
	Name      string        `json:"name"`
	Address   string        `json:"address"`
	State     State         `json:"state"`
	Bookings  int           `json:"bookings"`
	HeardAgo  float64       `json:"heard_ago_seconds"` // since its latest message
	Staleness time.Duration `json:"-"`                 // of its changes when they are applied; 0: not measured yet
	LateMS    float64       `json:"staleness_ms"`      // the same
}

// peer is another process and what this one holds of it.
type peer struct {
	origin        uint64
	name, address string
	copies        *scoring.Copies
	cancel        context.CancelCauseFunc // ends the connection; nil: there is none
	synced        bool                    // a snapshot has come whole on this connection
	heard         time.Duration           // when the latest message came
	staleness     time.Duration
	round         time.Duration // the least time from a ping to its echo on this connection; 0: none
	missed        bool          // changes were left out on this connection, because their worker is not known
}

// address is where a peer may be.
type address struct {
	cancel           context.CancelFunc
	responded        bool // a snapshot came from it, or it is no peer's
	gone, self, live bool
	logged           Reason // why it shares nothing, as was logged last
}

// unreachable is logged of an address without an answer.
const unreachable Reason = "unreachable"

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
		why := ReasonOf(err)
		wait = min(2*wait, lastRetry)
		if time.Since(begin) > 2*lastRetry {
			wait = firstRetry
		}
		n.hearing.Lock()
		gone, welcomed := a.gone || ctx.Err() != nil, a.live
		a.self, a.live = why == Self, false
		refuses := slices.Contains(refusals, why)
		if refuses || why == Duplicate {
			a.responded, wait = true, refusedRetry
		}
		if why != "" {
			n.counts.add(Closed, string(why))
		} else if !welcomed && !gone {
			n.counts.add(Failed, "")
			why = unreachable
		}
		if (refuses && why != Self || why == unreachable) && why != a.logged {
			a.logged = why
			n.config.Log.Warn("this replica and a peer share nothing; it tries again", "address", at, "reason", why,
				"error", err, "fix", why.Fix())
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
	if conn, err = c.Security.handshake(ctx, raw, tls.Client); err != nil {
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
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	p, err := n.welcome(at, a, &who, cancel)
	if err != nil {
		return err
	}
	defer func() {
		n.hearing.Lock()
		p.cancel = nil
		n.hearing.Unlock()
	}()
	n.running.Go(func() {
		defer conn.Close()
		n.ping(ctx, conn)
	})
	for message := []byte(nil); ; {
		_ = conn.SetReadDeadline(time.Now().Add(n.config.Timeout))
		message, err = receive(conn, message, maxMessage)
		switch why := ReasonOf(context.Cause(ctx)); {
		case why != "":
			return refused(why)
		case errors.Is(err, os.ErrDeadlineExceeded):
			return refused(Silent)
		case err == nil:
			err = n.take(p, a, message[0], message[1:])
		}
		if err != nil {
			return err
		}
	}
}

// ping pings a peer until ctx ends. The echo says how late its changes come.
func (n *Node) ping(ctx context.Context, conn net.Conn) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		if send(conn, stalledAfter, framed(binary.AppendUvarint(begin(typePing), uint64(n.now())))) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// welcome returns the peer that answers at an address. cancel ends the connection.
func (n *Node) welcome(at string, a *address, who *greeting, cancel context.CancelCauseFunc) (*peer, error) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	p := n.peers[who.Origin]
	switch {
	case who.Origin == n.origin:
		return nil, refused(Self)
	case p != nil && p.cancel != nil:
		return nil, refused(Duplicate)
	}
	for _, former := range n.peers {
		if former != p && former.address == at && former.cancel == nil {
			n.free(former, PeerDead) // another process answers at its address
		}
	}
	if p == nil {
		if len(n.peers) >= maxPeers {
			return nil, refused(TooMany)
		}
		p = &peer{origin: who.Origin, copies: n.config.Book.NewCopies()}
		n.peers[who.Origin] = p
	}
	p.name, p.address, p.cancel, p.synced, p.missed, p.round, p.heard = who.Name, at, cancel, false, false, 0, n.now()
	p.copies.BeginSnapshot()
	a.live = true
	return p, nil
}

// take takes a message of a peer.
func (n *Node) take(p *peer, a *address, kind byte, data []byte) error {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	p.heard = n.now()
	d := decoder{data: data}
	switch kind {
	case typeChanges:
		return n.apply(p, data)
	case typeSynced:
		p.copies.EndSnapshot()
		p.synced, a.responded, a.logged = true, true, ""
		n.config.Log.Info("this replica has a peer's bookings", "address", p.address, "name", p.name, "replica",
			originText(p.origin), "bookings", p.copies.Len())
	case typePing:
		n.measure(p, n.now()-time.Duration(d.uint(math.MaxInt64, "time")))
	case typeGoodbye:
		n.free(p, PeerLeft)
		return refused(Left)
	default:
		return errMalformed
	}
	return d.end()
}

// apply applies a message of changes. The caller holds n.hearing.
func (n *Node) apply(p *peer, data []byte) error {
	n.refresh()
	m := &n.decoded
	if err := m.parse(data, &n.theirs); err != nil {
		return err
	}
	p.missed = p.missed || m.missed > 0
	n.counts.addN(Limited, "", p.copies.Apply(m.book))
	for i := range m.book {
		if m.book[i].Kind == scoring.Booked {
			n.counts.add(Copied, "")
		}
	}
	for _, e := range m.sessions {
		table := n.config.Sessions
		if e.Key.IsResponse() {
			table = n.config.Stored
		}
		if table != nil {
			table.Apply(e)
		}
	}
	for _, l := range m.lessons {
		p.copies.Learned(l.worker, l.values)
	}
	if len(m.book) > 0 {
		n.config.Changed(m.book)
	}
	return nil
}

// measure notes how long an echo took behind what waits at the peer. The way there is taken to be half of the shortest
// round.
func (n *Node) measure(p *peer, round time.Duration) {
	if round <= 0 || round > time.Hour {
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
// was left out: the snapshot of another connection brings them back. The caller holds n.hearing.
func (n *Node) refresh() {
	joined, left := n.theirs.refresh(n.config.Pool)
	for _, p := range n.peers {
		p.missed = p.missed || left
		if joined && p.missed && p.cancel != nil {
			p.cancel(refused(NewWorker))
		}
	}
}

// endSilent frees the copies of peers that are dead. The caller holds n.hearing.
func (n *Node) endSilent() {
	for _, p := range n.peers {
		if p.cancel == nil && n.now()-p.heard > n.config.Timeout {
			n.free(p, PeerDead)
		}
	}
}

// free frees the copies of a peer. The caller holds n.hearing.
func (n *Node) free(p *peer, cause Cause) {
	delete(n.peers, p.origin)
	freed := p.copies.FreeAll()
	n.counts.addN(Freed, string(cause), freed)
	n.config.Changed(nil)
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
		ago := n.now() - p.heard
		x := Peer{originText(p.origin), p.name, p.address, Live, p.copies.Len(), ago.Seconds(), p.staleness,
			float64(p.staleness) / float64(time.Millisecond)}
		switch {
		case p.cancel == nil || ago > suspectAfter:
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
	c := Config{Group: group, Security: security, Dial: dial}
	conn, who, err := c.connect(ctx, at, greeting{Origin: rand.Uint64() | 1})
	if err == nil {
		conn.Close()
	}
	return who.Name, err
}

// OpenIndex asks the peer at an address for its index. ErrBusy: ask again later. It has no end of its own: that of the
// connection may be early. Reading fails when ctx ends.
func (n *Node) OpenIndex(ctx context.Context, at string) (io.ReadCloser, error) {
	conn, _, err := n.config.connect(ctx, at, greeting{Index: true, Origin: n.origin})
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	return patient{conn}, nil
}
