package replica

import (
	"net"
	"reflect"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/router/session"
	"kvepp/scoring"
)

var twoWorkers = names{byName: map[Worker]kvblock.Worker{{Name: "a"}: 3, {Name: "b", Rank: 1}: 4},
	byNumber: map[kvblock.Worker]Worker{3: {Name: "a"}, 4: {Name: "b", Rank: 1}}}

// TestChanges: what is encoded is decoded, and changes about unknown workers are left out and named.
func TestChanges(t *testing.T) {
	a, b, unknown := Worker{Name: "a"}, Worker{Name: "b", Rank: 1}, Worker{Name: "b"}
	booked := scoring.Change{Kind: scoring.Booked, Number: 1 << 40, Worker: 3, BlockSize: 16, PrefillTokens: 40,
		Blocks: 1, Chains: [][]kvblock.SequenceHash{{1, 2}, {}, {1 << 63}}, Age: 2 * time.Second}
	moved := scoring.Change{Kind: scoring.Moved, Number: 2, Worker: 4, BlockSize: 32}
	bound := session.Event{Kind: session.Bound, Key: session.Key{7}, Worker: 4, TTL: time.Minute, Age: time.Second}
	used := session.Event{Kind: session.Used, Key: session.Key{8}}
	data := appendChange(nil, &booked, a)
	data = appendChange(data, &booked, unknown)
	data = appendChange(data, &moved, b)
	data = appendChange(data, &moved, unknown)
	data = appendChange(data, &scoring.Change{Kind: scoring.PrefillDone, Number: 9}, a)
	data = appendSession(data, &bound, b)
	data = appendSession(data, &bound, unknown)
	data = appendSession(data, &used, a)
	data = appendLearned(data, a, []float64{1.5, 2})
	data = appendLearned(data, unknown, []float64{1})
	var m changes
	for range 2 { // its memory is used again
		if err := m.parse(data, &twoWorkers); err != nil {
			t.Fatal(err)
		}
	}
	if m.missed != 4 {
		t.Errorf("%d missed", m.missed)
	}
	want := []scoring.Change{booked, moved, {Kind: scoring.Freed, Number: 2}, {Kind: scoring.PrefillDone, Number: 9}}
	if !reflect.DeepEqual(m.book, want) {
		t.Errorf("%+v, want %+v", m.book, want)
	}
	if want := []session.Event{bound, used}; !reflect.DeepEqual(m.sessions, want) {
		t.Errorf("%+v, want %+v", m.sessions, want)
	}
	if want := []lesson{{3, []float64{1.5, 2}}}; !reflect.DeepEqual(m.lessons, want) {
		t.Errorf("%+v, want %+v", m.lessons, want)
	}
	long := scoring.Change{Kind: scoring.Booked, BlockSize: 16, Blocks: 1,
		Chains: [][]kvblock.SequenceHash{make([]kvblock.SequenceHash, MaxHashes+1)}}
	err := m.parse(appendChange(nil, &long, a), &twoWorkers)
	if err != nil || m.book[0].Blocks != MaxHashes+2 {
		t.Errorf("%d blocks, %v", m.book[0].Blocks, err)
	}
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
}

// FuzzGreeting: no greeting is taken without version and origin.
func FuzzGreeting(f *testing.F) {
	f.Add([]byte(`{"Version":3,"Origin":1,"Group":"pool","Proof":"cHJvb2Y="}`))
	f.Add([]byte(`{"Version":3,"Refused":"token"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		near, far := net.Pipe()
		defer near.Close()
		go func() { _ = send(far, time.Second, framed(append(begin(typeGreeting), data...))) }()
		g, err := receiveGreeting(near)
		if err == nil && (g.Version != Version || g.Origin == 0 || len(g.Name) > maxText) {
			t.Errorf("%+v", g)
		}
	})
}

// FuzzChanges: no message of a peer breaks the book, and after the peer's end nothing of it is left.
func FuzzChanges(f *testing.F) {
	data := appendChange(nil, &scoring.Change{Kind: scoring.Booked, Number: 1,
		BlockSize: 16, PrefillTokens: 7, Chains: [][]kvblock.SequenceHash{{1, 2, 3}}}, Worker{Name: "a"})
	data = appendChange(data, &scoring.Change{Kind: scoring.Moved, Number: 1, BlockSize: 8}, Worker{Name: "b", Rank: 1})
	data = appendLearned(data, Worker{Name: "a"}, make([]float64, 18))
	f.Add(appendSession(data, &session.Event{Kind: session.Bound}, Worker{Name: "a"}))
	f.Fuzz(func(t *testing.T, data []byte) {
		book := scoring.NewActiveSequences()
		copies := book.NewCopies()
		var m changes
		if m.parse(data, &twoWorkers) != nil {
			return
		}
		copies.Apply(m.book)
		for _, l := range m.lessons {
			copies.Learned(l.worker, l.values)
		}
		copies.FreeAll()
		for w, load := range book.Loads(nil) {
			if load != (scoring.Load{}) {
				t.Errorf("worker %d keeps %+v", w, load)
			}
		}
	})
}
