package remote

import (
	"sync"
	"time"
)

// The breaker's patience.
const (
	breakerFailures = 5 // in a row, that open it
	minCooldown     = time.Second
	maxCooldown     = 30 * time.Second
)

// breaker leaves a failing server alone. Closed, it lets every call through and counts failures in a row. Open, it lets
// none through until a cooldown is over, then one at a time (half-open): a good one closes it, a bad one doubles the
// cooldown.
type breaker struct {
	mu       sync.Mutex
	open     bool
	failures int       // in a row, while closed
	until    time.Time // while open: when a probe may go
	cooldown time.Duration
	probing  bool
}

func newBreaker() *breaker { return &breaker{cooldown: minCooldown} }

// verdict is what a call says of the server.
type verdict int

const (
	neutral verdict = iota // nothing: it was not asked, or the client went away
	good
	bad
)

// change is what a verdict did to the breaker.
type change int

const (
	unchanged change = iota
	opened
	closed
)

// allow reports whether a call may be made. Every allowed one must be followed by done, with the same probe.
func (b *breaker) allow(now time.Time) (probe, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.open:
		return false, true
	case b.probing || now.Before(b.until):
		return false, false
	}
	b.probing = true
	return true, true
}

// done takes a call's verdict. A call from before the breaker opened says nothing once it is open.
func (b *breaker) done(now time.Time, v verdict, probe bool) change {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case probe:
		b.probing = false
		switch v {
		case good:
			b.open, b.failures, b.cooldown = false, 0, minCooldown
			return closed
		case bad:
			b.cooldown = min(2*b.cooldown, maxCooldown)
			b.until = now.Add(b.cooldown)
		}
	case b.open:
	case v == good:
		b.failures = 0
	case v == bad:
		if b.failures++; b.failures >= breakerFailures {
			b.open, b.until = true, now.Add(b.cooldown)
			return opened
		}
	}
	return unchanged
}

func (b *breaker) isOpen() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open
}
