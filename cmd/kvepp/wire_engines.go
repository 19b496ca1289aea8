package main

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
	"kvepp/router/eject"
	"kvepp/scoring"
)

// tracker returns the tracker of the endpoints' health. It uses pages to scrape their metrics as soon as pages is set.
func (e *ejection) tracker(
	m *metrics.Metrics,
	pages *atomic.Pointer[enginemetrics.Gauges],
	log *slog.Logger,
) *eject.Tracker {
	for _, cause := range eject.Causes {
		m.InitEjection(string(cause))
	}
	return eject.New(eject.Config{
		Off:                 !e.on,
		ConsecutiveFailures: e.consecutive,
		FailurePercent:      e.percent,
		MaxPercent:          e.maxPercent,
		Time:                e.time,
		Ejected:             func(cause eject.Cause) { m.Ejection(string(cause)) },
		ReadPage: func(w kvblock.Worker) {
			if g := pages.Load(); g != nil {
				g.ReadNow(w)
			}
		},
	}, log)
}

// pageState converts the state of a metrics page to the tracker's type.
func pageState(s enginemetrics.PageState) eject.Page {
	switch s {
	case enginemetrics.PageAnswers:
		return eject.PageAnswers
	case enginemetrics.PageRefused:
		return eject.PageRefused
	case enginemetrics.PageRefusedElsewhere:
		return eject.PageRefusedElsewhere
	case enginemetrics.PageSilent:
		return eject.PageSilent
	}
	return eject.PageUnknown
}

// exportEjection exports how many workers are ejected and how many are cordoned.
func exportEjection(m *metrics.Metrics, t *eject.Tracker) {
	m.GaugeFunc(metrics.EjectedWorkers, metrics.EjectedWorkersHelp, prometheus.Labels{}, func() float64 {
		ejected, _ := t.Counts()
		return float64(ejected)
	})
	m.GaugeFunc(metrics.CordonedWorkers, metrics.CordonedWorkersHelp, prometheus.Labels{}, func() float64 {
		_, cordoned := t.Counts()
		return float64(cordoned)
	})
}

// followEngines starts to scrape the engines of p until ctx ends; nil if --refresh-metrics-interval is 0.
func followEngines(
	ctx context.Context,
	o *options,
	p *pool.Pool,
	book *scoring.ActiveSequences,
	health *eject.Tracker,
	log *slog.Logger,
) *enginemetrics.Gauges {
	c := o.config.gauges
	if c.Interval == 0 {
		return nil
	}
	c.Frontends = o.config.engine.Engine == prompt.Dynamo
	if o.feed.EventPlane != "zmq" {
		c.NATSServer = o.feed.NATSServer
	}
	c.Booked = func(w kvblock.Worker) int { return book.Load(w).Requests }
	c.Health = func(w kvblock.Worker, s enginemetrics.PageState) { health.PageRead(w, pageState(s)) }
	c.SilentAfter = eject.SilentAfter
	g := enginemetrics.New(c, p, log)
	p.Watch(g)
	go g.Run(ctx)
	return g
}

// kvUsage returns router.Config.KVUsage; nil if kvepp does not scrape engines.
func kvUsage(g *enginemetrics.Gauges) func([]float64) []float64 {
	if g == nil {
		return nil
	}
	return g.Usage
}
