package indexer

import (
	"bufio"
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"kvepp/kvblock"
)

// windowVector is a line of testdata/window-vectors.jsonl.gz: the beginning of a case, a batch of events, or a prompt
// with the number of tokens that the engine then had cached. The KV cache manager of vLLM 0.33.0 made them, for models
// without full attention and with few blocks (testdata/window-vectors.py).
type windowVector struct {
	Case   string
	Seed   string
	EAGLE  bool
	Batch  string
	Prompt []kvblock.Token
	Salt   string
	Cached int
}

// windowCases calls each with the lines of the vectors.
func windowCases(t *testing.T, each func(v *windowVector)) {
	t.Helper()
	f, err := os.Open("testdata/window-vectors.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(z)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var v windowVector
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			t.Fatal(err)
		}
		each(&v)
	}
	if lines.Err() != nil {
		t.Fatal(lines.Err())
	}
}

// windowWorker applies a case's events.
type windowWorker struct {
	of *windowVector
	x  *Index
	n  *kvblock.Normalizer
	b  kvblock.Batch

	unplaced, unknown int
}

func (w *windowWorker) begin(t *testing.T, of *windowVector, c Config) {
	t.Helper()
	var seeds []string
	if of.Seed != "" {
		seeds = []string{of.Seed}
	}
	hashes, err := kvblock.NewEngineHashes(append([]string{"7"}, seeds...))
	if err != nil {
		t.Fatal(err)
	}
	if w.x, err = New(c); err != nil {
		t.Fatal(err)
	}
	w.of, w.n = of, kvblock.NewNormalizer(0)
	w.n.ComputeHashes(hashes)
	w.unplaced, w.unknown = 0, 0
}

func (w *windowWorker) apply(t *testing.T, batch string) {
	t.Helper()
	payload, err := hex.DecodeString(batch)
	if err != nil {
		t.Fatal(err)
	}
	if err := kvblock.DecodeBatch(payload, &w.b); err != nil {
		t.Fatal(err)
	}
	for ops := w.n.Normalize(&w.b, nil); len(ops) > 0; {
		did, a := w.x.Apply(3, ops, false)
		if did == 0 {
			if ops[0].Kind != kvblock.OpDropped || ops[0].Reason != kvblock.DropUnplaced {
				t.Errorf("%s: %+v", w.of.Case, ops[0])
			}
			w.unplaced++
			did = 1
		}
		if len(a.Failed) > 0 {
			t.Errorf("%s: %+v", w.of.Case, a)
		}
		w.unknown += a.Unknown
		ops = ops[did:]
	}
}

// predict returns the cached tokens of a prompt.
func (w *windowWorker) predict(v *windowVector, s *OverlapScores) int {
	traits := w.n.Traits()
	if traits.BlockSize == 0 {
		return 0
	}
	h := Hybrid{Classes: traits.Classes, BlockSize: traits.BlockSize, WithoutFull: traits.WithoutFull}
	if w.of.EAGLE {
		h.Drop = kvblock.EAGLEDropFull | kvblock.EAGLEDropWindows
	}
	w.x.SetHybrid(3, &h)
	p := Prompt{Tokens: len(v.Prompt), Options: kvblock.HashOptions{BlockSize: h.BlockSize, CacheNamespace: v.Salt}}
	p.Chain = kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, v.Prompt, p.Options))
	w.x.FindPrompt(&p, s)
	return s.Blocks(3) * traits.BlockSize
}

// The index predicts what vLLM reuses of each prompt for models without full attention.
func TestWindowVectors(t *testing.T) {
	var w windowWorker
	var s OverlapScores
	right, all, cached := map[string]int{}, map[string]int{}, 0
	var names []string
	windowCases(t, func(v *windowVector) {
		switch {
		case v.Case != "":
			w.begin(t, v, Config{})
			names = append(names, v.Case)
		case v.Batch != "":
			w.apply(t, v.Batch)
		default:
			name := w.of.Case
			all[name]++
			cached += v.Cached
			if got := w.predict(v, &s); got == v.Cached {
				right[name]++
			} else if name != "salts" || got > v.Cached || w.unplaced == 0 {
				t.Errorf("%s: a prompt of %d tokens: %d cached, the engine had %d", name, len(v.Prompt), got, v.Cached)
			}
			if w.n.Traits().UpperBound || w.n.HashesUnknown() || s.Cut(3) != (Cut{}) {
				t.Errorf("%s: an upper bound, or a cut: %+v", name, s.Cut(3))
			}
			if name != "salts" && w.unplaced+w.unknown > 0 {
				t.Errorf("%s: %d blocks without a place, %d unknown", name, w.unplaced, w.unknown)
			}
		}
	})
	for _, name := range names {
		t.Logf("%s: %d of %d", name, right[name], all[name])
	}
	if len(names) != 10 || cached == 0 {
		t.Errorf("%d cases, %d tokens cached", len(names), cached)
	}
}

