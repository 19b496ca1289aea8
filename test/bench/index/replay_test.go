package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"testing"

	"kvepp/kvblock"
)

// block is a block of a worker's full attention or of its class.
type block struct {
	tier kvblock.Tier
	seq  kvblock.SequenceHash
}

// reusable returns how many of the first n blocks of a prompt a worker can reuse that holds these blocks.
func reusable(blocks map[block]bool, class kvblock.Class, chain []kvblock.SequenceHash, n int) int {
	for ; n > 0; n-- {
		need := 0 // blocks of the class before the end
		switch class.Kind {
		case kvblock.ClassWindow:
			need = min((int(class.Window)-1+blockTokens-1)/blockTokens, n)
		case kvblock.ClassState:
			need = 1
		}
		for need > 0 && blocks[block{kvblock.ClassTier(0), chain[n-need]}] {
			need--
		}
		if need == 0 {
			break
		}
	}
	return n
}

// naive answers a workload's queries from sets of blocks, one for each worker.
func naive(t *testing.T, path string) map[int]string {
	w, err := openWorkload(path)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	held := map[kvblock.Worker]map[block]bool{}
	var class kvblock.Class
	digests := map[int]uint64{}
	var waiting [][]kvblock.LocalHash
	phase, window := 0, 0
	respond := func() {
		for _, q := range waiting {
			chain := kvblock.AppendSequenceHashes(nil, q)
			for worker, blocks := range held {
				n := 0
				for n < len(chain) && blocks[block{kvblock.TierDevice, chain[n]}] {
					n++
				}
				if n > 0 {
					n = reusable(blocks, class, chain, n)
					digests[phase] += mixed(uint64(worker+1)<<32 | uint64(n))
				}
			}
		}
		waiting = nil
	}
	var op operation
	for {
		if err := w.next(&op); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		switch op.kind {
		case opClass:
			class = op.hybrid.Classes[0]
			continue
		case opPhase:
			respond()
			phase, window = op.phase, 0
			continue
		case opStore:
			if held[op.worker] == nil {
				held[op.worker] = map[block]bool{}
			}
			for _, b := range op.store.Blocks {
				held[op.worker][block{op.store.Tier, kvblock.SequenceHash(b.Engine)}] = true
			}
		case opRemove:
			for _, h := range op.remove.Hashes {
				delete(held[op.worker], block{op.remove.Tier, kvblock.SequenceHash(h)})
			}
		case opQuery:
			waiting = append(waiting, op.query)
		}
		if window++; phase != phaseMixed || window == mixedWindow {
			respond()
			window = 0
		}
	}
	respond()
	all := map[int]string{}
	for phase, digest := range digests {
		all[phase] = fmt.Sprintf("%016x", digest)
	}
	return all
}

// The digests that engines are compared by are those of the right responses.
func TestReplayEqualsNaive(t *testing.T) {
	for _, args := range [][]string{
		{"-kind", "tree", "-users", "40", "-workers", "8"},
		{"-kind", "trace", "-requests", "150", "-workers", "5", "-cache", "600"},
		{"-kind", "micro", "-shape", "flat", "-workers", "8", "-entries", "8192"},
		{"-kind", "micro", "-shape", "turns", "-workers", "8", "-entries", "8192"},
		{"-kind", "micro", "-shape", "stagger", "-workers", "8", "-entries", "8192"},
		{"-kind", "hybrid", "-class", "none", "-workers", "8", "-entries", "8192"},
		{"-kind", "hybrid", "-class", "window128", "-workers", "8", "-entries", "8192"},
		{"-kind", "hybrid", "-class", "window1024", "-workers", "8", "-entries", "8192"},
		{"-kind", "hybrid", "-class", "state", "-workers", "8", "-entries", "8192"},
	} {
		path := filepath.Join(t.TempDir(), "workload")
		if err := generate(append(args, "-queries", "200", "-o", path), io.Discard); err != nil {
			t.Fatal(err)
		}
		phases, err := replay(path)
		if err != nil {
			t.Fatal(err)
		}
		want := naive(t, path)
		if len(want) == 0 {
			t.Errorf("%v: no worker holds any queried block", args)
		}
		for phase, r := range phases {
			if digest, asked := want[phase]; asked && r.Digest != digest || !asked && r.digest != 0 {
				t.Errorf("%v, phase %d: digest %s, want %s", args, phase, r.Digest, digest)
			}
		}
	}
}
