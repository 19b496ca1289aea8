package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"kvepp/kvblock"
)

// The wire. A stream carries messages; their frames are the transport's. Integers are unsigned varints (zigzag where
// they may be negative), hashes and origins 8 bytes little-endian, times microseconds of the sender's monotonic clock,
// texts a length and bytes. A message begins with its type:
//
//	hello     type, "KVRP", lowest and highest version, origin, epoch, group, proof; what it has: origin, epoch, seq
//	welcome   type, version, origin, epoch, name, proof, next: the log continues there; 0: a snapshot comes
//	refusal   type, code
//	batch     type, seq of the first entry, sent, staleness, entries, then each entry; none: a heartbeat
//	snapshot  type, flags (1: the first part, 2: the last), seq that it equals, then as a batch
//	goodbye   type
//	ack       type, seq, sent (of the message that it answers), time that it was held
//
// An entry begins with its kind. A worker is a number that an entry `named` of the same stream has given:
//
//	named          number, rank, name
//	booked         booking, worker, block size, prefill tokens, blocks, at, chains, then for each: length, hashes
//	prefill done   booking; prefill released and freed have the same
//	moved          booking, worker, block size, at
//	output         booking, blocks, share left in millionths and one more; 0: not known
//	bound, used    key (32 bytes), worker, version, writer, TTL in ms, at
//	ended          key, version, writer
//	learned        worker, number of values, values (IEEE 754)
//	waits          requests, at of the oldest; from version 2: classes, then for each: class (8 bytes), quantum,
//	               cost, at
//
// A sender speaks the lower one of its version and the receiver's highest. A receiver of version 1 gets the beginning
// of an entry `waits`, which is all that it knows.
const (
	magic = "KVRP"
	// Version is the version of the protocol; MinVersion is the oldest that is still spoken.
	Version    = 2
	MinVersion = 1
)

// Types of messages.
const (
	typeHello byte = 'A' + iota
	typeWelcome
	typeRefusal
	typeBatch
	typeSnapshot
	typeGoodbye
	typeAck
)

// millionths is the resolution of shares.
const millionths = 1_000_000

const (
	flagFirst = 1
	flagLast  = 2
)

// errMalformed means that a peer does not speak this protocol.
var errMalformed = errors.New("replica: the message is malformed")

// decoder reads a message. After the first error all its results are zero.
type decoder struct {
	data    []byte
	version uint64 // of the stream, for entries; 0: Version
	err     error
}

func (d *decoder) fail(what string) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", errMalformed, what)
	}
}

func (d *decoder) byte(what string) byte {
	if d.err != nil || len(d.data) == 0 {
		d.fail(what)
		return 0
	}
	b := d.data[0]
	d.data = d.data[1:]
	return b
}

// uint reads an integer of at most most.
func (d *decoder) uint(most uint64, what string) uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.data)
	if n <= 0 || v > most {
		d.fail(what)
		return 0
	}
	d.data = d.data[n:]
	return v
}

func (d *decoder) fixed(what string) uint64 {
	b := d.bytes(8, what)
	if b == nil {
		return 0
	}
	return binary.LittleEndian.Uint64(b)
}

// bytes returns the next n bytes; nil after an error.
func (d *decoder) bytes(n int, what string) []byte {
	if d.err != nil || n > len(d.data) {
		d.fail(what)
		return nil
	}
	b := d.data[:n:n]
	d.data = d.data[n:]
	return b
}

func (d *decoder) text(most int, what string) string {
	return string(d.bytes(int(d.uint(uint64(most), what)), what))
}

// time reads a time of the peer's clock, which may be negative.
func (d *decoder) time(what string) time.Duration {
	v := d.uint(math.MaxUint64, what)
	us := int64(v>>1) ^ -int64(v&1)
	if us > math.MaxInt64/2000 || us < math.MinInt64/2000 {
		d.fail(what)
		return 0
	}
	return time.Duration(us) * time.Microsecond
}

// end returns the error, also for bytes that are left.
func (d *decoder) end() error {
	if d.err == nil && len(d.data) > 0 {
		d.fail("bytes after its end")
	}
	return d.err
}

