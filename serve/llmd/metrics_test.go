package llmd

import (
	"os"
	"strings"
	"testing"

	"kvepp/internal/metrics"
)

// TestTwins: each metric that is repeated exists, by the page that lists all, and the names are at least the 30 that
// llm-d's dashboards, alerts and autoscalers read.
func TestTwins(t *testing.T) {
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	twins := func(compat string) []metrics.Twin {
		return (&Seat{Settings: Settings{Compat: compat, Events: true}}).Twins("p")
	}
	for _, twin := range twins(compatAll) {
		if !strings.HasPrefix(twin.Name, "llm_d_epp_") && !strings.HasPrefix(twin.Name, "inference_extension_") &&
			!strings.HasPrefix(twin.Name, "llm_d_inference_scheduler_") {
			t.Error(twin.Name)
		}
		if twin.Of != "" && !strings.Contains(string(page), "| `"+twin.Of+"` | ") {
			t.Errorf("%s repeats %s, which docs/metrics.md does not have", twin.Name, twin.Of)
		}
		if strings.Contains(string(page), "| `"+twin.Name+"` | ") {
			t.Errorf("kvepp has %s already", twin.Name)
		}
		names[twin.Name] = true
	}
	if few := twins(compatLLMD); len(twins(compatNone)) != 0 || len(names) < 48 || len(few) < 45 {
		t.Errorf("%d names, %d of llm-d", len(names), len(few))
	}
	for _, c := range []struct{ ready, waiting, usage, want float64 }{{0, 0, 0, 1}, {2, 10, 0.4, 2}, {2, 0, 0.4, 0.5}} {
		got := saturation(func(name string) float64 {
			return map[string]float64{"inference_pool_ready_pods": c.ready,
				"inference_pool_average_queue_size":           c.waiting,
				"inference_pool_average_kv_cache_utilization": c.usage}[name]
		})
		if got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
