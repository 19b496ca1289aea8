// Package link connects the state machine of package replica with other processes: gRPC streams on a port of their own.
//
// A [Node] owns this process's [replica.Sender] and [replica.Receiver], the server that peers read its log from, and a
// connection to each peer whose log it reads. It decides when to send, reconnects, and measures how late entries come.
// It never decides what an entry means: its owner drains changes into it and applies the effects. Peers may be slow,
// dead or malicious: what waits for a peer is the shared log, which is bounded, and one message.
//
// Concurrency: all methods are safe for concurrent use. Config.Apply is called under the receiver's lock, one call at a
// time; Config.Drain and Config.Snapshot under the sender's lock. None of them may call the Node.
package link

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"kvepp/internal/loglimit"
	"kvepp/scoring/replica"
)

const (
	// flushEvery is how long changes are collected under constant load. After a pause, flushBurst changes go at once:
	// requests that come together shall know of each other soon.
	flushEvery = 4 * time.Millisecond
	flushBurst = 32

	tickEvery    = 50 * time.Millisecond
	stalledAfter = 2 * time.Second // a peer that takes nothing for so long is disconnected
	ackWithin    = 10 * time.Second
	dumpWithin   = 5 * time.Minute // for a peer to read the index
	maxReaders   = 64              // streams of peers that read this process's log at once
	maxOfPeer    = 4               // those of one peer: a further one ends the one that was silent longest
	goodbyeIn    = time.Second
	firstRetry   = 100 * time.Millisecond
	lastRetry    = time.Second
	refusedRetry = 5 * time.Second // after a refusal that lasts
	handshakeIn  = 3 * time.Second

	service     = "kvepp.Replica"
	watchMethod = "/" + service + "/Watch"
	indexMethod = "/" + service + "/Index"
)

// Config is what a Node needs.
type Config struct {
	Self  replica.Identity
	Group string // see replica.Hello
	Name  string // of this process, for people
	// Timeout is replica.ReceiverConfig's; 0: its default.
	Timeout  time.Duration
	Security Security
	// Known reports whether this process knows a worker.
	Known func(replica.Worker) bool
	// Drain gives all changes since the last call to add, in order. oldest is how long the first of them has waited.
	Drain func(add func(*replica.Entry)) (oldest time.Duration)
	// Snapshot returns what a snapshot has beside the bookings; nil: nothing.
	Snapshot func() []replica.Entry
	// Apply carries out an effect other than Send and Close.
	Apply func(*replica.Effect)
	// Dump writes this process's index for a peer that starts; nil: it gives none. ErrBusy: the peer asks again.
	Dump func(context.Context, io.Writer) error
	// InUse marks the connection of an admitted peer's stream as in use, until end is called. Other connections may be
	// closed for new ones; nil: it does nothing.
	InUse func(context.Context) (end func())
	// Measured is called with the staleness of each live peer, now and then; nil: it is not.
	Measured func(time.Duration)
	Log      *slog.Logger
}

// ErrBusy means that a peer cannot give its index now and may later.
var ErrBusy = errors.New("link: the peer gives its index to another replica, or starts itself")

// Node is one replica among its peers. Create it with New.
type Node struct {
	config Config
	start  time.Time
	ctx    context.Context
	stop   context.CancelFunc
	server *grpc.Server
	lines  loglimit.Limiter
	said   map[string]bool // hosts and reasons of refusals that are logged; guarded by sending

	changed chan struct{} // holds a token if changes wait to be drained

	sending sync.Mutex // guards what follows, up to flush
	sender  *replica.Sender
	readers map[*reader]bool
	closing bool
	served  map[replica.SnapshotReason]uint64
	refused map[replica.Reason]uint64 // peers that this process refused
	sent    uint64                    // bytes to readers that have gone
	flush   time.Duration             // how long a change waits on average, smoothed

	receiving sync.Mutex // guards what follows, up to answered
	receiver  *replica.Receiver
	streams   map[replica.Stream]*reading
	next      replica.Stream
	closed    map[replica.Reason]uint64 // streams that this process closed, or whose peer refused it
	freed     map[replica.Cause]uint64
	answered  map[string]bool // addresses whose snapshot came, or that are no peers

	peering   sync.Mutex // guards what follows; taken before receiving
	addresses map[string]*address
	given     bool // SetPeers was called
	synced    chan struct{}
	once      sync.Once

	failed  atomic.Uint64 // attempts to reach a peer
	running sync.WaitGroup
}

