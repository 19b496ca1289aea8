package main

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

func sizeOf(t *testing.T, args ...string) (out, errs string, status int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status = printSize(args, &stdout, &stderr, func(string) string { return "" })
	return stdout.String(), stderr.String(), status
}

// TestSizeErrors: wrong usage says which flag, with which value.
func TestSizeErrors(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"", "--rps 0: give the requests a second"},
		{"--rps=NaN --tokens=1 --workers=1", "--rps NaN"},
		{"--rps=-1 --tokens=1 --workers=1", "--rps -1"},
		{"--rps=+Inf --tokens=1 --workers=1", "--rps +Inf"},
		{"--rps=1 --workers=1", "--tokens 0: give the mean prompt tokens of a request, from 1 to"},
		{"--rps=1 --tokens=9000000 --workers=1", "--tokens 9000000"},
		{"--rps=1 --tokens=1", "--workers 0"},
		{"--rps=1 --tokens=1 --workers=21761", "--workers 21761: give the number of KV caches, from 1 to 21760"},
		{"--rps=1 --tokens=1 --workers=1 --blocks=-1", "--blocks -1"},
		{"--rps=1 --tokens=1 --workers=1 --block-size=0", "--block-size 0"},
		{"--rps=1 --tokens=1 --workers=1 --replicas=-1", "--replicas -1"},
		{"--rps=1 --tokens=1 --workers=1 --output=yml", `--output "yml": must be text or yaml; did you mean`},
		{"--rps=1 --tokens=1 --workers=1 more", `unexpected argument "more"`},
		{"--rqs=1", "rqs"},
	} {
		out, errs, status := sizeOf(t, strings.Fields(c.args)...)
		if status != 2 || out != "" || !strings.Contains(errs, c.want) || !strings.Contains(errs, "kvepp size --help") {
			t.Errorf("%s: status %d, %s%s", c.args, status, out, errs)
		}
	}
}

// TestSize compares sizings with sums by hand.
func TestSize(t *testing.T) {
	for _, c := range []struct {
		args string
		want sizing
	}{
		// 10 x (114 us + 7 us + 62.5 blocks x 0.41 us), and a worker 6 ms: 7.5 ms a second. Memory has its minimum.
		{"--rps=10 --tokens=1000 --workers=1 --output-tokens=0", sizing{replicas: 2, cpu: 0.1, memory: 128, limit: 1216,
			descriptors: 1024}},
		// 1,000 x 486 us on one of two, events of 500 blocks a request 0.205, others' requests 0.007, idle 0.006:
		// 0.704, and twice that.
		{"--rps=1000 --tokens=8000 --workers=1 --output-tokens=0", sizing{replicas: 2, cpu: 1.5, memory: 128,
			limit: 1216, descriptors: 1024}},
		// The same without another replica, and with room for 2 s of 32 kB: 64 MB in 0.075 of Go's memory.
		{"--rps=1000 --tokens=8000 --workers=1 --output-tokens=0 --replicas=1", sizing{replicas: 1, cpu: 1.4,
			memory: 128, limit: 1216, descriptors: 1024}},
		// 10 thousand of 256,000 tokens: 143 cores for requests, and 66 for events, which more replicas do not divide.
		{"--rps=10000 --tokens=256000 --workers=1 --output-tokens=0 --replicas=101", sizing{replicas: 101, cpu: 134.3,
			memory: 128, limit: 3008, descriptors: 1024}},
		// 20 GB of index are half of Go's memory: 40 GB, and an eighth more of the container.
		{"--rps=1 --tokens=1000 --workers=400 --blocks=1000000", sizing{replicas: 2, cpu: 0.1, memory: 18496,
			limit: 41856, descriptors: 2414}},
		// 8,000 ranks: 800 MiB of libzmq's memory are more than an eighth.
		{"--rps=1 --tokens=1000 --workers=8000 --blocks=512", sizing{replicas: 2, cpu: 0.9, memory: 2048, limit: 2496,
			goLimit: 1664, descriptors: 37157}},
	} {
		var o sizeOptions
		if err := parseSize(&o, strings.Fields(c.args), func(string) string { return "" }); err != nil {
			t.Fatal(err)
		}
		got := o.compute()
		short := sizing{replicas: got.replicas, cpu: got.cpu, memory: got.memory, limit: got.limit,
			goLimit: got.goLimit, descriptors: got.descriptors}
		if short != c.want {
			t.Errorf("%s: %+v, want %+v", c.args, short, c.want)
		}
	}
}

