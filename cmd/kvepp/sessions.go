package main

import (
	"fmt"
	"time"

	"kvepp/internal/metrics"
	"kvepp/session"
)

// checkSessions checks the flags of session affinity.
func (o *options) checkSessions() error {
	switch longest := int(session.MaxTTL / time.Second); {
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
func sessions(o *options, m *metrics.Metrics) *session.Table {
	s := session.NewTable(
		session.Config{TTL: time.Duration(o.sessionTTLSecs) * time.Second, Soft: o.sessionMode == "soft"},
	)
	m.Source(metrics.Sessions, metrics.SessionsHelp, nil, func() float64 { return float64(s.Active()) })
	countersOf(
		m,
		metrics.SessionRequests,
		metrics.SessionRequestsHelp,
		"outcome",
		s.Stats,
		map[string]func(session.Stats) uint64{
			session.New:   func(x session.Stats) uint64 { return x.New },
			session.Kept:  func(x session.Stats) uint64 { return x.Kept },
			session.Moved: func(x session.Stats) uint64 { return x.Moved },
		},
	)
	countersOf(
		m,
		metrics.SessionsEnded,
		metrics.SessionsEndedHelp,
		"cause",
		s.Stats,
		map[string]func(session.Stats) uint64{
			"final":       func(x session.Stats) uint64 { return x.Final },
			"expired":     func(x session.Stats) uint64 { return x.Expired },
			"evicted":     func(x session.Stats) uint64 { return x.Evicted },
			"worker_left": func(x session.Stats) uint64 { return x.WorkerLeft },
		},
	)
	return s
}
