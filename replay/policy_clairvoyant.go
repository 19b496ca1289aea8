package replay

import (
	"slices"

	"kvepp/kvblock"
)

// clairvoyant sends each request where its first token comes first. It knows what no router does: what each engine has
// cached and queued now, how fast it is, and when its step ends. So it shows how much a better policy could still gain.
// It is no bound: it thinks of one request at a time. It leaves out that requests wait for memory, and that their
// number in a step is limited.
type clairvoyant struct {
	unlearning
	// others is the weight of the time that the responses on the engine are delayed, all together. 0: it thinks of no
	// response that is slower for its choice.
	others  float64
	planned map[kvblock.SequenceHash]struct{} // blocks that queued prompts will have computed
}

func newClairvoyant(others float64) *clairvoyant {
	return &clairvoyant{others: others, planned: map[kvblock.SequenceHash]struct{}{}}
}

func (c *clairvoyant) choose(v *view) int {
	return v.least(func(w int) float64 {
		took, own := c.timeToFirstToken(v, v.engines[w])
		return took + c.others*delayOfDecoding(v.engines[w], own)
	})
}

// delayOfDecoding returns by how much a prompt with so many new tokens delays the responses on an engine, in
// milliseconds: by the time for its tokens, and by the constant of a prefill step unless another prompt waits for the
// next step.
func delayOfDecoding(e *engine, tokens int) float64 {
	decoding, waits := 0, len(e.waiting)+len(e.coming) > 0
	for _, s := range e.running {
		if s.known()-s.computed <= 1 {
			decoding++
		}
	}
	delay := e.cfg.Prefill[1] * float64(tokens)
	if !waits {
		delay += e.cfg.Prefill[0]
	}
	return float64(decoding) * delay / e.cfg.Speed
}

// timeToFirstToken returns what a request would have on an engine, in milliseconds, and how many tokens of its prompt
// the engine would compute.
func (c *clairvoyant) timeToFirstToken(v *view, e *engine) (took float64, own int) {
	clear(c.planned)
	tokens, held := 0, 0
	for _, s := range e.running {
		if rest := s.known() - s.computed; rest > 1 {
			tokens += rest
		}
		held += s.known()
	}
	for _, s := range slices.Concat(e.waiting, e.coming, []*sequence{{prompt: v.prompt, chain: v.chain}}) {
		own = s.known() - c.plan(e, s)*e.cfg.BlockSize // of the last one, in the end
		tokens += own
	}
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
	return took, own
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
