package admission

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"kvepp/kvblock"
)

// house is a Controller with a clock of its own.
type house struct {
	*Controller
	t   *testing.T
	now time.Duration
}

func newHouse(t *testing.T, cfg Config) *house {
	h := &house{t: t}
	cfg.Clock = func() time.Duration { return h.now }
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	h.Controller = New(cfg)
	h.tokens, h.cached = 1e9, 1e9 // so far, all of the prompts was found in caches
	return h
}

// chain returns the blocks of a prompt of conversation c: 10 for each turn, so 160 tokens.
func chain(c, turns int) []kvblock.SequenceHash {
	all := make([]kvblock.SequenceHash, 10*turns)
	for i := range all {
		all[i] = kvblock.SequenceHash(1000*c + i + 1)
	}
	return all
}

// turn runs a turn of a conversation on a worker, which takes a second.
func (h *house) turn(c, turns int, w kvblock.Worker, cached int) *Turn {
	h.t.Helper()
	t := h.Arrive(chain(c, turns), 160*turns, cached)
	t.Start(w, cached)
	h.now += time.Second
	t.End(40)
	return t
}

// learn makes the chance of return known: half of 2*enoughSamples conversations go on, after pause.
func (h *house) learn(pause time.Duration) {
	h.t.Helper()
	const first = 500_000
	for c := range 2 * enoughSamples {
		h.turn(first+c, 1, 9, 0)
		if c%2 == 0 {
			h.now += pause
			h.turn(first+c, 2, 9, 160)
		}
	}
	h.now += mostIdle + time.Second
	if s := h.Stats(); s.Idle != 0 || s.Running != 0 {
		h.t.Fatalf("%+v", s)
	}
}

// Until pauses and returns are known, idle conversations do not count, and only what requests hold does.
func TestUnknownReturn(t *testing.T) {
	h := newHouse(t, Config{Fill: 0.5})
	for c := range 10 {
		h.turn(c, 1, 0, 0)
	}
	n := h.Arrive(chain(99, 1), 160, 0)
	if h.Stats().Return != 0 || !n.Fits(0, 1000, 1, 100) {
		t.Error("idle conversations count although nothing is known of their return")
	}
	// 160 tokens of the prompt and 40 of a response, beside 301 held, in half of 1000
	if n.Fits(0, 1000, 1, 301) || !n.Fits(0, 1000, 1, 300) {
		t.Error("the room is not fill * capacity - held - need")
	}
	if !n.Fits(0, 1000, 0, 900) || !n.Fits(0, 0, 1, 1<<40) {
		t.Error("no room on an idle worker, or on one of unknown capacity")
	}
}

// Nothing is held back while the caches have little of the prompts: the blocks that waits protect are not asked for.
func TestHoldingThatGainsNothingEnds(t *testing.T) {
	h := newHouse(t, Config{Fill: 1})
	h.tokens, h.cached = 0, 0
	full := func() bool { return !h.Arrive(chain(1, 1), 160, 0).Fits(0, 1000, 1, 1000) }
	if !full() {
		t.Fatal("a full cache has room, before enough prompts came to judge by")
	}
	for range 5000 { // an eighth is found
		h.Arrive(chain(2, 1), 160, 20)
	}
	if full() {
		t.Error("a conversation is held back, and an eighth of the prompts' tokens is found in caches")
	}
	for range 400 { // 50 %
		h.Arrive(chain(2, 1), 160, 80)
	}
	if !full() {
		t.Error("nothing is held back, and half of the prompts' tokens is found in caches")
	}
}

// Idle conversations take room as far as they go on, until they are idle for too long. Their own turns never wait.
func TestIdleConversations(t *testing.T) {
	h := newHouse(t, Config{Fill: 1})
	h.learn(10 * time.Second)
	before := h.Stats()
	if before.Return < 0.3 || before.Return > 0.4 || before.IdleFor != 30*time.Second { // 20 of 60 idle times
		t.Fatalf("%+v", before)
	}
	h.turn(1, 2, 3, 0) // 360 tokens
	n := h.Arrive(chain(2, 1), 160, 0)
	idle := int(math.Ceil(before.Return * 360))
	if n.Continues() || n.Fits(3, 1000, 1, 801-idle) || !n.Fits(3, 1000, 1, 799-idle) {
		t.Error("the room on a worker is not reduced by its idle conversation, times its chance of return")
	}
	if !n.Fits(4, 1000, 1, 800) {
		t.Error("the room on another worker is reduced")
	}
	again := h.Arrive(chain(1, 3), 480, 320)
	if !again.Continues() || !again.Fits(3, 100, 1, 100) {
		t.Error("an admitted conversation has to wait")
	}
	h.now += 40 * time.Second // no turn has started
	if s := h.Stats(); s.Idle != 0 || again.Continues() || !n.Fits(3, 1000, 1, 800) {
		t.Errorf("idle for 40 s, and still admitted: %+v", s)
	}
	again.Start(4, 320)
	if s := h.Stats(); !again.Continues() || s.Running != 1 {
		t.Errorf("not admitted by a start: %+v", s)
	}
	again.End(0)
	again.End(0) // has no effect
	if s := h.Stats(); s.Running != 0 || s.Idle != 1 {
		t.Errorf("%+v", s)
	}
	h.Forget(4)
	if s := h.Stats(); s.Idle != 0 || h.idleTokens[4] != 0 {
		t.Errorf("after its worker left: %+v", s)
	}
}