func appendTime(b []byte, t time.Duration) []byte {
	us := int64(t / time.Microsecond)
	return binary.AppendUvarint(b, uint64(us)<<1^uint64(us>>63))
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// Hello is the first message of a receiver.
type Hello struct {
	Lowest, Highest uint64 // versions
	Self            Identity
	// Group is whose endpoints the process picks from, such as the name of an InferencePool. Replicas of another group
	// share nothing.
	Group string
	// Proof shows that the receiver has the token of the replicas; empty without one.
	Proof []byte
	// Have and Seq say whose log the receiver has read before on this connection, and how far. 0: none.
	Have Identity
	Seq  uint64
}

// Append appends the message.
func (h *Hello) Append(b []byte) []byte {
	b = append(append(b, typeHello), magic...)
	b = binary.AppendUvarint(b, h.Lowest)
	b = binary.AppendUvarint(b, h.Highest)
	b = appendIdentity(b, h.Self)
	b = appendText(b, h.Group)
	b = appendText(b, string(h.Proof))
	b = appendIdentity(b, h.Have)
	return binary.AppendUvarint(b, h.Seq)
}

func appendIdentity(b []byte, id Identity) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, id.Origin), id.Epoch)
}

func (d *decoder) identity(what string) Identity {
	return Identity{Origin: d.fixed(what), Epoch: d.fixed(what)}
}

// maxProof is the most bytes of a proof.
const maxProof = 64

// ParseHello decodes the first message of a stream. Versions above this one's may have more fields at the end.
func ParseHello(data []byte) (h Hello, err error) {
	d := &decoder{data: data}
	if d.byte("type") != typeHello || string(d.bytes(len(magic), "magic")) != magic {
		return h, fmt.Errorf("%w: it is no hello", errMalformed)
	}
	h.Lowest = d.uint(math.MaxUint32, "version")
	h.Highest = d.uint(math.MaxUint32, "version")
	if d.err == nil && (h.Lowest > Version || h.Highest < MinVersion) {
		return h, nil // the rest may have another layout
	}
	h.Self = d.identity("identity")
	h.Group = d.text(maxGroup, "group")
	h.Proof = []byte(d.text(maxProof, "proof"))
	h.Have = d.identity("identity that is had")
	h.Seq = d.uint(math.MaxUint64, "sequence number")
	if h.Highest > Version {
		return h, d.err
	}
	return h, d.end()
}

// Welcome is the first message of a sender.
type Welcome struct {
	Version uint64
	Self    Identity
	Name    string // of the process, for people
	Proof   []byte
	Next    uint64 // sequence number of the next entry; 0: a snapshot comes
}

// Append appends the message.
func (w *Welcome) Append(b []byte) []byte {
	b = binary.AppendUvarint(append(b, typeWelcome), w.Version)
	b = appendIdentity(b, w.Self)
	b = appendText(b, w.Name)
	b = appendText(b, string(w.Proof))
	return binary.AppendUvarint(b, w.Next)
}

// ParseWelcome decodes the first message of a sender that accepts a receiver.
func ParseWelcome(data []byte) (w Welcome, err error) {
	d := &decoder{data: data}
	d.byte("type")
	if w.Version = d.uint(math.MaxUint32, "version"); d.err == nil && (w.Version < MinVersion || w.Version > Version) {
		d.fail("version")
	}
	w.Self = d.identity("identity")
	w.Name = d.text(maxName, "name")
	w.Proof = []byte(d.text(maxProof, "proof"))
	w.Next = d.uint(math.MaxUint64, "sequence number")
	return w, d.end()
}

// WelcomeProof returns the proof of a sender's first message; nil if it is none.
func WelcomeProof(message []byte) []byte {
	if len(message) == 0 || message[0] != typeWelcome {
		return nil
	}
	w, err := ParseWelcome(message)
	if err != nil {
		return nil
	}
	return w.Proof
}

// IsWelcome reports whether a message is a sender's welcome, and not a refusal.
func IsWelcome(message []byte) bool { return len(message) > 0 && message[0] == typeWelcome }

// Reason is why a sender refuses a receiver, or why a receiver closes a connection. It is a label's value.
type Reason string

