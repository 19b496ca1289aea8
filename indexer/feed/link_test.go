package feed

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/pool"
)

// TestLinkLines: kvepp logs the first connection, each time without a connection that lasts 10 s, and the connection
// after it. It does not log shorter interruptions.
func TestLinkLines(t *testing.T) {
	wait := func(d time.Duration) { <-time.After(d); synctest.Wait() }
	for _, c := range []struct {
		name string
		do   func(l *link)
		want []string
	}{
		{"connected at once", func(l *link) { l.begin(); l.up(); wait(time.Hour) }, []string{"connected"}},
		{"connected before begin", func(l *link) { l.up(); l.begin(); wait(time.Hour) },
			[]string{"connected"}},
		{"9 s", func(l *link) { l.begin(); wait(9 * time.Second); l.up(); wait(time.Hour) }, []string{"connected"}},
		{"never", func(l *link) { l.begin(); wait(time.Hour) }, []string{"late"}},
		{"late", func(l *link) { l.begin(); wait(11 * time.Second); l.up() }, []string{"late", "connected"}},
		{"short interruptions", func(l *link) {
			l.begin()
			for range 100 {
				l.up()
				wait(time.Second)
				l.down()
				wait(9 * time.Second)
			}
			l.up()
			wait(time.Hour)
		}, []string{"connected"}},
		{"a long interruption", func(l *link) { l.begin(); l.up(); l.down(); wait(time.Hour); l.up() },
			[]string{"connected", "late", "connected"}},
		{"the worker leaves", func(l *link) {
			l.begin()
			l.leave()
			wait(time.Hour)
			l.down()
			wait(time.Hour)
			l.up()
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []string
				l := &link{
					connected: func() { got = append(got, "connected") },
					late:      func(time.Duration) { got = append(got, "late") },
				}
				c.do(l)
				if !slices.Equal(got, c.want) {
					t.Errorf("%q, want %q", got, c.want)
				}
				l.leave()
			})
		})
	}
}

// Subscription returns whether the worker is connected, and when its last event was applied.
func TestSubscriptionState(t *testing.T) {
	var log logtest.Log
	h := newFixture(t, &log)
	e := newEngine(t, 0)
	h.update(e, 4)
	h.connected(1)
	s := h.pool.Acquire()
	w := s.Workers[0]
	s.Release()
	if got, ok := h.Subscription(w.Worker); !ok || !got.Connected || !got.LastEvent.IsZero() {
		t.Errorf("before any event: %+v, %v", got, ok)
	}
	if n := log.Count(fmt.Sprintf("level=INFO msg=\"connected to a worker's KV events\" worker=%s address=%s",
		w.String(), e.address())); n != 1 {
		t.Errorf("%d lines about the connection:\n%s", n, log.String())
	}
	began := time.Now()
	eventually(
		t,
		"an event",
		func() bool { e.publish(0, stored(1, nil, 4, 1, 2, 3, 4)); return h.count("stored", "applied") > 0 },
	)
	if got, _ := h.Subscription(w.Worker); got.LastEvent.Before(began.Add(-time.Second)) ||
		time.Since(got.LastEvent) > time.Hour {
		t.Errorf("the last event was at %v, now it is %v", got.LastEvent, time.Now())
	}
	e.socket.Close()
	eventually(t, "the disconnect", func() bool { got, _ := h.Subscription(w.Worker); return !got.Connected })
	h.pool.Update(nil)
	if got, ok := h.Subscription(w.Worker); ok {
		t.Errorf("a worker that left has a subscription: %+v", got)
	}
}

// TestSilentWorkerLine: the log line about a silent worker mentions predictions only if kvepp makes them, and names the
// flag of the configured engine.
func TestSilentWorkerLine(t *testing.T) {
	for _, c := range []struct {
		name, engine string
		endpoint     pool.Endpoint
		want, not    []string
	}{
		{"block size known", "vllm", pool.Endpoint{BlockSize: 16},
			[]string{"predicts its cache from the requests sent to it. ", `engine_flag="--kv-events-config`,
				"enable_kv_cache_events"}, []string{"no_block_size", "dynamo"}},
		{"block size not known", "vllm", pool.Endpoint{}, []string{"kvepp routes to it by load (reason no_block_size)",
			"--kv-cache-block-size"}, []string{"dynamo"}},
		{"another tokenizer", "vllm", pool.Endpoint{BlockSize: 16, OtherTokenizer: true},
			[]string{"kvepp routes to it by load. "}, []string{"predicts"}},
		{"SGLang", "sglang", pool.Endpoint{BlockSize: 16}, []string{`engine_flag="--kv-events-config`},
			[]string{"dynamo", "enable_kv_cache_events"}},
		{"TensorRT-LLM", "trtllm", pool.Endpoint{BlockSize: 16}, []string{"event_buffer_max_size"},
			[]string{"dynamo", "--kv-events-config"}},
		{"Dynamo", "dynamo", pool.Endpoint{BlockSize: 16}, []string{"dynamo.vllm"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log logtest.Log
			h := newFixture(t, &log)
			h.config.Engine = c.engine
			e := newEngine(t, 0)
			c.endpoint.Name, c.endpoint.Address, c.endpoint.KVEvents = "a", "10.0.0.1:8000", e.address()
			h.pool.Update([]pool.Endpoint{c.endpoint})
			h.connected(1)
			for range silenceRequests {
				h.PromptComputed(0, 1000, 16)
			}
			h.silence[0].expired() // the minute is over
			text := log.String()
			if log.Count("sent no KV event") != 1 || log.Count("is prefix caching on?") != 1 ||
				log.Count("events="+e.address()) != 1 {
				t.Errorf("want exactly one line:\n%s", text)
			}
			for _, want := range c.want {
				if !strings.Contains(strings.ReplaceAll(text, `\"`, `"`), want) {
					t.Errorf("no %q in\n%s", want, text)
				}
			}
			for _, not := range c.not {
				if strings.Contains(text, not) {
					t.Errorf("%q in\n%s", not, text)
				}
			}
		})
	}
}
