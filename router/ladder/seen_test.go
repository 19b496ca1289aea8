package ladder

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

func chain(rng *rand.Rand, prefix []kvblock.SequenceHash, more int) []kvblock.SequenceHash {
	all := append([]kvblock.SequenceHash(nil), prefix...)
	for range more {
		all = append(all, kvblock.SequenceHash(rng.Uint64()))
	}
	return all
}

// TestSeen: with room for all blocks, the number of known blocks is exact, for each model.
func TestSeen(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	s := NewSeen(1 << 20)
	first := chain(rng, nil, 100)
	second := chain(rng, first[:60], 40)
	for _, c := range []struct {
		space uint64
		chain []kvblock.SequenceHash
		want  int
	}{
		{1, first, 0}, {1, second, 60}, {1, first, 100}, {1, second[:80], 80}, {1, nil, 0},
		{2, first, 0}, {2, second, 60},
	} {
		if got := s.Note(c.space, c.chain); got != c.want {
			t.Errorf("%d of %d blocks are known in space %d, want %d", got, len(c.chain), c.space, c.want)
		}
	}
}

// TestSeenExpires: a block counts for Lookback after its latest request.
func TestSeenExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(5, 6))
		s := NewSeen(1 << 20)
		c := chain(rng, nil, 10)
		s.Note(0, c)
		<-time.After(Lookback - time.Hour)
		if got := s.Note(0, c); got != 10 {
			t.Errorf("%d blocks are known after 23 hours, want 10", got)
		}
		<-time.After(Lookback - time.Hour)
		if got := s.Note(0, c[:5]); got != 5 {
			t.Errorf("%d blocks are known 23 hours after the second request, want 5", got)
		}
		<-time.After(2 * time.Hour)
		if got := s.Note(0, c); got != 5 {
			t.Errorf("%d blocks are known after 25 hours, want the 5 that were requested in between", got)
		}
	})
}

// TestSeenSamples: many more blocks than there is room for. The error of the sum stays small, new prompts are not taken
// for known ones, and the memory stays the same.
func TestSeenSamples(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	s := NewSeen(MinSeenBytes) // 8,192 blocks
	const blocks = 200
	var talks [][]kvblock.SequenceHash
	for range 400 { // 80,000 blocks
		talks = append(talks, chain(rng, nil, blocks))
	}
	for range 3 {
		for _, talk := range talks {
			s.Note(0, talk)
		}
	}
	if n := s.Sampling(); n < 16 || n > 64 {
		t.Errorf("one of %d blocks is kept; 80,000 blocks in 8,192 places take one of 16 or more", n)
	}
	sum := 0
	for i, talk := range talks {
		sum += s.Note(0, chain(rng, talk[:blocks/2], blocks/2))
		if fresh := s.Note(0, chain(rng, nil, blocks)); fresh != 0 {
			t.Fatalf("%d blocks of new prompt %d are known", fresh, i)
		}
	}
	if mean := float64(sum) / float64(len(talks)); mean < 0.85*blocks/2 || mean > 1.15*blocks/2 {
		t.Errorf("%.1f blocks are known on average, want about %d", mean, blocks/2)
	}
}

func BenchmarkNote(b *testing.B) {
	rng := rand.New(rand.NewPCG(9, 10))
	s := NewSeen(DefaultSeenBytes)
	var prompts [][]kvblock.SequenceHash
	for range 4096 {
		prompts = append(prompts, chain(rng, nil, 512))
	}
	for i := 0; b.Loop(); i++ {
		s.Note(0, prompts[i%len(prompts)])
	}
}
