package replica

import (
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"time"
)

// Bounds of a Sender's log.
const (
	DefaultLogEntries = 1 << 16
	DefaultLogBytes   = 16 << 20

	batchEntries = 256
	batchBytes   = 256 << 10

	// outputEvery is the least time between two entries about the output of one booking.
	outputEvery = 250 * time.Millisecond

	// HeartbeatEvery is how often a sender sends a message at least.
	HeartbeatEvery = 250 * time.Millisecond
)

// Sender is the log of this process's own changes. Create it with NewSender.
type Sender struct {
	self  Identity
	name  string
	group string
	// MaxEntries and MaxBytes bound the log; 0: DefaultLogEntries, DefaultLogBytes.
	MaxEntries, MaxBytes int

	next  uint64   // sequence number of the next entry; the first is 1
	log   []record // a ring: entry n is at n % len; grows up to MaxEntries
	first uint64   // sequence number of the oldest entry in log
	bytes int

	numbers map[Worker]uint32 // the log's numbers of workers
	workers []Worker          // by number
	// dictionary counts how often numbers began again: a cursor of an earlier one cannot go on.
	dictionary uint64

	live    map[uint64]*liveBooking
	dirty   []uint64 // bookings with output that was not logged
	outputs time.Duration
	room    []byte // memory for small entries
	scratch []byte
}

// record is one encoded entry.
type record struct {
	data   []byte
	worker int32 // its number; below 0: none
	first  int32 // bytes of it that a peer of version 1 gets; 0: all
}

// liveBooking is what a snapshot needs of a booking that has not ended.
type liveBooking struct {
	booked    record
	moved     []record // in order: each may change how its blocks are counted
	done      Kind     // how its prefill ended; 0: not yet
	output    output   // that is logged
	latest    output   // that was told
	lastWrite time.Duration
}

// output is what a booking has generated.
type output struct {
	blocks int
	left   float64
}

// maxMoves bounds the moves of one booking that a snapshot has. A response moves its booking once.
const maxMoves = 8

// NewSender returns an empty log. name is for people.
func NewSender(self Identity, group, name string) *Sender {
	return &Sender{self: self, name: name, group: group, next: 1, first: 1, numbers: map[Worker]uint32{},
		live: map[uint64]*liveBooking{}}
}

// Self returns the identity of the log.
func (s *Sender) Self() Identity { return s.self }

// Last returns the sequence number of the latest entry; 0 before the first.
func (s *Sender) Last() uint64 { return s.next - 1 }

// Live returns how many bookings a snapshot has.
func (s *Sender) Live() int { return len(s.live) }

// Append adds an entry to the log. Its chains are not kept. Output is collected: it is logged at most once in
// outputEvery for each booking, here or in Tick.
func (s *Sender) Append(now time.Duration, e *Entry) {
	switch e.Kind {
	case Booked:
		if s.live[e.Number] == nil {
			s.live[e.Number] = &liveBooking{booked: s.write(e), lastWrite: now}
		}
	case PrefillDone, PrefillReleased:
		if b := s.live[e.Number]; b != nil && b.done == 0 {
			b.done = e.Kind
			s.write(e)
		}
	case Freed:
		if s.live[e.Number] != nil {
			delete(s.live, e.Number)
			s.write(e)
		}
	case Moved:
		b := s.live[e.Number]
		if b == nil {
			return
		}
		if r := s.write(e); len(b.moved) < maxMoves {
			b.moved = append(b.moved, r)
		} else {
			b.moved[maxMoves-1] = r
		}
	case Output:
		b := s.live[e.Number]
		if b == nil {
			return
		}
		if b.latest == b.output {
			s.dirty = append(s.dirty, e.Number)
		}
		b.latest = output{e.Blocks, e.Left}
	default:
		s.write(e)
	}
}

