package scoring

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// byTime returns the default configuration with the policy Time.
func byTime() *Config {
	cfg := DefaultConfig()
	cfg.Policy = Time
	return &cfg
}

// TestTimeCost checks the terms one by one: what each adds to the cost, in milliseconds.
func TestTimeCost(t *testing.T) {
	base := Terms{BlockSize: 16, ISLTokens: 1000, Time: TimeTerms{SecondsPerToken: 1e-4, GapPerToken: 1e-7,
		OutputTokens: 200, LifeSeconds: 4}}
	with := func(edit func(*Terms)) *Terms {
		t := base
		edit(&t)
		return &t
	}
	noPrefill, noBlocks := byTime(), byTime()
	noPrefill.TrackPrefillTokens = false
	noBlocks.TrackActiveBlocks = false
	for _, c := range []struct {
		name string
		cfg  *Config
		t    *Terms
		want float64
	}{
		{"1000 new tokens at 0.1 ms", byTime(), &base, 100},
		{"50 of 62 blocks are cached", byTime(), with(func(t *Terms) { t.DeviceBlocks = 50 }), 20},
		{"more blocks than the prompt has", byTime(), with(func(t *Terms) { t.DeviceBlocks = 99 }), 0},
		{"blocks in host memory", byTime(), with(func(t *Terms) { t.HostBlocks = 50 }), 40},
		{"500 tokens wait", byTime(), with(func(t *Terms) { t.PrefillTokens = 500 }), 150},
		{"a waiting prefill and a decoding request", byTime(), with(func(t *Terms) {
			t.PrefillTokens, t.ActiveRequests, t.Time.DecodingRequests = 500, 2, 1
		}), 150 + interference*100 + 1000*0.02*200*1e-7*1100},
		{"10,000 tokens held", byTime(), with(func(t *Terms) { t.Time.HeldBlocks = 625 }),
			100 + 1000*0.02*200*1e-7*1e4},
		{"memory", byTime(), with(func(t *Terms) {
			t.KVBlocks, t.DecodeBlocks, t.Time.HeldBlocks, t.ActiveRequests = 100, 150, 0, 3
		}), 100 + 1000*(150+4*200/16.-100)*4},
		{"enough memory", byTime(), with(func(t *Terms) { t.KVBlocks, t.DecodeBlocks = 1000, 62 }), 100},
		{"a worker twice as fast", byTime(), with(func(t *Terms) { t.Time.SecondsPerToken = 5e-5 }), 50},
		{"a step of 20 ms", byTime(), with(func(t *Terms) { t.Time.StepSeconds = 0.02 }), 120},
		{"a step of 20 ms after that of two prompts", byTime(), with(func(t *Terms) {
			t.Time.StepSeconds, t.PrefillTokens, t.ActiveRequests = 0.02, 500, 2
		}), 190},
		{"a step of 20 ms on a worker that only decodes for others", byTime(), with(func(t *Terms) {
			t.Time.StepSeconds, t.Time.GapPerToken, t.ActiveRequests, t.Time.DecodingRequests = 0.02, 0, 2, 2
		}), 20 + 100 + interference*math.Pow(2, 0.75)*120},
		{"30 decoding requests count less than 30 times one", byTime(), with(func(t *Terms) {
			t.Time.GapPerToken, t.ActiveRequests, t.Time.DecodingRequests = 0, 30, 30
		}), 100 + interference*math.Pow(30, 0.75)*100},
		{"10 ms more between tokens than on the average worker", byTime(), with(func(t *Terms) {
			t.Time.SlowerPerToken = 0.01
		}), 100 + slowerOutput*200*10},
		{"a step of 20 ms and an unknown load", byTime(), with(func(t *Terms) {
			t.Time.StepSeconds, t.LoadUnknown, t.ActiveRequests, t.Time.DecodingRequests = 0.02, true, 4, 2
		}), 120},
		{"40 blocks that a waiting prefill computes", byTime(), with(func(t *Terms) {
			t.PrefillTokens, t.ActiveRequests, t.Time.ActivePromptBlocks = 640, 1, 40
		}), 64 + 36},
		{"fewer of them than are cached", byTime(), with(func(t *Terms) {
			t.DeviceBlocks, t.PrefillTokens, t.ActiveRequests, t.Time.ActivePromptBlocks = 50, 200, 1, 40
		}), 20 + 20},
		{"40 blocks that only decoding requests hold", byTime(), with(func(t *Terms) {
			t.Time.GapPerToken, t.ActiveRequests, t.Time.DecodingRequests, t.Time.ActivePromptBlocks = 0, 1, 1, 40
		}), 100 + interference*100},
		{"a preferred taint", byTime(), with(func(t *Terms) { t.CostMultiplier = 0.5 }), 50},
		{"the load is unknown", byTime(), with(func(t *Terms) {
			t.LoadUnknown, t.PrefillTokens, t.ActiveRequests, t.Time.DecodingRequests = true, 500, 4, 4
			t.Time.HeldBlocks = 625
		}), 100},
		{"a decode worker", noPrefill, with(func(t *Terms) { t.Time.HeldBlocks = 625 }),
			1000 * 0.02 * 200 * 1e-7 * 1e4},
		{"a prefill worker", noBlocks, with(func(t *Terms) { t.KVBlocks, t.DecodeBlocks = 1, 100 }), 100},
	} {
		if got := c.cfg.Cost(c.t); math.Abs(got-c.want) > 1e-9*math.Abs(c.want) {
			t.Errorf("%s: %v ms, want %v", c.name, got, c.want)
		}
	}
}

