package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReplay(t *testing.T) {
	var trace, table, errs bytes.Buffer
	if status := run([]string{"replay", "--generate=chat", "--requests=200", "--trace-block-size=16"}, nil, &trace,
		&errs,
		noEnvironment); status != 0 {
		t.Fatal(status, &errs)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "chat.jsonl")
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	status := run([]string{"replay", file, "--format=mooncake-delta", "--trace-block-size=16", "--block-size=16",
		"--blocks=2000", "--router-queue-threshold=2", "--svg=" + filepath.Join(dir, "svg"),
		"--out=" + filepath.Join(dir, "out.jsonl"),
		"--compare=turn=--router-mode=round-robin --no-router-assume-kv-reuse",
		"--compare=bound=--router-session-affinity-ttl-secs=600 --router-prefill-load-model=linear",
		"--compare=busy=--active-decode-blocks-threshold=0.05", "--compare=all"},
		nil, &table, &errs, noEnvironment)
	if status != 0 {
		t.Fatal(status, &errs)
	}
	for _, want := range []string{"200 requests", "as given", "turn", "llm-d", "preble-e2", "lmetric",
		"sglang", "least-loaded", "later requests stayed"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	if !strings.Contains(errs.String(), "turn: 200 requests in") {
		t.Errorf("no progress: %q", &errs)
	}
	checkDecisions(t, filepath.Join(dir, "out.jsonl"))
	for _, name := range []string{"cached", "ttft", "itl", "e2e", "balance"} {
		text, err := os.ReadFile(filepath.Join(dir, "svg", name+".svg"))
		if err != nil || !bytes.Contains(text, []byte(">bound</text>")) || xml.Unmarshal(text, new(struct{})) != nil {
			t.Errorf("%s.svg: %v\n%s", name, err, text)
		}
	}
}

// checkDecisions checks the file of --out: a line for each of 200 requests and 15 settings, with the chosen candidate.
func checkDecisions(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	count, refused := map[string]int{}, 0
	for _, line := range bytes.Split(bytes.TrimSpace(text), []byte("\n")) {
		var d struct {
			Setting    string
			Prompt     int `json:"prompt_tokens"`
			Candidates []struct {
				Worker string
				Chosen bool
			}
			Served *struct {
				Worker string
				Cached int     `json:"cached_tokens"`
				TTFT   float64 `json:"ttft_ms"`
				E2E    float64 `json:"e2e_ms"`
			}
		}
		if err := json.Unmarshal(line, &d); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		count[d.Setting]++
		if d.Served == nil {
			refused++
			continue
		}
		chosen := ""
		for _, c := range d.Candidates {
			if c.Chosen {
				chosen = c.Worker
			}
		}
		if s := d.Served; chosen != s.Worker || len(d.Candidates) > 4 ||
			s.TTFT <= 0 || s.E2E < s.TTFT || s.Cached > d.Prompt {
			t.Errorf("%s", line)
		}
	}
	for setting, n := range count {
		if n != 200 {
			t.Errorf("%s: %d lines", setting, n)
		}
	}
	if len(count) != 15 || refused == 0 || refused > 200 {
		t.Errorf("%d settings, %d refused", len(count), refused)
	}
}

// TestShippedTrace: the trace of examples/replay is what --generate writes, as docs/replay.md says.
func TestShippedTrace(t *testing.T) {
	f, err := os.Open("../../examples/replay/chat.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	shipped, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	var trace, errs bytes.Buffer
	status := run([]string{"replay", "--generate=chat", "--requests=2000", "--rate=16", "--trace-block-size=64"}, nil,
		&trace, &errs, noEnvironment)
	if status != 0 || !bytes.Equal(shipped, trace.Bytes()) {
		t.Errorf("--generate writes another trace (%d, %s): run make replay-charts", status, &errs)
	}
}

func TestReplayErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.jsonl")
	if err := os.WriteFile(file, []byte("{\"hash_ids\": [1], \"output_length\": 1}\nnonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"", 2, "which trace?"},
		{"absent.jsonl", 1, "absent.jsonl: no such file"},
		{file, 1, "a.jsonl, line 2: invalid character"},
		{file + " --format=json", 2, "--format"},
		{file + " --format=mooncake --compare=recorded", 1, "--format mooncake: what a recording did is only known"},
		{file + " --compare=recorded", 1, "line 1: schema"},
		{file + " --report", 1, "line 1: schema"},
		{file + " --report=page.svg", 2, "--report=page.svg: must be text, json, or a file"},
		{file + " --report --compare=measured=--replicas=2", 2, "--compare measured: another line has this name"},
		{file + " --workers=0", 2, "0 workers: must be 1 to"},
		{file + " --router-policy=fortune", 2, "--router-policy \"fortune\""},
		{file + " --router-mode=direct", 2, "--router-mode \"direct\""},
		{file + " --prefill-ms=1,2", 2, "--prefill-ms \"1,2\": must be three numbers"},
		{file + " --compare=x", 2, "--compare \"x\": must be NAME=FLAGS"},
		{file + " --compare=x=--workers=3", 2, "--compare x: unknown flag --workers"},
		{file + " --compare=x=--router-temperature=-1", 2, "--compare x: "},
		{file + " --event-lag=-1s", 2, "--event-lag -1s"},
		{file + " --arrival-jitter=-1ms", 2, "--arrival-jitter -1ms: must be at least 0"},
		{file + " --replicas=0", 2, "--replicas 0: must be at least 1"},
		{file + " --replicas=65", 2, "65 replicas: must be 1 to 64"},
		{file + " --replica-delay=never", 2, "--replica-delay \"never\": must be a time"},
		{file + " --replicas=2 --router-policy=llm-d", 2, "several replicas: only with the policies of kvepp serve"},
		{file + " --trace-block-size=0", 2, "--trace-block-size 0"},
		{file + " --compare=x=--event-lag=1s --compare=x=--event-lag=2s", 2, "--compare x: another line has this name"},
		{file + " --active-decode-blocks-threshold=2", 2, "--active-decode-blocks-threshold must be between"},
		{file + " --router-session-affinity-mode=firm", 2, "--router-session-affinity-mode"},
		{file + " --endpoints=absent.yaml", 2, "--endpoints: open absent.yaml"},
		{file + " --out=absent/out.jsonl", 1, "--out: open absent/out.jsonl"},
		{file + " --prefill-ms=-1,0,0", 2, "the prefill curve gives -1 ms at 0"},
		{file + " --speed=0", 2, "a speed of 0"},
		{file + " " + file + " --format=agentic_mooncake", 2, "one file"},
		{"--generate=chats", 2, "--generate \"chats\": must be one of chat,"},
		{"--generate=chat --rate=0", 1, "must be above 0"},
	} {
		var out, errs bytes.Buffer
		if status := run(append([]string{"replay"}, strings.Fields(c.args)...), nil, &out, &errs,
			noEnvironment); status != c.status ||
			!strings.Contains(errs.String(), c.want) {
			t.Errorf("%s: %d, %s; want %d, %s", c.args, status, &errs, c.status, c.want)
		}
	}
}
