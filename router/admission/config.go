package admission

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// Config is what an operator chooses.
type Config struct {
	// On holds conversations back. Only the caller of New reads it.
	On bool
	// Fill is the share of a worker's KV cache, above 0 and at most 1, up to which conversations are admitted.
	Fill float64
	// Max bounds the conversations in the table. Beyond it the one that was idle longest is dropped. 0: DefaultMax.
	Max int
	// Clock is the time since some moment, and never runs backwards. nil: the machine's monotonic clock.
	Clock func() time.Duration
}

// AddFlags declares the flag, and sets what has none.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	flags.Either(fs, &c.On, "router-admission", "none", "working-set",
		"whether new conversations wait while the workers' KV caches are full of others that continue, `MODE`: none, "+
			"or working-set. kvepp refuses a request that has waited for --router-queue-timeout. Without effect on "+
			"workers whose number of KV blocks is not known (totalKvBlocks, model card)")
	c.Fill = DefaultFill
}

// Validate reports a Fill that is out of range.
func (c *Config) Validate() error {
	if !(c.Fill > 0 && c.Fill <= 1) {
		return fmt.Errorf("%v of a worker's KV cache: must be above 0 and at most 1, for "+
			"example %v", c.Fill, DefaultFill)
	}
	return nil
}