// TestEqualWorkersShareAnIdleFleet: times that differ by chance do not make one of several equal workers take all
// requests, one after the other.
func TestEqualWorkersShareAnIdleFleet(t *testing.T) { synctest.Test(t, equalWorkersShare) }

func equalWorkersShare(t *testing.T) {
	a, cfg := NewActiveSequences(), byTime()
	rng := rand.New(rand.NewPCG(1, 2))
	var served [4]int
	candidates := []Candidate{candidate(0), candidate(1), candidate(2), candidate(3)}
	for range 2000 {
		prompt := 100 + rng.IntN(4000)
		chosen, b, err := a.SelectAndAdd(Request{ISLTokens: prompt}, candidates, cfg, rng, nil)
		if err != nil {
			t.Fatal(err)
		}
		served[chosen.Index]++
		wait(seconds((0.02 + 1e-4*float64(prompt)) * (0.8 + 0.4*rng.Float64())))
		b.MarkPrefillCompleted()
		wait(2 * time.Second)
		b.LearnOutput(200)
		b.Free()
	}
	if slices.Min(served[:]) < 300 {
		t.Errorf("of 2,000 requests, one after the other, the workers served %v", served)
	}
}

// TestOneSlowStartIsForgotten: a worker whose first prompts were all short, or slow, gets its share of the longer ones
// that come later.
func TestOneSlowStartIsForgotten(t *testing.T) {
	for name, c := range map[string]struct {
		prompts, tokens int // of worker 0 at first
		slower          float64
		requests        int // later
		least           int // of the last 200
	}{
		"short prompts":         {10, 30, 1, 200, 30},
		"many short prompts":    {100, 30, 1, 200, 30},
		"slow prompts":          {10, 1000, 10, 1000, 30},
		"slow and short":        {10, 30, 10, 1000, 30},
		"many slow, of a graph": {100, 1000, 10, 1000, 30},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, cfg := NewActiveSequences(), byTime()
				rng := rand.New(rand.NewPCG(1, 2))
				serve := func(tokens int, slower float64, candidates ...Candidate) int {
					chosen, b, err := a.SelectAndAdd(Request{ISLTokens: tokens}, candidates, cfg, rng, nil)
					if err != nil {
						t.Fatal(err)
					}
					wait(seconds((0.15 + 1e-4*float64(tokens)) * (0.95 + 0.1*rng.Float64()) * slower))
					b.MarkPrefillCompleted()
					wait(time.Second)
					b.LearnOutput(200)
					b.Free()
					return chosen.Index
				}
				for range c.prompts {
					serve(c.tokens-c.tokens/4+rng.IntN(1+c.tokens/2), c.slower, candidate(0))
				}
				all := []Candidate{candidate(0), candidate(1), candidate(2), candidate(3)}
				served := 0
				for i := range c.requests {
					if serve(500+rng.IntN(2000), 1, all...) == 0 && i >= c.requests-200 {
						served++
					}
				}
				if served < c.least {
					t.Errorf("of the last 200 requests, one after the other, the worker served %d", served)
				}
			})
		})
	}
}

