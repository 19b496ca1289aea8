package replica

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"kvepp/kvblock"
)

var histories = flag.Duration("histories", 0, "how long TestHistories runs beyond its first seeds")

// naiveBooking is a booking as the oracle keeps it.
type naiveBooking struct {
	Worker    Worker
	BlockSize int
	Prefill   int
	Blocks    int
	Hashes    [][]kvblock.SequenceHash
	Done      bool
	Output    int
	Left      float64
	At        time.Duration // on the simulation's clock
}

// apply is the oracle: what an entry does to a book. at is when it happened.
func naiveApply(book map[uint64]*naiveBooking, e *Entry, at time.Duration) {
	b := book[e.Number]
	switch e.Kind {
	case Booked:
		n := &naiveBooking{Worker: e.Worker, BlockSize: e.BlockSize, Prefill: e.PrefillTokens, Blocks: e.Blocks, At: at}
		for _, c := range e.Chains {
			n.Hashes = append(n.Hashes, slices.Clone(c))
		}
		book[e.Number] = n
		return
	case Bound, Used, Ended, Learned, Waits:
		return
	}
	if b == nil {
		return
	}
	switch e.Kind {
	case PrefillDone, PrefillReleased:
		b.Done = true
	case Freed:
		delete(book, e.Number)
	case Moved:
		b.Worker, b.At = e.Worker, at
		if e.BlockSize != b.BlockSize {
			for _, c := range b.Hashes {
				b.Blocks += len(c)
			}
			b.Blocks, b.Hashes, b.BlockSize = b.Blocks*b.BlockSize/e.BlockSize, nil, e.BlockSize
		}
	case Output:
		b.Output, b.Left = e.Blocks, e.Left
	}
}

// copies are those of one origin at one node, as a load book keeps them.
type copies struct {
	book       map[uint64]*naiveBooking
	generation int
	of         map[uint64]int
}

// node is one process.
type node struct {
	address  string
	sender   *Sender
	receiver *Receiver
	offset   time.Duration // of its clock
	dead     bool
	paused   time.Duration // until then it does nothing
	book     map[uint64]*naiveBooking
	number   uint64
	known    map[Worker]bool
	copies   map[uint64]*copies
	sessions map[[32]byte]int // entries about each session that were applied
}

// pipe is a stream from a node that reads to one that sends.
type pipe struct {
	id       Stream
	reader   *node
	sender   *node
	cursor   *Cursor
	up, down []packet // to the sender, to the reader
	latency  time.Duration
	stalled  time.Duration // since when the reader has not read; 0: it reads
	next     time.Duration // of the sender's next message
}

type packet struct {
	at   time.Duration
	data []byte
}

type simulation struct {
	t       *testing.T
	rng     *rand.Rand
	now     time.Duration
	nodes   []*node
	workers []Worker
	pipes   map[[2]int]*pipe // by indices of reader and sender
	retry   map[[2]int]time.Duration
	apart   map[[2]int]bool // pairs that cannot hear each other, lower index first
	streams Stream
	seed    uint64
	counts  map[string]int
}

func (s *simulation) start(address string) *node {
	id := Identity{Origin: s.rng.Uint64() | 1, Epoch: uint64(s.now) + 1}
	n := &node{address: address, sender: NewSender(id, "pool", address), book: map[uint64]*naiveBooking{},
		known: map[Worker]bool{}, copies: map[uint64]*copies{}, sessions: map[[32]byte]int{},
		offset: time.Duration(s.rng.Int64N(int64(time.Hour)))}
	n.sender.MaxEntries = 64 + s.rng.IntN(400) // so that readers fall behind
	for _, w := range s.workers {
		n.known[w] = s.rng.IntN(4) > 0
	}
	n.receiver = NewReceiver(ReceiverConfig{Self: id, Group: "pool", Known: func(w Worker) bool { return n.known[w] }})
	return n
}

func (n *node) clock(s *simulation) time.Duration { return s.now + n.offset }

func (s *simulation) alive(n *node) bool { return !n.dead && s.now >= n.paused }

