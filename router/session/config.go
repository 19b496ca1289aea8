package session

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// Config is what an operator chooses.
type Config struct {
	// TTL is how long a session is kept after the end of its last request. 0: the table keeps only sessions that
	// requests open themselves (session_control), each for the time that its request gives.
	TTL time.Duration
	// Soft lets a session move to another worker while its own is overloaded. Otherwise its requests are refused then.
	Soft bool
	// Max bounds the sessions kept. Beyond it the least recently used one is evicted. 0: DefaultMax.
	Max int
	// Clock returns the time. nil: time.Now.
	Clock func() time.Time
}

// AddFlags declares the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	flags.Seconds(fs, &c.TTL, "router-session-affinity-ttl-secs", 0, true,
		"keep the requests of a session (x-dynamo-session-id, or a coding agent's header) on one worker, until "+
			"`SECONDS` after its latest request has ended. 0: only sessions that requests open with "+
			"nvext.session_control")
	flags.Either(fs, &c.Soft, "router-session-affinity-mode", "hard", "soft",
		"what happens to a session whose worker is above a busy threshold, `MODE`: hard (kvepp refuses its requests) "+
			"or soft (it moves to another worker)")
	flags.Inherit(fs, "router-session-affinity-ttl-secs", "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
		"router-session-affinity-mode", "DYN_ROUTER_SESSION_AFFINITY_MODE")
}

// Validate returns an error if the TTL is out of range.
func (c *Config) Validate() error {
	if c.TTL < 0 || c.TTL > MaxTTL {
		return fmt.Errorf("--router-session-affinity-ttl-secs %v: must be from 1 to %d seconds (0: affinity only for "+
			"sessions that requests open)", c.TTL.Seconds(), MaxTTL/time.Second)
	}
	return nil
}
