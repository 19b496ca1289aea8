package kind

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// TestFromZero: requests that come while a Deployment of engines has no Pod wait in kvepp, and each is served when it
// has Pods. When kvepp is killed meanwhile, only the requests that it holds are lost.
func TestFromZero(t *testing.T) {
	const before, requests = 5, 50
	n := newNamespace(t, "kvepp-e2e-zero")
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/engines.yaml"))
	n.install("pool.selector.app=engine", "extraArgs={--decision-headers,--hold-when-empty=5m}")
	n.startEnvoy("original-dst.yaml", map[string]string{"kvepp": "kvepp." + n.name + ".svc.cluster.local:9002"})
	n.awaitWorkers(3)
	n.kubectl("scale", "deployment/engine", "--replicas=0")
	n.awaitWorkers(0)

	held := func(want int) (memory float64) {
		n.eventually(fmt.Sprintf("kvepp holds %d requests", want), func() error {
			return n.eachReplica(func(pod string, m map[string]float64) error {
				memory = m["process_resident_memory_bytes"]
				if got := m["kvepp_held_requests"]; got != float64(want) {
					return fmt.Errorf("%s holds %v", pod, got)
				}
				return nil
			})
		})
		return memory
	}
	var running sync.WaitGroup
	send := func(count int) (failures chan error) {
		failures = make(chan error, count)
		for range count {
			c := n.newConversation()
			running.Go(func() {
				_, err := c.say(words(20), 8)
				failures <- err
			})
		}
		return failures
	}
	lost := send(before)
	held(before)
	n.kubectl("delete", "pod", "-l", kvepp, "--grace-period=0", "--force")
	running.Wait()
	for range before {
		if <-lost == nil {
			t.Error("a request was served without engines")
		}
	}
	n.eventually("the next kvepp holds requests", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		a, err := stack.Chat(ctx, client, n.url, nil, []stack.Message{{Role: "user", Content: "hello"}}, false,
			map[string]any{"model": n.model})
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("status %d: %s", a.Status, a.Body)
	})
	empty := held(0)
	served := send(requests)
	if grown := held(requests) - empty; grown > 32<<20 {
		t.Errorf("kvepp's memory grew by %.0f bytes", grown)
	}
	n.kubectl("scale", "deployment/engine", "--replicas=2")
	running.Wait()
	for range requests {
		if err := <-served; err != nil {
			t.Errorf("a held request: %v", err)
		}
	}
	held(0)
}
