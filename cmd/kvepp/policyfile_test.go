package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/router"
)

// TestPolicyFileIsReadAgain: a changed policy file changes the costs; one that is broken, or that needs a restart,
// changes nothing and is counted.
func TestPolicyFileIsReadAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	const class = "default_policy_family: f\nuncached_isl_buckets: [{min_tokens: 0, bucket: b}]\npolicy_classes: " +
		"[{name: only, policy_family: f, cache_bucket: b, quantum: 1, prefill_busy_threshold: %d}]\n"
	weights := func(credit string) string {
		return fmt.Sprintf(class, 100) + "worker_selection: {aggregated: tuned, instances: [{name: tuned, " +
			"type: dynamo-default-cost-fn, parameters: {overlap_score_credit: " + credit + "}}]}\n"
	}
	write := func(text string) {
		t.Helper()
		next := file + ".next" // renamed, so that no read sees a part of it
		if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, file); err != nil {
			t.Fatal(err)
		}
	}
	write(weights("1"))
	s := serveHere(t, threeWorkers, "--router-policy-config", file)
	if err := s.followPolicy(t.Context()); err != nil {
		t.Fatal(err)
	}
	ids := []kvblock.Token{1, 2, 3, 4, 5, 6, 7, 8}
	s.store("w1", ids)
	credit := func() float64 { // that w1 gets
		t.Helper()
		x, err := s.router.Explain(t.Context(), &router.Request{Path: "/v1/completions",
			Body: []byte(`{"model":"m","prompt":[1,2,3,4,5,6,7,8]}`)})
		if err != nil || x.Refused != nil {
			t.Fatal(err, x)
		}
		return x.Record.Costs[1].Credit
	}
	refused := func() float64 {
		return metricstest.Read(t, s.m.Registry).Of("kvepp_policy_file_refused_total").Value()
	}
	until := func(what string, is func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !is(); <-time.After(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: credit %v, %v refused", what, credit(), refused())
			}
		}
	}
	before := credit()
	write(weights("0.5"))
	until("other weights", func() bool { return credit() == before/2 })
	for i, text := range []string{
		"policy_classes: [", weights("-1"), weights("0"),
		weights("1") + "router: {router_ttl_secs: 7}\n",
		fmt.Sprintf(class, 100), // no weights: another --router-policy
		"worker_selection: {aggregated: tuned, instances: [{name: tuned, type: dynamo-default-cost-fn}]}\n",
		"",
	} {
		write(text)
		until(fmt.Sprintf("%q is refused", text), func() bool { return refused() == float64(i+1) })
		if credit() != before/2 {
			t.Errorf("%q changes the credit to %v", text, credit())
		}
	}
	write(weights("1"))
	until("the first weights again", func() bool { return credit() == before })
}
