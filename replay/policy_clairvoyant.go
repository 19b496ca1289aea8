package replay

import (
	"slices"

	"kvepp/kvblock"
)

// clairvoyant sends each request where its first token comes first. It knows what no router does: what each engine has
// cached and queued now, how fast it is, and when its step ends. So it shows how much a better policy could still gain.
// It is no bound: it thinks of one request at a time, and of no answer that is slower for it. It leaves out that
// requests wait for memory, and that their number in a step is limited.
type clairvoyant struct {
	unlearning
	planned map[kvblock.SequenceHash]struct{} // blocks that queued prompts will have computed
}

func newClairvoyant(int) policy {
	return &clairvoyant{planned: map[kvblock.SequenceHash]struct{}{}}
}

func (c *clairvoyant) choose(v *view) int {
	return v.least(func(w int) float64 { return c.timeToFirstToken(v, v.engines[w]) })
}

// timeToFirstToken returns what a request would have on an engine, in milliseconds.
func (c *clairvoyant) timeToFirstToken(v *view, e *engine) float64 {
	clear(c.planned)
	tokens, held := 0, 0
	for _, s := range e.running {
		if rest := s.known() - s.computed; rest > 1 {
			tokens += rest
		}
		held += s.known()
	}
	for _, s := range slices.Concat(e.waiting, e.coming, []*sequence{{prompt: v.prompt, chain: v.chain}}) {
		tokens += s.known() - c.plan(e, s)*e.cfg.BlockSize
	}
	took := 0.0
	if e.inStep {
		took = max(e.stepEnds-v.now, 0).Seconds() * 1000
	}
	decode := 0.0
	if len(e.running) > 0 {
		decode = e.cfg.decode(held)
	}
	for ; tokens > 0; tokens -= e.cfg.MaxBatchedTokens {
		took += (e.cfg.Prefill.at(float64(min(tokens, e.cfg.MaxBatchedTokens))) + decode) / e.cfg.Speed
	}
	return took
}

// plan returns how many leading blocks of a sequence need not be computed, and counts all its full blocks as computed
// for those behind it.
func (c *clairvoyant) plan(e *engine, s *sequence) int {
	known := e.findPrefix(s, c.planned)
	for _, h := range s.chain[known:min(s.known()/e.cfg.BlockSize, len(s.chain))] {
		c.planned[h] = struct{}{}
	}
	return known
}
