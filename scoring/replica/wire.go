package replica

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"time"

	"kvepp/kvblock"
	"kvepp/router/session"
	"kvepp/scoring"
)

// The wire. A connection carries records: a kind in one byte; unsigned varints after their number; bytes after theirs.
// Times are in microseconds, and hashes 8 bytes, little-endian.
//
//	kind                            varints                                         bytes
//	booked                          number, rank, length of the name, block size,   worker's name, hashes
//	                                prefill tokens, blocks, age, length of each chain
//	prefill done, released, freed   number
//	prefill timed, response timed   number, tokens, held tokens, time
//	bound                           rank, TTL, age                                  key, worker's name
//	used, ended                                                                     key
//	charged                         tokens, 1: for a turn + 2: more of it waits     tenant, 8 bytes
//	synced, goodbye
//	ping                            time by the clock of the process that connects
//	greeting                                                                        JSON
//
// Both sides begin with a greeting, first the process that connects. It then says ping alone; the other one says the
// rest and each ping again, or if it was asked for its index, the index, without records. synced ends the snapshot with
// which each connection begins.
//
// Versions 1 and 2 were spoken over gRPC; 3 had no charged. Processes of different versions share nothing.
const (
	Version = 4
	alpn    = "kvepp-replica/4"
)

// The kinds of records: scoring.ChangeKind's, then session.EventKind's, then those of this package.
const (
	lastChange = byte(scoring.ResponseTimed)
	lastEvent  = lastChange + byte(session.Ended)
	bound      = lastChange + byte(session.Bound)
)
const (
	syncedKind = lastEvent + 1 + iota
	goodbyeKind
	pingKind
	greetingKind
	chargedKind
)

// What charged says beside the tokens.
const (
	chargedTurn = 1 << iota
	tenantWaits
)

// leastInts is how many varints a record of a kind has at least.
var leastInts = [...]int{
	scoring.Booked: 7, scoring.PrefillDone: 1, scoring.PrefillReleased: 1, scoring.Freed: 1,
	scoring.PrefillTimed: 4, scoring.ResponseTimed: 4, bound: 3, pingKind: 1, greetingKind: 0, chargedKind: 2,
}

// Bounds. Records beyond them are malformed.
const (
	MaxHashes   = 1 << 16 // of one booking; a longer prompt counts as blocks without hashes
	maxChains   = 1 << 12
	maxInt      = 1 << 53
	maxText     = 512 // bytes of a name
	maxGreeting = 4 << 10
	maxData     = 8*MaxHashes + maxText
)

var errMalformed error = refused(Malformed)

// record is one record of a connection.
type record struct {
	kind byte
	ints []uint64
	data []byte
}

// read reads the next record, with at most so many bytes of data, into the memory of this one.
func (r *record) read(from *bufio.Reader, most int) (err error) {
	number := func(most int) int {
		var v uint64
		if err == nil {
			if v, err = binary.ReadUvarint(from); v > uint64(most) {
				v, err = 0, errMalformed
			}
		}
		return int(v)
	}
	if r.kind, err = from.ReadByte(); err != nil {
		return err
	}
	if r.kind == 0 || int(r.kind) >= len(leastInts) {
		return errMalformed
	}
	r.ints = r.ints[:0]
	for range number(leastInts[scoring.Booked] + maxChains) {
		r.ints = append(r.ints, uint64(number(maxInt)))
	}
	n := number(most)
	if err == nil && len(r.ints) < leastInts[r.kind] {
		err = errMalformed
	}
	if err != nil {
		return err
	}
	r.data = slices.Grow(r.data[:0], n)[:n]
	_, err = io.ReadFull(from, r.data)
	return err
}

// appendHead appends a record but for its data.
func appendHead(b []byte, kind byte, data int, ints ...uint64) []byte {
	b = binary.AppendUvarint(append(b, kind), uint64(len(ints)))
	for _, i := range ints {
		b = binary.AppendUvarint(b, i)
	}
	return binary.AppendUvarint(b, uint64(data))
}

