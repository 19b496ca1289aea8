package scoring

import (
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

// teach has a book serve n requests on a worker that takes base and perToken for a prompt.
func teach(t *testing.T, a *ActiveSequences, w kvblock.Worker, n int, base, perToken time.Duration) {
	t.Helper()
	for i := range n {
		tokens := 100 + 50*(i%7)
		b := mustAdd(t, a, Request{ISLTokens: tokens}, Candidate{Worker: w})
		wait(base + time.Duration(tokens)*perToken)
		b.MarkPrefillCompleted()
		wait(time.Second)
		b.LearnOutput(100)
		b.Free()
	}
}

// A book learns from the times that another book measures, also of workers that it sent nothing to, as if it had
// measured them; and it keeps what it learned when the other one ends.
func TestBooksLearnFromEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		teacher, a := NewActiveSequences(), NewActiveSequences()
		copies := a.NewCopies()
		teacher.Observe(func(ch *Change) { copies.Apply([]Change{*ch}) })
		teach(t, teacher, 0, 30, 20*time.Millisecond, 100*time.Microsecond)
		teach(t, teacher, 1, 30, 10*time.Millisecond, 300*time.Microsecond)
		for w := range kvblock.Worker(2) {
			if got, want := a.learned.workers[w], teacher.learned.workers[w]; got != want {
				t.Errorf("of worker %d it learned %+v, and the other one %+v", w, got, want)
			}
			if a.Pace(w) != teacher.Pace(w) {
				t.Errorf("worker %d: %+v, at the other one %+v", w, a.Pace(w), teacher.Pace(w))
			}
		}
		if a.learned.rest.usual != teacher.learned.rest.usual || a.learned.rest.usual.noise.samples == 0 {
			t.Errorf("all workers: %+v, and the other one %+v", a.learned.rest.usual, teacher.learned.rest.usual)
		}
		before := a.Pace(1)
		copies.FreeAll()
		if a.Pace(1) != before {
			t.Error("the other book's end changed what was learned")
		}
		a.Forget(1)
		if a.learned.workers[1].prefill != (line{}) {
			t.Error("a worker that left is still known")
		}
	})
}

// Times that nothing can take, and those of unknown bookings, are left out.
func TestBadTimesAreLeftOut(t *testing.T) {
	a := NewActiveSequences()
	c := a.NewCopies()
	c.Apply([]Change{{Kind: Booked, Number: 1, BlockSize: 16}})
	good := []Change{{Kind: PrefillTimed, Number: 1, Tokens: 100, Took: time.Second},
		{Kind: ResponseTimed, Number: 1, Tokens: 100, Held: 5, Took: time.Second}}
	for _, edit := range []func(*Change){
		func(ch *Change) { ch.Number = 2 },
		func(ch *Change) { ch.Tokens = 0 },
		func(ch *Change) { ch.Tokens = maxSampleTokens + 1 },
		func(ch *Change) { ch.Took = 0 },
		func(ch *Change) { ch.Took = 2 * time.Hour },
		func(ch *Change) { ch.Kind, ch.Held = ResponseTimed, -1 },
		func(ch *Change) { ch.Kind, ch.Took = ResponseTimed, time.Microsecond },
	} {
		for _, ch := range good {
			edit(&ch)
			if c.Apply([]Change{ch}); a.learned.workers[0] != (pace{}) {
				t.Errorf("learned from %+v", ch)
			}
		}
	}
	for _, ch := range good {
		c.Apply([]Change{ch})
	}
	if p := a.learned.workers[0]; p.prefill.samples != 1 || p.output.samples != 1 || p.gap.samples != 1 {
		t.Errorf("%+v", p)
	}
}
