package router

import (
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/remote"
	"kvepp/router/queue"
	"kvepp/scoring"
)

// exporting returns a house whose router exports Dynamo's router metrics, and a function that reads a sample by its
// name and label values.
func exporting(
	t *testing.T,
	q *queue.RoomConfig,
	endpoints ...pool.Endpoint,
) (*house, func(name string, labels ...string) float64) {
	return exportingAs(t, Config{Models: map[string]*prompt.Model{"m": nil}, Queue: q}, endpoints...)
}

// exportingAs is exporting with a given configuration.
func exportingAs(
	t *testing.T,
	cfg Config,
	endpoints ...pool.Endpoint,
) (*house, func(name string, labels ...string) float64) {
	h := newHouse(t, endpoints...)
	m := metrics.New()
	cfg.Scoring, cfg.Metrics, cfg.Picker = scoring.DefaultConfig(), m.NewRouter(
		metrics.Identity{Namespace: "n", Component: "c", RouterID: 255},
	), m.NewPicker()
	h.Router = New(cfg, h.pool, h.index, h.book, m, h.log)
	return h, func(name string, labels ...string) float64 {
		t.Helper()
		found := metricstest.Read(t, m.Registry).Of(name, labels...)
		if len(found) == 0 {
			return -1
		}
		return found[0].Value
	}
}

func TestResponsesAreObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, sample := exporting(t, nil, workers(2)...)
		h.warm("w1", 0, tokens(0, 20), blocksOfFour)
		for _, name := range []string{"requests_started_total", "requests_total", "time_to_first_token_seconds",
			"inter_token_latency_seconds",
			"output_sequence_tokens", "kv_hit_rate"} {
			if got := sample("dynamo_component_router_"+name, "router_id=255", "worker_id=ff", "dynamo_namespace=n",
				"dynamo_component=c"); got != 0 {
				t.Errorf("%s begins with %v", name, got)
			}
		}
		for _, name := range []string{"input_sequence_tokens", "kv_best_eligible_cached_prefix_tokens_total",
			"kv_selected_cached_prefix_tokens_total", "kv_worker_reused_tokens_total"} {
			if got := sample("dynamo_component_router_"+name, "model=m", "phase=aggregated"); got != 0 {
				t.Errorf("%s of a configured model begins with %v", name, got)
			}
		}
		one := []string{"worker_id=101", "dp_rank=0", "worker_type=decode"}
		for _, name := range []string{"active_decode_blocks", "active_prefill_tokens",
			"last_time_to_first_token_seconds"} {
			if got := sample("dynamo_frontend_worker_"+name, one...); got != 0 {
				t.Errorf("%s begins with %v", name, got)
			}
		}

		r := h.route(completion("m", tokens(0, 40)))
		for name, want := range map[string]float64{"active_decode_blocks": 10, "active_prefill_tokens": 20} {
			if got := sample("dynamo_frontend_worker_"+name, one...); got != want {
				t.Errorf("running: %s is %v, want %v", name, got, want)
			}
		}
		<-time.After(250 * time.Millisecond) // of the bubble, which does not wait
		r.MarkPrefillCompleted()
		r.MarkPrefillCompleted()
		<-time.After(900 * time.Millisecond)
		r.Free()
		r.Ended(Response{Tokens: 10, CachedTokens: 16})

		model := []string{"model=m", "phase=aggregated"}
		for _, c := range []struct {
			name   string
			want   float64
			labels []string
		}{
			{"dynamo_component_router_requests_started_total", 1, nil},
			{"dynamo_component_router_requests_total", 1, nil},
			{"dynamo_component_router_time_to_first_token_seconds", 0.25, nil},
			{"dynamo_component_router_inter_token_latency_seconds", 0.1, nil},
			{"dynamo_component_router_output_sequence_tokens", 10, nil},
			{"dynamo_component_router_kv_hit_rate", 0.5, nil},
			{"dynamo_component_router_input_sequence_tokens", 40, model},
			{"dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total", 20, model},
			{"dynamo_component_router_kv_selected_cached_prefix_tokens_total", 20, model},
			{"dynamo_component_router_kv_worker_reused_tokens_total", 16, model},
			{"dynamo_frontend_worker_last_time_to_first_token_seconds", 0.25, one},
			{"dynamo_frontend_worker_last_inter_token_latency_seconds", 0.1, one},
			{"dynamo_frontend_worker_last_input_sequence_tokens", 40, one},
			{"dynamo_frontend_worker_active_decode_blocks", 0, one},
		} {
			if got := sample(c.name, c.labels...); got < c.want*0.999 || got > c.want*1.001 {
				t.Errorf("%s%v is %v, want %v", c.name, c.labels, got, c.want)
			}
		}
	})
}

