package feed

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/pool"
)

func TestHearing(t *testing.T) {
	requests := func(h *hearing, n int, every time.Duration) {
		for range n {
			h.request()
			<-time.After(every) // of the bubble, which does not wait
		}
		synctest.Wait()
	}
	for _, c := range []struct {
		name string
		do   func(h *hearing)
		want []bool
	}{
		{"ten requests, then a minute", func(h *hearing) { requests(h, 10, 0); <-time.After(61 * time.Second) },
			[]bool{true}},
		{"ten requests, less than a minute", func(h *hearing) { requests(h, 10, 0); <-time.After(59 * time.Second) },
			nil},
		{"ten requests that take longer than a minute", func(h *hearing) { requests(h, 10, 10*time.Second) },
			[]bool{true}},
		{"nine requests", func(h *hearing) { requests(h, 9, 0); <-time.After(time.Hour) }, nil},
		{"an event before", func(h *hearing) { h.event(); requests(h, 20, 0); <-time.After(time.Hour) }, nil},
		{"an event within the minute", func(h *hearing) {
			requests(h, 10,
				0)
			<-time.After(time.Second)
			h.event()
			<-time.After(time.Hour)
		}, nil},
		{"an event after all", func(h *hearing) {
			requests(h, 100, 0)
			<-time.After(time.Hour)
			h.event()
			h.event()
			requests(h, 100, time.Second)
		},
			[]bool{true, false}},
		{"the publisher went, and none came back",
			func(h *hearing) { h.event(); requests(h, 5, 0); h.again(); requests(h, 10, 0); <-time.After(time.Hour) },
			[]bool{true}},
		{"silent, and the connection comes and goes", func(h *hearing) {
			requests(h, 10, 0)
			<-time.After(time.Hour)
			h.again()
			requests(h, 10, 0)
			<-time.After(time.Hour)
		}, []bool{true}},
		{"the worker left", func(h *hearing) { requests(h, 10, 0); h.leave(); <-time.After(time.Hour); h.event() },
			nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []bool
				h := &hearing{changed: func(silent bool) { got = append(got, silent) }}
				c.do(h)
				synctest.Wait()
				if !slices.Equal(got, c.want) {
					t.Errorf("silence changed to %v, want %v", got, c.want)
				}
			})
		})
	}
	var none *hearing
	none.request()
	none.event()
	none.again()
	none.leave()
}

// A worker that nobody hears is known as such in the pool, and one that leaves is forgotten.
func TestSilentWorker(t *testing.T) {
	h := newHouse(t)
	e := newEngine(t, 0)
	endpoints := []pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000", KVEvents: e.address(), BlockSize: 4},
		{Name: "decoder", Address: "10.0.0.2:8000", KVEvents: e.address(), BlockSize: 4, Role: pool.Decode}}
	h.pool.Update(endpoints)
	h.connected(2)
	s := h.pool.Acquire()
	defer s.Release()
	silent := func() bool {
		now := h.pool.Acquire()
		defer now.Release()
		return now.Workers[0].Silent && !now.Workers[1].Silent
	}
	for _, w := range s.Workers {
		h.Served(w.Worker, 4, 4) // a prompt's last block is not computed whole
		for range silenceRequests {
			h.Served(w.Worker, 100, 4)
		}
	}
	if h.hearings[s.Workers[1].Worker] != nil {
		t.Error("events are expected of a worker that only decodes")
	}
	hearing := h.hearings[s.Workers[0].Worker]
	if hearing.served != silenceRequests {
		t.Errorf("%d requests were counted, want %d", hearing.served, silenceRequests)
	}
	hearing.judge() // the minute is over
	if !silent() || h.Silent() != 1 {
		t.Errorf("silent: %v, %d workers", silent(), h.Silent())
	}
	eventually(
		t,
		"an event",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.Silent() == 0 && !silent() },
	)
	hearing.again()
	for range silenceRequests {
		h.Served(s.Workers[0].Worker, 100, 0)
	}
	if hearing.served != 0 {
		t.Error("100 tokens count as a full block although the block size is not known")
	}
	for range silenceRequests {
		h.Served(s.Workers[0].Worker, 1000, 0)
	}
	hearing.judge()
	h.pool.Update(nil)
	if h.Silent() != 0 {
		t.Errorf("%d silent workers although all have left", h.Silent())
	}
	h.Served(s.Workers[0].Worker, 1000, 0)
}
