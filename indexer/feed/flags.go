package feed

import (
	"fmt"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/kvblock"
)

// AddFlags declares the flags, and sets what has none.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Threads = 4 // of the others, so that a flood of events leaves processors for requests
	fs.StringSliceVar(&c.HashSeeds, "vllm-hash-seeds", nil,
		"compute vLLM's block hashes for workers whose model has no full attention (sliding windows in all layers), "+
			"whose KV events alone do not tell which blocks they hold. `SEEDS`, separated by commas: the values of "+
			"PYTHONHASHSEED that the workers may have, and default for vLLM's own seed, which kvepp always tries. "+
			"Takes about 110 bytes for each block that such a worker holds. Empty: off")
	flags.Choice(fs, &c.EventPlane, "event-plane", "",
		"the event `PLANE` of Dynamo's workers, zmq or nats, for endpoints that Dynamo's discovery knows and that "+
			"have no kvEvents. Empty: what discovery names for each worker", "zmq", "nats")
	fs.StringVar(&c.NATSServer, "nats-server", "nats://localhost:4222",
		"`URL` of the event plane's NATS server; may contain user:password@")
	flags.Inherit(fs, "event-plane", "DYN_EVENT_PLANE",
		"nats-server", "NATS_SERVER")
}

// Validate sets EngineHashes from HashSeeds, and returns an error if it cannot.
func (c *Config) Validate() (err error) {
	if len(c.HashSeeds) > 0 {
		if c.EngineHashes, err = kvblock.NewEngineHashes(c.HashSeeds); err != nil {
			return fmt.Errorf("--vllm-hash-seeds: %w", err)
		}
	}
	return nil
}
