package replica

import (
	"cmp"
	"errors"
	"slices"
	"time"
)

// Bounds and times of a Receiver.
const (
	DefaultTimeout     = 3 * time.Second
	DefaultMaxBookings = 1 << 18
	DefaultMaxBlocks   = 1 << 25
	DefaultMaxBytes    = 1 << 28
	bookingBytes       = 512 // what a copy takes, beside its chains
	chainBytes         = 256 // and each of its chains, beside 8 bytes a hash
	MaxParked          = 4096
	parkedFor          = 60 * time.Second
	suspectAfter       = time.Second
	maxOrigins         = 256
)

// ReceiverConfig is what a Receiver needs. Zero values have the defaults above.
type ReceiverConfig struct {
	Self  Identity
	Group string
	// Timeout is how long a peer may be silent, or its connection ended, until its bookings are freed.
	Timeout time.Duration
	// MaxBookings, MaxBlocks and MaxBytes bound the copies of one peer, with its parked bookings. If there are several
	// peers, each has its part of that: a booking must not be left out because of those of another peer. A booking
	// beyond MaxBlocks or MaxBytes counts without hashes, one beyond MaxBookings not at all.
	MaxBookings, MaxBlocks, MaxBytes int
	// Known reports whether this process knows a worker now.
	Known func(Worker) bool
}

// Stream is a connection on which this process reads a peer's log. Its number is not used again.
type Stream uint64

// InputKind says what happened.
type InputKind uint8

// The kinds of inputs.
const (
	Opened       InputKind = 1 + iota // a stream to Address is open; the receiver sends the first message
	Received                          // a message came
	Closed                            // the stream ended
	Tick                              // time passed; due every 100 ms
	WorkerJoined                      // Worker is known now
	WorkerLeft                        // Worker is not known any more: its copies are gone
	AddressLeft                       // Address is no peer's any more
)

// Input is one thing that happened.
type Input struct {
	Kind    InputKind
	Now     time.Duration // of this process's monotonic clock
	Stream  Stream        // Opened, Received, Closed
	Address string        // Opened, AddressLeft
	Message []byte        // Received; not kept
	Proof   []byte        // Opened
	Worker  Worker        // WorkerJoined, WorkerLeft
}

// EffectKind says what to do.
type EffectKind uint8

// The kinds of effects.
const (
	Send          EffectKind = 1 + iota // Message to Stream
	Close                               // Stream, for Reason
	Apply                               // Entries of Origin
	BeginSnapshot                       // the copies of Origin will be replaced
	EndSnapshot                         // those that the snapshot had not are freed
	FreeAll                             // the copies of Origin are freed, for Cause
)

// Cause says why copies were freed. It is a label's value.
type Cause string

// The causes.
const (
	PeerDead Cause = "peer_dead"
	PeerLeft Cause = "goodbye"
)

// Causes returns all causes.
func Causes() []Cause { return []Cause{PeerDead, PeerLeft} }

// Effect is one thing to do, in order.
type Effect struct {
	Kind    EffectKind
	Stream  Stream
	Message []byte
	Reason  Reason
	Err     error // with Close: details; may be nil
	Origin  uint64
	Entries []Entry // valid until the next step
	Cause   Cause
	Freed   int // bookings, with FreeAll
}

// State is a peer's.
type State string

// The states of an origin. They are values of a label.
const (
	Joining State = "joining" // its snapshot has not come whole
	Live    State = "live"
	Suspect State = "suspect" // its stream ended, or it is silent
)

// States returns all states.
func States() []State { return []State{Joining, Live, Suspect} }

// Outcomes of entries, for a metric.
type Outcomes struct {
	Applied [kinds]uint64
	// Ignored have no effect: a booking that ended already, a worker that left.
	Ignored uint64
	// Parked name a worker that this process does not know yet; Lapsed were parked for too long, or too many.
	Parked, Lapsed uint64
	// Flat are bookings that were kept without hashes, Refused those beyond MaxBookings.
	Flat, Refused uint64
	// Duplicated are bookings that came twice: a defect of the sender.
	Duplicated uint64
}

