package scoring

import (
	"slices"
	"testing"
)

// Two requests share four blocks. A request's unshared blocks, of prompt and response, count less as its response nears
// its end.
func TestOutputBlocks(t *testing.T) {
	a := NewActiveSequences()
	shared := chain(1, 4)
	one := mustAdd(t, a, Request{}, Candidate{Prompt: prompt(16, append(slices.Clone(shared), chain(2, 4)...))})
	two := mustAdd(t, a, Request{}, Candidate{Prompt: prompt(16, append(slices.Clone(shared), chain(3, 2)...))})
	want := func(blocks, tokens int) {
		t.Helper()
		wantLoad(t, a, 0, Load{Requests: 2, ActiveBlocks: blocks, ActiveTokens: tokens})
	}
	want(10, 160)
	one.AddOutputBlocks(1, NotKnown)
	want(11, 176)
	one.AddOutputBlocks(1, 0.75) // 4 shared + 2 of the other + 6 own at 3/4 = 10.5
	want(11, 168)
	two.AddOutputBlocks(2, NotKnown)
	want(13, 200)
	one.AddOutputBlocks(0, 0.1) // nothing new
	want(13, 200)
	one.AddOutputBlocks(1, 0) // 4 + 2 + 2
	want(8, 128)
	two.Free()
	wantLoad(t, a, 0, Load{Requests: 1, ActiveBlocks: 4, ActiveTokens: 64})
	one.AddOutputBlocks(1, 0.5) // now the formerly shared blocks are its own: 12 at 1/2
	wantLoad(t, a, 0, Load{Requests: 1, ActiveBlocks: 6, ActiveTokens: 96})

	// A new request that shares these blocks does not change their weight, and adds its own blocks in full.
	three := mustAdd(t, a, Request{}, Candidate{Prompt: prompt(16, append(slices.Clone(shared), chain(3, 2)...))})
	want(8, 128)
	// On another worker the same blocks count in full.
	elsewhere := mustAdd(t, a, Request{}, Candidate{Worker: 1, Prompt: prompt(16, shared[:2])})
	wantLoad(t, a, 1, Load{Requests: 1, ActiveBlocks: 2, ActiveTokens: 32})
	want(8, 128)
	elsewhere.Free()
	one.Free()
	wantLoad(t, a, 0, Load{Requests: 1, ActiveBlocks: 4, ActiveTokens: 64}) // 4 at 1/2, and 2
	three.Free()
	wantEmpty(t, a)
	mustAdd(t, a, Request{}, Candidate{Prompt: prompt(16, shared)})
	wantLoad(t, a, 0, Load{Requests: 1, ActiveBlocks: 4, ActiveTokens: 64})
}

// Without hashes a prompt's blocks are the request's own.
func TestOutputBlocksWithoutHashes(t *testing.T) {
	a := NewActiveSequences()
	b := mustAdd(t, a, Request{ISLTokens: 64}, Candidate{})
	b.AddOutputBlocks(2, 0.5)
	wantLoad(t, a, 0, Load{Requests: 1, PrefillTokens: 64, ActiveBlocks: 3, ActiveTokens: 48})
	b.AddOutputBlocks(2, 7) // above 1 counts as 1
	wantLoad(t, a, 0, Load{Requests: 1, PrefillTokens: 64, ActiveBlocks: 8, ActiveTokens: 128})
	b.Free()
	wantEmpty(t, a)
}
