package report

import (
	"context"
	"fmt"
	"slices"

	"kvepp/replay"
)

// readRecording makes the engines of all settings those of the recording, with the speeds that its responses tell.
func (c *Config) readRecording(ctx context.Context, settings []Setting) (*replay.Recording, error) {
	if !c.flags.Changed("format") {
		c.format = string(replay.Kvepp)
	}
	if c.format != string(replay.Kvepp) && c.format != string(replay.Dynamo) {
		return nil, fmt.Errorf("--format %s: what a recording did is only known in the format kvepp or dynamo",
			c.format)
	}
	blockSize := 0
	if c.flags.Changed("block-size") || c.endpoints != "" {
		blockSize = c.Base.Engine.BlockSize
	}
	shadow := replay.Shadow{Unjudged: map[string]int{}, Avoided: map[string]int{}}
	next, closeFile := c.open(blockSize, shadow)
	r, err := replay.ReadRecording(next)
	closeFile()
	if err != nil && len(shadow.Unjudged) > 0 {
		err = fmt.Errorf("%w; kvepp in shadow could not judge: %s (docs/shadow.md says what to change)", err,
			counts(shadow.Unjudged))
	}
	if err != nil {
		return nil, err
	}
	r.Shadow = shadow
	base := c.Base
	base.Engine.BlockSize = r.BlockSize
	if c.endpoints == "" {
		if !c.flags.Changed("workers") {
			base.Workers = len(r.Workers)
		}
		base.Own = make([]replay.Own, base.Workers)
		for i := range min(len(r.Workers), base.Workers) {
			base.Own[i].ID = r.Workers[i]
		}
	}
	for _, w := range r.Workers {
		if !slices.ContainsFunc(base.Own, func(o replay.Own) bool { return o.ID == w }) {
			return nil, fmt.Errorf("no engine is worker %v of the recording, which has %d workers: set --workers, or "+
				"list it in --endpoints", w, len(r.Workers))
		}
	}
	if !c.flags.Changed("engine-speeds") {
		base.Speeds = nil
	}
	r.Engines = "engines: as --prefill-ms and --decode-ms say\n"
	if !c.flags.Changed("prefill-ms") && !c.flags.Changed("decode-ms") {
		if err := r.Fit(ctx, &base); err != nil {
			return nil, err
		}
	}
	for i := range settings {
		s := &settings[i].Config
		s.Engine, s.Workers, s.Own, s.Speeds = base.Engine, base.Workers, base.Own, base.Speeds
		if err := s.Validate(); err != nil {
			return nil, err
		}
	}
	return r, nil
}
