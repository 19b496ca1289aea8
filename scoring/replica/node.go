// Package replica shares the load book and the sessions of several processes that send requests to the same workers.
//
// A [Node] tells its peers each change of its own book at once (tell.go), and keeps [scoring.Copies] of theirs
// (hear.go). A connection begins with a snapshot, and the changes follow in order. If a change was lost, the connection
// ends, and the next one begins with a snapshot again: so does one to a peer that reads too slowly. No request waits
// for a peer. Each origin changes its own bookings alone; of sessions, the later binding replaces the earlier one.
//
// Times are ages: clocks of two processes are never compared.
//
// Concurrency: all methods are safe for concurrent use. Config's functions are called under a lock of the Node and
// must not call it.
package replica

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/session"
	"kvepp/scoring"
)

const (
	// DefaultTimeout is how long a peer may be silent until its bookings are freed.
	DefaultTimeout = 3 * time.Second

	tickEvery    = 50 * time.Millisecond
	refreshTicks = 10 // ticks between two tellings of the sessions whose requests run for long
	goodbyeIn    = time.Second
)

// Config is what a Node needs.
type Config struct {
	Group    string // whose endpoints the process picks from; replicas of another group share nothing
	Name     string // of this process, for people
	Timeout  time.Duration
	Security Security
	Book     *scoring.ActiveSequences
	Pool     *pool.Pool
	// Sessions are the conversations' workers, and Stored those of stored responses; nil: not shared.
	Sessions, Stored *session.Table
	// Dial connects to an address; nil: over TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// Changed takes the changes of a peer that had an effect, after the copies have them; none if all of a peer's
	// bookings ended. Load may have ended with them.
	Changed func([]scoring.Change)
	// Charged takes what a peer said by its Charge.
	Charged func(tenant uint64, tokens int, turn, waits bool)
	// Dump writes this process's index for a peer that starts; nil: it gives none. If it writes nothing, the peer asks
	// again: its OpenIndex returns Busy.
	Dump func(context.Context, io.Writer) error
	Busy error
	// Measured is called several times a second with how late each live peer's changes come.
	Measured func(time.Duration)
	// Count counts what happens, by a reason or a cause; with 0, it learns that this may happen.
	Count func(what, by string, n int)
	Log   *slog.Logger
}

// Worker names a worker independently of the dense numbers of a process.
type Worker struct {
	Name string // of its endpoint
	Rank uint32 // data-parallel
}

// Node is one replica among its peers. Create it with New.
type Node struct {
	config Config
	origin uint64 // random, not 0
	tables []*session.Table
	start  time.Time
	ctx    context.Context
	stop   context.CancelFunc

	mu         sync.Mutex // guards what follows, up to closing; the innermost lock of the process
	news       *sync.Cond // something of it has changed
	readers    map[uint64]*reader
	last       *chunk // of the log
	logged     int    // bytes
	chunkBytes int
	closing    bool

	hearing sync.Mutex // guards what follows
	numbers map[Worker]kvblock.Worker
	peers   map[string]*peer // by address
	given   bool             // SetPeers was called

	names sync.Map // Worker by kvblock.Worker: those that were needed

	synced  chan struct{}
	once    sync.Once
	running sync.WaitGroup
}

// New returns a node without peers, which observes the book, the sessions and the pool from now on: call it before the
// first update of these.
func New(config Config) *Node {
	n := &Node{config: config, origin: rand.Uint64() | 1, start: time.Now(), readers: map[uint64]*reader{},
		last: &chunk{}, chunkBytes: chunkBytes, numbers: map[Worker]kvblock.Worker{}, peers: map[string]*peer{},
		synced: make(chan struct{})}
	n.news = sync.NewCond(&n.mu)
	n.config.Timeout = cmp.Or(config.Timeout, DefaultTimeout)
	if n.config.Dial == nil {
		n.config.Dial = dial
	}
	for _, why := range Reasons {
		config.Count(Refused, string(why), 0)
		config.Count(Closed, string(why), 0)
	}
	config.Count(Freed, PeerDead, 0)
	config.Count(Freed, PeerLeft, 0)
	n.ctx, n.stop = context.WithCancel(context.Background())
	config.Pool.Watch(n)
	config.Book.Observe(n.observe)
	for _, table := range []*session.Table{config.Sessions, config.Stored} {
		if table != nil {
			table.Observe(n.observeSession)
			n.tables = append(n.tables, table)
		}
	}
	n.running.Go(n.tick)
	return n
}

func dial(ctx context.Context, at string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", at)
}

// now returns the node's clock; never 0.
func (n *Node) now() time.Duration { return time.Since(n.start) + 1 }

// tick tells the book how late the copies are, ends those of peers that are dead, and refreshes sessions.
func (n *Node) tick() {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for ticks := 0; ; ticks++ {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
		if ticks%refreshTicks == 0 && n.config.Sessions != nil {
			n.config.Sessions.Refresh()
		}
		n.config.Book.SetPeersStaleness(staleness(n.Peers()))
		n.hearing.Lock()
		synced := n.given
		for _, p := range n.peers {
			if p.cancel == nil && n.now()-p.heard > n.config.Timeout {
				n.free(p, PeerDead)
			}
			synced = synced && (p.responded || p.gone)
		}
		n.hearing.Unlock()
		if synced {
			n.once.Do(func() { close(n.synced) })
		}
	}
}

// staleness returns how late the copies are: the mean of the live peers, weighted by their bookings.
func staleness(peers []Peer) time.Duration {
	var sum, weights float64
	for _, p := range peers {
		if p.State == Live {
			weight := float64(p.Bookings + 1)
			sum += weight * p.Staleness
			weights += weight
		}
	}
	return time.Duration(sum / max(weights, 1) * float64(time.Millisecond))
}

// Synced returns a channel that is closed once the peers were given, and each of them has sent its snapshot or turned
// out to be none.
func (n *Node) Synced() <-chan struct{} { return n.synced }

// Origin names this process among its peers.
func (n *Node) Origin() string { return originText(n.origin) }

func originText(origin uint64) string { return strconv.FormatUint(origin, 16) }

// What is counted: what, by a reason or a cause.
const (
	Copied  = "copied"  // bookings of peers
	Limited = "limited" // bookings of peers beyond a bound
	Refused = "refused" // peers that wanted to read here, by Reason
	Closed  = "closed"  // connections to peers, by Reason
	Freed   = "freed"   // bookings of peers, by a cause
	Failed  = "failed"  // attempts to reach a peer
	Sent    = "sent"    // bytes

	PeerDead = "peer_dead" // causes
	PeerLeft = "goodbye"
)

// Readers returns the origins of the processes that read what this one tells.
func (n *Node) Readers() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := []string{}
	for origin := range n.readers {
		all = append(all, originText(origin))
	}
	return all
}

// Close says goodbye to the peers that read here, and ends everything.
func (n *Node) Close() {
	defer n.running.Wait()
	defer n.stop()
	defer time.AfterFunc(goodbyeIn, n.stop).Stop()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closing = true
	n.news.Broadcast()
	for len(n.readers) > 0 {
		n.news.Wait()
	}
}
