package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/router/eject"
	"kvepp/scoring"
)

// engineGauges is what `kvepp serve` can be told of the engines' own metrics. The flags have the names of the Gateway
// API Inference Extension's endpoint picker.
type engineGauges struct {
	interval, stale time.Duration
	port            uint16
	path, scheme    string
	skipVerify      bool

	queued, running, usage string // metrics, as enginemetrics.ParseMetric reads them
}

// add declares the flags.
func (g *engineGauges) add(f *pflag.FlagSet) {
	f.DurationVar(
		&g.interval,
		"refresh-metrics-interval",
		5*time.Second,
		"how often each engine's own metrics are read, give or take a tenth; beside the requests' way. 0: never",
	)
	f.DurationVar(
		&g.stale,
		"metrics-staleness-threshold",
		0,
		"what an engine told longer ago counts as not known. 0: three times --refresh-metrics-interval",
	)
	f.Uint16Var(
		&g.port,
		"model-server-metrics-port",
		0,
		"`PORT` at which engines show them. 0: that of the endpoint's address. With Dynamo's frontends, which show "+
			"none: the workers' DYN_SYSTEM_PORT, where a worker has its frontend beside it. An endpoint's own "+
			"metrics: in the endpoints file goes before",
	)
	f.StringVar(&g.path, "model-server-metrics-path", "/metrics", "`PATH` of that page")
	f.StringVar(&g.scheme, "model-server-metrics-scheme", "http", "its scheme, `http or https`")
	f.BoolVar(
		&g.skipVerify,
		"model-server-metrics-https-insecure-skip-verify",
		true,
		"with https: do not check the engines' certificates",
	)
	f.StringVar(
		&g.queued,
		"total-queued-requests-metric",
		"",
		"which metric is the number of requests that wait, as `METRIC` or METRIC{LABEL=VALUE}. Default: vLLM's, "+
			"SGLang's, TensorRT-LLM's or Triton's, whichever there is",
	)
	f.StringVar(
		&g.running,
		"total-running-requests-metric",
		"",
		"which `METRIC` is the number of requests that are computed; likewise",
	)
	f.StringVar(
		&g.usage,
		"kv-cache-usage-percentage-metric",
		"",
		"which `METRIC` is the part of the KV blocks that requests hold, 0 to 1; likewise",
	)
}

// withoutPool is the name of the pool, in labels, where there is no InferencePool to have one.
const withoutPool = "kvepp"

// minInterval is the extension's own.
const minInterval = 50 * time.Millisecond

// config returns how the engines are read. Its Interval is 0 if they are not.
func (g *engineGauges) config() (enginemetrics.Config, error) {
	c := enginemetrics.Config{
		Interval:   g.interval,
		Stale:      g.stale,
		Scheme:     g.scheme,
		Port:       g.port,
		Path:       g.path,
		SkipVerify: g.skipVerify,
	}
	switch {
	case g.interval != 0 && g.interval < minInterval:
		return c, fmt.Errorf(
			"--refresh-metrics-interval %v: must be at least %v, for example 5s, or 0 for never",
			g.interval,
			minInterval,
		)
	case g.stale != 0 && g.stale < g.interval:
		return c, fmt.Errorf(
			"--metrics-staleness-threshold %v is shorter than --refresh-metrics-interval %v, so that nothing would "+
				"be known most of the time; leave it out, or give 0",
			g.stale,
			g.interval,
		)
	case !strings.HasPrefix(g.path, "/"):
		return c, errors.New("--model-server-metrics-path must begin with a slash")
	}
	if err := oneOf("model-server-metrics-scheme", g.scheme, "http", "https"); err != nil {
		return c, err
	}
	for _, m := range []struct {
		flag, value string
		to          *enginemetrics.Metric
	}{{"total-queued-requests-metric", g.queued, &c.Waiting}, {"total-running-requests-metric", g.running, &c.Running},
		{"kv-cache-usage-percentage-metric", g.usage, &c.Usage}} {
		if m.value == "" {
			continue
		}
		var err error
		if *m.to, err = enginemetrics.ParseMetric(m.value); err != nil {
			return c, fmt.Errorf("--%s: %w", m.flag, err)
		}
	}
	return c, nil
}

