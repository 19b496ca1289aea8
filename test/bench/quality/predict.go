package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/stack"
)

// recordedLine is what this bench needs of a line of kvepp serve --record.
type recordedLine struct {
	Event struct {
		Request struct {
			Received float64 `json:"request_received_ms"`
			TTFT     float64 `json:"ttft_ms"`
			Prompt   int     `json:"input_tokens"`
			Cached   int     `json:"cached_tokens"`
		} `json:"request"`
	} `json:"event"`
}

func (r *run) recordingFile() string {
	return strings.Replace(r.traceFile(), "trace-", "recording-", 1)
}

// keepRecording copies what kvepp recorded since a time to the folder, as soon as all requests are there.
func (o *options) keepRecording(ctx context.Context, from string, r *run, begin time.Time) error {
	for wait := range 100 {
		text, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		var kept []byte
		n := 0
		for line := range bytes.Lines(text) {
			var x recordedLine
			if json.Unmarshal(line, &x) == nil && x.Event.Request.Received >= float64(begin.UnixMilli()) {
				kept = append(kept, line...)
				n++
			}
		}
		if n >= len(r.Samples)-r.failures() || wait == 99 {
			fmt.Printf("%d of %d requests recorded\n", n, len(r.Samples))
			return cmp.Or(os.MkdirAll(o.out, 0o755), os.WriteFile(filepath.Join(o.out, r.recordingFile()), kept, 0o600))
		}
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// predictAll plays each scenario with each seed through both systems, unless the folder has the recordings, and prints
// what the first recording predicts beside what the second says.
func (o *options) predictAll(ctx context.Context, to io.Writer) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	from := incumbent
	if o.peer != "" {
		from = "shadow GAIE"
	}
	runs, within := 0, 0
	fmt.Fprint(to, "| scenario | seed | incumbent: cached %, replayed | TTFT ms, replayed | kvepp: cached %, "+
		"predicted | TTFT ms, predicted |\n|---|---|---|---|---|---|\n")
	for seed := o.first; seed < o.first+o.seeds; seed++ {
		for n := range scenarios {
			sc := &scenarios[n]
			if !o.named(sc) || sc.later > 0 {
				continue
			}
			var files []string
			for _, name := range []string{from, switched} {
				sys := &systems[slices.IndexFunc(systems, func(s system) bool { return s.name == name })]
				r := run{Scenario: sc.name, Router: name, Seed: uint64(seed)}
				files = append(files, filepath.Join(o.out, r.recordingFile()))
				if _, err := os.Stat(files[len(files)-1]); err == nil {
					continue
				}
				if _, err := o.playOnce(ctx, root, sys, sc, uint64(seed)); err != nil {
					return fmt.Errorf("%s, %s, seed %d: %w", sc.name, name, seed, err)
				}
			}
			met, err := o.printPrediction(ctx, to, sc, seed, files)
			if err != nil {
				return err
			}
			if runs++; met {
				within++
			}
		}
	}
	_, err = fmt.Fprintf(to, "%d of %d within 2 points and 10 %%\n", within, runs)
	return err
}

// printPrediction prints a row, and returns whether the prediction is within 2 points and 10 %.
func (o *options) printPrediction(
	ctx context.Context, to io.Writer, sc *scenario, seed int, files []string,
) (met bool, err error) {
	incumbent, err := readRecording(files[0])
	if err != nil {
		return false, err
	}
	switched, err := readRecording(files[1])
	if err != nil {
		return false, err
	}
	out := files[0] + ".decisions"
	c := exec.CommandContext(ctx, "bin/kvepp", "replay", files[0], "--blocks", strconv.Itoa(sc.engines().blocks),
		"--router-policy=time", "--compare=recorded", "--out", out)
	var said bytes.Buffer
	c.Stderr = &said
	if err := c.Run(); err != nil {
		return false, fmt.Errorf("%v: %w: %s", c.Args, err, said.Bytes())
	}
	recorded, err := readDecisions(out, "recorded")
	if err != nil {
		return false, err
	}
	predicted, err := readDecisions(out, "as given")
	if err != nil {
		return false, err
	}
	fmt.Fprintf(to, "| %s | %d |", sc.name, seed)
	for _, pair := range [][2][]sample{{incumbent, recorded}, {switched, predicted}} {
		m, _ := cachedOf(pair[0])
		p, _ := cachedOf(pair[1])
		fmt.Fprintf(to, " %.1f, %.1f (%+.1f) |", 100*m, 100*p, 100*(p-m))
		a, b := mean(values(pair[0], ttft)), mean(values(pair[1], ttft))
		fmt.Fprintf(to, " %.0f, %.0f (%+.0f %%) |", a, b, 100*(b/a-1))
		met = math.Abs(p-m) <= 0.02 && math.Abs(b/a-1) <= 0.1 // of the second pair
	}
	fmt.Fprintf(to, "\n%s\n", said.Bytes()[bytes.Index(said.Bytes(), []byte("engines:")):])
	return met, nil
}

// shadowed adds kvepp in shadow to a stack: beside its picker, or beside Envoy's round robin.
func shadowed(cfg *stack.Config) {
	cfg.FrontendMode = "round-robin"
	start := cfg.Picker
	if start == nil {
		cfg.Manifest = "shadow.yaml"
		return
	}
	kvepp := 0 // its port
	cfg.Picker = func(ctx context.Context, s *stack.Stack) (address string, err error) {
		if address, err = start(ctx, s); err != nil {
			return "", err
		}
		_, port, err := net.SplitHostPort(s.ExtProc())
		if err == nil {
			kvepp, err = strconv.Atoi(port)
		}
		return address, cmp.Or(err, s.StartKvepp(ctx))
	}
	cfg.EditEnvoy = func(config any) {
		text, err := os.ReadFile(filepath.Join(cfg.Root, "manifests/envoy/shadow.yaml"))
		var shadow any
		if err = cmp.Or(err, yaml.Unmarshal(text, &shadow)); err != nil {
			panic(err) // a file of this tree
		}
		const name = "kvepp-shadow"
		filters := []any{"static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config"}
		filter := stack.At(shadow, append(filters, "http_filters", 0)...)
		stack.At(filter, "typed_config", "grpc_service", "envoy_grpc").(map[string]any)["cluster_name"] = name
		manager := stack.At(config, filters...).(map[string]any)
		all := manager["http_filters"].([]any)
		manager["http_filters"] = slices.Insert(all, len(all)-1, filter)
		cluster := stack.At(shadow, "static_resources", "clusters", 1).(map[string]any)
		cluster["name"] = name
		stack.At(cluster, "load_assignment", "endpoints", 0, "lb_endpoints", 0, "endpoint", "address",
			"socket_address").(map[string]any)["port_value"] = kvepp
		resources := stack.At(config, "static_resources").(map[string]any)
		resources["clusters"] = append(resources["clusters"].([]any), cluster)
	}
}

func readRecording(path string) (all []sample, err error) {
	text, err := os.ReadFile(path)
	for line := range bytes.Lines(text) {
		var x recordedLine
		err = cmp.Or(err, json.Unmarshal(line, &x))
		q := &x.Event.Request
		all = append(all, sample{Prompt: q.Prompt, Cached: q.Cached, TTFT: q.TTFT})
	}
	return all, err
}

func readDecisions(path, setting string) (all []sample, err error) {
	text, err := os.ReadFile(path)
	for line := range bytes.Lines(text) {
		var x struct {
			Setting string `json:"setting"`
			Prompt  int    `json:"prompt_tokens"`
			Served  struct {
				Cached int     `json:"cached_tokens"`
				TTFT   float64 `json:"ttft_ms"`
			} `json:"served"`
		}
		if err = cmp.Or(err, json.Unmarshal(line, &x)); x.Setting == setting {
			all = append(all, sample{Prompt: x.Prompt, Cached: x.Served.Cached, TTFT: x.Served.TTFT})
		}
	}
	return all, err
}
