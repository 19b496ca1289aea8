package record

import (
	"fmt"
	"log/slog"

	"github.com/spf13/pflag"

	"kvepp/internal/metrics"
)

// Config says what is recorded, and where.
type Config struct {
	// Path is the current file; empty: nothing is recorded. Older ones have the suffixes .1, .2 and so on; .1 is the
	// newest of them.
	Path string
	// MaxBytes bounds all files together, and Files is how many there are at most, the current one included. Each has
	// an equal share.
	MaxBytes int64
	Files    int

	plain bool // for tests: the hashes of KV events, without the key
}

// AddFlags declares the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Path, "record", "",
		"`FILE` to which kvepp writes its traffic for \"kvepp replay --format dynamo\": keyed block hashes, token "+
			"counts, times and workers, no text. kvepp then tokenizes prompts in every --router-mode. FILE, FILE.1, "+
			"FILE.2 and FILE.3 take at most 1 GiB; kvepp removes the oldest then. Empty: none")
	c.MaxBytes, c.Files = 1<<30, 4
}

// Open begins to record, and exports the counts. An existing file is kept as an older one. It returns nil if nothing is
// to be recorded.
func (c *Config) Open(m *metrics.Metrics, log *slog.Logger) (*Recorder, error) {
	if c.Path == "" {
		return nil, nil
	}
	r, err := open(*c, log)
	if err != nil {
		return nil, fmt.Errorf("--record: %w; give a file in a folder that kvepp may write to", err)
	}
	metrics.Counters(m, metrics.RecordedRequests, "outcome", func() map[string]int64 {
		return map[string]int64{"written": r.Counts.Written.Load(), "dropped": r.Counts.Dropped.Load(),
			"failed": r.Counts.Failed.Load(), "skipped": r.Counts.Skipped.Load()}
	})
	return r, nil
}
