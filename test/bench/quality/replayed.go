package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/replay"
	"kvepp/test/harness/stack"
)

// replayFlags are those with which kvepp replay models a scenario's workers.
func (sc *scenario) replayFlags() []string {
	mocker := replay.DefaultEngineConfig()
	curve := func(c replay.Curve, speedup float64) string {
		return fmt.Sprintf("%g,%g,%g", c[0]/speedup, c[1]/speedup, c[2]/speedup)
	}
	e := sc.engines()
	flags := []string{"--format", "agentic_mooncake", "--block-size", strconv.Itoa(stack.BlockSize),
		"--workers", strconv.Itoa(e.workers), "--blocks", strconv.Itoa(e.blocks),
		"--prefill-ms", curve(mocker.Prefill, e.speedup), "--decode-ms", curve(mocker.Decode, e.speedup*e.decode)}
	if len(sc.speeds) > 0 {
		var speeds []string
		for _, s := range sc.speeds {
			speeds = append(speeds, strconv.FormatFloat(s, 'g', -1, 64))
		}
		flags = append(flags, "--engine-speeds", strings.Join(speeds, ","))
	}
	return flags
}

// replayFlags are the flags of kvepp replay for a router.
func (sys *system) replayFlags() []string {
	switch sys.frontend {
	case "":
		return slices.DeleteFunc(slices.Clone(sys.flags), func(f string) bool { return f == tokenIDs })
	case "kv":
		return []string{"--router-policy=dynamo"}
	}
	return []string{"--router-mode=" + sys.frontend}
}

// Each run is replayed with replaySeeds seeds, because ties and times of delivery are drawn. A request reaches its
// engine up to replayDelay after the choice: the bursts of the bench take that long to pass Envoy and kvepp.
const replaySeeds, replayDelay = 5, "10ms"

