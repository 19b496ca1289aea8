package replica

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/session"
	"kvepp/scoring"
)

const (
	pingEvery     = 250 * time.Millisecond
	suspectAfter  = time.Second
	firstRetry    = 100 * time.Millisecond
	lastRetry     = time.Second
	refusedRetry  = 5 * time.Second // after a refusal
	appliedAtOnce = 32              // changes
)

// The states of a peer, as labels.
const (
	Joining = "joining" // its snapshot has not come whole
	Live    = "live"
	Suspect = "suspect" // its connection ended, or it is silent
)

// Peer is what a process knows of another one.
type Peer struct {
	Origin    string  `json:"replica"`
	Name      string  `json:"name"`
	Address   string  `json:"address"`
	State     string  `json:"state"`
	Bookings  int     `json:"bookings"`
	HeardAgo  float64 `json:"heard_ago_seconds"` // since its latest message
	Staleness float64 `json:"staleness_ms"`      // of its changes when they are applied; 0: not measured yet
}

// peer is a process at an address, and what this one holds of it.
type peer struct {
	address    string
	gone       bool     // the address is no peer's any more
	self       bool     // it is this process's own
	responded  bool     // a snapshot came from it, or it is no peer's
	logged     []Reason // why it shares nothing, as was logged since it shared
	origin     uint64
	name       string
	copies     *scoring.Copies // nil: none
	heard      time.Duration   // when the latest record came
	staleness  time.Duration
	connection // zero: none
}

// connection is what is known of a peer's present connection.
type connection struct {
	cancel context.CancelCauseFunc
	synced bool          // the snapshot has come whole
	missed bool          // changes were left out, because their worker is not known
	round  time.Duration // the least time from a ping to its echo; 0: none
	news   changes       // not applied yet
}

// SetPeers gives the addresses of all peers, HOST:PORT. This process's own may be among them. A connection to one that
// is no peer's any more stays until its process ends it: that may end its requests first.
func (n *Node) SetPeers(addresses []string) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	n.given = true
	for at, p := range n.peers {
		p.gone = !slices.Contains(addresses, at)
	}
	for _, at := range addresses {
		if n.peers[at] == nil && n.ctx.Err() == nil {
			p := &peer{address: at}
			n.peers[at] = p
			n.running.Go(func() { n.follow(p) })
		}
	}
}

// Addresses returns the addresses of the peers in order, this process's own left out where it is known.
func (n *Node) Addresses() (all []string) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	for at, p := range n.peers {
		if !p.self && !p.gone {
			all = append(all, at)
		}
	}
	slices.Sort(all)
	return all
}

// WorkerJoined knows a worker from now on.
func (n *Node) WorkerJoined(w pool.Worker) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	n.numbers[Worker{w.Name, w.Rank}] = w.Worker
	for _, p := range n.peers {
		if p.missed { // the snapshot of another connection has what was left out
			p.cancel(refused(NewWorker))
		}
	}
}

// WorkerLeft forgets a worker. Its copies are gone; if it comes again, a snapshot brings them back.
func (n *Node) WorkerLeft(w kvblock.Worker) {
	n.names.Delete(w)
	n.hearing.Lock()
	defer n.hearing.Unlock()
	for name, number := range n.numbers {
		if number == w {
			delete(n.numbers, name)
		}
	}
	for _, p := range n.peers {
		p.missed = p.cancel != nil
	}
}

