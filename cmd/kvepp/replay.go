package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"kvepp/replay"
	"kvepp/scoring"
)

const replayHelp = `kvepp replay predicts what a setting of the router does to recorded or synthetic traffic. It runs
kvepp's index, load book, cost function and queue in virtual time against model engines, and prints
a line for each setting.

Usage:       kvepp replay TRACE... [flags]
             kvepp replay --generate KIND [flags] > TRACE
Example:     kvepp replay --generate chat --rate 12 --trace-block-size 64 > chat.jsonl
             kvepp replay chat.jsonl --format mooncake-delta --trace-block-size 64 --blocks 4000 \
               --compare 'in-turn=--router-mode=round-robin' \
               --compare 'scale-8=--router-prefill-load-scale=8'
Precedence:  flag, variable KVEPP_REPLAY_<FLAG>, Dynamo's variable, default

The engines are modelled as Dynamo 1.6.1's offline replay does. Trust the ratios between lines, not
the milliseconds, unless --prefill-ms and --decode-ms were measured on your engines.
`

// replayPrefix is part of the names of its environment variables: KVEPP_REPLAY_WORKERS.
const replayPrefix = "replay-"

// replayOptions are the flags of "kvepp replay".
type replayOptions struct {
	files    []string
	format   string
	generate string
	requests int
	rate     float64

	traceBlockSize int
	prefill        string
	decode         string
	speeds         []float64
	compare        []string
	ttft, tpot     time.Duration
	config         replay.Config

	variant variantOptions
}

// variantOptions are the flags of "kvepp replay" that --compare can change.
type variantOptions struct {
	scoring scoring.Config
	weight  float64
	mode    string
	policy  string
	busy    busy
	lag     time.Duration
}

func (v *variantOptions) add(f *pflag.FlagSet) {
	v.scoring = scoring.DefaultConfig()
	costFlags(f, &v.scoring, &v.weight)
	f.StringVar(&v.mode, "router-mode", v.scoring.Mode.String(),
		"how a worker is chosen, `MODE`: kv, round-robin, random, power-of-two or least-loaded, as in kvepp serve")
	f.StringVar(&v.policy, "router-policy", scoring.Dynamo.String(),
		"how the mode kv prices workers, `POLICY`: dynamo or time, as in kvepp serve; or another project's: "+
			strings.Join(replay.PolicyNames(), ", "))
	v.busy.addQueue(f)
	f.DurationVar(&v.lag, "event-lag", 0, "`TIME` from the end of an engine's step until the index knows its KV events")
}

// apply checks the flags of f and sets what they say in c.
func (v *variantOptions) apply(f *pflag.FlagSet, c *replay.Config) error {
	if err := v.busy.readPolicies(f); err != nil {
		return err
	}
	if err := v.busy.checkQueue(); err != nil {
		return err
	}
	mode, err := scoring.ParseMode(v.mode)
	if err != nil || mode == scoring.Direct || mode == scoring.DeviceAwareWeighted {
		return fmt.Errorf("--router-mode %q: must be kv, round-robin, random, power-of-two or least-loaded", v.mode)
	}
	v.scoring.Mode = mode
	c.Policy = ""
	if slices.Contains(replay.PolicyNames(), v.policy) {
		c.Policy = v.policy
	} else if v.scoring.Policy, err = scoring.ParsePolicy(v.policy); err != nil {
		return oneOf("router-policy", v.policy, append(scoring.PolicyNames(), replay.PolicyNames()...)...)
	}
	if !math.IsNaN(v.weight) {
		v.scoring.SetOverlapScoreWeight(v.weight)
	}
	if err := checkWeights(&v.scoring, v.weight); err != nil {
		return err
	}
	if err := checkPolicy(&v.scoring, f.Changed); err != nil {
		return err
	}
	if v.lag < 0 {
		return fmt.Errorf("--event-lag %v: must be at least 0", v.lag)
	}
	c.Scoring, c.EventLag = v.scoring, v.lag
	if q := v.busy.queue(); q != nil {
		c.Queue, _ = q.Profiles.Of("")
		c.QueueBound, c.QueueTimeout = q.Bound, q.Timeout
	}
	return nil
}

