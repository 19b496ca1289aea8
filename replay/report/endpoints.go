package report

import (
	"errors"
	"fmt"

	"kvepp/internal/boundedfile"
	"kvepp/pool"
	"kvepp/replay"
)

// readEndpoints makes the engines those of --endpoints, if it is given.
func (c *Config) readEndpoints() error {
	if c.endpoints == "" {
		return nil
	}
	if c.flags.Changed("workers") {
		return errors.New("--endpoints lists the engines: leave out --workers")
	}
	text, err := boundedfile.Read(c.endpoints, pool.MaxFile)
	if err != nil {
		return fmt.Errorf("--endpoints: %w", err)
	}
	entries, err := pool.ParseFile(text)
	if err == nil {
		err = c.addEngines(entries, c.flags.Changed("block-size"))
	}
	if err != nil {
		return fmt.Errorf("--endpoints %s: %w", c.endpoints, err)
	}
	return nil
}

// addEngines makes an engine of each rank. blockSizeGiven says that --block-size has precedence over the default.
func (c *Config) addEngines(entries []pool.Entry, blockSizeGiven bool) error {
	model, blockSize := "", 0
	if blockSizeGiven {
		blockSize = c.Base.Engine.BlockSize
	}
	for i := range entries {
		e := &entries[i]
		switch {
		case e.CordonedBy != "":
			continue // it gets no requests
		case e.Role != "" && e.Role != pool.Aggregated:
			return fmt.Errorf("%s has the role %s: replay models workers that compute prompt and response", e.Name,
				e.Role)
		case e.AllInstances:
			return fmt.Errorf("%s: allInstances needs Dynamo's discovery; list each instance", e.Name)
		case e.Model != "" && model != "" && e.Model != model:
			return fmt.Errorf("%s serves %s, others serve %s: replay one model at a time", e.Name, e.Model, model)
		case e.BlockSize > 0 && blockSize > 0 && e.BlockSize != blockSize:
			return fmt.Errorf("%s has blocks of %d tokens, another endpoint or --block-size says %d: replay needs one",
				e.Name, e.BlockSize, blockSize)
		}
		if e.Model != "" {
			model = e.Model
		}
		if e.BlockSize > 0 {
			blockSize = e.BlockSize
		}
		for rank := range max(e.DataParallelSize, 1) {
			name := e.Name
			if e.DataParallelSize > 1 {
				name = fmt.Sprintf("%s/%d", e.Name, e.DataParallelStartRank+rank)
			}
			id := replay.WorkerID{Instance: e.InstanceID, Rank: e.DataParallelStartRank + rank}
			c.Base.Own = append(c.Base.Own, replay.Own{Name: name, ID: id, Blocks: e.TotalKVBlocks,
				MaxBatchedTokens: e.MaxNumBatchedTokens})
		}
	}
	if len(c.Base.Own) == 0 {
		return errors.New("no endpoint that gets requests")
	}
	c.Base.Workers = len(c.Base.Own)
	if blockSize > 0 {
		c.Base.Engine.BlockSize = blockSize
	}
	return nil
}