// TestNoiseMovesNoConversation: conversations on two equal, idle workers stay where their blocks are cached, although
// the few times to first token that the book has seen differ much by chance.
func TestNoiseMovesNoConversation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg, moved, turns := byTime(), 0, 0
		for seed := range uint64(300) {
			a, rng := NewActiveSequences(), rand.New(rand.NewPCG(seed, 3))
			home := [4]int{}
			for turn := range 4 {
				for c := range home {
					all := []Candidate{candidate(0), candidate(1)}
					prompt := 300 + 60*turn
					if turn > 0 {
						all[home[c]].DeviceBlocks = (prompt - 60) / 16
					} else { // new conversations are spread by those that came before
						all = all[c%2 : c%2+1]
					}
					chosen, b, err := a.SelectAndAdd(Request{ISLTokens: prompt}, all, cfg, rng, nil)
					if err != nil {
						t.Fatal(err)
					}
					w := int(chosen.Worker)
					fresh := prompt
					if turn > 0 {
						if turns++; w != home[c] {
							moved++
						} else {
							fresh = 60
						}
					}
					home[c] = w
					took := 0.005 + 0.01*rng.ExpFloat64() + 5e-5*float64(fresh)
					if rng.IntN(10) == 0 {
						took += 0.1
					}
					wait(seconds(took))
					b.MarkPrefillCompleted()
					wait(100 * time.Millisecond)
					b.LearnOutput(8)
					b.Free()
				}
			}
		}
		if moved > turns/100 {
			t.Errorf("%d of %d turns left their worker", moved, turns)
		}
	})
}

// TestPaceIsLearned checks that the book finds the speeds of two unequal workers from the times of their requests.
func TestPaceIsLearned(t *testing.T) { synctest.Test(t, paceIsLearned) }

func paceIsLearned(t *testing.T) {
	a, cfg := NewActiveSequences(), byTime()
	rng := rand.New(rand.NewPCG(1, 2))
	perToken := []float64{1e-4, 4e-4}
	serve := func(w, prompt, output int) {
		_, b, err := a.SelectAndAdd(Request{ISLTokens: prompt}, []Candidate{candidate(w)}, cfg, rng, nil)
		if err != nil {
			t.Fatal(err)
		}
		wait(seconds(0.02 + perToken[w]*float64(prompt)))
		b.MarkPrefillCompleted()
		held := float64(a.Load(candidate(w).Worker).ActiveTokens)
		wait(seconds(float64(output-1) * (0.01 + 1e-6*held)))
		b.LearnOutput(output)
		b.Free()
	}
	if p := a.Pace(1); p != (Pace{SecondsPerToken: safeSecondsPerToken, GapPerToken: safeGapPerToken}) {
		t.Errorf("before any request: %+v", p)
	}
	for range 30 {
		serve(0, 100+rng.IntN(4000), 200)
	}
	if p := a.Pace(1); math.Abs(p.SecondsPerToken-1e-4) > 2e-6 {
		t.Errorf("a worker without requests is priced as %+v, not as the others", p)
	}
	for range 30 {
		serve(1, 100+rng.IntN(4000), 200)
	}
	for w, want := range perToken {
		p := a.Pace(candidate(w).Worker)
		if math.Abs(p.SecondsPerToken-want) > want/50 {
			t.Errorf("worker %d: %v seconds for each token, want %v", w, p.SecondsPerToken, want)
		}
		if math.Abs(p.StepSeconds-0.02) > 0.002 {
			t.Errorf("worker %d: a step of %v s, want 0.02", w, p.StepSeconds)
		}
		if math.Abs(p.GapPerToken-1e-6) > 5e-8 {
			t.Errorf("worker %d: the gap grows by %v seconds for each token, want 1e-06", w, p.GapPerToken)
		}
	}
	// Worker 1 prefills slower than the average one, so its responses are expected to be slower too.
	all := &a.learned.rest.usual
	usual := all.prefill.x / all.prefill.weight
	gap := all.gap.y / all.gap.weight
	want := (min(a.learned.workers[1].prefill.at(usual)/all.prefill.at(usual), farOff) - 1) * gap
	p := a.learned.prices
	if got := float64(p[1].slowerPerToken); want < 0.002 || math.Abs(got-want) > want/100 || p[0].slowerPerToken != 0 {
		t.Errorf("answers expected to be slower by %v and %v s a token, want 0 and %v", p[0].slowerPerToken, got, want)
	}
	if math.Abs(a.learned.rest.outputTokens()-200) > 1e-9 {
		t.Errorf("responses of %v tokens, want 200", a.learned.rest.outputTokens())
	}
	before, slope := a.learned.rest.usual, a.learned.workers[1].prefill.slope
	for _, tokens := range []int{0, -1, maxSampleTokens + 1} { // a caller that reports nonsense
		b := mustAdd(t, a, Request{ISLTokens: 10}, candidate(0))
		b.ReleasePrefill()
		b.MarkPrefillCompleted()
		wait(time.Second)
		b.LearnOutput(tokens)
		b.Free()
	}
	if a.learned.rest.usual != before {
		t.Errorf("nonsense was learned: %+v", a.learned.rest.usual)
	}
	a.Forget(1)
	slower := a.learned.prices[1].slowerPerToken
	if p := a.Pace(1); p.SecondsPerToken == slope || slower != 0 {
		t.Errorf("a worker that left is remembered: %+v, slower by %v s a token", p, slower)
	}
}