func replayFlags(o *replayOptions) *pflag.FlagSet {
	f := newFlags("kvepp replay")
	d := replay.DefaultEngineConfig()
	e := &o.config.Engine
	f.StringVar(&o.format, "format", string(replay.Mooncake),
		"`FORMAT` of the files: "+strings.Join(replay.Formats(), ", ")+". All may be compressed by gzip")
	f.IntVar(&o.traceBlockSize, "trace-block-size", 512,
		"how many `TOKENS` a hash id of mooncake rows stands for; also of rows that --generate writes")
	f.IntVar(&o.config.Workers, "workers", 4, "number of engines, `N`")
	f.IntVar(&e.Blocks, "blocks", d.Blocks, "KV blocks of each engine, `N`")
	f.IntVar(&e.BlockSize, "block-size", d.BlockSize, "`TOKENS` of a KV block")
	f.IntVar(&e.MaxSequences, "max-num-seqs", d.MaxSequences, "most requests in one step of an engine, `N`")
	f.IntVar(&e.MaxBatchedTokens, "max-num-batched-tokens", d.MaxBatchedTokens,
		"most `TOKENS` in one step of an engine")
	f.StringVar(&o.prefill, "prefill-ms", curveText(d.Prefill),
		"`A,B,C`: a step with n new prompt tokens takes A + B*n + C*n*n milliseconds")
	f.StringVar(&o.decode, "decode-ms", curveText(d.Decode),
		"`A,B,C`: a step that continues answers takes A + B*s + C*s*s milliseconds more; s is the share of the KV "+
			"cache, 0 to 1, that their requests hold")
	f.Float64SliceVar(&o.speeds, "engine-speeds", []float64{1},
		"`FACTORS`: how fast the engines are, relative to the curves, in turn; 1,0.5 makes every second one half as "+
			"fast")
	f.Float64Var(&o.config.ArrivalSpeed, "speed", 1, "replay `R` times as fast as recorded")
	f.Uint64Var(&o.config.Seed, "seed", 1, "the same `N` gives the same result")
	f.StringArrayVar(&o.compare, "compare", nil,
		"one more line of the table, `NAME=FLAGS`: the router's flags of this command, changed by FLAGS. all: a "+
			"line for each policy and mode. Repeatable")
	f.DurationVar(&o.ttft, "slo-ttft", time.Second,
		"goodput counts requests with a time to first token of at most `TIME`")
	f.DurationVar(&o.tpot, "slo-itl", 50*time.Millisecond, "and with a mean time between tokens of at most `TIME`")
	f.StringVar(&o.generate, "generate", "",
		"write a synthetic trace to the standard output instead, in the format mooncake-delta. `KIND`: "+
			strings.Join(workloadNames(), ", "))
	f.IntVar(&o.requests, "requests", 10000, "with --generate, how many requests, `N`")
	f.Float64Var(&o.rate, "rate", 10, "with --generate, how many requests a second begin on average, `R`")
	section(f, "Trace and engines")
	o.variant.add(f)
	section(f, "Router, as in kvepp serve (--compare can change these)")
	documentEnvironment(f, replayPrefix)
	return f
}

func workloadNames() (names []string) {
	for _, w := range replay.Workloads {
		names = append(names, w.Name)
	}
	return names
}

func curveText(c replay.Curve) string { return fmt.Sprintf("%v,%v,%v", c[0], c[1], c[2]) }

func parseCurve(flag, text string) (c replay.Curve, err error) {
	parts := strings.Split(text, ",")
	for i := range c {
		if len(parts) == len(c) {
			c[i], err = strconv.ParseFloat(strings.TrimSpace(parts[i]), 64)
		}
		if len(parts) != len(c) || err != nil || math.IsNaN(c[i]) || math.IsInf(c[i], 0) {
			return c, fmt.Errorf("--%s %q: must be three numbers, for example 16.5,0.015,4e-07", flag, text)
		}
	}
	return c, nil
}

