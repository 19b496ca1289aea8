package main

import (
	"bytes"
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
	file := filepath.Join(t.TempDir(), "chat.jsonl")
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	status := run([]string{"replay", file, "--format=mooncake-delta", "--trace-block-size=16", "--block-size=16",
		"--blocks=2000", "--router-queue-threshold=2",
		"--compare=turn=--router-mode=round-robin --no-router-assume-kv-reuse", "--compare=all"},
		nil, &table, &errs, noEnvironment)
	if status != 0 {
		t.Fatal(status, &errs)
	}
	for _, want := range []string{"200 requests", "as given", "turn", "llm-d", "preble-e2", "lmetric",
		"sglang", "least-loaded"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	if !strings.Contains(errs.String(), "turn: 200 requests in") {
		t.Errorf("no progress: %q", &errs)
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
		{file + " --workers=0", 2, "0 workers: must be 1 to"},
		{file + " --router-policy=fortune", 2, "--router-policy \"fortune\""},
		{file + " --router-mode=direct", 2, "--router-mode \"direct\""},
		{file + " --prefill-ms=1,2", 2, "--prefill-ms \"1,2\": must be three numbers"},
		{file + " --compare=x", 2, "--compare \"x\": must be NAME=FLAGS"},
		{file + " --compare=x=--workers=3", 2, "--compare x: unknown flag --workers"},
		{file + " --compare=x=--router-temperature=-1", 2, "--compare x: "},
		{file + " --event-lag=-1s", 2, "--event-lag -1s"},
		{file + " --trace-block-size=0", 2, "--trace-block-size 0"},
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
