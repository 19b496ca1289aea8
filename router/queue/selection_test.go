package queue

import (
	"fmt"
	"strings"
	"testing"
)

// TestSelection: the weights of the selected instances, and what takes the place of the file's choice.
func TestSelection(t *testing.T) {
	const instances = `
  instances:
  - {name: a, type: dynamo-default-cost-fn, parameters: {router_temperature: 0.5, overlap_score_credit: 1}}
  - {name: b, type: dynamo-default-cost-fn, parameters: {prefill_load_scale: ~, overlap_score_credit: 1, ` +
		`router_temperature: 0.5}}
  - {name: c, type: dynamo-default-cost-fn}
  - {name: d, type: dynamo-two-tier-cost-fn, parameters: {cache_threshold: 0.5}}
`
	const ofA = "[overlap_score_credit=1 router_temperature=0.5]"
	for _, c := range []struct {
		selects   string
		by        string
		want, err string
	}{
		{"", "", "[]", ""},
		{"aggregated: default", "", "[]", ""},
		{"aggregated: a", "", ofA, ""},
		{"aggregated: c", "", "[]", ""},
		{"encode: d", "", "[]", ""},
		{"prefill: a, decode: b", "", ofA, ""},
		{"prefill: a, decode: b, aggregated: c", "", "", "aggregated and prefill select different weights"},
		{"prefill: a", "", "", `prefill and decode select different weights, "a" and "default"`},
		{"prefill: c", "", "[]", ""},
		{"aggregated: d", "", "", `line 2: aggregated: instance "d" (line 7) has the type dynamo-two`},
		{"aggregated: d", "a", ofA, ""},
		{"aggregated: a", "default", "[]", ""},
		{"", "e", "", `policy of aggregated workers: "e" is no instance`},
	} {
		text := "worker_selection:" + instances
		if c.selects != "" {
			text = "worker_selection:\n  " + strings.ReplaceAll(c.selects, ", ", "\n  ") + instances
		}
		f, err := ParseFile([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		got, err := f.Selection.Parameters(c.by)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s %q: %v, want %q", c.selects, c.by, err, c.err)
			}
			continue
		}
		var shown []string
		for _, s := range got {
			shown = append(shown, s.Key+"="+s.Value)
		}
		if err != nil || fmt.Sprint(shown) != c.want {
			t.Errorf("%s %q: %v, %v, want %s", c.selects, c.by, shown, err, c.want)
		}
	}
	if got, err := (*Selection)(nil).Parameters("default"); err != nil || got != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
}
