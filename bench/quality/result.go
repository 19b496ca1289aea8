package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/test/harness/stack"
)

// result is the result of one scenario played once.
type result struct {
	prompt, cached int             // tokens over all requests
	ttft           []time.Duration // of each request
	work           map[string]int  // worker -> computed tokens: uncached prompt tokens and answer tokens
	failed         int
	err            error   // of the first request that failed
	busy           float64 // busy fraction of the machine's cores, 0 to 1
}

func (r *result) add(a *stack.Answer, err error) {
	if err != nil {
		if r.failed++; r.err == nil {
			r.err = err
		}
		return
	}
	cached := max(a.CachedTokens, 0)
	r.prompt += a.PromptTokens
	r.cached += cached
	r.ttft = append(r.ttft, a.TTFT)
	if r.work == nil {
		r.work = map[string]int{}
	}
	r.work[a.UpstreamWorker] += a.PromptTokens - cached + a.CompletionTokens
}

// share returns the percentage of prompt tokens that were cached.
func (r *result) share() float64 { return 100 * float64(r.cached) / float64(max(r.prompt, 1)) }

// percentile returns a percentile of the times to first token, in milliseconds.
func (r *result) percentile(p float64) float64 {
	if len(r.ttft) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(r.ttft))
	return float64(sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]) / float64(time.Millisecond)
}

// mean returns the mean time to first token, in milliseconds.
func (r *result) mean() float64 {
	var sum time.Duration
	for _, d := range r.ttft {
		sum += d
	}
	return float64(sum) / float64(max(len(r.ttft), 1)) / float64(time.Millisecond)
}

// balance returns the busiest worker's tokens divided by the mean; 1 is even.
func (r *result) balance() float64 {
	most, all := 0, 0
	for _, n := range r.work {
		most = max(most, n)
		all += n
	}
	return float64(most) * workers / float64(max(all, 1))
}

func (r *result) line() string {
	return fmt.Sprintf(
		"%3d requests, cached %4.1f%%, first token mean %.0f p50 %.0f p90 %.0f p99 %.0f ms, busiest worker %.2f, "+
			"machine %.0f%% busy",
		len(
			r.ttft,
		),
		r.share(),
		r.mean(),
		r.percentile(0.5),
		r.percentile(0.9),
		r.percentile(0.99),
		r.balance(),
		100*r.busy,
	)
}

// columns are the results of each scenario: the median over the seeds, the minimum and the maximum.
var columns = []struct {
	title  string
	value  func(*result) float64
	format string
}{
	{"prompt tokens cached, %", (*result).share, "%.1f"},
	{"first token mean, ms", (*result).mean, "%.0f"},
	{"p50", func(r *result) float64 { return r.percentile(0.5) }, "%.0f"},
	{"p90", func(r *result) float64 { return r.percentile(0.9) }, "%.0f"},
	{"p99", func(r *result) float64 { return r.percentile(0.99) }, "%.0f"},
	{"busiest worker's work, mean 1", (*result).balance, "%.2f"},
}

// table prints all results in Markdown.
func table(to io.Writer, results map[[2]string][]result, only string) {
	fmt.Fprint(to, "\n| | |")
	for _, c := range columns {
		fmt.Fprintf(to, " %s |", c.title)
	}
	fmt.Fprintf(to, "\n|%s\n", strings.Repeat("---|", 2+len(columns)))
	for _, sc := range scenarios {
		title := sc.name
		for _, sys := range systems {
			all := results[[2]string{sc.name, sys.name}]
			if len(all) == 0 {
				continue
			}
			fmt.Fprintf(to, "| %s | %s |", title, sys.name)
			title = ""
			for _, c := range columns {
				var values []float64
				for i := range all {
					values = append(values, c.value(&all[i]))
				}
				slices.Sort(values)
				fmt.Fprintf(to, " "+c.format, values[len(values)/2])
				if len(values) > 1 {
					fmt.Fprintf(to, " ("+c.format+"-"+c.format+")", values[0], values[len(values)-1])
				}
				fmt.Fprint(to, " |")
			}
			fmt.Fprintln(to)
		}
	}
	fmt.Fprintln(to)
	for _, sc := range scenarios {
		if strings.HasPrefix(sc.name, only) {
			fmt.Fprintf(to, "%s: %s.\n", sc.name, sc.about)
		}
	}
}

// cpu returns the machine's CPU time since its start, in ticks of all cores.
type cpu struct{ busy, all float64 }

func cpuTime() (t cpu) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t
	}
	line, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(line)[1:] {
		n, _ := strconv.ParseFloat(field, 64)
		if i >= 8 { // user time includes guest time
			break
		}
		t.all += n
		if i != 3 && i != 4 { // idle and iowait
			t.busy += n
		}
	}
	return t
}

func busyPart(from, to cpu) float64 { return (to.busy - from.busy) / max(to.all-from.all, 1) }
