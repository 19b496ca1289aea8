package indexer

import (
	"fmt"
	"math"

	"github.com/spf13/pflag"
)

// minBytes is the least memory in which an index is useful.
const minBytes = 1 << 20

// AddFlags declares the flag of the index's memory.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.Int64Var(&c.MaxBytes, "index-max-bytes", 0,
		"the most memory of the index, in `BYTES`; at the bound kvepp forgets the deepest blocks of the largest "+
			"worker, and counts them. In approximate mode kvepp assumes a block held for each 256 bytes, at most "+
			"1,048,576. 0: half of GOMEMLIMIT, which is 7/8 of the container's memory unless the "+
			"environment sets it; 2 GiB without either")
}

// Validate returns an error if the bound on memory is out of range.
func (c *Config) Validate() error {
	if c.MaxBytes < 0 || c.MaxBytes > 0 && c.MaxBytes < minBytes {
		return fmt.Errorf("--index-max-bytes %d: must be at least %d (0: half of GOMEMLIMIT or of 7/8 of the "+
			"container's memory, else 2 GiB)", c.MaxBytes, minBytes)
	}
	return nil
}

// Bytes returns the bound on the index's memory. goLimit is the memory limit of Go's runtime, math.MaxInt64 for none.
func (c *Config) Bytes(goLimit int64) int64 {
	switch {
	case c.MaxBytes > 0:
		return c.MaxBytes
	case goLimit == math.MaxInt64:
		return DefaultMaxBytes
	}
	return max(goLimit/2, minBytes)
}