// variant is one line of the table.
type variant struct {
	name   string
	config replay.Config
}

// parseReplay reads the arguments and returns the variants; none with --generate.
func parseReplay(o *replayOptions, args []string, getenv func(string) string) ([]variant, error) {
	f := replayFlags(o)
	if err := parseArgs(f, args); err != nil {
		return nil, err
	}
	if err := fromEnvironment(f, getenv); err != nil {
		return nil, err
	}
	if o.generate != "" {
		if !slices.Contains(workloadNames(), o.generate) {
			return nil, fmt.Errorf("--generate %q: must be one of %s", o.generate, strings.Join(workloadNames(), ", "))
		}
		return nil, nil
	}
	if err := oneOf("format", o.format, replay.Formats()...); err != nil {
		return nil, err
	}
	if o.files = f.Args(); len(o.files) == 0 {
		return nil, errors.New("which trace? kvepp replay FILE...; --generate makes one")
	}
	if o.traceBlockSize < 1 {
		return nil, fmt.Errorf("--trace-block-size %d: must be at least 1", o.traceBlockSize)
	}
	var err error
	if o.config.Engine.Prefill, err = parseCurve("prefill-ms", o.prefill); err != nil {
		return nil, err
	}
	if o.config.Engine.Decode, err = parseCurve("decode-ms", o.decode); err != nil {
		return nil, err
	}
	o.config.Engine.Speed, o.config.Speeds = 1, o.speeds
	if err := o.variant.apply(f, &o.config); err != nil {
		return nil, err
	}
	variants := []variant{{"as given", o.config}}
	for _, text := range compared(o.compare) {
		name, flags, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--compare %q: must be NAME=FLAGS, for example 'rr=--router-mode=round-robin'", text)
		}
		v := variant{name, o.config}
		v.config.Queue = nil
		var changed variantOptions
		g := newFlags("kvepp replay --compare " + name)
		changed.add(g)
		if err := parseArgs(g, append(changedArgs(f, g), strings.Fields(flags)...)); err != nil {
			return nil, fmt.Errorf("--compare %s: %w", name, err)
		}
		if err := changed.apply(g, &v.config); err != nil {
			return nil, fmt.Errorf("--compare %s: %w", name, err)
		}
		variants = append(variants, v)
	}
	for _, v := range variants {
		if err := v.config.Validate(); err != nil {
			return nil, fmt.Errorf("%s: %w", v.name, err)
		}
	}
	return variants, nil
}

// compared replaces "all" by a line for each policy and mode.
func compared(texts []string) (all []string) {
	for _, text := range texts {
		if text != "all" {
			all = append(all, text)
			continue
		}
		for _, p := range slices.Concat(scoring.PolicyNames(), replay.PolicyNames()) {
			all = append(all, p+"=--router-policy="+p)
		}
		for _, m := range []scoring.Mode{scoring.RoundRobin, scoring.Random, scoring.PowerOfTwo, scoring.LeastLoaded} {
			all = append(all, m.String()+"=--router-mode="+m.String())
		}
	}
	return all
}

// changedArgs returns the flags of from that were given, as arguments, as far as to has them.
func changedArgs(from, to *pflag.FlagSet) (args []string) {
	from.Visit(func(flag *pflag.Flag) {
		if to.Lookup(flag.Name) != nil {
			args = append(args, "--"+flag.Name+"="+flag.Value.String())
		}
	})
	return args
}