// Tick logs the output that has waited long enough.
func (s *Sender) Tick(now time.Duration) {
	if len(s.dirty) == 0 || now-s.outputs < outputEvery/4 {
		return
	}
	s.outputs = now
	kept := s.dirty[:0]
	for _, number := range s.dirty {
		switch b := s.live[number]; {
		case b == nil || b.latest == b.output: // it ended, or is in the list twice
		case now-b.lastWrite < outputEvery:
			kept = append(kept, number)
		default:
			s.write(&Entry{Kind: Output, Number: number, Blocks: b.latest.blocks, Left: b.latest.left})
			b.output, b.lastWrite = b.latest, now
		}
	}
	s.dirty = kept
}

// numberOf returns the log's number of a worker.
func (s *Sender) numberOf(w Worker) uint32 {
	number, known := s.numbers[w]
	if !known {
		number = uint32(len(s.workers))
		s.numbers[w] = number
		s.workers = append(s.workers, w)
	}
	return number
}

// maxLogWorkers bounds the workers of the log's dictionary. It is below maxWorkers, which bounds a receiver's.
const maxLogWorkers = maxWorkers - 1

// write logs an entry.
func (s *Sender) write(e *Entry) record {
	r := s.encode(e)
	entries, most := s.MaxEntries, s.MaxBytes
	if entries == 0 {
		entries = DefaultLogEntries
	}
	if most == 0 {
		most = DefaultLogBytes
	}
	held := int(s.next - s.first)
	if held == len(s.log) && held < entries {
		s.grow(min(max(2*held, 256), entries))
	}
	if held == entries {
		s.dropOldest()
	}
	s.log[s.next%uint64(len(s.log))] = r
	s.next++
	for s.bytes += len(r.data); s.bytes > most && s.first < s.next; {
		s.dropOldest()
	}
	return r
}

func (s *Sender) dropOldest() {
	at := s.first % uint64(len(s.log))
	s.bytes -= len(s.log[at].data)
	s.log[at] = record{}
	s.first++
}

// grow gives the ring room for n entries.
func (s *Sender) grow(n int) {
	log := make([]record, n)
	for seq := s.first; seq < s.next; seq++ {
		log[seq%uint64(n)] = s.log[seq%uint64(len(s.log))]
	}
	s.log = log
}

// encode encodes an entry. Bookings get memory of their own, because a snapshot may need them for long; the others
// share memory that is freed with the last of them.
func (s *Sender) encode(e *Entry) record {
	r := record{worker: -1}
	switch e.Kind {
	case Booked, Moved, Bound, Used, Learned:
		r.worker = int32(s.numberOf(e.Worker))
	}
	s.scratch = appendEntry(s.scratch[:0], e, uint32(max(r.worker, 0)))
	if e.Kind == Waits {
		r.first = int32(1 + len(appendWaits(nil, e)))
	}
	if e.Kind == Booked || e.Kind == Moved || len(s.scratch) > 1024 {
		r.data = slices.Clone(s.scratch)
		return r
	}
	if cap(s.room)-len(s.room) < len(s.scratch) {
		s.room = make([]byte, 0, 16<<10)
	}
	from := len(s.room)
	s.room = append(s.room, s.scratch...)
	r.data = s.room[from:len(s.room):len(s.room)]
	return r
}

// renumber begins a new dictionary and drops the log, so that all cursors end and their peers take a snapshot.
func (s *Sender) renumber() {
	s.dictionary++
	was := s.workers
	s.numbers, s.workers = map[Worker]uint32{}, nil
	s.log, s.first, s.bytes = nil, s.next, 0
	for _, b := range s.live {
		b.booked = s.again(b.booked, was)
		for i, r := range b.moved {
			b.moved[i] = s.again(r, was)
		}
	}
}

// again encodes a record of a former dictionary.
func (s *Sender) again(r record, was dictionary) record {
	var e Entry
	if d := (&decoder{data: r.data}); d.entry(&e, &was, new(arena), 0) {
		return s.encode(&e)
	}
	return r
}

// Renew begins a new dictionary if too many workers have come and gone. The caller calls it now and then.
func (s *Sender) Renew() {
	if len(s.workers) > maxLogWorkers/2 {
		s.renumber()
	}
}

