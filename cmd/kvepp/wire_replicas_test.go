package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"kvepp/router"
	"kvepp/test/harness/process"
)

// startSharing starts n kvepps in this process whose flags make them replicas of each other.
func startSharing(t *testing.T, n int, endpoints string, flags ...string) (all []*served) {
	t.Helper()
	first, err := process.Ports(n)
	if err != nil {
		t.Fatal(err)
	}
	var peers []string
	for i := range n {
		peers = append(peers, fmt.Sprintf("127.0.0.1:%d", first+i))
	}
	for i := range n {
		all = append(all, serveHere(t, endpoints, append([]string{"--bind-address=127.0.0.1",
			fmt.Sprintf("--replica-port=%d", first+i), "--replica-peers=" + strings.Join(peers, ","),
			"--warmup-timeout=10ms"}, flags...)...))
	}
	return all
}

// awaitThat waits for a condition.
func awaitThat(t *testing.T, what string, condition func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := process.Until(ctx, condition); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// TestSharedBooksPredict: in approximate mode, a replica assumes that a worker holds what a peer sent there.
func TestSharedBooksPredict(t *testing.T) {
	all := startSharing(t, 2, threeWorkers, "--router-kv-events=false")
	next := 0
	awaitThat(t, "a peer's request to be predicted", func() error {
		next += 100
		request := tokensRequest("", tokenIDs(next, 42), "")
		route := all[0].route(request)
		route.Free()
		<-time.After(20 * time.Millisecond)
		e, err := all[1].router.Explain(t.Context(), request)
		if err == nil && (e.Record.Name != route.Name || e.Record.PredictedCachedTokens != 40) {
			err = fmt.Errorf("the peer's request went to %s; this one would go to %s with %d tokens cached", route.Name,
				e.Record.Name, e.Record.PredictedCachedTokens)
		}
		return err
	})
}

// TestSharedBooksHold: a request waits while a peer's request keeps the only worker busy, and goes after its end.
func TestSharedBooksHold(t *testing.T) {
	all := startSharing(t, 2, "endpoints:\n- {name: a, address: '10.0.0.1:8000', model: m, blockSize: 4, "+
		"maxNumBatchedTokens: 100}\n", "--router-queue-threshold=0")
	first := all[0].route(tokensRequest("", tokenIDs(1, 400), ""))
	awaitThat(t, "the peer's copy", func() error {
		if all[1].book.Load(0).PrefillTokens == 0 {
			return errors.New("it has no tokens to prefill")
		}
		return nil
	})
	went := make(chan *router.Route, 1)
	go func() {
		r, err := all[1].router.Route(t.Context(), tokensRequest("", tokenIDs(1000, 400), ""))
		if err != nil {
			t.Error(err)
		}
		went <- r
	}()
	awaitThat(t, "the request to wait", func() error {
		if n := all[1].router.Waiting("default"); n != 1 {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
	select {
	case <-went:
		t.Error("the request went while the worker was busy")
	default:
	}
	first.MarkPrefillCompleted()
	(<-went).Free()
	first.Free()
}