func appendRecord(b []byte, kind byte, data []byte, ints ...uint64) []byte {
	return append(appendHead(b, kind, len(data), ints...), data...)
}

func micros(d time.Duration) uint64 { return uint64(max(d, 0) / time.Microsecond) }

func duration(micros uint64) time.Duration { return time.Duration(micros) * time.Microsecond }

// appendChange appends a change of a book.
func appendChange(b []byte, c *scoring.Change, nameOf func(kvblock.Worker) Worker) []byte {
	ints := append(make([]uint64, 0, 16), c.Number)
	switch c.Kind {
	case scoring.Booked:
		chains, hashes, blocks, at := c.Chains, c.Hashes(), c.Blocks, nameOf(c.Worker)
		if hashes > MaxHashes || len(chains) > maxChains {
			chains, hashes, blocks = nil, 0, blocks+hashes
		}
		ints = append(ints, uint64(at.Rank), uint64(len(at.Name)), uint64(c.BlockSize), uint64(c.PrefillTokens),
			uint64(blocks), micros(c.Age))
		for _, chain := range chains {
			ints = append(ints, uint64(len(chain)))
		}
		b = append(appendHead(b, byte(c.Kind), len(at.Name)+8*hashes, ints...), at.Name...)
		for _, chain := range chains {
			for _, h := range chain {
				b = binary.LittleEndian.AppendUint64(b, uint64(h))
			}
		}
		return b
	case scoring.PrefillTimed, scoring.ResponseTimed:
		ints = append(ints, uint64(c.Tokens), uint64(c.Held), micros(c.Took))
	}
	return appendRecord(b, byte(c.Kind), nil, ints...)
}

// appendEvent appends an event of a session.
func appendEvent(b []byte, e *session.Event, nameOf func(kvblock.Worker) Worker) []byte {
	kind := lastChange + byte(e.Kind)
	if e.Kind != session.Bound {
		return appendRecord(b, kind, e.Key[:])
	}
	at := nameOf(e.Worker)
	return appendRecord(b, kind, append(e.Key[:], at.Name...), uint64(at.Rank), micros(e.TTL), micros(e.Age))
}

// changes are decoded changes of a book. Its memory is used again.
type changes struct {
	book   []scoring.Change
	hashes []kvblock.SequenceHash
	chains [][]kvblock.SequenceHash
}

func (m *changes) clear() { m.book, m.hashes, m.chains = m.book[:0], m.hashes[:0], m.chains[:0] }

// add adds the change of a record. worker returns the number of a worker; a booking at one that is not known is left
// out.
func (m *changes) add(r *record, worker func(Worker) (kvblock.Worker, bool)) error {
	c := scoring.Change{Kind: scoring.ChangeKind(r.kind), Number: r.ints[0]}
	switch c.Kind {
	case scoring.Booked:
		known, first, name := false, len(m.chains), r.ints[2]
		if name > uint64(min(len(r.data), maxText)) {
			return errMalformed
		}
		data := r.data[name:]
		if c.Worker, known = worker(Worker{string(r.data[:name]), uint32(r.ints[1])}); !known {
			return nil
		}
		c.BlockSize, c.PrefillTokens, c.Blocks = int(r.ints[3]), int(r.ints[4]), int(r.ints[5])
		c.Age = duration(r.ints[6])
		for _, length := range r.ints[7:] {
			if 8*length > uint64(len(data)) {
				return errMalformed
			}
			from := len(m.hashes)
			for range length {
				m.hashes = append(m.hashes, kvblock.SequenceHash(binary.LittleEndian.Uint64(data)))
				data = data[8:]
			}
			// If the memory grew, earlier chains stay in its former place.
			m.chains = append(m.chains, m.hashes[from:len(m.hashes):len(m.hashes)])
		}
		c.Chains = m.chains[first:len(m.chains):len(m.chains)]
	case scoring.PrefillTimed, scoring.ResponseTimed:
		c.Tokens, c.Held, c.Took = int(r.ints[1]), int(r.ints[2]), duration(r.ints[3])
	}
	m.book = append(m.book, c)
	return nil
}

