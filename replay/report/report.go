// Package report replays traces with several settings of the router, and prints how they compare: `kvepp replay`.
//
// Concurrency: a Config is for one caller at a time.
package report

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/replay"
)

// Help is the beginning of the command's help.
const Help = `kvepp replay predicts what a setting of the router does to recorded or synthetic traffic. It runs
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

// Config are the flags about the trace and the engines, and what to print.
type Config struct {
	Base    replay.Config // of all settings; Validate completes it
	Compare []string      // more settings, NAME=FLAGS

	flags                    *pflag.FlagSet
	files                    []string
	format, generate         string
	endpoints, out, svg      string // paths
	report                   string // text, json or a path; empty: none
	requests, traceBlockSize int
	rate                     float64
	prefill, decode          string
	speeds                   []float64
	ttft, tpot               time.Duration
	recording                *replay.Recording // nil: no setting needs it
}

// Setting is a line of the table.
type Setting struct {
	Name   string
	Config replay.Config
}

// AddFlags declares the flags.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	c.flags = f
	d := replay.DefaultEngineConfig()
	e := &c.Base.Engine
	f.StringVar(&c.format, "format", string(replay.Mooncake),
		"`FORMAT` of the files: "+strings.Join(replay.Formats(), ", ")+". All may be compressed by gzip")
	f.IntVar(&c.traceBlockSize, "trace-block-size", 512,
		"how many `TOKENS` a hash id of mooncake rows stands for; also of rows that --generate writes")
	f.IntVar(&c.Base.Workers, "workers", 4, "number of engines, `N`")
	f.IntVar(&c.Base.PrefillWorkers, "prefill-workers", 0,
		"`N` of the engines only compute prompts, and the others only decode. 0: every engine does both")
	f.Float64Var(&c.Base.TransferMS, "transfer-ms", 0.002,
		"with --prefill-workers, in how many `MILLISECONDS` a decode engine fetches the blocks of a token")
	f.StringVar(&c.endpoints, "endpoints", "",
		"endpoints `FILE` of kvepp serve that lists the engines, instead of --workers: names, ranks, totalKvBlocks, "+
			"maxNumBatchedTokens and blockSize. --blocks and --max-num-batched-tokens are for those without the number")
	f.IntVar(&e.Blocks, "blocks", d.Blocks, "KV blocks of each engine, `N`")
	f.IntVar(&e.BlockSize, "block-size", d.BlockSize, "`TOKENS` of a KV block")
	f.IntVar(&e.MaxSequences, "max-num-seqs", d.MaxSequences, "most requests in one step of an engine, `N`")
	f.IntVar(&e.MaxBatchedTokens, "max-num-batched-tokens", d.MaxBatchedTokens,
		"most `TOKENS` in one step of an engine")
	f.StringVar(&c.prefill, "prefill-ms", curveText(d.Prefill),
		"`A,B,C`: a step with n new prompt tokens takes A + B*n + C*n*n milliseconds")
	f.StringVar(&c.decode, "decode-ms", curveText(d.Decode),
		"`A,B,C`: a step that continues responses takes A + B*s + C*s*s milliseconds more; s is the share of the KV "+
			"cache, 0 to 1, that their requests hold")
	f.Float64SliceVar(&c.speeds, "engine-speeds", []float64{1},
		"`FACTORS`: how fast the engines are, relative to the curves, in turn; 1,0.5 makes every second one half as "+
			"fast")
	f.Float64Var(&c.Base.ArrivalSpeed, "speed", 1, "replay `R` times as fast as recorded")
	f.Uint64Var(&c.Base.Seed, "seed", 1, "the same `N` gives the same result")
	f.StringArrayVar(&c.Compare, "compare", nil,
		"one more line of the table, `NAME=FLAGS`: the router's flags of this command, changed by FLAGS. all: a "+
			"line for each policy and mode; recorded: a line that sends each request where a recording did. Repeatable")
	f.DurationVar(&c.ttft, "slo-ttft", time.Second,
		"goodput counts requests with a time to first token of at most `TIME`")
	f.DurationVar(&c.tpot, "slo-itl", 50*time.Millisecond, "and with a mean time between tokens of at most `TIME`")
	f.StringVar(&c.out, "out", "",
		"write one JSON line for each request and setting to `FILE`: times, worker, cached tokens, and the costs of "+
			"the cheapest candidates")
	f.StringVar(&c.report, "report", "",
		"compare a recording with kvepp on the standard output, `AS` text or json; or as text, and as a page with "+
			"charts in a file whose name ends in .html. kvepp then has the policy time unless --router-policy is given")
	f.Lookup("report").NoOptDefVal = "text"
	f.StringVar(&c.svg, "svg", "",
		"write charts of the settings as SVG into `DIR`: cached share, times, and balance over time")
	f.StringVar(&c.generate, "generate", "",
		"write a synthetic trace to the standard output instead, in the format mooncake-delta. `KIND`: "+
			strings.Join(workloadNames(), ", "))
	f.IntVar(&c.requests, "requests", 10000, "with --generate, how many requests, `N`")
	f.Float64Var(&c.rate, "rate", 10, "with --generate, how many requests a second begin on average, `R`")
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

// Generates reports whether the command writes a trace instead of replaying one.
func (c *Config) Generates() bool { return c.generate != "" }

// Reports reports whether the command compares a recording with kvepp.
func (c *Config) Reports() bool { return c.report != "" }

// Validate checks the flags. args are the traces.
func (c *Config) Validate(args []string) (err error) {
	if c.Generates() {
		if !slices.Contains(workloadNames(), c.generate) {
			return fmt.Errorf("--generate %q: must be one of %s", c.generate, strings.Join(workloadNames(), ", "))
		}
		return nil
	}
	if err := flags.OneOf("format", c.format, replay.Formats()...); err != nil {
		return err
	}
	switch c.files = args; {
	case c.Reports() && c.report != "text" && c.report != "json" && !strings.HasSuffix(c.report, ".html"):
		return fmt.Errorf("--report=%s: must be text, json, or a file whose name ends in .html", c.report)
	case len(args) == 0:
		return errors.New("which trace? kvepp replay FILE...; --generate makes one")
	case c.traceBlockSize < 1:
		return fmt.Errorf("--trace-block-size %d: must be at least 1", c.traceBlockSize)
	case c.format == string(replay.AgenticMooncake) && len(args) > 1:
		return errors.New("--format agentic_mooncake: one file, as requests wait for others of their file")
	}
	if err := c.readEndpoints(); err != nil {
		return err
	}
	if c.Base.Engine.Prefill, err = parseCurve("prefill-ms", c.prefill); err != nil {
		return err
	}
	c.Base.Engine.Speed, c.Base.Speeds = 1, c.speeds
	c.Base.Engine.Decode, err = parseCurve("decode-ms", c.decode)
	return err
}

// Generate writes a trace.
func (c *Config) Generate(to io.Writer) error {
	return replay.Generate(to, c.generate, c.requests, c.rate, c.traceBlockSize, c.Base.Seed)
}

// WriteWorkloads writes the kinds of traces that Generate makes.
func WriteWorkloads(to io.Writer) {
	fmt.Fprint(to, "\nKinds of --generate (means of turns; sizes in tokens)\n")
	for _, w := range replay.Workloads {
		fmt.Fprintf(to, "  %-7s %s\n", w.Name, w.Help)
	}
}

// Run replays the traces with each setting and prints the table. Progress goes to stderr.
func (c *Config) Run(ctx context.Context, settings []Setting, stdout, stderr io.Writer) (err error) {
	var reports []*replay.Report
	var decisions *decisions
	if c.out != "" {
		if decisions, err = createDecisions(c.out, c.Base.Own); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, decisions.close()) }()
	}
	repeats := func(s Setting) bool { return s.Config.Policy == replay.Recorded }
	var beside *beside
	if slices.ContainsFunc(settings, repeats) {
		if c.recording, err = c.readRecording(ctx, settings); err != nil {
			return err
		}
		fmt.Fprint(stderr, c.recording.Engines)
		if c.Reports() {
			beside = newBeside(settings, c.recording)
		}
	}
	for i, v := range settings {
		began := time.Now()
		if decisions != nil || beside != nil {
			v.Config.Decided = func(d *replay.Decision) {
				if decisions != nil {
					decisions.write(v.Name, d)
				}
				if beside != nil {
					beside.add(i, d)
				}
			}
		}
		report, err := c.replayOne(ctx, &v.Config, func(requests int) {
			fmt.Fprintf(stderr, "\r%s: %d requests, %.0f s", v.Name, requests, time.Since(began).Seconds())
		})
		if err != nil {
			return fmt.Errorf("%s: %w", v.Name, err)
		}
		fmt.Fprintf(stderr, "\r%s: %d requests in %.1f s\n", v.Name, report.Requests, time.Since(began).Seconds())
		reports = append(reports, report)
	}
	if c.svg != "" {
		if err := draw(c.svg, settings, reports); err != nil {
			return err
		}
	}
	if beside != nil {
		beside.finish()
		return beside.write(c.report, stdout)
	}
	return c.print(stdout, settings, reports)
}

func (c *Config) replayOne(ctx context.Context, with *replay.Config, progress func(int)) (*replay.Report, error) {
	next, closeFile := c.open(with.Engine.BlockSize, replay.Shadow{})
	defer closeFile()
	if c.recording != nil {
		next = c.recording.Replayed(next)
	}
	return replay.Run(ctx, *with, next, progress)
}

// open returns the requests of all files in the order of arrival, and what closes the file that is open then. shadow is
// as in replay.ReaderOptions.
func (c *Config) open(blockSize int, shadow replay.Shadow) (next func() (*replay.Request, error), closeFile func()) {
	var reader *replay.Reader
	var file io.Closer
	closeFile = func() {
		if file != nil {
			file.Close()
		}
	}
	files := c.files
	next = func() (*replay.Request, error) {
		for {
			if reader != nil {
				q, err := reader.Next()
				if !errors.Is(err, io.EOF) || len(files) == 0 {
					return q, err
				}
			}
			closeFile()
			var err error
			reader, file, err = replay.Open(files[0], replay.Format(c.format), replay.ReaderOptions{
				BlockSize:      blockSize,
				TraceBlockSize: c.traceBlockSize,
				Shadow:         shadow,
			})
			if err != nil {
				return nil, err
			}
			files = files[1:]
		}
	}
	if format := replay.Format(c.format); format == replay.Dynamo || format == replay.Kvepp {
		next = replay.Sorted(next)
	}
	return next, closeFile
}
