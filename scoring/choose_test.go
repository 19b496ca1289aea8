package scoring

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
)

func TestChooseLeast(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, test := range []struct {
		costs []float64
		want  int
	}{
		{[]float64{7}, 0},
		{[]float64{3, 1, 2}, 1},
		{[]float64{nan, 5, inf, 4, -inf}, 3},
		{[]float64{math.MaxFloat64, -math.MaxFloat64}, 1},
		{[]float64{0.25, 0}, 1},
	} {
		if got, err := new(Config).choose(test.costs, nil); err != nil || got != test.want {
			t.Errorf("%v: chose %d, %v; want %d", test.costs, got, err, test.want)
		}
	}
}

func TestChooseNothing(t *testing.T) {
	for _, costs := range [][]float64{nil, {}, {math.NaN()}, {math.Inf(1), math.Inf(-1), math.NaN()}} {
		for _, temperature := range []float64{0, 1} {
			if _, err := (&Config{Temperature: temperature}).choose(costs, nil); !errors.Is(err, ErrNoFiniteCost) {
				t.Errorf("%v at %v: error %v, want ErrNoFiniteCost", costs, temperature, err)
			}
		}
	}
}

func TestChooseIsDeterministic(t *testing.T) {
	costs := []float64{1, 2, 1, 1.5, 1}
	for _, temperature := range []float64{0, 0.7} {
		a, b := rand.New(rand.NewPCG(1, 2)), rand.New(rand.NewPCG(1, 2))
		for range 100 {
			i, _ := (&Config{Temperature: temperature}).choose(costs, a)
			if j, _ := (&Config{Temperature: temperature}).choose(costs, b); i != j {
				t.Fatalf("temperature %v: the same source gives %d and %d", temperature, i, j)
			}
		}
	}
}

// A chi-square test compares the frequencies of many draws with the intended distribution. The bound is the 99.9 %
// quantile; the seed is fixed.
func TestChooseFrequencies(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	softmax := func(temperature float64, scaled ...float64) []float64 {
		var weights []float64
		total := 0.0
		for _, x := range scaled {
			w := 0.0
			if !math.IsNaN(x) {
				w = math.Exp(-x / temperature)
			}
			weights = append(weights, w)
			total += w
		}
		for i := range weights {
			weights[i] /= total
		}
		return weights
	}
	rungs, rungsScaled := make([]float64, 41), make([]float64, 41)
	for i := range rungs {
		rungs[i], rungsScaled[i] = float64(7+3*i), float64(i)/40
	}
	for _, test := range []struct {
		name        string
		costs       []float64
		temperature float64
		want        []float64
	}{
		{"ties", []float64{4, 2, 2, 9, 2, 2}, 0, []float64{0, .25, .25, 0, .25, .25}},
		{"softmax", []float64{10, 20, 15, 30}, 0.5, softmax(0.5, 0, 0.5, 0.25, 1)},
		{"softmax, hot", []float64{10, 20, 15, 30}, 100, softmax(100, 0, 0.5, 0.25, 1)},
		{"softmax, freezing", []float64{10, 20, 10}, 1e-300, []float64{.5, 0, .5}},
		{"all equal", []float64{3, 3, 3, 3}, 0.5, []float64{.25, .25, .25, .25}},
		{"not finite", []float64{math.NaN(), 1, math.Inf(1), 2, math.Inf(-1)}, 1,
			softmax(1, math.NaN(), 0, math.NaN(), 1, math.NaN())},
		{"range beyond float64", []float64{-math.MaxFloat64, math.MaxFloat64, 0}, 1, softmax(1, 0, 1, 0.5)},
		{"range next to nothing", []float64{0, 1e-323, 5e-324}, 1, softmax(1, 0, 1, 0.5)},
		{"a small part of a large cost", []float64{1e300, 1e300 + 3e284, 1e300 + 6e284}, 0.5, softmax(0.5, 0, 0.5, 1)},
		{"two to a step", rungs, 0.2, softmax(0.2, rungsScaled...)},
		{"many to a step", rungs, 2, softmax(2, rungsScaled...)},
		{"negative costs", []float64{-3, -1}, 1, softmax(1, 0, 1)},
	} {
		t.Run(test.name, func(t *testing.T) {
			const draws = 100_000
			rng := rand.New(rand.NewPCG(42, 43))
			counts := make([]float64, len(test.costs))
			for range draws {
				i, err := (&Config{Temperature: test.temperature}).choose(test.costs, rng)
				if err != nil {
					t.Fatal(err)
				}
				counts[i]++
			}
			chiSquare, outcomes := 0.0, 0
			for i, p := range test.want {
				if p == 0 {
					if counts[i] != 0 {
						t.Errorf("index %d drawn %v times, want never", i, counts[i])
					}
					continue
				}
				outcomes++
				chiSquare += (counts[i] - draws*p) * (counts[i] - draws*p) / (draws * p)
			}
			quantile := map[int]float64{2: 10.83, 3: 13.82, 4: 16.27, 41: 73.40}[outcomes]
			if !(chiSquare < quantile) {
				t.Errorf("chi-square %.1f, want below %v; counts %v", chiSquare, quantile, counts)
			}
		})
	}
}

func FuzzChoose(f *testing.F) {
	f.Add(1.0, 2.0, 3.0, 0.0)
	f.Add(math.NaN(), math.Inf(1), 0.0, 0.5)
	f.Add(math.MaxFloat64, -math.MaxFloat64, 5e-324, 5e-324)
	f.Fuzz(func(t *testing.T, a, b, c, temperature float64) {
		if !(temperature >= 0) || math.IsInf(temperature, 0) {
			return
		}
		costs := []float64{a, b, c}
		i, err := (&Config{Temperature: temperature}).choose(costs, rand.New(rand.NewPCG(1, 1)))
		finite := 0
		for _, cost := range costs {
			if !math.IsNaN(cost) && !math.IsInf(cost, 0) {
				finite++
			}
		}
		if finite == 0 {
			if !errors.Is(err, ErrNoFiniteCost) {
				t.Fatalf("%v: error %v, want ErrNoFiniteCost", costs, err)
			}
			return
		}
		if err != nil || math.IsNaN(costs[i]) || math.IsInf(costs[i], 0) {
			t.Fatalf("%v at %v: chose %d, %v", costs, temperature, i, err)
		}
	})
}