// step gives an input to a node's receiver and carries out the effects.
func (s *simulation) step(n *node, in Input) {
	in.Now = n.clock(s)
	for _, e := range n.receiver.Step(in) {
		switch e.Kind {
		case Send:
			for _, p := range s.pipes {
				if p.id == e.Stream {
					p.up = append(p.up, packet{s.now + p.latency, slices.Clone(e.Message)})
				}
			}
		case Close:
			s.counts["close "+string(e.Reason)]++
			if e.Reason == Malformed || e.Reason == Gap || e.Reason == SameOrigin {
				s.t.Fatalf("seed %d: closed as %s: %v", s.seed, e.Reason, e.Err)
			}
			s.cutStream(e.Stream)
		case BeginSnapshot:
			s.counts["snapshot"]++
			n.of(e.Origin).generation++
		case EndSnapshot:
			c := n.of(e.Origin)
			for number, generation := range c.of {
				if generation != c.generation {
					delete(c.of, number)
					delete(c.book, number)
				}
			}
		case FreeAll:
			s.counts["free "+string(e.Cause)]++
			delete(n.copies, e.Origin)
		case Apply:
			c := n.of(e.Origin)
			for i := range e.Entries {
				x := &e.Entries[i]
				naiveApply(c.book, x, s.now-x.Age)
				switch x.Kind {
				case Booked:
					c.of[x.Number] = c.generation
				case Freed:
					delete(c.of, x.Number)
				case Bound, Used, Ended:
					n.sessions[x.Key]++
				case Waits:
					s.counts["waits"] += len(x.Classes)
					for i, w := range x.Classes {
						want := ClassWait{uint64(i), x.Blocks, i, x.At, x.Age}
						if w != want || len(x.Classes) != x.Blocks {
							s.t.Fatalf("seed %d: %d classes, %+v, want %+v", s.seed, len(x.Classes), w, want)
						}
					}
				}
			}
		}
	}
}

func (n *node) of(origin uint64) *copies {
	c := n.copies[origin]
	if c == nil {
		c = &copies{book: map[uint64]*naiveBooking{}, of: map[uint64]int{}}
		n.copies[origin] = c
	}
	return c
}

func (s *simulation) cutStream(id Stream) {
	for key, p := range s.pipes {
		if p.id == id {
			delete(s.pipes, key)
			s.retry[key] = s.now + time.Duration(s.rng.Int64N(int64(time.Second)))
		}
	}
}

// hang ends a pipe as a process sees that whose peer is gone.
func (s *simulation) hang(key [2]int) {
	p := s.pipes[key]
	delete(s.pipes, key)
	s.retry[key] = s.now + time.Duration(s.rng.Int64N(int64(time.Second)))
	if !p.reader.dead {
		s.step(p.reader, Input{Kind: Closed, Stream: p.id})
	}
}

func pair(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// carry moves messages for one pipe.
func (s *simulation) carry(key [2]int, p *pipe) {
	if s.apart[pair(key[0], key[1])] {
		return // packets wait, as TCP retransmits
	}
	for s.alive(p.sender) && len(p.up) > 0 && p.up[0].at <= s.now {
		message := p.up[0].data
		p.up = p.up[1:]
		if p.cursor == nil {
			h, why := p.sender.sender.Admit(message)
			if why != "" {
				s.t.Fatalf("seed %d: refused: %s", s.seed, why)
			}
			var welcome []byte
			p.cursor, welcome = p.sender.sender.Open(&h, nil, nil)
			s.counts["open "+string(p.cursor.Reason)]++
			p.down = append(p.down, packet{s.now + p.latency, welcome})
			continue
		}
		if err := p.cursor.Received(p.sender.clock(s), message, time.Millisecond); err != nil {
			s.t.Fatalf("seed %d: ack: %v", s.seed, err)
		}
	}
	if s.alive(p.sender) && p.cursor != nil {
		switch {
		case len(p.down) > 20: // the window is full
			if p.stalled == 0 {
				p.stalled = s.now
			} else if s.now-p.stalled > 2*time.Second {
				s.counts["stalled"]++
				s.hang(key)
				return
			}
		case p.cursor.Pending() || s.now >= p.next:
			p.stalled = 0
			data, err := p.cursor.Next(p.sender.clock(s), nil)
			if err != nil {
				s.counts["behind"]++
				s.hang(key)
				return
			}
			p.next = s.now + HeartbeatEvery
			p.down = append(p.down, packet{s.now + p.latency, data})
		}
	}
	for s.alive(p.reader) && len(p.down) > 0 && p.down[0].at <= s.now && s.pipes[key] == p {
		message := p.down[0].data
		p.down = p.down[1:]
		s.step(p.reader, Input{Kind: Received, Stream: p.id, Message: message})
	}
}

// tick passes 5 ms.
func (s *simulation) tick() {
	s.now += 5 * time.Millisecond
	for _, n := range s.nodes {
		if s.alive(n) {
			n.sender.Tick(n.clock(s))
			if s.now%(100*time.Millisecond) == 0 {
				s.step(n, Input{Kind: Tick})
			}
		}
	}
	keys := slices.SortedFunc(maps.Keys(s.pipes), func(a, b [2]int) int {
		return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1]))
	})
	for _, key := range keys {
		if p := s.pipes[key]; p != nil {
			s.carry(key, p)
		}
	}
	for i, reader := range s.nodes {
		for j, sender := range s.nodes {
			key := [2]int{i, j}
			if i == j || s.pipes[key] != nil || !s.alive(reader) || sender.dead || s.apart[pair(i, j)] ||
				s.now < s.retry[key] {
				continue
			}
			s.streams++
			s.pipes[key] = &pipe{id: s.streams, reader: reader, sender: sender,
				latency: time.Duration(s.rng.Int64N(int64(40 * time.Millisecond)))}
			s.step(reader, Input{Kind: Opened, Stream: s.streams, Address: sender.address})
		}
	}
}

