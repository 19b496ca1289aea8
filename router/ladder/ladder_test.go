package ladder

import (
	"math/rand/v2"
	"testing"
)

// TestLossesAddUp: the losses of any climb and the delivered tokens add up to the prompt's.
func TestLossesAddUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var l Ladder
	for range 20_000 {
		c := Climb{Model: "m", Known: rng.IntN(8) > 0, OtherSalt: rng.IntN(100), Unusable: rng.IntN(100),
			NotInFleet:  []Cause{Evicted, NoEvents, NotMatched}[rng.IntN(3)],
			NotEligible: Role + Cause(rng.IntN(int(Session-Role)+1)),
			NotChosen:   Load + Cause(rng.IntN(int(Random-Load)+1))}
		for r := range c.Tokens {
			c.Tokens[r] = rng.IntN(1000) - 100
		}
		if !c.Known {
			clear(c.Tokens[Reusable:Delivered])
		}
		l.Add(&c) // fits the numbers
		lost, unpredicted := c.Losses()
		sum := max(c.Tokens[Delivered], 0) - unpredicted
		for cause, n := range lost {
			if n < 0 {
				t.Fatalf("%+v: %d tokens lost by %v", c, n, Cause(cause))
			}
			sum += n
		}
		if sum != c.Tokens[Prompt] {
			t.Fatalf("%+v: losses %v and %d delivered make %d of %d tokens", c, lost, c.Tokens[Delivered], sum,
				c.Tokens[Prompt])
		}
	}
	total := Total(l.Sums())
	sum := total.Tokens[Delivered] - total.Unpredicted
	for _, n := range total.Lost {
		sum += n
	}
	if total.Requests != 20_000 || sum != total.Tokens[Prompt] {
		t.Errorf("the sums make %d of %d tokens in %d requests", sum, total.Tokens[Prompt], total.Requests)
	}
}

// TestLosses names the cause of each loss.
func TestLosses(t *testing.T) {
	c := Climb{Known: true, Tokens: [Rungs]int{1000, 800, 600, 500, 300, 250}, OtherSalt: 50, Unusable: 80,
		NotInFleet: Evicted, NotEligible: Busy, NotChosen: Waiting}
	lost, unpredicted := c.Losses()
	want := [Causes]int{OtherSalt: 50, FirstTime: 150, Unusable: 80, Evicted: 120, Busy: 100, Waiting: 200,
		IndexWrong: 50}
	if lost != want || unpredicted != 0 {
		t.Errorf("lost %v, unpredicted %d; want %v", lost, unpredicted, want)
	}
	c.Tokens[Delivered] = 400
	if lost, unpredicted = c.Losses(); lost[IndexWrong] != 0 || unpredicted != 100 {
		t.Errorf("with more delivered: lost %v, unpredicted %d", lost, unpredicted)
	}
	c.Tokens[Delivered] = -1
	if lost, _ = c.Losses(); lost[NotConfirmed] != 300 {
		t.Errorf("without a report: lost %v", lost)
	}
	unknown := Climb{Tokens: [Rungs]int{Prompt: 70, Delivered: -1}}
	if lost, _ = unknown.Losses(); lost != [Causes]int{BlocksUnknown: 70} {
		t.Errorf("without token ids: lost %v", lost)
	}
}

// TestCauses: the causes' names differ, and their rungs come in order.
func TestCauses(t *testing.T) {
	names, last := map[string]bool{}, Reusable
	for c := range Causes {
		if names[c.String()] || c.String() == "" || c.Below() < last {
			t.Errorf("cause %d %q is below %v, after %v", c, c, c.Below(), last)
		}
		names[c.String()], last = true, c.Below()
	}
}
