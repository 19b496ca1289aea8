package enginemetrics

import (
	"context"
	"log/slog"
	"math"
	"time"
)

const (
	// unseenAfter is how long an engine has more requests than kvepp sent it before that is said. Readings are apart in
	// time from bookings, and bookings may end sooner than the engine's requests; neither lasts.
	unseenAfter = time.Minute
	// unseenLeast and unseenRatio are how many more: both.
	unseenLeast = 4
	unseenRatio = 1.5
)

// excess is that a worker's engine has had more requests for a minute than kvepp has sent it.
type excess struct {
	worker        string
	there, booked float64
	first         bool // no other worker is in alarm
}

// compare holds what an engine says against the book, and returns what is worth telling. The caller holds g.mu.
func (g *Gauges) compare(m *member, s *slot, booked int, now time.Time) (excess, bool) {
	there, sent := s.told[running], float64(booked)
	if waits := s.told[waiting]; !math.IsNaN(waits) {
		there += waits
	}
	if !(there >= sent+unseenLeast && there >= sent*unseenRatio) { // NaN is not
		g.calm(s)
		return excess{}, false
	}
	if s.exceeds.IsZero() {
		s.exceeds = now
	}
	if s.alarmed || now.Sub(s.exceeds) < unseenAfter {
		return excess{}, false
	}
	s.alarmed = true
	g.unseen++
	return excess{m.name, there, sent, g.unseen == 1}, true
}

// alarm logs it, loudly for the first worker only: with several replicas of kvepp it is so with all of them.
func (g *Gauges) alarm(e excess) {
	level := slog.LevelDebug
	if e.first {
		level = slog.LevelWarn
	}
	g.log.Log(
		context.Background(),
		level,
		"an engine has had more requests for a minute than kvepp has sent it: load goes around kvepp (another "+
			"replica of kvepp, another router, "+
			"clients that ask the engine itself), and its choices know nothing of it. kvepp_unseen_load_workers "+
			"counts further such workers",
		"worker",
		e.worker,
		"engine_requests",
		e.there,
		"booked",
		e.booked,
	)
}

// calm ends a worker's alarm. The caller holds g.mu.
func (g *Gauges) calm(s *slot) {
	s.exceeds = time.Time{}
	if s.alarmed {
		s.alarmed = false
		g.unseen--
	}
}

// Unseen returns how many workers have had more requests for a minute than kvepp has sent them.
func (g *Gauges) Unseen() int {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for i := range g.slots {
		if s := &g.slots[i]; s.alarmed && g.fresh(s, now) {
			n++
		}
	}
	return n
}
