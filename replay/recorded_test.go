package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/scoring"
)

// record replays generated traffic in turns, and returns what a recording of that would be, in order of the ends.
func record(t *testing.T, kind string, requests int, rate float64, c Config) string {
	t.Helper()
	var trace strings.Builder
	if err := Generate(&trace, kind, requests, rate, 16, 1); err != nil {
		t.Fatal(err)
	}
	r, err := NewReader("generated", strings.NewReader(trace.String()), MooncakeDelta,
		ReaderOptions{BlockSize: 16, TraceBlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	c.Decided = func(d *Decision) {
		q := d.Request
		hashes := q.Chain[:q.Prompt/16]
		arrived := 1795399200000 + d.Arrived.Milliseconds()
		fmt.Fprintf(&lines, `{"event":{"schema":"dynamo.request.trace.v1","event_type":"request_end",`+
			`"event_time_unix_ms":%d,"request":{"request_id":"r","output_tokens":%d,"cached_tokens":%d,`+
			`"request_received_ms":%d,"ttft_ms":%v,"total_time_ms":%v,`+
			`"worker":{"decode_worker_id":%d},"replay":{"trace_block_size":16,"input_length":%d,`+
			`"input_sequence_hashes":%s}}}}`+"\n",
			arrived+d.E2E.Milliseconds(), q.Output, d.Cached, arrived, milli(d.TTFT), milli(d.E2E), 900+d.Worker,
			q.Prompt, strings.ReplaceAll(fmt.Sprint(hashes), " ", ","))
	}
	if _, err := Run(context.Background(), c, r.Next, nil); err != nil {
		t.Fatal(err)
	}
	return lines.String()
}

func recordingConfig() Config {
	c := Config{Workers: 4, Engine: DefaultEngineConfig(), Scoring: scoring.DefaultConfig(), ArrivalSpeed: 1}
	c.Engine.BlockSize, c.Engine.Blocks = 16, 8000
	return c
}

func readRecording(t *testing.T, text string) (func() (*Request, error), *Recording, error) {
	t.Helper()
	open := func() func() (*Request, error) {
		r, err := NewReader("recording", strings.NewReader(text), Kvepp, ReaderOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return Sorted(r.Next)
	}
	r, err := ReadRecording(open())
	if err != nil {
		return nil, nil, err
	}
	return r.Replayed(open()), r, nil
}

// TestFit: from a recording of engines whose speeds the reader does not know, it finds their times, repeats what the
// recording did, and predicts another policy.
func TestFit(t *testing.T) {
	truth := recordingConfig()
	truth.Scoring.Mode = scoring.RoundRobin
	truth.Engine.Prefill = Curve{40, 0.06, 1e-6}
	truth.Engine.Decode = Curve{9, 30, -10}
	truth.Speeds = []float64{1, 1, 1, 0.5}
	text := record(t, "chat", 300, 6, truth)
	next, r, err := readRecording(t, text)
	if err != nil {
		t.Fatal(err)
	}
	c := recordingConfig()
	for _, w := range r.Workers {
		c.Own = append(c.Own, Own{Name: w.String(), ID: w})
	}
	if err := r.Fit(t.Context(), &c); err != nil {
		t.Fatal(err)
	}
	t.Log(r.Engines)
	if len(c.Speeds) != 4 || c.Speeds[3] > 0.7*c.Speeds[0] {
		t.Errorf("speeds %v, want about 1, 1, 1, 0.5", c.Speeds)
	}
	c.Policy = Recorded
	workers, first, wantFirst, cached, wantCached, n := 0, 0.0, 0.0, 0, 0, 0
	c.Decided = func(d *Decision) {
		v := d.Request.Served
		if int(v.Worker.Instance)-900 == d.Worker {
			workers++
		}
		n++
		first, wantFirst = first+milli(d.TTFT), wantFirst+milli(v.TTFT)
		cached, wantCached = cached+d.Cached, wantCached+v.Cached
	}
	if _, err := Run(t.Context(), c, next, nil); err != nil {
		t.Fatal(err)
	}
	if workers != 300 || n != 300 {
		t.Errorf("%d of %d requests were sent where the recording did", workers, n)
	}
	if ratio := first / wantFirst; math.Abs(ratio-1) > 0.05 {
		t.Errorf("the mean time to first token is %.2f of the recorded one", ratio)
	}
	if ratio := float64(cached) / float64(wantCached); math.Abs(ratio-1) > 0.02 {
		t.Errorf("%.2f of the recorded cached tokens", ratio)
	}
}

// TestRecordingErrors: what cannot be repeated is refused with a reason.
func TestRecordingErrors(t *testing.T) {
	c := recordingConfig()
	text := record(t, "none", 12, 4, c)
	lines := strings.SplitAfter(strings.TrimSpace(text), "\n")
	for _, x := range []struct{ text, want string }{
		{"", "no request"},
		{strings.ReplaceAll(text, `"decode_worker_id"`, `"x"`), "names its worker"},
		{strings.ReplaceAll(text, `"decode_worker_id"`, `"prefill_worker_id":7,"decode_worker_id"`),
			"prefill workers computed prompts"},
		{text + strings.NewReplacer(`"trace_block_size":16`, `"trace_block_size":32`).Replace(lines[0]),
			"trace_block_size 32 after 16"},
		{text[:len(text)-40], "line 12: the line ends in the middle"},
		{strings.Replace(text, `"ttft_ms":`, `"ttft_ms":-`, 1), "ttft_ms -"},
	} {
		if _, _, err := readRecording(t, x.text); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%.80s: %v, want %q", x.text, err, x.want)
		}
	}
	for _, few := range []string{strings.ReplaceAll(text, `"ttft_ms"`, `"x"`), strings.Join(lines[:5], "")} {
		_, r, err := readRecording(t, few)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Fit(t.Context(), &c); err == nil || !strings.Contains(err.Error(), "set --prefill-ms") {
			t.Errorf("%v", err)
		}
	}
	block := 8
	_, err := ReadRecording(func() (*Request, error) { // of two files
		block *= 2
		return &Request{Served: &Served{block: block}}, nil
	})
	if err == nil || !strings.Contains(err.Error(), "blocks of 16 and of 32 tokens") {
		t.Errorf("%v", err)
	}
	_, r, err := readRecording(t, strings.ReplaceAll(text, `"output_tokens":`, `"output_tokens":1000`))
	if err != nil || len(r.sample) != 1 {
		t.Errorf("%v: the sample has %d responses of a million tokens, want 1", err, len(r.sample))
	}
	_, r, err = readRecording(t, strings.ReplaceAll(text, `"cached_tokens":0`, `"cached_tokens":400`))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Fit(t.Context(), &c); err == nil || !strings.Contains(err.Error(), "cached tokens in 0 of these") {
		t.Errorf("%v", err)
	}
}

// TestShadow: what kvepp in shadow mode says of requests is counted, also of those that it could not record; reasons
// that it does not write may not reach a terminal, nor fill the memory.
func TestShadow(t *testing.T) {
	row := func(kind, shadow string) string {
		return `{"event":{"schema":"dynamo.request.trace.v1","event_type":"` + kind + `","request":{"shadow":{` +
			shadow + `},"worker":{"decode_worker_id":1},"request_received_ms":1,"replay":{"trace_block_size":16,` +
			`"input_length":16,"input_sequence_hashes":[1]}}}}` + "\n"
	}
	text := row("request_end", `"avoided":"ejected"`) + row("request_end", `"unjudged":"several_workers"`) +
		row("kvepp_unjudged", `"unjudged":"no_address"`) + row("kvepp_unjudged", `"unjudged":"\u001b[2J"`) +
		row("request_end", `"avoided":"\u009b31m"`)
	for i := range 2 * maxReasons {
		text += row("kvepp_unjudged", `"unjudged":"`+strings.Repeat("x", i%30)+string(rune('a'+i/30))+`"`)
	}
	s := Shadow{Unjudged: map[string]int{}, Avoided: map[string]int{}}
	r, err := NewReader("recording", strings.NewReader(text), Kvepp, ReaderOptions{Shadow: s})
	if err != nil {
		t.Fatal(err)
	}
	requests := 0
	for _, err = r.Next(); err == nil; _, err = r.Next() {
		requests++
	}
	if !errors.Is(err, io.EOF) || requests != 3 {
		t.Errorf("%d requests, %v", requests, err)
	}
	if s.Unjudged["several_workers"] != 1 || s.Unjudged["no_address"] != 1 ||
		!maps.Equal(s.Avoided, map[string]int{"ejected": 1, "unreadable": 1}) {
		t.Errorf("%+v", s)
	}
	all := 0
	for reason, n := range s.Unjudged {
		if all += n; strings.ContainsAny(reason, "\x1b\u009b") {
			t.Errorf("%q", reason)
		}
	}
	if len(s.Unjudged) > maxReasons+1 || all != 3+2*maxReasons || s.Unjudged["unreadable"] < maxReasons/2 {
		t.Errorf("%d reasons, %d requests: %v", len(s.Unjudged), all, s.Unjudged)
	}
}

// TestReplayedConversations: the next turn of a conversation keeps its distance from the response before it.
func TestReplayedConversations(t *testing.T) {
	line := func(at, took int, worker, hashes string) string {
		n := strings.Count(hashes, ",") + 1
		return fmt.Sprintf(`{"event":{"schema":"dynamo.request.trace.v1","event_type":"request_end",`+
			`"event_time_unix_ms":%d,"request":{"output_tokens":3,"request_received_ms":%d,"total_time_ms":%d,%s`+
			`"replay":{"trace_block_size":16,"input_length":%d,"input_sequence_hashes":[%s]}}}}`+"\n",
			at+took, at, took, worker, n*16, hashes)
	}
	on := `"worker":{"decode_worker_id":5,"decode_dp_rank":1},`
	next, r, err := readRecording(t, line(1000, 100, on, "1,2")+
		line(1050, 500, on, "1,2,9")+ // while the first one runs
		line(1300, 100, on, "1,2,3,4")+
		line(1400, 100, "", "1,2,3,5")+
		line(1500, 100, on, "1,2,3,6"))
	if err != nil {
		t.Fatal(err)
	}
	var delays []time.Duration
	for {
		q, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		delays = append(delays, q.Delay)
	}
	if want := []time.Duration{-1, -1, 200 * time.Millisecond, -1}; !slices.Equal(delays, want) {
		t.Errorf("%v, want %v", delays, want)
	}
	if !slices.Equal(r.Workers, []WorkerID{{5, 1}}) || r.BlockSize != 16 {
		t.Errorf("%+v", r)
	}
}
