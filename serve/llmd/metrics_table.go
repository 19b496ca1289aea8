package llmd

import (
	"cmp"
	_ "embed" // of twins
	"slices"
	"strings"

	"kvepp/internal/metrics"
)

// The values of --metrics-compat.
const (
	compatNone = "none"
	compatLLMD = "llm-d" // the names of llm-d
	compatAll  = "all"   // and the older ones that llm-d still exports
)

// twins are the metrics that kvepp repeats; the head of the file says how to read it.
//
//go:embed metrics_table.txt
var twins string

// Twins returns the metrics that repeat kvepp's under the names of llm-d's picker. pool is the name of the
// InferencePool.
func (s *Seat) Twins(pool string) (all []metrics.Twin) {
	if s.Compat == compatNone {
		return nil
	}
	prefixes := "approx-prefix-cache-producer"
	if s.Events {
		prefixes = "precise-prefix-cache-producer"
	}
	by := func(plugin string) string { return `plugin_type="` + plugin + `" plugin_name="` + plugin + `"` }
	const epp, old = "llm_d_epp_", "inference_extension_"
	in := `inference_pool="` + pool + `"`
	words := strings.NewReplacer("POOL_", "inference_pool_", "OBJ_", "inference_objective_", "OLD_", old,
		"SCHED_", "llm_d_inference_scheduler_", "DYN_", "dynamo_frontend_router_queue_", "PHASE", "kvepp_phase_seconds",
		"EVENTS", "kvepp_events_total", "IN", in, "MODEL", "model_name target_model_name",
		"FLOW", `fairness_id="default-flow" priority="0"`, "BY_TOKENS", by("token-producer"),
		"BY_PREFIX", by(prefixes), "BY_STAGE", by("disagg-profile-handler"))
	_, table, _ := strings.Cut(twins, "\n\n")
	for line := range strings.Lines(words.Replace(table)) {
		fields := strings.Fields(line)
		twin, names := metrics.Twin{Of: fields[1]}, []string{epp + fields[0]}
		for _, word := range fields[2:] {
			switch kind, rest := word[0], word[1:]; {
			case kind == '?':
				twin.Only = append(twin.Only, rest)
			case kind == '+' && strings.HasSuffix(rest, "_"):
				names = append(names, rest+fields[0])
			case kind == '+':
				names = append(names, rest)
			case word == "!blocks":
				twin.Scale = 1.0 / 16 // llm-d's default size of a block
			case kind == '!':
				twin.Count, twin.Zero = rest == "count", rest == "zero"
			case strings.Contains(word, "="):
				twin.Labels = append(twin.Labels, word)
			default:
				twin.Labels = append(twin.Labels, word+"="+word)
			}
		}
		for _, twin.Name = range names {
			all = append(all, twin)
		}
	}
	all = append(all, metrics.Twin{Name: epp + "kv_cache_events_pool_capacity",
		Help:  "Always 4: the workers whose KV events kvepp applies at once.",
		Value: func(func(string) float64) float64 { return 4 }})
	for _, prefix := range []string{epp, old} {
		all = append(all, metrics.Twin{Name: prefix + "flow_control_pool_saturation", Value: saturation,
			Labels: []string{in}, Help: "That of llm-d's utilization detector with its defaults, by the engines."})
	}
	all = slices.DeleteFunc(all, func(t metrics.Twin) bool {
		return !s.Events && strings.HasPrefix(t.Name, epp+"kv_cache_") ||
			s.Compat != compatAll && !strings.HasPrefix(t.Name, epp)
	})
	slices.SortStableFunc(all, func(a, b metrics.Twin) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// saturation is that of llm-d's utilization detector with its defaults, of the pool's averages; 1 for an empty pool.
func saturation(of func(string) float64) float64 {
	if of("inference_pool_ready_pods") == 0 {
		return 1
	}
	return max(of("inference_pool_average_queue_size")/5, of("inference_pool_average_kv_cache_utilization")/0.8)
}
