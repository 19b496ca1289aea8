package e2e

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"kvepp/test/harness/stack"
)

// TestLoadOfRunningRequests reads, in a router mode without tokenizing, the load that long responses add to their
// worker. A non-streamed response counts as waiting until its prompt should be prefilled, a stream until its first
// content. Then the load grows with the response.
func TestLoadOfRunningRequests(t *testing.T) {
	s := start(
		t,
		stack.Config{
			Workers: 2,
			KveppFlags: []string{"--router-mode=round-robin", "--router-prefill-tokens-per-second=20000",
				"--router-track-output-blocks"},
		},
	)
	nothingLeft(t, s)
	before := ""
	for range 6 {
		a := chat(t, s.Envoy.URL, novel(), true, nil)
		if a.Worker == before || a.Reason != "router_mode" {
			t.Errorf("on %s after %s, reason %s; want workers in turn", a.Worker, before, a.Reason)
		}
		before = a.Worker
	}
	// busy returns the worker that has a request, as it was when another request was routed.
	busy := func() (stack.Candidate, error) {
		a := chat(t, s.Envoy.URL, novel(), true, nil)
		d, err := s.Decision(t.Context(), a.Header.Get("x-kvepp-request-id"))
		if err != nil {
			return stack.Candidate{}, err
		}
		for _, c := range d.Candidates {
			if c.ActiveRequests == 1 {
				return c, nil
			}
		}
		return stack.Candidate{}, fmt.Errorf("no worker has a request: %+v", d.Candidates)
	}
	for _, stream := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			stack.Chat(ctx, http.DefaultClient, s.Envoy.URL, nil, novel(), stream, map[string]any{"max_tokens": 20000})
		}()
		blocks := 0.0
		eventually(t, func() error {
			c, err := busy()
			if err == nil && c.WaitingTokens > 0 {
				err = fmt.Errorf("stream %v: %d tokens still count as waiting", stream, c.WaitingTokens)
			}
			blocks = c.DecodeBlocks
			return err
		})
		if stream {
			eventually(t, func() error {
				c, err := busy()
				if err == nil && c.DecodeBlocks < blocks+3 {
					err = fmt.Errorf("%v blocks, %v before", c.DecodeBlocks, blocks)
				}
				return err
			})
		}
		select {
		case <-done:
			t.Errorf("stream %v: the response ended during the check", stream)
		default:
		}
		cancel()
		<-done
		eventually(t, func() error {
			if n := metric(t, s, "kvepp_active_requests"); n != 0 {
				return fmt.Errorf("%v requests are booked", n)
			}
			return nil
		})
	}
}
