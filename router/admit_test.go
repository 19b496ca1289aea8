package router

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/admission"
)

// newAdmissionHouse returns a house with one worker whose KV cache has 100 blocks of 4 tokens. Half of all
// conversations go on after 10 s, and the admission has learned that.
func newAdmissionHouse(t *testing.T) *house {
	t.Helper()
	endpoints := workers(1)
	endpoints[0].TotalKVBlocks = 100
	h := newHouse(t, endpoints...)
	cfg := h.cfg
	cfg.Admission = &Admission{Controller: admission.New(admission.Config{Fill: 1}), Bound: 2, Timeout: time.Minute}
	h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
	for c := range 60 {
		prompt := []kvblock.SequenceHash{kvblock.SequenceHash(c + 1)}
		for range 1 + c%2 {
			turn := cfg.Admission.Arrive(prompt, 4e6, 4e6) // caches are of use
			turn.Start(1000, 0)
			turn.End(20)
			<-time.After(10 * time.Second)
		}
	}
	<-time.After(10 * time.Minute)
	if s := cfg.Admission.Stats(); s.Idle != 0 || s.Return == 0 {
		t.Fatalf("%+v", s)
	}
	return h
}

// A new conversation waits while those that go on fill the worker's cache. Turns of these do not wait. A request of the
// line goes as soon as there is room.
func TestConversationsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newAdmissionHouse(t)
		a := arriveAt(h)
		a.send(t.Context(), "first", completion("m", tokens(0, 200)))
		a.send(t.Context(), "beside", completion("m", tokens(1000, 100))) // 100 and 20 tokens beside 200
		a.send(t.Context(), "new", completion("m", tokens(2000, 100)))
		if a.order() != "first beside" || h.Held() != 1 || h.allWaiting() != 0 {
			t.Fatalf("went: %s; %d wait", a.order(), h.Held())
		}
		a.send(t.Context(), "next turn", completion("m", tokens(0, 240)))
		if a.order() != "first beside next turn" {
			t.Fatalf("went: %s", a.order())
		}
		<-time.After(5 * time.Second)
		a.by["next turn"].LearnOutput(20)
		a.by["next turn"].Free()
		a.by["first"].Free()
		a.by["beside"].Free() // a worker without requests has room
		synctest.Wait()
		if a.order() != "first beside next turn new" || h.Held() != 0 || a.by["new"].Waited != 5*time.Second {
			t.Fatalf("went: %s; waited %v", a.order(), a.by["new"].Waited)
		}
		a.by["new"].Free()
		if s := h.cfg.Admission.Stats(); s.Idle != 3 || s.Running != 0 {
			t.Errorf("%+v", s)
		}
		if h.waited() != 1 {
			t.Errorf("%v waits were observed", h.waited())
		}
	})
}

// Idle conversations keep others out until they are idle for too long, although no request ends then.
func TestIdleConversationsLapse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newAdmissionHouse(t)
		a := arriveAt(h)
		for i := range 4 { // 4 times 320 idle tokens, and a third of them counts
			r := h.route(completion("m", tokens(1000*i, 300)))
			r.LearnOutput(20)
			r.Free()
		}
		a.send(t.Context(), "running", completion("m", tokens(0, 310)))
		a.send(t.Context(), "new", completion("m", tokens(8000, 20)))
		if a.order() != "running" || h.Held() != 1 {
			t.Fatalf("went: %s; %d wait", a.order(), h.Held())
		}
		<-time.After(32 * time.Second) // three pauses, and the next regular look
		synctest.Wait()
		if a.order() != "running new" {
			t.Fatalf("went: %s; %+v", a.order(), h.cfg.Admission.Stats())
		}
	})
}

// A request that waited for too long, that finds a full line or may not wait is refused; one whose client goes leaves.
func TestNoRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newAdmissionHouse(t)
		a := arriveAt(h)
		a.send(t.Context(), "first", completion("m", tokens(0, 380)))
		a.send(t.Context(), "b", completion("m", tokens(1000, 100)))
		a.send(t.Context(), "c", completion("m", tokens(2000, 100)))
		a.send(t.Context(), "d", completion("m", tokens(3000, 100)))
		if want := "first d: " + ErrNoRoom.Error(); !strings.HasPrefix(a.order(), want) || h.Held() != 2 {
			t.Fatalf("went: %s; %d wait", a.order(), h.Held())
		}
		<-time.After(61 * time.Second)
		synctest.Wait()
		if strings.Count(a.order(), ErrNoRoom.Error()) != 3 || h.Held() != 0 {
			t.Fatalf("went: %s; %d wait", a.order(), h.Held())
		}
		if got := h.rejections(); got["no_room"] != 3 || got["queue_timeout"] != 0 {
			t.Errorf("rejections %v", got)
		}
		a.by["first"].Free()
		h.wantTurnFree()
	})
}

// The log names each worker that computes prompts and whose number of KV blocks is not known.
func TestAdmissionWatcher(t *testing.T) {
	var log logtest.Log
	a := Admission{Controller: admission.New(admission.Config{Fill: 1}), log: slog.New(slog.NewTextHandler(&log, nil))}
	for _, e := range []pool.Endpoint{
		{Name: "known", TotalKVBlocks: 100}, {Name: "decodes", Role: pool.Decode}, {Name: "unknown"},
	} {
		a.WorkerJoined(pool.Worker{Endpoint: &e})
	}
	a.WorkerLeft(7)
	if log.Count("has no effect on this worker") != 1 || log.Count("worker=unknown") != 1 {
		t.Error(&log)
	}
}
