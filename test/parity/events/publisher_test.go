package parity

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/test/harness/process"
)

const blockSize = 4

func environment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("%s is not set: run `make events`, which fetches what these tests need and sets it", name)
	}
	return value
}

// python is the interpreter with the modules that the scripts here import.
func python(t *testing.T) string { return filepath.Join(environment(t, "KVEPP_TOOLS"), "bin/python") }

// script is a process that runs one of the scripts here.
type script struct {
	t         testing.TB
	argv, env []string // env is added to this process's environment
	cmd       *exec.Cmd
	in        io.WriteCloser
	out       *bufio.Scanner
}

func (s *script) start() {
	s.t.Helper()
	s.cmd = exec.Command(s.argv[0], s.argv[1:]...)
	s.cmd.Env = append(os.Environ(), s.env...)
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		s.t.Fatal(err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	s.out = bufio.NewScanner(out)
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
}

// nextLine waits for the next line of the script's output.
func (s *script) nextLine() string {
	s.t.Helper()
	if !s.out.Scan() {
		s.t.Fatalf("%s ended: %v", s.argv[1], s.out.Err())
	}
	return s.out.Text()
}

// kill kills the process.
func (s *script) kill() {
	s.in.Close()
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// publisher is a process with an engine's publisher.
type publisher struct {
	*script
	events, replay int // ports; replay 0: none
}

// sourcesOf is the folder with the engines' own files in their main versions.
func sourcesOf(t *testing.T) string { return filepath.Join(environment(t, "KVEPP_ENGINES"), "sources") }

// newPublisher starts a publisher, whose files are in sources, that keeps this number of batches for replays; 0: no
// replays.
func newPublisher(t *testing.T, engine, sources string, steps int) *publisher {
	t.Helper()
	p := &publisher{script: &script{t: t}, events: freePort(t)}
	if steps > 0 {
		p.replay = freePort(t)
	}
	p.argv = []string{python(t), "publisher.py", engine, sources, fmt.Sprint(p.events), fmt.Sprint(p.replay),
		fmt.Sprint(max(steps, 1))}
	p.start()
	t.Cleanup(p.kill)
	return p
}

// freePort returns a free port on loopback, which no test at the same time gets, also while its publisher restarts.
func freePort(t testing.TB) int {
	t.Helper()
	port, err := process.Ports(1)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// start starts the process again, as a new epoch of the engine.
func (p *publisher) start() {
	p.t.Helper()
	p.script.start()
	p.wantLine("ready")
}

func (p *publisher) wantLine(want string) {
	p.t.Helper()
	if got := p.nextLine(); got != want {
		p.t.Fatalf("the publisher printed %q, want %q", got, want)
	}
}

type event map[string]any

// publish publishes a batch. With drop its live message is lost.
func (p *publisher) publish(drop bool, events ...event) {
	p.t.Helper()
	line, err := json.Marshal(map[string]any{"events": events, "drop": drop})
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := fmt.Fprintln(p.in, string(line)); err != nil {
		p.t.Fatal(err)
	}
	p.wantLine("sent")
}

// store returns a BlockStored with a block for each hash; parent nil means none. more are pairs of key and value.
func (p *publisher) store(hashes []any, parent any, tokens []kvblock.Token, more ...any) event {
	e := event{
		"type":              "BlockStored",
		"block_hashes":      hashes,
		"parent_block_hash": parent,
		"token_ids":         tokens,
		"block_size":        blockSize,
		"lora_id":           nil,
		"medium":            "GPU",
	}
	if p.argv[2] == "vllm" {
		e["lora_name"] = nil
	}
	for i := 0; i < len(more); i += 2 {
		e[more[i].(string)] = more[i+1]
	}
	return e
}

func removed(hashes ...any) event {
	return event{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
}

var cleared = event{"type": "AllBlocksCleared"}

// endpoint returns the publisher's entry in the pool.
func (p *publisher) endpoint(name string) pool.Endpoint {
	e := pool.Endpoint{Name: name, Address: "127.0.0.1:1", KVEvents: fmt.Sprintf("tcp://127.0.0.1:%d", p.events)}
	if p.replay != 0 {
		e.KVReplay = fmt.Sprintf("tcp://127.0.0.1:%d", p.replay)
	}
	return e
}

// fixture is a Feed with its pool, index and metrics.
type fixture struct {
	t     testing.TB
	pool  *pool.Pool
	index *indexer.Index
	m     *metrics.Metrics
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	h := &fixture{t: t, pool: pool.New(log), index: index, m: metrics.New()}
	events, err := feed.New(feed.Config{}, h.pool, index, h.m, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { events.Close() })
	h.pool.Watch(events)
	h.pool.Watch(forgetful{index})
	return h
}

// forgetful makes the index remove workers that leave, like kvepp.
type forgetful struct{ index *indexer.Index }

func (forgetful) WorkerJoined(pool.Worker)      {}
func (f forgetful) WorkerLeft(w kvblock.Worker) { f.index.Forget(w) }

// match returns the number of leading blocks of tokens that the index has for an endpoint with one rank.
func (h *fixture) match(name string, tokens []kvblock.Token, o kvblock.HashOptions) int {
	return h.matchOf(name, 0, tokens, o)
}

// matchOf is match for one of several ranks.
func (h *fixture) matchOf(name string, rank uint32, tokens []kvblock.Token, o kvblock.HashOptions) int {
	s := h.pool.Acquire()
	defer s.Release()
	o.BlockSize = blockSize
	chain := kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, tokens, o))
	for i := range s.Workers {
		if s.Workers[i].Name == name && s.Workers[i].Rank == rank {
			var scores indexer.OverlapScores
			h.index.FindMatches(chain, &scores)
			return scores.Blocks(s.Workers[i].Worker)
		}
	}
	return -1
}

// count returns the counter of an event of a subscription.
func (h *fixture) count(outcome string) int { return h.happened("subscription", outcome) }

// happened returns the counter of an outcome of a kind of events.
func (h *fixture) happened(kind, outcome string) int {
	return int(metricstest.Read(h.t, h.m.Registry).Of("kvepp_events_total", "kind="+kind, "outcome="+outcome).Value())
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// tokens returns n consecutive numbers as tokens.
func tokens(from, n int) []kvblock.Token {
	ids := make([]kvblock.Token, n)
	for i := range ids {
		ids[i] = kvblock.Token(from + i)
	}
	return ids
}

// publishers returns the folders of the engines' own files by engine and version: those of KVEPP_ENGINES, and the
// further versions of KVEPP_ENGINE_VERSIONS.
func publishers(t *testing.T) map[string]string {
	t.Helper()
	folders := map[string]string{"vllm": sourcesOf(t), "sglang": sourcesOf(t)}
	for _, home := range strings.Fields(environment(t, "KVEPP_ENGINE_VERSIONS")) {
		// The folder's name is ENGINE-VERSION-..., as test/tools/install.sh makes it.
		if parts := strings.Split(filepath.Base(home), "-"); len(parts) > 2 {
			folders[parts[0]+"-"+parts[1]] = filepath.Join(home, "sources")
		}
	}
	return folders
}

// TestPublishers runs the publishers of vLLM 0.33.0, SGLang 0.5.21 and the engines' further versions, with and without
// replays.
func TestPublishers(t *testing.T) {
	for name, sources := range publishers(t) {
		engine, _, _ := strings.Cut(name, "-")
		for _, steps := range []int{1000, 0} {
			t.Run(fmt.Sprintf("%s,replay=%v", name, steps > 0), func(t *testing.T) {
				follow(t, engine, sources, steps)
			})
		}
	}
}

// follow compares the index with what an engine's publisher sent, while messages are lost and the engine restarts.
func follow(t *testing.T, engine, sources string, steps int) {
	h, p := newFixture(t), newPublisher(t, engine, sources, steps)
	plain := kvblock.HashOptions{}
	holds := func(want int) func() bool {
		return func() bool {
			return h.match("a", tokens(0, 16),
				plain) == want
		}
	}

	// Batches published before kvepp connected are known by replay, or not at all.
	p.publish(false, p.store([]any{1, 2}, nil, tokens(0, 8)))
	h.pool.Update([]pool.Endpoint{p.endpoint("a")})
	if steps > 0 {
		eventually(t, "the batches published before", holds(2))
	} else {
		eventually(t, "a message heard",
			func() bool { p.publish(false, p.store([]any{1, 2}, nil, tokens(0, 8))); return holds(2)() })
	}
	p.publish(false, p.store([]any{3}, 2, tokens(8, 4)), p.store([]any{4}, 3, tokens(12, 4)))
	eventually(t, "four blocks", holds(4))

	// A live message is lost, and the next one shows it.
	p.publish(true, removed(4))
	p.publish(false, removed(3))
	if steps > 0 {
		eventually(t, "two blocks", holds(2))
		p.publish(false, p.store([]any{3, 4}, 2, tokens(8, 8)))
		eventually(t, "four blocks again", holds(4))
	} else {
		eventually(t, "no block", holds(0))
		p.publish(false, cleared, p.store([]any{1, 2, 3, 4}, nil, tokens(0, 16)))
		eventually(t, "four blocks again", holds(4))
	}

	// A new epoch of the engine, which sends more messages than the first before kvepp connects.
	p.kill()
	if steps == 0 {
		eventually(t, "no block of the engine that ended", holds(0))
	}
	p.start()
	eventually(t, "no block of the engine that restarted, before its first event", holds(0))
	for i := range 20 {
		p.publish(false, p.store([]any{100 + i}, nil, tokens(1000+4*i, 4)))
	}
	eventually(t, "a message of the new epoch", func() bool {
		p.publish(false, p.store([]any{200}, nil, tokens(2000, 4)))
		return h.match("a", tokens(2000, 4), plain) == 1
	})
	if steps > 0 {
		eventually(t, "all blocks of the new epoch", func() bool {
			for i := range 20 {
				if h.match("a", tokens(1000+4*i, 4), plain) != 1 {
					return false
				}
			}
			return true
		})
	}
	if !holds(0)() {
		t.Error("the index has blocks of the engine's previous epoch")
	}
	fields(t, h, p, engine, sources)
}

// fields checks that kvepp reads the fields of an engine's events.
func fields(t *testing.T, h *fixture, p *publisher, engine, sources string) {
	plain := kvblock.HashOptions{}
	salted, adapted := kvblock.HashOptions{CacheNamespace: "tenant-a"}, kvblock.HashOptions{LoRAName: "sql"}
	hex := strings.Repeat("9F86d081", 8) // a tenant's SHA-256, as a salt
	if engine == "vllm" {
		digest := func(n int) string { return fmt.Sprintf("%064x", n) }
		p.publish(
			false,
			p.store(
				[]any{digest(7), digest(8)},
				nil,
				tokens(3000, 8),
				"extra_keys",
				[]any{[]any{"tenant-a"}, nil},
			),
			p.store([]any{digest(9)}, digest(8), tokens(3008, 4)),
			p.store(
				[]any{digest(10)},
				nil,
				tokens(3000, 4),
				"lora_id",
				1,
				"lora_name",
				"sql",
				"extra_keys",
				[]any{[]any{"sql"}},
			),
			p.store([]any{digest(20)}, nil, tokens(3000, 4), "extra_keys", []any{[]any{hex}}),
			p.store([]any{digest(21)}, digest(20), tokens(3004, 4)),
		)
		eventually(
			t,
			"an adapter's block",
			func() bool { return h.match("a", tokens(3000, 4), adapted) == 1 },
		)
	} else {
		p.publish(false, p.store([]any{-7, -8}, nil, tokens(3000, 8), "cache_salt", "tenant-a"),
			p.store([]any{-9}, -8, tokens(3008, 4), "cache_salt", "tenant-a"),
			p.store([]any{-20, -21}, nil, tokens(3000, 8), "cache_salt", hex))
	}
	eventually(t, "two blocks with a salt of 64 hexadecimal digits", func() bool {
		return h.match("a", tokens(3000, 8), kvblock.HashOptions{CacheNamespace: hex}) == 2
	})
	eventually(t, "three salted blocks", func() bool { return h.match("a", tokens(3000, 12), salted) == 3 })
	if h.match("a", tokens(3000, 12), plain) != 0 {
		t.Error("salted blocks are found without the salt")
	}
	eagle := true
	if engine == "sglang" {
		var pairs [][2]int
		for i := range 8 {
			pairs = append(pairs, [2]int{4000 + i, 4001 + i})
		}
		p.publish(false, p.store([]any{11, 12}, nil, nil, "token_ids", pairs))
	} else if eagle = knowsLookahead(t, sources); eagle {
		p.publish(false, p.store([]any{11, 12}, nil, tokens(4000, 8), "lookahead_token_ids", [][]int{{4004}, {4008}}))
	}
	if eagle {
		eventually(t, "two blocks of EAGLE's",
			func() bool { return h.match("a", tokens(4000, 9), kvblock.HashOptions{EAGLE: true}) == 2 })
	}
	eventually(t, "the reports to the pool", func() bool {
		s := h.pool.Acquire()
		defer s.Release()
		return s.Workers[0].EAGLE == eagle && s.Workers[0].BlockSize == blockSize
	})
}

// TestLowerTiers: the engines' publishers announce chunks of LMCache, vLLM's offloading, and SGLang's host memory,
// between the device's blocks. Other sizes neither teach nor contradict the worker's, and removals stay in their tier.
func TestLowerTiers(t *testing.T) {
	for name, sources := range publishers(t) {
		engine, _, _ := strings.Cut(name, "-")
		t.Run(name, func(t *testing.T) {
			h, p := newFixture(t), newPublisher(t, engine, sources, 1000)
			in := func(medium string, size int, hashes []any, parent any, ids []kvblock.Token) event {
				return p.store(hashes, parent, ids, "medium", medium, "block_size", size)
			}
			gone := func(medium string, hashes ...any) event {
				e := removed(hashes...)
				e["medium"] = medium
				return e
			}
			p.publish(false, in("CPU", 16, []any{91}, nil, tokens(0, 16)))
			h.pool.Update([]pool.Endpoint{p.endpoint("a")})
			eventually(t, "a chunk before the device's blocks",
				func() bool { return h.happened("stored", "tier_block_size") == 1 })
			p.publish(false, p.store([]any{1, 2, 3, 4}, nil, tokens(0, 16)))
			p.publish(false, in("CPU", 16, []any{4}, nil, tokens(0, 0)), in("CPU", 7, []any{92}, 91, tokens(16, 7)),
				in("CPU", 0, []any{2}, nil, tokens(0, 0)), in("CPU", blockSize, []any{3}, nil, tokens(0, 0)),
				in("CPU", blockSize, []any{1, 2}, nil, tokens(0, 8)), gone("CPU", 1, 2, 4, 91, 92))
			p.publish(false, p.store([]any{5}, 4, tokens(16, 4)))
			eventually(t, "five blocks", func() bool { return h.match("a", tokens(0, 20), kvblock.HashOptions{}) == 5 })
			s := h.pool.Acquire()
			defer s.Release()
			if w := s.Workers[0]; w.BlockSize != blockSize || w.Announced != 0 {
				t.Errorf("block size %d, announced %d", w.BlockSize, w.Announced)
			}
			if n := h.happened("stored", "tier_block_size"); n != 4 {
				t.Errorf("%d stores in other sizes counted, want 4", n)
			}
		})
	}
}

// knowsLookahead reports whether a vLLM's events have the field lookahead_token_ids, which 0.33 added.
func knowsLookahead(t *testing.T, sources string) bool {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(sources, "vllm/distributed/kv_events.py"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(text), "lookahead_token_ids")
}

// The goldens of kvblock equal the output of their script.
func TestGoldens(t *testing.T) {
	want, err := os.ReadFile("../../../kvblock/testdata/goldens.json")
	if err != nil {
		t.Fatal(err)
	}
	got, err := exec.Command(python(t), "../../../kvblock/testdata/goldens.py").Output()
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Error("the output of kvblock/testdata/goldens.py differs from goldens.json")
	}
}

// TestPromptTails: vLLM 0.33.0's publisher announces prompt tails of a model with a sliding window between stores and
// removals of full attention. The index equals the engine's cache, and the worker is never load-only, unless the engine
// restarts with another block size.
func TestPromptTails(t *testing.T) {
	for _, configured := range []int{0, blockSize} {
		t.Run(fmt.Sprintf("configured=%d", configured), func(t *testing.T) {
			h, p := newFixture(t), newPublisher(t, "vllm", sourcesOf(t), 1000)
			group := func(n int, kind string) []any { return []any{"group_idx", n, "kv_cache_spec_kind", kind} }
			window := func(hashes []any, parent any, ids []kvblock.Token) event {
				return p.store(
					hashes,
					parent,
					ids,
					append(group(0, "sliding_window"), "kv_cache_spec_sliding_window", 8, "block_size", blockSize/2)...)
			}
			full := func(hashes []any, parent any, ids []kvblock.Token) event {
				return p.store(hashes, parent, ids, group(1, "full_attention")...)
			}
			tail := func(hash, parent any, ids []kvblock.Token) event {
				return p.store(
					[]any{hash},
					parent,
					ids,
					append(group(1, "full_attention"), "block_size", blockSize/2)...)
			}
			gone := func(group int, hash any) event {
				e := removed(hash)
				e["group_idx"] = group
				return e
			}
			endpoint := p.endpoint("a")
			endpoint.BlockSize = configured
			h.pool.Update([]pool.Endpoint{endpoint})
			holds := func(want int) func() bool {
				return func() bool { return h.match("a", tokens(0, 16), kvblock.HashOptions{}) == want }
			}
			tails := func(stored, removed int) func() bool {
				return func() bool {
					return h.happened("stored", "prompt_tail") == stored &&
						h.happened("removed", "prompt_tail") == removed
				}
			}

			// The first prompt is shorter than a block of full attention.
			p.publish(false, window([]any{101}, nil, tokens(500, 2)), tail(101, nil, tokens(500, 2)))
			p.publish(
				false,
				window([]any{1, 11, 2, 12}, nil, tokens(0, 8)),
				full([]any{11, 12}, nil, tokens(0, 8)),
				tail(3, 12, tokens(8, 2)),
			)
			eventually(t, "two blocks", holds(2))
			p.publish(false, window([]any{}, 12, tokens(8, 4)), full([]any{14}, 12, tokens(8, 4)))
			eventually(t, "three blocks", holds(3))
			p.publish(false, tail(5, 14, tokens(12, 2)), gone(1, 3), gone(0, 1))
			p.publish(false, gone(1, 14))
			eventually(t, "the removal of the third block", holds(2))
			p.publish(false, gone(1, 5), full([]any{14, 16}, 12, tokens(8, 8)))
			eventually(t, "four blocks", holds(4))
			// the first one counts only if the block size is known
			eventually(t, "the tails counted", tails(2+configured/blockSize, 2))
			if n := h.happened("stored", "block_size_mismatch") + h.happened("removed", "unknown_block"); n != 0 {
				t.Errorf("%d tails count as blocks of another size or as unknown blocks", n)
			}
			s := h.pool.Acquire()
			if w := s.Workers[0]; w.BlockSize != blockSize || w.Announced != 0 || w.UpperBound || w.Classes == nil {
				t.Errorf("block size %d, announced %d, upper bound %v, classes %v", w.BlockSize, w.Announced,
					w.UpperBound, w.Classes)
			}
			s.Release()

			// A new epoch of the engine, with full attention in blocks of half the size.
			p.kill()
			p.start()
			p.publish(
				false,
				p.store(
					[]any{21, 22},
					nil,
					tokens(0, 4),
					append(group(1, "full_attention"), "block_size", blockSize/2)...),
			)
			eventually(t, "a report of the other block size", func() bool {
				s := h.pool.Acquire()
				defer s.Release()
				return s.Workers[0].Announced == blockSize/2
			})
		})
	}
}
