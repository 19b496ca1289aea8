package main

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/router/session"
)

// affinity are the flags of session affinity that serve and replay have.
type affinity struct {
	ttlSecs int
	mode    string
}

func (a *affinity) add(f *pflag.FlagSet) {
	f.IntVar(&a.ttlSecs, "router-session-affinity-ttl-secs", 0,
		"keep the requests of a session (x-dynamo-session-id, or a coding agent's header) on one worker, until "+
			"`SECONDS` after its latest request has ended. 0: only sessions that requests open with "+
			"nvext.session_control")
	f.StringVar(&a.mode, "router-session-affinity-mode", "hard",
		"what happens to a session whose worker is above a busy threshold, `MODE`: hard (kvepp refuses its requests) "+
			"or soft (it moves to another worker)")
	values(f, "router-session-affinity-mode", "hard", "soft")
}

// config returns what the flags say. A TTL of 0 binds only sessions that requests open.
func (a *affinity) config() session.Config {
	return session.Config{TTL: time.Duration(a.ttlSecs) * time.Second, Soft: a.mode == "soft"}
}

// check checks the flags.
func (a *affinity) check() error {
	if longest := int(session.MaxTTL / time.Second); a.ttlSecs < 0 || a.ttlSecs > longest {
		return fmt.Errorf(
			"--router-session-affinity-ttl-secs %d: must be from 1 to %d seconds (0: affinity only for sessions that "+
				"requests open)",
			a.ttlSecs,
			longest,
		)
	}
	return oneOf("router-session-affinity-mode", a.mode, "hard", "soft")
}
