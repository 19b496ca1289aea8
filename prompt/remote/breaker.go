package remote

import (
	"sync"
	"time"
)

// When the breaker opens, and how long it stays open.
const (
	breakerFailures = 5 // consecutive failures that open it
	minCooldown     = time.Second
	maxCooldown     = 30 * time.Second
)

// breaker is a circuit breaker for one server. While closed, it allows every call and counts consecutive failures.
// While open, it allows no call until a cooldown has passed, and then one probe at a time (half-open). A good probe
// closes it. A bad probe doubles the cooldown.
type breaker struct {
	mu       sync.Mutex
	open     bool
	failures int       // consecutive, while closed
	until    time.Time // while open: when a probe is allowed
	cooldown time.Duration
	probing  bool
}

func newBreaker() *breaker { return &breaker{cooldown: minCooldown} }

// verdict is what a call shows about the server.
type verdict int

const (
	neutral verdict = iota // nothing: no request was sent, or the client closed the connection
	good
	bad
)

// change is the effect of a verdict on the breaker.
type change int

const (
	unchanged change = iota
	opened
	closed
)

// allow reports whether a call is allowed. The caller must call done with the same probe after every allowed call.
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

// done records a call's verdict. While the breaker is open, it ignores verdicts of calls that began before it opened.
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
