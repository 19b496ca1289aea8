package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvepp/queue"
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
	for _, w := range Workloads {
		text := generated(t, w.Name, 1000, 6)
		if again := generated(t, w.Name, 1000, 6); again != text {
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
			if r.Requests+r.TooLarge != 1000 || r.Completed != r.Requests || r.Refused != 0 {
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
	if r := run(t, c, Mooncake, text.String()); r.Refused == 0 || r.Completed+r.Refused != 200 {
		t.Errorf("%d refused, %d completed", r.Refused, r.Completed)
	}
	c.QueueBound, c.QueueTimeout = 1000, 50*time.Millisecond
	if r := run(t, c, Mooncake, text.String()); r.Refused == 0 || r.Queued.Max > 0.051 || r.Completed+r.Refused != 200 {
		t.Errorf("%d refused, %d completed, waits %+v", r.Refused, r.Completed, r.Queued)
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
