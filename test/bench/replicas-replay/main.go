// Command replicas-replay replays generated traffic with one replica of kvepp and with several, and prints what the
// several have relative to the one: medians of ratios that are paired by seed. The page docs/replay.md has its table.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"kvepp/replay"
	"kvepp/scoring"
)

// traffic is one line of the table for each setting.
type traffic struct {
	name, generate string
	rate           float64
	requests       int
	workers        int
	engine         func(*replay.EngineConfig)
	speeds         []float64
}

// small is about an 8B model on one GPU, and large about a 70B model on four. The others are Dynamo's mockers.
func small(e *replay.EngineConfig) {
	e.Prefill, e.Decode, e.Blocks = replay.Curve{0, 0.035, 1e-6}, replay.Curve{6, 11, 0}, 4000
}

func smallBlocks(e *replay.EngineConfig) {
	small(e)
	e.BlockSize, e.Blocks = 32, 7800
}

func large(e *replay.EngineConfig) {
	e.Prefill, e.Decode, e.Blocks = replay.Curve{0, 0.13, 2.5e-6}, replay.Curve{12, 12, 0}, 6000
}

func mocker(e *replay.EngineConfig) { e.Blocks = 3000 }

var all = []traffic{
	{"chat", "chat", 72, 4000, 16, smallBlocks, nil},
	{"agents", "agents", 8, 3000, 8, large, nil},
	{"mixed", "mixed", 16, 3000, 8, small, nil},
	{"overload", "overload", 20, 4000, 8, func(e *replay.EngineConfig) { large(e); e.Blocks = 1600 }, nil},
	{"unequal", "chat", 72, 4000, 16, smallBlocks, []float64{1, 1, 1, 0.5}},
	{"none", "none", 30, 3000, 16, mocker, nil},
	{"burst", "burst", 40, 3000, 16, mocker, nil},
	{"zipf", "zipf", 40, 3000, 16, mocker, nil},
}

// setting is one replay of a trace.
type setting struct {
	policy   scoring.Policy
	replicas int
	delay    string // off: nothing is shared
}

// result is what a replay had: the cached share, and the time to first token.
type result [5]float64

func main() {
	seeds := flag.Int("seeds", 3, "how many seeds, `N`")
	from := flag.Uint64("from", 1, "the first seed, `N`")
	only := flag.String("traffic", "", "`NAMES` of the traffic, by comma; all by default")
	replicas := flag.Int("replicas", 4, "replicas, `N`")
	delays := flag.String("delays", "2ms,5ms,20ms,off",
		"`TIMES` until replicas know of each other, by comma; off: never")
	intervals := flag.Bool("intervals", false, "print the 95 % interval of each median, from the ranks of the ratios")
	policies := flag.String("policies", "dynamo,time", "`NAMES` of policies, by comma")
	flag.Parse()
	fmt.Println("| traffic | policy | delay | cached | TTFT mean | p50 | p90 | p99 |")
	fmt.Println("|---|---|---|---|---|---|---|---|")
	for _, t := range all {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), t.name) {
			continue
		}
		for policy := range strings.SplitSeq(*policies, ",") {
			p, err := scoring.ParsePolicy(policy)
			if err == nil {
				err = compare(&t, p, *replicas, strings.Split(*delays, ","), *from, *seeds, *intervals)
			}
			if err != nil {
				fmt.Fprintf(os.Stderr, "replicas-replay: %s: %v\n", t.name, err)
				os.Exit(1)
			}
		}
	}
}

// compare prints the lines of one traffic and policy.
func compare(
	t *traffic, policy scoring.Policy, replicas int, delays []string, from uint64, seeds int, intervals bool,
) error {
	ratios := make([][len(result{})][]float64, len(delays))
	for seed := from; seed < from+uint64(seeds); seed++ {
		var trace bytes.Buffer
		if err := replay.Generate(&trace, t.generate, t.requests, t.rate, 64, seed); err != nil {
			return err
		}
		one, err := t.run(trace.Bytes(), setting{policy, 1, "off"}, seed)
		if err != nil {
			return err
		}
		for i, delay := range delays {
			several, err := t.run(trace.Bytes(), setting{policy, replicas, delay}, seed)
			if err != nil {
				return err
			}
			for j := range several {
				ratio := 1.0
				if one[j] != 0 {
					ratio = several[j] / one[j]
				}
				ratios[i][j] = append(ratios[i][j], ratio)
			}
		}
	}
	for i, delay := range delays {
		fmt.Printf("| %s | %v | %s |", t.name, policy, delay)
		for _, r := range ratios[i] {
			slices.Sort(r)
			fmt.Printf(" %.3f", (r[(len(r)-1)/2]+r[len(r)/2])/2)
			if intervals {
				low := max(int(math.Round(float64(len(r))/2-0.98*math.Sqrt(float64(len(r))))), 0)
				fmt.Printf(" (%.3f-%.3f)", r[low], r[len(r)-1-low])
			}
			fmt.Print(" |")
		}
		fmt.Println()
	}
	return nil
}

// run replays a trace once.
func (t *traffic) run(trace []byte, s setting, seed uint64) (result, error) {
	c := replay.Config{Workers: t.workers, Engine: replay.DefaultEngineConfig(), Speeds: t.speeds,
		Scoring: scoring.DefaultConfig(), ArrivalSpeed: 1, Seed: seed, Replicas: s.replicas, Unshared: s.delay == "off"}
	t.engine(&c.Engine)
	c.Scoring.Policy = s.policy
	if !c.Unshared {
		var err error
		if c.ReplicaDelay, err = time.ParseDuration(s.delay); err != nil {
			return result{}, err
		}
	}
	reader, err := replay.NewReader(t.name, bytes.NewReader(trace), replay.MooncakeDelta,
		replay.ReaderOptions{BlockSize: c.Engine.BlockSize, TraceBlockSize: 64})
	if err != nil {
		return result{}, err
	}
	r, err := replay.Run(context.Background(), c, reader.Next, nil)
	if err != nil {
		return result{}, err
	}
	return result{r.CachedShare(), r.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99}, nil
}
