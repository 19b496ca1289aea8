package bpe

import (
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// TestMergeTable compares merge tables with a map: their results, and the order of their ranks. The merges are in the
// order of their results or not, and several may have the same result.
func TestMergeTable(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for _, c := range []struct {
		what     string
		merges   int
		largest  kvblock.Token
		group    int // merges with the same result
		shuffled bool
		byToken  bool
		table    bool // whether the table needs results by rank
	}{
		{what: "none", largest: 300},
		{what: "few", merges: 5, largest: 300, group: 1},
		{what: "in the order of results", merges: 20_000, largest: 21_000, group: 1},
		{what: "groups", merges: 40_000, largest: 21_000, group: 90},
		{what: "groups, high ids", merges: 5_000, largest: maxID, group: 90, table: true},
		{what: "high ids", merges: 20_000, largest: maxID, group: 1},
		{what: "out of order", merges: 20_000, largest: 21_000, group: 3, shuffled: true, table: true},
		{what: "out of order, high ids", merges: 20_000, largest: maxID, group: 3, shuffled: true, table: true},
		{what: "by token", merges: 20_000, largest: maxID, group: 9, byToken: true},
	} {
		merges := make([]merge, c.merges)
		into, last := max(c.largest, 21_000)-20_600, 0
		for i := range merges {
			if i-last >= c.group || rng.IntN(4) == 0 {
				into++
				last = i
			}
			near := kvblock.Token(rng.IntN(100)) // neighbouring pairs, and some twice
			other := kvblock.Token(rng.IntN(int(min(c.largest, 4000))))
			merges[i] = merge{c.largest - near, other, min(into, c.largest)}
			if rng.IntN(2) == 0 {
				merges[i].left, merges[i].right = merges[i].right, merges[i].left
			}
		}
		if c.shuffled {
			rng.Shuffle(len(merges), func(i, j int) { merges[i], merges[j] = merges[j], merges[i] })
		}
		table := newMergeTable(merges, c.byToken, c.largest)
		if got := table.into != nil; got != c.table {
			t.Errorf("%s: results by rank: %v, want %v", c.what, got, c.table)
		}
		want := map[[2]kvblock.Token]int{}
		for i, m := range merges {
			want[[2]kvblock.Token{m.left, m.right}] = i
		}
		type ranked struct {
			rank  uint32
			index int
		}
		var all []ranked
		for pair, i := range want {
			got := table.get(pair[0], pair[1])
			if got.rank >= noRank || got.into != merges[i].into {
				t.Fatalf("%s: %v: %v, want the result %d", c.what, pair, got, merges[i].into)
			}
			if c.byToken {
				i = int(merges[i].into)
			}
			all = append(all, ranked{got.rank, i})
		}
		slices.SortFunc(all, func(x, y ranked) int { return int(x.rank) - int(y.rank) })
		for k := range all[:max(len(all)-1, 0)] {
			if x, y := all[k], all[k+1]; x.index > y.index || x.rank == y.rank && x.index != y.index {
				t.Fatalf("%s: merge %d has rank %d, and merge %d has %d", c.what, x.index, x.rank, y.index, y.rank)
			}
		}
		for range 20_000 {
			left, right := c.largest-kvblock.Token(rng.IntN(100)), kvblock.Token(rng.IntN(int(c.largest)+1))
			if _, ok := want[[2]kvblock.Token{left, right}]; !ok && table.get(left, right).rank != noRank {
				t.Fatalf("%s: %d and %d merge: %v", c.what, left, right, table.get(left, right))
			}
		}
	}
}
