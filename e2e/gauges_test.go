package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// instanceOf returns Dynamo's id of the worker behind a frontend.
func instanceOf(t *testing.T, w *stack.Worker) string {
	t.Helper()
	resp, err := http.Get("http://" + w.Address + "/health")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var health struct {
		Instances []struct {
			Namespace, Endpoint string // the list has workers of other frontends too

			ID json.Number `json:"instance_id"` // uses all 64 bits
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&health); err != nil {
		t.Fatal(err)
	}
	for _, in := range health.Instances {
		if in.Namespace == w.Namespace && in.Endpoint == "generate" {
			return in.ID.String()
		}
	}
	t.Fatalf("%s has no instance", w.Name)
	return ""
}

// asking returns a function that sends a request directly to a worker, without Envoy and kvepp, and returns when it is
// answered or ctx ends.
func asking(t *testing.T, ctx context.Context, w *stack.Worker, text string, extra map[string]any) func() {
	t.Helper()
	header := http.Header{"X-Dynamo-Worker-Instance-Id": {instanceOf(t, w)}, "X-Dynamo-Dp-Rank": {"0"}}
	return func() {
		a, err := stack.Chat(
			ctx,
			http.DefaultClient,
			"http://"+w.Address,
			header,
			[]stack.Message{{Role: "user", Content: text}},
			true,
			extra,
		)
		if ctx.Err() == nil && (err != nil || a.Status != http.StatusOK) {
			t.Errorf("%s, without kvepp: %v, %+v", w.Name, err, a)
		}
	}
}

// filling returns a function that fills a tenth of a worker's cache, without Envoy and kvepp: a prompt of 6,000 tokens,
// with a response that takes 90 s unless ctx ends before.
func filling(t *testing.T, ctx context.Context, w *stack.Worker) func() {
	t.Helper()
	return asking(
		t,
		ctx,
		w,
		strings.Repeat(w.Name+" is full. ", 350),
		map[string]any{"max_tokens": 9000, "ignore_eos": true},
	)
}

// metricsUntil waits until kvepp's metrics satisfy the condition.
func metricsUntil(t *testing.T, s *stack.Stack, what string, ok func(map[string]float64) bool) {
	t.Helper()
	eventually(t, func() error {
		m, err := s.Metrics(t.Context())
		if err != nil {
			return err
		}
		if !ok(m) {
			var said []string
			for name, v := range m {
				if strings.HasPrefix(name, "inference_pool_") ||
					strings.HasPrefix(name, "kvepp_engine_readings_total") ||
					strings.HasPrefix(name, "kvepp_overloaded") {
					said = append(said, fmt.Sprint(name, " ", v))
				}
			}
			slices.Sort(said)
			return fmt.Errorf("%s: %s", what, strings.Join(said, "\n"))
		}
		return nil
	})
}

// TestEnginesTellOfTheirLoad: requests that go directly to workers fill their caches. kvepp sees that in one worker's
// metrics, and for the other on Dynamo's event plane.
func TestEnginesTellOfTheirLoad(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers:    2,
			Pages:      1,
			KveppFlags: []string{"--refresh-metrics-interval", "1s", "--active-decode-blocks-threshold", "0.1"},
		},
	)
	nothingLeft(t, s)
	wait := func(what string, ok func(map[string]float64) bool) {
		t.Helper()
		metricsUntil(t, s, what, ok)
	}
	const queue0 = `inference_pool_per_pod_queue_size{model_server_pod="worker-0-rank-0",name="kvepp"}`
	asking(t, t.Context(), s.Workers[0], "A mocker has gauges once it had a request.", nil)()
	wait("the idle worker's page", func(m map[string]float64) bool {
		_, told := m[queue0]
		return told && m[`inference_pool_ready_pods{name="kvepp"}`] == 2
	})

	var around sync.WaitGroup
	fill := func(w *stack.Worker) (end func()) {
		ctx, cancel := context.WithCancel(t.Context())
		around.Go(filling(t, ctx, w))
		return cancel
	}
	for i := range 2 {
		end := fill(s.Workers[i])
		wait(s.Workers[i].Name, func(m map[string]float64) bool { return m["kvepp_overloaded_workers"] == 1 })
		for range 3 {
			if a := chat(t, s.Envoy.URL, novel(), false, nil); a.Worker != s.Workers[1-i].Name+"/0" &&
				a.Worker != s.Workers[1-i].Name {
				t.Errorf("with %s full a request went to %s", s.Workers[i].Name, a.Worker)
			}
		}
		if i == 0 {
			wait("running", func(m map[string]float64) bool {
				return m[`inference_pool_average_running_requests{name="kvepp"}`] == 1 &&
					m[`inference_pool_average_kv_cache_utilization{name="kvepp"}`] > 0.05
			})
		}
		end()
		wait("its end", func(m map[string]float64) bool { return m["kvepp_overloaded_workers"] == 0 })
	}
	ends := []func(){fill(s.Workers[0]), fill(s.Workers[1])}
	wait("both", func(m map[string]float64) bool { return m["kvepp_overloaded_workers"] == 2 })
	a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), false, nil)
	if err != nil || a.Status != http.StatusTooManyRequests {
		t.Errorf("with both full: %v, %+v", err, a)
	}
	for _, end := range ends {
		end()
	}
	around.Wait()
	wait("the end", func(m map[string]float64) bool { return m["kvepp_overloaded_workers"] == 0 })
	chat(t, s.Envoy.URL, novel(), true, nil)

	// The metrics that the Gateway API Inference Extension's own end-to-end test requires after traffic, and related
	// ones.
	const model = `{model_name="tiny",target_model_name="tiny"}`
	wait("the last response, which its client may have before it is counted", func(m map[string]float64) bool {
		return m["inference_objective_request_duration_seconds"+model] == 7
	})
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, least := range map[string]float64{
		`inference_objective_request_total{model_name="tiny",priority="0",target_model_name="tiny"}`: 7,
		`inference_objective_request_error_total{error_code="ResourceExhausted",model_name="tiny",` +
			`target_model_name="tiny"}`: 1,
		`inference_objective_running_requests{model_name="tiny"}`:        0,
		`inference_pool_average_queue_size{name="kvepp"}`:                0,
		`inference_extension_scheduler_attempts_total{status="success"}`: 7,
		`inference_extension_prefix_indexer_size`:                        1,
		`kvepp_engine_readings_total{outcome="ok"}`:                      5,
		`kvepp_unseen_load_workers`:                                      0,
		queue0:                                                           0,
	} {
		if got, there := m[name]; !there || got < least {
			t.Errorf("%s is %v", name, got)
		}
	}
	for name, least := range map[string]float64{"request_duration_seconds": 7,
		"normalized_time_per_output_token_seconds": 7, "request_sizes": 7, "response_sizes": 7, "input_tokens": 7,
		"output_tokens": 7, "prompt_cached_tokens": 7, "request_ttft_seconds": 1, "request_tpot_seconds": 1} {
		if got := m["inference_objective_"+name+model]; got < least {
			t.Errorf("inference_objective_%s counts %v answers", name, got)
		}
	}
}

