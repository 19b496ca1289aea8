// Package loglimit limits log lines that clients, engines and peers can cause. A limiter passes the first lines of a
// kind, then one in each interval; that line has the number of lines suppressed before it. The package owns the counts
// of lines; it never logs by itself.
//
// Concurrency: everything is safe for concurrent use.
package loglimit

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of a Limiter.
const (
	DefaultBurst    = 5
	DefaultInterval = 10 * time.Second
)

var suppressed atomic.Int64

// Suppressed returns the number of lines that all limiters of this process have suppressed.
func Suppressed() int64 { return suppressed.Load() }

// Limiter limits one kind of lines. The zero value is ready to use, with the defaults above. It must not be copied
// after its first use.
type Limiter struct {
	Burst int // lines that are passed without delay; 0: DefaultBurst
	// After the burst one line is passed in each interval. An interval without a line adds one to the burst again.
	// 0: DefaultInterval.
	Interval time.Duration
	Within   *Limiter // a shared limit of several kinds: lines count there too; may be nil

	mu    sync.Mutex
	spent int       // lines of the burst that were used; guarded by mu
	since time.Time // end of the intervals already credited; guarded by mu
	held  int64     // lines suppressed since the last passed line; guarded by mu
}

// Allow reports whether a line may be logged now, and how many lines were suppressed before it. It counts a line that
// may not be logged.
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

// take uses one line of the burst, if one is left.
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

// Log logs a line like (*slog.Logger).Log, if the limit allows it. If lines of its kind were suppressed before it,
// their number is the attribute "suppressed".
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
