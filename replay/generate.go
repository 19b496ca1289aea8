package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
)

// Workload is a kind of synthetic traffic.
type Workload struct {
	Name, Help string
	// Conversations begin at random times, burst of them at once with the same beginning. Each has turns on average.
	turns float64
	burst int
	// tokens of one new input, of one response, and of the beginning that conversations share
	input, output, shared uniform
	// beginnings is how many shared beginnings there are; conversation i draws one with a probability of 1/(rank^skew).
	beginnings int
	skew       float64
	// think is the mean time in seconds between a response and the next turn.
	think float64
	// mix, if set, draws each conversation from another workload, by its share of the conversations.
	mix []mixed
}

type mixed struct {
	workload string
	of       float64
}

type uniform struct{ from, to int }

func (u uniform) draw(rng *rand.Rand) int { return u.from + rng.IntN(u.to-u.from+1) }

// Workloads are the kinds of traffic that Generate makes. The numbers are tokens and seconds.
var Workloads = []Workload{
	{
		Name:  "chat",
		Help:  "6 turns; inputs 40-600, responses 200-400; 8 system prompts of 500-1500; 15 s to think",
		turns: 6, burst: 1, input: uniform{40, 600}, output: uniform{200, 400}, shared: uniform{500, 1500},
		beginnings: 8, skew: 1, think: 15,
	},
	{
		Name:  "agents",
		Help:  "15 turns; inputs 300-3000, responses 50-300; 3 system prompts of 6000-10000; 2 s between",
		turns: 15, burst: 1, input: uniform{300, 3000}, output: uniform{50, 300}, shared: uniform{6000, 10000},
		beginnings: 3, skew: 1, think: 2,
	},
	{
		Name:  "zipf",
		Help:  "1 turn; inputs 20-200 about 500 documents of 1000-6000, few popular; responses 50-200",
		turns: 1, burst: 1, input: uniform{20, 200}, output: uniform{50, 200}, shared: uniform{1000, 6000},
		beginnings: 500, skew: 1.1,
	},
	{
		Name:  "burst",
		Help:  "1 turn; 16 at once about one of 200 documents of 1500-3000; responses 50-200",
		turns: 1, burst: 16, input: uniform{50, 300}, output: uniform{50, 200}, shared: uniform{1500, 3000},
		beginnings: 200,
	},
	{
		Name:  "none",
		Help:  "1 turn; inputs 500-4000 that share nothing; responses 50-400",
		turns: 1, burst: 1, input: uniform{500, 4000}, output: uniform{50, 400},
	},
	{
		Name:  "overload",
		Help:  "6 turns; inputs 200-1000, responses 200-400; 20 system prompts of 500-2500; 8 s to think",
		turns: 6, burst: 1, input: uniform{200, 1000}, output: uniform{200, 400}, shared: uniform{500, 2500},
		beginnings: 20, skew: 1, think: 8,
	},
	{
		Name: "mixed",
		Help: "conversations: 6 in 10 as in chat, 2 as in zipf, 2 as in agents",
		mix:  []mixed{{"chat", 0.6}, {"zipf", 0.2}, {"agents", 0.2}},
	},
}

// workloadNamed returns the workload with a name; nil: there is none.
func workloadNamed(name string) *Workload {
	if i := slices.IndexFunc(Workloads, func(w Workload) bool { return w.Name == name }); i >= 0 {
		return &Workloads[i]
	}
	return nil
}

// maxTurns bounds one conversation.
const maxTurns = 100

