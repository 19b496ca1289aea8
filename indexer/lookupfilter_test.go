package indexer

import (
	"testing"

	"kvepp/kvblock"
)

// The filter of a class's tier names each block that the tier has, also after it grew or shrank, and few others.
func TestLookupFilter(t *testing.T) {
	x := newIndex(t)
	tier := &x.tiers[kvblock.ClassTier(0)]
	const prompts, n = 300, 64 // enough for several sizes of the filter
	var chains [][]kvblock.SequenceHash
	for id := range uint64(2 * prompts) {
		local, chain := chainOf(id, n)
		chains = append(chains, chain)
		if id < prompts {
			mustStore(t, x, 1, stores(kvblock.EngineHash(id<<20|1), local, 0, n))
			e := stores(kvblock.EngineHash(id<<20|1), local, 0, n)
			e.Tier = kvblock.ClassTier(0)
			mustStore(t, x, 1, e)
		}
	}
	may := func(chain []kvblock.SequenceHash) uint64 { return tier.lookupFilter.mayContain(chain, tier.bySeq.seed) }
	largest := tier.lookupFilter.bytes()
	for left := prompts; left > 0; left-- {
		if left%32 == 0 || left < 8 {
			if err := tier.check(); err != nil {
				t.Fatalf("%d prompts: %v", left, err)
			}
		}
		for id := range left {
			if may(chains[id]) != 1<<n-1 {
				t.Fatalf("%d prompts: of prompt %d only %b", left, id, may(chains[id]))
			}
		}
		e := removes(kvblock.EngineHash((left-1)<<20|1), 0, n)
		e.Tier = kvblock.ClassTier(0)
		if unknown := x.Removed(1, e); unknown != 0 {
			t.Fatalf("%d unknown blocks", unknown)
		}
		if left == prompts {
			others := 0
			for _, chain := range chains[prompts:] {
				for found := may(chain); found != 0; found &= found - 1 {
					others++
				}
			}
			if others > prompts*n/8 {
				t.Errorf("%d of %d blocks that the tier does not have", others, prompts*n)
			}
		}
	}
	if tier.lookupFilter.bytes() != 8*minLookupWords || largest < 8*prompts*n/16 {
		t.Errorf("%d bytes at most, %d in the end", largest, tier.lookupFilter.bytes())
	}
}