// act does something at a random node that can act.
func (s *simulation) act() {
	n := s.nodes[s.rng.IntN(len(s.nodes))]
	if !s.alive(n) {
		return
	}
	var known []Worker
	for _, w := range s.workers {
		if n.known[w] {
			known = append(known, w)
		}
	}
	if len(known) == 0 {
		return
	}
	worker := known[s.rng.IntN(len(known))]
	e := Entry{At: n.clock(s), Worker: worker}
	if len(n.book) > 0 {
		numbers := slices.Sorted(maps.Keys(n.book))
		e.Number = numbers[s.rng.IntN(len(numbers))]
	}
	switch k := s.rng.IntN(20); {
	case k < 7 || len(n.book) == 0:
		n.number++
		e.Kind, e.Number, e.BlockSize, e.PrefillTokens = Booked, n.number, 16<<s.rng.IntN(2), s.rng.IntN(4000)
		if e.Blocks = s.rng.IntN(3); s.rng.IntN(4) > 0 {
			for range 1 + s.rng.IntN(2) {
				chain := make([]kvblock.SequenceHash, s.rng.IntN(20))
				for i := range chain {
					chain[i] = kvblock.SequenceHash(s.rng.Uint64())
				}
				e.Chains = append(e.Chains, chain)
			}
		}
	case k < 10:
		e.Kind = []Kind{PrefillDone, PrefillReleased}[s.rng.IntN(2)]
	case k < 15:
		e.Kind = Freed
	case k < 16:
		e.Kind, e.BlockSize = Moved, 16<<s.rng.IntN(2)
	case k < 18:
		e.Kind, e.Blocks, e.Left = Output, 1+s.rng.IntN(30), []float64{-1, 0, 0.25, 1}[s.rng.IntN(4)]
	default:
		e.Kind = []Kind{Bound, Used, Ended, Waits}[s.rng.IntN(4)]
		e.Key[0], e.TTL = byte(s.rng.IntN(8)), time.Minute
		if e.Kind == Waits {
			e.Blocks = s.rng.IntN(20)
			e.Classes = make([]ClassWait, e.Blocks)
			for i := range e.Classes {
				e.Classes[i] = ClassWait{Class: uint64(i), Quantum: e.Blocks, Cost: i, At: e.At}
			}
		}
	}
	naiveApply(n.book, &e, s.now)
	n.sender.Append(n.clock(s), &e)
}

// disturb breaks something.
func (s *simulation) disturb() {
	i, j := s.rng.IntN(len(s.nodes)), s.rng.IntN(len(s.nodes))
	n := s.nodes[i]
	switch s.rng.IntN(10) {
	case 0: // killed, and started again at its address
		if s.rng.IntN(2) == 0 && !n.dead && s.now >= n.paused {
			for _, p := range s.pipes {
				if p.sender == n && p.cursor != nil {
					p.down = append(p.down, packet{s.now + p.latency, Goodbye()})
				}
			}
		}
		n.dead = true
		if s.rng.IntN(3) > 0 {
			for key := range s.pipes {
				if key[0] == i || key[1] == i {
					s.hang(key)
				}
			}
		}
	case 1:
		if n.dead {
			for key := range s.pipes {
				if key[0] == i || key[1] == i {
					s.hang(key)
				}
			}
			s.nodes[i] = s.start(n.address)
		}
	case 2:
		n.paused = s.now + time.Duration(s.rng.Int64N(int64(6*time.Second)))
	case 3:
		if i != j {
			s.apart[pair(i, j)] = !s.apart[pair(i, j)]
		}
	case 4, 5:
		if key := [2]int{i, j}; s.pipes[key] != nil {
			s.hang(key)
		}
	default:
		w := s.workers[s.rng.IntN(len(s.workers))]
		if n.dead || s.now < n.paused {
			return
		}
		if n.known[w] = !n.known[w]; n.known[w] {
			s.step(n, Input{Kind: WorkerJoined, Worker: w})
			return
		}
		// The node's own book and the copies forget the worker.
		for number, b := range n.book {
			if b.Worker == w {
				delete(n.book, number)
				n.sender.Append(n.clock(s), &Entry{Kind: Freed, Number: number})
			}
		}
		for _, c := range n.copies {
			for number, b := range c.book {
				if b.Worker == w {
					delete(c.book, number)
				}
			}
		}
		s.step(n, Input{Kind: WorkerLeft, Worker: w})
	}
}

