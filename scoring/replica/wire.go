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
	"kvepp/router/session"
	"kvepp/scoring"
)

// The wire. A connection carries messages, each after its length in 4 bytes. Integers are unsigned varints, hashes 8
// bytes, all little-endian; texts are a length and bytes. A message begins with its type:
//
//	greeting type, JSON
//	changes  type, then each change
//	synced   type: the snapshot, with which each connection begins, is complete
//	goodbye  type
//	ping     type, time in ns of the clock of the process that connects
//
// Both sides begin with a greeting, first the process that connects. It then says ping alone; the other one says the
// rest and each ping again, or if it was asked for its index, the index, without messages. A change begins with its
// kind, and a worker is its rank and its name:
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
	typeSynced   byte = 'S'
	typeGoodbye  byte = 'G'
	typePing     byte = 'P'
)

// The kinds of changes: scoring.ChangeKind's, then session.EventKind's, then what the owner has learned of a worker.
const (
	session0 = byte(scoring.Moved)
	bound    = session0 + byte(session.Bound)
	learned  = session0 + byte(session.Ended) + 1
	kinds    = learned + 1
)

// Bounds. Messages beyond them are malformed.
const (
	MaxHashes    = 1 << 16 // of one booking; a longer prompt counts as blocks without hashes
	maxChains    = 1 << 12
	maxText      = 512 // bytes of a name
	maxValues    = 64
	maxCount     = 1 << 40 // tokens, blocks
	maxRank      = 1 << 20
	maxAge       = 30 * 24 * time.Hour
	maxMessage   = 2 << 20 // bytes; a change has at most MaxHashes hashes of 8 bytes
	maxRequest   = 4 << 10 // bytes of greetings and pings
	messageBytes = 256 << 10
)

var errMalformed = errors.New("replica: the message is malformed")

// begin begins a message, and framed completes it with its length.
func begin(kind byte) []byte { return []byte{0, 0, 0, 0, kind} }

func framed(message []byte) []byte {
	binary.LittleEndian.PutUint32(message, uint32(len(message)-4))
	return message
}

// send sends a framed message.
func send(conn net.Conn, within time.Duration, message []byte) error {
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
	return send(conn, handshakeIn, framed(append(begin(typeGreeting), text...)))
}

// receiveGreeting receives a greeting of this version. A refusal is an error.
func receiveGreeting(conn net.Conn) (g greeting, err error) {
	message, err := receive(conn, nil, maxRequest)
	switch {
	case err != nil:
		return g, err
	case message[0] != typeGreeting || json.Unmarshal(message[1:], &g) != nil:
		return g, refused(Malformed)
	case slices.Contains(refusals, g.Refused):
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
	Stalled    Reason = "stalled"        // the peer reads too slowly
	NewWorker  Reason = "new_worker"     // changes about a worker were left out that this process knows now
	Left       Reason = "left"           // the peer said goodbye
)

// refusals are the reasons that a peer tells.
var refusals = []Reason{Malformed, OldVersion, OtherGroup, Self, BadToken, TooMany, Busy}

// Reasons returns all reasons.
func Reasons() []Reason {
	return append(slices.Clone(refusals), Duplicate, Silent, Stalled, NewWorker, Left)
}

// refused is a reason as an error.
type refused Reason

func (r refused) Error() string { return "replica: the peers share nothing: " + string(r) }

// ReasonOf returns the reason of an error; empty: it has none, such as a failed connection.
func ReasonOf(err error) Reason {
	var r refused
	switch {
	case errors.As(err, &r):
		return Reason(r)
	case errors.Is(err, errMalformed):
		return Malformed
	}
	return ""
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

func appendWorker(b []byte, w Worker) []byte {
	b = binary.AppendUvarint(b, uint64(w.Rank))
	return append(binary.AppendUvarint(b, uint64(len(w.Name))), w.Name...)
}

// appendChange appends a change of a book; w is its worker.
func appendChange(b []byte, c *scoring.Change, w Worker) []byte {
	b = binary.AppendUvarint(append(b, byte(c.Kind)), c.Number)
	if c.Kind != scoring.Booked && c.Kind != scoring.Moved {
		return b
	}
	b = binary.AppendUvarint(appendWorker(b, w), uint64(c.BlockSize))
	if c.Kind == scoring.Moved {
		return b
	}
	chains, blocks := c.Chains, c.Blocks
	if hashes := c.Hashes(); hashes > MaxHashes || len(chains) > maxChains {
		chains, blocks = nil, blocks+hashes
	}
	b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(c.PrefillTokens)), uint64(blocks))
	b = binary.AppendUvarint(appendMS(b, c.Age), uint64(len(chains)))
	for _, chain := range chains {
		b = binary.AppendUvarint(b, uint64(len(chain)))
		for _, h := range chain {
			b = binary.LittleEndian.AppendUint64(b, uint64(h))
		}
	}
	return b
}