// Receiver is what this process knows of its peers. Create it with NewReceiver.
type Receiver struct {
	config  ReceiverConfig
	streams map[Stream]*stream
	origins map[uint64]*origin
	last    map[string]Identity // by address: whose log was read there last
	left    map[string]bool     // addresses that are no peer's any more and have a stream still
	waiting []waiting           // parked bookings, oldest first
	parked  int                 // of them that have not ended
	held    int                 // bookings of all origins, parked ones not counted
	blocks  int                 // of held
	Outcomes

	effects []Effect
	entries []Entry
	room    arena
}

type stream struct {
	address string
	asked   uint64  // the sequence number of the hello; 0: a snapshot
	origin  *origin // nil before the welcome
	version uint64  // as of the welcome
	words   dictionary
	heard   time.Duration
	sent    time.Duration // of the latest message, on the peer's clock
	acked   time.Duration // when the latest message was acknowledged
}

// origin is a peer and what this process holds of it.
type origin struct {
	Identity
	name      string
	address   string
	stream    Stream // 0: none
	state     State
	seq       uint64 // of the latest entry that was read
	heard     time.Duration
	staleness time.Duration
	snapshot  bool // parts are still to come
	parts     int  // of it that came
	// generation counts snapshots. Bookings of an earlier one that a whole snapshot does not have are freed.
	generation uint32
	bookings   map[uint64]booking
	// lost are workers about which entries were dropped because this process did not know them. If one joins, a
	// snapshot brings the entries back. all: there are too many to name.
	lost    map[Worker]bool
	lostAll bool
	booked  uint64 // bookings that came, those of snapshots not counted
	blocks  int    // of bookings
	bytes   int    // the same
}

// booking is one of a peer.
type booking struct {
	blocks     int32 // with hashes
	bytes      int32
	generation uint32
	parked     *parked // not nil: its worker is not known, and there is no copy
}

// parked is a booking whose worker this process does not know.
type parked struct {
	Entry
	done   Kind          // how its prefill ended; 0: not yet
	output *Entry        // nil: none
	since  time.Duration // when it was parked, on this process's clock
	at     time.Duration // when it happened, on this process's clock
}

// waiting names a parked booking, which may have ended since.
type waiting struct {
	origin uint64
	number uint64
	parked *parked
}

// NewReceiver returns a receiver without peers.
func NewReceiver(config ReceiverConfig) *Receiver {
	config.Timeout = cmp.Or(config.Timeout, DefaultTimeout)
	config.MaxBookings = cmp.Or(config.MaxBookings, DefaultMaxBookings)
	config.MaxBlocks = cmp.Or(config.MaxBlocks, DefaultMaxBlocks)
	config.MaxBytes = cmp.Or(config.MaxBytes, DefaultMaxBytes)
	return &Receiver{config: config, streams: map[Stream]*stream{}, origins: map[uint64]*origin{},
		last: map[string]Identity{}, left: map[string]bool{}}
}

// Step takes an input and returns what to do. The effects are valid until the next step.
func (r *Receiver) Step(in Input) []Effect {
	clear(r.effects)
	r.effects = r.effects[:0]
	r.entries = r.entries[:0]
	r.room.reset()
	switch in.Kind {
	case Opened:
		r.open(&in)
	case Received:
		if s := r.streams[in.Stream]; s != nil {
			if why, err := r.receive(in.Stream, s, in.Now, in.Message); why != "" {
				r.close(in.Stream, s, why, err)
			}
		}
	case Closed:
		if s := r.streams[in.Stream]; s != nil {
			r.forgetStream(in.Stream, s)
		}
	case Tick:
		r.tick(in.Now)
	case WorkerJoined:
		r.unpark(in.Worker, in.Now)
		r.resync(in.Worker)
	case WorkerLeft:
		for _, o := range r.origins {
			o.lose(in.Worker)
		}
	case AddressLeft:
		r.leave(in.Address)
	}
	return r.effects
}

func (r *Receiver) open(in *Input) {
	s := &stream{address: in.Address, heard: in.Now}
	delete(r.left, in.Address)
	r.streams[in.Stream] = s
	h := Hello{Lowest: MinVersion, Highest: Version, Self: r.config.Self, Group: r.config.Group, Proof: in.Proof}
	if o := r.origins[r.last[in.Address].Origin]; o != nil && o.Identity == r.last[in.Address] && !o.snapshot {
		h.Have, h.Seq, s.asked = o.Identity, o.seq, o.seq
	}
	r.effects = append(r.effects, Effect{Kind: Send, Stream: in.Stream, Message: h.Append(nil)})
}

