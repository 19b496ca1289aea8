package replica

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"time"

	"kvepp/kvblock"
	"kvepp/scoring"
)

// The wire. A connection carries messages, each after its length in 4 bytes. Integers are unsigned varints, hashes 8
// bytes, all little-endian; texts are a length and bytes. A message begins with its type:
//
//	greeting type, JSON
//	changes  type, flags (1: a snapshot begins, 2: it ends), echo of a ping's time or 0, then each change
//	goodbye  type
//	ping     type, time in µs of the sender's clock
//	again    type: send a snapshot
//
// Both sides begin with a greeting, first the process that connects. It then says ping and again; the other one says
// the rest, or if it was asked for its index, the index, without messages. A change begins with its kind, and a worker
// is its rank and its name:
//
//	booked              number, worker, block size, prefill tokens, blocks, age in ms, chains, each: length, hashes
//	prefill done, released, freed   number
//	moved               number, worker, block size
//	bound               key (32 bytes), worker, TTL in ms, age in ms
//	used, ended         key
//	learned             worker, number of values, values (IEEE 754)
//
// Versions 1 and 2 were spoken over gRPC. Processes of different versions share nothing.
const (
	Version = 3
	alpn    = "kvepp-replica/3"
	http2   = "PRI " // begins each connection of versions 1 and 2 without TLS
)

const (
	typeGreeting byte = 'K'
	typeChanges  byte = 'C'
	typeGoodbye  byte = 'G'
	typePing     byte = 'P'
	typeAgain    byte = 'A'

	flagFirst = 1
	flagLast  = 2
)

// Kind is what a change says. The first ones are scoring.ChangeKind's.
type Kind uint8

// The kinds. Their numbers are on the wire.
const (
	Bound   Kind = 1 + iota + Kind(scoring.Moved) // a session was bound to a worker, or used there
	Used                                          // a request of a session ended
	Ended                                         // a session ended
	Learned                                       // what the owner has learned of a worker
	kinds
)

var kindNames = [kinds]string{"", "booked", "prefill_done", "prefill_released", "freed", "moved", "bound", "used",
	"ended", "learned"}

// Kinds returns the names of all kinds.
func Kinds() []string { return kindNames[1:] }

// Bounds. Messages beyond them are malformed.
const (
	MaxHashes  = 1 << 16 // of one booking; a longer prompt counts as blocks without hashes
	maxChains  = 1 << 12
	maxText    = 512 // bytes of a name
	maxValues  = 64
	maxCount   = 1 << 40 // tokens, blocks
	maxRank    = 1 << 20
	maxAge     = 30 * 24 * time.Hour
	maxMessage = 2 << 20 // bytes; a change has at most MaxHashes hashes of 8 bytes
	maxRequest = 4 << 10 // bytes of the other messages
	partBytes  = 256 << 10
)

var errMalformed = errors.New("replica: the message is malformed")

// begin begins a message in b's memory.
func begin(b []byte, kind byte) []byte { return append(b[:0], 0, 0, 0, 0, kind) }

// send sends a message that begin has begun.
func send(conn net.Conn, within time.Duration, message []byte) error {
	binary.LittleEndian.PutUint32(message, uint32(len(message)-4))
	if err := conn.SetWriteDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	_, err := conn.Write(message)
	return err
}

// receive receives a message of at most most bytes into b's memory.
func receive(from io.Reader, b []byte, most int) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(from, head[:]); err != nil {
		return nil, err
	}
	n := int(binary.LittleEndian.Uint32(head[:]))
	switch {
	case string(head[:]) == http2:
		return nil, refused(OldVersion)
	case n < 1 || n > most:
		return nil, fmt.Errorf("%w: %d bytes", errMalformed, n)
	}
	b = slices.Grow(b[:0], n)[:n]
	_, err := io.ReadFull(from, b)
	return b, err
}

// decoder reads a message. After the first error all its results are zero.
type decoder struct {
	data []byte
	err  error
}

func (d *decoder) fail(what string) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", errMalformed, what)
	}
}

// uint reads an integer of at most most.
func (d *decoder) uint(most uint64, what string) uint64 {
	v, n := binary.Uvarint(d.data)
	if d.err != nil || n <= 0 || v > most {
		d.fail(what)
		return 0
	}
	d.data = d.data[n:]
	return v
}

// bytes returns the next n bytes; zeros after an error.
func (d *decoder) bytes(n int, what string) []byte {
	if d.err != nil || n > len(d.data) {
		d.fail(what)
		return make([]byte, min(n, 32))
	}
	b := d.data[:n:n]
	d.data = d.data[n:]
	return b
}

