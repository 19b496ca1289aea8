package main

import (
	"log/slog"

	"kvepp/internal/loglimit"
)

// dedupLog logs each problem of the pool once when it begins, and again if it ended in between. It remembers the
// problems of the two latest updates only. Not safe for concurrent use.
type dedupLog struct {
	log         *slog.Logger
	limit       loglimit.Limiter
	before, now map[string]bool
}

func newDedupLog(log *slog.Logger) *dedupLog {
	return &dedupLog{log: log, limit: loglimit.Limiter{Burst: 100}, now: map[string]bool{}}
}

// warn reports a problem that the update found.
func (d *dedupLog) warn(text string) {
	if !d.before[text] && !d.now[text] {
		d.limit.Log(d.log, slog.LevelWarn, text)
	}
	d.now[text] = true
}

// begin starts an update. Problems that the update does not report have ended.
func (d *dedupLog) begin() { d.before, d.now = d.now, map[string]bool{} }
