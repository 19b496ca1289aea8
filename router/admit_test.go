package router

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
	"kvepp/router/admission"
	"kvepp/router/queue"
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
		a.route("next turn").LearnOutput(20)
		a.route("next turn").Free()
		a.route("first").Free()
		a.route("beside").Free() // a worker without requests has room
		synctest.Wait()
		if a.order() != "first beside next turn new" || h.Held() != 0 || a.route("new").Waited != 5*time.Second {
			t.Fatalf("went: %s; waited %v", a.order(), a.route("new").Waited)
		}
		a.route("new").Free()
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
		a.route("first").Free()
		h.wantTurnFree()
	})
}

// TestAdmissionWithoutSizes: a worker whose number of KV blocks is not known takes conversations, and the log says so.
func TestAdmissionWithoutSizes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, workers(1)...)
		var log logtest.Log
		h.cfg.Admission = &Admission{Controller: admission.New(admission.Config{Fill: 1}), Bound: 2,
			Timeout: time.Minute}
		h.Router = New(h.cfg, h.pool, h.index, h.book, h.metrics, slog.New(slog.NewTextHandler(&log, nil)))
		a := arriveAt(h)
		a.send(t.Context(), "a", completion("m", tokens(0, 380)))
		a.send(t.Context(), "b", completion("m", tokens(1000, 380)))
		if a.order() != "a b" || log.Count("has no effect on this worker") != 2 || log.Count("worker=w0/0") != 2 {
			t.Errorf("went: %s; %s", a.order(), &log)
		}
	})
}

// TestAdmissionOfAnEmptyPool: if the last worker leaves while requests wait for admission, none of them holds the turn:
// all wait for a worker, for as long as requests do that come then, and go when one comes.
func TestAdmissionOfAnEmptyPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newAdmissionHouse(t)
		endpoints := workers(1)
		endpoints[0].TotalKVBlocks = 1000
		h.cfg.Admission.Bound = 8
		h.cfg.Queue = &queue.RoomConfig{Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, nil)),
			Bound: 8, Hold: 10 * time.Minute}
		h.Router = New(h.cfg, h.pool, h.index, h.book, h.metrics, h.log)
		h.pool.OnLeave(h.book.Forget)
		h.pool.Watch(h.Router)
		a := arriveAt(h)
		a.send(t.Context(), "first", completion("m", tokens(0, 380)))
		for i, name := range []string{"b", "c", "d"} {
			a.send(t.Context(), name, completion("m", tokens(1000*(i+1), 300)))
		}
		h.pool.Update(nil)
		<-time.After(5 * time.Minute)
		if a.order() != "first" || h.Held() != 3 || h.admissions.Waiting() != 3 {
			t.Fatalf("went: %s; %d wait, %d of them for admission", a.order(), h.Held(), h.admissions.Waiting())
		}
		h.pool.Update(endpoints)
		<-time.After(time.Minute)
		went := strings.Fields(a.order())
		slices.Sort(went) // each lets the next one go before it returns itself, so they may end in any order
		if !slices.Equal(went, []string{"b", "c", "d", "first"}) || h.Held() != 0 {
			t.Fatalf("went: %s; %d wait", a.order(), h.Held())
		}
		for _, name := range []string{"first", "b", "c", "d"} {
			a.route(name).Free()
		}
		a.send(t.Context(), "fill", completion("m", tokens(0, 3900)))
		a.send(t.Context(), "late", completion("m", tokens(9000, 300)))
		h.pool.Update(nil)
		<-time.After(11 * time.Minute)
		if want := "late: " + ErrNoEndpoints.Error(); !strings.Contains(a.order(), want) {
			t.Errorf("went: %s, want %s", a.order(), want)
		}
		a.route("fill").Free()
	})
}
