package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// run is one scenario played once through one router.
type run struct {
	Scenario, Router string
	Seed             uint64
	Workers          int
	Capacity         int     // tokens of all workers' KV blocks
	WorkingSet       int     // the most tokens of conversations that were held at once
	Floor            float64 // TTFT of a cached prompt on idle workers, ms; 0: no prompt was cached
	Busy, Own        float64 // shares of the machine's cores that all programs, and this bench's, used, 0 to 1
	Picker           float64 // CPU seconds of the picker's process; 0: it has none of its own
	Samples          []sample
}

// sample is one request. Times are in milliseconds.
type sample struct {
	Conversation     int     // requests of one conversation follow each other
	TTFT             float64 // from sending the request to the first piece of the response's text
	EndToEnd         float64 // to the last piece
	Gap              float64 // mean time between tokens; 0: the response has one
	Prompt, Output   int     // tokens
	Cached, Possible int     // prompt tokens that the engine, and a cache of infinite size, had
	Worker           string
	Failed           bool
}

// keep adds a run to those of the folder, or to those in memory.
func (o *options) keep(r run) error {
	if o.out == "" {
		o.runs = append(o.runs, r)
		return nil
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(o.out, "runs.jsonl"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(f).Encode(r); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// load returns all runs that were kept. A later run replaces an earlier one of the same scenario, router and seed.
func (o *options) load() ([]run, error) {
	if o.out == "" {
		return o.runs, nil
	}
	f, err := os.Open(filepath.Join(o.out, "runs.jsonl"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []run
	lines := json.NewDecoder(bufio.NewReader(f))
	for lines.More() {
		var r run
		if err := lines.Decode(&r); err != nil {
			return nil, fmt.Errorf("%s: run %d: %w", f.Name(), len(all)+1, err)
		}
		all = slices.DeleteFunc(all, func(other run) bool {
			return other.Scenario == r.Scenario && other.Router == r.Router && other.Seed == r.Seed
		})
		all = append(all, r)
	}
	return all, nil
}

func (r *run) failures() (n int) {
	for i := range r.Samples {
		if r.Samples[i].Failed {
			n++
		}
	}
	return n
}

// values returns a value of each request that succeeded.
func values(samples []sample, value func(*sample) float64) (all []float64) {
	for i := range samples {
		if !samples[i].Failed {
			all = append(all, value(&samples[i]))
		}
	}
	return all
}

func ttft(x *sample) float64     { return x.TTFT }
func endToEnd(x *sample) float64 { return x.EndToEnd }

// percentile returns a percentile of values, 0..1, the nearest rank below; 0 without values.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(max(len(values), 1))
}

// goodput returns the share of requests within the SLO, 0 to 1; a failed one missed it.
func goodput(samples []sample) float64 {
	good := 0
	for i := range samples {
		if x := &samples[i]; !x.Failed && x.TTFT <= sloTTFT && x.Gap <= sloGap {
			good++
		}
	}
	return float64(good) / float64(max(len(samples), 1))
}

// cachedOf returns the share of prompt tokens that were cached, and of those that an infinite cache would have had; 0
// if it would have had none.
func cachedOf(samples []sample) (ofPrompt, ofPossible float64) {
	prompt, cached, possible := 0, 0, 0
	for i := range samples {
		x := &samples[i]
		prompt += x.Prompt
		cached += x.Cached
		possible += x.Possible
	}
	if possible == 0 {
		return float64(cached) / float64(max(prompt, 1)), 0
	}
	return float64(cached) / float64(max(prompt, 1)), float64(cached) / float64(possible)
}

// balance returns the busiest worker's computed tokens divided by the mean; 1 is even.
func (r *run) balance() float64 {
	work := map[string]int{}
	most, all := 0, 0
	for i := range r.Samples {
		x := &r.Samples[i]
		n := x.Prompt - x.Cached + x.Output
		work[x.Worker] += n
		all += n
		most = max(most, work[x.Worker])
	}
	return float64(most) * float64(r.Workers) / float64(max(all, 1))
}

func (r *run) line() string {
	first := values(r.Samples, ttft)
	cached, possible := cachedOf(r.Samples)
	return fmt.Sprintf("%3d requests, cached %4.1f%% (of possible %5.1f%%), TTFT mean %.0f p50 %.0f p90 %.0f p99 %.0f "+
		"ms (floor %.0f), end to end %.1f s, goodput %.0f%%, failed %d, busiest %.2f, working set %.1f of capacity, "+
		"cores %.0f%% busy, %.0f%% by this", len(r.Samples), 100*cached, 100*possible, mean(first),
		percentile(first, .5), percentile(first, .9), percentile(first, .99), r.Floor,
		mean(values(r.Samples, endToEnd))/1000, 100*goodput(r.Samples), r.failures(), r.balance(),
		float64(r.WorkingSet)/float64(max(r.Capacity, 1)), 100*r.Busy, 100*r.Own)
}
