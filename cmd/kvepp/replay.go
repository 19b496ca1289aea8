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
               --compare 'scale-8=--router-prefill-load-scale=8' --svg charts
Results:     a table on the standard output; --svg draws it, --out writes every decision
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
	// endpoints, out and svg are paths.
	endpoints, out, svg string

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
	scoring    scoring.Config
	weight     *float64
	mode       string
	policy     string
	scheduling scheduling // only what waiting prompts count
	busy       busy
	affinity   affinity
	lag        time.Duration
	delivery   time.Duration
	jitter     time.Duration
	replicas   int
	delay      string // of replicas; off: nothing is shared
}

func (v *variantOptions) add(f *pflag.FlagSet) {
	v.scoring = scoring.DefaultConfig()
	costFlags(f, &v.scoring, &v.weight)
	f.StringVar(&v.mode, "router-mode", v.scoring.Mode.String(),
		"how a worker is chosen, `MODE`: kv, round-robin, random, power-of-two or least-loaded, as in kvepp serve")
	f.StringVar(&v.policy, "router-policy", scoring.Dynamo.String(),
		"how the mode kv prices workers, `POLICY`: dynamo (the default here, to compare with) or time, as in kvepp "+
			"serve; or, for comparison, "+
			strings.Join(replay.PolicyNames(), ", "))
	v.scheduling.addPrefill(f)
	v.affinity.add(f)
	f.Lookup("router-session-affinity-ttl-secs").Usage = "keep the requests of a session of the trace on one worker, " +
		"until `SECONDS` after its latest request has ended. 0: sessions are not bound"
	v.busy.addThresholds(f)
	v.busy.addQueue(f)
	v.busy.addAdmission(f)
	f.IntVar(&v.replicas, "replicas", 1,
		"`N` replicas of kvepp; each request arrives at one of them, drawn at random")
	f.StringVar(&v.delay, "replica-delay", "5ms",
		"`TIME` until replicas know of each other's bookings and sessions; off: they share nothing")
	f.DurationVar(&v.jitter, "arrival-jitter", 0,
		"the most `TIME` by which a request arrives later than in the trace; each takes a random part of it. Without "+
			"it, replicas cannot know of requests that the trace has at the same microsecond")
	f.DurationVar(&v.delivery, "delivery-delay", 0,
		"the most `TIME` from the choice of an engine until it has the request; each takes a random part of it, so "+
			"that requests of one moment arrive one after the other")
	f.DurationVar(&v.lag, "event-lag", 0, "`TIME` from the end of an engine's step until the index knows its KV events")
}