// The reasons. The order of the first ones is on the wire.
const (
	Malformed  Reason = "malformed"      // the peer does not speak the protocol
	OldVersion Reason = "version"        // no version in common
	OtherGroup Reason = "other_pool"     // the peer picks from another pool
	Self       Reason = "self"           // the address is this process's own
	SameOrigin Reason = "same_origin"    // another process has this one's or a peer's identity
	Duplicate  Reason = "duplicate"      // another address leads to the same process
	BadToken   Reason = "token"          // the peer does not have the replicas' token
	TooMany    Reason = "too_many_peers" // more connections than the sender serves
	Gap        Reason = "gap"            // entries are missing: a defect of the sender
	Silent     Reason = "silent"         // no message for longer than the timeout
	Stalled    Reason = "stalled"        // the receiver does not read
	Left       Reason = "left"           // the peer said goodbye
	Resync     Reason = "resync"         // entries were dropped for a worker that is known now
)

var refusals = []Reason{Malformed, OldVersion, OtherGroup, Self, SameOrigin, Duplicate, BadToken, TooMany}

// Reasons returns all reasons.
func Reasons() []Reason {
	return append(append([]Reason{}, refusals...), Gap, Silent, Stalled, Left, Resync)
}

// Refusal returns the message of a sender that refuses a receiver.
func Refusal(why Reason) []byte {
	for i, r := range refusals {
		if r == why {
			return []byte{typeRefusal, byte(i)}
		}
	}
	return []byte{typeRefusal, 0}
}

// ParseRefusal decodes the first message of a sender that refuses a receiver.
func ParseRefusal(data []byte) (Reason, error) {
	if len(data) != 2 || data[0] != typeRefusal || int(data[1]) >= len(refusals) {
		return Malformed, fmt.Errorf("%w: refusal", errMalformed)
	}
	return refusals[data[1]], nil
}

// ack tells a sender how far its log was read.
type ack struct {
	seq  uint64
	sent time.Duration // of the message that it answers, on the sender's clock
	held time.Duration // from the receipt of that message to the ack
}

func (a *ack) append(b []byte) []byte {
	b = binary.AppendUvarint(append(b, typeAck), a.seq)
	return appendTime(appendTime(b, a.sent), a.held)
}

func parseAck(data []byte) (a ack, err error) {
	d := &decoder{data: data}
	if d.byte("type") != typeAck {
		d.fail("it is no ack")
	}
	a.seq = d.uint(math.MaxUint64, "sequence number")
	a.sent = d.time("time")
	a.held = d.time("time held")
	return a, d.end()
}

// batch is the head of a batch or of a part of a snapshot.
type batch struct {
	flags     byte // of a snapshot
	seq       uint64
	sent      time.Duration
	staleness time.Duration // the sender's estimate for this stream
	entries   int
}

func (d *decoder) batch(snapshot bool) (b batch) {
	if snapshot {
		if b.flags = d.byte("flags"); b.flags > flagFirst|flagLast {
			d.fail("flags")
		}
	}
	b.seq = d.uint(math.MaxUint64, "sequence number")
	b.sent = d.time("time")
	b.staleness = time.Duration(d.uint(uint64(time.Hour/time.Microsecond), "staleness")) * time.Microsecond
	b.entries = int(d.uint(maxEntries, "number of entries"))
	return b
}

// appendNamed appends the entry that gives a worker a number.
func appendNamed(b []byte, number uint32, w Worker) []byte {
	b = binary.AppendUvarint(append(b, byte(named)), uint64(number))
	return appendText(binary.AppendUvarint(b, uint64(w.Rank)), w.Name)
}