// reader is a peer that reads this process's log.
type reader struct {
	cursor *replica.Cursor
	wake   chan struct{} // holds a token if there may be something to send
	cancel context.CancelCauseFunc
	since  atomic.Int64 // when the send that runs began, on the node's clock; 0: none runs
	acked  atomic.Int64 // when the latest ack came
}

// reading is a stream on which this process reads a peer's log.
type reading struct {
	cancel context.CancelFunc
	send   func([]byte) error
	why    replica.Reason // that this process closed it for
}

// address is a peer's.
type address struct {
	cancel context.CancelFunc
	gone   atomic.Bool    // it is no peer's any more: it is not dialled again
	why    replica.Reason // of the latest refusal, that is logged; only its goroutine uses it
	failed bool           // it is logged that it cannot be reached; only its goroutine uses it
	self   atomic.Bool
}

// New returns a node without peers. It sends nothing before Serve and SetPeers.
func New(config Config) *Node {
	n := &Node{config: config, start: time.Now(), changed: make(chan struct{}, 1),
		said:   map[string]bool{},
		sender: replica.NewSender(config.Self, config.Group, config.Name), readers: map[*reader]bool{},
		served: map[replica.SnapshotReason]uint64{}, refused: map[replica.Reason]uint64{},
		receiver: replica.NewReceiver(replica.ReceiverConfig{Self: config.Self, Group: config.Group,
			Timeout: config.Timeout, Known: config.Known}),
		streams: map[replica.Stream]*reading{}, closed: map[replica.Reason]uint64{}, freed: map[replica.Cause]uint64{},
		answered: map[string]bool{}, addresses: map[string]*address{}, synced: make(chan struct{})}
	n.ctx, n.stop = context.WithCancel(context.Background())
	n.running.Go(n.pump)
	n.running.Go(n.tick)
	return n
}

// Now returns the node's clock: that of the entries' times.
func (n *Node) Now() time.Duration { return time.Since(n.start) }

// Changed says that Drain has changes. It never blocks.
func (n *Node) Changed() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// pump drains changes into the log, and wakes the readers.
func (n *Node) pump() {
	pace := rate.NewLimiter(rate.Every(flushEvery), flushBurst)
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-n.changed:
		}
		if pace.Wait(n.ctx) != nil {
			return
		}
		n.sending.Lock()
		n.drain()
		n.sending.Unlock()
	}
}

// drain logs what has changed. The caller holds n.sending.
func (n *Node) drain() {
	before := n.sender.Last()
	now := n.Now()
	oldest := n.config.Drain(func(e *replica.Entry) { n.sender.Append(now, e) })
	if n.sender.Last() != before {
		n.flush += (oldest/2 - n.flush) / 16
		n.wakeReaders()
	}
}

