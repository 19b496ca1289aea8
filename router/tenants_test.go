package router

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics/metricstest"
)

// TestTenantsShareTheQueue: a tenant is charged the prompt tokens that its engine had to compute and the tokens of its
// responses, here and at other replicas, and the least served goes next; the others hear of each charge. Clocks that
// jump change nothing.
func TestTenantsShareTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, "fcfs", maxed(workers(1), 100)...)
		charged, said := map[uint64]int{}, map[uint64][]string{}
		cfg := h.cfg
		cfg.Charged = func(tenant uint64, tokens int, turn, waits bool) {
			charged[tenant] += tokens
			said[tenant] = append(said[tenant], fmt.Sprint(tokens, turn, waits))
		}
		h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
		h.Export()
		a, n := arriveAt(h), 0
		send := func(name string, isl int) {
			n++
			req := completion("m", tokens(1000*n, isl))
			req.Hints.Fairness, req.Received = name[:1], time.Now().Add(time.Duration(n%3-1)*1000*time.Hour)
			a.send(t.Context(), name, req)
		}
		end := func(name string, prompt, cached, output int) {
			a.route(name).Ended(Response{Status: "200", Complete: true, PromptTokens: prompt, CachedTokens: cached,
				Tokens: output})
			a.route(name).Free()
			synctest.Wait()
		}
		send("a1", 40)
		send("a2", 40)
		send("b1", 400)
		end("a1", 0, -1, 0) // a was charged 40 and b nothing
		if a.order() != "a1 b1" {
			t.Fatalf("went: %s", a.order())
		}
		send("b2", 40)
		end("b1", 400, 380, 10) // b is given back most of it: 30
		if a.order() != "a1 b1 b2" {
			t.Fatalf("went: %s", a.order())
		}
		send("b3", 40)
		send("c1", 40)
		end("b2", 40, 0, 500)
		if a.order() != "a1 b1 b2 c1" { // as served as b before its last turn
			t.Fatalf("went: %s", a.order())
		}
		send("c2", 40)
		id := uint64(a.route("c1").tenant)
		if charged[id] != 40 || charged[uint64(a.route("b1").tenant)] != 400+40+500 {
			t.Errorf("the others heard of %v", charged)
		}
		h.HeardTenant(id, 10_000, true, false) // at another replica
		h.HeardTenant(12345, 10_000, true, false)
		end("c1", 40, 0, 0)
		end("a2", 40, 0, 0)
		if a.order() != "a1 b1 b2 c1 a2 b3" {
			t.Fatalf("went: %s", a.order())
		}
		end("b3", 0, -1, 0)
		end("c2", 0, -1, 0)
		id = uint64(a.route("a1").tenant)
		if got := strings.Join(said[id], ", "); got != "40 true false, 0 false true, 40 true false" {
			t.Errorf("of a the others heard: %s", got)
		}
		said = map[uint64][]string{}
		send("d1", 40)
		ctx, leave := context.WithCancel(t.Context())
		n++
		leaves := completion("m", tokens(1000*n, 40))
		leaves.Hints.Fairness = "a"
		a.send(ctx, "a3", leaves)
		leave()
		synctest.Wait()
		if got := strings.Join(said[id], ", "); got != "0 false true, 0 false false" {
			t.Errorf("of a, which left, the others heard: %s", got)
		}
		end("d1", 0, -1, 0)
		if n := metricstest.Read(t, h.metrics.Registry).Of("kvepp_queue_tenants").Value(); n != 4 {
			t.Errorf("%v tenants are counted, want 4", n)
		}
		h.wantTurnFree()
	})
}

// TestTenantHeader: if the operator says which header names tenants, that of the clients does not, and
// --ignore-client-hints does not drop it.
func TestTenantHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newQueueHouse(t, "fcfs", maxed(workers(1), 100)...)
		cfg := h.cfg
		cfg.TenantHeader, cfg.IgnoreHints = "x-api-key", true
		h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
		a := arriveAt(h)
		for i, name := range []string{"a1", "a2", "a3", "b1"} {
			req := completion("m", tokens(1000*i, 40))
			req.Hints.Sender, req.Hints.Fairness = name[:1], name
			a.send(t.Context(), name, req)
		}
		for _, name := range []string{"a1", "b1", "a2", "a3"} {
			if a.route(name) == nil {
				t.Fatalf("went: %s", a.order())
			}
			a.route(name).Free()
			synctest.Wait()
		}
	})
}
