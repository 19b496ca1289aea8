package main

import (
	"bytes"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// played returns a run whose times to first token have this mean, with another part for each conversation.
func played(router string, seed uint64, ttft float64) run {
	r := run{Scenario: "burst", Router: router, Seed: seed, Workers: 2, Floor: 100}
	rng := rand.New(rand.NewPCG(seed, 1)) // the same conversations for each router
	for c := range 40 {
		for range 3 {
			r.Samples = append(r.Samples, sample{Conversation: c, TTFT: ttft * (0.5 + rng.Float64()),
				EndToEnd: 2 * ttft, Gap: 10, Prompt: 1000, Cached: 400, Possible: 800, Output: 10, Worker: "a"})
		}
	}
	return r
}

// TestRatio checks the median of paired ratios, and that its interval holds it and grows with what differs.
func TestRatio(t *testing.T) {
	runs := []run{played(baseline, 1, 200), played("kvepp time", 1, 100), played(baseline, 2, 400),
		played("kvepp time", 2, 300), played(baseline, 3, 400), played("kvepp time", 3, 240), played(baseline, 4, 400)}
	all := pairs(runs, "burst", "kvepp time", baseline)
	if len(all) != 3 {
		t.Fatalf("%d pairs, want 3", len(all))
	}
	rng := rand.New(rand.NewPCG(1, 2))
	median, low, high := measures[0].ratio(all, rng)
	if math.Abs(median-0.6) > 1e-9 || low > 0.51 || low < 0.45 || high < 0.74 || high > 0.8 {
		t.Errorf("%.3f (%.3f-%.3f), want 0.6 between about 0.5 and 0.75, the ratios of the seeds", median, low, high)
	}
	if _, low, high := measures[0].ratio(all[:1], rng); low < 0.499 || high > 0.501 {
		t.Errorf("%.3f-%.3f for one seed in which both routers differ by a constant factor, want 0.5", low, high)
	}
	above := measures[4]
	base, fast := mean(values(runs[0].Samples, ttft)), mean(values(runs[1].Samples, ttft))
	if got, _, _ := above.ratio(all[:1], rng); math.Abs(got-(fast-100)/(base-100)) > 1e-9 {
		t.Errorf("above the floor: %.3f, want %.3f", got, (fast-100)/(base-100))
	}
}

// TestRunsAreKept checks that runs in a folder are read again, the later of two equal ones, and give tables and a
// chart.
func TestRunsAreKept(t *testing.T) {
	o := options{out: filepath.Join(t.TempDir(), "out")}
	failed := played("kvepp time", 1, 150)
	failed.Samples[0].Failed = true
	for _, r := range []run{played(baseline, 1, 200), played("kvepp time", 1, 100), failed} {
		if err := o.keep(r); err != nil {
			t.Fatal(err)
		}
	}
	runs, err := o.load()
	if err != nil || len(runs) != 2 || runs[1].failures() != 1 {
		t.Fatalf("%d runs, %v", len(runs), err)
	}
	if got := goodput(runs[1].Samples); math.Abs(got-119./120) > 1e-9 {
		t.Errorf("goodput %v with one failed request of 120", got)
	}
	if ofPrompt, ofPossible := cachedOf(runs[0].Samples); ofPrompt != 0.4 || ofPossible != 0.5 {
		t.Errorf("cached %v of the prompts and %v of what is possible, want 0.4 and 0.5", ofPrompt, ofPossible)
	}
	var text bytes.Buffer
	if err := o.report(&text); err != nil {
		t.Fatal(err)
	}
	chart, err := os.ReadFile(filepath.Join(o.out, "quality.svg"))
	if !strings.Contains(text.String(), "| burst | kvepp time | 0.7") || err != nil ||
		!strings.Contains(string(chart), "burst, kvepp time") {
		t.Errorf("%v\n%s\n%s", err, text.String(), chart)
	}
}

// TestReplicasAreComparedWithOne: runs of several replicas give a table of ratios to one kvepp, without runs of Dynamo.
func TestReplicasAreComparedWithOne(t *testing.T) {
	two := replicated(2)
	before := systems
	systems = append(systems[:len(systems):len(systems)], two...)
	defer func() { systems = before }()
	o := options{runs: []run{played(single, 1, 200), played(two[0].name, 1, 210), played(two[1].name, 1, 300)}}
	for i := range o.runs[2].Samples {
		o.runs[2].Samples[i].Cached = 300
	}
	var text bytes.Buffer
	if err := o.report(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Ratios to kvepp time,",
		"| burst | kvepp time 2 replicas | 1.000 (1.000-1.000) | 1.050",
		"|  | kvepp time 2 replicas unshared | 0.750 (0.750-0.750) | 1.500"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, text.String())
		}
	}
	if strings.Contains(text.String(), "Ratios to "+baseline) {
		t.Errorf("ratios to a router that did not play:\n%s", text.String())
	}
}
