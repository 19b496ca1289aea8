package eject

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
)

// house is a tracker with endpoints of one worker each, and the calls that it made.
type house struct {
	*Tracker
	t      *testing.T
	log    *logtest.Log
	causes []Cause
	mu     sync.Mutex
	read   []kvblock.Worker
}

func newHouse(t *testing.T, n int, edit func(*Config)) *house {
	h := &house{t: t, log: new(logtest.Log)}
	cfg := Config{On: true, ConsecutiveFailures: 3, FailurePercent: 50, MaxPercent: 50, Time: time.Second,
		Ejected: func(c Cause) { h.causes = append(h.causes, c) },
		ReadPage: func(w kvblock.Worker) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.read = append(h.read, w)
		}}
	if edit != nil {
		edit(&cfg)
	}
	h.Tracker = New(cfg, slog.New(slog.NewTextHandler(h.log, nil)))
	for i := range n {
		h.join(i, fmt.Sprintf("e%d", i))
	}
	return h
}

func (h *house) join(number int, name string) {
	h.WorkerJoined(pool.Worker{Worker: kvblock.Worker(number), Endpoint: &pool.Endpoint{Name: name, Model: "m"}})
}

func (h *house) fail(w int, times int) {
	for range times {
		h.Failed(h.Of(kvblock.Worker(w)), 0, Refused)
	}
}

func (h *house) succeed(w int, times int) {
	for range times {
		h.Succeeded(h.Of(kvblock.Worker(w)), 0)
	}
}

func (h *house) want(w int, want Standing) {
	h.t.Helper()
	if got := h.View().Of(kvblock.Worker(w), time.Now()); got != want {
		h.t.Errorf("worker %d stands at %d, want %d", w, got, want)
	}
}

func (h *house) claim(w int) uint64 {
	h.t.Helper()
	trial, ok := h.Claim(kvblock.Worker(w))
	if !ok {
		h.t.Fatalf("worker %d: no trial", w)
	}
	return trial
}

func TestFailuresInARow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 3, nil)
		h.fail(0, 2)
		h.succeed(0, 1)
		h.fail(0, 2)
		h.want(0, In)
		h.fail(0, 1)
		h.want(0, Ejected)
		h.want(1, In)
		if h.View().Of(99, time.Now()) != In {
			t.Error("an unknown worker is not in")
		}
		if len(h.causes) != 1 || h.causes[0] != Refused {
			t.Errorf("causes %v", h.causes)
		}
		if !strings.Contains(h.log.String(), "level=WARN") || !strings.Contains(h.log.String(), "cause=refused") ||
			!strings.Contains(h.log.String(), "next_trial_in=1s") {
			t.Errorf("log: %s", h.log.String())
		}
	})
}

// TestSuspect: an endpoint gets no requests while unexplained responses may be the failures that eject it, and gets
// them again as soon as they cannot be, in any order in which responses end and are explained.
func TestSuspect(t *testing.T) {
	h := newHouse(t, 2, nil)
	e := h.Of(0)
	h.fail(0, 2)
	h.BrokenOff(e)
	h.want(0, Ejected)
	h.succeed(0, 1) // a request of before the failures
	h.want(0, In)
	h.Explained(e)
	h.want(0, In)

	h.BrokenOff(e)
	h.fail(0, 1)
	h.want(0, In)
	h.fail(0, 1)
	h.want(0, Ejected)
	h.Explained(e) // by the client
	h.want(0, In)
	if len(h.causes) != 0 {
		t.Errorf("ejected: %v", h.causes)
	}

	// After the endpoint left, the ends of its requests change no view.
	h.BrokenOff(e)
	h.want(0, Ejected)
	h.fail(1, 3) // so that there is a view
	h.WorkerLeft(0)
	view := h.View()
	h.Explained(e)
	h.Succeeded(e, 0)
	if h.View() != view {
		t.Error("the view was published again")
	}
}

