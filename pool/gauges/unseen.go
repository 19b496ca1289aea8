package gauges

import (
	"context"
	"log/slog"
	"math"
	"time"
)

const (
	// unseenAfter is how long an engine has more requests than kvepp sent it before that is said. Readings are apart in time
	// from bookings, and bookings may end sooner than the engine's requests; neither lasts.
	unseenAfter = time.Minute
	// unseenLeast and unseenRatio are how many more: both.
	unseenLeast = 4
	unseenRatio = 1.5
)

// compare holds what an engine says against the book. The caller holds g.mu.
func (g *Gauges) compare(m *member, s *slot, now time.Time) {
	there := s.told[running]
	if waits := s.told[waiting]; !math.IsNaN(waits) {
		there += waits
	}
	booked := float64(g.cfg.Booked(m.worker))
	if !(there >= booked+unseenLeast && there >= booked*unseenRatio) { // NaN is not
		g.calm(s)
		return
	}
	if s.excess.IsZero() {
		s.excess = now
	}
	if s.alarmed || now.Sub(s.excess) < unseenAfter {
		return
	}
	s.alarmed = true
	level := slog.LevelDebug
	if g.unseen == 0 {
		level = slog.LevelWarn
	}
	g.unseen++
	g.log.Log(context.Background(), level, "an engine has had more requests for a minute than kvepp has sent it: load goes around kvepp (another replica of kvepp, another router, "+
		"clients that ask the engine itself), and its choices know nothing of it. kvepp_unseen_load_workers counts further such workers",
		"worker", m.name, "engine_requests", there, "booked", booked)
}

// calm ends a worker's alarm. The caller holds g.mu.
func (g *Gauges) calm(s *slot) {
	s.excess = time.Time{}
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
