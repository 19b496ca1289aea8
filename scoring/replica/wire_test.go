package replica

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"reflect"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/router/session"
	"kvepp/scoring"
)

// twoWorkers knows the workers a and b.
func twoWorkers(name Worker) (w kvblock.Worker, known bool) {
	w, known = map[Worker]kvblock.Worker{{Name: "a"}: 3, {Name: "b", Rank: 1}: 4}[name]
	return w, known
}

// records reads all records of a stream.
func records(t *testing.T, data []byte) (all []record) {
	t.Helper()
	for in := bufio.NewReader(bytes.NewReader(data)); ; {
		var r record
		switch err := r.read(in, maxData); {
		case errors.Is(err, io.EOF):
			return all
		case err != nil:
			t.Fatal(err)
		}
		all = append(all, r)
	}
}

// TestChanges: what is encoded is decoded, and bookings at unknown workers are left out.
func TestChanges(t *testing.T) {
	booked := scoring.Change{Kind: scoring.Booked, Number: 1 << 40, Worker: 3, BlockSize: 16, PrefillTokens: 40,
		Blocks: 1, Chains: [][]kvblock.SequenceHash{{1, 2}, {}, {1 << 63}}, Age: 2 * time.Second}
	timed := scoring.Change{Kind: scoring.ResponseTimed, Number: 2, Tokens: 7, Held: 8, Took: 9 * time.Microsecond}
	long := scoring.Change{Kind: scoring.Booked, BlockSize: 16, Blocks: 1,
		Chains: [][]kvblock.SequenceHash{make([]kvblock.SequenceHash, MaxHashes+1)}}
	a, b := named("a"), func(kvblock.Worker) Worker { return Worker{Name: "b", Rank: 1} }
	data := appendChange(nil, &booked, a)
	data = appendChange(data, &booked, named("b"))
	data = appendChange(data, &scoring.Change{Kind: scoring.PrefillDone, Number: 9}, a)
	data = appendChange(data, &timed, a)
	data = appendChange(data, &long, b)
	var m changes
	for range 2 { // its memory is used again
		m.clear()
		for _, r := range records(t, data) {
			if err := m.add(&r, twoWorkers); err != nil {
				t.Fatal(err)
			}
		}
	}
	flat := scoring.Change{Kind: scoring.Booked, Worker: 4, BlockSize: 16, Blocks: MaxHashes + 2,
		Chains: [][]kvblock.SequenceHash{}}
	if want := []scoring.Change{booked, {Kind: scoring.PrefillDone, Number: 9}, timed, flat}; !reflect.DeepEqual(m.book,
		want) {
		t.Errorf("%+v, want %+v", m.book, want)
	}
}

// TestReasons: each value of a label exists once.
func TestReasons(t *testing.T) {
	seen := map[Reason]bool{}
	for _, r := range Reasons {
		if seen[r] {
			t.Errorf("%s twice", r)
		}
		seen[r] = true
	}
}

// FuzzGreeting: no greeting is taken without version and origin.
func FuzzGreeting(f *testing.F) {
	f.Add([]byte(`{"Version":3,"Origin":1,"Group":"pool","Proof":"cHJvb2Y="}`))
	f.Add([]byte(`{"Version":3,"Refused":"token"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		g, err := receiveGreeting(bufio.NewReader(bytes.NewReader(appendRecord(nil, greetingKind, data))))
		if err == nil && (g.Version != Version || g.Origin == 0 || len(g.Name) > maxText) {
			t.Errorf("%+v", g)
		}
	})
}

// FuzzRecords: no record of a peer breaks the node, and after the peer's end nothing of it is left.
func FuzzRecords(f *testing.F) {
	a := named("a")
	data := appendChange(nil, &scoring.Change{Kind: scoring.Booked, Number: 1,
		BlockSize: 16, PrefillTokens: 7, Chains: [][]kvblock.SequenceHash{{1, 2, 3}}}, a)
	data = appendChange(data, &scoring.Change{Kind: scoring.PrefillTimed, Number: 1, Tokens: 7, Took: 1000}, a)
	data = appendRecord(appendRecord(data, syncedKind, nil), pingKind, nil, 5)
	f.Add(appendEvent(data, &session.Event{Kind: session.Bound}, a))
	n := newTestNode(Security{}, nil)
	f.Cleanup(n.Close)
	f.Fuzz(func(t *testing.T, data []byte) {
		p := &peer{}
		err := n.welcome(p, &greeting{Origin: 7}, func(error) {})
		if err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(bytes.NewReader(data))
		for r := new(record); err == nil; {
			if err = r.read(in, maxData); err == nil {
				err = n.take(p, r, in.Buffered() == 0)
			}
		}
		n.hearing.Lock()
		n.free(p, PeerDead)
		n.hearing.Unlock()
		for w, load := range n.book.Loads(nil) {
			if load != (scoring.Load{}) {
				t.Errorf("worker %d keeps %+v", w, load)
			}
		}
	})
}