// TestTrial: after the ejection time, one request at a time is a trial. The time doubles with each failed trial, up to
// a minute.
func TestTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 2, nil)
		h.fail(0, 3)
		for _, seconds := range []int{1, 2, 4, 8, 16, 32, 60, 60} {
			<-time.After(time.Duration(seconds)*time.Second - time.Millisecond)
			h.want(0, Ejected)
			if _, ok := h.Claim(0); ok {
				t.Fatal("a trial before its time")
			}
			<-time.After(time.Millisecond)
			h.want(0, Trial)
			trial := h.claim(0)
			h.want(0, Ejected) // for all others
			if _, ok := h.Claim(0); ok {
				t.Fatal("two trials at once")
			}
			h.Failed(h.Of(0), trial, Reset)
			h.want(0, Ejected)
		}
		<-time.After(time.Minute)
		h.Abandon(h.Of(0), h.claim(0)) // its client left
		h.want(0, Trial)
		h.Works(h.Of(0), h.claim(0))
		h.want(0, In)

		// It fails again before it was admitted for as long as it was ejected.
		h.fail(0, 3)
		<-time.After(59 * time.Second)
		h.want(0, Ejected)
		<-time.After(time.Second)
		h.Succeeded(h.Of(0), h.claim(0))
		h.want(0, In)
		<-time.After(time.Minute)
		h.succeed(0, 1)
		h.fail(0, 3)
		<-time.After(time.Second)
		h.want(0, Trial)
	})
}

// TestLateTrial: a trial whose response took too long readmits the endpoint when the response completes.
func TestLateTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 1, nil)
		h.fail(0, 3)
		<-time.After(time.Second)
		trial := h.claim(0)
		h.Failed(h.Of(0), trial, FirstByte)
		h.want(0, Ejected)
		h.Succeeded(h.Of(0), trial)
		h.want(0, In)
	})
}

// TestFailureShare: an endpoint is ejected if more than half of at least ten requests within ten seconds fail, unless
// half of the model's endpoints are ejected already.
func TestFailureShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 4, nil)
		mixed := func(w int) { // two failures of three, never three in a row
			h.fail(w, 2)
			h.succeed(w, 1)
		}
		for range 3 {
			mixed(0)
		}
		h.want(0, In) // of nine
		h.fail(0, 1)
		h.want(0, Ejected)
		for w := 1; w < 4; w++ {
			for range 4 {
				mixed(w)
			}
		}
		h.want(1, Ejected)
		h.want(2, In)
		h.want(3, In)
		if len(h.causes) != 2 || h.causes[0] != FailureShare {
			t.Errorf("causes %v", h.causes)
		}
		h.succeed(2, 1)
		h.fail(2, 3) // in a row: the share does not matter
		h.want(2, Ejected)
		<-time.After(10 * time.Second)
		h.fail(3, 2)
		h.want(3, In) // earlier failures no longer count
	})
}

func TestHalfOfOddNumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 3, nil)
		for w := range 3 {
			for range 5 {
				h.fail(w, 2)
				h.succeed(w, 1)
			}
		}
		if ejected, _ := h.Counts(); ejected != 1 {
			t.Errorf("%d of 3 ejected for their share alone, with at most 50 percent", ejected)
		}
	})
}

// TestPages: a refused metrics page ejects the endpoint at once. There is no trial until the page recovers.
func TestPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 3, nil)
		h.PageRead(0, enginemetrics.PageResponds)
		h.PageRead(0, enginemetrics.PageRefused)
		h.want(0, Ejected)
		<-time.After(time.Hour)
		h.want(0, Ejected)
		h.PageRead(0, enginemetrics.PageResponds)
		h.want(0, Trial)
		h.Works(h.Of(0), h.claim(0))
		h.want(0, In)

		// A refused page on another port alone does not eject. Together with a lost subscription it does: the process
		// is gone.
		h.PageRead(1, enginemetrics.PageRefusedElsewhere)
		h.want(1, In)
		h.Subscribed(1, false)
		h.want(1, Ejected)
		h.Subscribed(1, true)
		h.want(1, Trial)

		// A silent page does not eject while responses arrive, but as soon as they have stopped for SilentAfter.
		h.Of(2).Heard()
		<-time.After(4 * time.Second)
		h.PageRead(2, enginemetrics.PageSilent)
		h.want(2, In)
		h.Of(2).Heard()
		<-time.After(4 * time.Second)
		h.want(2, In)
		<-time.After(time.Second)
		synctest.Wait()
		h.want(2, Ejected) // although no read reports the silence again
		h.PageRead(2, enginemetrics.PageResponds)
		h.want(2, Trial)
		if fmt.Sprint(h.causes) != "[metrics_refused process_gone metrics_silent]" {
			t.Errorf("causes %v", h.causes)
		}
	})
}

