package main

import (
	"fmt"
	"time"

	"kvepp/internal/metrics"
	"kvepp/router"
)

// checkSessions checks the flags of session affinity.
func (o *options) checkSessions() error {
	switch longest := int(router.MaxSessionTTL / time.Second); {
	case o.sessionTTLSecs < 0 || o.sessionTTLSecs > longest:
		return fmt.Errorf(
			"--router-session-affinity-ttl-secs %d: must be from 1 to %d seconds (0: no affinity but for sessions "+
				"that requests open)",
			o.sessionTTLSecs,
			longest,
		)
	}
	return oneOf("router-session-affinity-mode", o.sessionMode, "hard", "soft")
}

// sessions makes the table of session affinity, and shows what it counts.
func sessions(o *options, m *metrics.Metrics) *router.Sessions {
	s := router.NewSessions(
		router.SessionConfig{TTL: time.Duration(o.sessionTTLSecs) * time.Second, Soft: o.sessionMode == "soft"},
	)
	m.Source(metrics.Sessions, metrics.SessionsHelp, nil, func() float64 { return float64(s.Active()) })
	countersOf(
		m,
		metrics.SessionRequests,
		metrics.SessionRequestsHelp,
		"outcome",
		s.Stats,
		map[string]func(router.SessionStats) uint64{
			router.SessionNew:   func(x router.SessionStats) uint64 { return x.New },
			router.SessionKept:  func(x router.SessionStats) uint64 { return x.Kept },
			router.SessionMoved: func(x router.SessionStats) uint64 { return x.Moved },
		},
	)
	countersOf(
		m,
		metrics.SessionsEnded,
		metrics.SessionsEndedHelp,
		"cause",
		s.Stats,
		map[string]func(router.SessionStats) uint64{
			"final":       func(x router.SessionStats) uint64 { return x.Final },
			"expired":     func(x router.SessionStats) uint64 { return x.Expired },
			"evicted":     func(x router.SessionStats) uint64 { return x.Evicted },
			"worker_left": func(x router.SessionStats) uint64 { return x.WorkerLeft },
		},
	)
	return s
}
