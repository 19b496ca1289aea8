package selector

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/router/session"
)

// Help is the beginning of the help of `kvepp select`.
const Help = `kvepp select chooses and reserves workers for prompts, over HTTP. Its clients send the requests to
the workers themselves. It replaces "python -m dynamo.select_service": the same requests and
responses.

Usage:       kvepp select [flags]
Example:     kvepp select --port 8092
             alias post="curl -H 'Content-Type: application/json'"
             post localhost:8092/workers -d '{"worker_id": 1, "endpoint": "http://10.0.0.7:8000",
               "block_size": 16, "kv_events_endpoint": "tcp://10.0.0.7:5557"}'
             post localhost:8092/select_and_reserve -d '{"selection_id": "a",
               "token_ids": [1, 2, 3]}'
             curl -X DELETE localhost:8092/reservations/a
Precedence:  flag, KVEPP_SELECT_<FLAG>, --config FILE, Dynamo's variable (in brackets), default
`

// maxTTL bounds times, so that they stay in range.
const maxTTL = 365 * 24 * time.Hour

// settings are what flags say in seconds.
type settings struct {
	cache, expiry, affinity uint64
	ttl                     float64
	flags                   *pflag.FlagSet
}

// AddFlags declares the flags about selections, reservations and events. The caller declares those of c.Scoring and
// c.Queue.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	s := &c.settings
	s.flags = f
	f.Uint64Var(&s.cache, "selection-cache-ttl-secs", 120,
		"how many `SECONDS` kvepp keeps a selection that is not reserved yet")
	f.IntVar(&c.PendingEntries, "selection-cache-max-entries", 4096,
		"kvepp keeps at most `N` selections that are not reserved yet; beyond that it drops the oldest")
	f.IntVar(&c.PendingBytes, "selection-cache-max-bytes", 256<<20, "most `BYTES` of unreserved selections")
	f.Uint64Var(&s.expiry, "active-request-expiry-secs", 300,
		"`SECONDS` after which kvepp ends a reservation that its client has not ended")
	f.Uint64Var(&s.affinity, "session-affinity-ttl-secs", 0, "keep the reservations of a session (session_id) on one "+
		"worker, until `SECONDS` after the latest one ended. 0: off")
	f.BoolVar(&c.Events, "router-kv-events", true, "subscribe to the workers' KV events. Off: kvepp assumes that a "+
		"worker caches the prompts it was sent, for --router-ttl-secs")
	f.Float64Var(&s.ttl, "router-ttl-secs", 120,
		"without events, how many `SECONDS` after its latest reservation a block is assumed to stay cached")
	flags.Negatable(f, "router-kv-events")
	flags.Inherit(f, "active-request-expiry-secs", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
		"router-kv-events", "DYN_ROUTER_USE_KV_EVENTS", "router-ttl-secs", "DYN_ROUTER_TTL_SECS")
}

// Validate checks these flags, and sets what they say.
func (c *Config) Validate() error {
	const limit = uint64(maxTTL / time.Second)
	switch s := &c.settings; {
	case s.cache < 1 || s.cache > limit:
		return fmt.Errorf("--selection-cache-ttl-secs %d: must be from 1 to a year, for example 120", s.cache)
	case s.expiry < 1 || s.expiry > limit:
		return fmt.Errorf("--active-request-expiry-secs %d: must be from 1 to a year, for example 300", s.expiry)
	case s.affinity > limit || s.flags.Changed("session-affinity-ttl-secs") && s.affinity == 0:
		return fmt.Errorf("--session-affinity-ttl-secs %d: must be from 1 to %d, for example 600", s.affinity, limit)
	case !(s.ttl > 0 && s.ttl <= maxTTL.Seconds()):
		return fmt.Errorf("--router-ttl-secs %v: must be a positive number of seconds, at most a year, for example 120",
			s.ttl)
	case c.PendingEntries < 1 || c.PendingBytes < 1:
		return fmt.Errorf("--selection-cache-max-entries %d, --selection-cache-max-bytes %d: must be at least 1, for "+
			"example 4096 and %d", c.PendingEntries, c.PendingBytes, 256<<20)
	}
	c.Scoring.DecodeRole = true // for all roles of workers, as in dynamo.select_service
	c.PredictTTL = time.Duration(c.settings.ttl * float64(time.Second))
	c.PendingTTL = time.Duration(c.settings.cache) * time.Second
	if c.settings.affinity > 0 {
		c.Sessions = session.NewTable(session.Config{TTL: time.Duration(c.settings.affinity) * time.Second})
	}
	return nil
}

// Expiry is the time after which kvepp ends a reservation that its client has not ended.
func (c *Config) Expiry() time.Duration { return time.Duration(c.settings.expiry) * time.Second }

// Export exports what s counts.
func (s *Selector) Export(m *metrics.Metrics) {
	metrics.Gauge(m, metrics.SelectionReservations, func() int { return s.Stats().Reservations })
	metrics.Counter(m, metrics.SelectionExpired, s.loadBook.Expired)
	metrics.Gauge(m, metrics.SelectionWaiting, func() int { return s.Stats().Waiting })
}
