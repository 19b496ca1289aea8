package main

import (
	"context"
	"log/slog"
	"sync/atomic"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
	"kvepp/router/eject"
)

// tracker returns the tracker of the endpoints' health. It uses pages to scrape their metrics as soon as pages is set.
func tracker(
	c eject.Config,
	m *metrics.Metrics,
	pages *atomic.Pointer[enginemetrics.Gauges],
	log *slog.Logger,
) *eject.Tracker {
	for _, cause := range eject.Causes {
		m.InitEjection(string(cause))
	}
	c.Ejected = func(cause eject.Cause) { m.Ejection(string(cause)) }
	c.ReadPage = func(w kvblock.Worker) {
		if g := pages.Load(); g != nil {
			g.ReadNow(w)
		}
	}
	return eject.New(c, log)
}

// followEngines starts to scrape the engines until ctx ends; nil if --refresh-metrics-interval is 0.
func (s *server) followEngines(ctx context.Context) *enginemetrics.Gauges {
	c := s.options.gauges
	if c.Interval == 0 {
		return nil
	}
	c.Frontends = s.models.Engine() == prompt.Dynamo
	c.NATSServer = s.feed.NATSServer
	c.Booked = func(w kvblock.Worker) int { return s.book.Load(w).Requests }
	c.Health = s.health.PageRead
	if c.Frontends {
		c.FirstToken = s.firstTokens.Noted
	} else {
		c.Adapters = s.models.Listed(s.pool, s.adapters)
		s.pool.OnLeave(s.adapters.Left)
	}
	c.SilentAfter = eject.SilentAfter
	g := enginemetrics.New(c, s.pool, s.log)
	s.pool.Watch(g)
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