// TestSizeGrows: more of anything never needs less, and no replica requests more than the most.
func TestSizeGrows(t *testing.T) {
	base := sizeOptions{rps: 100, tokens: 500, workers: 8, blocks: 10000, blockSize: 16, outputTokens: 100,
		tokenizers: 1, vocabulary: 100000}
	for name, more := range map[string]func(*sizeOptions){
		"rps":     func(o *sizeOptions) { o.rps *= 2 },
		"tokens":  func(o *sizeOptions) { o.tokens *= 2 },
		"workers": func(o *sizeOptions) { o.workers *= 2 },
		"blocks":  func(o *sizeOptions) { o.blocks *= 2 },
		"answers": func(o *sizeOptions) { o.outputTokens *= 2 },
		"models":  func(o *sizeOptions) { o.tokenizers *= 2 },
	} {
		o := base
		for before := o.compute(); o.rps < 1e4 && o.tokens < 1e5 && o.workers < 5000 && o.blocks < 1e7 &&
			o.outputTokens < 1e4 && o.tokenizers < 100; {
			more(&o)
			after := o.compute()
			total := func(s sizing) float64 { return s.cores * float64(s.replicas) }
			if total(after) < total(before) || after.memory < before.memory || after.limit < before.limit ||
				after.replicas < before.replicas || after.descriptors < before.descriptors {
				t.Errorf("twice the %s: %+v after %+v", name, after, before)
			}
			if after.cpu > mostCores && after.replicas < mostReplicas {
				t.Errorf("%s: %d replicas with %.1f cores each", name, after.replicas, after.cpu)
			}
			if after.memory > after.limit {
				t.Errorf("%s: the request of memory is above the limit: %+v", name, after)
			}
			before = after
		}
	}
}

// TestSizeOutput: the table has each number, and the YAML is values that the chart has.
func TestSizeOutput(t *testing.T) {
	load := []string{"--rps=200", "--tokens=2000", "--workers=8000", "--blocks=512"}
	text, _, status := sizeOf(t, load...)
	for _, want := range []string{"200 requests a second of 2000 tokens", "CPU request ", "memory limit ",
		"GOMEMLIMIT ", "file descriptors     37157"} {
		if status != 0 || !strings.Contains(text, want) {
			t.Errorf("status %d: %q is missing in\n%s", status, want, text)
		}
	}
	values, errs, status := sizeOf(t, append(load, "-o", "yaml")...)
	var got, chart map[string]any
	if err := yaml.Unmarshal([]byte(values), &got); err != nil || status != 0 {
		t.Fatalf("%v, %s\n%s", err, errs, values)
	}
	file, err := os.ReadFile("../../manifests/chart/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(file, &chart); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"replicas", "resources", "extraEnv"} {
		if _, known := chart[key]; !known || got[key] == nil {
			t.Errorf("%s: in the chart %v, printed %v", key, known, got[key])
		}
	}
	if len(got) != 3 {
		t.Errorf("printed: %v", got)
	}
}

// TestSizeFigures: the figures of `kvepp size` are those of the pages. Measure them again with the commands in the
// table of docs/operations.md, change both, and say in the page on which machine.
func TestSizeFigures(t *testing.T) {
	all := pages(t)
	_, table, found := strings.Cut(all["docs/benchmarks.md"], "## What a request costs\n")
	if !found {
		t.Fatal("docs/benchmarks.md has no section about the cost of a request")
	}
	rows := regexp.MustCompile(`(?m)^\| (?:4 KB|32 KB \(8,000 tokens\)|256 KB|1 MB) \| [\d,]+ \| [\d,]+ \| ` +
		`([\d,]+) \| \d`)
	var got []float64
	for _, m := range rows.FindAllStringSubmatch(table, -1) {
		n, err := strconv.Atoi(strings.ReplaceAll(m[1], ",", ""))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, float64(n))
	}
	var want []float64
	for _, r := range requestCPU {
		want = append(want, float64(int(r.seconds*1e6+0.5)))
	}
	if !slices.Equal(got, want) {
		t.Errorf("a request takes %v us in docs/benchmarks.md, and %v in kvepp size: measure with make bench-path",
			got, want)
	}
	_, sizing, _ := strings.Cut(all["docs/operations.md"], "\n## Sizing\n")
	sizing, _, _ = strings.Cut(sizing, "\n## ")
	// Each figure stands in the code as a number, and in the page as its text.
	for _, c := range []struct {
		text, with string
		value      float64 // as the text says
		figure     float64
	}{
		{"| %g us (one run of 500 streams", "make bench-path PART=streams", 17, pieceCPU * 1e6},
		{"| %g of a core for 10,000 a second |", "make bench-replicas", 0.069, sharedCPU * 10000},
		{"0.24 to %g us (removing it: 0.05 to 0.14)", "make bench-events and bench-index", 0.27, eventCPU*1e6 - 0.14},
		{"| %g MiB; 0.22 MiB (200 and 1,600 workers", "ThousandPods", 76, baseMemory / (1 << 20)},
		{"| 76 MiB; %g MiB (200 and 1,600 workers", "ThousandPods", 0.22, workerMemory / (1 << 20)},
		{"(%g MiB of it libzmq's)", "ThousandPods", 0.1, libzmqMemory / (1 << 20)},
		{"| %g of a core; 0.03, and 334 MB", "ThousandPods", 0.002, (workerCPU - 0.03/1000) * 100},
		{"| %g of a core; 0.03, and 60 MB", "a kvepp without requests", 0.009, metricsCPU + 0.03/1000*100},
		{"names (%g bytes a block)", "make bench-index", 48, blockMemory},
	} {
		if text := fmt.Sprintf(c.text, c.value); !strings.Contains(sizing, text) {
			t.Errorf("docs/operations.md, Sizing, does not say %q any more; measure with %s", text, c.with)
		}
		if d := c.figure - c.value; d > 1e-9 || d < -1e-9 {
			t.Errorf("kvepp size computes with %v, docs/operations.md says %v; measure with %s", c.figure, c.value,
				c.with)
		}
	}
}