// TestTrialEndsWhenPageRefuses: an endpoint that was ejected for failures gets no trial while its page refuses
// connections.
func TestTrialEndsWhenPageRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 2, nil)
		h.fail(0, 3)
		if len(h.read) == 0 || h.read[0] != 0 {
			t.Errorf("pages asked for: %v", h.read)
		}
		h.PageRead(0, enginemetrics.PageRefused)
		<-time.After(time.Minute)
		h.want(0, Ejected)
		h.PageRead(0, enginemetrics.PageUnknown)
		h.want(0, Trial)
	})
}

// TestLostSubscription: after the event socket is lost, one refused connection ejects.
func TestLostSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 2, nil)
		h.Subscribed(0, false)
		h.want(0, In)
		if len(h.read) != 1 {
			t.Errorf("pages asked for: %v", h.read)
		}
		h.Failed(h.Of(0), 0, ServerError)
		h.want(0, In)
		h.Failed(h.Of(0), 0, Refused)
		h.want(0, Ejected)
	})
}

// TestRanksAndNames: an endpoint's ranks are ejected together. An endpoint that gets a used worker number starts
// without failures.
func TestRanksAndNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 0, nil)
		h.join(0, "a")
		h.join(1, "a")
		h.join(2, "b")
		a := h.Of(0)
		h.Failed(h.Of(0), 0, Reset)
		h.Failed(h.Of(1), 0, Reset)
		h.Failed(h.Of(0), 0, Reset)
		h.want(0, Ejected)
		h.want(1, Ejected)
		h.want(2, In)
		h.WorkerLeft(0)
		h.want(1, Ejected)
		h.WorkerLeft(1)
		h.WorkerLeft(1) // again, as the pool does
		h.join(0, "c")
		h.want(0, In)
		for range 9 {
			h.Failed(a, 0, Reset) // from requests that still run
		}
		h.want(0, In)
		if h.View() != nil {
			t.Error("an endpoint that is gone is still excluded")
		}
	})
}

func TestCordon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 2, func(c *Config) { c.On = false })
		h.fail(1, 100)
		h.PageRead(1, enginemetrics.PageRefused)
		h.want(1, In) // nothing is ejected
		if err := h.SetCordon("e0", NoNewRequests); err != nil {
			t.Fatal(err)
		}
		h.want(0, Cordoned)
		if err := h.SetCordon("missing", NoNewRequests); err == nil {
			t.Error("an endpoint that is not there can be cordoned")
		}
		h.WorkerLeft(0)
		h.join(7, "e0")
		h.want(7, Cordoned) // by its name
		h.WorkerLeft(7)
		if err := h.SetCordon("e0", ""); err != nil { // an absent endpoint
			t.Fatal(err)
		}
		h.join(7, "e0")
		h.want(7, In)
	})
}

// TestCordonOfThePool: the cordons of the operator and of the pool hold independently, and the log says when the last
// one ends.
func TestCordonOfThePool(t *testing.T) {
	h := newHouse(t, 1, nil)
	e1 := &pool.Endpoint{Name: "e1", Model: "m", DataParallelSize: 2, CordonedBy: pool.CordonedByPod}
	h.WorkerJoined(pool.Worker{Worker: 1, Endpoint: e1})
	h.WorkerJoined(pool.Worker{Worker: 2, Endpoint: e1, Rank: 1})
	step := func(what string, change func(), want Standing, cordoned int, line string) {
		t.Helper()
		before := len(h.log.String())
		change()
		if _, n := h.Counts(); n != cordoned {
			t.Errorf("%s: %d workers are counted as cordoned, want %d", what, n, cordoned)
		}
		h.want(1, want)
		h.want(2, want)
		h.want(0, In)
		if log := h.log.String()[before:]; (line == "") != (log == "") || strings.Count(log, "\n") > 1 ||
			!strings.Contains(log, line) {
			t.Errorf("%s: logged %q, want %q", what, log, line)
		}
	}
	set := func(c Cordon) func() {
		return func() {
			if err := h.SetCordon("e1", c); err != nil {
				t.Error(err)
			}
		}
	}
	by := func(s pool.CordonSource) func() { return func() { h.PoolCordon("e1", s) } }
	if log := h.log.String(); strings.Count(log, "endpoint cordoned: it gets no new requests") != 1 ||
		!strings.Contains(log, `endpoint=e1 operator=none pool="Pod annotation"`) {
		t.Errorf("an endpoint that joins cordoned: %q", log)
	}
	step(
		"drained too",
		set(Draining),
		Cordoned,
		2,
		`still gets no new requests" endpoint=e1 operator=draining pool="Pod annotation"`,
	)
	step(
		"the annotation is gone",
		by(""),
		Cordoned,
		2,
		`still gets no new requests" endpoint=e1 operator=draining pool=none`,
	)
	step("the same again", by(""), Cordoned, 2, "")
	step("uncordoned", set(""), In, 0, "endpoint uncordoned: it gets requests again")
	step("annotated", by(pool.CordonedByPod), Cordoned, 2, "endpoint cordoned: it gets no new requests")
	step("the annotation is gone again", by(""), In, 0, "endpoint uncordoned: it gets requests again")
	step("another name", func() { h.PoolCordon("e9", pool.CordonedByPod) }, In, 0, "")
}

