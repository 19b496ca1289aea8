package main

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool/enginemetrics"
	"kvepp/router/eject"
)

// ejection is what `kvepp serve` can be told of endpoints that fail.
type ejection struct {
	on                  bool
	consecutive         int
	percent, maxPercent int
	time, firstByte     time.Duration
}

// add declares the flags.
func (e *ejection) add(f *pflag.FlagSet) {
	f.BoolVar(
		&e.on,
		"eject",
		true,
		"eject endpoints that fail: they get no requests until a trial request succeeds (outlier detection, passive "+
			"health checks). Failures: no connection, a reset, 500, 502, 503 or 504, no headers of a streamed "+
			"response within --eject-first-byte. 4xx, 429 and a client that went away are none. An endpoint whose "+
			"metrics page refuses connections, or leaves a read and everything else unanswered for 5 s, is ejected "+
			"at once",
	)
	f.IntVar(&e.consecutive, "eject-consecutive-failures", 3, "eject an endpoint after `N` failures in a row")
	f.IntVar(
		&e.percent,
		"eject-failure-percent",
		50,
		"eject an endpoint when more than this `PERCENT` of its requests failed in the last 10 s, of at least 10. "+
			"100: never",
	)
	f.IntVar(
		&e.maxPercent,
		"eject-max-percent",
		50,
		"at most this `PERCENT` of a model's endpoints are ejected for --eject-failure-percent alone. When all "+
			"endpoints that may take a request are ejected, all are candidates again",
	)
	f.DurationVar(
		&e.time,
		"eject-time",
		time.Second,
		"how long an ejected endpoint waits for its trial request; twice as long after each failed trial, up to 60 s",
	)
	f.DurationVar(
		&e.firstByte,
		"eject-first-byte",
		30*time.Second,
		"how long the headers of a streamed response, or of a trial request's, may take. 0: no limit",
	)
}

// check checks these flags.
func (e *ejection) check() error {
	switch {
	case e.consecutive < 1:
		return fmt.Errorf("--eject-consecutive-failures %d: must be at least 1", e.consecutive)
	case e.percent < 1 || e.percent > 100:
		return fmt.Errorf("--eject-failure-percent %d: must be from 1 to 100", e.percent)
	case e.maxPercent < 0 || e.maxPercent > 100:
		return fmt.Errorf("--eject-max-percent %d: must be from 0 to 100", e.maxPercent)
	case e.time < 10*time.Millisecond || e.time > eject.MaxTime:
		return fmt.Errorf("--eject-time %v: must be from 10ms to %v", e.time, eject.MaxTime)
	case e.firstByte < 0:
		return errors.New("--eject-first-byte may not be negative; 0 means no limit")
	}
	return nil
}

// unused adds the flags that mean nothing because endpoints are not ejected.
func (e *ejection) unused(idle *idle) {
	if !e.on {
		idle.add(
			"with --eject=false no endpoint is ejected",
			"eject-consecutive-failures",
			"eject-failure-percent",
			"eject-max-percent",
			"eject-time",
			"eject-first-byte",
		)
	}
}

// tracker returns what follows the health of endpoints. pages, once set, reads their metrics pages.
func (e *ejection) tracker(
	m *metrics.Metrics,
	pages *atomic.Pointer[enginemetrics.Gauges],
	log *slog.Logger,
) *eject.Tracker {
	for _, cause := range eject.Causes {
		m.ShowEjection(string(cause))
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
	m.Source(metrics.EjectedWorkers, metrics.EjectedWorkersHelp, prometheus.Labels{}, func() float64 {
		ejected, _ := t.Counts()
		return float64(ejected)
	})
	m.Source(metrics.CordonedWorkers, metrics.CordonedWorkersHelp, prometheus.Labels{}, func() float64 {
		_, cordoned := t.Counts()
		return float64(cordoned)
	})
}