// appendEntry appends an entry; worker is the number of its worker.
func appendEntry(b []byte, e *Entry, worker uint32) []byte {
	b = append(b, byte(e.Kind))
	switch e.Kind {
	case Booked:
		b = binary.AppendUvarint(b, e.Number)
		b = binary.AppendUvarint(b, uint64(worker))
		b = binary.AppendUvarint(b, uint64(e.BlockSize))
		b = binary.AppendUvarint(b, uint64(e.PrefillTokens))
		hashes := e.hashes()
		if hashes > MaxHashes || len(e.Chains) > maxChains {
			b = binary.AppendUvarint(b, uint64(e.Blocks+hashes))
			return append(appendTime(b, e.At), 0)
		}
		b = binary.AppendUvarint(b, uint64(e.Blocks))
		b = binary.AppendUvarint(appendTime(b, e.At), uint64(len(e.Chains)))
		for _, chain := range e.Chains {
			b = binary.AppendUvarint(b, uint64(len(chain)))
			for _, h := range chain {
				b = binary.LittleEndian.AppendUint64(b, uint64(h))
			}
		}
	case PrefillDone, PrefillReleased, Freed:
		b = binary.AppendUvarint(b, e.Number)
	case Moved:
		b = binary.AppendUvarint(b, e.Number)
		b = binary.AppendUvarint(b, uint64(worker))
		b = appendTime(binary.AppendUvarint(b, uint64(e.BlockSize)), e.At)
	case Output:
		b = binary.AppendUvarint(b, e.Number)
		b = binary.AppendUvarint(b, uint64(e.Blocks))
		left := uint64(0)
		if e.Left >= 0 {
			left = 1 + uint64(math.Round(min(e.Left, 1)*millionths))
		}
		b = binary.AppendUvarint(b, left)
	case Bound, Used:
		b = append(b, e.Key[:]...)
		b = binary.AppendUvarint(b, uint64(worker))
		b = binary.AppendUvarint(b, e.Version)
		b = binary.LittleEndian.AppendUint64(b, e.Writer)
		b = appendTime(binary.AppendUvarint(b, uint64(e.TTL/time.Millisecond)), e.At)
	case Ended:
		b = binary.AppendUvarint(append(b, e.Key[:]...), e.Version)
		b = binary.LittleEndian.AppendUint64(b, e.Writer)
	case Learned:
		b = binary.AppendUvarint(b, uint64(worker))
		b = binary.AppendUvarint(b, uint64(len(e.Values)))
		for _, v := range e.Values {
			b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
		}
	case Waits:
		b = appendWaits(b, e)
		b = binary.AppendUvarint(b, uint64(min(len(e.Classes), MaxClasses)))
		for _, c := range e.Classes[:min(len(e.Classes), MaxClasses)] {
			b = binary.LittleEndian.AppendUint64(b, c.Class)
			b = binary.AppendUvarint(b, uint64(c.Quantum))
			b = appendTime(binary.AppendUvarint(b, uint64(c.Cost)), c.At)
		}
	}
	return b
}

// appendWaits appends what version 1 has of an entry Waits, after its kind.
func appendWaits(b []byte, e *Entry) []byte {
	return appendTime(binary.AppendUvarint(b, uint64(e.Blocks)), e.At)
}

// arena holds the chains, values and classes of the entries of one message.
type arena struct {
	hashes  []kvblock.SequenceHash
	chains  [][]kvblock.SequenceHash
	values  []float64
	classes []ClassWait
}

func (a *arena) reset() {
	a.hashes, a.chains, a.values, a.classes = a.hashes[:0], a.chains[:0], a.values[:0], a.classes[:0]
}

// dictionary has the workers of a stream by number.
type dictionary []Worker