// close closes a stream from this side.
func (r *Receiver) close(id Stream, s *stream, why Reason, err error) {
	r.forgetStream(id, s)
	r.effects = append(r.effects, Effect{Kind: Close, Stream: id, Reason: why, Err: err})
}

func (r *Receiver) forgetStream(id Stream, s *stream) {
	delete(r.streams, id)
	o := s.origin
	if o == nil || o.stream != id {
		return
	}
	o.stream, o.state = 0, Suspect
	if r.left[s.address] {
		delete(r.left, s.address)
		delete(r.last, s.address)
		r.free(o, PeerDead)
	}
}

// receive handles a message. It returns the reason to close the stream; empty: none.
func (r *Receiver) receive(id Stream, s *stream, now time.Duration, message []byte) (Reason, error) {
	if len(message) == 0 {
		return Malformed, errMalformed
	}
	if s.origin == nil {
		switch message[0] {
		case typeWelcome:
			return r.welcome(id, s, now, message)
		case typeRefusal:
			why, err := ParseRefusal(message)
			return why, err
		}
		return Malformed, errMalformed
	}
	o := s.origin
	switch message[0] {
	case typeBatch, typeSnapshot:
		if why, err := r.batch(s, o, now, message); why != "" {
			o.seq = 0 // so that a snapshot follows
			return why, err
		}
	case typeGoodbye:
		if len(message) != 1 {
			return Malformed, errMalformed
		}
		r.free(o, PeerLeft)
		r.close(id, s, Left, nil)
		return "", nil
	default:
		return Malformed, errMalformed
	}
	o.heard, s.heard = now, now
	if o.state == Suspect {
		o.state = Live
		if o.snapshot {
			o.state = Joining
		}
	}
	if now-s.acked >= HeartbeatEvery || s.acked == 0 {
		s.acked = now
		a := ack{seq: o.seq, sent: s.sent}
		r.effects = append(r.effects, Effect{Kind: Send, Stream: id, Message: a.append(nil)})
	}
	return "", nil
}

// welcome handles a sender's first message.
func (r *Receiver) welcome(id Stream, s *stream, now time.Duration, message []byte) (Reason, error) {
	w, err := ParseWelcome(message)
	switch {
	case err != nil || w.Self.Origin == 0:
		return Malformed, cmp.Or(err, errMalformed)
	case w.Self == r.config.Self:
		return Self, nil
	case w.Self.Origin == r.config.Self.Origin:
		return SameOrigin, nil
	case w.Next != 0 && (s.asked == 0 || w.Next != s.asked+1):
		return Gap, errors.New("the peer continues a log where it was not asked to")
	}
	o := r.origins[w.Self.Origin]
	if o != nil && o.stream != 0 {
		if o.Identity == w.Self {
			return Duplicate, nil
		}
		return SameOrigin, nil
	}
	if o != nil && o.Epoch != w.Self.Epoch {
		r.free(o, PeerDead)
		o = nil
	}
	// Another process answers at the address: the former one has gone.
	if was := r.origins[r.last[s.address].Origin]; was != nil && was != o && was.stream == 0 {
		r.free(was, PeerDead)
	}
	if o == nil {
		if len(r.origins) >= maxOrigins {
			return TooMany, nil
		}
		if w.Next != 0 {
			return Resync, nil // its copies were freed meanwhile
		}
		o = &origin{Identity: w.Self, bookings: map[uint64]booking{}, state: Joining}
		r.origins[o.Origin] = o
	} else if w.Next != 0 && w.Next != o.seq+1 {
		o.seq = 0
		return Resync, nil
	}
	o.name, o.address, o.stream, o.heard = w.Name, s.address, id, now
	o.snapshot, o.parts = w.Next == 0, 0
	o.state = Joining
	if !o.snapshot {
		o.state = Live
	}
	s.origin, s.version, s.heard = o, w.Version, now
	r.last[s.address] = o.Identity
	return "", nil
}