// A worker's series end when it leaves. A worker that gets its number starts with new values.
func TestSeriesOfWorkers(t *testing.T) {
	es := workers(3)
	es[1].KVEvents = ""
	h, sample := exporting(t, nil, es[:2]...)
	h.pool.Watch(forget{h})
	r := h.route(completion("m", tokens(0, 8)))
	r.MarkPrefillCompleted()
	r.Free()
	h.pool.Update(es[:0])
	if got := sample("dynamo_component_router_worker_registered"); got != -1 {
		t.Errorf("a worker that left is registered: %v", got)
	}
	h.pool.Update(es)
	for _, id := range []string{"100", "101", "102"} {
		if got := sample("dynamo_component_router_worker_registered", "router_worker_id="+id, "dp_rank=0",
			"worker_type=decode", "worker_id=ff"); got != 1 {
			t.Errorf("worker %s: registered %v", id, got)
		}
	}
	es[2].InstanceID = es[1].InstanceID // a mistake in the endpoints file must not end the metrics
	h.pool.Update(es)
	if got := sample("dynamo_component_router_worker_registered", "router_worker_id=101"); got != 1 {
		t.Errorf("two endpoints with one id: registered %v", got)
	}
}

// A name that only a client gave never becomes a label.
func TestModelOfLabels(t *testing.T) {
	es := workers(1)
	es[0].Model = ""
	h, sample := exporting(t, nil, es...)
	h.route(completion("a client's name", tokens(0, 8))).Free()
	if got := sample("dynamo_component_router_input_sequence_tokens", "model=unknown"); got != 8 {
		t.Errorf("of an unknown model %v tokens, want 8", got)
	}
}

// The series of models exist before their first request: one for each model that the operator names, or "unknown" if
// there is none.
func TestModelSeriesFromTheStart(t *testing.T) {
	for model, cfg := range map[string]Config{
		"own":     {Models: map[string]*prompt.Model{"own": nil}},
		"asked":   {Remote: map[string]*remote.Client{"asked": nil}},
		"unknown": {},
	} {
		_, sample := exportingAs(t, cfg)
		for _, phase := range []string{"aggregated", "prefill", "decode"} {
			for _, name := range []string{"input_sequence_tokens", "kv_best_eligible_cached_prefix_tokens_total",
				"kv_selected_cached_prefix_tokens_total",
				"kv_worker_reused_tokens_total"} {
				if got := sample("dynamo_component_router_"+name, "model="+model, "phase="+phase); got != 0 {
					t.Errorf("%s of %s, %s: begins with %v", name, model, phase, got)
				}
			}
		}
		for _, name := range []string{"pending_requests", "pending_isl_tokens", "backpressure_total"} {
			if got := sample("dynamo_frontend_router_queue_"+name, "model="+model, "policy_class=default"); got != 0 {
				t.Errorf("%s of %s: begins with %v", name, model, got)
			}
		}
	}
}

// A model of --tokenizer-url counts as named by the operator.
func TestAskedModelsAreNamed(t *testing.T) {
	es := workers(1)
	es[0].Model = ""
	h, sample := exportingAs(t, Config{Remote: map[string]*remote.Client{"asked": nil}}, es...)
	h.route(completion("asked", tokens(0, 8))).Free()
	if got := sample("dynamo_component_router_input_sequence_tokens", "model=asked", "phase=aggregated"); got != 8 {
		t.Errorf("%v tokens under its name, want 8", got)
	}
	if got := h.Models(); len(got) != 1 || got[0] != "asked" {
		t.Errorf("models with busy thresholds: %v", got)
	}
}

