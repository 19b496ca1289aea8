package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"kvepp/test/harness/stack"
)

// session is a conversation of one client: it begins at a time. Each turn follows the previous answer after a think
// time.
type session struct {
	at     time.Duration // from the scenario's start
	system string        // empty: none
	turns  []turn
}

type turn struct {
	text   string
	think  time.Duration // think time before the turn
	output int           // tokens of the answer
}

// scenario is a kind of traffic from a seed: the same seed gives identical traffic.
type scenario struct {
	name, about string
	make        func(w *writer) []session
	// later is when the last worker joins; 0: all workers are there from the start.
	later time.Duration
}

var scenarios = []scenario{
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
		name:  "agents",
		about: "agents of four kinds take five steps each, with little new text and long answers",
		make: func(w *writer) (all []session) {
			kinds := []string{w.text(1200), w.text(1200), w.text(1200), w.text(1200)}
			for at := range w.arrivals(2500*time.Millisecond, 6) {
				s := session{at: at, system: kinds[w.IntN(len(kinds))]}
				all = append(all, w.turns(s, 5, 150, 50, 50*time.Millisecond))
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

// tokensPerWord is measured with the workers' tokenizer.
const tokensPerWord = 2.0

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
is short so that what nobody asks for again must leave first and whoever returns later pays once more for the same tokens which is why
a router should know where they are before it decides about time and load and fairness among all clients`,
)

// messages returns the session's first messages.
func (s *session) messages() []stack.Message {
	if s.system == "" {
		return nil
	}
	return []stack.Message{{Role: "system", Content: s.system}}
}