// TestLoadsOverNATS: the same for workers whose event plane is NATS, also after a restart of the NATS server.
func TestLoadsOverNATS(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers:    2,
			EventPlane: "nats",
			KveppFlags: []string{"--refresh-metrics-interval", "1s", "--active-decode-blocks-threshold", "0.1"},
		},
	)
	nothingLeft(t, s)
	overloaded := func(what string, want float64) {
		t.Helper()
		metricsUntil(t, s, what, func(m map[string]float64) bool { return m["kvepp_overloaded_workers"] == want })
	}
	for i, w := range s.Workers {
		ctx, end := context.WithCancel(t.Context())
		var around sync.WaitGroup
		around.Go(filling(t, ctx, w))
		overloaded(w.Name, 1)
		if a := chat(t, s.Envoy.URL, novel(), false, nil); a.Worker != s.Workers[1-i].Name &&
			a.Worker != s.Workers[1-i].Name+"/0" {
			t.Errorf("with %s full a request went to %s", w.Name, a.Worker)
		}
		if i == 0 {
			if err := s.RestartNATS(t.Context(), func() { overloaded("without NATS", 0) }); err != nil {
				t.Fatal(err)
			}
			overloaded(w.Name+", with NATS again", 1)
		}
		end()
		around.Wait()
		overloaded("its end", 0)
	}
}
