package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvepp/internal/chart"
)

// measure is a number of one run that routers are compared by. It is computed from requests, so that they can be drawn
// again for an interval.
type measure struct {
	title string
	value func(samples []sample, floor float64) float64
}

// measures are those of the table of ratios. Less is better, but for the goodput.
var measures = []measure{
	{"TTFT mean", func(s []sample, _ float64) float64 { return mean(values(s, ttft)) }},
	{"p90", func(s []sample, _ float64) float64 { return percentile(values(s, ttft), 0.9) }},
	{"p99", func(s []sample, _ float64) float64 { return percentile(values(s, ttft), 0.99) }},
	{"greatest", func(s []sample, _ float64) float64 { return percentile(values(s, ttft), 1) }},
	{"mean above the floor", func(s []sample, floor float64) float64 { return mean(values(s, ttft)) - floor }},
	{"p90 above it", func(s []sample, floor float64) float64 { return percentile(values(s, ttft), 0.9) - floor }},
	{"end to end", func(s []sample, _ float64) float64 { return mean(values(s, endToEnd)) }},
	{"goodput", func(s []sample, _ float64) float64 { return goodput(s) }},
}

// sharedMeasures are those of the table of replicas.
var sharedMeasures = []measure{
	{"cached share", func(s []sample, _ float64) float64 { c, _ := cachedOf(s); return c }},
	{"TTFT p50", func(s []sample, _ float64) float64 { return percentile(values(s, ttft), 0.5) }},
	{"p90", func(s []sample, _ float64) float64 { return percentile(values(s, ttft), 0.9) }},
	{"p99", func(s []sample, _ float64) float64 { return percentile(values(s, ttft), 0.99) }},
}

// pair is one seed's run of a router, and that of the router that it is compared with.
type pair struct{ run, base *run }

// floor is what both runs' floors have in common: the lesser one, which makes ratios above it less favourable.
func (p *pair) floor() float64 { return min(p.run.Floor, p.base.Floor) }

// pairs returns the pairs of a scenario and two routers, by seed.
func pairs(runs []run, scenario, router, base string) (all []pair) {
	for i := range runs {
		if r := &runs[i]; r.Scenario == scenario && r.Router == router {
			for j := range runs {
				if b := &runs[j]; b.Scenario == scenario && b.Router == base && b.Seed == r.Seed {
					all = append(all, pair{r, b})
				}
			}
		}
	}
	return all
}

// draws is how often an interval draws seeds and conversations again.
const draws = 500

// ratio returns the median over the pairs of a measure's ratio to the baseline, and its 95 % interval, by drawing pairs
// and, within a pair, conversations again, the same ones of both routers (bootstrap, percentiles).
func (m *measure) ratio(all []pair, rng *rand.Rand) (median, low, high float64) {
	var ratios, drawn []float64
	for i := range all {
		p := &all[i]
		ratios = append(ratios, m.value(p.run.Samples, p.floor())/m.value(p.base.Samples, p.floor()))
	}
	var a, b []sample
	byConversation := make([][2]map[int][]sample, len(all))
	for i := range all {
		byConversation[i] = [2]map[int][]sample{group(all[i].run.Samples), group(all[i].base.Samples)}
	}
	for range draws {
		var once []float64
		for range all {
			i := rng.IntN(len(all))
			a, b = a[:0], b[:0]
			n := len(byConversation[i][1])
			for range n {
				c := rng.IntN(n)
				a = append(a, byConversation[i][0][c]...)
				b = append(b, byConversation[i][1][c]...)
			}
			floor := all[i].floor()
			once = append(once, m.value(a, floor)/m.value(b, floor))
		}
		drawn = append(drawn, middle(once))
	}
	return middle(ratios), percentile(drawn, 0.025), percentile(drawn, 0.975)
}

// group returns requests by conversation.
func group(samples []sample) map[int][]sample {
	all := map[int][]sample{}
	for _, x := range samples {
		all[x.Conversation] = append(all[x.Conversation], x)
	}
	return all
}

