package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// dynamosReplay prints, for each file of mooncake-delta rows and each router mode, what Dynamo's own offline replay
// reports: cached share, mean time to first token in ms, and mean end to end in ms. The kv router breaks ties by
// chance, so its numbers are the means of as many runs as the first argument says.
const dynamosReplay = `
import json, sys
from dynamo.replay.api import run_trace_replay
def replay(file, mode):
    s = run_trace_replay(
        file, trace_format="mooncake-delta", trace_block_size=64, num_workers=4, router_mode=mode
    ).summary
    return [s["first_admission_prefix_cache_reused_ratio"], s["mean_ttft_ms"], s["mean_e2e_latency_ms"]]
answers = []
for file in sys.argv[2:]:
    answers.append(replay(file, "round_robin"))
    runs = [replay(file, "kv_router") for _ in range(int(sys.argv[1]))]
    answers.append([sum(values) / len(runs) for values in zip(*runs)])
json.dump(answers, open("answers.json", "w"))
`

// replayLine is a line of the first table of kvepp replay: name, cached share, TTFT mean. e2eLine is one of the second:
// name, gap mean, p50, p90, p99 and max, and end to end mean.
var (
	replayLine = regexp.MustCompile(`(?m)^ *([a-z0-9-]+) +([0-9.]+) +([0-9]+)(?: +[0-9.]+){9}$`)
	e2eLine    = regexp.MustCompile(`(?m)^ *([a-z0-9-]+)(?: +[0-9.]+){5} +([0-9.]+)(?: +[0-9.]+){4}$`)
)

// replayRuns is how many runs of the kv router are averaged, of Dynamo's replay and of kvepp's.
const replayRuns = 5

// TestReplayAgreesWithDynamo replays synthetic traces with kvepp replay and with Dynamo's own offline replay. In turns
// nothing depends on chance, and the two are equal up to rounding. The kv router breaks ties by chance: single runs of
// Dynamo's differ by up to 0.8 points of the cached share, so the means of several runs of each are compared.
func TestReplayAgreesWithDynamo(t *testing.T) {
	dir := t.TempDir()
	workloads := []struct {
		kind string
		rate int
	}{{"chat", 6}, {"chat", 16}, {"agents", 2}, {"zipf", 10}, {"burst", 10}, {"none", 6}}
	kvepp := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "../bin/kvepp", append([]string{"replay"}, args...)...)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", cmd, err)
		}
		return string(out)
	}
	var files []string
	for _, w := range workloads {
		file := filepath.Join(dir, fmt.Sprintf("%s-%d.jsonl", w.kind, w.rate))
		trace := kvepp("--generate", w.kind, "--requests", "1500", "--rate", strconv.Itoa(w.rate), "--trace-block-size",
			"64")
		if err := os.WriteFile(file, []byte(trace), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	oracle := exec.CommandContext(t.Context(), filepath.Join(os.Getenv("KVEPP_TOOLS"), "bin/python"),
		append([]string{"-c", dynamosReplay, strconv.Itoa(replayRuns)}, files...)...)
	oracle.Dir, oracle.Env = dir, append(os.Environ(), "DYN_LOG=error")
	if out, err := oracle.CombinedOutput(); err != nil {
		t.Fatalf("Dynamo's replay: %v\n%s", err, out)
	}
	var responses [][3]float64
	text, err := os.ReadFile(filepath.Join(dir, "answers.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &responses); err != nil || len(responses) != 2*len(files) {
		t.Fatal(err, len(responses))
	}
	for i, file := range files {
		var kv [3]float64
		for seed := range replayRuns {
			flags := []string{file, "--format=mooncake-delta", "--trace-block-size=64", fmt.Sprint("--seed=", seed)}
			if seed == 0 {
				flags = append(flags, "--compare=turn=--router-mode=round-robin")
			}
			text := strings.ReplaceAll(kvepp(flags...), "as given", "as-given")
			lines, ends := replayLine.FindAllStringSubmatch(text, -1), e2eLine.FindAllStringSubmatch(text, -1)
			if want := len(flags) - 3; len(lines) != want || len(ends) != want {
				t.Fatalf("%d and %d lines, want %d, of\n%s", len(lines), len(ends), want, text)
			}
			for n, line := range lines {
				var got [3]float64
				got[0], _ = strconv.ParseFloat(line[2], 64)
				got[1], _ = strconv.ParseFloat(line[3], 64)
				got[2], _ = strconv.ParseFloat(ends[n][2], 64)
				got[0], got[2] = got[0]/100, got[2]*1e3
				if line[1] == "turn" {
					agrees(t, filepath.Base(file)+", in turn", got, responses[2*i], 0.001, 0.01)
				} else {
					for k := range kv {
						kv[k] += got[k] / replayRuns
					}
				}
			}
		}
		agrees(t, filepath.Base(file)+", kv", kv, responses[2*i+1], 0.01, 0.05)
	}
}

// agrees compares a cached share by its difference, and times by their ratio; 1 ms and 10 ms are the table's rounding.
func agrees(t *testing.T, name string, got, want [3]float64, points, ratio float64) {
	t.Helper()
	t.Logf("%s: cached %.3f of Dynamo's %.3f, TTFT %.1f of %.1f ms, end to end %.0f of %.0f ms",
		name, got[0], want[0], got[1], want[1], got[2], want[2])
	if math.Abs(got[0]-want[0]) > points || math.Abs(got[1]-want[1]) > ratio*want[1]+1 ||
		math.Abs(got[2]-want[2]) > ratio*want[2]+10 {
		t.Errorf("%s: differs by more than %v of the cached share or %v of a time", name, points, ratio)
	}
}
