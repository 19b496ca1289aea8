package indexer

import (
	"maps"
	"math/bits"
	"math/rand/v2"
	"testing"

	"kvepp/kvblock"
)

// Recorded counts stay correct, in any order and in batches of any size, beside neighbours with similar and with very
// different counts.
func TestTierScores(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		var a tierScores
		said := map[int]int{}
		depth := r.IntN(300)
		for range 1 + r.IntN(20) {
			depth += r.IntN([]int{2, 70, 1000}[r.IntN(3)])
			j := r.IntN(3)
			who := r.Uint64() & r.Uint64() << r.IntN(64) // of word j
			if r.IntN(4) == 0 {
				who = ^uint64(0)
			}
			switch r.IntN(3) {
			case 0: // any worker, repeatedly too
				w, n := r.IntN(200), r.IntN(2000)
				a.record(kvblock.Worker(w), n)
				said[w] = n
			case 1: // workers without a count
				set := make([]uint64, j+1)
				set[j] = who &^ knownIn(&a, j)
				a.recordSet(set, depth)
				for each := set[j]; each != 0; each &= each - 1 {
					said[64*j+bits.TrailingZeros64(each)] = depth
				}
			case 2: // the same, and each holds a part of a run
				matched := 1 + r.IntN(maxRun)
				who &^= knownIn(&a, j)
				var leads [8]uint64
				want, whole := map[int]int{}, uint64(0)
				for w := range 64 {
					lead := 1 + r.IntN(maxRun)
					leads[w/8] |= uint64(lead) << (w % 8 * 8)
					switch {
					case who>>w&1 == 0:
					case lead < matched:
						want[64*j+w] = depth + lead
					default:
						whole |= 1 << w
					}
				}
				if got := a.recordGroup(j, who, &leads, depth, matched); got != whole {
					t.Fatalf("%x hold all %d blocks, want %x", got, matched, whole)
				}
				a.known[j] |= who &^ whole
				maps.Copy(said, want)
			}
		}
		for w := range 256 {
			if got, ok := a.blocks(kvblock.Worker(w)), a.has(kvblock.Worker(w)); got != said[w] || ok != has(said, w) {
				t.Fatalf("worker %d: %d, %v; want %d, %v", w, got, ok, said[w], has(said, w))
			}
		}
	}
}

// knownIn returns the workers in word j of known.
func knownIn(a *tierScores, j int) uint64 {
	a.fit(j + 1)
	return a.known[j]
}

func has(said map[int]int, w int) bool {
	_, ok := said[w]
	return ok
}
