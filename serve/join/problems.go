package join

import (
	"fmt"
	"log/slog"

	"kvepp/internal/loglimit"
)

// problems logs each problem of the pool once when it begins, and again if it ended in between. It remembers the
// problems of the two latest updates only. Not safe for concurrent use.
type problems struct {
	log         *slog.Logger
	limit       loglimit.Limiter
	before, now map[string]bool
}

func newProblems(log *slog.Logger) *problems {
	return &problems{log: log, limit: loglimit.Limiter{Burst: 100}, now: map[string]bool{}}
}

// warn reports a problem that the update found.
func (p *problems) warn(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !p.before[text] && !p.now[text] {
		p.limit.Log(p.log, slog.LevelWarn, text)
	}
	p.now[text] = true
}

// begin starts an update. Problems that the update does not report have ended.
func (p *problems) begin() { p.before, p.now = p.now, map[string]bool{} }