// replayed returns what kvepp replay predicts of a run's requests with a seed.
func (o *options) replayed(ctx context.Context, sc *scenario, sys *system, r *run, seed int) ([]sample, error) {
	out, err := os.CreateTemp("", "kvepp-quality-*.jsonl")
	if err != nil {
		return nil, err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	args := append([]string{"replay", filepath.Join(o.out, r.traceFile()), "--out", out.Name(),
		"--seed", strconv.Itoa(seed), "--delivery-delay", replayDelay}, sc.replayFlags()...)
	var said bytes.Buffer
	c := exec.CommandContext(ctx, "bin/kvepp", append(args, sys.replayFlags()...)...)
	c.Stderr = &said
	if err := c.Run(); err != nil {
		return nil, fmt.Errorf("%v: %w: %s", c.Args, err, said.Bytes())
	}
	var all []sample
	lines := json.NewDecoder(bufio.NewReader(out))
	for lines.More() {
		var line struct {
			Prompt int `json:"prompt_tokens"`
			Output int `json:"output_tokens"`
			Served *struct {
				Worker string  `json:"worker"`
				Cached int     `json:"cached_tokens"`
				TTFT   float64 `json:"ttft_ms"`
				ITL    float64 `json:"itl_ms"`
				E2E    float64 `json:"e2e_ms"`
			} `json:"served"`
		}
		if err := lines.Decode(&line); err != nil {
			return nil, err
		}
		x := sample{Prompt: line.Prompt, Output: line.Output, Failed: line.Served == nil}
		if s := line.Served; s != nil {
			x.Worker, x.Cached, x.TTFT, x.EndToEnd, x.Gap = s.Worker, s.Cached, s.TTFT, s.E2E, s.ITL
		}
		all = append(all, x)
	}
	return all, nil
}

// replays are the runs of a router in a scenario: of each column, the values that clients measured, and those that
// kvepp replay predicts, of each run the mean of its seeds.
type replays struct {
	scenario, router    string
	measured, predicted [len(replayColumns)][]float64
}

// compareWithReplay replays the traces of all runs that the folder has, and prints what clients measured beside what
// kvepp replay predicts, in Markdown: means of all runs, and by how much the prediction is more.
func (o *options) compareWithReplay(ctx context.Context, to io.Writer) error {
	runs, err := o.load()
	if err != nil {
		return err
	}
	var all []*replays
	for i := range runs {
		r := &runs[i]
		sc, sys := r.origin()
		_, err := os.Stat(filepath.Join(o.out, r.traceFile()))
		if err != nil || sc == nil || sys == nil || sc.later > 0 { // kvepp replay has no worker that joins
			continue
		}
		at := slices.IndexFunc(all, func(x *replays) bool {
			return x.scenario == sc.name && x.router == sys.name
		})
		if at < 0 {
			at = len(all)
			all = append(all, &replays{scenario: sc.name, router: sys.name})
		}
		if err := o.addReplays(ctx, all[at], sc, sys, r); err != nil {
			return err
		}
	}
	fmt.Fprint(to, "| scenario | router | runs | cached %: measured, replayed (points more) | TTFT mean, ms | p90 | "+
		"end to end, s | goodput % |\n|---|---|---|---|---|---|---|---|\n")
	for _, x := range all {
		fmt.Fprintf(to, "| %s | %s | %d |", x.scenario, x.router, len(x.measured[0]))
		for i, c := range replayColumns {
			m, p := mean(x.measured[i]), mean(x.predicted[i])
			fmt.Fprintf(to, " "+c.format+", "+c.format, m, p)
			if c.share {
				fmt.Fprintf(to, " (%+.1f) |", p-m)
			} else {
				fmt.Fprintf(to, " (%+.0f %%) |", 100*(p/m-1))
			}
		}
		fmt.Fprintln(to)
	}
	return nil
}

// addReplays replays a run and adds it to x.
func (o *options) addReplays(ctx context.Context, x *replays, sc *scenario, sys *system, r *run) error {
	var predicted [len(replayColumns)]float64
	for seed := range replaySeeds {
		samples, err := o.replayed(ctx, sc, sys, r, seed)
		if err != nil {
			return err
		}
		for i, c := range replayColumns {
			predicted[i] += c.value(samples) / replaySeeds
		}
	}
	for i, c := range replayColumns {
		x.measured[i] = append(x.measured[i], c.value(r.Samples))
		x.predicted[i] = append(x.predicted[i], predicted[i])
	}
	return nil
}

// origin returns a run's scenario and router; nil: the bench does not have it any more.
func (r *run) origin() (sc *scenario, sys *system) {
	if i := slices.IndexFunc(scenarios, func(sc scenario) bool { return sc.name == r.Scenario }); i >= 0 {
		sc = &scenarios[i]
	}
	if i := slices.IndexFunc(systems, func(sys system) bool { return sys.name == r.Router }); i >= 0 {
		sys = &systems[i]
	}
	return sc, sys
}

// replayColumns are what compareWithReplay compares. The difference of shares is in points.
var replayColumns = [...]struct {
	value  func([]sample) float64
	format string
	share  bool
}{
	{func(s []sample) float64 { c, _ := cachedOf(s); return 100 * c }, "%.1f", true},
	{func(s []sample) float64 { return mean(values(s, ttft)) }, "%.0f", false},
	{func(s []sample) float64 { return percentile(values(s, ttft), 0.9) }, "%.0f", false},
	{func(s []sample) float64 { return mean(values(s, endToEnd)) / 1000 }, "%.2f", false},
	{func(s []sample) float64 { return 100 * goodput(s) }, "%.0f", true},
}

// outputTokens is how many tokens the text of an output token has when the next prompt repeats it, measured with the
// mockers. templateTokens are those that the chat template adds for each message.
const outputTokens, templateTokens = 1.1, 3

// plan writes the traces that the scenarios would send, with estimated numbers of tokens, so that policies can be tried
// by kvepp replay on many seeds. Each file's name is followed by the flags for kvepp replay.
func (o *options) plan(to io.Writer) error {
	for seed := o.first; seed < o.first+o.seeds; seed++ {
		for i := range scenarios {
			sc := &scenarios[i]
			if sc.later > 0 || !o.named(sc) {
				continue
			}
			r := run{Scenario: sc.name, Router: "plan", Seed: uint64(seed)}
			var rec recorder
			for n, s := range sc.make(newWriter(r.Seed)) {
				rec.plan(&s, strconv.Itoa(n), s.at, nil)
			}
			if err := rec.write(o.out, r.traceFile()); err != nil {
				return err
			}
			fmt.Fprintln(to, filepath.Join(o.out, r.traceFile()), strings.Join(sc.replayFlags(), " "))
		}
	}
	return nil
}

// plan adds a conversation and those of its subagents, as player.hold does, and returns the name of its last request.
func (r *recorder) plan(s *session, name string, at time.Duration, after []dependency) (last string) {
	tokens := func(text string) int { return int(float64(len(strings.Fields(text))) * tokensPerWord) }
	var blocks []int
	prompt := 0
	if s.system != "" {
		prompt = tokens(s.system) + templateTokens
		blocks = r.system(s.system, prompt)
	}
	for i, t := range s.turns {
		if i > 0 {
			after = []dependency{{last, "completion", ms(t.think)}}
		}
		if len(t.subagents) > 0 {
			var ends []dependency
			for j := range t.subagents {
				ends = append(ends, dependency{
					r.plan(&t.subagents[j], turnOf(turnOf(name, i), j), at, after), "completion", 0})
			}
			after = ends
		}
		last = turnOf(name, i)
		prompt += tokens(t.text) + templateTokens
		blocks = r.add(last, at, after, blocks, prompt, t.output)
		prompt += int(outputTokens*float64(t.output)) + templateTokens
	}
	return last
}
