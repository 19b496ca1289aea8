package replica

import (
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
)

var rewrite = flag.Bool("rewrite", false, "write testdata again")

const transcriptFile = "testdata/transcript.txt"

func all(Worker) bool { return true }

// sequences makes a chain of n hashes that begin with from.
func sequences(from, n int) (chain []kvblock.SequenceHash) {
	for i := range n {
		chain = append(chain, kvblock.SequenceHash(from+i))
	}
	return chain
}

// talk connects a receiver to a sender, and returns the messages in order with who sent them.
type talk struct {
	t        *testing.T
	sender   *Sender
	receiver *Receiver
	cursor   *Cursor
	lines    []string
	applied  []Entry
	closed   Reason
}

func (c *talk) line(from string, message []byte) {
	c.lines = append(c.lines, from+" "+hex.EncodeToString(message))
}

// step gives the receiver an input. It answers what the receiver sends.
func (c *talk) step(in Input) {
	for _, e := range c.receiver.Step(in) {
		switch e.Kind {
		case Send:
			c.line("receiver", e.Message)
			if c.cursor != nil {
				if err := c.cursor.Received(in.Now+time.Millisecond, e.Message, time.Millisecond); err != nil {
					c.t.Fatal(err)
				}
				continue
			}
			h, why := c.sender.Admit(e.Message)
			var answer []byte
			if why != "" {
				answer = Refusal(why)
			} else {
				c.cursor, answer = c.sender.Open(&h, nil, func() []Entry {
					return []Entry{{Kind: Bound, Key: [32]byte{7}, Worker: Worker{Name: "b"}, Version: 9, Writer: 3,
						TTL: time.Minute, At: time.Second}}
				})
			}
			c.line("sender  ", answer)
			c.step(Input{Kind: Received, Stream: in.Stream, Now: in.Now, Message: answer})
			return
		case Apply:
			for _, x := range e.Entries {
				c.applied = append(c.applied, x)
				c.lines = append(c.lines, fmt.Sprintf("applied  %s %d %s/%d tokens %d blocks %d chains %d age %v",
					x.Kind, x.Number, x.Worker.Name, x.Worker.Rank, x.PrefillTokens, x.Blocks, len(x.Chains), x.Age))
				for _, w := range x.Classes {
					c.lines = append(c.lines, fmt.Sprintf("applied  class %x quantum %d cost %d age %v", w.Class,
						w.Quantum, w.Cost, w.Age))
				}
			}
		case Close:
			c.closed = e.Reason
			c.lines = append(c.lines, "close    "+string(e.Reason))
		case BeginSnapshot:
			c.lines = append(c.lines, "begin snapshot")
		case EndSnapshot:
			c.lines = append(c.lines, "end snapshot")
		case FreeAll:
			c.lines = append(c.lines, fmt.Sprintf("free     %d %s", e.Freed, e.Cause))
		}
	}
}

// pump sends what is pending.
func (c *talk) pump(now time.Duration) {
	for more := true; more; more = c.cursor.Pending() {
		message, err := c.cursor.Next(now, nil)
		if err != nil {
			c.t.Fatal(err)
		}
		c.line("sender  ", message)
		c.step(Input{Kind: Received, Stream: 1, Now: now, Message: message})
	}
}

func newTalk(t *testing.T) *talk {
	return &talk{t: t, sender: NewSender(Identity{Origin: 0xabcd, Epoch: 1}, "pool", "kvepp-0"),
		receiver: NewReceiver(ReceiverConfig{Self: Identity{Origin: 0x1234, Epoch: 2}, Group: "pool", Known: all})}
}

