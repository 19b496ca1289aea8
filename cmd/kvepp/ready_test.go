package main

import (
	"log/slog"
	"testing"

	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/pool"
)

func TestAnnounce(t *testing.T) {
	checks := health.NewServer()
	for _, serving := range []bool{false, true, false} { // at the start, when ready, and while kvepp drains
		announce(checks, serving)
		for _, name := range healthServices {
			answer, err := checks.Check(t.Context(), &healthv1.HealthCheckRequest{Service: name})
			if err != nil {
				t.Fatal(name, err)
			}
			if want := serving || name == liveness; (answer.Status == healthv1.HealthCheckResponse_SERVING) != want {
				t.Errorf("announced serving: %v; %q answers %v", serving, name, answer.Status)
			}
		}
	}
}

func TestFirstWorkers(t *testing.T) {
	enough := func(w *firstWorkers) bool {
		select {
		case <-w.reached:
			return true
		default:
			return false
		}
	}
	p := pool.New(slog.New(slog.DiscardHandler))
	none, two := awaitWorkers(p, 0), awaitWorkers(p, 2)
	p.Watch(two)
	if !enough(none) || enough(two) {
		t.Errorf("an empty pool is enough for 0 workers: %v, for 2: %v", enough(none), enough(two))
	}
	prefill := pool.Endpoint{Name: "p", Role: pool.Prefill}
	a := pool.Endpoint{Name: "a", Address: "10.0.0.1:1", DataParallelSize: 4}
	b := pool.Endpoint{Name: "b", Address: "10.0.0.1:2", Role: pool.Decode}
	if p.Update([]pool.Endpoint{prefill, a, {Name: "e", Role: pool.Encode}}); enough(two) {
		t.Error("an endpoint with four ranks counts as two, or a prefill or encode worker counts")
	}
	if p.Update([]pool.Endpoint{prefill, a, b}); !enough(two) {
		t.Error("two workers are not enough")
	}
	p.Update(nil)
	p.Update([]pool.Endpoint{a, b})
	if !enough(two) {
		t.Error("enough is not final")
	}
	two.pool = nil
	two.WorkerJoined(pool.Worker{}) // workers are no longer counted
}

func TestReadiness(t *testing.T) {
	r := newReadiness()
	if r.unmetConditions() != "" {
		t.Error("unmet without a condition:", r.unmetConditions())
	}
	leads := r.condition("to lead")
	synced := make(chan struct{})
	r.await("the pool", synced)
	if r.unmetConditions() != "the pool, to lead" {
		t.Error(r.unmetConditions())
	}
	leads(true)
	close(synced)
	for r.unmetConditions() != "" {
		<-r.changed
	}
	leads(false)
	if <-r.changed; r.unmetConditions() != "to lead" {
		t.Error("after the lease was lost:", r.unmetConditions())
	}
	r.await("a channel that is closed already", synced)
	if r.unmetConditions() != "to lead" {
		t.Error(r.unmetConditions())
	}
}
