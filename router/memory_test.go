package router

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"weak"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/router/budget"
	"kvepp/router/modelrewrite"
	"kvepp/router/queue"
)

// TestRunningRequestsReleaseTheirBodies: the model's name, an adapter's and a rewritten one do not keep the body from
// which they were read in memory, neither in the route nor in metrics or queues.
func TestRunningRequestsReleaseTheirBodies(t *testing.T) {
	nameless := workers(2)
	for i := range nameless {
		nameless[i].Model = ""
	}
	for name, prepare := range map[string]func(h *house){
		"a model of the operator's": func(h *house) { h.cfg.Models = map[string]*prompt.Model{"named": nil} },
		"an adapter":                func(h *house) { h.cfg.Adapters = NewAdapters(map[string]string{"named": "m"}) },
		"a rewritten model": func(h *house) {
			h.cfg.Rewrites = rewrites(t, modelrewrite.Rule{Name: "r", Models: []string{"named"}, Targets: toM})
		},
		"a queue": func(h *house) {
			h.cfg.Models = map[string]*prompt.Model{"named": nil}
			h.cfg.Queue = &queue.RoomConfig{Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, set(0.0))),
				Bound: 10}
		},
	} {
		h := newHouse(t, nameless...)
		prepare(h)
		h.Router = New(h.cfg, h.pool, h.index, h.book, h.metrics, h.log)
		route, body := func() (*Route, weak.Pointer[byte]) {
			req := completion("named", tokens(0, 40))
			return h.route(req), weak.Make(&req.Body[0])
		}()
		route.Body = nil // as extproc does before the response
		runtime.GC()
		runtime.GC() // what pools hold is dropped by the second one
		if body.Value() != nil {
			t.Errorf("%s: the body is still in memory", name)
		}
		route.Free()
		route.Ended(Response{Status: "200"})
		runtime.KeepAlive(h)
	}
}

// TestWaitingPromptsAreBounded: prompts that wait count with what each short one takes. Without room for them a request
// waits without its token ids, and is routed by load.
func TestWaitingPromptsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, queue.FCFS, maxed(workers(1), 100)...)
		const held = 1 << 20
		h.cfg.Memory = budget.New(held * 56 / 17)
		many := make([][]kvblock.Token, 512)
		a := arriveAt(h)
		a.send(t.Context(), "first", completion("m", tokens(0, 40)))
		for i := range 20 {
			for j := range many {
				many[j] = tokens(1000*i+j, 4)
			}
			a.send(t.Context(), fmt.Sprint(i), completion("m", many...))
			if n := h.cfg.Memory.Held.Used(); n > held {
				t.Fatalf("%d waiting requests take %d bytes of %d", i+1, n, held)
			}
		}
		if n := h.allWaiting(); n != 20 {
			t.Fatalf("%d requests wait", n)
		}
		reasons := map[Reason]int{}
		for went := "first"; went != ""; {
			a.prefilled(went)
			a.route(went).Free()
			delete(a.by, went)
			went = ""
			for name, r := range a.by {
				reasons[r.Reason]++
				went = name
			}
		}
		// 512 prompts of four tokens take some 200 KB
		if reasons[ReasonKV] < 3 || reasons[ReasonKV] > 6 || reasons[ReasonKV]+reasons[ReasonBodyValues] != 20 {
			t.Errorf("reasons: %v", reasons)
		}
		if n := h.cfg.Memory.Used(); n != 0 {
			t.Errorf("%d bytes are still held", n)
		}
	})
}

// TestRunningRecordsAreBounded: what running requests keep of their decisions is bounded, also with many candidates.
// Each ends with its outcome in the record all the same, and its follower hears of it.
func TestRunningRecordsAreBounded(t *testing.T) {
	const requests, candidates = 300, 1000
	h, _ := keeping(t, 1000, workers(candidates)...)
	follower := h.Follow(Query{}, 0)
	defer follower.Close()
	var routes []*Route
	whole := 0
	for i := range requests {
		req := completion("m", tokens(0, 10))
		req.ID = fmt.Sprint(i)
		r := h.route(req)
		if r.Costs != nil {
			whole++
		}
		routes = append(routes, r)
	}
	if n := h.records.running; n > maxRecordBytes+requests*4096 || whole < 20 || whole == requests {
		t.Errorf("the records of running requests take %d bytes; %d of %d have costs", n, whole, requests)
	}
	heard := map[string]bool{}
	for i, r := range routes {
		h.records.setServedBy(r)
		r.Free()
		r.Ended(Response{Status: "200", Tokens: i})
		record := <-follower.C
		if heard[record.RequestID] = true; record.Outcome == nil || record.Outcome.Tokens != i {
			t.Errorf("request %d: outcome %+v", i, record.Outcome)
		}
	}
	if len(heard) != requests || h.records.running != 0 {
		t.Errorf("%d requests were followed; %d bytes are left", len(heard), h.records.running)
	}
	for _, record := range h.Records(requests, Query{}) {
		if len(record.Costs) != candidates || record.Outcome == nil {
			t.Errorf("request %s: %d candidates, outcome %v", record.RequestID, len(record.Costs), record.Outcome)
		}
	}
}