// batch handles entries.
func (r *Receiver) batch(s *stream, o *origin, now time.Duration, message []byte) (Reason, error) {
	snapshot := message[0] == typeSnapshot
	d := &decoder{data: message[1:], version: s.version}
	head := d.batch(snapshot)
	switch {
	case d.err != nil:
		return Malformed, d.err
	case snapshot != o.snapshot:
		return Malformed, errMalformed
	case !snapshot && head.seq != o.seq+1:
		return Gap, nil
	case snapshot && (head.flags&flagFirst != 0) != (o.parts == 0):
		return Malformed, errMalformed
	}
	if snapshot {
		o.parts++
	}
	if snapshot && o.parts == 1 {
		o.generation++
		r.effects = append(r.effects, Effect{Kind: BeginSnapshot, Origin: o.Origin})
	}
	s.sent, o.staleness = head.sent, head.staleness
	from := len(r.entries)
	for read := 0; read < head.entries && d.err == nil; {
		var e Entry
		if d.entry(&e, &s.words, &r.room, head.sent) {
			read++
			r.take(o, &e, now)
		}
	}
	err := d.end()
	if len(r.entries) > from {
		r.effects = append(r.effects, Effect{Kind: Apply, Origin: o.Origin,
			Entries: r.entries[from:len(r.entries):len(r.entries)]})
	}
	if err != nil {
		return Malformed, err
	}
	if !snapshot {
		o.seq += uint64(head.entries)
		return "", nil
	}
	if head.flags&flagLast != 0 {
		r.endSnapshot(o)
		o.seq, o.snapshot, o.state = head.seq, false, Live
	}
	return "", nil
}

// take handles one entry.
func (r *Receiver) take(o *origin, e *Entry, now time.Duration) {
	switch e.Kind {
	case Booked:
		r.book(o, e, now)
		return
	case Bound, Used, Learned:
		if !r.config.Known(e.Worker) {
			r.Ignored++
			o.lose(e.Worker)
			return
		}
		r.apply(e)
		return
	case Ended, Waits:
		r.apply(e)
		return
	}
	b, ok := o.bookings[e.Number]
	switch {
	case !ok:
		r.Ignored++
		return
	case b.parked != nil:
		r.changeParked(o, e, b.parked, now)
		return
	}
	if e.Kind == Moved && !r.config.Known(e.Worker) {
		// What a copy needs at another worker is not kept here.
		r.Lapsed++
		o.lose(e.Worker)
		*e = Entry{Kind: Freed, Number: e.Number}
	}
	if e.Kind == Freed {
		r.drop(o, e.Number, b)
	}
	r.apply(e)
}

// apply adds an entry to the effects of this step.
func (r *Receiver) apply(e *Entry) {
	r.Applied[e.Kind]++
	r.entries = append(r.entries, *e)
}

// book handles a booking.
func (r *Receiver) book(o *origin, e *Entry, now time.Duration) {
	was, exists := o.bookings[e.Number]
	switch {
	case exists && (!o.snapshot || was.generation == o.generation):
		r.Duplicated++
		return
	case exists:
		r.drop(o, e.Number, was)
	}
	if !o.snapshot {
		o.booked++
	}
	b := booking{generation: o.generation}
	switch {
	case len(o.bookings) >= r.config.MaxBookings/len(r.origins):
		r.Refused++
	case !r.config.Known(e.Worker):
		r.park(o, e, now)
	default:
		r.flatten(o, e, &b)
		r.held++
		o.bookings[e.Number] = b
		r.apply(e)
		return
	}
	if exists && was.parked == nil { // its copy cannot stay
		r.apply(&Entry{Kind: Freed, Number: e.Number})
	}
}

// flatten counts a booking's hashes. Beyond the bound they become blocks without hashes.
func (r *Receiver) flatten(o *origin, e *Entry, b *booking) {
	n := e.hashes()
	bytes := bookingBytes + chainBytes*len(e.Chains) + 8*n
	if o.blocks+n > r.config.MaxBlocks/len(r.origins) || o.bytes+bytes > r.config.MaxBytes/len(r.origins) {
		e.Chains, e.Blocks = nil, e.Blocks+n
		r.Flat++
		n, bytes = 0, bookingBytes
	}
	b.blocks, b.bytes = int32(n), int32(bytes)
	r.blocks += n
	o.blocks += n
	o.bytes += bytes
}

