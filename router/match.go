package router

import (
	"math/rand/v2"
	"time"

	"kvepp/indexer"
	"kvepp/internal/tracing"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// variant is a prompt cut into the blocks of one block size. Workers of one model usually share one variant.
type variant struct {
	blockSize int
	eagle     bool
	unread    bool // the request reads no cache
	prompt    scoring.Prompt
	prompts   []indexer.Prompt // to look up; their chains end with the last block whose hash is known
	overlap   []overlap        // indexed by worker number, summed over the prompts; 0 beyond its length
}

// overlap counts the leading blocks that a worker holds on its device, and the blocks behind them in lower tiers. disk
// includes external storage, which has the same weight.
type overlap struct {
	device, host, disk int32
	cut                int32             // blocks of full attention that other classes make unusable, see indexer.Cut
	by                 kvblock.ClassKind // of these classes, if cut is not 0
	upperBound         bool              // the worker may be able to reuse fewer blocks
}

// overlapOf returns what a worker holds of the prompt. It is only read.
func (v *variant) overlapOf(w kvblock.Worker) *overlap {
	if int(w) < len(v.overlap) {
		return &v.overlap[w]
	}
	return &noOverlap
}

var noOverlap overlap // never written to

// credit sets what a candidate holds of the prompt.
func (v *variant) credit(c *scoring.Candidate) {
	o := v.overlapOf(c.Worker)
	c.DeviceBlocks, c.HostBlocks, c.DiskBlocks = int(o.device), int(o.host), int(o.disk)
}

// match hashes the prompt once for every block size among the candidates, looks the hashes up in the index, and says on
// what the choice then rests.
func (r *Router) match(sc *scratch, candidates []pool.Worker, p *prepared) Reason {
	sized, announcing := false, false
	for i := range candidates {
		w := &candidates[i]
		if loadOnly(w) != "" {
			continue
		}
		sized = true
		announcing = announcing || w.Announces()
		if sc.variantOf(w) == nil {
			sc.variants = append(sc.variants, r.cut(sc, p, w.BlockSize, w.EAGLE))
		}
	}
	switch {
	case !sized: // explain gives the reason of the chosen worker
		return ReasonNoBlockSize
	case r.cfg.Scoring.Mode != scoring.KV:
		return ReasonMode
	case r.cfg.Scoring.OverlapScoreCredit == 0:
		return ReasonNoCredit
	case r.cfg.Predict.Alone && p.reason.exact(), p.estimated:
		return ReasonApproximate
	case !announcing && !r.cfg.Predict.Alone:
		return ReasonNoEvents
	}
	return p.reason
}

// loadOnly returns why a worker's blocks can be matched with no prompt, so that it is priced by load alone; "" if they
// can.
func loadOnly(w *pool.Worker) Reason {
	switch {
	case w.OtherTokenizer:
		return ReasonTokenizerDiffers
	case w.Announced != 0:
		return ReasonBlockSize
	case w.BlockSize == 0:
		return ReasonNoBlockSize
	}
	return ""
}

// predict adds to the index the blocks that the worker is about to compute, so that the next request with the same
// prefix finds them.
func (r *Router) predict(m *matched, p *prepared, route *Route) {
	r.predictOn(m, p, &route.computes)
	if route.fetches.Endpoint != nil {
		r.predictOn(m, p, &route.fetches)
	}
}

// predictOn adds to the index the blocks of the prompt that w will have.
func (r *Router) predictOn(m *matched, p *prepared, w *pool.Worker) {
	v, life := m.variantOf(w), r.cfg.lifetime(w)
	if p.estimated && !r.cfg.Predict.Alone { // no event will have these blocks
		life = indexer.Lifetime{TTL: r.cfg.Predict.Silent}
	}
	if v == nil || life == (indexer.Lifetime{}) || !r.cfg.asksIndex() {
		return
	}
	at := time.Now()
	for i := range v.prompts {
		r.index.Predict(w.Worker, v.prompts[i].Chain, life)
	}
	r.metrics.Phase("predict", at)
}

// cut hashes the prompt for one block size and looks the hashes up.
func (r *Router) cut(sc *scratch, p *prepared, blockSize int, eagle bool) variant {
	began := time.Now()
	var before variant // its memory is reused
	if n := len(sc.variants); n < cap(sc.variants) {
		before = sc.variants[:n+1][n]
	}
	v := variant{blockSize: blockSize, eagle: eagle, prompts: before.prompts[:0], overlap: before.overlap[:0]}
	v.prompt = scoring.Prompt{BlockSize: blockSize, Chains: make([][]kvblock.SequenceHash, 0, len(p.tokens))}
	v.unread = p.writeOnly
	for i, t := range p.tokens {
		options := p.hashOptions(&v, i)
		sc.local = kvblock.AppendLocalHashes(sc.local[:0], t.IDs[:t.Certain], options)
		v.prompt.Chains = append(v.prompt.Chains,
			kvblock.AppendSequenceHashes(make([]kvblock.SequenceHash, 0, len(sc.local)), sc.local))
	}
	at := r.metrics.Phase("hash", began)
	if sc.span != nil {
		sc.span.Phase(spanHash, began, at, tracing.Int("kvepp.block_size", blockSize),
			tracing.Int("kvepp.blocks", v.blocks()))
	}
	for i, t := range p.tokens {
		options := p.hashOptions(&v, i)
		v.prompts = append(v.prompts, indexer.Prompt{
			Chain: v.prompt.Chains[i], Tokens: len(t.IDs), IDs: t.IDs[:t.Certain], Options: options,
		})
		if t.Certain < len(t.IDs) {
			v.prompt.Chains[i] = appendUnknown(v.prompt.Chains[i], options.Blocks(len(t.IDs)))
		}
	}
	r.lookUp(sc, &v)
	return v
}

// hashOptions returns how the blocks of prompt i are hashed.
func (p *prepared) hashOptions(v *variant, i int) kvblock.HashOptions {
	options := kvblock.HashOptions{BlockSize: v.blockSize, EAGLE: v.eagle, LoRAName: p.lora, CacheNamespace: p.salt}
	if i < len(p.spaces) {
		options.LoRAName, options.CacheNamespace = p.spaces[i].LoRA, p.spaces[i].Salt
	}
	return options
}

// lookUp sets v.overlap from the index.
func (r *Router) lookUp(sc *scratch, v *variant) {
	at := time.Now()
	clear(v.overlap)
	v.overlap = v.overlap[:0]
	for i := range v.prompts {
		if v.unread || !r.cfg.asksIndex() {
			break
		}
		r.index.FindPrompt(&v.prompts[i], &sc.scores)
		for o := range sc.scores.Overlaps() {
			if n := int(o.Worker) + 1; n > len(v.overlap) {
				v.overlap = append(v.overlap, make([]overlap, n-len(v.overlap))...)
			}
			sum, lower := &v.overlap[o.Worker], sc.scores.Extension(o.Worker)
			sum.device += int32(o.Blocks)
			sum.host += int32(lower.Host)
			sum.disk += int32(lower.Disk + lower.External)
			if cut := sc.scores.Cut(o.Worker); cut != (indexer.Cut{}) {
				if cut.Blocks > 0 {
					sum.cut, sum.by = sum.cut+int32(cut.Blocks), cut.Kind
				}
				sum.upperBound = sum.upperBound || cut.UpperBound
			}
		}
	}
	done := r.metrics.Phase("match", at)
	if sc.span != nil {
		sc.span.Phase(spanLookUp, at, done, tracing.Int("kvepp.blocks", v.blocks()),
			tracing.Int("kvepp.best_overlap_blocks", v.best()))
	}
}

// rematch looks the prompt up again, because workers may hold other blocks after the request has waited.
func (r *Router) rematch(sc *scratch) {
	for i := range sc.variants {
		r.lookUp(sc, &sc.variants[i])
	}
}

// appendUnknown extends a chain to this many blocks with random hashes. They stand, in the load book alone, for the
// blocks behind a prompt's certain tokens, and so count as blocks that no other request shares.
func appendUnknown(chain []kvblock.SequenceHash, blocks int) []kvblock.SequenceHash {
	for len(chain) < blocks {
		chain = append(chain, kvblock.SequenceHash(rand.Uint64()))
	}
	return chain
}

// variantOf returns the prompt as cut for the worker's engine; nil if it was not.
func (m *matched) variantOf(w *pool.Worker) *variant {
	if loadOnly(w) != "" {
		return nil
	}
	for i := range m.variants {
		if v := &m.variants[i]; v.blockSize == w.BlockSize && v.eagle == w.EAGLE {
			return v
		}
	}
	return nil
}
