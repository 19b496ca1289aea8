package router

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
)

// flat lists a tree's nodes, parents first.
func flat(nodes []*Prefix) (all []*Prefix) {
	for _, p := range nodes {
		all = append(append(all, p), flat(p.Children)...)
	}
	return all
}

// TestPrefixes: conversations that share a system prompt are a tree, with what each worker holds of each node.
func TestPrefixes(t *testing.T) {
	h, _ := keeping(t, 100, workers(3)...)
	system, first, second := tokens(0, 40), tokens(1000, 20), tokens(2000, 12)
	ask := func(session string, parts ...[]kvblock.Token) {
		req := completion("m", slices.Concat(parts...))
		req.Hints.Session = session
		h.route(req).Free()
	}
	h.warm("w1", 0, system, blocksOfFour)
	ask("a", system, first)
	ask("a", system, first, tokens(1500, 8))
	ask("b", system, second)
	ask("", tokens(9000, 3)) // no whole block
	h.warm("w2", 0, slices.Concat(system[:20], tokens(7000, 8)), blocksOfFour)

	found := h.Prefixes(10)
	var all []string
	for _, p := range flat(found.Roots) {
		all = append(all, fmt.Sprintf("%d+%d x%d, %d cached, %d sessions, %v", p.Depth, p.Blocks, p.Requests, p.Cached,
			p.Sessions, p.Workers))
	}
	want := []string{
		"0+10 x3, 30 cached, 2 sessions, [{w1 0 10} {w2 0 5}]",
		"10+5 x2, 0 cached, 1 sessions, []",
		"15+2 x1, 0 cached, 1 sessions, []",
		"10+3 x1, 0 cached, 1 sessions, []",
	}
	if fmt.Sprint(all) != fmt.Sprint(want) || found.Requests != 3 || found.Cut != 0 || found.Since.IsZero() {
		t.Errorf("%+v\n%s\nwant\n%s", found, strings.Join(all, "\n"), strings.Join(want, "\n"))
	}
	if root := found.Roots[0]; root.Session != 0 || root.Children[0].Session == 0 || root.Model != "m" ||
		root.BlockSize != 4 {
		t.Errorf("root %+v, its child %+v", root, root.Children[0])
	}
	if found = h.Prefixes(2); len(flat(found.Roots)) != 2 || found.Cut != 2 || found.Roots[0].Cut != 2 ||
		found.Roots[0].Children[0].Requests != 2 {
		t.Errorf("the two hottest: %+v", found.Roots[0])
	}
}

// TestPrefixesAreEachRequests: in random traffic, the path of each request's blocks through the tree has them all, and
// each node as many requests as begin with its blocks.
func TestPrefixesAreEachRequests(t *testing.T) {
	h, _ := keeping(t, 60, workers(2)...)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 80 {
		var prompt []kvblock.Token
		for len(prompt) == 0 || rng.IntN(4) > 0 {
			prompt = append(prompt, tokens(100*rng.IntN(3), 4*(1+rng.IntN(3)))...)
		}
		h.route(completion("m", prompt)).Free()
	}
	records := h.Records(100, Query{})
	seen := map[kvblock.SequenceHash]int{}
	blocks := map[kvblock.SequenceHash]bool{}
	for _, r := range records {
		for _, hash := range r.chain {
			seen[hash]++
			blocks[hash] = true
		}
	}
	found := h.Prefixes(MaxPrefixes)
	sum := 0
	for _, p := range flat(found.Roots) {
		sum += p.Blocks
		for _, hash := range p.chain[p.Depth:] {
			if seen[hash] != p.Requests {
				t.Errorf("a block of %d requests is in a node of %d", seen[hash], p.Requests)
			}
		}
	}
	if len(records) != 60 || found.Requests != 60 || sum != len(blocks) {
		t.Errorf("%d records, %d requests, %d of %d blocks", len(records), found.Requests, sum, len(blocks))
	}
}

// TestLongChainsAreCut: a record keeps a bounded part of a long prompt.
func TestLongChainsAreCut(t *testing.T) {
	h, _ := keeping(t, 3, workers(1)...)
	h.route(completion("m", tokens(0, 4*maxChain+400))).Free()
	if r := h.Records(1, Query{})[0]; len(r.chain) != maxChain || cap(r.chain) > 2*maxChain {
		t.Errorf("%d blocks, room for %d", len(r.chain), cap(r.chain))
	}
}
