package router

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics"
	"kvepp/prompt"
	"kvepp/router/modelrewrite"
)

// kvepp exports the metrics of the Inference Extension's endpoint picker for a request, from its choice to its end.
func TestPickerMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endpoints := workers(2)
		for i := range endpoints {
			endpoints[i].Model = "" // only the operator names the model
		}
		h, sample := exportingAs(
			t,
			Config{
				Models:      map[string]*prompt.Model{"m": nil},
				Adapters:    NewAdapters(map[string]string{"sql": "m"}),
				StrictModel: true,
			},
			endpoints...)
		h.warm("w1", 0, tokens(0, 20), blocksOfFour)
		model := []string{"model_name=m", "target_model_name=m"}
		check := func(want map[string]float64, labels ...string) {
			t.Helper()
			for name, v := range want {
				if got := sample(name, labels...); got < v*0.999 || got > v*1.001 {
					t.Errorf("%s%v is %v, want %v", name, labels, got, v)
				}
			}
		}
		zero := map[string]float64{}
		for _, name := range []string{"request_total", "request_error_total", "request_duration_seconds",
			"request_ttft_seconds", "request_tpot_seconds", "normalized_time_per_output_token_seconds",
			"request_sizes", "response_sizes", "input_tokens", "output_tokens", "prompt_cached_tokens"} {
			zero["inference_objective_"+name] = 0
		}
		check(zero, model...)
		check(map[string]float64{"inference_objective_running_requests": 0}, "model_name=m")
		check(
			map[string]float64{
				"inference_extension_scheduler_e2e_duration_seconds": 0,
				"inference_extension_prefix_indexer_hit_ratio":       0,
			},
		)

		req := completion("m", tokens(0, 40))
		req.Received = time.Now()
		<-time.After(100 * time.Millisecond) // the body takes its time
		r := h.route(req)
		check(map[string]float64{"inference_objective_running_requests": 1}, "model_name=m")
		check(
			map[string]float64{"inference_objective_request_total": 1},
			"model_name=m",
			"target_model_name=m",
			"priority=0",
		)
		<-time.After(300 * time.Millisecond)
		r.MarkPrefillCompleted()
		<-time.After(600 * time.Millisecond)
		r.Free()
		r.Ended(Response{Status: "200", Bytes: 1234, PromptTokens: 40, Tokens: 10, CachedTokens: 16})
		check(map[string]float64{
			"inference_objective_request_duration_seconds": 1, "inference_objective_request_ttft_seconds": 0.4,
			"inference_objective_request_tpot_seconds":                     0.6 / 9,
			"inference_objective_normalized_time_per_output_token_seconds": 0.1,
			"inference_objective_request_sizes": float64(
				len(req.Body),
			), "inference_objective_response_sizes": 1234,
			"inference_objective_input_tokens": 40, "inference_objective_output_tokens": 10,
			"inference_objective_prompt_cached_tokens": 16,
		}, model...)
		check(map[string]float64{"inference_objective_running_requests": 0}, "model_name=m")
		check(map[string]float64{"inference_extension_prefix_indexer_hit_ratio": 0.5})
		check(map[string]float64{"inference_extension_scheduler_attempts_total": 1}, "status=success")

		// An endpoint's failure, of an adapter's request, in one piece.
		r = h.route(completion("sql", tokens(0, 40)))
		r.Free()
		r.Ended(Response{Status: "500", CachedTokens: -1})
		check(
			map[string]float64{"inference_objective_request_total": 1},
			"model_name=sql",
			"target_model_name=sql",
			"priority=0",
		)
		check(
			map[string]float64{"inference_objective_request_error_total": 1},
			"error_code=ModelServerError",
			"model_name=sql",
		)
		check(
			map[string]float64{"inference_objective_request_ttft_seconds": 0, "inference_objective_output_tokens": 0},
			"model_name=sql",
		)

		// A request with a rewritten model name and an objective.
		h.cfg.Rewrites = rewrites(
			t,
			modelrewrite.Rule{Name: "r", Models: []string{"alias"}, Targets: toM},
			modelrewrite.Rule{Name: "r", Targets: toM},
		)
		h.cfg.Objectives = new(Objectives)
		h.cfg.Objectives.Set(map[string]int32{"urgent": 7})
		urgent := completion("alias", tokens(0, 40))
		urgent.Hints.Objective = "urgent"
		for name, req := range map[string]*Request{"alias": urgent,
			"other": completion("a client's own", tokens(0, 40))} {
			r = h.route(req)
			r.Free()
			r.Ended(Response{Status: "200", CachedTokens: -1})
			priority := map[string]string{"alias": "priority=7", "other": "priority=0"}[name]
			check(
				map[string]float64{"inference_objective_request_total": 1},
				"model_name="+name,
				"target_model_name=m",
				priority,
			)
			check(map[string]float64{"inference_objective_running_requests": 0}, "model_name="+name)
		}
		h.cfg.Rewrites, h.cfg.Objectives = nil, nil

		// Refusals: models that only clients name have no labels.
		if _, err := h.Route(context.Background(), completion("unknown", tokens(0, 4))); !errors.Is(
			err,
			ErrUnknownModel,
		) {
			t.Fatal(err)
		}
		if _, err := h.Route(context.Background(), &Request{Path: "/v1/completions", Body: []byte("{")}); err == nil {
			t.Fatal("no error")
		}
		h.SetThresholds("m", Thresholds{ActivePrefillTokens: set[uint64](0)})
		for range 2 {
			h.route(completion("m", tokens(0, 40)))
		}
		if _, err := h.Route(context.Background(), completion("m", tokens(0, 40))); !errors.Is(err, ErrOverloaded) {
			t.Fatal(err)
		}
		gone, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := h.Route(gone, completion("m", tokens(0, 40))); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		h.pool.Update(nil)
		if _, err := h.Route(context.Background(), completion("m", tokens(0, 40))); !errors.Is(err, ErrNoEndpoints) {
			t.Fatal(err)
		}
		h.Refused(413)
		h.Refused(429)
		for _, c := range []struct {
			model, code string
			want        float64
		}{{"unknown", metrics.CodeNotFound, 1}, {"unknown", metrics.CodeBadRequest, 2},
			{"unknown", metrics.CodeResourceExhausted, 1},
			{"m", metrics.CodeResourceExhausted, 1}, {"m", metrics.CodeServiceUnavailable, 1},
			{"m", metrics.CodeInternal, 0}} {
			if got := sample("inference_objective_request_error_total", "error_code="+c.code,
				"model_name="+c.model); got != c.want {
				t.Errorf("%s of %s: %v, want %v", c.code, c.model, got, c.want)
			}
		}
		check(map[string]float64{"inference_extension_scheduler_attempts_total": 3}, "status=failure")
	})
}