// replayTraces runs "kvepp replay".
func replayTraces(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var o replayOptions
	variants, err := parseReplay(&o, args, getenv)
	if errors.Is(err, pflag.ErrHelp) {
		showHelp(stdout, replayFlags(new(replayOptions)), err)
		fmt.Fprint(stdout, "\nKinds of --generate (means of turns; sizes in tokens)\n")
		for _, w := range replay.Workloads {
			fmt.Fprintf(stdout, "  %-7s %s\n", w.Name, w.Help)
		}
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp replay: %v\n\"kvepp replay --help\" shows how to use it.\n", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if o.generate != "" {
		err = replay.Generate(stdout, o.generate, o.requests, o.rate, o.traceBlockSize, o.config.Seed)
	} else {
		err = o.run(ctx, variants, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp replay: %v\n", err)
		return 1
	}
	return 0
}

// run replays each variant and prints the table.
func (o *replayOptions) run(ctx context.Context, variants []variant, stdout, stderr io.Writer) error {
	var reports []*replay.Report
	for _, v := range variants {
		began := time.Now()
		report, err := o.replayOne(ctx, &v.config, func(requests int) {
			fmt.Fprintf(stderr, "\r%s: %d requests, %.0f s", v.name, requests, time.Since(began).Seconds())
		})
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		fmt.Fprintf(stderr, "\r%s: %d requests in %.1f s\n", v.name, report.Requests, time.Since(began).Seconds())
		reports = append(reports, report)
	}
	return o.print(stdout, variants, reports)
}

func (o *replayOptions) replayOne(ctx context.Context, c *replay.Config, progress func(int)) (*replay.Report, error) {
	var reader *replay.Reader
	var file io.Closer
	defer func() {
		if file != nil {
			file.Close()
		}
	}()
	files := o.files
	next := func() (*replay.Request, error) {
		for {
			if reader != nil {
				q, err := reader.Next()
				if !errors.Is(err, io.EOF) || len(files) == 0 {
					return q, err
				}
			}
			if file != nil {
				file.Close()
			}
			var err error
			reader, file, err = replay.Open(files[0], replay.Format(o.format), replay.ReaderOptions{
				BlockSize:      c.Engine.BlockSize,
				TraceBlockSize: o.traceBlockSize,
			})
			if err != nil {
				return nil, err
			}
			files = files[1:]
		}
	}
	if format := replay.Format(o.format); format == replay.Dynamo || format == replay.Kvepp {
		next = replay.Sorted(next)
	}
	return replay.Run(ctx, *c, next, progress)
}

// print prints the table.
func (o *replayOptions) print(to io.Writer, variants []variant, reports []*replay.Report) error {
	first := reports[0]
	fmt.Fprintf(to, "%d requests of %d tokens on average in %v; one cache of infinite size would have %.1f %% of the "+
		"prompts.\n",
		first.Requests, first.ArrivedTokens/max(first.Requests, 1), first.Duration.Round(time.Second),
		100*first.PossibleShare())
	if first.TooLarge > 0 {
		fmt.Fprintf(to, "%d more requests need more than the %d KV blocks of an engine and are left out.\n",
			first.TooLarge, o.config.Engine.Blocks)
	}
	fmt.Fprintf(to, "Goodput: first token within %v, mean gap between tokens within %v.\n\n", o.ttft, o.tpot)
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tcached\tTTFT ms\t\t\t\tITL ms\t\tend to end s\t\tgoodput\tbusiest\tqueued ms\trefused\t")
	fmt.Fprintln(w, "setting\t%\tmean\tp50\tp90\tp99\tmean\tp90\tmean\tp90\t%\tby mean\tp90\t\t")
	for i, r := range reports {
		fmt.Fprintf(w, "%s\t%.1f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.1f\t%.2f\t%.2f\t%.1f\t%.2f\t%.0f\t%d\t\n",
			variants[i].name, 100*r.CachedShare(), 1e3*r.TTFT.Mean, 1e3*r.TTFT.P50, 1e3*r.TTFT.P90, 1e3*r.TTFT.P99,
			1e3*r.TPOT.Mean, 1e3*r.TPOT.P90, r.E2E.Mean, r.E2E.P90, 100*r.Goodput(o.ttft, o.tpot), r.Imbalance(),
			1e3*r.Queued.P90, r.Refused)
	}
	return w.Flush()
}