// A beginning that others had cached before is not a conversation's own.
func TestSharedBeginning(t *testing.T) {
	h := newHouse(t, Config{Fill: 1})
	h.turn(1, 3, 0, 300)
	if got := h.idleTokens[0]; got != 480+40-300 {
		t.Errorf("%d own tokens", got)
	}
	h.turn(1, 4, 0, 480)
	if got := h.idleTokens[0]; got != 640+40-300 {
		t.Errorf("%d own tokens after another turn", got)
	}
}

// The same prompt may be sent twice at once.
func TestEqualPrompts(t *testing.T) {
	h := newHouse(t, Config{Fill: 1})
	a, b := h.Arrive(chain(1, 1), 160, 0), h.Arrive(chain(1, 1), 160, 0)
	a.Start(0, 0)
	b.Start(1, 0)
	a.End(40)
	b.End(40)
	if s := h.Stats(); s.Running != 0 || s.Idle != 1 || h.idleTokens[0] != 0 || h.idleTokens[1] != 200 {
		t.Errorf("%+v, tokens %v", s, h.idleTokens)
	}
}

// The table is bounded, and its counters stay those of its conversations.
func TestRandomTurns(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		h := newHouse(t, Config{Fill: 1, Max: 30})
		var running []*Turn
		for range 1000 {
			h.now += time.Duration(r.IntN(3000)) * time.Millisecond
			switch c := r.IntN(10); {
			case c < 4:
				x := h.Arrive(chain(r.IntN(60), 1+r.IntN(3)), 480, r.IntN(600))
				if r.IntN(8) > 0 {
					x.Start(kvblock.Worker(r.IntN(5)), r.IntN(600))
					running = append(running, x)
				}
			case c < 9 && len(running) > 0:
				i := r.IntN(len(running))
				running[i].End(r.IntN(100))
				running = append(running[:i], running[i+1:]...)
			case c == 9:
				h.Forget(kvblock.Worker(r.IntN(5)))
			}
			if r.IntN(10) == 0 {
				h.check()
			}
		}
		for _, x := range running {
			x.End(1)
		}
		h.now += time.Hour
		if s := h.Stats(); s.Running != 0 || s.Idle != 0 {
			t.Fatalf("%+v", s)
		}
		h.check()
	}
}

// check compares the counters with the conversations.
func (h *house) check() {
	h.t.Helper()
	if n := h.idle.Len() + h.lapsed.Len(); n > h.cfg.Max {
		h.t.Fatalf("%d conversations, at most %d", n, h.cfg.Max)
	}
	tokens := make([]int, len(h.idleTokens))
	for e := h.idle.Front(); e != nil; e = e.Next() {
		v := e.Value.(*conversation)
		tokens[v.worker] += v.own
		if !v.idle || v.running != 0 || h.byEnd[v.end] != v {
			h.t.Fatalf("%+v is in the list of idle ones", v)
		}
	}
	for w, n := range tokens {
		if h.idleTokens[w] != n {
			h.t.Fatalf("worker %d: %d idle tokens, want %d", w, h.idleTokens[w], n)
		}
	}
	running := 0
	for end, v := range h.byEnd {
		if v.end != end || (v.running == 0) == (v.place == nil) {
			h.t.Fatalf("%+v has the end %v", v, end)
		}
		if v.running > 0 {
			running++
		}
	}
	counts := map[*uint8]uint8{}
	for end := range h.byEnd {
		counts[h.count(end)]++
	}
	all := 0
	for _, n := range h.ends {
		all += int(n)
	}
	for n, want := range counts {
		if *n != want {
			h.t.Fatalf("%d ends are counted, want %d", *n, want)
		}
	}
	if all != len(h.byEnd) {
		h.t.Fatalf("%d ends are counted, want %d", all, len(h.byEnd))
	}
	if h.running < running {
		h.t.Fatalf("%d running conversations in the table, and the counter is %d", running, h.running)
	}
}

func BenchmarkArrive(b *testing.B) {
	for _, known := range []bool{true, false} {
		name := "new"
		if known {
			name = "known"
		}
		b.Run(name, func(b *testing.B) {
			c := New(Config{Fill: 1})
			for i := range 10_000 {
				t := c.Arrive(chain(i, 1), 160, 0)
				t.Start(0, 0)
				t.End(1)
			}
			prompt := make([]kvblock.SequenceHash, 512) // 8,192 tokens in blocks of 16
			for i := range prompt {
				prompt[i] = kvblock.SequenceHash(1<<40 + i)
			}
			if known {
				copy(prompt[400:], chain(77, 1))
			}
			b.ReportAllocs()
			for b.Loop() {
				if t := c.Arrive(prompt, 8192, 0); t.Continues() != known {
					b.Fatal("not as expected")
				}
			}
		})
	}
}

// One engine's reports of endless responses change the room on no other worker, also on one without responses.
func TestOneEngineTakesNoRoomElsewhere(t *testing.T) {
	h := newHouse(t, Config{Fill: 1})
	for c := range 40 {
		h.turn(c, 1, kvblock.Worker(1+c%2), 0) // responses of 40 tokens
		lie := h.Arrive(chain(100+c, 1), 160, 0)
		lie.Start(0, 0)
		lie.End(1 << 30)
	}
	n := h.Arrive(chain(99, 1), 160, 0)
	for w := kvblock.Worker(1); w < 4; w++ {
		if n.Fits(w, 1000, 1, 801) || !n.Fits(w, 1000, 1, 800) {
			t.Errorf("worker %d: a response is not expected to have 40 tokens", w)
		}
	}
	if n.Fits(0, 1000, 1, 0) {
		t.Error("the engine's own reports do not count for itself")
	}
}
