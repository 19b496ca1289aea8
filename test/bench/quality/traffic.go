package main

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"kvepp/test/harness/stack"
)

// session is a conversation of one client: it begins at a time. Each turn follows the previous response after a think
// time.
type session struct {
	at     time.Duration // from the scenario's start
	system string        // empty: none
	turns  []turn
}

type turn struct {
	text   string
	think  time.Duration // think time before the turn
	output int           // tokens of the response
	// subagents are conversations that are held at the same time, after the think time. The turn follows their end.
	subagents []session
}

// scenario is a kind of traffic from a seed: the same seed gives identical traffic.
type scenario struct {
	name, about string
	make        func(w *writer) []session
	// later is when the last worker joins; 0: all workers are there from the start.
	later   time.Duration
	workers int       // 0: 4
	blocks  int       // KV blocks of a worker, of 16 tokens; 0: 1,024, which is too small for the traffic
	speeds  []float64 // factors of the workers' speed, in turn; nil: all are equal
	// speedup and decode replace speedup and decodeSpeedup; 0: they do not.
	speedup, decode float64
	// refusals: a request that is refused counts as one that missed its times. Otherwise it ends the run.
	refusals bool
}

// engines are a scenario's workers with the usual values where it has none.
type engines struct {
	workers, blocks int
	speedup, decode float64
}

func (sc *scenario) engines() engines {
	return engines{cmp.Or(sc.workers, 4), cmp.Or(sc.blocks, 1024), cmp.Or(sc.speedup, speedup),
		cmp.Or(sc.decode, decodeSpeedup)}
}

var scenarios = []scenario{
	{
		name: "chat 4",
		about: "conversations of eight turns: 8 system prompts of 500 to 1,500 tokens, inputs of 40 to 600, answers " +
			"of 200 to 400, 1 s to think; 8,000 blocks on each of 4 workers",
		make:   func(w *writer) []session { return w.chats(8*time.Second, 5, 8) },
		blocks: 8000, speedup: 0.1, decode: 12,
	},
	{
		name:    "chat 8",
		about:   "the same on 8 workers, with a fifth more conversations",
		make:    func(w *writer) []session { return w.chats(8*time.Second, 6, 8) },
		workers: 8,
		blocks:  8000, speedup: 0.1, decode: 8,
	},
	{
		name: "agents",
		about: "agents of three kinds take five steps in growing contexts; before two of them three subagents take " +
			"two steps each at the same time; 8,000 blocks on each of 4 workers",
		make:   func(w *writer) []session { return w.agents(12*time.Second, 1) },
		blocks: 8000, speedup: 0.1, decode: 12,
	},
	{
		name: "mixed",
		about: "conversations as in chat with six turns, a third as many agents, and as many questions about 12 " +
			"documents of 2,000 to 5,000 tokens; 6,000 blocks on each of 4 workers",
		make: func(w *writer) []session {
			return slices.Concat(w.chats(8*time.Second, 2, 6), w.agents(12*time.Second, 0.4),
				w.documents(30*time.Second, 0.6))
		},
		blocks: 6000, speedup: 0.1, decode: 12,
	},
	{
		name: "overload",
		about: "conversations of four turns that together hold about twice the KV blocks of 4 workers with 2,200; " +
			"responses of 60 to 120 tokens, 10 s to think",
		make:   func(w *writer) []session { return w.overload(20*time.Second, 5) },
		blocks: 2200,
		// A refusal is a response to too much traffic.
		refusals: true,
	},
	{
		name:   "unequal",
		about:  "as chat, with six turns, and the last of 4 workers has half the speed",
		make:   func(w *writer) []session { return w.chats(8*time.Second, 3, 6) },
		blocks: 8000, speedup: 0.1, decode: 12,
		speeds: []float64{1, 1, 1, 0.5},
	},
	{
		name:  "hot prompt",
		about: "four of five conversations begin with one system prompt of 2,000 tokens, the fifth with its own",
		make: func(w *writer) (all []session) {
			hot := w.text(2000)
			for at := range w.arrivals(6*time.Second, 6) {
				s := session{at: at, system: hot}
				if len(all)%5 == 4 {
					s.system = w.text(2000)
				}
				all = append(all, w.turns(s, 3, 250, 24, 300*time.Millisecond))
			}
			return all
		},
	},
	{
		name:  "zero reuse",
		about: "every request is unique, 500 to 3,500 tokens",
		make: func(w *writer) (all []session) {
			for at := range w.arrivals(8*time.Second, 6) {
				all = append(
					all,
					session{at: at, turns: []turn{{text: w.text(500 + w.IntN(3000)), output: 8 + w.IntN(32)}}},
				)
			}
			return all
		},
	},
	{
		name:  "burst",
		about: "every two seconds 16 requests at once, over one new prompt of 3,000 tokens",
		make: func(w *writer) (all []session) {
			for burst := range 4 {
				shared := w.text(3000)
				for range 16 {
					all = append(
						all,
						session{
							at:     time.Duration(burst) * 2 * time.Second,
							system: shared,
							turns:  []turn{{text: w.text(100), output: 24}},
						},
					)
				}
			}
			return all
		},
	},
	{
		name:  "worker added",
		about: "conversations of five turns over three workers; the fourth joins after three seconds",
		later: 3 * time.Second,
		make: func(w *writer) (all []session) {
			for at := range w.arrivals(6*time.Second, 4) {
				s := session{at: at, system: w.text(800)}
				all = append(all, w.turns(s, 5, 300, 24, 200*time.Millisecond))
			}
			return all
		},
	},
}