// quiet ends all disturbances and passes five seconds.
func (s *simulation) quiet() {
	clear(s.apart)
	for i, n := range s.nodes {
		if n.dead {
			for key := range s.pipes {
				if key[0] == i || key[1] == i {
					s.hang(key)
				}
			}
		}
		n.paused = min(n.paused, s.now)
		for _, w := range s.workers {
			if !n.dead && !n.known[w] {
				n.known[w] = true
				s.step(n, Input{Kind: WorkerJoined, Worker: w})
			}
		}
	}
	for range 1000 {
		s.tick()
	}
}

// check compares all copies with their owners' books.
func (s *simulation) check() {
	for _, n := range s.nodes {
		if n.dead {
			continue
		}
		want := map[uint64]map[uint64]*naiveBooking{}
		for _, owner := range s.nodes {
			if owner != n && !owner.dead {
				want[owner.sender.self.Origin] = owner.book
			}
		}
		for origin := range n.copies {
			if want[origin] == nil && len(n.copies[origin].book) > 0 {
				s.t.Fatalf("seed %d: %s has %d copies of a process that is gone", s.seed, n.address,
					len(n.copies[origin].book))
			}
		}
		held := 0
		for origin, book := range want {
			got := n.of(origin).book
			held += len(got)
			for number := range maps.Keys(book) {
				if got[number] == nil {
					s.t.Fatalf("seed %d: %s misses booking %d of %x", s.seed, n.address, number, origin)
				}
				x, y := *got[number], *book[number]
				if d := x.At - y.At; d < -50*time.Millisecond || d > 10*time.Second {
					s.t.Fatalf("seed %d: %s has booking %d from %v, and it was made at %v", s.seed, n.address, number,
						x.At, y.At)
				}
				x.At, y.At = 0, 0
				if fmt.Sprint(x) != fmt.Sprint(y) {
					s.t.Fatalf("seed %d: %s has booking %d of %x as\n%+v\nand it is\n%+v", s.seed, n.address, number,
						origin, x, y)
				}
			}
			if len(got) != len(book) {
				s.t.Fatalf("seed %d: %s has %d copies of %d bookings", s.seed, n.address, len(got), len(book))
			}
		}
		if bookings, _, parked := n.receiver.Held(); bookings != held || parked != 0 {
			s.t.Fatalf("seed %d: %s counts %d bookings and %d parked; there are %d", s.seed, n.address, bookings,
				parked, held)
		}
	}
}

// run runs one history.
func run(t *testing.T, seed uint64, counts map[string]int) {
	s := &simulation{t: t, rng: rand.New(rand.NewPCG(seed, 0)), seed: seed, pipes: map[[2]int]*pipe{},
		retry: map[[2]int]time.Duration{}, apart: map[[2]int]bool{}, counts: counts}
	for i := range 5 {
		s.workers = append(s.workers, Worker{Name: fmt.Sprintf("worker-%d", i/2), Rank: uint32(i % 2)})
	}
	for i := range 2 + s.rng.IntN(3) {
		s.nodes = append(s.nodes, s.start(fmt.Sprintf("10.0.0.%d:9004", i)))
	}
	for range 3 {
		for range 600 + s.rng.IntN(1200) {
			for range s.rng.IntN(8) {
				s.act()
			}
			if s.rng.IntN(40) == 0 {
				s.disturb()
			}
			s.tick()
		}
		s.quiet()
		s.check()
	}
}

// TestHistories runs random histories: processes are killed, started and paused, cannot hear each other, read slowly,
// and do not know all workers. After five quiet seconds every copy equals its owner's book.
func TestHistories(t *testing.T) {
	counts := map[string]int{}
	begin, seeds := time.Now(), uint64(12)
	for seed := uint64(0); seed < seeds || time.Since(begin) < *histories; seed++ {
		run(t, seed, counts)
	}
	for _, what := range []string{"snapshot", "behind", "waits", "stalled", "open ", "open joined", "open fell_behind",
		"free peer_dead", "free goodbye", "close silent", "close resync"} {
		if counts[what] == 0 {
			t.Errorf("no history had %q: %v", what, counts)
		}
	}
	t.Log(counts)
}

// TestReasons: each value of a label exists once.
func TestReasons(t *testing.T) {
	seen := map[Reason]bool{}
	for _, r := range Reasons() {
		if seen[r] {
			t.Errorf("%s twice", r)
		}
		seen[r] = true
	}
	if !reflect.DeepEqual(Kinds()[0], Booked.String()) {
		t.Error(Kinds())
	}
}
