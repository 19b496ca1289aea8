package vllm

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// testLoad: kvepp's metrics show vLLM's load, although none of it came through kvepp.
func testLoad(b *bench) {
	t := b.t
	const at = 8
	wait := func(what string, ok func(running, usage float64) bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		err := process.Until(ctx, func() error {
			m, err := b.stack.Metrics(ctx)
			if err != nil {
				return err
			}
			running, usage := m[`inference_pool_average_running_requests{name="kvepp"}`],
				m[`inference_pool_average_kv_cache_utilization{name="kvepp"}`]
			if _, told := m[`inference_pool_per_pod_queue_size{model_server_pod="vllm-rank-0",name="kvepp"}`]; !told ||
				!ok(running, usage) {
				return fmt.Errorf("%s: %v run, in %v of the cache", what, running, usage)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	wait("idle", func(running, usage float64) bool { return running == 0 && usage == 0 })
	ctx, cancel := context.WithCancel(t.Context())
	var around sync.WaitGroup
	for i := range at {
		around.Go(func() { // the request is cancelled, which is an error
			stack.Post(
				ctx,
				http.DefaultClient,
				"http://"+b.vllm.Address+"/v1/completions",
				nil,
				map[string]any{
					"model":      stack.Model,
					"prompt":     fmt.Sprint("request ", i),
					"max_tokens": 2000,
					"ignore_eos": true,
					"stream":     true,
				},
			)
		})
	}
	wait("busy", func(running, usage float64) bool { return running == at && usage > 0 && usage < 1 })
	cancel()
	around.Wait()
	wait("idle again", func(running, usage float64) bool { return running == 0 && usage == 0 })
}
