package metrics

import (
	"fmt"
	"sync"
	"testing"

	"kvepp/internal/metrics/metricstest"
)

// TestBuild: the series that names the program has the version that the program sets.
func TestBuild(t *testing.T) {
	t.Cleanup(func() { buildVersion.Store(nil) })
	for _, v := range []string{"unknown", "v1.2.3"} {
		if v != "unknown" {
			SetVersion(v)
		}
		series := metricstest.Read(t, New().Registry)
		if len(series.Of("kvepp_build_info", "version="+v)) != 1 {
			t.Errorf("%s: %v", v, series.Of("kvepp_build_info"))
		}
	}
}

// TestEventsAreAllCounted checks that concurrent calls lose no event, even when several of them create a series.
func TestEventsAreAllCounted(t *testing.T) {
	m := New()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range 4000 {
				m.Event("batch", fmt.Sprint(i%40), 2)
				m.Event("batch", "none", 0)
			}
		})
	}
	all.Wait()
	outcomes := metricstest.Read(t, m.Registry).Of("kvepp_events_total")
	for _, s := range outcomes {
		if s.Value != 4*100*2 {
			t.Errorf("%v is %v, want 800", s, s.Value)
		}
	}
	if len(outcomes) != 40 {
		t.Errorf("%d series of outcomes, want 40", len(outcomes))
	}
	if n := testing.AllocsPerRun(100, func() { m.Event("batch", "1", 1) }); n != 0 {
		t.Errorf("%v allocations to count an event, want none", n)
	}
}
