package replay

import (
	"errors"
	"fmt"
	"time"

	"kvepp/scoring"
)

// Requests of a fleet with prefill and decode workers: a prefill worker computes the prompt and one token, and the
// decode worker fetches the blocks that it does not hold; or the decode worker works alone.

// validateRoles reports the first value about these roles that is out of range.
func (c *Config) validateRoles() error {
	switch {
	case c.PrefillWorkers < 0 || c.PrefillWorkers > 0 && c.PrefillWorkers >= c.Workers:
		return fmt.Errorf("%d prefill workers: must be fewer than the %d engines", c.PrefillWorkers, c.Workers)
	case c.PrefillWorkers > 0 && (c.Policy != "" || c.Admission != nil || c.Queue != nil || c.Decided != nil):
		return errors.New("prefill workers: only with the policies of kvepp serve, and without admission, a queue, " +
			"and --out")
	case !(c.TransferMS >= 0 && c.TransferMS <= 1000):
		return fmt.Errorf("a transfer of %v ms for each token: must be 0 to 1000", c.TransferMS)
	}
	return nil
}

// choice is a worker, and the request's booking on it unless it was only priced.
type choice struct {
	scoring.Selection
	booking scoring.Booking
	overlap int // blocks that the index counted
}

// sendToRoles chooses a decode worker alone, or with a prefill worker, as package router does.
func (s *Simulation) sendToRoles(f *flight, prompt *scoring.Prompt) {
	d, c := &s.cfg.Disaggregation, &s.cfg.Scoring
	outcome := scoring.PairCheaper
	if d.On {
		alone := s.choose(f, prompt, decodes, *c, true)
		if s.failed != nil || f.refused {
			return
		}
		w := int(alone.Worker)
		would := scoring.Alone{Prompt: f.Prompt, Cached: alone.CachedTokens, KVBlocks: s.engines[w].cfg.Blocks,
			Blocks: f.via.book.Load(alone.Worker).ActiveBlocks + f.Prompt/s.cfg.Engine.BlockSize, Cost: alone.Cost}
		would.PrefillBusy = func(steps float64) bool {
			p := s.choose(f, prompt, prefills, c.PrefillLeg(), true)
			return float64(f.via.book.Load(p.Worker).PrefillTokens) >
				steps*float64(s.engines[p.Worker].cfg.MaxBatchedTokens)
		}
		would.PairCost = func() float64 {
			prefill, decode := s.choosePair(f, prompt, true)
			return prefill.Cost + decode.Cost +
				1000*f.via.book.TransferTime(prefill.Worker, f.Prompt-decode.CachedTokens)
		}
		outcome = d.Judge(&would)
	}
	var prefill, chosen choice
	if outcome == scoring.Bypassed {
		chosen = s.choose(f, prompt, decodes, *c, false)
	} else if prefill, chosen = s.choosePair(f, prompt, false); f.refused {
		prefill.booking.Free()
	} else {
		prefill.booking.Fetched(f.Prompt - chosen.CachedTokens)
		f.first, f.prefiller, f.prefill = new(sequence), int(prefill.Worker), prefill.booking
	}
	if s.failed != nil || f.refused {
		return
	}
	if f.worker, f.booking, f.overlap = int(chosen.Worker), chosen.booking, chosen.overlap; f.first != nil {
		f.overlap = prefill.overlap
	}
	s.dispatch(f)
}

// choosePair is choose for a prefill and a decode worker.
func (s *Simulation) choosePair(f *flight, prompt *scoring.Prompt, dry bool) (prefill, decode choice) {
	c := &s.cfg.Scoring
	prefill = s.choose(f, prompt, prefills, c.PrefillLeg(), dry)
	return prefill, s.choose(f, prompt, decodes, c.DecodeLeg(s.cfg.Disaggregation.On), dry)
}

// choose books a request on a worker of a role; dry: it only prices it. After a refusal or a failure it does nothing.
func (s *Simulation) choose(f *flight, prompt *scoring.Prompt, role role, cfg scoring.Config, dry bool) (c choice) {
	if s.failed != nil || f.refused {
		return c
	}
	if !s.gather(f, prompt, role) {
		f.refused = true
		s.refuse(f, RefusedBusy)
		return c
	}
	request := scoring.Request{ISLTokens: f.Prompt, DryRun: dry}
	rng := s.rng
	if !cfg.TrackPrefillTokens || !cfg.TrackActiveBlocks { // pairs: settings that use none draw the same otherwise
		rng = s.pairDraws
	}
	c.Selection, c.booking, s.failed = f.via.book.SelectAndAdd(request, s.candidates, &cfg, rng, nil)
	if s.failed == nil {
		c.overlap = s.candidates[c.Index].DeviceBlocks
	}
	return c
}

// role is what the workers of a part of the fleet do.
type role uint8

const (
	all role = iota
	prefills
	decodes
)

// workers returns the workers of a role: those from first to last-1.
func (s *Simulation) workers(r role) (first, last int) {
	switch r {
	case prefills:
		return 0, s.cfg.PrefillWorkers
	case decodes:
		return s.cfg.PrefillWorkers, s.cfg.Workers
	}
	return 0, s.cfg.Workers
}

// handOver has the decode worker fetch the blocks of a prompt that its prefill worker has computed.
func (s *Simulation) handOver(f *flight) {
	size := s.cfg.Engine.BlockSize
	f.sequence.admitted, f.sequence.cached, f.sequence.fetched = true, f.first.cached, true
	f.first = nil
	missing := f.Prompt - s.engines[f.worker].findPrefix(&f.sequence)*size
	took := s.cfg.TransferMS * float64(missing) * float64(time.Millisecond)
	s.at(s.now+time.Duration(min(took, maxStep*float64(time.Millisecond))), event{what: delivery, of: f})
}

// fetch gives an admitted sequence the blocks of its prompt, all but the last token, which are beyond a cached prefix.
func (e *engine) fetch(s *sequence) {
	have := s.computed
	n := blocksOf(s.prompt, e.cfg.BlockSize) - len(s.blocks)
	e.takePrivate(n) // admit has seen that there are enough
	s.blocks = append(s.blocks, make([]*cachedBlock, n)...)
	s.computed = s.prompt - 1
	e.publish(s, have, s.computed)
}
