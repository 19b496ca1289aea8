package remote

import (
	"testing"
	"time"
)

func TestBreaker(t *testing.T) {
	b := newBreaker()
	now := time.Unix(0, 0)
	call := func(v verdict) change {
		t.Helper()
		probe, ok := b.allow(now)
		if !ok {
			t.Fatalf("at %v: not allowed", now)
		}
		return b.done(now, v, probe)
	}
	expectClosed := func(when string) {
		t.Helper()
		if _, ok := b.allow(now); ok {
			t.Fatalf("%s: allowed", when)
		}
	}
	for range breakerFailures - 1 {
		call(bad)
	}
	call(neutral)
	call(good) // one good call resets the count
	for i := range breakerFailures {
		want := unchanged
		if i == breakerFailures-1 {
			want = opened
		}
		if i == 2 {
			call(neutral) // changes nothing
		}
		if got := call(bad); got != want {
			t.Fatalf("bad call %d: %v, want %v", i, got, want)
		}
	}
	if !b.isOpen() {
		t.Fatal("the breaker is closed after breakerFailures bad calls")
	}
	expectClosed("open")
	if got := b.done(now, good, false); got != unchanged || !b.isOpen() {
		t.Fatal("a call that began before the breaker opened closed it")
	}
	cooldown := minCooldown
	for range 10 { // half-open: one probe at a time, and each bad probe doubles the cooldown
		now = now.Add(cooldown - time.Nanosecond)
		expectClosed("cooling down")
		now = now.Add(time.Nanosecond)
		probe, ok := b.allow(now)
		if !ok || !probe {
			t.Fatalf("no probe after %v", cooldown)
		}
		expectClosed("probing")
		if got := b.done(now, bad, probe); got != unchanged {
			t.Fatal(got)
		}
		cooldown = min(2*cooldown, maxCooldown)
	}
	now = now.Add(cooldown)
	call(neutral) // the probe's client closed the connection: the next call is a probe at once
	if got := call(good); got != closed || b.isOpen() {
		t.Fatalf("a good probe: %v", got)
	}
	for range breakerFailures {
		call(bad)
	}
	now = now.Add(minCooldown) // the cooldown is minCooldown again
	if got := call(good); got != closed {
		t.Fatalf("after a good probe the cooldown is still %v", b.cooldown)
	}
}
