package router

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/router/ladder"
	"kvepp/router/record"
	"kvepp/scoring"
)

// newShadow returns a house that records, keeps decisions and has a ladder.
func newShadow(t *testing.T, path string, endpoints ...pool.Endpoint) (*house, *record.Recorder) {
	t.Helper()
	h := newHouse(t, endpoints...)
	recorder, err := (&record.Config{Path: path, MaxBytes: 8 << 20, Files: 2}).Open(h.metrics, h.log)
	if err != nil {
		t.Fatal(err)
	}
	h.Router = New(Config{Scoring: scoring.DefaultConfig(), Keep: 9, Recorder: recorder, CountTokens: true,
		Picker: h.metrics.NewPicker(), Ladder: &Ladder{Sums: new(ladder.Ladder), Seen: ladder.NewSeen(1 << 20)},
		Metrics: h.metrics.NewRouter(metrics.Identity{})}, h.pool, h.index, h.book, h.metrics, h.log)
	return h, recorder
}

// shadow decides a request of the model m with these tokens.
func (h *house) shadow(from, n int) *Route {
	h.t.Helper()
	route, err := h.Shadow(h.t.Context(), completion("m", tokens(from, n)))
	if err != nil {
		h.t.Fatal(err)
	}
	return route
}

func answer(cached int) Response {
	return Response{Status: "200", Complete: true, PromptTokens: 40, Tokens: 3, CachedTokens: cached, Bytes: 99}
}

// TestShadow: a shadowed request is booked at the worker that serves it and at no other, from the time when it came
// until its end, and its record, ladder, metrics and recording have both choices.
func TestShadow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	h, recorder := newShadow(t, path, workers(3)...)
	h.warm("w1", 0, tokens(0, 40), blocksOfFour)
	h.warm("w2", 0, tokens(0, 8), blocksOfFour)
	load := func(name string) scoring.Load {
		s := h.pool.Acquire()
		defer s.Release()
		for _, w := range s.Workers {
			if w.Name == name {
				return h.book.Load(w.Worker)
			}
		}
		t.Fatal(name)
		return scoring.Load{}
	}

	route := h.shadow(0, 40) // kvepp would choose w1
	if h.book.Len() != 0 || route.Name != "w1" {
		t.Fatalf("%d bookings before the endpoint is known; chosen %s", h.book.Len(), route.Name)
	}
	h.warm("w2", 0, tokens(0, 40), blocksOfFour) // what the engine computes meanwhile was not cached before
	if got := h.Serve(route, "10.0.0.3:8000"); got != ShadowOther {
		t.Fatal(got)
	}
	if w1, w2 := load("w1"), load("w2"); w1.Requests != 0 || w2.Requests != 1 || w2.PrefillTokens != 32 {
		t.Fatalf("w1 %+v, w2 %+v", w1, w2)
	}
	if route.Name != "w2" || route.PredictedCachedTokens != 8 {
		t.Errorf("served by %s with %d tokens cached", route.Name, route.PredictedCachedTokens)
	}
	route.MarkPrefillCompleted()
	if load("w2").PrefillTokens != 0 {
		t.Error("the prefill goes on after the first token")
	}
	route.Free()
	route.Ended(answer(8))

	route = h.shadow(0, 40)
	if got := h.Serve(route, "10.0.0.2:8000"); got != ShadowEqual {
		t.Error(got)
	}
	route.Free()
	route.Ended(answer(40))

	if h.book.Len() != 0 {
		t.Errorf("%d bookings are left", h.book.Len())
	}
	recorder.Close(time.Minute)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], `"decode_worker_id":102,"decode_dp_rank":0},"replay":`) ||
		!strings.Contains(lines[1], `"decode_worker_id":101,`) {
		t.Errorf("%s", text)
	}
	if got := h.series(t, "kvepp_shadow_tokens_total", "of=kvepp"); got != 80 {
		t.Errorf("%v cached tokens of kvepp's choices, want 80", got)
	}
	if got := h.series(t, "kvepp_shadow_tokens_total", "of=served"); got != 48 {
		t.Errorf("%v cached tokens of served choices, want 48", got)
	}
	sum := h.cfg.Ladder.Sums.Sums()[0]
	if sum.Requests != 2 || sum.Lost[ladder.OtherPicker] != 32 || sum.Tokens[ladder.Chosen] != 48 {
		t.Errorf("%+v", sum)
	}
	records := h.Records(9, Query{})
	if len(records) != 2 || records[1].Name != "w1" || records[1].ServedBy.Worker != "w2/0" ||
		records[1].ServedBy.Outcome != ServedByOther || records[1].Outcome == nil || len(records[1].Costs) != 3 ||
		records[0].ServedBy.Worker != "w1/0" {
		for _, r := range records {
			t.Errorf("%s %+v %+v %d costs", r.Name, r.ServedBy, r.Outcome, len(r.Costs))
		}
	}
}

