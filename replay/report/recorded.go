package report

import (
	"context"
	"fmt"
	"io"
	"slices"

	"kvepp/replay"
)

// readRecording makes the engines of all settings those of the recording, with the speeds that its answers tell.
func (c *Config) readRecording(ctx context.Context, settings []Setting, stderr io.Writer) (engines string, err error) {
	if !c.flags.Changed("format") {
		c.format = string(replay.Kvepp)
	}
	if c.format != string(replay.Kvepp) && c.format != string(replay.Dynamo) {
		return "", fmt.Errorf("--format %s: what a recording did is only known in the format kvepp or dynamo", c.format)
	}
	blockSize := 0
	if c.flags.Changed("block-size") || c.endpoints != "" {
		blockSize = c.Base.Engine.BlockSize
	}
	next, closeFile := c.open(blockSize, &c.shadow)
	r, err := replay.ReadRecording(next)
	closeFile()
	if err != nil && len(c.shadow.Unjudged) > 0 {
		err = fmt.Errorf("%w; kvepp in shadow could not judge: %s (docs/shadow.md says what to change)", err,
			counts(c.shadow.Unjudged))
	}
	if err != nil {
		return "", err
	}
	base := c.Base
	base.Engine.BlockSize = r.BlockSize
	if c.endpoints == "" {
		if !c.flags.Changed("workers") {
			base.Workers = len(r.Workers)
		}
		if base.Workers < len(r.Workers) {
			return "", fmt.Errorf("--workers %d: the recording has %d", base.Workers, len(r.Workers))
		}
		base.Own = make([]replay.Own, base.Workers)
		for i, w := range r.Workers {
			base.Own[i].ID = w
		}
	}
	for _, w := range r.Workers {
		if !slices.ContainsFunc(base.Own, func(o replay.Own) bool { return o.ID == w }) {
			return "", fmt.Errorf("--endpoints %s: no engine is the recording's worker %v", c.endpoints, w)
		}
	}
	if !c.flags.Changed("engine-speeds") {
		base.Speeds = nil
	}
	engines = "engines: as --prefill-ms and --decode-ms say\n"
	if !c.flags.Changed("prefill-ms") && !c.flags.Changed("decode-ms") {
		if engines, err = r.Fit(ctx, &base); err != nil {
			return "", err
		}
	}
	fmt.Fprint(stderr, engines)
	c.recording = r
	for i := range settings {
		s := &settings[i].Config
		s.Engine, s.Workers, s.Own, s.Speeds = base.Engine, base.Workers, base.Own, base.Speeds
		if err := s.Validate(); err != nil {
			return "", err
		}
	}
	return engines, nil
}
