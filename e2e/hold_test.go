package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// TestHoldWhenEmpty: requests that come while the pool is empty wait, and all are served when its first workers come.
// If kvepp dies meanwhile, only the requests that it holds are lost: later ones wait in the next kvepp. Its memory
// grows by little more than the bodies that it holds.
func TestHoldWhenEmpty(t *testing.T) {
	const requests, idsOfEach = 50, 2000
	s := start(t, stack.Config{Workers: 2, Later: 2, Speedup: 20, Blocks: 16384,
		KveppFlags: []string{"--hold-when-empty=5m"}})
	body := func(i int) map[string]any {
		ids := make([]int, idsOfEach)
		for at := range ids {
			ids[at] = 500 + (i+at)%50
		}
		return map[string]any{"model": stack.Model, "prompt": ids, "max_tokens": 2, "ignore_eos": true}
	}
	var running sync.WaitGroup
	var mu sync.Mutex
	answers := map[string]int{}
	send := func(wave string, n int) {
		for i := range n {
			running.Go(func() {
				a, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+"/v1/completions", nil, body(i))
				what := fmt.Sprintf("%s: %v", wave, err)
				if err == nil {
					what = fmt.Sprintf("%s: %d", wave, a.Status)
				}
				mu.Lock()
				defer mu.Unlock()
				answers[what]++
			})
		}
	}
	held := func(want float64) {
		t.Helper()
		eventually(t, func() error {
			if n := metric(t, s, "kvepp_held_requests"); n != want {
				return fmt.Errorf("%v requests are held, want %v", n, want)
			}
			return nil
		})
	}
	held(0)
	send("lost", 5)
	held(5)
	s.KillKvepp()
	running.Wait()
	if err := s.StartKvepp(t.Context()); err != nil {
		t.Fatal(err)
	}
	held(0)
	before, err := s.KveppMemory()
	if err != nil {
		t.Fatal(err)
	}
	send("kept", requests)
	held(requests)
	after, err := s.KveppMemory()
	if err != nil {
		t.Fatal(err)
	}
	if grown := after - before; grown > 64<<20 {
		t.Errorf("kvepp's memory grew by %d MiB for %d requests", grown>>20, requests)
	}
	for _, w := range s.Workers {
		if err := w.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	for _, w := range s.Workers {
		if err := w.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.WriteEndpoints(s.Workers...); err != nil {
		t.Fatal(err)
	}
	running.Wait()
	held(0)
	t.Logf("%v; kvepp's memory: %d MiB, and %d MiB while it held them", answers, before>>20, after>>20)
	if answers["kept: 200"] != requests {
		t.Errorf("the responses are %v, want %d times \"kept: 200\"", answers, requests)
	}
	for what := range answers {
		if strings.HasPrefix(what, "lost") && what != "lost: 503" {
			t.Errorf("a request of a kvepp that died: %s", what)
		}
	}
}