// TestShadowCompares: what an engine reports is compared with the prediction for that engine, and is no mistake of the
// prediction for kvepp's choice.
func TestShadowCompares(t *testing.T) {
	h, _ := newShadow(t, filepath.Join(t.TempDir(), "trace.jsonl"), workers(2)...)
	h.warm("w1", 0, tokens(0, 40), blocksOfFour)
	for _, c := range []struct {
		served string
		wrong  int // of the records so far
	}{{"10.0.0.1:8000", 0}, {"10.0.0.2:8000", 1}} {
		route := h.shadow(0, 40)
		if route.Compares() {
			t.Error("compared before it is known who serves")
		}
		h.Serve(route, c.served)
		if !route.Compares() {
			t.Errorf("%s: not compared", c.served)
		}
		route.Free()
		route.Ended(answer(8)) // w0 has none, w1 has 40
		if wrong := h.Records(9, Query{Wrong: true}); len(wrong) != c.wrong {
			t.Errorf("%s: %d wrong predictions, want %d", c.served, len(wrong), c.wrong)
		}
	}
}

// TestLadderElsewhere: what another engine than the chosen one delivers is no mistake of the index.
func TestLadderElsewhere(t *testing.T) {
	h, _ := newShadow(t, filepath.Join(t.TempDir(), "trace.jsonl"), workers(2)...)
	h.warm("w1", 0, tokens(0, 40), blocksOfFour)
	for i, served := range []string{"10.0.0.2:8000", "10.0.0.1:8000", "10.9.9.9:80"} {
		route := h.route(completion("m", tokens(0, 40)))
		h.Reconcile(route, served, 0)
		route.Free()
		route.Ended(answer(4))
		sum := h.cfg.Ladder.Sums.Sums()[0]
		if sum.Requests != uint64(i+1) || sum.Lost[ladder.IndexWrong] != 36 {
			t.Errorf("%s: %d requests, %d tokens lost by a wrong index, want 36 of the first", served, sum.Requests,
				sum.Lost[ladder.IndexWrong])
		}
	}
}

// TestShadowUnjudged: a request that kvepp cannot judge is counted by its reason, and leaves nothing behind.
func TestShadowUnjudged(t *testing.T) {
	several := workers(2)
	several[1].Address = several[0].Address
	decode := workers(1)
	decode[0].Role = pool.Decode
	for _, c := range []struct {
		want, address string
		endpoints     []pool.Endpoint
		model         string
		booked        int
	}{
		{ShadowNoAddress, "", workers(2), "m", 0},
		{ShadowUnknown, "10.9.9.9:80", workers(2), "m", 0},
		{ShadowSeveral, "10.0.0.1:8000", several, "m", 1},
		{ShadowRefused, "10.0.0.1:8000", workers(2), "other", 1}, // no endpoint serves that model
		{ShadowRefused, "10.0.0.1:8000", decode, "m", 1},         // it has no prefill worker
		{string(ReasonNotSampled), "10.0.0.1:8000", workers(2), "m", 1},
	} {
		path := filepath.Join(t.TempDir(), "trace.jsonl")
		h, recorder := newShadow(t, path, c.endpoints...)
		req := completion(c.model, tokens(0, 40))
		if c.want == string(ReasonNotSampled) {
			req.BodylessReason = ReasonNotSampled
		}
		route, err := h.Shadow(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if got := h.Serve(route, c.address); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
		if h.book.Len() != c.booked || route.Compares() != (c.booked > 0) {
			t.Errorf("%s: %d bookings", c.want, h.book.Len())
		}
		route.Free()
		route.Ended(answer(7))
		if got := h.series(t, "kvepp_shadow_requests_total", "outcome="+c.want); got != 1 {
			t.Errorf("%s is counted %v times", c.want, got)
		}
		recorder.Close(time.Minute)
		text, err := os.ReadFile(path)
		if err != nil || strings.Count(string(text), `"shadow":{"unjudged":"`+c.want+`"`) != 1 {
			t.Errorf("%s: %v, the recording is %s", c.want, err, text)
		}
		if wrong := h.Records(9, Query{Wrong: true}); c.booked == 0 && len(wrong) != 0 {
			t.Errorf("%s: a prediction for another worker is compared", c.want)
		}
		h.empty(t)
	}
	h, _ := newShadow(t, filepath.Join(t.TempDir(), "trace.jsonl"), workers(2)...)
	route := h.shadow(0, 40)
	route.Free()
	route.Ended(Response{CachedTokens: -1})
	h.empty(t)
}

// empty checks that no request holds a booking, memory or a record.
func (h *house) empty(t *testing.T) {
	t.Helper()
	h.records.mu.Lock()
	defer h.records.mu.Unlock()
	if h.book.Len() != 0 || h.cfg.Memory.Used() != 0 || h.records.running != 0 {
		t.Errorf("%d bookings, %d bytes held, %d bytes of records", h.book.Len(), h.cfg.Memory.Used(),
			h.records.running)
	}
}

func (h *house) series(t *testing.T, name, label string) float64 {
	t.Helper()
	return metricstest.Read(t, h.metrics.Registry).Of(name, label).Value()
}
