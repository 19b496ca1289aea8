package main

import (
	"errors"
	"io"
	"path/filepath"
	"slices"
	"testing"

	"kvepp/replay"
	"kvepp/test/harness/stack"
)

// TestPlannedTrace checks that kvepp replay reads the traces of all scenarios, that each has a request for each turn,
// and that a later turn's prompt begins with the blocks of the turn before.
func TestPlannedTrace(t *testing.T) {
	for i := range scenarios {
		sc := &scenarios[i]
		sessions := sc.make(newWriter(3))
		var rec recorder
		for n := range sessions {
			rec.plan(&sessions[n], turnOf("", n)[1:], sessions[n].at, nil)
		}
		if want := countTurns(sessions); len(rec.rows) != want {
			t.Errorf("%s: %d requests of %d turns", sc.name, len(rec.rows), want)
		}
		rows := map[string]row{}
		for _, r := range rec.rows {
			rows[r.RequestID] = r
		}
		for _, r := range rec.rows {
			for _, d := range r.Dependencies {
				before, ok := rows[d.RequestID]
				if !ok {
					t.Fatalf("%s: %s waits for %s, which is not in the trace", sc.name, r.RequestID, d.RequestID)
				}
				n := before.InputLength / stack.BlockSize
				sameSession := before.RequestID[:len(before.RequestID)-1] == r.RequestID[:len(r.RequestID)-1]
				if sameSession && !slices.Equal(before.HashIDs[:n], r.HashIDs[:n]) {
					t.Errorf("%s: %s does not continue %s", sc.name, r.RequestID, d.RequestID)
				}
			}
		}
		dir := t.TempDir()
		if err := rec.write(dir, "trace"); err != nil {
			t.Fatal(err)
		}
		from, closer, err := replay.Open(filepath.Join(dir, "trace"), replay.AgenticMooncake,
			replay.ReaderOptions{BlockSize: stack.BlockSize})
		if err != nil {
			t.Fatal(err)
		}
		read := 0
		for ; err == nil; read++ {
			_, err = from.Next()
		}
		closer.Close()
		if !errors.Is(err, io.EOF) || read-1 != len(rec.rows) {
			t.Errorf("%s: kvepp replay reads %d of %d requests: %v", sc.name, read-1, len(rec.rows), err)
		}
	}
}

func countTurns(sessions []session) (n int) {
	for _, s := range sessions {
		n += len(s.turns)
		for _, t := range s.turns {
			n += countTurns(t.subagents)
		}
	}
	return n
}

// TestSharedBlocks checks that prompts share the blocks of their system prompt, and no others.
func TestSharedBlocks(t *testing.T) {
	var rec recorder
	a := rec.add("0.0", 0, nil, rec.system("you help", 100), 200, 10)
	b := rec.add("1.0", 0, nil, rec.system("you help", 98), 150, 10)
	c := rec.add("2.0", 0, nil, rec.system("you code", 100), 150, 10)
	if len(a) != 200/stack.BlockSize || len(b) != 150/stack.BlockSize {
		t.Errorf("%d and %d blocks", len(a), len(b))
	}
	if n := 98 / stack.BlockSize; !slices.Equal(a[:n], b[:n]) || slices.Contains(a, b[n]) || slices.Contains(a, c[0]) {
		t.Errorf("blocks %v, %v and %v", a, b, c)
	}
	if next := rec.add("0.1", 0, nil, a, 250, 10); !slices.Equal(next[:len(a)], a) || slices.Contains(b, next[len(a)]) {
		t.Errorf("the next turn has %v after %v", next, a)
	}
}
