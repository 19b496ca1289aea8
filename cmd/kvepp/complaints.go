package main

import (
	"log/slog"

	"kvepp/internal/loglimit"
)

// complaints are what is wrong with the pool. Each is logged when it comes to be, and again only if it was gone in
// between, so that no more of them are remembered than there are. Not safe for concurrent use.
type complaints struct {
	log         *slog.Logger
	limit       loglimit.Limiter
	before, now map[string]bool
}

func (c *complaints) warn(text string) {
	if !c.before[text] && !c.now[text] {
		c.limit.Burst = 100
		c.limit.Log(c.log, slog.LevelWarn, text)
	}
	c.now[text] = true
}

// begin is called before the pool is looked at anew.
func (c *complaints) begin() { c.before, c.now = c.now, map[string]bool{} }
