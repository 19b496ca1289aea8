package scoring

import (
	"math"
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

func wantPace(t *testing.T, a *ActiveSequences, w kvblock.Worker, step, perToken float64) {
	t.Helper()
	p := a.Pace(w)
	if math.Abs(p.StepSeconds-step) > 3e-4 || math.Abs(p.SecondsPerToken-perToken) > perToken/50 {
		t.Errorf("worker %d: %v s a step and %v s a token, want %v and %v",
			w, p.StepSeconds, p.SecondsPerToken, step, perToken)
	}
}

// tellAll has a book's copies at another learn of two workers.
func tellAll(t *testing.T, from *ActiveSequences, to *Copies) {
	t.Helper()
	for w, values := range lessons(from, true) {
		if !to.Learned(w, values) {
			t.Errorf("refused %v", values)
		}
	}
}

// lessons returns what a book tells, by worker.
func lessons(a *ActiveSequences, all bool) map[kvblock.Worker][]float64 {
	told := map[kvblock.Worker][]float64{}
	a.Lessons(all, func(w kvblock.Worker, values []float64) { told[w] = values })
	return told
}

// A book prices by what other books have learned, also of workers that it sent nothing to; told twice, it counts once.
// After the origin's death only the book's own samples count.
func TestBooksLearnFromEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		teacher, a := NewActiveSequences(), NewActiveSequences()
		teach(t, teacher, 0, 30, 20*time.Millisecond, 100*time.Microsecond)
		teach(t, teacher, 1, 30, 10*time.Millisecond, 300*time.Microsecond)
		if first, again := lessons(teacher, false), lessons(teacher, false); len(first) != 2 || len(again) != 0 {
			t.Errorf("told %v, and then %v", first, again)
		}
		copies := a.NewCopies()
		tellAll(t, teacher, copies)
		wantPace(t, a, 0, 0.02, 1e-4)
		wantPace(t, a, 1, 0.01, 3e-4)
		weight := a.learned.peers.workers[0].prefill.weight
		tellAll(t, teacher, copies)
		if again := a.learned.peers.workers[0].prefill.weight; again != weight || a.learned.rest.outputTokens() != 100 {
			t.Errorf("weight %v, then %v; answers of %v tokens", weight, again, a.learned.rest.outputTokens())
		}
		teach(t, a, 0, 10, 20*time.Millisecond, 100*time.Microsecond)
		wantPace(t, a, 0, 0.02, 1e-4)
		teach(t, teacher, 1, 10, 10*time.Millisecond, 300*time.Microsecond)
		if told := lessons(teacher, false); len(told) != 1 || told[1] == nil {
			t.Errorf("after 10 samples of worker 1, %v is told", told)
		}

		copies.FreeAll()
		wantPace(t, a, 0, 0.02, 1e-4)
		wantPace(t, a, 1, 0.02, 1e-4) // as the only worker that has samples
		teach(t, a, 1, 600, 40*time.Millisecond, 300*time.Microsecond)
		wantPace(t, a, 1, 0.04, 3e-4)
		tellAll(t, teacher, copies)
		a.Forget(0)
		if *a.learned.peers.of(0) != (pace{}) {
			t.Error("a worker that left is still known")
		}
	})
}

// A book knows how noisy times are also from other books: otherwise the few samples of its own would decide whether two
// workers differ.
func TestBooksShareNoise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		teacher, a := NewActiveSequences(), NewActiveSequences()
		for range 30 { // so the average of both workers is wrong by 20 ms for each
			teach(t, teacher, 0, 1, 20*time.Millisecond, 100*time.Microsecond)
			teach(t, teacher, 1, 1, 60*time.Millisecond, 100*time.Microsecond)
		}
		noise := teacher.learned.rest.usual.noise.value
		copies := a.NewCopies()
		tellAll(t, teacher, copies)
		tellAll(t, teacher, copies)
		if got := a.learned.rest.usual.noise.value; noise < 1e-3 || math.Abs(got-noise) > 1e-12 {
			t.Errorf("noise of %v s, want %v", got, noise)
		}
		teach(t, a, 0, 2, 20*time.Millisecond, 100*time.Microsecond)
		if got := a.learned.rest.usual.noise.value; math.Abs(got-noise) > noise/10 {
			t.Errorf("after two exact samples, noise of %v s, want about %v", got, noise)
		}
		copies.FreeAll()
		if got, own := a.learned.rest.usual.noise.value, a.learned.workers[0].noise.value; got != own {
			t.Errorf("after the origin's death, noise of %v s, want %v", got, own)
		}
	})
}

// Numbers that are no lesson are refused and change nothing.
func TestBadLessonsAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		teacher, a := NewActiveSequences(), NewActiveSequences()
		teach(t, teacher, 0, 30, 20*time.Millisecond, 100*time.Microsecond)
		good := lessons(teacher, true)[0]
		before := a.Pace(0)
		for i := range good {
			for _, v := range []float64{-1, math.NaN(), math.Inf(1), 1e30} {
				bad := append([]float64(nil), good...)
				if bad[i] = v; a.NewCopies().Learned(0, bad) {
					t.Errorf("took %v for number %d", v, i)
				}
			}
		}
		zero := append([]float64(nil), good...)
		zero[2] = 0
		for _, bad := range [][]float64{nil, good[1:], append(good, 1), zero} {
			if a.NewCopies().Learned(0, bad) {
				t.Errorf("took %v", bad)
			}
		}
		if a.NewCopies().Learned(MaxWorkers, good) || a.Pace(0) != before {
			t.Errorf("the pace is %+v, was %+v", a.Pace(0), before)
		}
	})
}
