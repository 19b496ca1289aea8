package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"
)

// shadowRate is the load of the part shadow, in requests a second.
const shadowRate = 200

// shadow compares what requests take without a filter and with kvepp in shadow, in pairs of measurements: while kvepp
// runs, while it is stopped (from the moment when Envoy does not know that yet), and without it.
func shadow(ctx context.Context, o *options, p *programs) error {
	if _, err := p.pace(ctx, p.shadow, shadowRate, 2*o.length); err != nil { // fills caches
		return err
	}
	kvepp := p.shadow.processor
	fmt.Printf("\n%d requests a second of 4 KB over 64 connections; medians of %d pairs of %s each:\n", shadowRate,
		o.rounds, 10*o.length)
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "kvepp\tp50 ms alone\tin shadow\tratio\tp99 ms alone\tin shadow\tratio, from\tto\t")
	for _, state := range []struct {
		name          string
		before, after func()
	}{
		{"runs", func() {}, func() {}},
		{"is stopped", func() { kvepp.Signal(syscall.SIGSTOP) }, func() { kvepp.Signal(syscall.SIGCONT) }},
		{"is away", kvepp.Kill, func() {}},
	} {
		var values [6][]float64
		for round := range o.rounds {
			var p50, p99 [2]float64
			for i := range 2 {
				c, state := p.alone, state
				if (i+round)%2 == 1 {
					c = p.shadow
					state.before()
				}
				times, err := p.pace(ctx, c, shadowRate, 10*o.length)
				if c == p.shadow {
					state.after()
				}
				if err != nil {
					return fmt.Errorf("kvepp %s, %s: %w", state.name, c.name, err)
				}
				slices.Sort(times)
				p50[(i+round)%2], p99[(i+round)%2] = ms(times[len(times)/2]), ms(times[len(times)*99/100])
			}
			for i, v := range []float64{p50[0], p50[1], p50[1] / p50[0], p99[0], p99[1], p99[1] / p99[0]} {
				values[i] = append(values[i], v)
			}
			if err := sleepUntilHealthy(ctx); err != nil {
				return err
			}
		}
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", state.name, middle(values[0]),
			middle(values[1]), middle(values[2]), middle(values[3]), middle(values[4]), slices.Min(values[5]),
			slices.Max(values[5]))
		if state.name == "runs" {
			const counted = `kvepp_shadow_requests_total{outcome="approximate"}` // there are no KV events
			m, err := kvepp.series(counted)
			if err != nil {
				return err
			}
			fmt.Printf("%s %.0f\n", counted, m[counted])
		}
	}
	return t.Flush()
}

// sleepUntilHealthy gives Envoy the time to find a continued kvepp healthy.
func sleepUntilHealthy(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(3 * time.Second):
		return nil
	}
}
