package router

import (
	"testing"

	"kvepp/internal/metrics"
	"kvepp/pool"
)

// requestsOf returns the counts of a worker by its name.
func (h *house) requestsOf(name string) metrics.WorkerRequests {
	h.t.Helper()
	s := h.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		if s.Workers[i].Name == name {
			return h.WorkerRequests(s.Workers[i].Worker)
		}
	}
	h.t.Fatalf("no worker %s", name)
	return metrics.WorkerRequests{}
}

// TestWorkerRequests: each ended request counts for the worker that served it, and for its prefill worker. A status of
// 500 or above is a failure, and so is a response that broke off.
func TestWorkerRequests(t *testing.T) {
	es := workers(2)
	h := newHouse(t, es...)
	request := func(served string, a Response) {
		req := completion("m", tokens(0, 16))
		req.Allowed = func(address string) bool { return address == es[0].Address }
		r := h.route(req)
		if served != "" {
			h.Reconcile(r, served, 0)
		}
		r.Free()
		r.Ended(a)
	}
	for _, c := range []struct {
		served   string
		response Response
		w0, w1   metrics.WorkerRequests // differences to the counts before
	}{
		{"", Response{Status: "200", Complete: true}, metrics.WorkerRequests{All: 1}, metrics.WorkerRequests{}},
		{es[0].Address, Response{Status: "429", Complete: true}, metrics.WorkerRequests{All: 1},
			metrics.WorkerRequests{}},
		{"", Response{Status: "503", Complete: true}, metrics.WorkerRequests{All: 1, Errors: 1},
			metrics.WorkerRequests{}},
		{"", Response{Status: "500"}, metrics.WorkerRequests{All: 1, Errors: 1}, metrics.WorkerRequests{}},
		{"", Response{Status: "200"}, metrics.WorkerRequests{All: 1, Incomplete: 1}, metrics.WorkerRequests{}},
		{"", Response{}, metrics.WorkerRequests{All: 1}, metrics.WorkerRequests{}}, // the client left
		{es[1].Address, Response{Status: "502", Complete: true}, metrics.WorkerRequests{},
			metrics.WorkerRequests{All: 1, Errors: 1}},
		{"10.9.9.9:1", Response{Status: "502", Complete: true}, metrics.WorkerRequests{}, metrics.WorkerRequests{}},
	} {
		before := map[string]metrics.WorkerRequests{"w0": h.requestsOf("w0"), "w1": h.requestsOf("w1")}
		request(c.served, c.response)
		for name, more := range map[string]metrics.WorkerRequests{"w0": c.w0, "w1": c.w1} {
			was := before[name]
			if got, want := h.requestsOf(name),
				(metrics.WorkerRequests{All: was.All + more.All, Errors: was.Errors + more.Errors,
					Incomplete: was.Incomplete + more.Incomplete}); got != want {
				t.Errorf("%s after %+v served by %q: %+v, want %+v", name, c.response, c.served, got, want)
			}
		}
	}
}

// TestWorkerRequestsOfTwoLegs: the prefill and the decode worker of a request both count it.
func TestWorkerRequestsOfTwoLegs(t *testing.T) {
	es := workers(2)
	es[0].Role, es[1].Role = pool.Prefill, pool.Decode
	h := newHouse(t, es...)
	r := h.route(completion("m", tokens(0, 16)))
	r.Free()
	r.Ended(Response{Status: "500", Complete: true})
	for _, name := range []string{"w0", "w1"} {
		if got := h.requestsOf(name); got != (metrics.WorkerRequests{All: 1, Errors: 1}) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestWorkerRequestsAreForgotten: a worker that gets the number of one that left starts at zero, even if a request of
// the old one ends later.
func TestWorkerRequestsAreForgotten(t *testing.T) {
	h := newHouse(t, workers(1)...)
	h.pool.Watch(h.Router)
	var late []*Route
	for range 3 {
		r := h.route(completion("m", tokens(0, 16)))
		late = append(late, r)
	}
	late[0].Free()
	late[0].Ended(Response{Status: "200", Complete: true})
	s := h.pool.Acquire()
	old := s.Workers[0].Worker
	s.Release()
	h.pool.Update(nil)
	if got := h.WorkerRequests(old); got != (metrics.WorkerRequests{}) {
		t.Errorf("of a worker that left: %+v", got)
	}
	es := workers(1)
	es[0].Name = "new"
	h.pool.Update(es)
	s = h.pool.Acquire()
	if s.Workers[0].Worker != old {
		t.Fatalf("the new worker has number %d, not %d", s.Workers[0].Worker, old)
	}
	s.Release()
	for _, r := range late[1:] {
		r.Free()
		r.Ended(Response{Status: "500", Complete: true})
	}
	if got := h.requestsOf("new"); got != (metrics.WorkerRequests{}) {
		t.Errorf("the new worker has the old one's: %+v", got)
	}
	r := h.route(completion("m", tokens(0, 16)))
	r.Free()
	r.Ended(Response{Status: "200", Complete: true})
	if got := h.requestsOf("new"); got != (metrics.WorkerRequests{All: 1}) {
		t.Errorf("the new worker's own: %+v", got)
	}
}