// apply checks the flags of f and sets what they say in c.
func (v *variantOptions) apply(f *pflag.FlagSet, c *replay.Config) error {
	if v.weight != nil {
		v.scoring.SetOverlapScoreWeight(*v.weight)
	}
	if err := v.busy.readPolicies(f); err != nil {
		return err
	}
	if err := errors.Join(v.busy.checkThresholds(), v.busy.checkQueue(), v.affinity.check()); err != nil {
		return err
	}
	if err := v.busy.checkAdmission(); err != nil {
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
	if err := checkWeights(&v.scoring, v.weight); err != nil {
		return err
	}
	if err := checkPolicy(&v.scoring, f.Changed); err != nil {
		return err
	}
	if v.lag < 0 {
		return fmt.Errorf("--event-lag %v: must be at least 0", v.lag)
	}
	if v.jitter < 0 {
		return fmt.Errorf("--arrival-jitter %v: must be at least 0", v.jitter)
	}
	if v.delivery < 0 {
		return fmt.Errorf("--delivery-delay %v: must be at least 0", v.delivery)
	}
	if err := v.scheduling.checkPrefill(&v.scoring); err != nil {
		return err
	}
	if c.Replicas = v.replicas; v.replicas < 1 {
		return fmt.Errorf("--replicas %d: must be at least 1", v.replicas)
	}
	c.ReplicaDelay, c.Unshared = 0, v.delay == "off"
	if !c.Unshared {
		if c.ReplicaDelay, err = time.ParseDuration(v.delay); err != nil || c.ReplicaDelay < 0 {
			return fmt.Errorf("--replica-delay %q: must be a time of at least 0 such as 5ms, or off", v.delay)
		}
	}
	c.Scoring, c.Prefill, c.EventLag = v.scoring, v.scheduling.prefill(), v.lag
	c.DeliveryDelay, c.ArrivalJitter = v.delivery, v.jitter
	c.Busy = replay.Thresholds(v.busy.thresholds)
	sessions := v.affinity.config()
	c.SessionTTL, c.SessionSoft = sessions.TTL, sessions.Soft
	if q := v.busy.queue(); q != nil {
		c.Queue, _ = q.Profiles.Of("")
	}
	c.QueueBound, c.QueueTimeout = v.busy.queueSize, v.busy.queueTimeout
	c.Admission = v.busy.admission()
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
	f.StringVar(&o.endpoints, "endpoints", "",
		"endpoints `FILE` of kvepp serve that lists the engines, instead of --workers: names, ranks, totalKvBlocks, "+
			"maxNumBatchedTokens and blockSize. --blocks and --max-num-batched-tokens are for those without the number")
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
	f.StringVar(&o.out, "out", "",
		"write one JSON line for each request and setting to `FILE`: times, worker, cached tokens, and the costs of "+
			"the cheapest candidates")
	f.StringVar(&o.svg, "svg", "",
		"write charts of the settings as SVG into `DIR`: cached share, times, and balance over time")
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
	if err := fromEnvironment(f, new(scheduling).inherited(getenv)); err != nil {
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
	if o.format == string(replay.AgenticMooncake) && len(o.files) > 1 {
		return nil, errors.New("--format agentic_mooncake: one file, as requests wait for others of their file")
	}
	if err := o.readEndpoints(f); err != nil {
		return nil, err
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
	return o.variants(f)
}

// variants returns the setting as given by the flags of f, and those of --compare.
func (o *replayOptions) variants(f *pflag.FlagSet) ([]variant, error) {
	variants := []variant{{"as given", o.config}}
	for _, text := range compared(o.compare) {
		name, flags, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--compare %q: must be NAME=FLAGS, for example 'rr=--router-mode=round-robin'", text)
		}
		if slices.ContainsFunc(variants, func(v variant) bool { return v.name == name }) {
			return nil, fmt.Errorf("--compare %s: another line has this name", name)
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

// compared replaces "all" by a line for each policy and mode, and one with admission.
func compared(texts []string) (all []string) {
	for _, text := range texts {
		if text != "all" {
			all = append(all, text)
			continue
		}
		for _, p := range slices.Concat(scoring.PolicyNames(), replay.PolicyNames()) {
			all = append(all, p+"=--router-policy="+p)
		}
		all = append(all, "time+admission=--router-policy=time --router-admission="+byWorkingSet)
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
	context.AfterFunc(ctx, stop) // a second signal ends kvepp at once
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
func (o *replayOptions) run(ctx context.Context, variants []variant, stdout, stderr io.Writer) (err error) {
	var reports []*replay.Report
	var decisions *decisions
	if o.out != "" {
		if decisions, err = createDecisions(o.out, o.config.Own); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, decisions.close()) }()
	}
	for _, v := range variants {
		began := time.Now()
		if decisions != nil {
			v.config.Decided = func(d *replay.Decision) { decisions.write(v.name, d) }
		}
		report, err := o.replayOne(ctx, &v.config, func(requests int) {
			fmt.Fprintf(stderr, "\r%s: %d requests, %.0f s", v.name, requests, time.Since(began).Seconds())
		})
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		fmt.Fprintf(stderr, "\r%s: %d requests in %.1f s\n", v.name, report.Requests, time.Since(began).Seconds())
		reports = append(reports, report)
	}
	if o.svg != "" {
		if err := drawReplay(o.svg, variants, reports); err != nil {
			return err
		}
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