// entry reads the next entry into e. It returns false for an entry that names a worker, which it adds to the
// dictionary. sent is the time of the message.
func (d *decoder) entry(e *Entry, words *dictionary, room *arena, sent time.Duration) bool {
	*e = Entry{Kind: Kind(d.byte("kind"))}
	switch e.Kind {
	case named:
		d.named(words)
		return false
	case Booked:
		e.Number = d.uint(math.MaxUint64, "booking")
		e.Worker = d.worker(*words)
		e.BlockSize = int(d.uint(kvblock.MaxBlockSize, "block size"))
		e.PrefillTokens = int(d.uint(maxCount, "prefill tokens"))
		e.Blocks = int(d.uint(maxCount, "blocks"))
		e.At = d.time("time")
		e.Chains = d.chainsOf(room)
	case PrefillDone, PrefillReleased, Freed:
		e.Number = d.uint(math.MaxUint64, "booking")
	case Moved:
		e.Number = d.uint(math.MaxUint64, "booking")
		e.Worker = d.worker(*words)
		e.BlockSize = int(d.uint(kvblock.MaxBlockSize, "block size"))
		e.At = d.time("time")
	case Output:
		e.Number = d.uint(math.MaxUint64, "booking")
		e.Blocks = int(d.uint(maxCount, "blocks"))
		if e.Left = -1; d.err == nil {
			if left := d.uint(1+millionths, "share left"); left > 0 {
				e.Left = float64(left-1) / millionths
			}
		}
	case Bound, Used:
		copy(e.Key[:], d.bytes(len(e.Key), "key"))
		e.Worker = d.worker(*words)
		e.Version = d.uint(math.MaxInt64, "version of a session")
		e.Writer = d.fixed("writer of a session")
		e.TTL = time.Duration(d.uint(uint64(maxAge/time.Millisecond), "TTL")) * time.Millisecond
		e.At = d.time("time")
	case Ended:
		copy(e.Key[:], d.bytes(len(e.Key), "key"))
		e.Version = d.uint(math.MaxInt64, "version of a session")
		e.Writer = d.fixed("writer of a session")
	case Learned:
		e.Worker = d.worker(*words)
		from := len(room.values)
		for range d.uint(maxValues, "number of values") {
			room.values = append(room.values, math.Float64frombits(d.fixed("value")))
		}
		e.Values = room.values[from:len(room.values):len(room.values)]
	case Waits:
		e.Blocks = int(d.uint(maxCount, "waiting requests"))
		e.At = d.time("time")
		if d.version != 1 {
			e.Classes = d.classesOf(room, sent)
		}
	default:
		d.fail("kind")
	}
	switch e.Kind {
	case Booked, Moved, Bound, Used, Waits:
		e.Age = min(max(sent-e.At, 0), maxAge)
	}
	return d.err == nil
}

func (d *decoder) classesOf(room *arena, sent time.Duration) []ClassWait {
	from := len(room.classes)
	for range d.uint(MaxClasses, "number of classes") {
		c := ClassWait{Class: d.fixed("class"), Quantum: int(d.uint(maxCount, "quantum")),
			Cost: int(d.uint(maxCount, "cost")), At: d.time("time")}
		c.Age = min(max(sent-c.At, 0), maxAge)
		room.classes = append(room.classes, c)
	}
	return room.classes[from:len(room.classes):len(room.classes)]
}

func (d *decoder) named(words *dictionary) {
	number := d.uint(maxWorkers-1, "number of a worker")
	w := Worker{Rank: uint32(d.uint(maxRank, "rank"))}
	w.Name = d.text(maxName, "name of a worker")
	switch n := uint64(len(*words)); {
	case d.err != nil:
	case number < n:
		(*words)[number] = w
	default:
		*words = append(*words, make([]Worker, number-n+1)...)
		(*words)[number] = w
	}
}

func (d *decoder) worker(words dictionary) Worker {
	n := d.uint(maxWorkers-1, "number of a worker")
	if d.err != nil {
		return Worker{}
	}
	if n >= uint64(len(words)) || words[n].Name == "" {
		d.fail("a worker without a name")
		return Worker{}
	}
	return words[n]
}

func (d *decoder) chainsOf(room *arena) [][]kvblock.SequenceHash {
	n := int(d.uint(maxChains, "number of chains"))
	first, left := len(room.chains), MaxHashes
	for range n {
		length := int(d.uint(uint64(left), "length of a chain"))
		left -= length
		raw := d.bytes(8*length, "hashes")
		if d.err != nil {
			return nil
		}
		from := len(room.hashes)
		for ; len(raw) > 0; raw = raw[8:] {
			room.hashes = append(room.hashes, kvblock.SequenceHash(binary.LittleEndian.Uint64(raw)))
		}
		// If the arena grew, earlier chains stay in its former memory.
		room.chains = append(room.chains, room.hashes[from:len(room.hashes):len(room.hashes)])
	}
	return room.chains[first:len(room.chains):len(room.chains)]
}

// Lasts reports whether a connection that ended for this reason would end again at once.
func (r Reason) Lasts() bool { return slices.Contains(refusals, r) }