// After a panic the metrics count the request as ended.
func TestPickerMetricsAfterAPanic(t *testing.T) {
	h, sample := exportingAs(t, Config{Models: map[string]*prompt.Model{"m": nil}}, workers(2)...)
	h.Router.metrics.AggregatedSelections = nil
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic came")
			}
		}()
		h.Route(t.Context(), completion("m", tokens(0, 40)))
	}()
	if begun, running := sample("inference_objective_request_total", "model_name=m"),
		sample("inference_objective_running_requests", "model_name=m"); begun != 1 ||
		running != 0 ||
		h.book.Len() != 0 {
		t.Errorf("%v requests have begun, %v run, %d are booked", begun, running, h.book.Len())
	}
}

// Updates of the extension's metrics do not allocate.
func TestPickerMetricsDoNotAllocate(t *testing.T) {
	p := metrics.New().NewPicker()
	end := metrics.Ended{
		Model:      "m",
		Target:     "m",
		Duration:   time.Second,
		FirstToken: time.Millisecond,
		Bytes:      1,
		Input:      1,
		Output:     2,
		Cached:     0,
	}
	if n := testing.AllocsPerRun(100, func() {
		p.Scheduled(time.Millisecond, 0.5)
		p.Began("m", "m", 0, 100)
		p.Ended(&end)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
