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
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/router/budget"
)

// budgeted returns a house with the memory budget of a 2 GiB container, and a function that returns a request of a
// given size.
func budgeted(t *testing.T) (*house, func(size int) *Request) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := newHouse(t, workers(2)...)
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	h.cfg.PickTimeout = 2 * time.Second
	h.cfg.Memory = budget.New(448 << 20)
	return h, func(size int) *Request {
		return &Request{
			Path: "/v1/completions",
			Body: fmt.Appendf(nil, `{"model":"m","prompt":%q}`, strings.Repeat("a long story ", size/13)),
		}
	}
}

// nothingHeld fails the test if memory or a slot is still taken.
func (h *house) nothingHeld() {
	h.t.Helper()
	if n := h.cfg.Memory.Used(); n != 0 || len(h.slots.all)+len(h.slots.large) != 0 {
		h.t.Errorf(
			"%d bytes, %d slots and %d for large bodies are still taken",
			n,
			len(h.slots.all),
			len(h.slots.large),
		)
	}
}

// TestPickTimeout: if a body gets no slot or no memory within PickTimeout, the request is routed by load at that
// moment. Short bodies need no slot. Large bodies do not delay medium ones.
func TestPickTimeout(t *testing.T) {
	const short, medium, large = 1000, 100_000, 2 << 20
	for _, c := range []struct {
		name    string
		slots   bool // true: all slots for bodies of busy bytes are taken; false: all memory to read them
		busy    int
		size    int
		free    time.Duration // when the slots or memory become free; 0: never
		timeout time.Duration
		took    time.Duration
		reason  Reason
	}{
		{"a short one needs no slot", true, medium, short, 0, 2 * time.Second, 0, ReasonKV},
		{"no slot", true, medium, medium, 0, 2 * time.Second, 2 * time.Second, ReasonPickTimeout},
		{"a slot in time", true, medium, medium, time.Second, 2 * time.Second, time.Second, ReasonKV},
		{"a slot, without a deadline", true, medium, medium, time.Hour, 0, time.Hour, ReasonKV},
		{"no slot for a large one", true, large, large, 0, 2 * time.Second, 2 * time.Second, ReasonPickTimeout},
		{"large ones keep no others waiting", true, large, medium, 0, 2 * time.Second, 0, ReasonKV},
		{"no memory for a short one", false, medium, short, 0, 2 * time.Second, 2 * time.Second, ReasonPickTimeout},
		{"memory in time", false, medium, medium, time.Second, 2 * time.Second, time.Second, ReasonKV},
		{"memory, without a deadline", false, large, large, time.Hour, 0, time.Hour, ReasonKV},
		{"the memory of large ones is not that of others", false, large, medium, 0, 2 * time.Second, 0, ReasonKV},
	} {
		synctest.Test(t, func(t *testing.T) {
			h, request := budgeted(t)
			h.cfg.PickTimeout = c.timeout
			share, slot := h.cfg.Memory.ReadShare(c.busy), h.slots.of(c.busy)
			free := func() { share.Give(448 << 20) }
			if c.slots {
				for range cap(slot) {
					slot <- struct{}{}
				}
				free = func() {
					for range cap(slot) {
						<-slot
					}
				}
			} else if !share.TryTake(448 << 20) {
				t.Fatal("there is no memory")
			}
			if c.free > 0 {
				time.AfterFunc(c.free, free)
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
			if c.free == 0 {
				free()
			}
			h.nothingHeld()
		})
	}
}

// TestPickTimeoutOfAll: without tokenizers, too, parsing needs a slot and is subject to PickTimeout.
func TestPickTimeoutOfAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, request := budgeted(t)
		h.cfg.Models = nil
		for range cap(h.slots.all) {
			h.slots.all <- struct{}{}
		}
		r := h.route(request(100_000))
		if r.Reason != ReasonPickTimeout {
			t.Errorf("a body was parsed without a slot: %s", r.Reason)
		}
		r.Free()
	})
}

// TestClientLeavesWhileItWaits: a client that leaves while it waits holds nothing afterwards.
func TestClientLeavesWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, request := budgeted(t)
		for _, memory := range []bool{true, false} {
			if share := h.cfg.Memory.ReadShare(100_000); memory {
				share.Add(448 << 20)
				defer share.Give(448 << 20)
			} else {
				for range cap(h.slots.all) {
					h.slots.all <- struct{}{}
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := h.Route(ctx, request(100_000)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("a client that has gone: %v", err)
			}
			if n := h.cfg.Memory.Used(); h.book.Len() != 0 || n != 448<<20 {
				t.Errorf("%d bookings are left, and %d bytes", h.book.Len(), n)
			}
		}
	})
}

