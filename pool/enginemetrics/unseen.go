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

// unseenAlarm says that a worker's engine has had more requests for a minute than kvepp sent it.
type unseenAlarm struct {
	worker                 string
	engineRequests, booked float64
	first                  bool // no other worker is in alarm
}

// checkUnseen compares an engine's requests with the load book, and returns a new alarm. The caller holds g.mu.
func (g *Gauges) checkUnseen(m *member, s *slot, booked int, now time.Time) (unseenAlarm, bool) {
	reported, sent := s.values[running], float64(booked)
	if waits := s.values[waiting]; !math.IsNaN(waits) {
		reported += waits
	}
	if !(reported >= sent+unseenLeast && reported >= sent*unseenRatio) { // true for NaN
		g.endAlarm(s)
		return unseenAlarm{}, false
	}
	if s.exceedsSince.IsZero() {
		s.exceedsSince = now
	}
	if s.alarmed || now.Sub(s.exceedsSince) < unseenAfter {
		return unseenAlarm{}, false
	}
	s.alarmed = true
	g.unseen++
	return unseenAlarm{m.name, reported, sent, g.unseen == 1}, true
}

// logAlarm logs an alarm: as a warning for the first worker, otherwise at level debug. With several replicas of kvepp,
// all workers are in alarm.
func (g *Gauges) logAlarm(e unseenAlarm) {
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
		e.engineRequests,
		"booked",
		e.booked,
	)
}

// endAlarm ends a worker's alarm. The caller holds g.mu.
func (g *Gauges) endAlarm(s *slot) {
	s.exceedsSince = time.Time{}
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
