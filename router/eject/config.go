package eject

import (
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/kvblock"
)

// Config is what an operator chooses.
type Config struct {
	// On ejects endpoints. Cordons work without it.
	On bool
	// ConsecutiveFailures ejects an endpoint after this many failures in a row; at least 1.
	ConsecutiveFailures int
	// FailurePercent ejects an endpoint if more than this percentage of its requests of the last 10 s failed, with at
	// least 10 requests. 100: never.
	FailurePercent int
	// MaxPercent bounds the percentage of a model's endpoints that are ejected for FailurePercent alone. Endpoints that
	// fail every time, or refuse connections, are ejected without that bound.
	MaxPercent int
	// Time is the duration of the first ejection. Each further one in a row lasts twice as long, up to MaxTime.
	Time time.Duration
	// FirstByte is how long the headers of a streamed response, or of a trial request's, may take; 0: no limit. The
	// router measures it.
	FirstByte time.Duration
	// Ejected is called with the cause of each ejection, for a metric. nil: not called.
	Ejected func(Cause)
	// ReadPage asks for a worker's metrics page to be read at once, because the process may be gone. It is called
	// without a lock held. nil: pages are not read.
	ReadPage func(kvblock.Worker)
}

// AddFlags declares the flags, and sets what has none.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.On, "eject", true,
		"eject endpoints that fail: they get no requests until a trial request succeeds. Failures are: no connection, "+
			"a reset, status 500, 502, 503 or 504, no headers within --eject-first-byte, and a metrics page that "+
			"refuses connections or stays silent for 5 s")
	c.ConsecutiveFailures, c.FailurePercent, c.MaxPercent, c.Time = 3, 50, 50, time.Second
	fs.DurationVar(&c.FirstByte, "eject-first-byte", 30*time.Second,
		"how long the headers of a streamed response, or of a trial request's, may take. 0: no limit")
}

// Validate returns an error if FirstByte is negative.
func (c *Config) Validate() error { return flags.NotNegative("eject-first-byte", c.FirstByte) }

// AddUnused adds the flags that have no effect.
func (c *Config) AddUnused(unused *flags.Unused) {
	if !c.On {
		unused.Add("with --eject=false no endpoint is ejected", "eject-first-byte")
	}
}
