package scoring

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestPartsAddUp: the parts of a cost add up to it, with both policies and any weights.
func TestPartsAddUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	some := func(most int) int { return rng.IntN(most+1) * rng.IntN(2) } // often 0
	coin := func() bool { return rng.IntN(2) == 0 }
	for i := range 20000 {
		c := DefaultConfig()
		c.PrefillLoadScale, c.OverlapScoreCredit = rng.Float64()*2, rng.Float64()*float64(some(2))
		c.OverlapScoreCreditDecay = rng.Float64() * float64(some(1))
		c.DecodeActiveRequestWeight = float64(some(3))
		c.TrackPrefillTokens, c.TrackActiveBlocks, c.DecodeRole = !coin() || coin(), coin(), some(1) == 1
		if coin() {
			c.Policy = Time
		}
		x := Terms{BlockSize: 1 << rng.IntN(7), ISLTokens: some(5000), DeviceBlocks: some(200), HostBlocks: some(50),
			DiskBlocks: some(50), SharedBlocks: some(20), LoadUnknown: some(3) == 3, PrefillTokens: some(9000),
			DecodeBlocks: float64(some(900)), ActiveRequests: some(20), KVBlocks: some(1000),
			CostMultiplier: float64(some(3)), UnitTokens: some(64)}
		x.Time = TimeTerms{DecodingRequests: some(9), HeldBlocks: float64(some(800)), ActivePromptBlocks: some(50),
			SecondsPerToken: rng.Float64() / 1000, StepSeconds: rng.Float64() / 100, GapPerToken: rng.Float64() / 1e6,
			SlowerPerToken: float64(some(9)) / 1000, OutputTokens: float64(some(300)), LifeSeconds: float64(some(10))}
		sum, size := 0.0, 0.0
		for _, p := range c.Parts(&x) {
			sum += p.Value
			size += math.Abs(p.Value)
		}
		// Dynamo rounds cached tokens beyond the prompt to whole tokens.
		slack := 1e-9*size + c.PrefillLoadScale*max(x.CostMultiplier, 1)/float64(max(x.UnitTokens, 1))
		if cost := c.Cost(&x); math.Abs(sum-cost) > slack {
			t.Fatalf("round %d: the parts add up to %v, the cost is %v: %+v of %+v with %+v", i, sum, cost,
				c.Parts(&x), x, c)
		}
	}
}

// TestPartsOfACost: the parts say what makes a worker dear.
func TestPartsOfACost(t *testing.T) {
	c := DefaultConfig()
	x := Terms{BlockSize: 16, ISLTokens: 160, DeviceBlocks: 4, PrefillTokens: 320, DecodeBlocks: 30}
	want := []Part{{PartPrompt, 10}, {PartCached, -4}, {PartWaiting, 20}, {PartHeld, 30}}
	got := c.Parts(&x)
	if len(got) != len(want) {
		t.Fatalf("%v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%v, want %v", got[i], want[i])
		}
	}
}
