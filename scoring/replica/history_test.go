package replica

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/scoring"
)

var histories = flag.Duration("histories", 0, "how long TestHistories runs beyond its first seeds")

// wires connects processes in memory. A process can be frozen: no byte goes to it or comes from it.
type wires struct {
	mu     sync.Mutex
	rng    *rand.Rand
	frozen map[[2]string]bool // pairs that cannot hear each other; one name alone: with all others
	at     map[string]*listener
}

// listener accepts the connections to an address.
type listener struct {
	address string
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *listener) Addr() net.Addr { return memory(l.address) }

type memory string

func (a memory) Network() string { return "memory" }
func (a memory) String() string  { return string(a) }

func (w *wires) cut(a, b string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.frozen[[2]string{a, ""}] || w.frozen[[2]string{b, ""}] || w.frozen[[2]string{min(a, b), max(a, b)}]
}

func (w *wires) freeze(a, b string, on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := [2]string{min(a, b), max(a, b)}
	if b == "" {
		key = [2]string{a, ""}
	}
	w.frozen[key] = on
}

// dial connects a process to an address, with a latency of its own in each direction.
func (w *wires) dial(ctx context.Context, from, to string) (net.Conn, error) {
	w.mu.Lock()
	l := w.at[to]
	latency := time.Duration(w.rng.Int64N(int64(20 * time.Millisecond)))
	w.mu.Unlock()
	if l == nil || w.cut(from, to) {
		return nil, errors.New("no response")
	}
	near, a := net.Pipe()
	b, far := net.Pipe()
	carry := func(from, to net.Conn, ends ...string) {
		defer from.Close()
		defer to.Close()
		for buffer := make([]byte, 64<<10); ; {
			n, err := from.Read(buffer)
			if err != nil {
				return
			}
			<-time.After(latency)
			for waited := time.Duration(0); w.cut(ends[0], ends[1]); waited += 20 * time.Millisecond {
				if waited > time.Minute {
					return
				}
				<-time.After(20 * time.Millisecond)
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
	}
	go carry(a, b, from, to)
	go carry(b, a, from, to)
	select {
	case l.conns <- far:
		return near, nil
	case <-l.closed:
	case <-ctx.Done():
	}
	near.Close()
	far.Close()
	return nil, errors.New("no response")
}

// process is a node of a history.
type process struct {
	*testNode
	at      *listener
	names   []string // of its workers
	running []scoring.Booking
	dead    bool
}

type history struct {
	t     *testing.T
	seed  uint64
	rng   *rand.Rand
	wires *wires
	all   []*process
	names []string // of all workers
}

// start starts a process at an address.
func (h *history) start(address string) *process {
	at := &listener{address: address, conns: make(chan net.Conn), closed: make(chan struct{})}
	p := &process{at: at, names: slices.Clone(h.names)}
	p.testNode = newTestNode(Security{}, func(c *Config) {
		c.Name, c.Timeout = address, 3*time.Second
		c.Dial = func(ctx context.Context, to string) (net.Conn, error) { return h.wires.dial(ctx, address, to) }
	})
	p.mu.Lock()
	p.chunkBytes = 8 // so that readers fall behind
	p.mu.Unlock()
	p.workersOf(h.rng)
	h.wires.mu.Lock()
	h.wires.at[address] = at
	h.wires.mu.Unlock()
	go func() { _ = p.Serve(at) }()
	var peers []string
	for i := range 5 {
		peers = append(peers, fmt.Sprint("process-", i))
	}
	p.SetPeers(peers[:len(h.all)+1])
	return p
}

// workersOf gives a process some of the workers, in any order.
func (p *process) workersOf(rng *rand.Rand) {
	rng.Shuffle(len(p.names), func(i, j int) { p.names[i], p.names[j] = p.names[j], p.names[i] })
	p.setWorkers(p.names[:1+rng.IntN(len(p.names))]...)
}

// act changes something in a process's book.
func (h *history) act(p *process) {
	w, there := p.worker(h.names[h.rng.IntN(len(h.names))])
	if !there {
		return
	}
	i := h.rng.IntN(len(p.running) + 1)
	switch k := h.rng.IntN(10); {
	case k < 4 || i == len(p.running):
		chain := make([]kvblock.SequenceHash, h.rng.IntN(12))
		for i, base := 0, 100*h.rng.IntN(3); i < len(chain); i++ {
			chain[i] = kvblock.SequenceHash(base + i + 1)
		}
		c := scoring.Candidate{Worker: w, Prompt: &scoring.Prompt{BlockSize: 16,
			Chains: [][]kvblock.SequenceHash{chain}}}
		config := scoring.DefaultConfig()
		b, err := p.book.AddRequest(scoring.Request{ISLTokens: 16*len(chain) + h.rng.IntN(16)}, c, &config)
		if err != nil {
			h.t.Fatal(err)
		}
		p.running = append(p.running, b)
	case k < 6:
		p.running[i].MarkPrefillCompleted()
	case k < 7:
		p.running[i].MoveTo(w, 16<<h.rng.IntN(2))
	default:
		p.running[i].Free()
		p.running = slices.Delete(p.running, i, i+1)
	}
}

// disturb breaks or mends something.
func (h *history) disturb() {
	i := h.rng.IntN(len(h.all))
	p, other := h.all[i], h.all[h.rng.IntN(len(h.all))]
	address := p.at.address
	switch k := h.rng.IntN(9); {
	case p.dead:
		h.wires.freeze(address, "", false)
		h.all[i] = h.start(address)
	case k == 0: // it ends with a goodbye
		p.at.Close()
		p.Close()
		p.dead = true
	case k == 1: // it is killed, with or without a sign
		h.wires.freeze(address, "", h.rng.IntN(2) == 0)
		p.at.Close()
		p.kill()
		p.dead = true
	case k == 2:
		h.wires.freeze(address, "", true)
		time.AfterFunc(time.Duration(h.rng.Int64N(int64(6*time.Second))), func() { h.wires.freeze(address, "", false) })
	case k < 5 && other != p:
		h.wires.freeze(address, other.at.address, h.rng.IntN(2) == 0)
	default:
		p.workersOf(h.rng)
	}
}

// check compares each process's loads with those of a book that has the bookings of all.
func (h *history) check() {
	for _, p := range h.all {
		if p.dead {
			continue
		}
		want := scoring.NewActiveSequences()
		for _, owner := range h.all {
			if owner.dead {
				continue
			}
			copies := want.NewCopies()
			number := map[kvblock.Worker]kvblock.Worker{}
			for _, name := range h.names {
				theirs, _ := owner.worker(name)
				number[theirs], _ = p.worker(name)
			}
			for place, more := 0, true; more; {
				place, more = owner.book.Snapshot(place, func(c *scoring.Change) bool {
					own := *c
					own.Worker = number[c.Worker]
					copies.Apply([]scoring.Change{own})
					return true
				})
			}
		}
		for _, name := range h.names {
			w, there := p.worker(name)
			if got, want := p.book.Load(w), want.Load(w); !there || got != want {
				h.t.Fatalf("seed %d: %s has %+v at %s, and all requests are %+v; peers %+v", h.seed, p.at.address, got,
					name, want, p.Peers())
			}
		}
	}
}

// run runs one history.
func (h *history) run(counts map[string]int) {
	for i := range 4 {
		h.names = append(h.names, fmt.Sprint("worker-", i))
	}
	for i := range 2 + h.rng.IntN(3) {
		h.all = append(h.all, h.start(fmt.Sprint("process-", i)))
	}
	for _, p := range h.all {
		p.SetPeers([]string{"process-0", "process-1", "process-2", "process-3"}[:len(h.all)])
	}
	defer func() {
		for _, p := range h.all {
			p.at.Close()
			p.Close()
		}
		<-time.After(2 * time.Minute) // connections of the dead
	}()
	for range 3 {
		for range 300 + h.rng.IntN(300) {
			for _, p := range h.all {
				for range h.rng.IntN(5) {
					if !p.dead {
						h.act(p)
					}
				}
			}
			if h.rng.IntN(20) == 0 {
				h.disturb()
			}
			<-time.After(time.Duration(h.rng.Int64N(int64(20 * time.Millisecond))))
		}
		h.wires.mu.Lock()
		clear(h.wires.frozen)
		h.wires.mu.Unlock()
		for i, p := range h.all {
			if p.dead {
				h.all[i] = h.start(p.at.address)
			}
			h.all[i].setWorkers(h.names...)
		}
		<-time.After(10 * time.Second)
		h.check()
	}
	for _, p := range h.all {
		p.testNode.mu.Lock()
		for x, n := range p.counts {
			counts[x[0]+" "+x[1]] += n
		}
		p.testNode.mu.Unlock()
	}
}

// TestHistories runs random histories of real nodes over connections in memory: processes are killed, started and
// frozen, cannot hear each other, read slowly, and do not know all workers. After ten quiet seconds each has the loads
// of a book with all requests.
func TestHistories(t *testing.T) {
	counts := map[string]int{}
	begin, seeds := time.Now(), uint64(40)
	for seed := uint64(0); seed < seeds || time.Since(begin) < *histories; seed++ {
		synctest.Test(t, func(t *testing.T) {
			h := &history{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), wires: &wires{
				rng: rand.New(rand.NewPCG(seed, 1)), frozen: map[[2]string]bool{}, at: map[string]*listener{}}}
			h.run(counts)
		})
	}
	for _, what := range []string{"closed new_worker", "closed left", "closed self", "refused stalled",
		"freed peer_dead"} {
		if counts[what] == 0 {
			t.Errorf("no history had %q: %v", what, counts)
		}
	}
	t.Log(counts)
}
