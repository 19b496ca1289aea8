package router

import (
	"cmp"
	"hash/maphash"
	"slices"
	"sort"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
)

const (
	// maxChain bounds the blocks of a prompt that a record keeps. Blocks behind them are not in Prefixes.
	maxChain = 1024

	// MaxPrefixes bounds the nodes of Prefixes.
	MaxPrefixes = 500

	maxPrefixWorkers = 16 // workers that a node names
)

var sessionNames = maphash.MakeSeed()

// keepChain keeps the hashes of the prompt's blocks. They share the memory that the decision hashed them into, unless
// the prompt is long.
func (r *Record) keepChain(m *matched, p *prepared, route *Route) {
	if route == nil || p.tokens == nil {
		return
	}
	v := m.variantOf(&route.computes)
	if v == nil || len(v.prompts) == 0 {
		return
	}
	if r.chain = v.prompts[0].Chain; len(r.chain) > maxChain {
		r.chain = slices.Clone(r.chain[:maxChain])
	}
	if p.hints.Session != "" {
		r.session = maphash.String(sessionNames, p.hints.Session) | 1
	}
}

// Prefix is a node of the radix tree of the kept decisions' prompts: blocks that all of its requests begin with, after
// those of its parent.
type Prefix struct {
	Hash      kvblock.SequenceHash // of its last block, which stands for all blocks before it too
	Model     string
	LoRA      string
	BlockSize int // tokens
	Depth     int // blocks before it
	Blocks    int
	Requests  int    // kept decisions whose prompts have all of its blocks
	Cached    int    // of Blocks times Requests, those that were predicted to be cached by the chosen worker
	Sessions  int    // distinct ones among the requests
	Session   uint64 // a hash of the session's name if there is one only; 0 otherwise
	Cut       int    // nodes below it that are left out
	// Workers are those that hold most of it, at most 16; More is how many others hold some of it.
	Workers  []PrefixWorker
	More     int
	Children []*Prefix // most requests first

	members []*Record
	chain   []kvblock.SequenceHash // from the prompt's first block to its last block
	shown   bool
}

// PrefixWorker is a worker that holds blocks of a prefix.
type PrefixWorker struct {
	Name   string
	Rank   uint32
	Blocks int // of the node's, in any tier, with what is predicted
}

// Heat is the number of prompt blocks that the prefix stood for: blocks times requests.
func (p *Prefix) Heat() int { return p.Blocks * p.Requests }

// Prefixes are the hottest prefixes of the kept decisions.
type Prefixes struct {
	Requests int       // kept decisions with known blocks
	Since    time.Time // of the oldest of these; zero: there are none
	Roots    []*Prefix // most requests first
	Cut      int       // nodes that are left out
}

// Prefixes returns the n hottest prefixes of the kept decisions and the prefixes before them, MaxPrefixes at most, and
// which workers hold them now. Without Config.Keep there are none.
//
// A tree of at most twice as many nodes as kept decisions is made. No lock is held meanwhile: the records are copied,
// and the index is looked up once for each returned node, as for a request.
func (r *Router) Prefixes(n int) Prefixes {
	var out Prefixes
	byPrompt := map[prefixKind][]*Record{}
	for _, record := range r.Records(len(r.records.ring), Query{}) {
		if len(record.chain) > 0 {
			out.Requests++
			out.Since = record.Time
			kind := prefixKind{record.Model, record.LoRA, record.BlockSize, record.chain[0]}
			byPrompt[kind] = append(byPrompt[kind], record)
		}
	}
	var all []*Prefix
	for kind, members := range byPrompt {
		out.Roots = append(out.Roots, grow(kind, members, 0, &all))
	}
	out.Roots, out.Cut = hottest(out.Roots, all, min(n, MaxPrefixes))
	r.findHolders(out.Roots)
	return out
}

// prefixKind keeps prompts apart that no node may share.
type prefixKind struct {
	model, lora string
	blockSize   int
	first       kvblock.SequenceHash
}

