package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// TestAdmission: one worker holds a long conversation while it answers. A second one of that length finds no room and
// gets 429, and goes when the first has ended. A short one fits at once.
func TestAdmission(t *testing.T) {
	const tokens = stack.BlockSize * 600
	s := start(t, stack.Config{Workers: 1, Speedup: 1, Blocks: 1000, KveppFlags: []string{
		"--router-admission=working-set", "--router-queue-timeout=2s"}})
	nothingLeft(t, s)
	request := func(first, n, response int) map[string]any {
		ids := make([]int, n)
		for i := range ids {
			ids[i] = 500 + (first+i)%50
		}
		ids[0] = first
		return map[string]any{"model": stack.Model, "prompt": ids, "max_tokens": response, "stream": true,
			"ignore_eos": true}
	}
	post := func(ctx context.Context, body map[string]any) (*stack.Response, error) {
		return stack.Post(ctx, http.DefaultClient, s.Envoy.URL+"/v1/completions", nil, body)
	}

	ctx, cancel := context.WithCancel(t.Context())
	var long sync.WaitGroup
	defer long.Wait()
	defer cancel()
	long.Go(func() { _, _ = post(ctx, request(301, tokens, 5000)) })
	eventually(t, func() error {
		if n := metric(t, s, `kvepp_conversations{state="running"}`); n != 1 {
			return fmt.Errorf("%v conversations run", n)
		}
		return nil
	})

	a, err := post(t.Context(), request(302, tokens, 1))
	if err != nil {
		t.Fatal(err)
	}
	var body struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(a.Body), &body); err != nil || a.Status != http.StatusTooManyRequests ||
		body.Error.Code != "no_room" || !strings.Contains(body.Error.Message, "full of conversations") ||
		a.Header.Get("Retry-After") != "1" {
		t.Errorf("a conversation without room: %d %v %s", a.Status, a.Header, a.Body)
	}
	if n := metric(t, s, `kvepp_rejections_total{cause="no_room"}`); n != 1 {
		t.Errorf("the metric counts %v rejections, want 1", n)
	}
	began := time.Now()
	if a, err = post(t.Context(), request(303, 200, 1)); err != nil || a.Status != http.StatusOK {
		t.Fatalf("a conversation with room: %v %+v", err, a)
	}
	t.Logf("the short conversation took %v", time.Since(began))

	waiting := make(chan *stack.Response, 1)
	go func() {
		defer close(waiting)
		if a, err := post(t.Context(), request(304, tokens, 1)); err == nil {
			waiting <- a
		}
	}()
	eventually(t, func() error {
		if n := metric(t, s, "kvepp_held_requests"); n != 1 {
			return fmt.Errorf("%v requests wait", n)
		}
		return nil
	})
	cancel() // the first conversation's client goes away
	if a := <-waiting; a == nil || a.Status != http.StatusOK {
		t.Errorf("after the first conversation ended: %+v", a)
	}
}
