package e2e

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"

	"kvepp/test/harness/stack"
)

// notExported are Dynamo's series about routing for features that kvepp does not have.
var notExported = []string{
	"dynamo_component_router_active_sequence_", // load books shared among routers
	"dynamo_component_router_approximate_",     // index without events; here kvepp_index_outcomes_total
	"dynamo_component_router_kv_zmq_ingress_",  // event plane; here kvepp_subscriptions and kvepp_events_total
	"dynamo_component_router_kv_transfer_",     // between prefill and decode workers
	"dynamo_component_router_kv_event_source_", // recovery of events; here kvepp_silent_workers
	"dynamo_component_router_non_max_overlap_", // no dashboard reads these; here the hit-rate ladder
	"dynamo_component_router_overlap_blocks_",  // the same
	"dynamo_component_router_shared_cache_",    // caches that workers share
	"dynamo_frontend_router_queue_pending_cached_tokens",
	"dynamo_router_overhead_", // here kvepp_phase_seconds
}

// TestDynamoMetrics compares every metric that kvepp exports under a name of Dynamo's with that of Dynamo's frontend:
// type, labels and buckets.
func TestDynamoMetrics(t *testing.T) {
	theirs := start(t, stack.Config{Workers: 1, Frontend: "kv", Speedup: 100, Kill: true})
	for _, s := range []*stack.Stack{theirs, main} {
		a, err := stack.Chat(
			t.Context(),
			http.DefaultClient,
			s.URL(),
			nil,
			[]stack.Message{{Role: "user", Content: strings.Repeat("Tell me a story. ", 20)}},
			true,
			nil,
		)
		if err != nil || a.Status != http.StatusOK {
			t.Fatalf("%v: %+v", err, a)
		}
	}
	want := routerSeries(t, theirs)
	var got map[string]series
	eventually(t, func() error { // kvepp counts a request when Envoy has closed its stream
		got = routerSeries(t, main)
		if got["dynamo_component_router_requests_total"].counts == 0 {
			return fmt.Errorf("the metric does not count the request yet")
		}
		return nil
	})
	held := 0
	for name, ours := range got {
		if !strings.HasPrefix(name, "dynamo_") {
			continue
		}
		held++
		theirs, known := want[name]
		switch {
		case !known:
			t.Errorf("Dynamo has no %s", name)
		case ours.kind != theirs.kind:
			t.Errorf("%s is a %s, Dynamo's a %s", name, ours.kind, theirs.kind)
		case ours.shape != theirs.shape:
			t.Errorf("%s:\nkvepp   %s\nDynamo  %s", name, ours.shape, theirs.shape)
		}
	}
	if held < 19 {
		t.Errorf("only %d metrics have names of Dynamo's", held)
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		about := strings.HasPrefix(name, "dynamo_component_router_") ||
			strings.HasPrefix(name, "dynamo_frontend_worker_") ||
			strings.HasPrefix(name, "dynamo_frontend_router_queue_")
		left := slices.ContainsFunc(notExported, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
		if _, have := got[name]; about && !left && !have {
			t.Errorf("kvepp has no %s", name)
		}
	}
}

// series is what all series of a metric have in common.
type series struct {
	kind   string
	shape  string  // its labels' names, and a histogram's buckets
	counts float64 // a counter's sum
}

// routerSeries reads the metrics of the program that routes.
func routerSeries(t *testing.T, s *stack.Stack) map[string]series {
	t.Helper()
	resp, err := http.Get(s.RouterMetrics())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]series{}
	for name, family := range families {
		one := series{kind: family.GetType().String()}
		for i, m := range family.GetMetric() {
			one.counts += m.GetCounter().GetValue()
			if i > 0 {
				continue
			}
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName())
			}
			slices.Sort(labels)
			one.shape = strings.Join(labels, ",")
			for _, b := range m.GetHistogram().GetBucket() {
				one.shape += fmt.Sprintf(" %.6g", b.GetUpperBound())
			}
		}
		all[name] = one
	}
	return all
}