// patient is a connection whose reads and writes may each take a time; 0: until the deadline that was set.
type patient struct {
	net.Conn
	within time.Duration
}

func (c *patient) Read(p []byte) (int, error) {
	if c.within > 0 {
		_ = c.SetReadDeadline(time.Now().Add(c.within))
	}
	return c.Conn.Read(p)
}

func (c *patient) Write(p []byte) (int, error) {
	if c.within > 0 {
		_ = c.SetWriteDeadline(time.Now().Add(c.within))
	}
	return c.Conn.Write(p)
}

// link is a connection after its handshake, which it is read behind.
type link struct {
	*patient
	in *bufio.Reader
}

func newLink(conn net.Conn) *link {
	p := &patient{Conn: conn}
	return &link{p, bufio.NewReaderSize(p, 16<<10)}
}

func (l *link) Read(p []byte) (int, error) { return l.in.Read(p) }

// greeting is the first record of either side.
type greeting struct {
	Version int
	Index   bool   `json:",omitempty"` // the process that connects wants the index, and not the changes
	Origin  uint64 `json:",omitempty"` // names the process; not 0
	Group   string `json:",omitempty"` // see Config
	Name    string `json:",omitempty"`
	Proof   []byte `json:",omitempty"` // shows that the process has the replicas' token
	Refused Reason `json:",omitempty"` // why the process that is connected to shares nothing
}

func (g *greeting) send(to io.Writer) error {
	g.Version = Version
	text, err := json.Marshal(g)
	if err == nil {
		_, err = to.Write(appendRecord(nil, greetingKind, text))
	}
	return err
}

// receiveGreeting receives a greeting of this version. A refusal is an error.
func receiveGreeting(from *bufio.Reader) (g greeting, err error) {
	var r record
	err = r.read(from, maxGreeting)
	switch {
	case err != nil:
		return g, err
	case r.kind != greetingKind || json.Unmarshal(r.data, &g) != nil:
		return g, errMalformed
	case slices.Contains(refusals, g.Refused):
		return g, refused(g.Refused)
	case g.Version != Version:
		return g, refused(OldVersion)
	case g.Origin == 0 || len(g.Name) > maxText:
		return g, errMalformed
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
	Duplicate  Reason = "duplicate"      // another address leads to the same process
	Silent     Reason = "silent"         // no message for longer than the timeout
	Stalled    Reason = "stalled"        // the peer reads too slowly, or does not ping
	NewWorker  Reason = "new_worker"     // changes about a worker were left out that is known now
	Left       Reason = "left"           // the peer said goodbye
)

// Reasons has all reasons. The first are those that a peer tells.
var Reasons = []Reason{Malformed, OldVersion, OtherGroup, Self, BadToken, TooMany, Duplicate, Silent, Stalled,
	NewWorker, Left}

var refusals = Reasons[:6]

// refused is a reason as an error.
type refused Reason

func (r refused) Error() string { return "replica: the peers share nothing: " + string(r) }

// ReasonOf returns the reason of an error; empty: it has none, such as a failed connection.
func ReasonOf(err error) Reason {
	var r refused
	errors.As(err, &r)
	return Reason(r)
}

// Fix says what to change for a reason; empty if nothing is known to help.
func (r Reason) Fix() string {
	return map[Reason]string{
		Malformed:  "is --replica-port of the peer at this address, and is it kvepp's?",
		OldVersion: "the peer speaks another version of the protocol: run the same version of kvepp in all replicas",
		OtherGroup: "the peer picks from another pool: give replicas of one pool alone as peers",
		BadToken:   "give all replicas the same --replica-token-file",
		TooMany:    "give fewer replicas",
	}[r]
}
