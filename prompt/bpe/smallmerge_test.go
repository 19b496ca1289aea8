package bpe

import (
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// TestStepMerges compares the result of all steps with merging by definition.
// Tables have results by rank or not; some are so full that searches go on in the next bucket.
func TestStepMerges(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	steps := 0
	for round := range 200 {
		// The symbols are 0 to symbols-1, and each merge makes the next token.
		symbols := 1 + rng.IntN(12)
		merges := make([]merge, rng.IntN(400))
		for i := range merges {
			tokens := symbols + i
			merges[i] = merge{
				kvblock.Token(rng.IntN(tokens)), kvblock.Token(rng.IntN(tokens)), kvblock.Token(tokens),
			}
		}
		if round%2 == 0 { // of most models, the results are not in the order of the merges
			rng.Shuffle(len(merges), func(i, j int) { merges[i].into, merges[j].into = merges[j].into, merges[i].into })
		}
		largest := []kvblock.Token{kvblock.Token(symbols + len(merges)), 1 << 17, maxID}[rng.IntN(3)]
		table := newMergeTable(merges, false, largest)

		count := rng.IntN(maxGroup + 1)
		var group [maxGroup]smallMerge
		var running, done [maxGroup]uint8
		pieces := make([][]kvblock.Token, maxGroup)
		for i, k := range rng.Perm(maxGroup)[:count] {
			piece := make([]kvblock.Token, min(rng.IntN(1+rng.IntN(80)), smallMergeSymbols))
			for at := range piece {
				piece[at] = kvblock.Token(rng.IntN(symbols))
			}
			pieces[k] = piece
			group[k].beginSymbols(&table, piece)
			group[k].rankAll(&table)
			running[i] = uint8(k)
		}
		for count > 0 {
			still := stepMerges(&table, &group, &running, &done, count)
			ended := count - still
			for _, k := range done[:ended] {
				want := mergeByDefinition(&table, slices.Clone(pieces[k]))
				if got := group[k].appendTo(nil); !slices.Equal(got, want) {
					t.Fatalf("%d becomes %d, want %d", pieces[k], got, want)
				}
			}
			steps += still
			count = still
		}
	}
	if steps < 10_000 {
		t.Fatalf("only %d merges", steps)
	}
}
