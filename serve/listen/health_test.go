package listen

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

func TestAnnounce(t *testing.T) {
	checks := health.NewServer()
	for _, serving := range []bool{false, true, false} { // at the start, when ready, and while kvepp drains
		announce(checks, serving)
		for _, name := range healthServices {
			response, err := checks.Check(t.Context(), &healthv1.HealthCheckRequest{Service: name})
			if err != nil {
				t.Fatal(name, err)
			}
			if want := serving || name == liveness; (response.Status == healthv1.HealthCheckResponse_SERVING) != want {
				t.Errorf("announced serving: %v; %q answers %v", serving, name, response.Status)
			}
		}
	}
}

// TestReadiness: health checks follow the conditions from begin on, until the context ends.
func TestReadiness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, checks := NewReadiness(), health.NewServer()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		expect := func(waitsFor string) {
			t.Helper()
			synctest.Wait()
			response, err := checks.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "readiness"})
			if err != nil {
				t.Fatal(err)
			}
			serving := response.Status == healthv1.HealthCheckResponse_SERVING
			if r.announced != waitsFor || serving != (waitsFor == "") || r.ready() != serving {
				t.Errorf("it waits for %q, and checks say %v; want %q", r.announced, response.Status, waitsFor)
			}
		}
		leads := r.Condition("to lead")
		synced := make(chan struct{})
		r.Await("the pool", synced)
		r.begin(ctx, checks, slog.New(slog.DiscardHandler))
		expect("the pool, to lead")
		leads(true)
		close(synced)
		expect("")
		leads(false)
		expect("to lead")
		r.Await("a channel that is closed already", synced)
		expect("to lead")
		leads(true)
		expect("")
		stop()
		leads(false) // the election ends too
		expect("")
	})
}