// appendSession appends an event of a session; w is its worker.
func appendSession(b []byte, e *session.Event, w Worker) []byte {
	b = append(append(b, session0+byte(e.Kind)), e.Key[:]...)
	if e.Kind == session.Bound {
		b = appendMS(appendMS(appendWorker(b, w), e.TTL), e.Age)
	}
	return b
}

func appendLearned(b []byte, w Worker, values []float64) []byte {
	b = binary.AppendUvarint(appendWorker(append(b, learned), w), uint64(len(values)))
	for _, v := range values {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
	}
	return b
}

// lesson is what a peer has learned of a worker.
type lesson struct {
	worker kvblock.Worker
	values []float64
}

// changes is a decoded message. Its memory is used again for the next one.
type changes struct {
	book     []scoring.Change
	sessions []session.Event
	lessons  []lesson
	missed   int // changes about workers that are not known here
	hashes   []kvblock.SequenceHash
	chains   [][]kvblock.SequenceHash
}

// parse decodes changes. Those about workers that are not known are left out.
func (m *changes) parse(data []byte, known *names) error {
	*m = changes{book: m.book[:0], sessions: m.sessions[:0], lessons: m.lessons[:0],
		hashes: m.hashes[:0], chains: m.chains[:0]}
	d := &decoder{data: data}
	for d.err == nil && len(d.data) > 0 {
		m.change(d, known)
	}
	return d.err
}

func (m *changes) change(d *decoder, known *names) {
	kind := d.bytes(1, "kind")[0]
	there := true
	worker := func() (w kvblock.Worker) {
		rank := uint32(d.uint(maxRank, "rank"))
		name := d.bytes(int(d.uint(maxText, "length of a name")), "name")
		if w, there = known.byName[Worker{string(name), rank}]; !there && d.err == nil {
			m.missed++
		}
		return w
	}
	switch {
	case kind == 0 || kind >= kinds:
		d.fail("kind")
	case kind == learned:
		l := lesson{worker: worker()}
		for range d.uint(maxValues, "number of values") {
			l.values = append(l.values, math.Float64frombits(binary.LittleEndian.Uint64(d.bytes(8, "value"))))
		}
		if there {
			m.lessons = append(m.lessons, l)
		}
	case kind >= bound:
		e := session.Event{Kind: session.EventKind(kind - session0)}
		copy(e.Key[:], d.bytes(len(e.Key), "key"))
		if kind == bound {
			e.Worker, e.TTL, e.Age = worker(), d.ms("TTL"), d.ms("age")
		}
		if there {
			m.sessions = append(m.sessions, e)
		}
	default:
		c := scoring.Change{Kind: scoring.ChangeKind(kind), Number: d.uint(math.MaxUint64, "number")}
		if c.Kind == scoring.Booked || c.Kind == scoring.Moved {
			c.Worker, c.BlockSize = worker(), int(d.uint(kvblock.MaxBlockSize, "block size"))
		}
		if c.Kind == scoring.Booked {
			c.PrefillTokens, c.Blocks = int(d.uint(maxCount, "prefill tokens")), int(d.uint(maxCount, "blocks"))
			c.Age, c.Chains = d.ms("age"), m.chainsOf(d)
		}
		switch {
		case there:
			m.book = append(m.book, c)
		case c.Kind == scoring.Moved: // what a copy needs at another worker is not kept
			m.book = append(m.book, scoring.Change{Kind: scoring.Freed, Number: c.Number})
		}
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