// TestCordonOfEjectedEndpoint: a cordoned endpoint gets no trial request.
func TestCordonOfEjectedEndpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 2, nil)
		h.fail(0, 3)
		h.PoolCordon("e0", pool.CordonedByPod)
		<-time.After(time.Minute)
		h.want(0, Cordoned)
		if _, ok := h.Claim(0); ok {
			t.Error("a cordoned endpoint gets a trial request")
		}
		h.PoolCordon("e0", "")
		h.claim(0)
	})
}

// TestAbsentCordonsAreBounded: cordons of present endpoints are always kept, and of absent endpoints only the latest
// ones.
func TestAbsentCordonsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, 2, nil)
		cordon := func(name string) {
			t.Helper()
			if err := h.SetCordon(name, NoNewRequests); err != nil {
				t.Fatal(err)
			}
		}
		cordon("e0")
		for i := range maxAbsentCordons + 10 {
			name := fmt.Sprintf("gone-%d", i)
			h.join(7, name)
			<-time.After(time.Second)
			cordon(name)
			h.WorkerLeft(7)
		}
		cordon("e1")
		for name, want := range map[string]Standing{"gone-0": In, "gone-9": In, "gone-10": Cordoned,
			fmt.Sprintf("gone-%d", maxAbsentCordons+9): Cordoned} {
			h.join(7, name)
			h.want(7, want)
			h.WorkerLeft(7)
		}
		h.want(0, Cordoned)
		absent := 0
		for _, e := range h.Endpoints() {
			if len(e.Workers) == 0 {
				absent++
			}
		}
		if absent != maxAbsentCordons {
			t.Errorf("%d cordons of absent endpoints, want %d", absent, maxAbsentCordons)
		}
	})
}

func TestConcurrentUse(t *testing.T) {
	h := newHouse(t, 8, func(c *Config) { c.Ejected, c.ReadPage, c.Time = nil, nil, time.Millisecond })
	var wait sync.WaitGroup
	for g := range 8 {
		wait.Go(func() {
			for i := range 2000 {
				w := kvblock.Worker((g + i) % 8)
				switch i % 7 {
				case 0:
					if trial, ok := h.Claim(w); ok {
						h.Works(h.Of(w), trial)
					}
				case 1:
					h.PageRead(w, enginemetrics.PageState(i%4+1))
				case 2:
					h.Subscribed(w, i%2 == 0)
				case 3:
					h.Succeeded(h.Of(w), 0)
				case 4:
					h.View().Of(w, time.Now())
					h.Endpoints()
				case 5:
					if g == 0 {
						h.WorkerLeft(w)
						h.join(int(w), fmt.Sprintf("e%d", w))
					}
				default:
					h.Failed(h.Of(w), 0, Reset)
				}
			}
		})
	}
	wait.Wait()
	for w := range 8 {
		h.PageRead(kvblock.Worker(w), enginemetrics.PageResponds)
		h.Subscribed(kvblock.Worker(w), true)
	}
}

// TestAdvice: the log line of an ejection explains its cause and gives the endpoint's address.
func TestAdvice(t *testing.T) {
	for _, cause := range Causes {
		if advice[cause] == "" {
			t.Errorf("no advice about %s", cause)
		}
	}
	h := newHouse(t, 1, nil)
	h.WorkerJoined(pool.Worker{Worker: 1, Endpoint: &pool.Endpoint{Name: "there", Address: "10.0.0.7:8000"}})
	h.PageRead(1, enginemetrics.PageRefused)
	for _, part := range []string{"endpoint=there", "address=10.0.0.7:8000", "cause=metrics_refused",
		"is the engine up, and is the endpoint's address right?"} {
		if h.log.Count(part) != 1 {
			t.Errorf("no %q in %s", part, h.log)
		}
	}
}