// Generate writes a trace of about requests requests that begin at rate a second, in the format MooncakeDelta with
// blocks of blockSize tokens. The same seed gives the same trace.
func Generate(to io.Writer, workload string, requests int, rate float64, blockSize int, seed uint64) error {
	kind := workloadNamed(workload)
	switch {
	case kind == nil:
		return fmt.Errorf("workload %q is not known", workload)
	case requests < 1 || !(rate > 0) || math.IsInf(rate, 1) || blockSize < 1:
		return fmt.Errorf("%d requests at %v a second in blocks of %d tokens: all must be above 0", requests, rate,
			blockSize)
	}
	w := bufio.NewWriter(to)
	g := generator{rng: rand.New(rand.NewPCG(seed, 0x7261)), size: blockSize, rows: json.NewEncoder(w)}
	mix := kind.mix
	if mix == nil {
		mix = []mixed{{kind.Name, 1}}
	}
	turns := 0.0 // mean
	var sources []*source
	for _, m := range mix {
		k := workloadNamed(m.workload)
		turns += m.of * k.turns * float64(k.burst)
		sources = append(sources, g.source(k))
	}
	at, written := 0.0, 0
	for n := 0; written < requests; {
		at += g.rng.ExpFloat64() * turns / rate
		s := sources[0]
		if len(sources) > 1 {
			s = sources[drawMix(mix, g.rng.Float64())]
		}
		shared := g.drawBeginning(s)
		for range s.burst {
			if written >= requests {
				break
			}
			turns, err := g.conversation(s, shared, n, at, requests-written)
			if err != nil {
				return err
			}
			written += turns
			n++
		}
	}
	return w.Flush()
}

// drawMix returns the part of a mix that x, 0..1, lies in.
func drawMix(mix []mixed, x float64) int {
	for i := range mix {
		if x -= mix[i].of; x < 0 {
			return i
		}
	}
	return len(mix) - 1
}

type generator struct {
	rng    *rand.Rand
	size   int
	rows   *json.Encoder
	nextID uint64
}

// source is a workload with its shared beginnings.
type source struct {
	*Workload
	shared  []beginning
	weights []float64 // cumulative
}

type beginning struct {
	ids    []uint64
	tokens int
}

// generatedRow is a mooncakeRow as Generate writes it.
type generatedRow struct {
	Timestamp    *float64 `json:"timestamp,omitempty"`
	Delay        *float64 `json:"delay,omitempty"`
	SessionID    string   `json:"session_id,omitempty"`
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
}

func (g *generator) ids(tokens int) []uint64 {
	ids := make([]uint64, blocksOf(tokens, g.size))
	for i := range ids {
		ids[i] = g.nextID
		g.nextID++
	}
	return ids
}

func (g *generator) source(w *Workload) *source {
	s, sum := &source{Workload: w}, 0.0
	for i := range w.beginnings {
		n := max(g.size, w.shared.draw(g.rng)/g.size*g.size) // whole blocks, so that new input can follow
		s.shared = append(s.shared, beginning{g.ids(n), n})
		sum += math.Pow(float64(i+1), -w.skew)
		s.weights = append(s.weights, sum)
	}
	return s
}

// drawBeginning draws a shared beginning; nil: the workload has none.
func (g *generator) drawBeginning(s *source) *beginning {
	if len(s.shared) == 0 {
		return nil
	}
	i, _ := slices.BinarySearch(s.weights, g.rng.Float64()*s.weights[len(s.weights)-1])
	return &s.shared[min(i, len(s.shared)-1)]
}

// conversation writes one conversation and returns its number of turns.
func (g *generator) conversation(s *source, shared *beginning, n int, at float64, most int) (int, error) {
	turns := 1
	for g.rng.Float64() > 1/s.turns && turns < maxTurns {
		turns++
	}
	turns = min(turns, most)
	for turn := range turns {
		tokens := s.input.draw(g.rng)
		row := generatedRow{HashIDs: g.ids(tokens), InputLength: tokens, OutputLength: s.output.draw(g.rng)}
		if turns > 1 {
			row.SessionID = fmt.Sprint("s", n)
		}
		if turn == 0 {
			ms := math.Round(at*1e6) / 1e3
			row.Timestamp = &ms
			if shared != nil {
				row.HashIDs = slices.Concat(shared.ids, row.HashIDs)
				row.InputLength += shared.tokens
			}
		} else {
			ms := math.Round(g.rng.ExpFloat64()*s.think*1e6) / 1e3
			row.Delay = &ms
		}
		if err := g.rows.Encode(row); err != nil {
			return turn, err
		}
	}
	return turns, nil
}
