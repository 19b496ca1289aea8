package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"kvepp/internal/chart"
)

// result is one measurement.
type result struct {
	rate             float64       // requests a second
	p50, p99         time.Duration // per request, or per piece of a stream
	processor, envoy float64       // CPU microseconds per request or piece
	allocations, kb  float64       // of the processor, per request or piece
}

const mallocs, allocated = "go_memstats_mallocs_total", "go_memstats_alloc_bytes_total"

// measure returns the cost of a load through a column, per request or piece.
func (p *programs) measure(
	c *column,
	do func() (times []time.Duration, took time.Duration, n int, err error),
) (r result, err error) {
	before, err := c.processor.series(mallocs, allocated)
	if err != nil {
		return r, err
	}
	processor, err := c.processor.cpu()
	if err != nil {
		return r, err
	}
	envoy, err := p.envoy.cpu()
	if err != nil {
		return r, err
	}
	times, took, n, err := do()
	if err != nil {
		return r, fmt.Errorf("%s: %w", c.name, err)
	}
	if len(times) == 0 {
		return r, fmt.Errorf("%s: no measurement", c.name)
	}
	processorAfter, err := c.processor.cpu()
	if err != nil {
		return r, err
	}
	envoyAfter, err := p.envoy.cpu()
	if err != nil {
		return r, err
	}
	after, err := c.processor.series(mallocs, allocated)
	if err != nil {
		return r, err
	}
	slices.Sort(times)
	each := func(d time.Duration) float64 { return float64(d) / 1e3 / float64(n) }
	return result{rate: float64(n) / took.Seconds(), p50: times[len(times)/2], p99: times[len(times)*99/100],
		processor: each(processorAfter - processor), envoy: each(envoyAfter - envoy),
		allocations: (after[mallocs] - before[mallocs]) / float64(
			n,
		), kb: (after[allocated] - before[allocated]) / 1024 / float64(n)}, nil
}

// measureAll measures columns in turns, beginning with another one each time, and returns each one's medians.
func (o *options) measureAll(
	ctx context.Context,
	columns []*column,
	one func(*column) (result, error),
) (map[*column]result, error) {
	all := map[*column][]result{}
	for round := range o.rounds {
		for i := range columns {
			c := columns[(i+round)%len(columns)]
			r, err := one(c)
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return nil, err
			}
			all[c] = append(all[c], r)
		}
	}
	out := map[*column]result{}
	for c, rs := range all {
		out[c] = result{rate: median(rs, func(r result) float64 { return r.rate }),
			p50:         time.Duration(median(rs, func(r result) float64 { return float64(r.p50) })),
			p99:         time.Duration(median(rs, func(r result) float64 { return float64(r.p99) })),
			processor:   median(rs, func(r result) float64 { return r.processor }),
			envoy:       median(rs, func(r result) float64 { return r.envoy }),
			allocations: median(rs, func(r result) float64 { return r.allocations }),
			kb:          median(rs, func(r result) float64 { return r.kb })}
	}
	return out, nil
}

func median(rs []result, of func(result) float64) float64 {
	values := make([]float64, len(rs))
	for i, r := range rs {
		values[i] = of(r)
	}
	return middle(values)
}