func TestWhatWaitsIsExported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, err := queue.ParseFile([]byte(classes))
		if err != nil {
			t.Fatal(err)
		}
		h, sample := exporting(
			t,
			&queue.RoomConfig{Profiles: f.Profiles(queue.Single(queue.FCFS, nil)), Bound: 100},
			maxed(workers(1), 100)...)
		a := arriveAt(h)
		a.send(t.Context(), "a", completion("m", tokens(0, 40)))
		a.send(t.Context(), "b", completion("m", tokens(1000, 120)))
		for _, name := range []string{"c", "d", "e"} { // two may wait
			a.send(t.Context(), name, completion("m", tokens(0, 40)))
		}
		short := []string{"model=m", "policy_class=short", "worker_type=decode"}
		for name, want := range map[string]float64{"pending_requests": 2, "pending_isl_tokens": 80} {
			if got := sample("dynamo_frontend_router_queue_"+name, short...); got != want {
				t.Errorf("%s is %v, want %v; %v", name, got, want, a.went)
			}
		}
		for reason, want := range map[string]float64{"request_limit": 1, "raw_isl_token_limit": 0,
			"cached_token_limit": 0} {
			if got := sample("dynamo_frontend_router_queue_backpressure_total",
				append(short, "reason="+reason)...); got != want {
				t.Errorf("turned away at the %s: %v, want %v", reason, got, want)
			}
		}
		if got := sample("dynamo_frontend_router_queue_pending_requests", "policy_class=long"); got != 0 {
			t.Errorf("of the other class %v wait", got)
		}
		a.prefilled("a")
		a.prefilled("b")
		if got := sample("dynamo_frontend_router_queue_pending_requests", short...); got >= 2 {
			t.Errorf("%v wait for a worker that is ready", got)
		}
	})
}

// TestServedModelsAreLabels: with LabelServed, a model that an endpoint has served is a label from then on.
func TestServedModelsAreLabels(t *testing.T) {
	es := workers(1)
	es[0].Model = ""
	h, sample := exportingAs(t, Config{LabelServed: true}, es...)
	for _, c := range []struct {
		model, status string
		want          map[string]float64 // prompts by label, after the request
	}{
		{"served", "404", map[string]float64{"unknown": 1}},
		{"served", "200", map[string]float64{"unknown": 2}},
		{"served", "500", map[string]float64{"unknown": 2, "served": 1}},
		{"another", "200", map[string]float64{"unknown": 3, "served": 1}},
		{strings.Repeat("x", maxServedName+1), "200", map[string]float64{"unknown": 4}},
		{strings.Repeat("x", maxServedName+1), "200", map[string]float64{"unknown": 5}},
	} {
		r := h.route(completion(c.model, tokens(0, 8)))
		r.Free()
		r.Ended(Response{Status: c.status, CachedTokens: -1})
		for label, want := range c.want {
			if got := sample("dynamo_component_router_input_sequence_tokens", "model="+label); got != 8*want {
				t.Errorf("%.20s, %s: %v tokens of %s, want %v", c.model, c.status, got, label, 8*want)
			}
		}
	}
	for range 2 { // a header is not always UTF-8, and a label must be
		req := completion("m", tokens(0, 8))
		req.Rewrite = "\xff"
		r := h.route(req)
		r.Free()
		r.Ended(Response{Status: "200", CachedTokens: -1})
	}
	if h.knows("\xff") || !h.knows("\ufffd") {
		t.Error("a name that is not UTF-8 is a label")
	}
	for i := range 2 * maxServed {
		h.servedModels.add(strconv.Itoa(i))
	}
	if h.knows("0") != true || h.knows(strconv.Itoa(maxServed)) {
		t.Error("models beyond the bound are labels")
	}
}
