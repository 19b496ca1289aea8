package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/test/harness/stack"
)

// TestWorkerMetrics checks blocks, subscription, age of the last event, requests and failures of each worker, under its
// name, with real Envoy, two stock engines and a server that answers 500; and a series that joins the name to the id in
// Dynamo's metrics. A worker that leaves has no series.
func TestWorkerMetrics(t *testing.T) {
	engines := stockEngines(t, 2, "-token-time", "20ms")
	failing := httptest.NewServer(
		http.HandlerFunc(
			func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		),
	)
	t.Cleanup(failing.Close)
	address := failing.Listener.Addr().String()
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    []string{engines[0].Address, engines[1].Address, address},
			KveppFlags: []string{"--engine=vllm"},
		},
	)
	list := "endpoints:\n" + engines[0].Entry()
	deaf := fmt.Sprintf("- {name: failing, address: %q, kvEvents: \"tcp://127.0.0.1:1\", blockSize: 16}\n", address)
	if err := s.ReplaceEndpoints(list + engines[1].Entry() + deaf); err != nil {
		t.Fatal(err)
	}
	var all map[string]float64
	wait := func(what string, ok func() bool) {
		t.Helper()
		eventually(t, func() (err error) {
			if all, err = s.Metrics(t.Context()); err == nil && !ok() {
				shown := ""
				for name, v := range all {
					if strings.HasPrefix(name, "kvepp_worker_") {
						shown += fmt.Sprintf("\n%s %v", name, v)
					}
				}
				err = fmt.Errorf("not yet: %s%s", what, shown)
			}
			return err
		})
	}
	of := func(name, worker string, labels ...string) (float64, bool) {
		key := fmt.Sprintf(
			"kvepp_worker_%s{%s}",
			name,
			strings.Join(append(append([]string{}, labels...), `dp_rank="0"`, fmt.Sprintf("worker=%q", worker)), ","),
		)
		v, there := all[key]
		return v, there
	}
	is := func(want float64, name, worker string, labels ...string) bool {
		v, there := of(name, worker, labels...)
		return there && v == want
	}
	wait("both engines connected, and the failing one not", func() bool {
		age, there := of("last_event_age_seconds", "engine-0")
		return there && math.IsNaN(age) && is(1, "events_connected", "engine-0") &&
			is(1, "events_connected", "engine-1") &&
			is(0, "events_connected", "failing") &&
			is(0, "blocks", "engine-0")
	})
	responses := map[string]int{}
	for responses["engine-0/0"] < 2 || responses["engine-1/0"] < 2 || responses["failing/0"] < 2 {
		a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), len(responses)%2 == 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		responses[a.Worker]++
	}
	wait("all requests counted", func() bool {
		for _, name := range []string{"engine-0", "engine-1", "failing"} {
			failures := 0
			if name == "failing" {
				failures = responses["failing/0"]
			}
			if !is(float64(responses[name+"/0"]), "requests_total", name) ||
				!is(float64(failures), "failures_total", name, `cause="status"`) ||
				!is(0, "failures_total", name, `cause="incomplete"`) {
				return false
			}
		}
		return true
	})
	wait("blocks and an age", func() bool {
		blocks, _ := of("blocks", "engine-0")
		age, _ := of("last_event_age_seconds", "engine-0")
		never, there := of("last_event_age_seconds", "failing")
		return blocks > 10 && age >= 0 && age < 600 && there && math.IsNaN(never) && is(0, "blocks", "failing")
	})
	for _, e := range engines {
		id := fmt.Sprint(kvblock.InstanceID(e.Name))
		joined := fmt.Sprintf(
			`kvepp_worker_info{address=%q,dp_rank="0",model="",worker=%q,worker_id=%q,worker_type="decode"}`,
			e.Address,
			e.Name,
			id,
		)
		other := fmt.Sprintf(
			`dynamo_frontend_worker_active_prefill_tokens{dp_rank="0",worker_id=%q,worker_type="decode"}`,
			id,
		)
		if _, there := all[other]; all[joined] != 1 || !there {
			t.Errorf("%s is %v, and %s exists: %v", joined, all[joined], other, there)
		}
	}

	// breaks makes the engine break off a response.
	breaks := func(off func(client context.CancelFunc)) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		body, err := json.Marshal(
			map[string]any{"model": stack.Model, "messages": novel(), "stream": true, "max_tokens": 10000},
		)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(ctx, "POST", s.Envoy.URL+"/v1/chat/completions", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := resp.Body.Read(make([]byte, 1)); err != nil || resp.Header.Get("x-kvepp-worker") != "engine-0/0" {
			t.Fatalf("%v, from %s", err, resp.Header.Get("x-kvepp-worker"))
		}
		off(cancel)
		if _, err := io.Copy(io.Discard, resp.Body); err == nil {
			t.Error("the response was complete")
		}
	}
	if err := s.ReplaceEndpoints(list); err != nil {
		t.Fatal(err)
	}
	wait("the others gone", func() bool {
		for _, name := range []string{"info", "blocks", "events_connected", "last_event_age_seconds", "requests_total",
			"failures_total"} {
			for key := range all {
				if strings.HasPrefix(key, "kvepp_worker_"+name+"{") && !strings.Contains(key, `worker="engine-0"`) {
					return false
				}
			}
		}
		return true
	})
	served, _ := of("requests_total", "engine-0")
	breaks(func(client context.CancelFunc) { client() })
	wait("the response that the client broke off", func() bool { return is(served+1, "requests_total", "engine-0") })
	breaks(func(context.CancelFunc) { engines[0].Close() })
	wait("the response that the engine broke off", func() bool {
		return is(served+2, "requests_total", "engine-0") &&
			is(1, "failures_total", "engine-0", `cause="incomplete"`) &&
			is(0, "events_connected", "engine-0")
	})
}