// follow hears the process at an address until this one ends or the address is no peer's any more.
func (n *Node) follow(p *peer) {
	for wait, done := firstRetry, false; !done; {
		err := n.hear(p)
		why := ReasonOf(err)
		n.hearing.Lock()
		welcome, refuses := p.synced, slices.Contains(refusals, why)
		if wait = min(2*wait, lastRetry); welcome {
			wait = firstRetry
		}
		p.self, p.connection = why == Self, connection{}
		if refuses || why == Duplicate {
			p.responded, wait = true, refusedRetry
		}
		if why != "" {
			n.config.Count(Closed, string(why), 1)
		} else if !welcome && n.ctx.Err() == nil {
			n.config.Count(Failed, "", 1)
			why = "unreachable"
		}
		if (refuses && why != Self || why == "unreachable") && !slices.Contains(p.logged, why) {
			p.logged = append(p.logged, why)
			n.config.Log.Warn("this replica and a peer share nothing; it tries again", "address", p.address, "reason",
				why, "error", err, "fix", why.Fix())
		}
		if done = p.gone; done {
			n.free(p, PeerDead)
			delete(n.peers, p.address)
		}
		n.hearing.Unlock()
		select {
		case <-n.ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
	}
}

// connect connects to the process at an address, and exchanges greetings.
func (c *Config) connect(ctx context.Context, at string, own greeting) (conn *link, peer greeting, err error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeIn)
	defer cancel()
	raw, err := c.Dial(ctx, at)
	if err != nil {
		return nil, peer, err
	}
	_ = raw.SetDeadline(time.Now().Add(handshakeIn))
	conn, err = c.Security.handshake(ctx, raw, tls.Client)
	own.Group = c.Group
	if err == nil {
		own.Proof, err = c.Security.proof(conn.Conn, clientProof)
	}
	if err == nil {
		err = own.send(conn)
	}
	if err == nil {
		peer, err = receiveGreeting(conn.in)
	}
	if err == nil && !c.Security.proves(conn.Conn, serverProof, peer.Proof) {
		err = refused(BadToken)
	}
	if err != nil {
		raw.Close()
	}
	return conn, peer, err
}

// hear hears a peer on one connection until it ends.
func (n *Node) hear(p *peer) error {
	conn, who, err := n.config.connect(n.ctx, p.address, greeting{Origin: n.origin})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(n.ctx)
	defer cancel(nil)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err = n.welcome(p, &who, cancel); err != nil {
		return err
	}
	conn.within = n.config.Timeout
	n.running.Go(func() { n.ping(ctx, conn) })
	for r := new(record); err == nil; {
		if err = r.read(conn.in, maxData); err == nil {
			err = n.take(p, r, conn.in.Buffered() == 0)
		}
	}
	if why := ReasonOf(context.Cause(ctx)); why != "" {
		return refused(why)
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		return refused(Silent)
	}
	return err
}