// grow returns the node of requests whose prompts have the block at depth in common, and adds it and all nodes below it
// to all. A hash stands for all blocks before it too, so that prompts part where the first hash differs.
func grow(kind prefixKind, members []*Record, depth int, all *[]*Prefix) *Prefix {
	first := members[0].chain
	end := len(first)
	for _, m := range members[1:] {
		end = min(end, depth+sort.Search(min(end, len(m.chain))-depth, func(i int) bool {
			return m.chain[depth+i] != first[depth+i]
		}))
	}
	p := &Prefix{Hash: first[end-1], Model: kind.model, LoRA: kind.lora, BlockSize: kind.blockSize, Depth: depth,
		Blocks: end - depth, Requests: len(members), members: members, chain: first[:end]}
	*all = append(*all, p)
	sessions := map[uint64]bool{}
	rest := map[kvblock.SequenceHash][]*Record{}
	for _, m := range members {
		p.Cached += min(max(m.PredictedCachedTokens/max(m.BlockSize, 1)-depth, 0), p.Blocks)
		if m.session != 0 {
			sessions[m.session] = true
			p.Session = m.session
		}
		if len(m.chain) > end {
			rest[m.chain[end]] = append(rest[m.chain[end]], m)
		}
	}
	if p.Sessions = len(sessions); p.Sessions > 1 {
		p.Session = 0
	}
	for _, next := range rest {
		p.Children = append(p.Children, grow(kind, next, end, all))
	}
	return p
}

// hottest keeps the n hottest nodes and those before them, and counts the others.
func hottest(roots, all []*Prefix, n int) (kept []*Prefix, cut int) {
	slices.SortFunc(all, func(a, b *Prefix) int {
		return cmp.Or(b.Heat()-a.Heat(), a.Depth-b.Depth, cmp.Compare(a.Hash, b.Hash))
	})
	parents := map[*Prefix]*Prefix{}
	for _, p := range all {
		for _, c := range p.Children {
			parents[c] = p
		}
	}
	left := n
	for _, p := range all {
		var path []*Prefix
		for x := p; x != nil && !x.shown; x = parents[x] {
			path = append(path, x)
		}
		if len(path) > left {
			continue
		}
		left -= len(path)
		for _, x := range path {
			x.shown = true
		}
	}
	return onlyShown(roots)
}

// onlyShown removes the nodes that are not shown, sorts the others and returns how many it removed.
func onlyShown(nodes []*Prefix) (kept []*Prefix, cut int) {
	for _, p := range nodes {
		if p.shown {
			kept = append(kept, p)
			p.Children, p.Cut = onlyShown(p.Children)
			cut += p.Cut
		} else {
			cut += 1 + below(p)
		}
	}
	slices.SortFunc(kept, func(a, b *Prefix) int { return cmp.Or(b.Requests-a.Requests, cmp.Compare(a.Hash, b.Hash)) })
	return kept, cut
}

// below counts the nodes below p.
func below(p *Prefix) (n int) {
	for _, c := range p.Children {
		n += 1 + below(c)
	}
	return n
}

// findHolders sets which workers hold how much of each node.
func (r *Router) findHolders(nodes []*Prefix) {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	var scores indexer.OverlapScores
	for len(nodes) > 0 {
		p := nodes[len(nodes)-1]
		nodes = append(nodes[:len(nodes)-1:len(nodes)-1], p.Children...)
		r.holdersOf(p, snapshot, &scores)
	}
}

func (r *Router) holdersOf(p *Prefix, snapshot *pool.Snapshot, scores *indexer.OverlapScores) {
	r.index.FindMatches(p.chain, scores)
	held := map[kvblock.Worker]int{}
	for o := range scores.Overlaps() {
		lower := scores.Extension(o.Worker)
		if n := o.Blocks + lower.Host + lower.Disk + lower.External - p.Depth; n > 0 {
			held[o.Worker] = min(n, p.Blocks)
		}
	}
	for i := range snapshot.Workers {
		w := &snapshot.Workers[i]
		if n := held[w.Worker]; n > 0 && (w.Model == p.Model || w.Model == "") {
			p.Workers = append(p.Workers, PrefixWorker{w.Name, w.Rank, n})
		}
	}
	slices.SortStableFunc(p.Workers, func(a, b PrefixWorker) int { return b.Blocks - a.Blocks })
	if p.More = len(p.Workers) - maxPrefixWorkers; p.More > 0 {
		p.Workers = p.Workers[:maxPrefixWorkers]
	}
	p.More = max(p.More, 0)
}
