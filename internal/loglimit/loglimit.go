// Package loglimit limits log lines that others can cause: clients, engines, peers. The first lines of a kind are
// logged, then one in each interval, which says how many were held back before it. It owns the counts of lines and
// nothing else; it never logs by itself.
//
// Concurrency: everything is safe from any goroutine.
package loglimit

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// The bounds of a Limiter that names none.
const (
	DefaultBurst    = 5
	DefaultInterval = 10 * time.Second
)

var suppressed atomic.Int64

// Suppressed returns how many lines the limiters of this process have held back.
func Suppressed() int64 { return suppressed.Load() }

// Limiter limits one kind of lines. The zero value is ready to use, with the bounds above. It must not be copied after
// its first use.
type Limiter struct {
	Burst int // lines that are logged at once; 0: DefaultBurst
	// after the burst one line is logged in each interval, and a quiet interval brings back one of the burst; 0:
	// DefaultInterval
	Interval time.Duration
	Within   *Limiter // a limit on several kinds together, whose lines count there too; nil: none

	mu    sync.Mutex
	spent int       // of the burst; guarded by mu
	since time.Time // the time up to which quiet intervals were counted; guarded by mu
	held  int64     // lines held back since the last that was logged; guarded by mu
}

// Allow reports whether a line may be logged now, and how many were held back since the line before. A line that may
// not is counted.
func (l *Limiter) Allow() (held int64, ok bool) {
	if l.take(time.Now()) && (l.Within == nil || l.Within.take(time.Now())) {
		l.mu.Lock()
		held, l.held = l.held, 0
		l.mu.Unlock()
		return held, true
	}
	l.mu.Lock()
	l.held++
	l.mu.Unlock()
	suppressed.Add(1)
	return 0, false
}

// take takes one line of the burst, if one is left.
func (l *Limiter) take(now time.Time) bool {
	burst, interval := l.Burst, l.Interval
	if burst == 0 {
		burst = DefaultBurst
	}
	if interval == 0 {
		interval = DefaultInterval
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if quiet := int(now.Sub(l.since) / interval); quiet >= l.spent {
		l.spent, l.since = 0, now
	} else {
		l.spent -= quiet
		l.since = l.since.Add(time.Duration(quiet) * interval)
	}
	if l.spent >= burst {
		return false
	}
	l.spent++
	return true
}

// Log logs a line as (*slog.Logger).Log does, if the limit allows it. The line has the attribute "suppressed" where
// lines of its kind were held back before it.
func (l *Limiter) Log(log *slog.Logger, level slog.Level, msg string, args ...any) {
	ctx := context.Background()
	if !log.Enabled(ctx, level) {
		return
	}
	held, ok := l.Allow()
	if !ok {
		return
	}
	if held > 0 {
		args = append(args[:len(args):len(args)], "suppressed", held)
	}
	log.Log(ctx, level, msg, args...)
}
