// Package replica shares the load book and the sessions of several processes that send requests to the same workers.
//
// A [Node] tells its peers each change of its own book at once (tell.go), and keeps [scoring.Copies] of theirs
// (hear.go). A connection begins with a snapshot, and the changes follow in order. What waits for a peer that reads
// slowly is bounded; beyond the bound it is dropped, and the peer gets another snapshot. So no request waits for a
// peer. Each origin changes its own bookings alone; of sessions, the later binding replaces the earlier one.
//
// Times are ages: clocks of two processes are never compared.
//
// Concurrency: all methods are safe for concurrent use. Config's functions are called under a lock of the Node, Heard
// and Released with the peers' one, and must not call the Node.
package replica

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"

	"kvepp/internal/loglimit"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

const (
	// DefaultTimeout is how long a peer may be silent until its bookings are freed.
	DefaultTimeout = 3 * time.Second

	tickEvery = 50 * time.Millisecond
	goodbyeIn = time.Second
)

// Config is what a Node needs.
type Config struct {
	Group    string // whose endpoints the process picks from; replicas of another group share nothing
	Name     string // of this process, for people
	Timeout  time.Duration
	Security Security
	Book     *scoring.ActiveSequences
	Pool     *pool.Pool
	// Dial connects to an address; nil: over TCP.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// Sessions gives all sessions to each, for a snapshot; HeardSession takes a peer's.
	Sessions     func(each func(*Session))
	HeardSession func(*Session)
	// Heard takes the changes of a peer that had an effect, after the copies have them, and Released that load may have
	// ended.
	Heard    func([]scoring.Change)
	Released func()
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
	lines  loglimit.Limiter
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

	hearing   sync.Mutex // guards what follows; taken before telling
	theirs    names
	peers     map[uint64]*peer
	addresses map[string]*address
	given     bool // SetPeers was called
	decoded   changes

	synced  chan struct{}
	once    sync.Once
	counts  counts
	running sync.WaitGroup
}

// New returns a node without peers, which observes the book from now on.
func New(config Config) *Node {
	n := &Node{config: config, origin: rand.Uint64() | 1, start: time.Now(), wake: make(chan struct{}, 1),
		maxQueued: maxQueued, readers: map[uint64]*reader{}, said: map[string]bool{},
		peers: map[uint64]*peer{}, addresses: map[string]*address{}, synced: make(chan struct{})}
	if n.config.Timeout == 0 {
		n.config.Timeout = DefaultTimeout
	}
	if n.config.Dial == nil {
		n.config.Dial = func(ctx context.Context, at string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", at)
		}
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	n.theirs.refresh(config.Pool)
	config.Book.Observe(n.observe)
	n.running.Go(n.pump)
	n.running.Go(n.tick)
	return n
}

// now returns the node's clock; never 0.
func (n *Node) now() time.Duration { return time.Since(n.start) + 1 }

// tick follows the pool's workers, tells what the book has learned, and ends the copies of peers that are dead.
func (n *Node) tick() {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
		}
		n.telling.Lock()
		n.teach()
		n.tell()
		n.telling.Unlock()
		n.hearing.Lock()
		n.refresh()
		n.endSilent()
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

// Synced returns a channel that is closed once the peers were given, and each of them has sent its snapshot or turned
// out to be none.
func (n *Node) Synced() <-chan struct{} { return n.synced }

// Origin names this process among its peers.
func (n *Node) Origin() string { return originText(n.origin) }

func originText(origin uint64) string { return strconv.FormatUint(origin, 16) }

// What is counted, by a reason, a cause or a kind.
const (
	Events    = "events"    // changes of peers that had an effect, by kind; none: they had no effect
	Limited   = "limited"   // bookings of peers beyond a bound
	Snapshots = "snapshots" // sent, by SnapshotReason
	Refused   = "refused"   // peers that wanted to read here, by Reason
	Closed    = "closed"    // connections to peers, by Reason
	Freed     = "freed"     // bookings of peers, by Cause
	Failed    = "failed"    // attempts to reach a peer
	Sent      = "sent"      // bytes
)

// Counted is what is counted, and by which value.
type Counted struct{ What, By string }

// counts counts since the start.
type counts struct {
	mu sync.Mutex
	of map[Counted]uint64
}

func (c *counts) add(what, by string) { c.addN(what, by, 1) }

func (c *counts) addN(what, by string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		c.of = map[Counted]uint64{}
	}
	c.of[Counted{what, by}] += uint64(n)
}

// Counts returns what was counted since the start.
func (n *Node) Counts() map[Counted]uint64 {
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
	n.telling.Lock()
	n.closing = true
	n.tell()
	n.wakeReaders()
	var all []*reader
	for _, r := range n.readers {
		all = append(all, r)
	}
	n.telling.Unlock()
	deadline := time.After(goodbyeIn)
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

// warn logs what peers can cause.
func (n *Node) warn(text string, about ...any) {
	if held, ok := n.lines.Allow(); ok {
		if held > 0 {
			about = append(about, "suppressed_lines", held)
		}
		n.config.Log.Warn(text, about...)
	}
}

// Fix says what to change for a reason; empty if nothing is known to help.
func (r Reason) Fix() string {
	switch r {
	case Malformed:
		return "is --replica-port of the peer at this address, and is it kvepp's?"
	case OldVersion:
		return "the peer speaks another version of the protocol: run the same version of kvepp in all replicas"
	case OtherGroup:
		return "the peer picks from another pool: give replicas of one pool alone as peers"
	case BadToken:
		return "give all replicas the same --replica-token-file"
	case TooMany:
		return "fewer replicas, or fewer addresses of each"
	}
	return ""
}