// Cursor is one peer's place in a log. It shares the lock of its Sender.
type Cursor struct {
	log        *Sender
	peer       Identity
	version    uint64 // of the stream
	next       uint64
	dictionary uint64
	known      []bool // workers that the stream has named
	snapshot   []record
	begun      bool // the first part of the snapshot was sent
	rest       bool // parts of it are still to send
	seq        uint64
	staleness  time.Duration
	acked      uint64
	// Reason says why the peer got a snapshot; empty: it went on.
	Reason SnapshotReason
	// Entries and Bytes count what was sent.
	Entries, Bytes uint64
}

// SnapshotReason says why a peer got a snapshot. It is a label's value.
type SnapshotReason string

// The reasons.
const (
	Joined     SnapshotReason = "joined"      // the peer has read nothing of this log
	Fell       SnapshotReason = "fell_behind" // the log does not reach back so far
	FromFuture SnapshotReason = "future"      // the peer names an entry that was never written
)

// SnapshotReasons returns all reasons.
func SnapshotReasons() []SnapshotReason { return []SnapshotReason{Joined, Fell, FromFuture} }

// ErrBehind means that the peer read so slowly that the log has dropped what it needs.
var ErrBehind = errors.New("replica: the peer has fallen behind the log")

// Admit checks the first message of a peer's stream. It returns the reason of a refusal; empty: the peer is admitted.
// The caller has checked the proof.
func (s *Sender) Admit(message []byte) (Hello, Reason) {
	h, err := ParseHello(message)
	switch {
	case err != nil:
		return h, Malformed
	case h.Lowest > Version || h.Highest < MinVersion:
		return h, OldVersion
	case h.Self.Origin == 0:
		return h, Malformed
	case h.Self == s.self:
		return h, Self
	case h.Self.Origin == s.self.Origin:
		return h, SameOrigin
	case h.Group != s.group:
		return h, OtherGroup
	}
	return h, ""
}

// Open returns the place of an admitted peer, and the welcome to send to it. If a snapshot is due, more returns the
// entries that it has beside the bookings, such as sessions; it is called after the place is fixed.
func (s *Sender) Open(h *Hello, proof []byte, more func() []Entry) (*Cursor, []byte) {
	c := &Cursor{log: s, peer: h.Self, version: min(h.Highest, Version), dictionary: s.dictionary}
	switch {
	case h.Have != s.self || h.Seq == 0:
		c.Reason = Joined
	case h.Seq >= s.next:
		c.Reason = FromFuture
	case h.Seq+1 < s.first:
		c.Reason = Fell
	default:
		c.next = h.Seq + 1
	}
	w := Welcome{Version: c.version, Self: s.self, Name: s.name, Proof: proof, Next: c.next}
	if c.Reason != "" {
		c.next, c.seq, c.rest = s.next, s.next-1, true
		c.snapshot = s.snapshotOf(more)
		c.dictionary = s.dictionary // more may have renewed it
	}
	return c, w.Append(nil)
}

// snapshotOf returns all live bookings in the order of their numbers, then the further entries.
func (s *Sender) snapshotOf(more func() []Entry) []record {
	records := make([]record, 0, 2*len(s.live))
	for _, number := range slices.Sorted(maps.Keys(s.live)) {
		b := s.live[number]
		records = append(records, b.booked)
		records = append(records, b.moved...)
		if b.done != 0 {
			records = append(records, s.encode(&Entry{Kind: b.done, Number: number}))
		}
		if b.output != (output{}) {
			records = append(records,
				s.encode(&Entry{Kind: Output, Number: number, Blocks: b.output.blocks, Left: b.output.left}))
		}
	}
	if more != nil {
		for _, e := range more() {
			records = append(records, s.encode(&e))
		}
	}
	return records
}

// Pending reports whether the cursor has something to send.
func (c *Cursor) Pending() bool { return c.rest || c.next < c.log.next }

// Snapshotting reports whether parts of a snapshot are still to send.
func (c *Cursor) Snapshotting() bool { return c.rest }