// TestOnlyLonePrefillsAreLearned checks that requests that waited for others do not count as slow prefill.
func TestOnlyLonePrefillsAreLearned(t *testing.T) { synctest.Test(t, onlyLonePrefillsAreLearned) }

func onlyLonePrefillsAreLearned(t *testing.T) {
	a := NewActiveSequences()
	for range 40 {
		first := mustAdd(t, a, Request{ISLTokens: 1000}, candidate(0))
		second := mustAdd(t, a, Request{ISLTokens: 1000}, candidate(0))
		wait(100 * time.Millisecond)
		first.MarkPrefillCompleted()
		wait(100 * time.Millisecond)
		second.MarkPrefillCompleted()
		first.Free()
		second.Free()
	}
	if p := a.Pace(0); math.Abs(p.SecondsPerToken-1e-4) > 1e-9 {
		t.Errorf("%v seconds for each token, want 0.0001", p.SecondsPerToken)
	}
	if n := a.learned.prices[0].prefilling; n != 0 {
		t.Errorf("%d requests prefill, and none is active", n)
	}
}

// TestOnlyPromptsWithRoomAreLearned checks that a prompt that waits until others free their blocks does not count as
// slow prefill.
func TestOnlyPromptsWithRoomAreLearned(t *testing.T) { synctest.Test(t, onlyPromptsWithRoomAreLearned) }

func onlyPromptsWithRoomAreLearned(t *testing.T) {
	a := NewActiveSequences()
	small := candidate(0)
	one := mustAdd(t, a, Request{ISLTokens: 1000}, small)
	small.KVBlocks = a.Load(0).ActiveBlocks * 5 / 2
	one.Free()
	serve := func(took time.Duration) Booking {
		b := mustAdd(t, a, Request{ISLTokens: 1000}, small)
		wait(took)
		b.MarkPrefillCompleted()
		return b
	}
	for range 40 {
		first, second := serve(100*time.Millisecond), serve(100*time.Millisecond)
		waited, waitedToo := serve(500*time.Millisecond), serve(time.Second)
		for _, b := range []Booking{first, second, waited, waitedToo} {
			b.Free()
		}
	}
	if p := a.Pace(0); math.Abs(p.SecondsPerToken-1e-4) > 1e-9 {
		t.Errorf("%v seconds for each token, want 0.0001", p.SecondsPerToken)
	}
	small.KVBlocks = 0 // not known: all are learned
	for range 40 {
		serve(100 * time.Millisecond)
		serve(500 * time.Millisecond)
	}
	if p := a.Pace(0); p.SecondsPerToken < 1.5e-4 {
		t.Errorf("%v seconds for each token, want more than 0.00015", p.SecondsPerToken)
	}
}

// TestTimeTemperature checks that temperature is in milliseconds.
func TestTimeTemperature(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 5))
	for _, c := range []struct{ gap, temperature, want float64 }{
		{10, 10, 1 / (1 + math.Exp(1))},
		{1000, 10, 0},
		{0, 10, 0.5},
		{20, 10, 1 / (1 + math.Exp(2))},
	} {
		second, draws := 0, 40_000
		for range draws {
			i, err := (&Config{Policy: Time, Temperature: c.temperature}).choose([]float64{50, 50 + c.gap}, rng)
			if err != nil {
				t.Fatal(err)
			}
			second += i
		}
		if share := float64(second) / float64(draws); math.Abs(share-c.want) > 0.015 {
			t.Errorf("%v ms apart at temperature %v: the dearer worker is drawn in %v of draws, want %v", c.gap,
				c.temperature, share, c.want)
		}
	}
}

func candidate(w int) Candidate { return workers(w+1, nil)[w] }
