package main

import (
	"log/slog"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/replica"
	"kvepp/scoring"
	"kvepp/session"
)

// TestApplyEntries: a peer's entries, as a snapshot and as the log have them, give its bookings the load that they have
// at the peer: with generated blocks, their weight, and the end of a prefill.
func TestApplyEntries(t *testing.T) {
	p := pool.New(slog.New(slog.DiscardHandler))
	p.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000"}})
	r := &replicas{pool: p, book: scoring.NewActiveSequences(), sessions: session.NewTable(session.Config{}),
		copies: map[uint64]*scoring.Copies{}}
	r.theirs.refresh(p)
	chain := []kvblock.SequenceHash{1, 2, 3}
	worker := replica.Worker{Name: "a"}
	r.apply(&replica.Effect{Kind: replica.Apply, Origin: 7, Entries: []replica.Entry{
		{Kind: replica.Booked, Number: 1, Worker: worker, BlockSize: 16, PrefillTokens: 48, Blocks: 1,
			Chains: [][]kvblock.SequenceHash{chain}, Age: time.Second},
		{Kind: replica.PrefillDone, Number: 1},
		{Kind: replica.Output, Number: 1, Blocks: 6, Left: scoring.NotKnown},
		{Kind: replica.Booked, Number: 2, Worker: worker, BlockSize: 16, PrefillTokens: 32, Blocks: 2},
		{Kind: replica.Booked, Number: 3, Worker: replica.Worker{Name: "unknown"}, BlockSize: 16},
		{Kind: replica.Freed, Number: 3},
	}})
	want := scoring.Load{Requests: 2, PrefillTokens: 32, ActiveBlocks: 3 + 1 + 6 + 2, ActiveTokens: 12 * 16}
	number := r.theirs.byName[worker]
	if got := r.book.Load(number); got != want {
		t.Errorf("the load is %+v, want %+v", got, want)
	}
	want.ActiveBlocks, want.ActiveTokens = 6, 6*16 // the peers' part has no generated blocks
	if got := r.book.CopiedLoads(nil)[number]; got != want {
		t.Errorf("the copies bring %+v, want %+v", got, want)
	}
	r.apply(&replica.Effect{Kind: replica.FreeAll, Origin: 7})
	if got := r.book.CopiedLoads(nil)[number]; got != (scoring.Load{}) || len(r.copies) != 0 {
		t.Errorf("after its death the peer's copies bring %+v", got)
	}
}