func (d *decoder) byte(what string) byte    { return d.bytes(1, what)[0] }
func (d *decoder) fixed(what string) uint64 { return binary.LittleEndian.Uint64(d.bytes(8, what)) }
func (d *decoder) text(most int) []byte     { return d.bytes(int(d.uint(uint64(most), "length")), "text") }
func (d *decoder) ms(what string) time.Duration {
	return time.Duration(d.uint(uint64(maxAge/time.Millisecond), what)) * time.Millisecond
}

// end returns the error, also for bytes that are left.
func (d *decoder) end() error {
	if d.err == nil && len(d.data) > 0 {
		d.fail("bytes after its end")
	}
	return d.err
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func appendMS(b []byte, d time.Duration) []byte {
	return binary.AppendUvarint(b, uint64(max(d, 0)/time.Millisecond))
}

// greeting is the first message of either side.
type greeting struct {
	Version int
	Index   bool   `json:",omitempty"` // the process that connects wants the index, and not the changes
	Origin  uint64 `json:",omitempty"` // names the process; not 0
	Group   string `json:",omitempty"` // see Config
	Name    string `json:",omitempty"`
	Proof   []byte `json:",omitempty"` // shows that the process has the replicas' token
	Refused Reason `json:",omitempty"` // why the process that answers shares nothing
}

func (g *greeting) send(conn net.Conn) error {
	g.Version = Version
	text, err := json.Marshal(g)
	if err != nil {
		return err
	}
	return send(conn, handshakeIn, append(begin(nil, typeGreeting), text...))
}

// receiveGreeting receives a greeting of this version. A refusal is an error.
func receiveGreeting(conn net.Conn) (g greeting, err error) {
	message, err := receive(conn, nil, maxRequest)
	switch {
	case err != nil:
		return g, err
	case message[0] != typeGreeting || json.Unmarshal(message[1:], &g) != nil:
		return g, refused(Malformed)
	case g.Refused != "" && slices.Contains(refusals, g.Refused):
		return g, refused(g.Refused)
	case g.Version != Version:
		return g, refused(OldVersion)
	case g.Origin == 0 || len(g.Name) > maxText:
		return g, refused(Malformed)
	}
	return g, nil
}

// Reason is why two processes do not share, or why a connection ended. It is a label's value.
type Reason string

// The reasons.
const (
	Malformed  Reason = "malformed"      // the peer does not speak the protocol
	OldVersion Reason = "version"        // it speaks another version
	OtherGroup Reason = "other_pool"     // it picks from another pool
	Self       Reason = "self"           // the address is this process's own
	BadToken   Reason = "token"          // the peer does not have the replicas' token
	TooMany    Reason = "too_many_peers" // more peers than a process serves
	Busy       Reason = "busy"           // it gives its index to another replica, or starts itself
	Duplicate  Reason = "duplicate"      // another address leads to the same process
	Silent     Reason = "silent"         // no message for longer than the timeout
	Stalled    Reason = "stalled"        // the peer does not read
	Left       Reason = "left"           // it said goodbye
)

// refusals are the reasons that a peer tells.
var refusals = []Reason{Malformed, OldVersion, OtherGroup, Self, BadToken, TooMany, Busy}

// Reasons returns all reasons.
func Reasons() []Reason { return append(slices.Clone(refusals), Duplicate, Silent, Stalled, Left) }

// refused is a reason as an error.
type refused Reason

func (r refused) Error() string { return "replica: the peers share nothing: " + string(r) }

// reasonOf returns the reason of an error; empty: it has none, such as a failed connection.
func reasonOf(err error) Reason {
	var r refused
	switch {
	case errors.As(err, &r):
		return Reason(r)
	case errors.Is(err, errMalformed):
		return Malformed
	}
	return ""
}

func appendWorker(b []byte, w Worker) []byte {
	return appendText(binary.AppendUvarint(b, uint64(w.Rank)), w.Name)
}

// appendChange appends a change of a book; w is its worker.
func appendChange(b []byte, c *scoring.Change, w Worker) []byte {
	b = binary.AppendUvarint(append(b, byte(c.Kind)), c.Number)
	switch c.Kind {
	case scoring.Booked:
		hashes := c.Hashes()
		chains, blocks := c.Chains, c.Blocks
		if hashes > MaxHashes || len(chains) > maxChains {
			chains, blocks = nil, blocks+hashes
		}
		b = binary.AppendUvarint(appendWorker(b, w), uint64(c.BlockSize))
		b = binary.AppendUvarint(b, uint64(c.PrefillTokens))
		b = binary.AppendUvarint(appendMS(binary.AppendUvarint(b, uint64(blocks)), c.Age), uint64(len(chains)))
		for _, chain := range chains {
			b = binary.AppendUvarint(b, uint64(len(chain)))
			for _, h := range chain {
				b = binary.LittleEndian.AppendUint64(b, uint64(h))
			}
		}
	case scoring.Moved:
		b = binary.AppendUvarint(appendWorker(b, w), uint64(c.BlockSize))
	}
	return b
}

// appendSession appends an event of a session; w is its worker.
func appendSession(b []byte, s *Session, w Worker) []byte {
	b = append(append(b, byte(s.Kind)), s.Key[:]...)
	if s.Kind == Bound {
		b = appendMS(appendMS(appendWorker(b, w), s.TTL), s.Age)
	}
	return b
}

func appendLearned(b []byte, w Worker, values []float64) []byte {
	b = binary.AppendUvarint(appendWorker(append(b, byte(Learned)), w), uint64(len(values)))
	for _, v := range values {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
	}
	return b
}

// Session is what happened to a session.
type Session struct {
	Kind     Kind // Bound, Used, Ended
	Key      [32]byte
	Worker   kvblock.Worker // Bound
	TTL, Age time.Duration  // Bound; the age is the time since the latest use
}

// lesson is what a peer has learned of a worker.
type lesson struct {
	worker kvblock.Worker
	values []float64
}

// changes is a decoded message. Its memory is used again for the next one.
type changes struct {
	flags    byte
	echo     uint64 // µs; 0: none
	book     []scoring.Change
	sessions []Session
	lessons  []lesson
	missed   int // changes about workers that are not known here
	hashes   []kvblock.SequenceHash
	chains   [][]kvblock.SequenceHash
}

// parse decodes a message of changes. Changes about workers that are not known are left out.
func (m *changes) parse(data []byte, known *names) error {
	*m = changes{book: m.book[:0], sessions: m.sessions[:0], lessons: m.lessons[:0],
		hashes: m.hashes[:0], chains: m.chains[:0]}
	d := &decoder{data: data}
	if m.flags = d.byte("flags"); m.flags > flagFirst|flagLast {
		d.fail("flags")
	}
	m.echo = d.uint(math.MaxInt64, "echo")
	for d.err == nil && len(d.data) > 0 {
		m.change(d, known)
	}
	return d.err
}

func (m *changes) change(d *decoder, known *names) {
	kind := Kind(d.byte("kind"))
	there := true
	worker := func() (w kvblock.Worker) {
		rank, name := uint32(d.uint(maxRank, "rank")), d.text(maxText)
		if w, there = known.byName[Worker{string(name), rank}]; !there && d.err == nil {
			m.missed++
		}
		return w
	}
	switch {
	case kind == 0 || kind >= kinds:
		d.fail("kind")
	case kind == Learned:
		l := lesson{worker: worker()}
		for range d.uint(maxValues, "number of values") {
			l.values = append(l.values, math.Float64frombits(d.fixed("value")))
		}
		if there {
			m.lessons = append(m.lessons, l)
		}
	case kind >= Bound:
		s := Session{Kind: kind}
		copy(s.Key[:], d.bytes(len(s.Key), "key"))
		if kind == Bound {
			s.Worker, s.TTL, s.Age = worker(), d.ms("TTL"), d.ms("age")
		}
		if there {
			m.sessions = append(m.sessions, s)
		}
	default:
		c := scoring.Change{Kind: scoring.ChangeKind(kind), Number: d.uint(math.MaxUint64, "number")}
		switch c.Kind {
		case scoring.Booked:
			c.Worker, c.BlockSize = worker(), int(d.uint(kvblock.MaxBlockSize, "block size"))
			c.PrefillTokens, c.Blocks = int(d.uint(maxCount, "prefill tokens")), int(d.uint(maxCount, "blocks"))
			c.Age = d.ms("age")
			c.Chains = m.chainsOf(d)
			if !there {
				return
			}
		case scoring.Moved:
			c.Worker, c.BlockSize = worker(), int(d.uint(kvblock.MaxBlockSize, "block size"))
			if !there { // what a copy needs at another worker is not kept
				c = scoring.Change{Kind: scoring.Freed, Number: c.Number}
			}
		}
		m.book = append(m.book, c)
	}
}

func (m *changes) chainsOf(d *decoder) [][]kvblock.SequenceHash {
	first, left := len(m.chains), MaxHashes
	for range d.uint(maxChains, "number of chains") {
		length := int(d.uint(uint64(left), "length of a chain"))
		left -= length
		raw := d.bytes(8*length, "hashes")
		if d.err != nil {
			return nil
		}
		from := len(m.hashes)
		for ; len(raw) > 0; raw = raw[8:] {
			m.hashes = append(m.hashes, kvblock.SequenceHash(binary.LittleEndian.Uint64(raw)))
		}
		// If the memory grew, earlier chains stay in its former place.
		m.chains = append(m.chains, m.hashes[from:len(m.hashes):len(m.hashes)])
	}
	return m.chains[first:len(m.chains):len(m.chains)]
}
