package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"text/tabwriter"
	"time"
)

// pageRate is the load of the part page, in requests a second.
const pageRate = 1000

// pageView is what an open page asks for: paths of the admin address, and how often, as serve/web/assets/views.js
// says. An interval of 0 is a stream that stays open.
type pageView struct {
	name string
	asks []struct {
		path  string
		every time.Duration
	}
}

// pageViews are no page, the view that a page opens with, and the one with the most data.
func pageViews() []*pageView {
	type ask = struct {
		path  string
		every time.Duration
	}
	return []*pageView{
		{name: "no page"},
		{name: "page at Fleet", asks: []ask{{"/debug/fleet", 2 * time.Second},
			{"/debug/fleet?history=1", 10 * time.Second}}},
		{name: "page at Requests", asks: []ask{{"/debug/decisions?follow=1&rate=20", 0},
			{"/debug/decisions?n=50", time.Hour}}},
	}
}

// paged is one measurement: CPU time of kvepp, and time of a decision, in microseconds for each request.
type paged struct {
	cpu, pick, rate float64
	asked           int // bytes that the page read
}

// page measures what an open page costs kvepp at pageRate requests a second.
func page(ctx context.Context, o *options, p *programs) error {
	views := pageViews()
	all := map[*pageView][]paged{}
	for round := -1; round < o.rounds; round++ { // the first one fills caches, and does not count
		for i := range views {
			v := views[(i+max(round, 0))%len(views)]
			m, err := p.underPage(ctx, v, 10*o.length)
			if err != nil {
				return fmt.Errorf("%s: %w", v.name, err)
			}
			if round >= 0 {
				all[v] = append(all[v], m)
			}
		}
	}
	fmt.Printf("\n%d requests a second of 4 KB, unseen text, 64 connections; medians of %d rounds of %s, ratios "+
		"within a round:\n", pageRate, o.rounds, 10*o.length)
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\ta second\tkvepp's CPU us\ttimes\tpick us\ttimes\tpage's KB a second\t")
	ratios := map[*pageView]float64{}
	for _, v := range views {
		of := func(value func(m, without paged) float64) float64 {
			var values []float64
			for i, m := range all[v] {
				values = append(values, value(m, all[views[0]][i]))
			}
			return middle(values)
		}
		ratios[v] = of(func(m, without paged) float64 { return m.cpu / without.cpu })
		fmt.Fprintf(t, "%s\t%.0f\t%.1f\t%.3f\t%.1f\t%.3f\t%.1f\t\n", v.name,
			of(func(m, _ paged) float64 { return m.rate }), of(func(m, _ paged) float64 { return m.cpu }), ratios[v],
			of(func(m, _ paged) float64 { return m.pick }),
			of(func(m, without paged) float64 { return m.pick / without.pick }),
			of(func(m, _ paged) float64 { return float64(m.asked) / 1024 / (10 * o.length).Seconds() }))
	}
	t.Flush()
	for _, v := range views[1:] {
		goal("W1 "+v.name+", kvepp's CPU beside that without a page", ratios[v], 1.03)
	}
	return nil
}

// underPage loads kv while a page is open.
func (p *programs) underPage(ctx context.Context, v *pageView, length time.Duration) (m paged, err error) {
	const sum, count = `kvepp_phase_seconds_sum{phase="pick"}`, `kvepp_phase_seconds_count{phase="pick"}`
	before, err := p.kv.processor.series(sum, count)
	if err != nil {
		return m, err
	}
	cpu, err := p.kv.processor.cpu()
	if err != nil {
		return m, err
	}
	open, closePage := context.WithCancel(ctx)
	defer closePage()
	var readers sync.WaitGroup
	var mu sync.Mutex
	var failed error
	for _, a := range v.asks {
		readers.Go(func() {
			n, err := p.read(open, a.path, a.every)
			mu.Lock()
			defer mu.Unlock()
			m.asked, failed = m.asked+n, errors.Join(failed, err)
		})
	}
	began := time.Now()
	times, err := p.pace(ctx, p.kv, pageRate, length)
	sent, took := len(times), time.Since(began)
	after, cpuErr := p.kv.processor.cpu()
	closePage()
	readers.Wait()
	if err = errors.Join(err, cpuErr, failed); err != nil {
		return m, err
	}
	end, err := p.kv.processor.series(sum, count)
	if err != nil {
		return m, err
	}
	m.rate = float64(sent) / took.Seconds()
	m.cpu = float64(after-cpu) / 1e3 / float64(sent)
	m.pick = 1e6 * (end[sum] - before[sum]) / (end[count] - before[count])
	return m, nil
}

// read asks a path of the page until ctx ends, and returns the bytes of the responses.
func (p *programs) read(ctx context.Context, path string, every time.Duration) (n int, err error) {
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", p.admin, path),
			nil)
		if err != nil {
			return n, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			var got int64
			got, err = io.Copy(io.Discard, bufio.NewReader(resp.Body))
			n += int(got)
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return n, fmt.Errorf("%s: %s", path, resp.Status)
			}
		}
		if ctx.Err() != nil {
			return n, nil
		}
		if err == nil && every == 0 {
			err = errors.New("the stream ended")
		}
		if err != nil {
			return n, fmt.Errorf("%s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return n, nil
		case <-time.After(every):
		}
	}
}

// pace sends so many requests a second over 64 connections, and returns how long each took. A connection that is late
// goes on at once.
func (p *programs) pace(
	ctx context.Context, to *column, rate int, length time.Duration,
) (times []time.Duration, err error) {
	const connections = 64
	began := time.Now()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range connections {
		w := p.words.writer()
		wg.Go(func() {
			took, failed := paceOne(ctx, to, rate, w, began, i, connections, length)
			mu.Lock()
			defer mu.Unlock()
			times, err = append(times, took...), errors.Join(err, failed)
		})
	}
	wg.Wait()
	return times, err
}

// paceOne sends each connections-th request, from the first one on.
func paceOne(
	ctx context.Context,
	to *column,
	rate int,
	w *writer,
	began time.Time,
	first, connections int,
	length time.Duration,
) (times []time.Duration, err error) {
	c, err := dial(to.listen)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for k := first; ; k += connections {
		at := time.Duration(k) * time.Second / time.Duration(rate)
		if at >= length {
			return times, nil
		}
		body := w.cut(4 << 10)
		select {
		case <-ctx.Done():
			return times, ctx.Err()
		case <-time.After(time.Until(began.Add(at))):
		}
		sent := time.Now()
		if err := c.ask(body); err != nil {
			return times, err
		}
		times = append(times, time.Since(sent))
	}
}
