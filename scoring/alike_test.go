package scoring

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Equal candidates take a faster path. A multiplier of 1 changes no cost but makes candidates differ, which avoids that
// path. Two books with the same history, one of them with the multiplier, must agree to the last bit.
func TestAlikeEqualsOthers(t *testing.T) { synctest.Test(t, alikeEqualsOthers) }

func alikeEqualsOthers(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for range 200 {
		cfg := defaults()
		cfg.OverlapScoreCredit = rng.Float64() * 2
		cfg.PrefillLoadScale = rng.Float64() * 3
		cfg.DecodeActiveRequestWeight = rng.Float64() * float64(rng.IntN(2))
		cfg.Policy = Policy(rng.IntN(2))
		cfg.Temperature = 0.5 * float64(rng.IntN(2))
		if rng.IntN(10) == 0 {
			cfg.PrefillLoadScale = math.MaxFloat64 // infinite costs
		}
		blockSize := 1 << rng.IntN(9)
		n := 1 + rng.IntN(70)
		books, draws := [2]*ActiveSequences{}, [2]*rand.Rand{}
		prefills, answers := [2][]Booking{}, [2][]Booking{}
		model := PrefillModel{Linear: rng.IntN(3) == 0, TokensPerSecond: 1000 * rng.Float64()}
		for k := range books {
			books[k], draws[k] = NewActiveSequences(), rand.New(rand.NewPCG(9, 9))
			books[k].Prefill = model
		}
		for step := range 30 {
			wait(time.Duration(rng.IntN(1000)) * time.Millisecond)
			for k := range books {
				for _, b := range prefills[k] {
					b.MarkPrefillCompleted()
				}
				prefills[k] = nil
			}
			wait(time.Duration(rng.IntN(100)) * time.Millisecond)
			blocks := rng.IntN(40)
			req := Request{ISLTokens: blocks*blockSize + rng.IntN(blockSize)}
			p := prompt(blockSize, chain(rng.IntN(3), blocks))
			candidates := workers(n, p)
			for i := range candidates {
				candidates[i].DeviceBlocks = rng.IntN(45) // sometimes more than the prompt has
				candidates[i].KVBlocks = rng.IntN(2) * rng.IntN(200)
			}
			var selections [2]Selection
			var errs [2]error
			var costs [2][]float64
			for k := range books {
				if k == 1 {
					candidates[rng.IntN(n)].CostMultiplier = 1
				}
				if all, err := look(req, candidates, cfg); err == nil && all.alike != (k == 0 && p.Chains != nil) {
					t.Fatalf("book %d: the candidates are taken for alike: %v", k, all.alike)
				}
				costs[k] = make([]float64, n)
				req.Terms = make([]Terms, n)
				var b Booking
				selections[k], b, errs[k] = books[k].SelectAndAdd(req, candidates, cfg, draws[k], costs[k])
				for i := range req.Terms {
					if errs[k] == nil && math.Float64bits(cfg.Cost(&req.Terms[i])) != math.Float64bits(costs[k][i]) {
						t.Fatalf(
							"book %d: candidate %d cost %v, but its terms %+v say %v",
							k,
							i,
							costs[k][i],
							req.Terms[i],
							cfg.Cost(&req.Terms[i]),
						)
					}
				}
				if step%3 == 0 {
					prefills[k] = append(prefills[k], b) // until the next request
				}
				if step%6 == 0 {
					answers[k] = append(answers[k], b)
				}
				if len(answers[k]) > 3 {
					answers[k][0].LearnAnswer(50 + step)
					answers[k][0].Free()
					answers[k] = answers[k][1:]
				}
			}
			same := slices.EqualFunc(
				costs[0],
				costs[1],
				func(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) },
			)
			if !same || selections[0] != selections[1] || (errs[0] == nil) != (errs[1] == nil) {
				t.Fatalf(
					"alike: %+v, %v, costs %v\nothers: %+v, %v, costs %v",
					selections[0],
					errs[0],
					costs[0],
					selections[1],
					errs[1],
					costs[1],
				)
			}
		}
	}
}
