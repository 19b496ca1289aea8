package router

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/router/eject"
	"kvepp/router/ladder"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

// books returns all that a dry run must leave as it is: series, loads, records, sessions and the index.
func (h *house) books(t *testing.T, sessions *session.Table) string {
	t.Helper()
	families, err := h.metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, f := range families {
		if name := f.GetName(); strings.HasPrefix(name, "kvepp_") || strings.HasPrefix(name, "dynamo_") {
			fmt.Fprintln(&all, name, f.GetMetric())
		}
	}
	fmt.Fprintln(&all, h.book.Loads(nil), h.book.Len(), len(h.Records(99, Query{})), h.index.Stats(),
		sessions.Active(), sessions.Stats(), h.Queues())
	return all.String()
}

// TestExplain: a dry run decides what the next request gets, and changes nothing, with all features that keep state.
func TestExplain(t *testing.T) {
	h := newHouse(t, workers(3)...)
	sessions := session.NewTable(session.Config{TTL: time.Hour})
	frac := 1.0
	h.Router = New(Config{
		Scoring: scoring.DefaultConfig(), Keep: 9, Sessions: sessions,
		Eject: eject.New(eject.Config{On: true, ConsecutiveFailures: 3, FailurePercent: 50, MaxPercent: 50,
			Time: time.Second},
			h.log),
		Predict: Predict{TTL: time.Hour},
		Ladder:  &Ladder{Sums: new(ladder.Ladder), Seen: ladder.NewSeen(1 << 20)},
		Queue:   &queue.RoomConfig{Bound: 9, Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, &frac))},
	}, h.pool, h.index, h.book, h.metrics, slog.New(slog.NewTextHandler(io.Discard, nil)))
	h.warm("w1", 0, tokens(0, 40), blocksOfFour)
	h.warm("w2", 0, tokens(0, 8), blocksOfFour)
	h.pool.Watch(h.cfg.Eject)
	defer h.route(completion("m", tokens(500, 4))).Free()

	withSession := func(name string) *Request {
		req := completion("m", tokens(0, 42))
		req.Hints.Session = name
		return req
	}
	before := h.books(t, sessions)
	var first *Explanation
	var err error
	for range 3 {
		if first, err = h.Explain(t.Context(), withSession("s")); err != nil {
			t.Fatal(err)
		}
	}
	if after := h.books(t, sessions); after != before {
		t.Errorf("a dry run changes\n%s\nto\n%s", before, after)
	}
	route := h.route(withSession("s"))
	route.Free()
	want := h.Records(1, Query{})[0]
	if got := first.Record; got.Name != "w1" || got.PredictedCachedTokens != 40 || got.Session != session.New ||
		first.WouldWait || !reflect.DeepEqual(got.Costs, want.Costs) || got.Name != want.Name ||
		first.Computes.Name != "w1" {
		t.Errorf("dry run %+v, the request then %+v", got, want)
	}
	if x, err := h.Explain(t.Context(), withSession("s")); err != nil || x.Record.Session != session.Kept {
		t.Errorf("the session is known: %+v, %v", x, err)
	}
}

// TestExplainRefusals: a body that is no request is an error, and any other refusal an explanation.
func TestExplainRefusals(t *testing.T) {
	h := newHouse(t, workers(1)...)
	if x, err := h.Explain(t.Context(), completion("other", tokens(0, 8))); err != nil ||
		!errors.Is(x.Refused, ErrUnknownModel) || x.Record.Error == "" || x.Record.Name != "" {
		t.Errorf("unknown model: %+v, %v", x.Record, err)
	}
	invalid := (*body.Error)(nil)
	if _, err := h.Explain(t.Context(), &Request{Path: "/v1/completions", Body: []byte("{")}); err == nil ||
		!errors.As(err, &invalid) {
		t.Errorf("no JSON: %v", err)
	}
	h.pool.Update([]pool.Endpoint{})
	if x, err := h.Explain(t.Context(), completion("m", tokens(0, 8))); err != nil || x.Record.Error == "" {
		t.Errorf("no endpoint: %+v, %v", x, err)
	}
}

// TestExplainWaits: a dry run says that a request would wait, and does not wait.
func TestExplainWaits(t *testing.T) {
	endpoints := workers(1)
	endpoints[0].MaxNumBatchedTokens = 10
	h := newHouse(t, endpoints...)
	frac := 1.0
	h.Router = New(Config{Scoring: scoring.DefaultConfig(),
		Queue: &queue.RoomConfig{Bound: 9, Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, &frac))},
	}, h.pool, h.index, h.book, metrics.New(), slog.New(slog.NewTextHandler(io.Discard, nil)))
	for _, want := range []bool{false, true} {
		x, err := h.Explain(t.Context(), completion("m", tokens(0, 20)))
		if err != nil || x.WouldWait != want || x.Record.Name != "w0" {
			t.Errorf("%+v, %v: want waiting %v", x, err, want)
		}
		if !want {
			defer h.route(completion("m", tokens(0, 20))).Free()
		}
	}
}
