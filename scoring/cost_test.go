package scoring

import (
	"math"
	"strings"
	"testing"
)

// The measured cases of Dynamo: block size 16, 100 prompt tokens (7 blocks, none active yet), and three workers.
// effective is the overlap in device blocks, which gives the cached tokens. chosen is Dynamo's choice. Source:
// specs/dynamo.md §6.1, measured with dynamo-kv-router 1.6.1.
func TestCostPublishedCases(t *testing.T) {
	loads := [3]struct{ prefill, decode, requests int }{{0, 10, 2}, {512, 4, 1}, {0, 0, 0}}
	type overlap struct{ device, host, disk, shared int }
	deviceOnly := [3]overlap{{device: 5}, {device: 6}, {}}
	for _, test := range []struct {
		name        string
		change      func(*Config)
		overlap     [3]overlap
		multiplier  float64 // of worker 0
		loadUnknown bool
		want        [3]float64
		effective   [3]float64
		decay       float64 // of worker 1, if not 1
		chosen      int
		within      float64
	}{
		{name: "S1 defaults", overlap: deviceOnly, want: [3]float64{18.25, 43.25, 13.25},
			effective: [3]float64{5, 6, 0}, chosen: 3},
		{
			name: "S2 tiers", overlap: [3]overlap{{device: 2, host: 2}, {host: 4}, {disk: 3}},
			want:      [3]float64{19.75, 46.25, 12.5},
			effective: [3]float64{3.5, 3, 0.75}, chosen: 3,
		},
		{
			name: "S3 decay", overlap: deviceOnly, want: [3]float64{18.25, 48.173, 13.25}, within: 0.0005,
			effective: [3]float64{5, 6, 0}, decay: 0.1795, chosen: 3,
			change: func(c *Config) { c.OverlapScoreCreditDecay = 1 },
		},
		{
			name: "S4 weights", overlap: deviceOnly, want: [3]float64{30.5, 84.5, 19.5}, effective: [3]float64{5, 6, 0},
			chosen: 3,
			change: func(c *Config) {
				c.OverlapScoreCredit, c.PrefillLoadScale, c.DecodeActiveRequestWeight = 0.5, 2, 3
			},
		},
		{
			name: "S5 no prefill tracking", overlap: deviceOnly, want: [3]float64{17, 11, 7},
			effective: [3]float64{5, 6, 0}, chosen: 3,
			change: func(c *Config) { c.TrackPrefillTokens = false },
		},
		{
			name: "S6 decode role", overlap: deviceOnly, want: [3]float64{12, 5, 7}, effective: [3]float64{5, 6, 0},
			chosen: 2,
			change: func(c *Config) { c.TrackPrefillTokens, c.DecodeRole = false, true },
		},
		{
			name: "S7 shared cache of 6 blocks", overlap: [3]overlap{{device: 5, shared: 1}, {shared: 6}, {shared: 6}},
			want: [3]float64{17.75, 46.25, 10.25}, effective: [3]float64{5, 0, 0}, chosen: 3,
			change: func(c *Config) { c.SharedCacheMultiplier = 0.5 },
		},
		{
			name: "S8 preferred taint", overlap: deviceOnly, multiplier: math.Exp(-math.Tanh(1)),
			want: [3]float64{8.521317150934577, 43.25, 13.25}, effective: [3]float64{5, 6, 0}, chosen: 1,
		},
		{
			name: "S9 no load information", overlap: deviceOnly, loadUnknown: true, want: [3]float64{1.25, 0.25, 6.25},
			effective: [3]float64{5, 6, 0}, chosen: 2,
		},
		{
			name: "decode role without credit: load alone", overlap: deviceOnly, want: [3]float64{17, 11, 7},
			effective: [3]float64{5, 6, 0}, chosen: 3,
			change: func(c *Config) { c.OverlapScoreCredit, c.TrackPrefillTokens, c.DecodeRole = 0, false, true },
		},
		{
			name: "decode role that also prefills: as any other", overlap: deviceOnly,
			want: [3]float64{18.25, 43.25, 13.25}, effective: [3]float64{5, 6, 0}, chosen: 3,
			change: func(c *Config) { c.DecodeRole = true },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := DefaultConfig()
			if test.change != nil {
				test.change(&cfg)
			}
			var costs []float64
			for w, load := range loads {
				o := test.overlap[w]
				terms := Terms{
					BlockSize: 16, ISLTokens: 100,
					DeviceBlocks: o.device, HostBlocks: o.host, DiskBlocks: o.disk, SharedBlocks: o.shared,
					LoadUnknown: test.loadUnknown, PrefillTokens: load.prefill,
					DecodeBlocks: float64(load.decode + 7), ActiveRequests: load.requests,
				}
				if w == 0 {
					terms.CostMultiplier = test.multiplier
				}
				costs = append(costs, cfg.Cost(&terms))
				if math.Abs(costs[w]-test.want[w]) > test.within {
					t.Errorf("worker %d: cost %v, want %v", w+1, costs[w], test.want[w])
				}
				if got, want := cfg.CachedTokens(&terms), int(16*test.effective[w]); got != want {
					t.Errorf("worker %d: %d cached tokens, want %d", w+1, got, want)
				}
				decay := 1.0
				if w == 1 && test.decay != 0 {
					decay = test.decay
				}
				if got := cfg.creditDecay(&terms); math.Abs(got-decay) > test.within {
					t.Errorf("worker %d: decay %v, want %v", w+1, got, decay)
				}
			}
			if i, err := new(Config).choose(costs, nil); err != nil || i+1 != test.chosen {
				t.Errorf("worker %d is chosen, %v; want %d", i+1, err, test.chosen)
			}
		})
	}
}

