package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvepp/router/admission"
	"kvepp/router/queue"
	"kvepp/scoring"
)

func config() Config {
	c := Config{Workers: 4, Engine: DefaultEngineConfig(), Scoring: scoring.DefaultConfig(), ArrivalSpeed: 1}
	c.Engine.Blocks, c.Engine.BlockSize = 2000, 16
	return c
}

func generated(t *testing.T, workload string, requests int, rate float64) string {
	t.Helper()
	var b bytes.Buffer
	if err := Generate(&b, workload, requests, rate, 16, 1); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func run(t *testing.T, c Config, format Format, text string) *Report {
	t.Helper()
	r, err := NewReader("trace", strings.NewReader(text), format,
		ReaderOptions{BlockSize: c.Engine.BlockSize, TraceBlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	report, err := Run(t.Context(), c, r.Next, nil)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// TestWorkloads: each kind of generated traffic is complete, the same for the same seed, and served better by caches
// than in turn if its prompts share anything.
func TestWorkloads(t *testing.T) {
	requests := 1000
	if testing.Short() {
		requests = 60
	}
	for _, w := range Workloads {
		text := generated(t, w.Name, requests, 6)
		if again := generated(t, w.Name, requests, 6); again != text {
			t.Errorf("%s: another trace for the same seed", w.Name)
		}
		c := config()
		kv := run(t, c, MooncakeDelta, text)
		if again := run(t, c, MooncakeDelta, text); !reflect.DeepEqual(kv, again) {
			t.Errorf("%s: another report for the same seed", w.Name)
		}
		c.Scoring.Mode = scoring.RoundRobin
		turn := run(t, c, MooncakeDelta, text)
		for _, r := range []*Report{kv, turn} {
			if r.Requests+r.TooLarge != requests || r.Completed != r.Requests || r.Refused() != 0 {
				t.Errorf("%s: %d requests, %d too large, %d completed", w.Name, r.Requests, r.TooLarge, r.Completed)
			}
			if r.CachedShare() > r.PossibleShare()+1e-9 {
				t.Errorf("%s: %.3f cached of %.3f possible", w.Name, r.CachedShare(), r.PossibleShare())
			}
		}
		if w.Name != "none" && kv.CachedShare() < turn.CachedShare()-.005 || w.Name == "none" && kv.CachedTokens != 0 {
			t.Errorf("%s: kv has %.3f cached, round-robin %.3f", w.Name, kv.CachedShare(), turn.CachedShare())
		}
	}
}

// TestPredictionIsExact: without lag, and with one request at a time, the index knows what the engines have cached, but
// for the last token, which engines always compute.
func TestPredictionIsExact(t *testing.T) {
	c := config()
	r := run(t, c, MooncakeDelta, generated(t, "chat", 300, 0.01))
	if r.CachedTokens == 0 || r.PredictedTokens < r.CachedTokens || r.PredictedTokens > r.CachedTokens+300*16 {
		t.Errorf("%d tokens predicted, %d cached", r.PredictedTokens, r.CachedTokens)
	}
	c.EventLag = time.Hour
	if lagging := run(t, c, MooncakeDelta,
		generated(t, "chat", 300, 0.01)); lagging.PredictedTokens >= r.PredictedTokens/2 {
		t.Errorf("%d tokens predicted with events an hour late, %d without", lagging.PredictedTokens, r.PredictedTokens)
	}
}

// TestTurnsWait: a turn with a delay arrives that long after the end of the one before.
func TestTurnsWait(t *testing.T) {
	text := `{"timestamp": 0, "session_id": "s", "hash_ids": [1], "output_length": 5}
{"delay": 60000, "session_id": "s", "hash_ids": [2], "output_length": 5}
{"delay": 60000, "session_id": "s", "hash_ids": [3], "output_length": 5}
`
	if d := run(t, config(), MooncakeDelta, text).Duration; d < 2*time.Minute || d > 121*time.Second {
		t.Errorf("took %v", d)
	}
	c := config()
	c.ArrivalSpeed = 4
	if d := run(t, c, MooncakeDelta, text).Duration; d < 30*time.Second || d > 31*time.Second {
		t.Errorf("four times as fast: took %v", d)
	}
}

// TestArrivalJitter: each request arrives up to so much later, with several workers exactly as much as with one, and
// with another seed otherwise. Turns with a delay, and those of an agentic trace that wait for others, are late too.
func TestArrivalJitter(t *testing.T) {
	const jitter = 10 * time.Millisecond
	arrivals := func(c Config, format Format, text string) map[string]time.Duration {
		all := map[string]time.Duration{}
		c.Decided = func(d *Decision) { all[d.Request.ID] = d.Arrived }
		run(t, c, format, text)
		return all
	}
	var text strings.Builder
	for i := range 100 {
		fmt.Fprintf(&text, `{"timestamp": 5, "request_id": "%d", "hash_ids": [%d], "output_length": 5}`+"\n", i, i)
	}
	exact := arrivals(config(), Mooncake, text.String())
	c := config()
	c.ArrivalJitter = jitter
	late := arrivals(c, Mooncake, text.String())
	first, last := time.Hour, time.Duration(0)
	for id, at := range late {
		first, last = min(first, at-exact[id]), max(last, at-exact[id])
	}
	if len(late) != 100 || first < 0 || first > jitter/4 || last <= jitter*3/4 || last >= jitter {
		t.Errorf("%d requests arrive %v to %v late", len(late), first, last)
	}
	c.Workers = 1
	if other := arrivals(c, Mooncake, text.String()); !maps.Equal(other, late) {
		t.Error("with one worker requests arrive at other times")
	}
	c.Seed++
	if other := arrivals(c, Mooncake, text.String()); maps.Equal(other, late) {
		t.Error("with another seed requests arrive at the same times")
	}

	turns := `{"timestamp": 0, "session_id": "s", "hash_ids": [1], "output_length": 5}
{"delay": 1000, "session_id": "s", "hash_ids": [2], "output_length": 5}
`
	c = config()
	before := run(t, c, MooncakeDelta, turns).Duration
	c.ArrivalJitter = time.Hour
	if after := run(t, c, MooncakeDelta, turns).Duration; after < before+time.Minute || after > before+2*time.Hour {
		t.Errorf("two turns take %v, and %v with a jitter of an hour", before, after)
	}
	parents := `{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 16, "hash_id_scope": "local"}
{"request_id": "a", "play_id": "p", "not_before_ms": 0, "input_length": 16, "output_length": 5, "hash_ids": [1]}
{"request_id": "b", "play_id": "p", "not_before_ms": 0, "input_length": 16, "output_length": 5, "hash_ids": [2],` +
		` "dependencies": [{"request_id": "a", "trigger": "completion", "delay_ms": 1000}]}
`
	c.ArrivalJitter = 0
	begun := arrivals(c, AgenticMooncake, parents)
	c.ArrivalJitter = jitter
	delayed := arrivals(c, AgenticMooncake, parents)
	a, b := delayed["a"]-begun["a"], delayed["b"]-begun["b"]
	if a <= 0 || a >= jitter || b <= a || b >= 2*jitter {
		t.Errorf("a request is %v late, and one that waits for it %v", a, b)
	}
}

// TestQueueInVirtualTime: with a queue, requests wait at kvepp; a full queue and a timeout refuse.
func TestQueueInVirtualTime(t *testing.T) {
	var text strings.Builder
	for i := range 200 {
		fmt.Fprintf(&text, `{"timestamp": %d, "hash_ids": [%d], "input_length": 16, "output_length": 20}`+"\n", i/100,
			i)
	}
	c := config()
	c.Workers, c.Engine.MaxBatchedTokens = 1, 64
	frac := 1.0
	c.Queue, c.QueueBound = queue.Single(queue.FCFS, &frac), 1000
	if r := run(t, c, Mooncake, text.String()); r.Completed != 200 || r.Queued.Max <= 0 || r.TTFT.Max <= r.Queued.Max {
		t.Errorf("%d completed, waits %+v, TTFT %+v", r.Completed, r.Queued, r.TTFT)
	}
	c.QueueBound = 10
	if r := run(t, c, Mooncake, text.String()); r.Refused() == 0 || r.Completed+r.Refused() != 200 {
		t.Errorf("%d refused, %d completed", r.Refused(), r.Completed)
	}
	c.QueueBound, c.QueueTimeout = 1000, 50*time.Millisecond
	if r := run(t, c, Mooncake, text.String()); r.QueueRefused == 0 || r.Queued.Max > 0.051 ||
		r.Completed+r.Refused() != 200 {
		t.Errorf("%d refused, %d completed, waits %+v", r.Refused(), r.Completed, r.Queued)
	}
}

// TestUnequalEngines: the slow half gets no more than its share of the work by cost.
func TestUnequalEngines(t *testing.T) {
	c := config()
	c.Speeds = []float64{1, 0.25}
	r := run(t, c, MooncakeDelta, generated(t, "none", 400, 8))
	if fast, slow := r.Workers[0].Requests+r.Workers[2].Requests, r.Workers[1].Requests+
		r.Workers[3].Requests; slow >= fast {
		t.Errorf("%d requests for slow workers, %d for fast ones", slow, fast)
	}
}

// TestSessionsAreBound: with a TTL, the turns of a session stay on one worker; later than that they may move.
func TestSessionsAreBound(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	text := generated(t, "chat", 600, 8)
	c := config()
	c.Scoring.Mode = scoring.Random
	moves := func(c Config) (moved int) {
		last := map[string]int{}
		c.Decided = func(d *Decision) {
			if w, known := last[d.Request.Session]; known && w != d.Worker && d.Request.Session != "" {
				moved++
			}
			last[d.Request.Session] = d.Worker
		}
		r := run(t, c, MooncakeDelta, text)
		if r.Completed != 600 || c.SessionTTL == time.Hour && r.Sessions.Kept == 0 {
			t.Errorf("%d completed, sessions %+v", r.Completed, r.Sessions)
		}
		return moved
	}
	if n := moves(c); n < 100 {
		t.Errorf("%d moves without sessions", n)
	}
	c.SessionTTL = time.Hour
	if n := moves(c); n != 0 {
		t.Errorf("%d moves", n)
	}
	c.SessionTTL = time.Millisecond
	if n := moves(c); n < 100 {
		t.Errorf("%d moves with a TTL that is shorter than the time between turns", n)
	}
}

// TestThresholds: a worker above a threshold gets no requests, and if all are, requests are refused. A session's
// request is refused if its own worker is, unless it may move.
func TestThresholds(t *testing.T) {
	text := generated(t, "none", 300, 40)
	for name, set := range map[string]func(*Thresholds){
		"blocks":   func(b *Thresholds) { v := 0.1; b.ActiveDecodeBlocks = &v },
		"tokens":   func(b *Thresholds) { v := uint64(2000); b.ActivePrefillTokens = &v },
		"fraction": func(b *Thresholds) { v := 0.2; b.ActivePrefillTokensFrac = &v },
	} {
		c := config()
		set(&c.Busy)
		if r := run(t, c, Mooncake, text); r.BusyRefused == 0 || r.Completed+r.Refused() != 300 {
			t.Errorf("%s: %d refused, %d completed", name, r.BusyRefused, r.Completed)
		}
	}
	text = `{"timestamp": 0, "session_id": "s", "hash_ids": [1], "output_length": 500}
{"timestamp": 1, "session_id": "s", "hash_ids": [1], "output_length": 1}
`
	c, none := config(), 0.0
	c.Workers, c.SessionTTL, c.Busy.ActiveDecodeBlocks = 2, time.Hour, &none
	if r := run(t, c, Mooncake, text); r.BusyRefused != 1 || r.Completed != 1 {
		t.Errorf("hard: %d refused, %d completed", r.BusyRefused, r.Completed)
	}
	c.SessionSoft = true
	if r := run(t, c, Mooncake, text); r.Completed != 2 || r.Sessions.Moved != 1 {
		t.Errorf("soft: %d completed, sessions %+v", r.Completed, r.Sessions)
	}
}

// TestOwnEngines: workers may have capacities of their own; requests go only where they fit.
func TestOwnEngines(t *testing.T) {
	c := config()
	c.Workers, c.Own = 2, []Own{{Name: "a", Blocks: 4}, {Name: "b"}}
	text := `{"hash_ids": [1, 2, 3, 4, 5], "output_length": 1}` + "\n"
	c.Decided = func(d *Decision) {
		if d.Worker != 1 || len(d.Candidates) != 1 || !d.Candidates[0].Chosen {
			t.Errorf("%+v", d)
		}
	}
	if r := run(t, c, Mooncake, strings.Repeat(text, 9)); r.Completed != 9 || r.TooLarge != 0 {
		t.Errorf("%d completed", r.Completed)
	}
	c.Own = c.Own[:1]
	if err := c.Validate(); err == nil {
		t.Error("one own worker of two passed")
	}
}

// TestEventsLate: with a lag, the index knows a prompt only that long after its step.
func TestEventsLate(t *testing.T) {
	text := `{"timestamp": 0, "hash_ids": [1, 2], "output_length": 1}
{"timestamp": 1000, "hash_ids": [1, 2], "output_length": 1}
{"timestamp": 3000, "hash_ids": [1, 2], "output_length": 1}
`
	c := config()
	c.Workers, c.EventLag = 1, 2*time.Second
	var predicted, cached []int
	c.Decided = func(d *Decision) { predicted, cached = append(predicted, d.Predicted), append(cached, d.Cached) }
	run(t, c, Mooncake, text)
	if fmt.Sprint(predicted, cached) != "[0 0 32] [0 16 16]" {
		t.Errorf("predicted %v, cached %v", predicted, cached)
	}
}

// TestOpenIsBounded: requests that pile up without end are refused with the remedy.
func TestOpenIsBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	c := config()
	c.Workers = 1
	n := 0
	next := func() (*Request, error) {
		n++
		return &Request{Delay: -1, Prompt: 1, Output: 1}, nil
	}
	if _, err := Run(t.Context(), c, next, nil); err == nil || !strings.Contains(err.Error(), "set more --workers") ||
		n > maxOpen+1 {
		t.Errorf("%v after %d", err, n)
	}
}

// TestOverTime: periods double as needed, and no time is lost.
func TestOverTime(t *testing.T) {
	o := newOverTime(2)
	for i := range 1000 {
		o.add(i%4/3, time.Duration(i)*time.Second, time.Second/2)
	}
	sum := 0.0
	for _, w := range o.workers {
		for _, v := range w {
			sum += v
		}
	}
	ahead := o.ahead()
	if sum != 500 || o.length != 16*time.Second || len(ahead) != 63 || ahead[0] != 0.125 {
		t.Errorf("%v s, periods of %v, ahead %v", sum, o.length, ahead)
	}
}

// TestAdmission: with more conversations than the caches hold, those that are admitted keep their blocks. With room for
// all, admission changes nothing.
func TestAdmission(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	c := config()
	c.Engine.BlockSize, c.Engine.Blocks = 64, 400
	c.Engine.Prefill, c.Engine.Decode = Curve{0, 0.13, 2.5e-6}, Curve{12, 12, 0}
	c.QueueBound, c.QueueTimeout = 1000, 30*time.Second
	trace := generated(t, "overload", 1500, 10)
	before := run(t, c, MooncakeDelta, trace)
	c.Admission = &admission.Config{Fill: admission.DefaultFill}
	after := run(t, c, MooncakeDelta, trace)
	good := func(r *Report) float64 { return r.Goodput(time.Second, 50*time.Millisecond) }
	if after.QueueRefused == 0 || good(after) < 2*good(before) {
		t.Errorf("goodput %.2f, %d refused; without admission %.2f", good(after), after.QueueRefused, good(before))
	}
	c.Engine.Blocks = 20000
	with := run(t, c, MooncakeDelta, trace)
	c.Admission = nil
	if without := run(t, c, MooncakeDelta, trace); !reflect.DeepEqual(with, without) {
		t.Errorf("with room for all: %+v, without admission %+v", with, without)
	}
}

func TestRunErrors(t *testing.T) {
	c := config()
	c.Workers = 0
	if _, err := Run(t.Context(), c, nil, nil); err == nil || !strings.Contains(err.Error(), "0 workers") {
		t.Error(err)
	}
	unsorted := []*Request{
		{At: time.Second, Delay: -1, Prompt: 1, Output: 1},
		{At: 0, Delay: -1, Prompt: 1, Output: 1},
	}
	i := 0
	next := func() (*Request, error) {
		if i == len(unsorted) {
			return nil, io.EOF
		}
		i++
		return unsorted[i-1], nil
	}
	if _, err := Run(t.Context(), config(), next, nil); err == nil ||
		!strings.Contains(err.Error(), "sort the trace by time") {
		t.Error(err)
	}
	for _, change := range []func(*Config){
		func(c *Config) { c.Engine.Prefill = Curve{1, -1, 0} },
		func(c *Config) { c.Engine.Decode = Curve{1, -10, 10} }, // below 0 at its bend
		func(c *Config) { c.ArrivalSpeed = 1e-9 },
		func(c *Config) { c.Engine.Speed = 0 },
		func(c *Config) { c.Own = []Own{{}, {}, {Blocks: maxBlocks + 1}, {}} },
	} {
		c := config()
		if change(&c); c.Validate() == nil {
			t.Errorf("%+v passed", c)
		}
	}
	far := []*Request{
		{Delay: -1, Prompt: 1, Output: 1},
		{At: 11 * 365 * 24 * time.Hour, Delay: -1, Prompt: 1, Output: 1},
	}
	next = func() (*Request, error) {
		far = far[1:]
		return far[0], nil
	}
	far = append([]*Request{nil}, far...)
	if _, err := Run(t.Context(), config(), next, nil); err == nil || !strings.Contains(err.Error(), "ten years") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	forever := func() (*Request, error) { return &Request{Delay: -1, Prompt: 1, Output: 1}, nil }
	if _, err := Run(ctx, config(), forever, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func BenchmarkReplay(b *testing.B) {
	var text bytes.Buffer
	if err := Generate(&text, "chat", 5000, 8, 16, 1); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		r, err := NewReader("trace", bytes.NewReader(text.Bytes()), MooncakeDelta,
			ReaderOptions{BlockSize: 16, TraceBlockSize: 16})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := Run(b.Context(), config(), r.Next, nil); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/5000, "us/request")
}