// wakeReaders wakes the readers. The caller holds n.sending.
func (n *Node) wakeReaders() {
	for r := range n.readers {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
}

// tick passes the time on to both machines.
func (n *Node) tick() {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for count := 0; ; count++ {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
		n.sending.Lock()
		now := n.Now()
		before := n.sender.Last()
		n.sender.Tick(now)
		if count%1000 == 0 {
			n.sender.Renew()
		}
		if n.sender.Last() != before {
			n.wakeReaders()
		}
		for r := range n.readers {
			switch since := time.Duration(r.since.Load()); {
			case since != 0 && now-since > stalledAfter:
				r.cancel(errStalled)
			case now-time.Duration(r.acked.Load()) > ackWithin:
				r.cancel(errSilent)
			}
		}
		n.sending.Unlock()
		if count%2 == 0 {
			n.step(replica.Input{Kind: replica.Tick})
		}
		if n.config.Measured != nil && count%5 == 0 {
			for _, p := range n.Peers() {
				if p.State == replica.Live && p.Staleness > 0 {
					n.config.Measured(p.Staleness)
				}
			}
		}
		n.checkSynced()
	}
}

var (
	errStalled = errors.New(string(replica.Stalled))
	errSilent  = errors.New(string(replica.Silent))
	errAgain   = errors.New("the peer has opened further streams")
)

// step gives the receiver an input, and carries out the effects.
func (n *Node) step(in replica.Input) {
	n.receiving.Lock()
	defer n.receiving.Unlock()
	in.Now = n.Now()
	n.stepLocked(in)
}

func (n *Node) stepLocked(in replica.Input) {
	effects := n.receiver.Step(in)
	for i := range effects {
		e := &effects[i]
		switch e.Kind {
		case replica.Send:
			if s := n.streams[e.Stream]; s != nil && s.send(e.Message) != nil {
				s.cancel()
			}
		case replica.Close:
			n.closed[e.Reason]++
			if s := n.streams[e.Stream]; s != nil {
				s.why = e.Reason
				s.cancel()
			}
		case replica.FreeAll:
			n.freed[e.Cause] += uint64(e.Freed)
			n.config.Apply(e)
			n.config.Log.Warn("a replica's bookings were freed", "replica", originText(e.Origin), "cause", e.Cause,
				"bookings", e.Freed)
		default:
			n.config.Apply(e)
		}
	}
}

// WorkerJoined says that this process knows a worker now.
func (n *Node) WorkerJoined(w replica.Worker) {
	n.step(replica.Input{Kind: replica.WorkerJoined, Worker: w})
}

// WorkerLeft says that this process does not know a worker any more.
func (n *Node) WorkerLeft(w replica.Worker) {
	n.step(replica.Input{Kind: replica.WorkerLeft, Worker: w})
}

// Locked runs f under the lock of the receiver, so that Apply does not run meanwhile.
func (n *Node) Locked(f func()) {
	n.receiving.Lock()
	defer n.receiving.Unlock()
	f()
}

// SetPeers gives the addresses of all peers, HOST:PORT. This process's own may be among them.
func (n *Node) SetPeers(addresses []string) {
	n.peering.Lock()
	defer n.peering.Unlock()
	if n.ctx.Err() != nil {
		return
	}
	n.given = true
	for at, a := range n.addresses {
		if !slices.Contains(addresses, at) {
			delete(n.addresses, at)
			a.gone.Store(true)
			n.step(replica.Input{Kind: replica.AddressLeft, Address: at})
			n.receiving.Lock()
			delete(n.answered, at)
			connected := slices.ContainsFunc(n.receiver.Peers(),
				func(p replica.Peer) bool { return p.Address == at && p.State != replica.Suspect })
			n.receiving.Unlock()
			if !connected {
				a.cancel()
			}
		}
	}
	for _, at := range addresses {
		if n.addresses[at] != nil {
			continue
		}
		a := &address{}
		var ctx context.Context
		ctx, a.cancel = context.WithCancel(n.ctx)
		n.addresses[at] = a
		n.running.Go(func() { n.follow(ctx, at, a) })
	}
}

// Addresses returns the addresses of the peers in order, this process's own left out where it is known.
func (n *Node) Addresses() (all []string) {
	n.peering.Lock()
	defer n.peering.Unlock()
	for at, a := range n.addresses {
		if !a.self.Load() {
			all = append(all, at)
		}
	}
	slices.Sort(all)
	return all
}

// Synced returns a channel that is closed once the peers were given, and each of them has sent its snapshot or turned
// out to be none.
func (n *Node) Synced() <-chan struct{} { return n.synced }

func (n *Node) checkSynced() {
	n.peering.Lock()
	defer n.peering.Unlock()
	if !n.given {
		return
	}
	n.receiving.Lock()
	defer n.receiving.Unlock()
	for at := range n.addresses {
		if !n.answered[at] {
			return
		}
	}
	n.once.Do(func() { close(n.synced) })
}

// Peers returns what this process knows of its peers.
func (n *Node) Peers() []replica.Peer {
	n.receiving.Lock()
	defer n.receiving.Unlock()
	return n.receiver.Peers()
}

// Reader is a peer that reads this process's log, for people.
type Reader struct {
	replica.Identity
	Behind    uint64 // entries that it has not acknowledged
	Staleness time.Duration
}

// Stats are counts since the start, and the present state.
type Stats struct {
	Peers    []replica.Peer
	Readers  []Reader
	Outcomes replica.Outcomes
	// Served counts the snapshots that this process sent, Taken those that it took, by no reason.
	Served  map[replica.SnapshotReason]uint64
	Refused map[replica.Reason]uint64
	Closed  map[replica.Reason]uint64
	Freed   map[replica.Cause]uint64
	Failed  uint64        // attempts to reach a peer
	Sent    uint64        // bytes of messages
	Last    uint64        // sequence number of the latest own entry
	Live    int           // own bookings in the log
	Flush   time.Duration // how long a change waits on average
	Known   int           // addresses of peers, this process's own left out
	// Held are the copies: bookings, blocks with hashes, and bookings of workers that are not known.
	Bookings, Blocks, Parked int
}

// Stats returns the present ones.
func (n *Node) Stats() Stats {
	s := Stats{Known: len(n.Addresses()), Failed: n.failed.Load(), Served: map[replica.SnapshotReason]uint64{},
		Refused: map[replica.Reason]uint64{}, Closed: map[replica.Reason]uint64{}, Freed: map[replica.Cause]uint64{}}
	n.sending.Lock()
	s.Sent, s.Last, s.Live, s.Flush = n.sent, n.sender.Last(), n.sender.Live(), n.flush
	for r := range n.readers {
		s.Sent += r.cursor.Bytes
		s.Readers = append(s.Readers, Reader{r.cursor.Peer(), r.cursor.Behind(), r.cursor.Staleness()})
	}
	for k, v := range n.served {
		s.Served[k] = v
	}
	for k, v := range n.refused {
		s.Refused[k] = v
	}
	n.sending.Unlock()
	slices.SortFunc(s.Readers, func(a, b Reader) int { return cmp.Compare(a.Origin, b.Origin) })
	n.receiving.Lock()
	defer n.receiving.Unlock()
	s.Peers, s.Outcomes = n.receiver.Peers(), n.receiver.Outcomes
	s.Bookings, s.Blocks, s.Parked = n.receiver.Held()
	for k, v := range n.closed {
		s.Closed[k] = v
	}
	for k, v := range n.freed {
		s.Freed[k] = v
	}
	return s
}

// Close says goodbye to the peers that read the log, and ends everything.
func (n *Node) Close() {
	n.sending.Lock()
	n.closing = true
	n.drain()
	n.wakeReaders()
	n.sending.Unlock()
	for deadline := time.Now().Add(goodbyeIn); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		n.sending.Lock()
		left := len(n.readers)
		n.sending.Unlock()
		if left == 0 {
			break
		}
	}
	n.stop()
	if n.server != nil {
		n.server.Stop()
	}
	n.running.Wait()
}

// Serve serves peers at a listener until Close.
func (n *Node) Serve(at net.Listener, options ...grpc.ServerOption) error {
	return n.newServer(options).Serve(at)
}

// Self returns this process's identity.
func (n *Node) Self() replica.Identity { return n.config.Self }

// Group returns Config.Group.
func (n *Node) Group() string { return n.config.Group }