// The example of Dynamo's documentation: for a prompt of 10 blocks, the second of three workers is chosen.
func TestCostWorkedExample(t *testing.T) {
	cfg := DefaultConfig()
	cfg.SetOverlapScoreWeight(1)
	var costs []float64
	for _, w := range []struct{ cached, decode int }{{2, 10}, {5, 5}, {8, 9}} {
		costs = append(costs, cfg.Cost(&Terms{
			BlockSize: 64, ISLTokens: 640, DeviceBlocks: w.cached, DecodeBlocks: float64(w.decode),
		}))
	}
	for i, want := range []float64{18, 10, 11} {
		if costs[i] != want {
			t.Errorf("worker %d: cost %v, want %v", i+1, costs[i], want)
		}
	}
	if i, err := new(Config).choose(costs, nil); err != nil || i != 1 {
		t.Errorf("chose %d, %v; want the second worker", i, err)
	}
}

func TestCostUnit(t *testing.T) {
	cfg := DefaultConfig()
	// The same work on a worker with blocks four times as large costs the same in blocks of 16.
	small := cfg.Cost(
		&Terms{BlockSize: 16, ISLTokens: 640, DeviceBlocks: 8, DecodeBlocks: 12, ActiveRequests: 3, UnitTokens: 16},
	)
	large := cfg.Cost(
		&Terms{BlockSize: 64, ISLTokens: 640, DeviceBlocks: 2, DecodeBlocks: 3, ActiveRequests: 3, UnitTokens: 16},
	)
	if small != 44 || large != small {
		t.Errorf("costs %v and %v, want 44 and 44", small, large)
	}
}

func TestCostIndexClaimsMoreThanThePrompt(t *testing.T) {
	cfg := DefaultConfig()
	cfg.OverlapScoreCredit = 0
	// 20 cached tokens of a prompt of 10: the raw prefill is 20 tokens.
	if got := cfg.Cost(&Terms{BlockSize: 4, ISLTokens: 10, DeviceBlocks: 5}); got != 5 {
		t.Errorf("cost %v, want 5", got)
	}
	if got := cfg.CachedTokens(&Terms{BlockSize: 4, ISLTokens: 10, DeviceBlocks: 5}); got != 10 {
		t.Errorf("%d cached tokens, want no more than the prompt's 10", got)
	}
}

func TestCachedTokens(t *testing.T) {
	cfg := DefaultConfig()
	for _, test := range []struct {
		terms Terms
		want  int
	}{
		{Terms{BlockSize: 16, ISLTokens: 100}, 0},
		{Terms{BlockSize: 16, ISLTokens: 100, DeviceBlocks: 5}, 80},
		{Terms{BlockSize: 16, ISLTokens: 100, DiskBlocks: 3}, 12},                  // 0.75 blocks
		{Terms{BlockSize: 16, ISLTokens: 100, DeviceBlocks: 2, HostBlocks: 2}, 56}, // 3.5 blocks
		{Terms{BlockSize: 2, ISLTokens: 100, DiskBlocks: 1}, 1},                    // half a token rounds up
		{Terms{BlockSize: 16, ISLTokens: 0, DeviceBlocks: 1}, 0},
	} {
		if got := cfg.CachedTokens(&test.terms); got != test.want {
			t.Errorf("%+v: %d cached tokens, want %d", test.terms, got, test.want)
		}
	}
}

func TestSetOverlapScoreWeight(t *testing.T) {
	cfg := DefaultConfig()
	cfg.SetOverlapScoreWeight(2.5)
	if cfg.PrefillLoadScale != 2.5 || cfg.OverlapScoreCredit != 1 {
		t.Errorf(
			"weight 2.5 gives scale %v and credit %v, want 2.5 and 1",
			cfg.PrefillLoadScale,
			cfg.OverlapScoreCredit,
		)
	}
	cfg.SetOverlapScoreWeight(0)
	if cfg.PrefillLoadScale != 0 || cfg.OverlapScoreCredit != 0 {
		t.Errorf("weight 0 gives scale %v and credit %v, want 0 and 0", cfg.PrefillLoadScale, cfg.OverlapScoreCredit)
	}
}

func TestValidate(t *testing.T) {
	cfg := DefaultConfig()
	if err := cfg.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
	for name, field := range map[string]func(*Config) *float64{
		"overlap score credit":         func(c *Config) *float64 { return &c.OverlapScoreCredit },
		"overlap score credit decay":   func(c *Config) *float64 { return &c.OverlapScoreCreditDecay },
		"prefill load scale":           func(c *Config) *float64 { return &c.PrefillLoadScale },
		"decode active request weight": func(c *Config) *float64 { return &c.DecodeActiveRequestWeight },
		"host cache hit weight":        func(c *Config) *float64 { return &c.HostCacheHitWeight },
		"disk cache hit weight":        func(c *Config) *float64 { return &c.DiskCacheHitWeight },
		"shared cache multiplier":      func(c *Config) *float64 { return &c.SharedCacheMultiplier },
		"temperature":                  func(c *Config) *float64 { return &c.Temperature },
	} {
		for _, bad := range []float64{-0.1, math.NaN(), math.Inf(1), math.Inf(-1)} {
			cfg := DefaultConfig()
			*field(&cfg) = bad
			flag := strings.ReplaceAll(name, " ", "-") + " "
			if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), flag) {
				t.Errorf("%s %v: error %v, want one that names it", name, bad, err)
			}
		}
	}
}
