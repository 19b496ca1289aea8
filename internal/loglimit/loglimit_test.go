package loglimit

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
)

// TestBurstThenOneAnInterval: the burst passes at once, then one line in each interval, with the number of suppressed
// lines. Quiet intervals restore the burst line by line.
func TestBurstThenOneAnInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := Suppressed()
		l := Limiter{Burst: 3, Interval: time.Second}
		allowed, told := 0, int64(0)
		for range 1000 { // ten seconds
			if held, ok := l.Allow(); ok {
				allowed, told = allowed+1, told+held
			}
			<-time.After(10 * time.Millisecond)
		}
		if allowed != 3+9 {
			t.Errorf("%d lines in ten seconds, want 12", allowed)
		}
		if held := l.held; told+held != 1000-12 || Suppressed()-before != 1000-12 {
			t.Errorf("%d told and %d to be told, %d counted; want 988", told, held, Suppressed()-before)
		}
		<-time.After(1500 * time.Millisecond) // the last line was a second ago
		allowed = 0
		for range 10 {
			if _, ok := l.Allow(); ok {
				allowed++
			}
		}
		if allowed != 2 {
			t.Errorf("%d lines after 2.5 quiet seconds, want 2", allowed)
		}
		<-time.After(time.Hour)
		allowed = 0
		for range 10 {
			if _, ok := l.Allow(); ok {
				allowed++
			}
		}
		if allowed != 3 {
			t.Errorf("%d lines after a quiet hour, want 3", allowed)
		}
	})
}

// TestWithin: limiters that share a limit together pass no more lines than that limit.
func TestWithin(t *testing.T) {
	var all = Limiter{Burst: 4, Interval: time.Hour}
	allowed := 0
	for range 10 {
		one := Limiter{Burst: 2, Within: &all}
		for range 10 {
			if _, ok := one.Allow(); ok {
				allowed++
			}
		}
	}
	if allowed != 4 {
		t.Errorf("%d lines, want 4", allowed)
	}
}

// TestLog: a line has the number of suppressed lines. A line below the logger's level does not count.
func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said logtest.Log
		log := slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
		var l Limiter
		for range 100 {
			l.Log(log, slog.LevelInfo, "not logged")
		}
		var wait sync.WaitGroup
		for range 8 {
			wait.Go(func() {
				for range 100 {
					l.Log(log, slog.LevelWarn, "refused", "why", "x")
				}
			})
		}
		wait.Wait()
		<-time.After(DefaultInterval)
		l.Log(log, slog.LevelWarn, "refused", "why", "y")
		if said.Count("msg=refused why=x\n") != DefaultBurst ||
			!strings.HasSuffix(said.String(), "msg=refused why=y suppressed=795\n") {
			t.Error(said.String())
		}
	})
}
