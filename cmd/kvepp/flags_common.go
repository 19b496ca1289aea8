package main

import (
	"fmt"
	"math"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/serve/listen"
	"kvepp/serve/logs"
)

type logging = logs.Config

// httpService are the flags that `kvepp indexer` and `kvepp select` share. Both serve only HTTP, and each stands in for
// one of Dynamo's programs.
type httpService struct {
	listen.Web
	indexMemory
	logging
	settingsFile
}

func (o *httpService) check() error {
	if err := o.Web.Validate(); err != nil {
		return err
	}
	if err := o.logging.Validate(); err != nil {
		return err
	}
	return o.indexMemory.check()
}

// indexMemory bounds the index.
type indexMemory struct{ indexMaxBytes int64 }

// minIndexBytes is the least memory in which an index is useful.
const minIndexBytes = 1 << 20

func (o *indexMemory) add(f *pflag.FlagSet) {
	f.Int64Var(&o.indexMaxBytes, "index-max-bytes", 0,
		"the most memory of the index, in `BYTES`; at the bound kvepp forgets the deepest blocks of the largest "+
			"worker, and counts them. 0: half of GOMEMLIMIT, which is 7/8 of the container's memory unless the "+
			"environment sets it; 2 GiB without either")
}

func (o *indexMemory) check() error {
	if o.indexMaxBytes < 0 || o.indexMaxBytes > 0 && o.indexMaxBytes < minIndexBytes {
		return fmt.Errorf(
			"--index-max-bytes %d: must be at least %d (0: half of GOMEMLIMIT or of 7/8 of the container's memory, "+
				"else 2 GiB)",
			o.indexMaxBytes,
			minIndexBytes,
		)
	}
	return nil
}

// indexBytes returns the bound on the index's memory. goLimit is the memory limit of Go's runtime, math.MaxInt64 for
// none.
func (o *indexMemory) indexBytes(goLimit int64) int64 {
	switch {
	case o.indexMaxBytes > 0:
		return o.indexMaxBytes
	case goLimit == math.MaxInt64:
		return indexer.DefaultMaxBytes
	}
	return max(goLimit/2, minIndexBytes)
}
