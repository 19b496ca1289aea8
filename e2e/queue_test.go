package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// queueClasses are one class with an unlimited queue and one with a queue of four, on two workers.
const queueClasses = `
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
- {name: few, policy_family: all, cache_bucket: any, quantum: 1000, prefill_busy_threshold: 0, ` +
	`request_queue_limit_per_worker: 2}
- {name: patient, quantum: 1000, prefill_busy_threshold: 0}
`

// TestQueue sends bursts through Envoy to two slow workers, which are busy with one prompt each.
func TestQueue(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(queueClasses), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(
		t,
		stack.Config{
			Workers:    2,
			Speedup:    0.5,
			Blocks:     16384,
			KveppFlags: []string{"--router-policy-config", file},
		},
	)
	nothingLeft(t, s)
	next := 0
	// prompt returns a prompt of n tokens that no worker has cached.
	prompt := func(n int) map[string]any {
		ids := make([]int, n)
		for i := range ids {
			ids[i] = 500 + (next+i)%50
		}
		ids[0], ids[1] = 300+next/100, 400+next%100
		next++
		return map[string]any{"model": stack.Model, "prompt": ids, "max_tokens": 1, "stream": true}
	}
	burst := func(n int, header http.Header) (responses []*stack.Response) {
		var wait sync.WaitGroup
		responses = make([]*stack.Response, n)
		for i := range n {
			body := prompt(1500)
			wait.Go(func() {
				a, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+"/v1/completions", header, body)
				if err != nil {
					t.Error(err)
					return
				}
				responses[i] = a
			})
		}
		if wait.Wait(); t.Failed() {
			t.FailNow()
		}
		return responses
	}
	patient := http.Header{"x-dynamo-meta-policy-class": {"patient"}}

	for i, a := range burst(16, patient) {
		if a.Status != http.StatusOK {
			t.Errorf("request %d of 16 that may wait: %d %s", i, a.Status, a.Body)
		}
	}
	if n := metric(t, s, "kvepp_queue_wait_seconds"); n < 10 {
		t.Errorf("%v of 16 requests waited for two workers", n)
	}

	served, refused := 0, 0
	for _, a := range burst(16, nil) {
		switch a.Status {
		case http.StatusOK:
			served++
		case http.StatusTooManyRequests:
			refused++
			var body struct {
				Error struct{ Type, Code, Message string }
			}
			if err := json.Unmarshal([]byte(a.Body), &body); err != nil || body.Error.Code != "queue_full" ||
				body.Error.Message == "" ||
				a.Header.Get("Retry-After") != "1" {
				t.Errorf("refused with Retry-After %q: %s", a.Header.Get("Retry-After"), a.Body)
			}
		default:
			t.Errorf("%d %s", a.Status, a.Body)
		}
	}
	if served < 6 || refused == 0 {
		t.Errorf("%d served and %d refused of 16; 2 may run and 4 wait", served, refused)
	}
	if n := metric(t, s, `kvepp_rejections_total{cause="queue_limit"}`); n != float64(refused) {
		t.Errorf("the metric counts %v rejections, clients got %d", n, refused)
	}

	// Both workers have a long prompt. A third request waits until its client closes the connection.
	ctx, cancel := context.WithCancel(t.Context())
	var long sync.WaitGroup
	defer long.Wait()
	defer cancel()
	for range 2 {
		body := prompt(60000)
		long.Go(func() { _, _ = stack.Post(ctx, http.DefaultClient, s.Envoy.URL+"/v1/completions", patient, body) })
	}
	eventually(t, func() error {
		if n := metric(t, s, "kvepp_active_requests"); n != 2 {
			return fmt.Errorf("%v requests have reached the workers", n)
		}
		return nil
	})
	decided := metric(t, s, `kvepp_decisions_total{reason="kv"}`)
	waiting, leave := context.WithCancel(t.Context())
	body := prompt(100)
	long.Go(func() {
		if _, err := stack.Post(waiting, http.DefaultClient, s.Envoy.URL+"/v1/completions", patient, body); !errors.Is(
			err,
			context.Canceled,
		) {
			t.Errorf("the request that must wait: %v", err)
		}
	})
	queued := func(want float64) {
		t.Helper()
		eventually(t, func() error {
			if n := metric(t, s, `kvepp_queued_requests{policy_class="patient"}`); n != want {
				return fmt.Errorf("%v requests wait, want %v", n, want)
			}
			return nil
		})
	}
	queued(1)
	leave()
	queued(0)
	if n := metric(t, s, `kvepp_decisions_total{reason="kv"}`); n != decided {
		t.Errorf("the abandoned request was routed: %v decisions, %v before", n, decided)
	}
}

// TestOverloadStatus: Envoy passes on a status without a standard name.
func TestOverloadStatus(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers: 1,
			Speedup: 20,
			KveppFlags: []string{
				"--active-prefill-tokens-threshold",
				"0",
				"--overload-status-code",
				"529",
				"--engine",
				"vllm",
			},
		},
	)
	nothingLeft(t, s)
	body := map[string]any{"model": stack.Model, "prompt": make([]int, 100), "max_tokens": 500, "stream": false}
	ctx, cancel := context.WithCancel(t.Context())
	var first sync.WaitGroup
	first.Go(func() { _, _ = stack.Post(ctx, http.DefaultClient, s.Envoy.URL+"/v1/completions", nil, body) })
	defer first.Wait()
	defer cancel()
	eventually(t, func() error {
		if n := metric(t, s, "kvepp_overloaded_workers"); n != 1 {
			return fmt.Errorf("%v workers are overloaded", n)
		}
		return nil
	})
	a, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+"/v1/completions", nil, body)
	if err != nil || a.Status != 529 || a.Header.Get("Retry-After") != "1" {
		t.Errorf("%v %+v", err, a)
	}
}
