package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/router/eject"
	"kvepp/scoring"
)

// gathered returns the samples of metrics, as name{labels' values}.
func gathered(t *testing.T, m *metrics.Metrics) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, s := range metricstest.Read(t, m.Registry) {
		name := s.Name
		for _, l := range s.Labels {
			_, value, _ := strings.Cut(l, "=")
			name += " " + value
		}
		all[name] = s.Value
	}
	return all
}

// TestPoolMetrics: the series exist before the first reading, and also if kvepp scrapes no engines. After a reading
// they have its values.
func TestPoolMetrics(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n")
	}))
	defer engine.Close()
	quiet := slog.New(slog.DiscardHandler)
	p := pool.New(quiet)
	p.Update(
		[]pool.Endpoint{
			{Name: "a", Address: engine.Listener.Addr().String()},
			{Name: "b-rank-1", Address: "127.0.0.1:1", DataParallelStartRank: 1},
			{Name: "encoder", Address: "127.0.0.1:2", Role: pool.Encode},
		},
	)
	nothing := map[string]float64{
		"inference_pool_ready_pods llama":                   2,
		"inference_pool_average_kv_cache_utilization llama": 0,
		"inference_pool_average_queue_size llama":           0,
		"inference_pool_average_running_requests llama":     0,
		"kvepp_workers_with_gauges":                         0,
		"kvepp_unseen_load_workers":                         0,
	}
	for _, outcome := range []string{"ok", "without", "refused", "timeout", "unreachable", "too_large", "malformed"} {
		nothing["kvepp_engine_readings_total "+outcome] = 0
	}
	check := func(m *metrics.Metrics, want map[string]float64) (wrong string) {
		got := gathered(t, m)
		for name, v := range want {
			if x, there := got[name]; !there || x != v {
				wrong += fmt.Sprintf("%s is %v (%v), want %v\n", name, x, there, v)
			}
		}
		return wrong
	}
	off := metrics.New()
	enginemetrics.Export(off, "llama", p, nil)
	if wrong := check(off, nothing); wrong != "" {
		t.Errorf("engines are not scraped:\n%s", wrong)
	}
	if kvUsage(nil) != nil {
		t.Error("the router has a source of KV usage although kvepp scrapes no engines")
	}

	on := metrics.New()
	o := &options{gauges: enginemetrics.Config{
		Interval: 50 * time.Millisecond,
		Stale:    time.Minute,
		Scheme:   "http",
		Path:     "/metrics",
	}}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	s := &server{options: o, log: quiet, pool: p, book: scoring.NewActiveSequences(),
		health: eject.New(eject.Config{}, quiet)}
	g := s.followEngines(ctx)
	enginemetrics.Export(on, "llama", p, g)
	want := map[string]float64{
		"inference_pool_ready_pods llama":                   2,
		"inference_pool_average_kv_cache_utilization llama": 0.5,
		"inference_pool_average_queue_size llama":           2,
		"inference_pool_average_running_requests llama":     3,
		"kvepp_workers_with_gauges":                         1,
		"inference_pool_per_pod_queue_size a-rank-0 llama":  2,
	}
	for deadline := time.Now().Add(30 * time.Second); check(on, want) != ""; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(check(on, want))
		}
	}
	if _, there := gathered(t, on)["inference_pool_per_pod_queue_size b-rank-1 llama"]; there {
		t.Error("a worker without a reading has a series for its queue")
	}
	if u := kvUsage(g)(nil); len(u) == 0 || u[0] != 0.5 {
		t.Errorf("usage %v", u)
	}
	o.gauges.Interval = 0
	if s.followEngines(ctx) != nil {
		t.Error("kvepp scrapes engines although the interval is 0")
	}
}
