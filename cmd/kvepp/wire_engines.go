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
	"kvepp/router/eject"
	"kvepp/scoring"
)

// tracker returns what follows the health of endpoints. pages, once set, reads their metrics pages.
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

// page is what a metrics page shows, in the tracker's words.
func page(s enginemetrics.PageState) eject.Page {
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

// showEjection shows how many workers get no requests, and why.
func showEjection(m *metrics.Metrics, t *eject.Tracker) {
	m.GaugeFunc(metrics.EjectedWorkers, metrics.EjectedWorkersHelp, prometheus.Labels{}, func() float64 {
		ejected, _ := t.Counts()
		return float64(ejected)
	})
	m.GaugeFunc(metrics.CordonedWorkers, metrics.CordonedWorkersHelp, prometheus.Labels{}, func() float64 {
		_, cordoned := t.Counts()
		return float64(cordoned)
	})
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
