package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/pool"
	"kvepp/tokenizer"
)

// TestPickTimeout: a prompt that cannot be tokenized in time is routed by load, as soon as the time is over; one that is short
// enough, or whose turn comes in time, is not.
func TestPickTimeout(t *testing.T) {
	model, err := tokenizer.Load("../e2e/models/tiny-bytelevel", tokenizer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHouse(t, workers(2)...)
		h.cfg.Models = map[string]*tokenizer.Model{"m": model}
		h.cfg.PickTimeout = 2 * time.Second
		request := func(size int) *Request {
			return &Request{Path: "/v1/completions", Body: fmt.Appendf(nil, `{"model":"m","prompt":%q}`, strings.Repeat("a long story ", size/13))}
		}
		occupy := func(n int) {
			for range n {
				h.slots <- struct{}{}
			}
		}
		occupy(cap(h.slots)) // all are busy with prompts that take for ever
		for _, c := range []struct {
			name   string
			size   int
			free   time.Duration // when one of them is done after all
			took   time.Duration
			reason Reason
		}{
			{"short", 1000, 0, 0, ReasonKV},
			{"long", 100_000, 0, 2 * time.Second, ReasonPickTimeout},
			{"long, in time", 100_000, time.Second, time.Second, ReasonKV},
			{"no deadline", 100_000, 0, 0, ReasonKV},
		} {
			if c.name == "no deadline" {
				h.cfg.PickTimeout = 0
			}
			if c.free > 0 {
				time.AfterFunc(c.free, func() { <-h.slots })
			}
			start := time.Now()
			r, err := h.Route(t.Context(), request(c.size))
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); r.Reason != c.reason || took != c.took {
				t.Errorf("%s: reason %s after %v, want %s after %v", c.name, r.Reason, took, c.reason, c.took)
			}
			if r.Reason != ReasonKV && r.PromptTokens != len(request(c.size).Body)/bytesPerToken {
				t.Errorf("%s: counts for %d tokens", c.name, r.PromptTokens)
			}
			r.Free()
			if c.free > 0 {
				occupy(1)
			}
		}
		h.cfg.PickTimeout = 2 * time.Second
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := h.Route(ctx, request(100_000)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a client that has gone: %v", err)
		}
		if h.book.Len() != 0 {
			t.Errorf("%d bookings are left", h.book.Len())
		}
	})
}

// panicking is a log whose writer has a defect.
type panicking struct{ slog.Handler }

func (panicking) Enabled(context.Context, slog.Level) bool  { return true }
func (panicking) Handle(context.Context, slog.Record) error { panic("defect") }

// TestPanicAfterBooking: what was booked is not booked for ever.
func TestPanicAfterBooking(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.log = slog.New(panicking{})
	defer func() {
		if recover() == nil || h.book.Len() != 0 {
			t.Errorf("%d bookings are left", h.book.Len())
		}
	}()
	h.Route(t.Context(), &Request{Path: "/v1/files", Without: ReasonNoBody})
	t.Error("no panic came")
}

// TestPanicWhileBooking: nor was what was booked before the choice was made.
func TestPanicWhileBooking(t *testing.T) {
	for name, endpoints := range map[string][]pool.Endpoint{"one leg": workers(2), "two": disaggregated(1, 1), "both ways": append(workers(1), disaggregated(1, 1)...)} {
		h := newHouse(t, endpoints...)
		h.Router.index = nil // which is asked after a booking
		func() {
			defer func() {
				if recover() == nil || h.book.Len() != 0 {
					t.Errorf("%s: %d bookings are left", name, h.book.Len())
				}
			}()
			h.Route(t.Context(), &Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"x"}`)})
			t.Errorf("%s: no panic came", name)
		}()
	}
}

// TestPanicWhileTokenizing: a defect beside the request's goroutine costs that request its tokens, and nothing else.
func TestPanicWhileTokenizing(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.Models = map[string]*tokenizer.Model{"m": new(tokenizer.Model)} // which nobody loaded
	h.cfg.PickTimeout = time.Minute
	for _, size := range []int{100, 100_000} {
		r, err := h.Route(t.Context(), &Request{Path: "/v1/completions", Body: fmt.Appendf(nil, `{"model":"m","prompt":%q}`, strings.Repeat("x", size))})
		if err != nil || r.Reason != ReasonPanic {
			t.Fatalf("%d bytes: %v %+v", size, err, r)
		}
		r.Free()
	}
	if len(h.slots) != 0 {
		t.Errorf("%d slots are still taken", len(h.slots))
	}
}

// TestPanicKeepsWhatWasAsked: a request that lost its tokens to a defect still goes only where it may.
func TestPanicKeepsWhatWasAsked(t *testing.T) {
	es := workers(2)
	es[1].Taints = []string{"gpu"}
	h := newHouse(t, es...)
	h.cfg.Models = map[string]*tokenizer.Model{"m": new(tokenizer.Model)} // which nobody loaded
	for range 20 {
		r := h.route(&Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"x","nvext":{"backend_instance_id":100,"routing_constraints":{"required_taints":["gpu"]}}}`)})
		if r.Reason != ReasonPanic || r.Name != "w1" {
			t.Errorf("%s, to %s", r.Reason, r.Name)
		}
		if strings.Contains(string(r.Body), "backend_instance_id") || r.Body == nil {
			t.Errorf("a pin that is not followed goes on: %q", r.Body)
		}
		r.Free()
	}
}
