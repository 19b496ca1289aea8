package router

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/router/queue"
)

// TestBands: requests wait while the workers have as many requests as the gate lets them. A higher priority goes first,
// in one band tenants take turns, in another the earliest deadline goes first, and a band refuses what is above its
// limit, or waits too long.
func TestBands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bands := &queue.Bands{
			ByPriority: map[int]queue.Band{50: {Fair: true}, 0: {Policy: queue.EDF, Timeout: 45 * time.Second}},
			Negative:   queue.Band{MaxRequests: 2, Timeout: 10 * time.Second},
			MaxWait:    time.Minute,
			Gate:       queue.Gate{Requests: 2, Ceiling: 1},
		}
		h := newHouse(t, workers(2)...)
		cfg := h.cfg
		cfg.Queue, cfg.Objectives = (&queue.Config{Bands: bands, Size: 100}).Room(), new(Objectives)
		cfg.Objectives.Set(map[string]int32{"high": 50, "low": -5})
		h.Router = New(cfg, h.pool, h.index, h.book, h.metrics, h.log)
		h.pool.OnLeave(h.book.Forget)
		a, n := arriveAt(h), 0
		send := func(name, objective, tenant string, slo time.Duration) {
			n++
			req := completion("m", tokens(1000*n, 40))
			req.Hints.Objective, req.Hints.Fairness, req.Hints.FirstToken = objective, tenant, slo
			req.Received = time.Now()
			a.send(t.Context(), name, req)
		}
		for i := range 4 {
			send(fmt.Sprint("r", i), "", "", 0)
		}
		if a.order() != "r0 r1 r2 r3" {
			t.Fatalf("at once: %s", a.order())
		}
		send("low1", "low", "", 0)
		send("low2", "low", "", 0)
		send("low3", "low", "", 0)
		send("none", "", "", 0)
		send("later", "", "", 9*time.Second)
		send("soon", "", "", 5*time.Second)
		for _, name := range []string{"a1", "a2", "a3", "b1", "c1"} {
			send(name, "high", name[:1], 0)
		}
		before := strings.TrimPrefix(a.order(), "r0 r1 r2 r3 ")
		if !strings.HasPrefix(before, "low3: "+ErrQueueFull.Error()) || h.allWaiting() != 10 {
			t.Errorf("a full band: %s; %d wait", before, h.allWaiting())
		}
		end := func(name string) {
			a.route(name).Free()
			synctest.Wait()
		}
		last := a.order()
		for _, x := range [][2]string{{"r0", "a1"}, {"r1", "b1"}, {"r2", "c1"}, {"r3", "a2"}, {"a1", "a3"},
			{"b1", "soon"},
			{"c1", "later"}, {"a2", "none"}, {"a3", "low1"}} {
			if end(x[0]); a.order() != last+" "+x[1] {
				t.Fatalf("after %s: %s, want %s", x[0], strings.TrimPrefix(a.order(), last), x[1])
			}
			last = a.order()
		}
		<-time.After(11 * time.Second)
		if want := "low2: " + ErrQueueTimeout.Error(); !strings.HasSuffix(a.order(), want) {
			t.Errorf("went: %s, want %s", a.order(), want)
		}
		h.pool.Update(nil)
		<-time.After(time.Second)
		send("held", "low", "", 0)
		<-time.After(2 * time.Minute)
		if !strings.Contains(a.order(), "held: "+ErrNoEndpoints.Error()) {
			t.Errorf("with an empty pool: %s", a.order())
		}
	})
}

// TestGate: a worker is as saturated as the value with the greatest share says.
func TestGate(t *testing.T) {
	g := queue.Gate{Requests: 10, Tokens: 1000, Steps: 5, Usage: .8}
	for _, c := range []struct {
		requests, tokens   int
		steps, usage, want float64
	}{{5, 0, 0, 0, .5}, {0, 2000, 0, 0, 2}, {1, 1, 5, 0, 1}, {1, 1, 0, .4, .5}} {
		if got := g.Saturation(c.requests, c.tokens, c.steps, c.usage); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	if got := saturation(&g, nil, nil); got != 1 {
		t.Errorf("an empty pool has saturation %v, want 1", got)
	}
	cfg := queue.Config{Bands: &queue.Bands{}, Threshold: set(2.0)}
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "leave out --router-queue-threshold") {
		t.Errorf("bands and a threshold: %v", err)
	}
}