// drop forgets a booking.
func (r *Receiver) drop(o *origin, number uint64, b booking) {
	delete(o.bookings, number)
	o.release(r, &b)
	if b.parked != nil {
		r.parked--
		return
	}
	r.held--
}

// release takes off what a booking counts for.
func (o *origin) release(r *Receiver, b *booking) {
	r.blocks -= int(b.blocks)
	o.blocks -= int(b.blocks)
	o.bytes -= int(b.bytes)
}

// park keeps a booking until its worker is known.
func (r *Receiver) park(o *origin, e *Entry, now time.Duration) {
	if r.parked >= MaxParked {
		r.Lapsed++
		o.lose(e.Worker)
		return
	}
	b := booking{generation: o.generation}
	r.flatten(o, e, &b)
	p := &parked{Entry: *e, since: now, at: now - e.Age}
	p.Chains = slices.Clone(e.Chains)
	for i, c := range p.Chains {
		p.Chains[i] = slices.Clone(c)
	}
	r.Parked++
	r.parked++
	b.parked = p
	o.bookings[e.Number] = b
	if len(r.waiting) > 2*r.parked { // most have ended, and hold memory
		r.waiting = slices.DeleteFunc(r.waiting, func(w waiting) bool { return r.find(w) == nil })
	}
	r.waiting = append(r.waiting, waiting{o.Origin, e.Number, p})
}

// changeParked handles a later entry of a parked booking.
func (r *Receiver) changeParked(o *origin, e *Entry, p *parked, now time.Duration) {
	switch e.Kind {
	case PrefillDone, PrefillReleased:
		p.done = e.Kind
	case Output:
		latest := *e
		p.output = &latest
	case Freed:
		r.drop(o, e.Number, o.bookings[e.Number])
	case Moved:
		p.Worker, p.at = e.Worker, now-e.Age
		if e.BlockSize > 0 && e.BlockSize != p.BlockSize {
			tokens := (p.Blocks + p.hashes()) * p.BlockSize
			p.Chains, p.Blocks, p.BlockSize = nil, tokens/e.BlockSize, e.BlockSize
		}
		if r.config.Known(p.Worker) {
			r.applyParked(o, p, now)
		}
	}
}

// applyParked makes a copy of a parked booking whose worker is known now.
func (r *Receiver) applyParked(o *origin, p *parked, now time.Duration) {
	e := p.Entry
	e.Age = now - p.at
	r.parked--
	r.held++
	b := o.bookings[e.Number]
	o.release(r, &b)
	b.parked = nil
	r.flatten(o, &e, &b)
	o.bookings[e.Number] = b
	r.apply(&e)
	if p.done != 0 {
		r.apply(&Entry{Kind: p.done, Number: e.Number})
	}
	if p.output != nil {
		r.apply(p.output)
	}
}

// find returns what a parked booking belongs to; nil if it has ended.
func (r *Receiver) find(w waiting) *origin {
	if o := r.origins[w.origin]; o != nil && o.bookings[w.number].parked == w.parked {
		return o
	}
	return nil
}

// unpark applies the bookings of a worker that is known now.
func (r *Receiver) unpark(w Worker, now time.Duration) {
	if !r.config.Known(w) {
		return
	}
	kept := r.waiting[:0]
	for _, x := range r.waiting {
		o := r.find(x)
		switch {
		case o == nil:
		case x.parked.Worker != w:
			kept = append(kept, x)
		default:
			from := len(r.entries)
			r.applyParked(o, x.parked, now)
			r.effects = append(r.effects, Effect{Kind: Apply, Origin: o.Origin,
				Entries: r.entries[from:len(r.entries):len(r.entries)]})
		}
	}
	clear(r.waiting[len(kept):])
	r.waiting = kept
}

// maxLost bounds the workers that a peer's dropped entries are remembered for.
const maxLost = 4096

// lose remembers that entries about a worker were dropped.
func (o *origin) lose(w Worker) {
	switch {
	case o.lostAll:
	case len(o.lost) >= maxLost:
		o.lost, o.lostAll = nil, true
	default:
		if o.lost == nil {
			o.lost = map[Worker]bool{}
		}
		o.lost[w] = true
	}
}