// TestTranscript holds the wire: every message of a short talk.
func TestTranscript(t *testing.T) {
	c := newTalk(t)
	second := func(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
	a, b := Worker{Name: "a"}, Worker{Name: "b", Rank: 1}
	c.sender.Append(second(1), &Entry{Kind: Booked, Number: 1, Worker: a, BlockSize: 16, PrefillTokens: 40, Blocks: 1,
		Chains: [][]kvblock.SequenceHash{sequences(100, 2)}, At: second(1)})
	c.sender.Append(second(1),
		&Entry{Kind: Booked, Number: 2, Worker: b, BlockSize: 16, PrefillTokens: 7, At: second(1)})
	c.sender.Append(second(1), &Entry{Kind: Freed, Number: 2})
	c.sender.Append(second(1), &Entry{Kind: PrefillDone, Number: 1})
	c.step(Input{Kind: Opened, Stream: 1, Address: "10.0.0.1:9004", Now: second(2)})
	c.pump(second(2.5))
	c.sender.Append(second(3), &Entry{Kind: Booked, Number: 3, Worker: b, BlockSize: 16, PrefillTokens: 100,
		Chains: [][]kvblock.SequenceHash{sequences(1, 3), sequences(50, 1)}, At: second(3)})
	c.sender.Append(second(3), &Entry{Kind: Moved, Number: 3, Worker: a, BlockSize: 16, At: second(3)})
	c.sender.Append(second(3), &Entry{Kind: Output, Number: 3, Blocks: 2, Left: 0.5})
	c.sender.Append(second(3), &Entry{Kind: Used, Key: [32]byte{7}, Worker: a, Version: 9, Writer: 3, TTL: time.Minute,
		At: second(3)})
	c.sender.Append(second(3), &Entry{Kind: Ended, Key: [32]byte{7}, Version: 10, Writer: 3})
	c.sender.Append(second(3), &Entry{Kind: Learned, Worker: a, Values: []float64{1.5, -2}})
	c.sender.Append(second(3), &Entry{Kind: Waits, Blocks: 4, At: second(2),
		Classes: []ClassWait{{Class: 0xc1a55, Quantum: 1000, Cost: 300, At: second(2)}}})
	c.pump(second(3))
	c.sender.Tick(second(4))
	c.pump(second(4))
	c.step(Input{Kind: Received, Stream: 1, Now: second(4), Message: Goodbye()})
	got := strings.Join(c.lines, "\n") + "\n"
	if *rewrite {
		if err := os.WriteFile(transcriptFile, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(transcriptFile)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// TestRefused: a sender refuses receivers that it must not feed, and says why.
func TestRefused(t *testing.T) {
	s := NewSender(Identity{Origin: 0xabcd, Epoch: 1}, "pool", "kvepp-0")
	good := Hello{Lowest: MinVersion, Highest: Version, Self: Identity{Origin: 5, Epoch: 6}, Group: "pool"}
	for _, test := range []struct {
		what   string
		change func(*Hello)
		want   Reason
	}{
		{"a replica", func(*Hello) {}, ""},
		{"a newer one that speaks this version", func(h *Hello) { h.Highest = 7 }, ""},
		{"a newer version alone", func(h *Hello) { h.Lowest, h.Highest = 7, 8 }, OldVersion},
		{"an older version", func(h *Hello) { h.Lowest, h.Highest = 0, 0 }, OldVersion},
		{"another pool", func(h *Hello) { h.Group = "other" }, OtherGroup},
		{"this process", func(h *Hello) { h.Self = Identity{Origin: 0xabcd, Epoch: 1} }, Self},
		{"another process of this origin", func(h *Hello) { h.Self = Identity{Origin: 0xabcd, Epoch: 2} }, SameOrigin},
		{"no origin", func(h *Hello) { h.Self.Origin = 0 }, Malformed},
	} {
		h := good
		test.change(&h)
		if _, why := s.Admit(h.Append(nil)); why != test.want {
			t.Errorf("%s: %q, want %q", test.what, why, test.want)
		}
	}
	for _, message := range []string{"", "GET / HTTP/1.1\r\n\r\n", "AKVR", "AKVRP", strings.Repeat("A", 100)} {
		if _, why := s.Admit([]byte(message)); why != Malformed {
			t.Errorf("%q: %q", message, why)
		}
	}
	// A sequence number that was never written.
	h := good
	h.Have, h.Seq = s.Self(), 1<<60
	if c, _ := s.Open(&h, nil, nil); c.Reason != FromFuture {
		t.Errorf("a receiver from the future goes on: %q", c.Reason)
	}
}

// TestBadSenders: a receiver closes the stream of a sender that it must not believe.
func TestBadSenders(t *testing.T) {
	welcome := func(id Identity, next uint64) []byte {
		w := Welcome{Version: Version, Self: id, Name: "x", Next: next}
		return w.Append(nil)
	}
	peer := Identity{Origin: 0xabcd, Epoch: 1}
	batch := func(seq uint64) []byte {
		c := &Cursor{log: NewSender(peer, "", ""), next: seq}
		return c.head([]byte{typeBatch}, seq, 0, 0)
	}
	empty := (&Cursor{}).head([]byte{typeSnapshot, flagFirst | flagLast}, 10, 0, 0)
	for _, test := range []struct {
		what     string
		messages [][]byte
		want     Reason
	}{
		{"a heartbeat", [][]byte{welcome(peer, 0), empty, batch(11)}, ""},
		{"this process itself", [][]byte{welcome(Identity{Origin: 0x1234, Epoch: 2}, 0)}, Self},
		{"this process's origin", [][]byte{welcome(Identity{Origin: 0x1234, Epoch: 3}, 0)}, SameOrigin},
		{"a log that was never read", [][]byte{welcome(peer, 5)}, Gap},
		{"a batch from the future", [][]byte{welcome(peer, 0), empty, batch(1 << 60)}, Gap},
		{"a batch of the past", [][]byte{welcome(peer, 0), empty, batch(10)}, Gap},
		{"a batch in a snapshot", [][]byte{welcome(peer, 0), batch(1)}, Malformed},
		{"two welcomes", [][]byte{welcome(peer, 0), welcome(peer, 0)}, Malformed},
		{"no welcome", [][]byte{batch(1)}, Malformed},
		{"nothing", [][]byte{nil}, Malformed},
		{"a refusal", [][]byte{Refusal(OtherGroup)}, OtherGroup},
		{"a refusal without a reason", [][]byte{{typeRefusal}}, Malformed},
		{"a truncated snapshot", [][]byte{welcome(peer, 0), empty[:4]}, Malformed},
		{"bytes after a batch", [][]byte{welcome(peer, 0), append(empty[:len(empty):len(empty)], 1)}, Malformed},
		{"a worker without a name", [][]byte{welcome(peer, 0), append((&Cursor{}).head(
			[]byte{typeSnapshot, flagFirst | flagLast}, 10, 0, 1), byte(Booked), 1, 0, 16, 0, 0, 0, 0)}, Malformed},
	} {
		c := newTalk(t)
		c.cursor = new(Cursor)
		c.receiver.Step(Input{Kind: Opened, Stream: 1, Address: "a"})
		var got Reason
		for _, m := range test.messages {
			for _, e := range c.receiver.Step(Input{Kind: Received, Stream: 1, Message: m}) {
				if e.Kind == Close {
					got = e.Reason
				}
			}
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q", test.what, got, test.want)
		}
	}
}

// TestTwoAddresses: two addresses of one process are read once, and two processes with one origin are not mixed.
func TestTwoAddresses(t *testing.T) {
	r := NewReceiver(ReceiverConfig{Self: Identity{Origin: 1, Epoch: 1}, Known: all})
	hello := func(stream Stream, address string, id Identity) (why Reason) {
		r.Step(Input{Kind: Opened, Stream: stream, Address: address})
		w := Welcome{Version: Version, Self: id}
		for _, e := range r.Step(Input{Kind: Received, Stream: stream, Message: w.Append(nil)}) {
			if e.Kind == Close {
				why = e.Reason
			}
		}
		return why
	}
	if why := hello(1, "a", Identity{Origin: 5, Epoch: 1}); why != "" {
		t.Error(why)
	}
	if why := hello(2, "b", Identity{Origin: 5, Epoch: 1}); why != Duplicate {
		t.Errorf("a second address: %q", why)
	}
	if why := hello(3, "c", Identity{Origin: 5, Epoch: 2}); why != SameOrigin {
		t.Errorf("a second process: %q", why)
	}
	if peers := r.Peers(); len(peers) != 1 || peers[0].Address != "a" {
		t.Errorf("%+v", peers)
	}
}

// TestOlderVersion: a receiver of version 1 gets of a queue what it can read, and a sender of version 1 is understood.
func TestOlderVersion(t *testing.T) {
	s := NewSender(Identity{Origin: 0xabcd, Epoch: 1}, "pool", "kvepp-0")
	waits := Entry{Kind: Waits, Blocks: 4, At: 2 * time.Second}
	for i := range MaxClasses + 6 { // the last ones are not sent
		waits.Classes = append(waits.Classes,
			ClassWait{Class: uint64(i), Quantum: 1 + i, Cost: 300, At: 2 * time.Second})
	}
	for _, version := range []uint64{1, 2} {
		hello := Hello{Lowest: 1, Highest: version, Self: Identity{Origin: 5, Epoch: 6}, Group: "pool"}
		admitted, why := s.Admit(hello.Append(nil))
		if why != "" {
			t.Fatal(why)
		}
		c, welcome := s.Open(&admitted, nil, nil)
		first, err := c.Next(0, nil) // the snapshot
		if err != nil {
			t.Fatal(err)
		}
		s.Append(0, &Entry{Kind: Ended, Version: 7})
		s.Append(0, &waits)
		s.Append(0, &Entry{Kind: Ended, Version: 8})
		second, err := c.Next(3*time.Second, nil)
		if err != nil {
			t.Fatal(err)
		}
		if w, err := ParseWelcome(welcome); err != nil || w.Version != version {
			t.Fatalf("%+v, %v", w, err)
		}
		r := NewReceiver(ReceiverConfig{Self: Identity{Origin: 5, Epoch: 6}, Group: "pool", Known: all})
		r.Step(Input{Kind: Opened, Stream: 1, Address: "a"})
		var got []Entry
		for _, m := range [][]byte{welcome, first, second} {
			for _, e := range r.Step(Input{Kind: Received, Stream: 1, Message: m}) {
				if e.Kind == Close {
					t.Fatalf("version %d: closed: %v, %v", version, e.Reason, e.Err)
				}
				for i := range e.Entries {
					e.Entries[i].Classes = slices.Clone(e.Entries[i].Classes)
					got = append(got, e.Entries[i])
				}
			}
		}
		if len(got) != 3 || got[0].Version != 7 || got[2].Version != 8 || got[1].Blocks != 4 ||
			got[1].Age != time.Second {
			t.Fatalf("version %d: %+v", version, got)
		}
		classes := got[1].Classes
		if version == 1 && classes != nil || version == 2 && (len(classes) != MaxClasses ||
			classes[63] != (ClassWait{63, 64, 300, 2 * time.Second, time.Second})) {
			t.Errorf("version %d: classes %+v", version, classes)
		}
	}
	// All bytes of version 1 are what a process of that version wrote and read.
	d := decoder{data: appendWaits([]byte{byte(Waits)}, &waits), version: 1}
	if e := (Entry{}); !d.entry(&e, new(dictionary), new(arena), 0) || d.end() != nil || e.Blocks != 4 {
		t.Errorf("%+v, %v", e, d.err)
	}
}

// TestBounds: a peer with too many bookings or blocks costs bounded memory.
func TestBounds(t *testing.T) {
	c := newTalk(t)
	c.receiver.config.MaxBookings, c.receiver.config.MaxBlocks = 100, 50
	for n := range uint64(1000) {
		c.sender.Append(0, &Entry{Kind: Booked, Number: n + 1, Worker: Worker{Name: "a"}, BlockSize: 16,
			Chains: [][]kvblock.SequenceHash{sequences(int(n), 1)}})
	}
	c.step(Input{Kind: Opened, Stream: 1, Address: "a"})
	c.pump(0)
	bookings, blocks, _ := c.receiver.Held()
	if bookings != 100 || blocks != 50 || c.receiver.Refused != 900 || c.receiver.Flat != 50 || c.closed != "" {
		t.Errorf("%d bookings, %d blocks, %d refused, %d flat, closed %q", bookings, blocks, c.receiver.Refused,
			c.receiver.Flat, c.closed)
	}
	for n := range uint64(1000) {
		c.sender.Append(0, &Entry{Kind: Freed, Number: n + 1})
	}
	c.pump(0)
	if bookings, blocks, _ = c.receiver.Held(); bookings != 0 || blocks != 0 {
		t.Errorf("%d bookings and %d blocks are left", bookings, blocks)
	}
}

// TestParkedForever: bookings of workers that never come are forgotten.
func TestParkedForever(t *testing.T) {
	c := newTalk(t)
	c.receiver.config.Known = func(Worker) bool { return false }
	for n := range uint64(MaxParked + 10) {
		c.sender.Append(0, &Entry{Kind: Booked, Number: n + 1, Worker: Worker{Name: "a"}, BlockSize: 16})
	}
	c.step(Input{Kind: Opened, Stream: 1, Address: "a"})
	c.pump(0)
	if bookings, _, parked := c.receiver.Held(); bookings != 0 || parked != MaxParked || c.receiver.Lapsed != 10 {
		t.Errorf("%d bookings, %d parked, %d lapsed", bookings, parked, c.receiver.Lapsed)
	}
	c.receiver.config.Timeout = time.Hour
	c.step(Input{Kind: Tick, Now: parkedFor + time.Second})
	if _, _, parked := c.receiver.Held(); parked != 0 {
		t.Errorf("%d parked after %v", parked, parkedFor)
	}
}

// TestManyWorkers: workers that come and go do not fill the dictionary.
func TestManyWorkers(t *testing.T) {
	c := newTalk(t)
	c.sender.Append(0, &Entry{Kind: Booked, Number: 1, Worker: Worker{Name: "first"}, BlockSize: 16})
	for n := range uint64(maxWorkers) {
		c.sender.Append(0, &Entry{Kind: Booked, Number: n + 2, Worker: Worker{Name: fmt.Sprint("w", n)}, BlockSize: 16})
		c.sender.Append(0, &Entry{Kind: Freed, Number: n + 2})
		c.sender.Renew()
	}
	c.step(Input{Kind: Opened, Stream: 1, Address: "a"})
	c.pump(0)
	if bookings, _, _ := c.receiver.Held(); bookings != 1 || c.applied[0].Worker.Name != "first" || c.closed != "" {
		t.Errorf("%d bookings, %+v, closed %q", bookings, c.applied, c.closed)
	}
}

// TestStaleness: the sender measures half a round trip and the wait for the flush, and tells the receiver.
func TestStaleness(t *testing.T) {
	c := newTalk(t)
	c.step(Input{Kind: Opened, Stream: 1, Address: "a"})
	c.pump(time.Second)
	c.pump(2 * time.Second)
	if got := c.receiver.Peers()[0].Staleness; got != 1500*time.Microsecond {
		t.Errorf("%v", got)
	}
}

func FuzzHello(f *testing.F) {
	h := Hello{Lowest: 1, Highest: 1, Self: Identity{1, 2}, Group: "pool", Proof: []byte("p"), Have: Identity{3, 4},
		Seq: 5}
	f.Add(h.Append(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := ParseHello(data)
		if err != nil || h.Lowest > Version || h.Highest < MinVersion || h.Highest > Version {
			return
		}
		again, err := ParseHello(h.Append(nil))
		if err != nil || !reflect.DeepEqual(again, h) {
			t.Errorf("%+v, then %+v, %v", h, again, err)
		}
	})
}

func FuzzAck(f *testing.F) {
	a := ack{seq: 0, sent: time.Second, held: time.Millisecond}
	f.Add(a.append(nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &Cursor{log: NewSender(Identity{1, 1}, "", "")}
		if c.Received(2*time.Second, data, 0) == nil && (c.staleness < 0 || c.acked > 0) {
			t.Errorf("staleness %v, acked %d", c.staleness, c.acked)
		}
	})
}

// FuzzReceiver gives a receiver with a live peer any messages. Each begins with its length.
func FuzzReceiver(f *testing.F) {
	lines, err := os.ReadFile(transcriptFile)
	if err != nil {
		f.Fatal(err)
	}
	var talked []byte
	for line := range strings.Lines(string(lines)) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "sender   "); ok {
			message, err := hex.DecodeString(text)
			if err != nil {
				f.Fatal(err)
			}
			talked = append(append(talked, byte(len(message)), byte(len(message)>>8)), message...)
		}
	}
	f.Add(talked)
	f.Fuzz(func(t *testing.T, data []byte) {
		r := NewReceiver(ReceiverConfig{Self: Identity{1, 1}, Group: "pool", MaxBookings: 50, MaxBlocks: 100,
			Known: func(w Worker) bool { return w.Rank < 2 }})
		r.Step(Input{Kind: Opened, Stream: 1, Address: "a"})
		held := map[uint64]int{}
		for len(data) >= 2 {
			n := min(int(data[0])|int(data[1])<<8, len(data)-2)
			for _, e := range r.Step(Input{Kind: Received, Stream: 1, Message: data[2 : 2+n]}) {
				for i := range e.Entries {
					if e.Entries[i].Age < 0 {
						t.Errorf("%+v", e.Entries[i])
					}
				}
				if e.Kind == FreeAll {
					delete(held, e.Origin)
				}
			}
			data = data[2+n:]
		}
		if bookings, blocks, parked := r.Held(); bookings+parked > 50 || blocks > 100 || bookings < 0 || parked < 0 {
			t.Errorf("%d bookings, %d blocks, %d parked", bookings, blocks, parked)
		}
		r.Step(Input{Kind: Tick, Now: time.Minute})
		if bookings, blocks, parked := r.Held(); bookings != 0 || blocks != 0 || parked != 0 {
			t.Errorf("a dead peer leaves %d bookings, %d blocks, %d parked", bookings, blocks, parked)
		}
	})
}

// BenchmarkSend is the cost of one request's entries at the sender: 128 blocks, to 7 peers, 10 requests a batch.
func BenchmarkSend(b *testing.B) {
	s := NewSender(Identity{1, 1}, "", "")
	var cursors []*Cursor
	for range 7 {
		c, _ := s.Open(&Hello{Highest: Version}, nil, nil)
		cursors = append(cursors, c)
	}
	e := Entry{Kind: Booked, Worker: Worker{Name: "a"}, BlockSize: 16, PrefillTokens: 2048,
		Chains: [][]kvblock.SequenceHash{sequences(0, 128)}}
	var message []byte
	for n := range uint64(b.N) {
		e.Number = n + 1
		s.Append(0, &e)
		s.Append(0, &Entry{Kind: PrefillDone, Number: e.Number})
		s.Append(0, &Entry{Kind: Freed, Number: e.Number})
		if n%10 == 9 {
			for _, c := range cursors {
				for c.Pending() {
					message, _ = c.Next(0, message[:0])
				}
			}
		}
	}
	b.ReportAllocs()
}

// BenchmarkReceive is the cost of one request's entries at a receiver, without the book.
func BenchmarkReceive(b *testing.B) {
	s := NewSender(Identity{1, 1}, "", "")
	c, welcome := s.Open(&Hello{Highest: Version}, nil, nil)
	r := NewReceiver(ReceiverConfig{Self: Identity{2, 2}, Known: all})
	r.Step(Input{Kind: Opened, Stream: 1, Address: "a"})
	r.Step(Input{Kind: Received, Stream: 1, Message: welcome})
	e := Entry{Kind: Booked, Worker: Worker{Name: "a"}, BlockSize: 16, PrefillTokens: 2048,
		Chains: [][]kvblock.SequenceHash{sequences(0, 128)}}
	var messages [][]byte
	for n := uint64(0); n < uint64(b.N); n++ {
		e.Number = n + 1
		s.Append(0, &e)
		s.Append(0, &Entry{Kind: PrefillDone, Number: e.Number})
		s.Append(0, &Entry{Kind: Freed, Number: e.Number})
		if n%10 == 9 || n == uint64(b.N)-1 {
			for c.Pending() {
				m, _ := c.Next(0, nil)
				messages = append(messages, m)
			}
		}
	}
	b.ReportAllocs()
	b.ResetTimer()
	for _, m := range messages {
		r.Step(Input{Kind: Received, Stream: 1, Message: m})
	}
}