// TestAbandonedWorkHoldsItsShare: abandoned work gets a signal to end. It keeps its slot and memory until it ends, also
// by a panic.
func TestAbandonedWorkHoldsItsShare(t *testing.T) {
	const size = 100_000
	for _, panics := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h, _ := budgeted(t)
			until := time.Now().Add(time.Second)
			g, err := h.begin(t.Context(), until, size)
			if err != nil {
				t.Fatal(err)
			}
			end, told := make(chan struct{}), false
			_, err = within(t.Context(), until, &g, func(ctx context.Context) (int, error) {
				<-ctx.Done()
				told = true
				<-end
				if panics {
					panic("defect")
				}
				return 1, nil
			})
			g.leaveSlot()
			g.end()
			synctest.Wait()
			if !errors.Is(err, errPickTimeout) || !told {
				t.Errorf("%v; it was told: %t", err, told)
			}
			if n := h.cfg.Memory.Used(); n != body.ReadCost(size)+size || len(h.slots.all) != 1 {
				t.Errorf("%d bytes and %d slots are taken", n, len(h.slots.all))
			}
			close(end)
			synctest.Wait()
			h.nothingHeld()
		})
	}
}

// TestWaitingPromptsAreCounted: the memory that a request keeps while it waits for a worker counts until it is routed.
// The memory for reading is free for others meanwhile.
func TestWaitingPromptsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, request := budgeted(t)
		p, err := h.prepare(t.Context(), request(100_000), nil)
		if err != nil || p.reason != ReasonKV {
			t.Fatal(err, p.reason)
		}
		if n := h.cfg.Memory.Held.Used(); n < 4*len(p.tokens[0].IDs) || n > 8*len(p.tokens[0].IDs) ||
			h.cfg.Memory.Used() != n {
			t.Errorf("%d bytes are held for %d tokens, of %d in all", n, len(p.tokens[0].IDs), h.cfg.Memory.Used())
		}
		p.heldIn.Give(p.held)
		if p, err = h.prepare(t.Context(), request(2<<20), nil); err != nil || p.reason != ReasonKV {
			t.Fatal(err, p.reason)
		}
		if h.cfg.Memory.Held.Used() != 0 || h.cfg.Memory.Used() != p.held {
			t.Errorf("of %d bytes %d are held with the bodies of others", h.cfg.Memory.Used(), h.cfg.Memory.Held.Used())
		}
		p.heldIn.Give(p.held)
		h.route(request(100_000)).Free()
		for _, bad := range []string{`{"model":`, `{"model":"m"}`} {
			if _, err := h.Route(t.Context(),
				&Request{Path: "/v1/completions", Body: []byte(bad + strings.Repeat(" ", 100_000))}); err == nil {
				t.Error("a body that is no request is routed")
			}
		}
		h.nothingHeld()
	})
}

// panicking is a log writer that panics.
type panicking struct{ slog.Handler }

func (panicking) Enabled(context.Context, slog.Level) bool  { return true }
func (panicking) Handle(context.Context, slog.Record) error { panic("defect") }

// TestPanicAfterBooking: a panic after the booking frees the booking.
func TestPanicAfterBooking(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.log = slog.New(panicking{})
	defer func() {
		if recover() == nil || h.book.Len() != 0 {
			t.Errorf("%d bookings are left", h.book.Len())
		}
	}()
	h.Route(t.Context(), &Request{Path: "/v1/files", BodylessReason: ReasonNoBody})
	t.Error("no panic came")
}

// TestPanicWhileBooking: a panic between two bookings frees the first one.
func TestPanicWhileBooking(t *testing.T) {
	for name, endpoints := range map[string][]pool.Endpoint{"one leg": workers(2), "two": disaggregated(1, 1),
		"both ways": append(workers(1), disaggregated(1, 1)...)} {
		h := newHouse(t, endpoints...)
		h.Router.index = nil // used after a booking
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

// TestPanicWhileTokenizing: after a panic in the tokenizer's goroutine the request is routed by load, and kvepp goes
// on.
func TestPanicWhileTokenizing(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.Models = map[string]*prompt.Model{"m": new(prompt.Model)} // not loaded
	h.cfg.PickTimeout = time.Minute
	for _, size := range []int{100, 100_000} {
		r, err := h.Route(
			t.Context(),
			&Request{
				Path: "/v1/completions",
				Body: fmt.Appendf(nil, `{"model":"m","prompt":%q}`, strings.Repeat("x", size)),
			},
		)
		if err != nil || r.Reason != ReasonPanic {
			t.Fatalf("%d bytes: %v %+v", size, err, r)
		}
		r.Free()
	}
	h.nothingHeld()
}

// TestPanicKeepsWhatWasAsked: after a panic in the tokenizer the request's constraints still apply.
func TestPanicKeepsWhatWasAsked(t *testing.T) {
	es := workers(2)
	es[1].Taints = []string{"gpu"}
	h := newHouse(t, es...)
	h.cfg.Models = map[string]*prompt.Model{"m": new(prompt.Model)} // not loaded
	for range 20 {
		r := h.route(
			&Request{
				Path: "/v1/completions",
				Body: []byte(
					`{"model":"m","prompt":"x","nvext":{"backend_instance_id":100,` +
						`"routing_constraints":{"required_taints":["gpu"]}}}`,
				),
			},
		)
		if r.Reason != ReasonPanic || r.Name != "w1" {
			t.Errorf("%s, to %s", r.Reason, r.Name)
		}
		if strings.Contains(string(r.Body), "backend_instance_id") || r.Body == nil {
			t.Errorf("a pin that is not followed goes on: %q", r.Body)
		}
		r.Free()
	}
}
