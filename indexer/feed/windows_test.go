package feed

import (
	"compress/gzip"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"kvepp/indexer"
	"kvepp/kvblock"
)

// windowBatches returns the event batches of one case of the index's vectors of models without full attention, up to
// the first prompt with this many cached tokens or more, and that prompt. least 0: all batches.
func windowBatches(t *testing.T, name string, least int) (batches [][]byte, prompt []kvblock.Token, cached int) {
	t.Helper()
	f, err := os.Open("../testdata/window-vectors.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	in := false
	for lines := json.NewDecoder(z); lines.More(); {
		var v struct {
			Case, Batch string
			Prompt      []kvblock.Token
			Cached      int
		}
		if err := lines.Decode(&v); err != nil {
			t.Fatal(err)
		}
		switch {
		case v.Case != "":
			in = v.Case == name
		case !in:
		case v.Batch != "":
			payload, err := hex.DecodeString(v.Batch)
			if err != nil {
				t.Fatal(err)
			}
			batches = append(batches, payload)
		case least > 0 && v.Cached >= least:
			return batches, v.Prompt, v.Cached
		}
	}
	if least > 0 || len(batches) == 0 {
		t.Fatalf("no prompt of %s has %d tokens cached", name, least)
	}
	return batches, nil, 0
}

func (e *engine) send(payload []byte) {
	e.t.Helper()
	number := binary.BigEndian.AppendUint64(nil, e.seq)
	if _, err := e.socket.SendMessage([]byte{}, number, payload); err != nil {
		e.t.Fatal(err)
	}
	e.seq++
}

// A worker whose model has no full attention is known by computed hashes, if the option is on and its seed is known.
func TestComputedHashes(t *testing.T) {
	for _, c := range []struct {
		name, of, seeds string
		known           bool
	}{
		{"vLLM's own seed", "window", "default", true},
		{"a seed that kvepp knows", "PYTHONHASHSEED", "9,0", true},
		{"a seed that kvepp does not know", "PYTHONHASHSEED", "default", false},
		{"no option", "window", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var config Config
			if c.seeds != "" {
				hashes, err := kvblock.NewEngineHashes(strings.Split(c.seeds, ","))
				if err != nil {
					t.Fatal(err)
				}
				config.EngineHashes = hashes
			}
			var lines lockedBuffer
			h := newFixtureWith(t, config, &lines)
			e := newEngine(t, 0)
			h.update(e, 0)
			h.connected(1)
			eventually(t, "the subscription", e.subscribed)
			least := 128
			if !c.known {
				least = 0
			}
			batches, prompt, cached := windowBatches(t, c.of, least)
			for _, payload := range batches {
				e.send(payload)
			}
			h.applied(e)
			w := h.worker()
			if c.known {
				workers := h.pool.Acquire()
				if x := &workers.Workers[0]; x.Classes == nil || x.BlockSize == 0 || x.UpperBound {
					t.Errorf("the pool's worker has classes %v, block size %d, upper bound %v", x.Classes, x.BlockSize,
						x.UpperBound)
				}
				workers.Release()
				x := h.subscriptions[w]
				x.applying.Lock()
				size := int(x.normalizer.Traits().BlockSize)
				x.applying.Unlock()
				o := kvblock.HashOptions{BlockSize: size}
				p := indexer.Prompt{Tokens: len(prompt), Chain: kvblock.AppendSequenceHashes(nil,
					kvblock.AppendLocalHashes(nil, prompt, o))}
				var s indexer.OverlapScores
				h.index.FindPrompt(&p, &s)
				if got := s.Blocks(w) * size; got != cached {
					t.Errorf("%d tokens cached, the engine had %d", got, cached)
				}
			}
			if got := h.index.WorkerEntries(w) > 0; got != c.known {
				t.Errorf("the index has blocks: %v", got)
			}
			warned := strings.Contains(lines.String(), "kvepp cannot compute its block hashes")
			if want := !c.known && c.seeds != ""; warned != want {
				t.Errorf("warned: %v, want %v: %s", warned, want, lines.String())
			}
			h.Dump(w, func(from *Source, stored kvblock.Stored) bool {
				t.Errorf("a dump has blocks that no replica can continue: %+v", stored)
				return false
			})
		})
	}
}