// ping pings a peer until ctx ends. The echo says how late its changes come.
func (n *Node) ping(ctx context.Context, conn *link) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		if _, err := conn.Write(appendRecord(nil, pingKind, nil, uint64(n.now()))); err != nil {
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

// welcome takes the process that answers at an address as a peer. cancel ends the connection.
func (n *Node) welcome(p *peer, who *greeting, cancel context.CancelCauseFunc) error {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	if who.Origin == n.origin {
		return refused(Self)
	}
	for _, other := range n.peers {
		switch same := other.origin == who.Origin; {
		case same && other.cancel != nil:
			return refused(Duplicate)
		case same != (other == p): // another process answers here, or it answered at another address before
			n.free(other, PeerDead)
		}
	}
	if p.copies == nil {
		p.copies = n.config.Book.NewCopies()
	}
	p.origin, p.name, p.heard, p.connection = who.Origin, who.Name, n.now(), connection{cancel: cancel}
	p.copies.BeginSnapshot()
	return nil
}

// take takes a record of a peer. last says that no other one is there to be applied with it.
func (n *Node) take(p *peer, r *record, last bool) (err error) {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	worker := func(name Worker) (kvblock.Worker, bool) {
		w, known := n.numbers[name]
		p.missed = p.missed || !known
		return w, known
	}
	switch {
	case r.kind <= lastChange:
		err = p.news.add(r, worker)
	case r.kind <= lastEvent:
		n.takeEvent(r, worker)
	case r.kind == syncedKind && !p.synced:
		n.apply(p)
		p.copies.EndSnapshot()
		p.synced, p.responded, p.logged = true, true, nil
		n.config.Log.Info("this replica has a peer's bookings", "address", p.address, "name", p.name, "replica",
			originText(p.origin), "bookings", p.copies.Len())
	case r.kind == pingKind:
		n.measure(p, n.now()-time.Duration(r.ints[0]))
	case r.kind == chargedKind && len(r.data) == 8:
		n.config.Charged(binary.LittleEndian.Uint64(r.data), int(min(r.ints[0], scoring.MaxISLTokens)),
			r.ints[1]&chargedTurn != 0, r.ints[1]&tenantWaits != 0)
	case r.kind == goodbyeKind:
		n.free(p, PeerLeft)
		return refused(Left)
	default:
		err = errMalformed
	}
	if last || len(p.news.book) >= appliedAtOnce || len(p.news.hashes) > MaxHashes {
		n.apply(p)
		p.heard = n.now()
	}
	return err
}

// takeEvent takes an event of a session.
func (n *Node) takeEvent(r *record, worker func(Worker) (kvblock.Worker, bool)) {
	e, known := session.Event{Kind: session.EventKind(r.kind - lastChange)}, true
	name := r.data[copy(e.Key[:], r.data):]
	if e.Kind == session.Bound {
		e.Worker, known = worker(Worker{string(name), uint32(r.ints[0])})
		e.TTL, e.Age = duration(r.ints[1]), duration(r.ints[2])
	}
	table := n.config.Sessions
	if e.Key.IsResponse() {
		table = n.config.Stored
	}
	if known && table != nil {
		table.Apply(e)
	}
}

// apply applies the changes that have come. The caller holds n.hearing.
func (n *Node) apply(p *peer) {
	m := &p.news
	if len(m.book) == 0 {
		return
	}
	added, limited := p.copies.Apply(m.book)
	n.config.Count(Copied, "", added)
	n.config.Count(Limited, "", limited)
	n.config.Changed(m.book)
	m.clear()
}

// measure notes how long an echo took behind what waits at the peer. The way there is taken to be half of the shortest
// round.
func (n *Node) measure(p *peer, round time.Duration) {
	if round <= 0 || round > time.Hour {
		return
	}
	p.round = min(cmp.Or(p.round, round), round)
	late := round - p.round/2
	p.staleness = cmp.Or(p.staleness, late)
	p.staleness += (late - p.staleness) / 4
	n.config.Measured(p.staleness)
}

// free frees the copies of a peer, if it has any. The caller holds n.hearing.
func (n *Node) free(p *peer, cause string) {
	if p.copies == nil {
		return
	}
	freed := p.copies.FreeAll()
	n.config.Count(Freed, cause, freed)
	n.config.Changed(nil)
	n.config.Log.Warn("a replica's bookings were freed", "replica", originText(p.origin), "cause", cause, "bookings",
		freed)
	p.copies, p.origin, p.staleness = nil, 0, 0
}

// Peers returns what this process knows of its peers, in the order of their origins.
func (n *Node) Peers() []Peer {
	n.hearing.Lock()
	defer n.hearing.Unlock()
	all := make([]Peer, 0, len(n.peers))
	for _, p := range n.peers {
		if p.copies == nil {
			continue
		}
		ago := n.now() - p.heard
		x := Peer{originText(p.origin), p.name, p.address, Live, p.copies.Len(), ago.Seconds(),
			1000 * p.staleness.Seconds()}
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
// security, and returns its name. ReasonOf says why it would not, if the error has a [Reason].
func Probe(ctx context.Context, security Security, group, at string) (name string, err error) {
	c := Config{Group: group, Security: security, Dial: dial}
	conn, who, err := c.connect(ctx, at, greeting{Origin: rand.Uint64() | 1})
	if err == nil {
		conn.Close()
	}
	return who.Name, err
}

// OpenIndex asks the peer at an address for its index. Config.Busy: ask again later. It has no end of its own: that of
// the connection may be early. Reading fails when ctx ends.
func (n *Node) OpenIndex(ctx context.Context, at string) (io.ReadCloser, error) {
	conn, _, err := n.config.connect(ctx, at, greeting{Index: true, Origin: n.origin})
	if err != nil {
		return nil, err
	}
	conn.within = silentAfter
	if _, err := conn.in.Peek(1); err != nil {
		conn.Close()
		if errors.Is(err, io.EOF) {
			err = n.config.Busy
		}
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	return conn, nil
}