// writer generates traffic.
type writer struct{ *rand.Rand }

func newWriter(seed uint64) *writer { return &writer{rand.New(rand.NewPCG(seed, 7))} }

// arrivals yields the times of a Poisson process with rate arrivals a second, until end.
func (w *writer) arrivals(end time.Duration, rate float64) func(yield func(time.Duration) bool) {
	return func(yield func(time.Duration) bool) {
		for at := time.Duration(0); at < end; at += time.Duration(w.ExpFloat64() / rate * float64(time.Second)) {
			if !yield(at) {
				return
			}
		}
	}
}

// turns gives a session n turns with about this many tokens, and answers with about this many.
func (w *writer) turns(s session, n, tokens, output int, think time.Duration) session {
	for range n {
		s.turns = append(
			s.turns,
			turn{text: w.text(tokens/2 + w.IntN(tokens)), output: output/2 + w.IntN(output), think: think},
		)
	}
	s.turns[0].think = 0
	return s
}

// between returns a number from..to.
func (w *writer) between(from, to int) int { return from + w.IntN(to-from+1) }

// think returns a think time with this mean.
func (w *writer) think(mean time.Duration) time.Duration {
	return time.Duration(w.ExpFloat64() * float64(mean))
}

// texts returns n texts of from..to tokens.
func (w *writer) texts(n, from, to int) (all []string) {
	for range n {
		all = append(all, w.text(w.between(from, to)))
	}
	return all
}

func (w *writer) chats(end time.Duration, rate float64, turns int) (all []session) {
	systems := w.texts(8, 500, 1500)
	for at := range w.arrivals(end, rate) {
		s := session{at: at, system: systems[w.IntN(len(systems))]}
		for i := range turns {
			t := turn{text: w.text(w.between(40, 600)), output: w.between(200, 400), think: w.think(time.Second)}
			if i == 0 {
				t.think = 0
			}
			s.turns = append(s.turns, t)
		}
		all = append(all, s)
	}
	return all
}

func (w *writer) agents(end time.Duration, rate float64) (all []session) {
	kinds, helpers := w.texts(3, 2500, 2500), w.texts(2, 1500, 1500)
	for at := range w.arrivals(end, rate) {
		s := session{at: at, system: kinds[w.IntN(len(kinds))]}
		for i := range 5 {
			t := turn{text: w.text(w.between(150, 450)), output: w.between(50, 150),
				think: w.think(300 * time.Millisecond)}
			if i == 0 {
				t.think = 0
			}
			if i == 2 || i == 4 {
				helper := helpers[w.IntN(len(helpers))]
				for range 3 {
					t.subagents = append(t.subagents,
						w.turns(session{system: helper}, 2, 400, 80, 200*time.Millisecond))
				}
			}
			s.turns = append(s.turns, t)
		}
		all = append(all, s)
	}
	return all
}

func (w *writer) documents(end time.Duration, rate float64) (all []session) {
	documents := w.texts(12, 2000, 5000)
	for at := range w.arrivals(end, rate) {
		all = append(all, session{at: at, system: documents[w.IntN(len(documents))],
			turns: []turn{{text: w.text(w.between(50, 150)), output: w.between(100, 200)}}})
	}
	return all
}

func (w *writer) overload(end time.Duration, rate float64) (all []session) {
	systems := w.texts(8, 500, 1500)
	for at := range w.arrivals(end, rate) {
		s := session{at: at, system: systems[w.IntN(len(systems))]}
		for i := range 4 {
			t := turn{text: w.text(w.between(200, 600)), output: w.between(60, 120), think: w.think(10 * time.Second)}
			if i == 0 {
				t.text, t.think = w.text(w.between(1000, 2500)), 0
			}
			s.turns = append(s.turns, t)
		}
		all = append(all, s)
	}
	return all
}

// tokensPerWord is measured with the workers' tokenizer.
const tokensPerWord = 1.5

// text returns unique text with about this many tokens.
func (w *writer) text(tokens int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%08x", w.Uint32())
	for range int(float64(tokens) / tokensPerWord) {
		b.WriteByte(' ')
		b.WriteString(words[w.IntN(len(words))])
	}
	return b.String()
}

var words = strings.Fields(
	`the worker holds a block of the prompt and waits until another request comes to take it over while memory
is short so that what nobody asks for again must leave first and whoever returns later pays once more for the same ` +
		`tokens which is why
a router should know where they are before it decides about time and load and fairness among all clients`,
)

// messages returns the session's first messages.
func (s *session) messages() []stack.Message {
	if s.system == "" {
		return nil
	}
	return []stack.Message{{Role: "system", Content: s.system}}
}
