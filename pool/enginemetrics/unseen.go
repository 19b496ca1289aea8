package enginemetrics

import (
	"context"
	"log/slog"
	"math"
	"time"
)

const (
	// unseenAfter is how long an engine must have more requests than kvepp sent it before an alarm. Shorter differences
	// are normal: reads and bookings are not simultaneous, and a booking may end before the engine's request.
	unseenAfter = time.Minute
	// unseenLeast (requests more) and unseenRatio (times as many) must both be reached.
	unseenLeast = 4
	unseenRatio = 1.5
)

// excess is an alarm: a worker's engine has had more requests for a minute than kvepp sent it.
type excess struct {
	worker        string
	there, booked float64
	first         bool // no other worker is in alarm
}

// compare compares an engine's requests with the load book, and returns a new alarm. The caller holds g.mu.
func (g *Gauges) compare(m *member, s *slot, booked int, now time.Time) (excess, bool) {
	there, sent := s.told[running], float64(booked)
	if waits := s.told[waiting]; !math.IsNaN(waits) {
		there += waits
	}
	if !(there >= sent+unseenLeast && there >= sent*unseenRatio) { // true for NaN
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

// alarm logs an alarm, as a warning only for the first worker: with several replicas of kvepp, all workers have it.
func (g *Gauges) alarm(e excess) {
	level := slog.LevelDebug
	if e.first {
		level = slog.LevelWarn
	}
	g.log.Log(
		context.Background(),
		level,
		"an engine has had more requests for a minute than kvepp sent it: load bypasses kvepp (another replica of "+
			"kvepp, another router, clients that call the engine directly), and kvepp routes without knowing it. "+
			"kvepp_unseen_load_workers counts such workers",
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

// Unseen returns the number of workers that have had more requests for a minute than kvepp sent them.
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