// At its bound the index forgets blocks, and then predicts less than the engine reuses, not more. The digests of the
// blocks count as memory.
func TestWindowsAtTheBound(t *testing.T) {
	var w windowWorker
	var s OverlapScores
	const most = 48 << 10
	exact, cached, predicted := 0, 0, 0
	windowCases(t, func(v *windowVector) {
		switch {
		case v.Case != "":
			w.begin(t, v, Config{MaxBytes: most})
		case v.Batch != "":
			w.apply(t, v.Batch)
			if used := w.x.Stats().Used; used > most {
				t.Fatalf("%d bytes in use, at most %d allowed", used, most)
			}
			if w.n.Digests() > 2*w.x.WorkerEntries(3)+2*kvblock.MaxOtherDigests {
				w.n.KeepDigests(func(e kvblock.EngineHash) bool { return w.x.Holds(3, e) })
			}
		default:
			got := w.predict(v, &s)
			if got > v.Cached {
				t.Errorf("%s: a prompt of %d tokens: %d cached, the engine had %d",
					w.of.Case, len(v.Prompt), got, v.Cached)
			}
			if got == v.Cached {
				exact++
			}
			cached, predicted = cached+v.Cached, predicted+got
		}
	})
	t.Logf("%d exact; %d of %d cached tokens predicted", exact, predicted, cached)
	if predicted == 0 || predicted == cached {
		t.Errorf("%d of %d cached tokens predicted: these cases do not reach the bound", predicted, cached)
	}
}

// Clear and Forget remove the blocks of a worker without full attention, and its bytes. A dump has only the blocks that
// follow a block in it, or begin a prompt.
func TestWindowsAreForgotten(t *testing.T) {
	var w windowWorker
	var s OverlapScores
	var longest *windowVector
	windowCases(t, func(v *windowVector) {
		if v.Case == "window" || w.of == nil {
			w.begin(t, v, Config{})
		}
		if w.of.Case != "window" || v.Case != "" && v.Case != "window" {
			w.of = &windowVector{Case: "over"}
			return
		}
		if v.Batch != "" {
			w.apply(t, v.Batch)
		} else if v.Prompt != nil {
			longest = v
		}
	})
	w.of = &windowVector{Case: "window"}
	before := w.predict(longest, &s)
	if before == 0 {
		t.Fatal("nothing is held")
	}
	stats := w.x.Stats()
	if stats.Entries == 0 || stats.Used < kvblock.DigestBytes*stats.Entries {
		t.Errorf("%+v", stats)
	}
	dumped := map[kvblock.EngineHash]bool{}
	omitted := w.x.Dump(3, func(stored kvblock.Stored) bool {
		if stored.HasParent && !dumped[stored.Parent] {
			t.Errorf("a dump has blocks behind one that it does not have: %+v", stored)
		}
		for _, b := range stored.Blocks {
			dumped[b.Engine] = true
			if !w.x.Holds(3, b.Engine) || w.x.Holds(3, b.Engine+1) || w.x.Holds(4, b.Engine) {
				t.Errorf("Holds is wrong about block %d", b.Engine)
			}
		}
		return true
	})
	if omitted == 0 || omitted > stats.Entries {
		t.Errorf("%d of %d entries are not in the dump", omitted, stats.Entries)
	}
	w.x.Cleared(3)
	if got := w.predict(longest, &s); got != 0 || w.x.Stats().Entries != 0 || w.x.Stats().Used > stats.Used/2 {
		t.Errorf("%d tokens after a clear, %+v", got, w.x.Stats())
	}
	w.x.Predict(3, kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, longest.Prompt,
		kvblock.HashOptions{BlockSize: 16})), Lifetime{Blocks: 1 << 20})
	if got, want := w.predict(longest, &s), (len(longest.Prompt)-1)/16*16; got != want {
		t.Errorf("%d tokens of a prompt that was sent, want %d", got, want)
	}
	w.x.Forget(3)
	p := Prompt{Tokens: len(longest.Prompt), Chain: []kvblock.SequenceHash{1, 2, 3}}
	w.x.FindPrompt(&p, &s)
	for o := range s.Overlaps() {
		t.Errorf("%+v after Forget", o)
	}
	if w.x.hybrids.Load() != nil {
		t.Error("the classes of a forgotten worker are kept")
	}
}