// resync asks for a snapshot of each peer whose entries about a worker were dropped.
func (r *Receiver) resync(w Worker) {
	for _, o := range r.sorted() {
		if !o.lostAll && !o.lost[w] {
			continue
		}
		o.seq, o.lost, o.lostAll = 0, nil, false
		if s := r.streams[o.stream]; s != nil {
			r.close(o.stream, s, Resync, nil)
		}
	}
}

// endSnapshot forgets the bookings that a whole snapshot does not have.
func (r *Receiver) endSnapshot(o *origin) {
	for number, b := range o.bookings {
		if b.generation != o.generation {
			r.drop(o, number, b)
		}
	}
	r.effects = append(r.effects, Effect{Kind: EndSnapshot, Origin: o.Origin})
}

// free forgets a peer with all its bookings.
func (r *Receiver) free(o *origin, cause Cause) {
	if r.origins[o.Origin] != o {
		return // it is freed already
	}
	freed := 0
	for number, b := range o.bookings {
		if b.parked == nil {
			freed++
		}
		r.drop(o, number, b)
	}
	delete(r.origins, o.Origin)
	r.effects = append(r.effects, Effect{Kind: FreeAll, Origin: o.Origin, Cause: cause, Freed: freed})
}

// tick ends what has been silent for too long.
func (r *Receiver) tick(now time.Duration) {
	for _, o := range r.sorted() {
		switch silent := now - o.heard; {
		case silent > r.config.Timeout:
			r.free(o, PeerDead)
			if s := r.streams[o.stream]; s != nil {
				r.close(o.stream, s, Silent, nil)
			}
		case silent > suspectAfter && o.state == Live:
			o.state = Suspect
		}
	}
	for id, s := range r.streams {
		if s.origin == nil && now-s.heard > r.config.Timeout {
			r.close(id, s, Silent, nil)
		}
	}
	for len(r.waiting) > 0 {
		w := r.waiting[0]
		o := r.find(w)
		if o != nil && now-w.parked.since <= parkedFor {
			break
		}
		if o != nil {
			r.drop(o, w.number, o.bookings[w.number])
			r.Lapsed++
			o.lose(w.parked.Worker)
		}
		r.waiting[0] = waiting{}
		r.waiting = r.waiting[1:]
	}
}

// leave handles that an address is no peer's any more. A stream that is open stays until it ends: the process may end
// its requests first.
func (r *Receiver) leave(address string) {
	for _, s := range r.streams {
		if s.address == address {
			r.left[address] = true
			return
		}
	}
	if o := r.origins[r.last[address].Origin]; o != nil && o.stream == 0 && o.Identity == r.last[address] {
		r.free(o, PeerDead)
	}
	delete(r.last, address)
}

func (r *Receiver) sorted() []*origin {
	all := make([]*origin, 0, len(r.origins))
	for _, o := range r.origins {
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b *origin) int { return cmp.Compare(a.Origin, b.Origin) })
	return all
}

// Peer is what a receiver knows of a peer.
type Peer struct {
	Identity
	Name, Address    string
	State            State
	Seq              uint64        // of the latest entry that was read
	Heard            time.Duration // when the latest message came, on this process's clock
	Staleness        time.Duration // of entries when they are applied, as the peer measures; 0: not known
	Bookings, Parked int
	Booked           uint64 // bookings that came, those of snapshots not counted
}

// Peers returns all peers in the order of their identities.
func (r *Receiver) Peers() []Peer {
	peers := make([]Peer, 0, len(r.origins))
	for _, o := range r.sorted() {
		p := Peer{Identity: o.Identity, Name: o.name, Address: o.address, State: o.state, Seq: o.seq, Heard: o.heard,
			Staleness: o.staleness, Bookings: len(o.bookings), Booked: o.booked}
		for _, w := range r.waiting {
			if r.find(w) == o {
				p.Parked++
			}
		}
		p.Bookings -= p.Parked
		peers = append(peers, p)
	}
	return peers
}

// Held returns how many bookings and blocks with hashes the copies have, and how many bookings are parked.
func (r *Receiver) Held() (bookings, blocks, parked int) { return r.held, r.blocks, r.parked }

// AppliedBy returns how many entries of a kind were applied.
func (o *Outcomes) AppliedBy(k Kind) uint64 { return o.Applied[k] }