// middle returns the median of values, which it sorts.
func middle(values []float64) float64 {
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// show prints a table, and draws the processors' CPU time as the chart with this name.
func (o *options) show(
	name, title string,
	columns []*column,
	results map[*column]result,
	echo *column,
) error {
	fmt.Printf("\n%s\n", title)
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\ta second\tp50 ms\tp99 ms\tprocessor us\tof echo's\tallocations\tKB\tEnvoy us\t")
	for _, c := range columns {
		r := results[c]
		fmt.Fprintf(t, "%s\t%.0f\t%.2f\t%.2f\t", c.name, r.rate, ms(r.p50), ms(r.p99))
		if c.processor == nil {
			fmt.Fprint(t, "\t\t\t\t")
		} else {
			base := results[echo].processor
			fmt.Fprintf(t, "%.0f\t%.2f\t%.0f\t%.0f\t", r.processor, r.processor/base, r.allocations, r.kb)
		}
		fmt.Fprintf(t, "%.0f\t\n", r.envoy)
	}
	t.Flush()
	if o.out == "" {
		return nil
	}
	bars := chart.Chart{Title: "CPU of the processor: " + name, XLabel: "us for each request or piece"}
	for _, c := range columns {
		if c.processor != nil {
			bars.Bars = append(bars.Bars, chart.Bar{Name: c.name, Value: results[c].processor})
		}
	}
	file := filepath.Join(o.out, "path-"+strings.ReplaceAll(strings.ReplaceAll(name, ",", ""), " ", "-")+".svg")
	fmt.Println("  chart: " + file)
	return bars.Save(file)
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func goal(text string, value, most float64) { verdict(text, value, "at most", most, value <= most) }

func goalAtLeast(text string, value, least float64) {
	verdict(text, value, "at least", least, value >= least)
}

func verdict(text string, value float64, bound string, limit float64, met bool) {
	word := "met"
	if !met {
		word = "NOT MET"
	}
	fmt.Printf("  %s: %.2f (goal: %s %g) %s\n", text, value, bound, limit, word)
}

// besideGAIE are the goals for some body sizes compared with the Gateway API's own endpoint picker: how many times its
// requests per second, and how many times less CPU per request, for a mode that does not read prompts.
var besideGAIE = map[int]struct{ rate, cpu float64 }{4 << 10: {1.8, 3}, 32 << 10: {2.7, 4.5}, 256 << 10: {4.5, 9}}

// bodies measures requests of several sizes, each with new text.
func bodies(ctx context.Context, o *options, p *programs) error {
	for _, size := range []int{4 << 10, 32 << 10, 256 << 10, 1 << 20} {
		if o.size != 0 && o.size != size>>10 {
			continue
		}
		for _, connections := range []int{1, 64} {
			if o.connections != 0 && o.connections != connections {
				continue
			}
			results, err := o.measureAll(ctx, p.columns, func(c *column) (result, error) {
				return p.measure(c, func() ([]time.Duration, time.Duration, int, error) {
					l := load{
						port:        c.listen,
						connections: connections,
						length:      o.length,
						next:        func(w *writer) (first, body []byte) { return nil, w.cut(size) },
					}
					m, err := l.run(ctx, p.words)
					if err != nil {
						return nil, 0, 0, err
					}
					return m.times, m.took, m.sent, nil
				})
			})
			if err != nil {
				return err
			}
			if err := o.show(
				fmt.Sprintf("bodies of %d KB, %d connections", size>>10, connections),
				fmt.Sprintf("chats of %d KB, %d connections; unseen text; for each request:", size>>10, connections),
				p.columns,
				results,
				p.echo,
			); err != nil {
				return err
			}
			ratio := results[p.leastLoaded].processor / results[p.echo].processor
			goal("P1 CPU of least-loaded beside the echo's", ratio, 1.3)
			goal("P2 the same, further", ratio, 0.67)
			if p.gaie == nil {
				continue
			}
			rate := func(c *column) float64 { return results[c].rate / results[p.gaie].rate }
			cpu := func(c *column) float64 { return results[p.gaie].processor / results[c].processor }
			if goals, ok := besideGAIE[size]; ok && connections > 1 {
				goalAtLeast("P1 GAIE's CPU beside that of least-loaded", cpu(p.leastLoaded), goals.cpu)
				goalAtLeast("P4 requests a second of least-loaded beside GAIE's", rate(p.leastLoaded), goals.rate)
			}
			for _, c := range []*column{p.leastLoaded, p.kv} {
				fmt.Printf(
					"  %s beside GAIE: %.2f times the requests a second, 1/%.2f of the CPU\n",
					c.name,
					rate(c),
					cpu(c),
				)
			}
		}
	}
	return nil
}

// chatBytes is the size of a text of about 8,000 tokens of Qwen 3's.
const chatBytes = 33 << 10

// chats measures the cost of tokenizing: new chats of 8,000 tokens, and chats grown by a turn.
func chats(ctx context.Context, o *options, p *programs) error {
	columns := []*column{p.alone, p.echo, p.leastLoaded, p.kv}
	for _, kind := range []struct {
		name string
		next func(*writer) (first, body []byte)
		most float64
	}{
		{"unseen", func(w *writer) (first, body []byte) { return nil, w.chat(nil, chatBytes, false) }, 1},
		{"grown by a turn", func(w *writer) (first, body []byte) {
			first = w.chat(nil, chatBytes-900, false)
			return first, w.grown(first)
		}, 0.4},
	} {
		results, err := o.measureAll(ctx, columns, func(c *column) (result, error) {
			return p.measure(c, func() ([]time.Duration, time.Duration, int, error) {
				l := load{port: c.listen, connections: 1, length: 2 * o.length, next: kind.next}
				m, err := l.run(ctx, p.words)
				if err != nil {
					return nil, 0, 0, err
				}
				return m.times, m.took, m.sent, nil
			})
		})
		if err != nil {
			return err
		}
		if err := o.show(
			"chats "+kind.name,
			fmt.Sprintf(
				"chats of about 8,000 tokens, %s, 1 connection; times of these, the rest for every request:",
				kind.name,
			),
			columns,
			results,
			p.echo,
		); err != nil {
			return err
		}
		goal("P3 added to the echo's p50, ms", ms(results[p.kv].p50-results[p.echo].p50), kind.most)
	}
	return nil
}

// streams measures streamed responses.
func streams(ctx context.Context, o *options, p *programs) error {
	columns := []*column{p.alone, p.echo, p.leastLoaded, p.kv, p.leastLoadedBodiless}
	const interval = 100
	results, err := o.measureAll(ctx, columns, func(c *column) (result, error) {
		return p.measure(c, func() ([]time.Duration, time.Duration, int, error) {
			var (
				wg    sync.WaitGroup
				mu    sync.Mutex
				times []time.Duration
				first error
			)
			began := time.Now()
			for i := range o.streams {
				body := p.words.writer().chat(nil, 400, true)
				wg.Go(func() {
					select { // spread the streams over the interval between two pieces
					case <-time.After(time.Duration(i) * interval * time.Millisecond / time.Duration(o.streams)):
					case <-ctx.Done():
						return
					}
					delays, err := readStream(c.listen, o.chunks, interval, body)
					mu.Lock()
					defer mu.Unlock()
					times = append(times, delays...)
					if err != nil {
						first = err
					}
				})
			}
			wg.Wait()
			return times, time.Since(began), len(times), first
		})
	})
	if err != nil {
		return err
	}
	if err := o.show(
		"streams",
		fmt.Sprintf(
			"%d streams of %d pieces, ten a second each; for each piece, p50 and p99 from upstream to client:",
			o.streams,
			o.chunks,
		),
		columns,
		results,
		p.echo,
	); err != nil {
		return err
	}
	goal("P5 CPU of least-loaded beside the echo's", results[p.leastLoaded].processor/results[p.echo].processor, 1.2)
	goal("P5 CPU of kv beside the echo's", results[p.kv].processor/results[p.echo].processor, 1.2)
	goal("P5 added to the echo's p99, ms", ms(results[p.kv].p99-results[p.echo].p99), 1)
	return nil
}