// middle returns the median; of an even number of values the mean of the two in the middle.
func middle(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// report writes the tables of all runs to a stream, and to the folder if there is one. It draws the chart there, else
// into charts, if it is not empty.
func (o *options) report(to io.Writer) error {
	runs, err := o.load()
	if err != nil {
		return err
	}
	var text bytes.Buffer
	results(&text, runs)
	ratios(&text, runs, baseline, measures, func(*system) bool { return true })
	ratios(&text, runs, single, sharedMeasures, func(sys *system) bool { return sys.replicas > 0 })
	for _, sc := range scenarios {
		if slices.ContainsFunc(runs, func(r run) bool { return r.Scenario == sc.name }) {
			fmt.Fprintf(&text, "- %s: %s.\n", sc.name, sc.about)
		}
	}
	if o.out != "" {
		if err := os.WriteFile(filepath.Join(o.out, "quality.md"), text.Bytes(), 0o644); err != nil {
			return err
		}
	}
	if folder := cmp.Or(o.out, o.charts); folder != "" {
		file := filepath.Join(folder, "quality.svg")
		if err := ratioBars(runs).Save(file); err != nil {
			return err
		}
		fmt.Fprintf(&text, "\nchart: %s\n", file)
	}
	_, err = fmt.Fprintf(to, "\n%s", text.Bytes())
	return err
}

// ratioBars returns a chart of the ratios of the 90th percentile of times to first token.
func ratioBars(runs []run) *chart.Chart {
	bars := chart.Chart{Title: "90th percentile of times to first token, relative to " + baseline,
		XLabel: "median of the ratios of the seeds; less is better", To: 1.2}
	for _, sc := range scenarios {
		for _, sys := range systems {
			all := pairs(runs, sc.name, sys.name, baseline)
			if len(all) == 0 || sys.name == baseline {
				continue
			}
			var ratios []float64
			for i := range all {
				p := &all[i]
				ratios = append(ratios, measures[1].value(p.run.Samples, 0)/measures[1].value(p.base.Samples, 0))
			}
			ratio := middle(ratios)
			bars.Bars = append(bars.Bars, chart.Bar{Name: sc.name + ", " + sys.name, Value: ratio})
			bars.To = max(bars.To, ratio)
		}
	}
	return &bars
}

// columns are those of the table of results: medians over the seeds.
var columns = []struct {
	title  string
	value  func(*run) float64
	format string
}{
	{"cached %", func(r *run) float64 { c, _ := cachedOf(r.Samples); return 100 * c }, "%.1f"},
	{"of possible", func(r *run) float64 { _, c := cachedOf(r.Samples); return 100 * c }, "%.0f"},
	{"TTFT mean, ms", func(r *run) float64 { return mean(values(r.Samples, ttft)) }, "%.0f"},
	{"p50", func(r *run) float64 { return percentile(values(r.Samples, ttft), 0.5) }, "%.0f"},
	{"p90", func(r *run) float64 { return percentile(values(r.Samples, ttft), 0.9) }, "%.0f"},
	{"p99", func(r *run) float64 { return percentile(values(r.Samples, ttft), 0.99) }, "%.0f"},
	{"greatest", func(r *run) float64 { return percentile(values(r.Samples, ttft), 1) }, "%.0f"},
	{"floor", func(r *run) float64 { return r.Floor }, "%.0f"},
	{"end to end, s", func(r *run) float64 { return mean(values(r.Samples, endToEnd)) / 1000 }, "%.2f"},
	{"goodput %", func(r *run) float64 { return 100 * goodput(r.Samples) }, "%.0f"},
	{"refused %", func(r *run) float64 { return 100 * float64(r.failures()) / float64(max(1, len(r.Samples))) },
		"%.0f"},
	{"busiest worker", (*run).balance, "%.2f"},
	{"working set", func(r *run) float64 { return float64(r.WorkingSet) / float64(max(r.Capacity, 1)) }, "%.1f"},
	{"cores busy %", func(r *run) float64 { return 100 * r.Busy }, "%.0f"},
	{"by the bench", func(r *run) float64 { return 100 * r.Own }, "%.0f"},
	{"CPU of the picker, ms a request",
		func(r *run) float64 { return 1000 * r.Picker / float64(max(1, len(r.Samples))) }, "%.2f"},
}

// results prints what each router did, in Markdown.
func results(to io.Writer, runs []run) {
	fmt.Fprint(to, "| | | seeds |")
	for _, c := range columns {
		fmt.Fprintf(to, " %s |", c.title)
	}
	fmt.Fprintf(to, "\n|%s\n", strings.Repeat("---|", 3+len(columns)))
	for _, sc := range scenarios {
		title := sc.name
		for _, sys := range systems {
			all := slices.DeleteFunc(slices.Clone(runs), func(r run) bool {
				return r.Scenario != sc.name || r.Router != sys.name
			})
			if len(all) == 0 {
				continue
			}
			fmt.Fprintf(to, "| %s | %s | %d |", title, sys.name, len(all))
			title = ""
			for _, c := range columns {
				var values []float64
				for i := range all {
					values = append(values, c.value(&all[i]))
				}
				fmt.Fprintf(to, " "+c.format+" |", middle(values))
			}
			fmt.Fprintln(to)
		}
	}
	fmt.Fprintln(to)
}

// ratios prints the ratios of these routers to another one, in Markdown; nothing without pairs.
func ratios(to io.Writer, runs []run, base string, measures []measure, shown func(*system) bool) {
	rng := rand.New(rand.NewPCG(1, 2))
	begun, format := false, " %.2f (%.2f-%.2f) |"
	if base == single {
		format = " %.3f (%.3f-%.3f) |" // the goal is 3 %
	}
	for _, sc := range scenarios {
		title := sc.name
		for i := range systems {
			sys := &systems[i]
			all := pairs(runs, sc.name, sys.name, base)
			if len(all) == 0 || sys.name == base || !shown(sys) {
				continue
			}
			if !begun {
				fmt.Fprintf(to, "Ratios to %s, paired by seed: the median and its 95 %% interval.\n\n| | |", base)
				for _, m := range measures {
					fmt.Fprintf(to, " %s |", m.title)
				}
				fmt.Fprintf(to, "\n|%s\n", strings.Repeat("---|", 2+len(measures)))
				begun = true
			}
			fmt.Fprintf(to, "| %s | %s |", title, sys.name)
			title = ""
			for i := range measures {
				median, low, high := measures[i].ratio(all, rng)
				fmt.Fprintf(to, format, median, low, high)
			}
			fmt.Fprintln(to)
		}
	}
	if begun {
		fmt.Fprintln(to)
	}
}
