package metrics

import (
	"fmt"
	"sync"
	"testing"
)

// Counters of events are remembered as they are met; none may be lost, whoever meets them first.
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
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	outcomes := 0
	for _, f := range families {
		if f.GetName() != "kvepp_events_total" {
			continue
		}
		for _, c := range f.GetMetric() {
			outcomes++
			if n := c.GetCounter().GetValue(); n != 4*100*2 {
				t.Errorf("%v: counted %v, want 800", c.GetLabel(), n)
			}
		}
	}
	if outcomes != 40 {
		t.Errorf("%d outcomes, want 40", outcomes)
	}
	if n := testing.AllocsPerRun(100, func() { m.Event("batch", "1", 1) }); n != 0 {
		t.Errorf("%v allocations to count an event, want none", n)
	}
}
