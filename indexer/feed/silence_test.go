package feed

import (
	"io"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/pool"
)

func TestSilenceDetector(t *testing.T) {
	requests := func(d *silenceDetector, n int, every time.Duration) {
		for range n {
			d.request()
			<-time.After(every) // in synctest's fake time
		}
		synctest.Wait()
	}
	for _, c := range []struct {
		name string
		do   func(d *silenceDetector)
		want []bool
	}{
		{"ten requests, then a minute", func(d *silenceDetector) { requests(d, 10, 0); <-time.After(61 * time.Second) },
			[]bool{true}},
		{"ten requests, less than a minute",
			func(d *silenceDetector) { requests(d, 10, 0); <-time.After(59 * time.Second) },
			nil},
		{"ten requests that take longer than a minute", func(d *silenceDetector) { requests(d, 10, 10*time.Second) },
			[]bool{true}},
		{"nine requests", func(d *silenceDetector) { requests(d, 9, 0); <-time.After(time.Hour) }, nil},
		{"an event before", func(d *silenceDetector) { d.event(); requests(d, 20, 0); <-time.After(time.Hour) }, nil},
		{"an event within the minute", func(d *silenceDetector) {
			requests(d, 10,
				0)
			<-time.After(time.Second)
			d.event()
			<-time.After(time.Hour)
		}, nil},
		{"an event after the silence", func(d *silenceDetector) {
			requests(d, 100, 0)
			<-time.After(time.Hour)
			d.event()
			d.event()
			requests(d, 100, time.Second)
		},
			[]bool{true, false}},
		{"the publisher disconnected, and no event followed",
			func(d *silenceDetector) {
				d.event()
				requests(d, 5, 0)
				d.disconnected()
				requests(d, 10, 0)
				<-time.After(time.Hour)
			},
			[]bool{true}},
		{"silent, and the connection comes and goes", func(d *silenceDetector) {
			requests(d, 10, 0)
			<-time.After(time.Hour)
			d.disconnected()
			requests(d, 10, 0)
			<-time.After(time.Hour)
		}, []bool{true}},
		{"the worker left", func(d *silenceDetector) {
			requests(d, 10,
				0)
			d.leave()
			<-time.After(time.Hour)
			d.event()
		},
			nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []bool
				d := &silenceDetector{changed: func(silent bool) { got = append(got, silent) }}
				c.do(d)
				synctest.Wait()
				if !slices.Equal(got, c.want) {
					t.Errorf("silence changed to %v, want %v", got, c.want)
				}
			})
		})
	}
	var none *silenceDetector
	none.request()
	none.event()
	none.disconnected()
	none.leave()
}

// The pool knows a silent worker. A silent worker that leaves does not count any more.
func TestSilentWorker(t *testing.T) {
	h := newFixture(t, io.Discard)
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
		h.PromptComputed(w.Worker, 4, 4) // the block of the last token is not full
		for range silenceRequests {
			h.PromptComputed(w.Worker, 100, 4)
		}
	}
	if h.silence[s.Workers[1].Worker] != nil {
		t.Error("a decode worker has a silence detector")
	}
	detector := h.silence[s.Workers[0].Worker]
	if detector.prompts != silenceRequests {
		t.Errorf("%d requests were counted, want %d", detector.prompts, silenceRequests)
	}
	detector.expired() // the minute is over
	if !silent() || h.Silent() != 1 {
		t.Errorf("silent: %v, %d workers", silent(), h.Silent())
	}
	eventually(
		t,
		"an event",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.Silent() == 0 && !silent() },
	)
	detector.disconnected()
	for range silenceRequests {
		h.PromptComputed(s.Workers[0].Worker, 100, 0)
	}
	if detector.prompts != 0 {
		t.Error("100 tokens count as a full block of unknown size")
	}
	for range silenceRequests {
		h.PromptComputed(s.Workers[0].Worker, 1000, 0)
	}
	detector.expired()
	h.pool.Update(nil)
	if h.Silent() != 0 {
		t.Errorf("%d silent workers although all have left", h.Silent())
	}
	h.PromptComputed(s.Workers[0].Worker, 1000, 0)
}