// check says what is wrong with them.
func (g *engineGauges) check() error {
	_, err := g.config()
	return err
}

// followEngines starts reading the engines of p until ctx ends; nil if they are not to be.
func followEngines(
	ctx context.Context,
	o *options,
	p *pool.Pool,
	book *scoring.ActiveSequences,
	health *eject.Tracker,
	frontends bool,
	log *slog.Logger,
) (*enginemetrics.Gauges, error) {
	c, err := o.engineGauges.config()
	if err != nil || c.Interval == 0 {
		return nil, err
	}
	c.Frontends = frontends
	if o.feed.EventPlane != "zmq" {
		c.NATSServer = o.feed.NATSServer
	}
	c.Booked = func(w kvblock.Worker) int { return book.Load(w).Requests }
	c.Health = func(w kvblock.Worker, s enginemetrics.PageState) { health.PageRead(w, page(s)) }
	c.SilentAfter = eject.SilentAfter
	g := enginemetrics.New(c, p, log)
	p.Watch(g)
	go g.Run(ctx)
	return g, nil
}

// kvUsage is what the router asks; nil if nothing is known.
func kvUsage(g *enginemetrics.Gauges) func([]float64) []float64 {
	if g == nil {
		return nil
	}
	return g.Usage
}

// showGauges exports what is known of the engines; of nil, that nothing is.
func showGauges(m *metrics.Metrics, name string, p *pool.Pool, g *enginemetrics.Gauges) {
	if g == nil {
		g = new(enginemetrics.Gauges)
	}
	m.Pool(name, func() metrics.InferencePool { return poolNow(p, g) })
	m.Source(metrics.WithGauges, metrics.WithGaugesHelp, nil, func() float64 { return float64(g.Known()) })
	m.Source(metrics.UnseenLoad, metrics.UnseenLoadHelp, nil, func() float64 { return float64(g.Unseen()) })
	for i, c := range g.Readings() {
		m.CounterSource(
			metrics.EngineReadings,
			metrics.EngineReadingsHelp,
			prometheus.Labels{"outcome": c.Outcome},
			func() float64 { return float64(g.Readings()[i].Readings) },
		)
	}
}

// poolNow is what the pool's workers are and say now.
func poolNow(p *pool.Pool, g *enginemetrics.Gauges) metrics.InferencePool {
	s := p.Acquire()
	defer s.Release()
	var now metrics.InferencePool
	type mean struct{ sum, n float64 }
	var usage, waiting, running mean
	add := func(m *mean, v float64) {
		if !math.IsNaN(v) {
			m.sum += v
			m.n++
		}
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Role == pool.Encode {
			continue
		}
		now.Ready++
		l := g.Of(w.Worker)
		add(&usage, l.Usage)
		add(&waiting, l.Waiting)
		add(&running, l.Running)
		if !math.IsNaN(l.Waiting) {
			now.Pods = append(now.Pods, metrics.PodQueue{Pod: podName(w), Waiting: l.Waiting})
		}
	}
	now.KVUsage, now.Waiting, now.Running = usage.sum/max(
		usage.n,
		1,
	), waiting.sum/max(
		waiting.n,
		1,
	), running.sum/max(
		running.n,
		1,
	)
	return now
}

// podName is the extension's name of a worker. Endpoints that are made of a pod's ports may have it already.
func podName(w *pool.Worker) string {
	suffix := "-rank-" + strconv.FormatUint(uint64(w.Rank), 10)
	if strings.HasSuffix(w.Name, suffix) {
		return w.Name
	}
	return w.Name + suffix
}
