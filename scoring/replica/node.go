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
	"context"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
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
	// Dump writes this process's index for a peer that starts; nil: it gives none. ErrBusy: the peer asks again.
	Dump func(context.Context, io.Writer) error
	// Measured is called several times a second with how late each live peer's changes come.
	Measured func(time.Duration)
	Log      *slog.Logger
}

// Worker names a worker independently of the dense numbers of a process.
type Worker struct {
	Name string // of its endpoint
	Rank uint32 // data-parallel
}

// names translates between numbers and names of workers. It holds a snapshot of the pool, so that the numbers are not
// given to other workers meanwhile.
type names struct {
	snapshot *pool.Snapshot
	byNumber map[kvblock.Worker]Worker
	byName   map[Worker]kvblock.Worker
}

// refresh takes the pool's present snapshot. It reports whether workers joined and whether some left.
func (n *names) refresh(p *pool.Pool) (joined, left bool) {
	s := p.Acquire()
	if s == n.snapshot {
		s.Release()
		return false, false
	}
	was := n.byName
	n.byNumber, n.byName = map[kvblock.Worker]Worker{}, map[Worker]kvblock.Worker{}
	for i := range s.Workers {
		w := &s.Workers[i]
		name := Worker{w.Name, w.Rank}
		n.byNumber[w.Worker], n.byName[name] = name, w.Worker
		before, known := was[name]
		joined = joined || !known || before != w.Worker
	}
	for name, before := range was {
		now, there := n.byName[name]
		left = left || !there || now != before
	}
	if n.snapshot != nil {
		n.snapshot.Release()
	}
	n.snapshot = s
	return joined, left
}

// Node is one replica among its peers. Create it with New.
type Node struct {
	config Config
	origin uint64 // random, not 0
	start  time.Time
	ctx    context.Context
	stop   context.CancelFunc
	wake   chan struct{} // holds a token if changes are pending

	mu      sync.Mutex // guards pending; the innermost lock of the process
	pending pending

	telling   sync.Mutex // guards what follows, up to said
	own       names
	spare     pending // scratch memory
	readers   map[uint64]*reader
	closing   bool
	maxQueued int             // bytes
	said      map[string]bool // refusals that are logged

	hearing   sync.Mutex // guards what follows
	theirs    names
	peers     map[uint64]*peer
	addresses map[string]*address
	given     bool // SetPeers was called
	decoded   changes

	synced  chan struct{}
	once    sync.Once
	counts  *counts
	running sync.WaitGroup
}

// New returns a node without peers, which observes the book and the sessions from now on.
func New(config Config) *Node {
	n := &Node{config: config, origin: rand.Uint64() | 1, start: time.Now(), wake: make(chan struct{}, 1),
		maxQueued: maxQueued, said: map[string]bool{}, readers: map[uint64]*reader{}, peers: map[uint64]*peer{},
		addresses: map[string]*address{}, synced: make(chan struct{}), counts: newCounts()}
	if n.config.Timeout == 0 {
		n.config.Timeout = DefaultTimeout
	}
	if n.config.Dial == nil {
		n.config.Dial = dial
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	n.theirs.refresh(config.Pool)
	config.Book.Observe(n.observe)
	for _, table := range n.tables() {
		table.Observe(n.observeSession)
	}
	n.running.Go(n.pump)
	n.running.Go(n.tick)
	return n
}

func dial(ctx context.Context, at string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", at)
}

func (n *Node) tables() (all []*session.Table) {
	for _, table := range []*session.Table{n.config.Sessions, n.config.Stored} {
		if table != nil {
			all = append(all, table)
		}
	}
	return all
}

// now returns the node's clock; never 0.
func (n *Node) now() time.Duration { return time.Since(n.start) + 1 }

// tick follows the pool's workers, tells what the book has learned and how late the copies are, and ends the copies of
// peers that are dead.
func (n *Node) tick() {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for ticks := 0; ; ticks++ {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
		n.tell()
		if ticks%refreshTicks == 0 && n.config.Sessions != nil {
			n.config.Sessions.Refresh()
		}
		n.hearing.Lock()
		n.refresh()
		n.endSilent()
		n.config.Book.SetPeersStaleness(staleness(n.peerList()))
		synced := n.given
		for _, a := range n.addresses {
			synced = synced && a.responded
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
			sum += weight * float64(p.Staleness)
			weights += weight
		}
	}
	return time.Duration(sum / max(weights, 1))
}

// Synced returns a channel that is closed once the peers were given, and each of them has sent its snapshot or turned
// out to be none.
func (n *Node) Synced() <-chan struct{} { return n.synced }

// Origin names this process among its peers.
func (n *Node) Origin() string { return originText(n.origin) }

func originText(origin uint64) string { return strconv.FormatUint(origin, 16) }

// What is counted, by a reason or a cause.
const (
	Copied  = "copied"  // bookings of peers
	Limited = "limited" // bookings of peers beyond a bound
	Refused = "refused" // peers that wanted to read here, by Reason
	Closed  = "closed"  // connections to peers, by Reason
	Freed   = "freed"   // bookings of peers, by Cause
	Failed  = "failed"  // attempts to reach a peer
	Sent    = "sent"    // bytes
)

// counts counts since the start: what, and by which value.
type counts struct {
	mu sync.Mutex
	of map[[2]string]uint64
}

func newCounts() *counts {
	c := &counts{of: map[[2]string]uint64{{Copied}: 0, {Limited}: 0, {Freed, string(PeerDead)}: 0,
		{Freed, string(PeerLeft)}: 0, {Failed}: 0, {Sent}: 0}}
	for _, why := range Reasons() {
		c.of[[2]string{Refused, string(why)}], c.of[[2]string{Closed, string(why)}] = 0, 0
	}
	return c
}

func (c *counts) add(what, by string) { c.addN(what, by, 1) }

func (c *counts) addN(what, by string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of[[2]string{what, by}] += uint64(n)
}

// Counts returns what was counted since the start, by what it is and its reason or cause.
func (n *Node) Counts() map[[2]string]uint64 {
	n.counts.mu.Lock()
	defer n.counts.mu.Unlock()
	return maps.Clone(n.counts.of)
}

// Readers returns the origins of the processes that read what this one tells.
func (n *Node) Readers() []string {
	n.telling.Lock()
	defer n.telling.Unlock()
	all := []string{}
	for _, r := range n.readers {
		all = append(all, originText(r.origin))
	}
	return all
}

// Close says goodbye to the peers that read here, and ends everything.
func (n *Node) Close() {
	n.tell()
	n.telling.Lock()
	n.closing = true
	all := slices.Collect(maps.Values(n.readers))
	n.telling.Unlock()
	deadline := time.After(goodbyeIn)
	for _, r := range all {
		token(r.wake)
	}
	for _, r := range all {
		select {
		case <-r.done:
		case <-deadline:
			deadline = time.After(0)
		}
	}
	n.stop()
	n.running.Wait()
}