// Behind returns how many entries the peer has not acknowledged.
func (c *Cursor) Behind() uint64 { return c.log.next - 1 - min(c.acked, c.log.next-1) }

// Peer returns the identity that the peer gave.
func (c *Cursor) Peer() Identity { return c.peer }

// Staleness returns how old an entry is when the peer applies it, as measured: half a round trip and the wait for the
// flush, smoothed. 0: not measured yet.
func (c *Cursor) Staleness() time.Duration { return c.staleness }

// Next appends the next message to b: a part of the snapshot, or a batch, which is empty (a heartbeat) if nothing is
// pending. ErrBehind ends the cursor.
func (c *Cursor) Next(now time.Duration, b []byte) ([]byte, error) {
	s := c.log
	if c.dictionary != s.dictionary || !c.rest && c.next < s.first {
		return b, ErrBehind
	}
	size := len(b)
	var records []record
	if c.rest {
		flags := byte(0)
		if !c.begun {
			flags, c.begun = flagFirst, true
		}
		n := portion(len(c.snapshot), func(i int) int { return len(c.snapshot[i].data) })
		records, c.snapshot = c.snapshot[:n], c.snapshot[n:]
		if len(c.snapshot) == 0 {
			flags |= flagLast
			c.rest, c.snapshot = false, nil
		}
		b = c.head(append(b, typeSnapshot, flags), c.seq, now, len(records))
		for i := range records {
			b = c.append(b, &records[i])
		}
	} else {
		at := func(i int) *record { return &s.log[(c.next+uint64(i))%uint64(len(s.log))] }
		n := portion(int(s.next-c.next), func(i int) int { return len(at(i).data) })
		b = c.head(append(b, typeBatch), c.next, now, n)
		for i := range n {
			b = c.append(b, at(i))
		}
		c.next += uint64(n)
		c.Entries += uint64(n)
	}
	c.Bytes += uint64(len(b) - size)
	return b, nil
}

// portion returns how many of n entries a message takes.
func portion(n int, size func(int) int) int {
	bytes := 0
	for i := range min(n, batchEntries) {
		if bytes += size(i); bytes > batchBytes && i > 0 {
			return i
		}
	}
	return min(n, batchEntries)
}

// head appends what a batch and a part of a snapshot begin with, after type and flags.
func (c *Cursor) head(b []byte, seq uint64, now time.Duration, entries int) []byte {
	b = appendTime(binary.AppendUvarint(b, seq), now)
	b = binary.AppendUvarint(b, uint64(c.staleness/time.Microsecond))
	return binary.AppendUvarint(b, uint64(entries))
}

// append appends an entry, after the name of its worker if the stream has not given it yet.
func (c *Cursor) append(b []byte, r *record) []byte {
	if r.worker >= 0 {
		if n := int(r.worker) + 1; n > len(c.known) {
			c.known = append(c.known, make([]bool, n-len(c.known))...)
		}
		if !c.known[r.worker] {
			c.known[r.worker] = true
			b = appendNamed(b, uint32(r.worker), c.log.workers[r.worker])
		}
	}
	if c.version == 1 && r.first > 0 {
		return append(b, r.data[:r.first]...)
	}
	return append(b, r.data...)
}

// Received takes a later message of the peer. flush is how long an entry waits on average until it is sent.
func (c *Cursor) Received(now time.Duration, message []byte, flush time.Duration) error {
	a, err := parseAck(message)
	if err != nil {
		return err
	}
	if a.seq > c.log.Last() {
		return errMalformed
	}
	c.acked = max(c.acked, a.seq)
	if round := now - a.sent - a.held; a.sent <= now && a.held >= 0 && round >= 0 && round < time.Hour {
		staleness := min(round/2+flush, time.Hour-1)
		if c.staleness == 0 {
			c.staleness = staleness
		}
		c.staleness += (staleness - c.staleness) / 8
	}
	return nil
}

// Goodbye returns the message of a process that ends.
func Goodbye() []byte { return []byte{typeGoodbye} }
