package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"kvepp/replay"
	"kvepp/scoring"
)

// recordingOf writes a recording of two hours on two workers: pairs of requests for one prompt of 128 blocks, the
// second of them reported as cached, and requests that kvepp could not judge.
func recordingOf(t *testing.T) string {
	t.Helper()
	var hashes []string
	for i := range 128 {
		hashes = append(hashes, fmt.Sprint(i+1))
	}
	var lines strings.Builder
	for i := range 42 {
		more, worker := "", fmt.Sprintf(`"worker":{"decode_worker_id":%d},`, 7+i/2%2)
		switch i {
		case 20:
			more = `"shadow":{"avoided":"ejected"},`
		case 40:
			more = `"shadow":{"unjudged":"would_refuse"},`
		case 41:
			worker, more = "", `"shadow":{"unjudged":"not_sampled"},`
		}
		at := 1795399200000 + i*180_000 // 20 an hour
		fmt.Fprintf(&lines, `{"event":{"schema":"dynamo.request.trace.v1","event_type":"request_end",`+
			`"event_time_unix_ms":%d,"request":{"output_tokens":11,"cached_tokens":%d,"request_received_ms":%d,`+
			`"ttft_ms":%d,"total_time_ms":%d,%s%s"replay":{"trace_block_size":16,"input_length":2048,`+
			`"input_sequence_hashes":[%d%s]}}}}`+"\n",
			at+500, 2032*(i%2), at, 240-200*(i%2), 440-200*(i%2), worker, more, 1000+i/2,
			","+strings.Join(hashes[1:], ","))
	}
	path := filepath.Join(t.TempDir(), "recording.jsonl")
	if err := os.WriteFile(path, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestReport: the report has what the recording measured beside the replays, for all and for each hour, and says how
// many requests it cannot judge.
func TestReport(t *testing.T) {
	recording := recordingOf(t)
	page := filepath.Join(t.TempDir(), "page.html")
	run := func(as string) string {
		var c Config
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		c.AddFlags(f)
		if err := f.Parse([]string{recording, "--report=" + as, "--blocks=4000"}); err != nil {
			t.Fatal(err)
		}
		if err := c.Validate(f.Args()); err != nil {
			t.Fatal(err)
		}
		c.Base.Scoring = scoring.DefaultConfig()
		settings := []Setting{{"recorded", c.Base}, {"kvepp", c.Base}}
		settings[0].Config.Policy = replay.Recorded
		var out strings.Builder
		if err := c.Run(t.Context(), settings, &out, io.Discard); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	var got beside
	if err := json.Unmarshal([]byte(run("json")), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Hours) != 3 || len(got.Workers) != 2 || got.Unjudged["would_refuse"] != 1 ||
		got.Unjudged["not_sampled"] != 1 || got.Avoided["ejected"] != 1 || got.Reported != 41 {
		t.Errorf("%+v", got)
	}
	was, again := got.All.Sides[0], got.All.Sides[1]
	if was.Name != "measured" || was.Requests != 41 || was.Cached != 20*2032 || was.Computed != 41*2048-20*2032 ||
		was.TTFT.P50 < 239 || was.TTFT.P50 > 241 || was.Hottest < 51 || was.Hottest > 52 {
		t.Errorf("measured: %+v", was)
	}
	if again.Name != "recorded" || again.Cached != was.Cached || again.TTFT.Mean < 0.9*was.TTFT.Mean ||
		again.TTFT.Mean > 1.1*was.TTFT.Mean || again.Hottest != was.Hottest {
		t.Errorf("recorded: %+v, measured %+v", again, was)
	}
	if hour := got.Hours[0].Sides[0]; hour.Requests != 20 || hour.Cached != 10*2032 {
		t.Errorf("first hour: %+v", hour)
	}
	if got.All.Sides[2].Name != "kvepp" || len(got.Kinds) != 4 || got.Kinds[0].Sides[2].TTFT.Mean <= 0 {
		t.Errorf("%+v, %+v", got.All.Sides[2], got.Kinds)
	}
	checkText(t, run, page)
}

// TestNothingJudged: if kvepp could judge no request, the error says why, without control characters of the recording.
func TestNothingJudged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording.jsonl")
	row := `{"event":{"schema":"dynamo.request.trace.v1","event_type":"kvepp_unjudged","request":{"shadow":{` +
		`"unjudged":"%s"}}}}` + "\n"
	text := fmt.Sprintf(row, "no_address") + fmt.Sprintf(row, `\u001b[2J`)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var c Config
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(f)
	if err := cmp.Or(f.Parse([]string{path, "--report"}), c.Validate(f.Args())); err != nil {
		t.Fatal(err)
	}
	settings := []Setting{{"recorded", c.Base}}
	settings[0].Config.Policy = replay.Recorded
	err := c.Run(t.Context(), settings, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "could not judge: no_address 1, unreadable 1") {
		t.Errorf("%q", err)
	}
}

// checkText checks the text, and the page that has it too.
func checkText(t *testing.T, run func(string) string, page string) {
	t.Helper()
	text := run("text")
	for _, want := range []string{"no_worker 1, not_sampled 1, would_refuse 1.",
		"41 with a measured", "ejected 1", "kvepp did not read 1 of the requests (--shadow-share)", "How far to trust",
		"measured", "recorded", "kvepp", "prompt of 1k to 4k tokens"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if both := run(page); both != text {
		t.Errorf("with a page the text is\n%s, and without\n%s", both, text)
	}
	html, err := os.ReadFile(page)
	if err != nil || strings.Count(string(html), "<svg") != 4 ||
		!strings.Contains(string(html), "not_sampled 1") || strings.Contains(string(html), "%!") {
		t.Errorf("%v\n%s", err, html)
	}
}

// TestKinds: the means of a kind are of what completed on each side, although a replay may refuse requests, and may
// find another part of a prompt repeated; a response in one piece counts with its whole time.
func TestKinds(t *testing.T) {
	b := newBeside([]Setting{{Name: "recorded"}, {Name: "kvepp"}}, &replay.Recording{})
	decision := func(outcome replay.Outcome, possible int, ttft, took time.Duration) *replay.Decision {
		return &replay.Decision{Outcome: outcome, Possible: possible, TTFT: ttft, E2E: took,
			Request: &replay.Request{Prompt: 100, Output: 2, Served: &replay.Served{TTFT: ttft, Took: took}}}
	}
	streamed := decision(replay.Completed, 0, time.Second, 2*time.Second)
	b.add(0, streamed)
	b.add(0, streamed)
	b.add(1, decision(replay.Completed, 90, time.Second, 2*time.Second))
	b.add(1, decision(replay.RefusedQueue, 0, 0, 0))
	whole := decision(replay.Completed, 0, 4*time.Second, 4*time.Second)
	b.add(0, whole)
	whole.TTFT = time.Second // of the model engine
	b.add(1, whole)
	unknown := decision(replay.Completed, 0, 0, 0)
	b.add(0, unknown)
	unknown.E2E = time.Second
	b.add(1, unknown)
	b.finish()
	if _, err := json.Marshal(b); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, k := range b.Kinds {
		got[k.Name] = fmt.Sprintf("%d %.0f %.0f %.0f", k.Sides[0].Requests, k.Sides[0].TTFT.Mean,
			k.Sides[1].TTFT.Mean, k.Sides[2].TTFT.Mean)
	}
	want := map[string]string{"streamed": "2 1000 1000 1000", "in one piece": "2 4000 4000 4000",
		"prompt below 1k tokens": "4 2000 2000 2500", "less than a quarter repeated": "4 2000 2000 4000",
		"three quarters repeated, or more": "0 0 0 1000"}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
