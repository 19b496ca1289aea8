package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
)

func TestDecisions(t *testing.T) {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	p := pool.New(log)
	p.Update(
		[]pool.Endpoint{
			{Name: "w0", Address: "10.0.0.1:8000", InstanceID: 7, BlockSize: 4, KVEvents: "tcp://10.0.0.1:5557"},
		},
	)
	r := router.New(
		router.Config{Scoring: scoring.DefaultConfig(), Keep: 5},
		p,
		index,
		scoring.NewActiveSequences(),
		metrics.New(),
		log,
	)
	mux := http.NewServeMux()
	HandleDecisions(mux, r, "")
	get := func(query string) (status int, list []map[string]any) {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", "/debug/decisions"+query, nil))
		var found struct{ Decisions []map[string]any }
		if err := json.Unmarshal(w.Body.Bytes(), &found); err != nil {
			t.Fatalf("%s: %v", w.Body, err)
		}
		return w.Code, found.Decisions
	}
	for _, id := range []string{"a", "b"} {
		route, err := r.Route(
			t.Context(),
			&router.Request{ID: id, Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":[1,2,3,4,5,6]}`)},
		)
		if err != nil {
			t.Fatal(err)
		}
		defer route.Free()
	}
	if status, list := get(""); status != http.StatusOK || len(list) != 2 || list[0]["request_id"] != "b" {
		t.Errorf("%d, %v: want b, then a", status, list)
	}
	for _, bad := range []string{"?n=0", "?n=x", "?cold=maybe", "?slow=5", "?slow=-1s", "?wroker=w0"} {
		if status, _ := get(bad); status != http.StatusBadRequest {
			t.Errorf("%s: %d", bad, status)
		}
	}
	if _, list := get("?n=1"); len(list) != 1 {
		t.Errorf("n=1: %v", list)
	}
	_, list := get("?request_id=b")
	if len(list) != 1 {
		t.Fatalf("request_id=b: %v", list)
	}
	c := list[0]["candidates"].([]any)[0].(map[string]any)
	// 6 tokens of this request and 6 that wait are 3 blocks; the block that both requests hold counts once.
	for key, want := range map[string]any{"name": "w0", "chosen": true, "cost": 4.0, "block_size": 4.0,
		"request_tokens": 6.0, "waiting_prefill_tokens": 6.0,
		"device_blocks": 0.0, "credit_blocks": 0.0, "decode_blocks": 1.0, "active_requests": 1.0,
		"cost_multiplier": 1.0} {
		if c[key] != want {
			t.Errorf("%s: %v, want %v", key, c[key], want)
		}
	}
	if w := list[0]["weights"].(map[string]any); w["mode"] != "kv" || w["prefill_load_scale"] != 1.0 ||
		w["host_cache_hit_weight"] != 0.75 {
		t.Errorf("weights: %v", w)
	}
	if w := list[0]["worker"].(map[string]any); w["name"] != "w0" || w["instance_id"] != 7.0 {
		t.Errorf("worker: %v", w)
	}
}

// TestFollowDecisions: the stream has each decision when its request has ended, and ends with its client.
func TestFollowDecisions(t *testing.T) {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	p := pool.New(log)
	p.Update([]pool.Endpoint{{Name: "w0", Address: "10.0.0.1:8000", BlockSize: 4}})
	m := metrics.New()
	r := router.New(router.Config{Scoring: scoring.DefaultConfig(), Keep: 5, Metrics: m.NewRouter(metrics.Identity{}),
		Picker: m.NewPicker()}, p, index, scoring.NewActiveSequences(), m, log)
	mux := http.NewServeMux()
	HandleDecisions(mux, r, "")
	server := httptest.NewServer(mux)
	defer server.Close()
	ctx, leave := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "GET", server.URL+"/debug/decisions?follow=1&status=5xx", nil)
	resp, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	if !lines.Scan() || lines.Text() != ": decisions" || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("the stream begins with %q, %v", lines.Text(), resp.Header)
	}
	for _, status := range []string{"200", "503"} {
		route, err := r.Route(t.Context(), &router.Request{ID: "r" + status, Path: "/v1/completions",
			Body: []byte(`{"model":"m","prompt":[1,2,3,4,5,6]}`)})
		if err != nil {
			t.Fatal(err)
		}
		route.Free()
		route.Ended(router.Response{Status: status, Complete: true, CachedTokens: 4, Tokens: 2})
	}
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "data: ") {
	}
	var d Decision
	if err := json.Unmarshal([]byte(strings.TrimPrefix(lines.Text(), "data: ")), &d); err != nil {
		t.Fatalf("%q: %v", lines.Text(), err)
	}
	if o := d.Outcome; d.RequestID != "r503" || o == nil || o.Status != "503" || *o.CachedTokens != 4 || o.Tokens != 2 {
		t.Errorf("followed %+v", d)
	}
	leave()
	for range router.MaxFollowers { // the place of the client that left is free again
		for f := r.Follow(router.Query{}, 0); ; f = r.Follow(router.Query{}, 0) {
			if f != nil {
				defer f.Close()
				break
			}
			runtime.Gosched()
		}
	}
}

// A request with a prefill and a decode worker has both legs.
func TestDecisionOfTwoLegs(t *testing.T) {
	cost := func(name string, cost float64) []router.Cost {
		return []router.Cost{
			{Name: "other", Cost: 99},
			{Name: name, Cost: cost, Terms: scoring.Terms{BlockSize: 4, UnitTokens: 4}},
		}
	}
	d := asJSON(&router.Record{Decision: router.Decision{Name: "d", Costs: cost("d", 2), Chosen: 1,
		Prefill: &router.Prefill{Name: "p", Rank: 3, InstanceID: 9, Costs: cost("p", 1), Chosen: 1}}})
	x := d.Prefill
	if x == nil || x.Worker != (Destination{"p", 3, 9, ""}) || len(x.Candidates) != 2 || !x.Candidates[1].Chosen ||
		x.Candidates[0].Chosen ||
		*x.Candidates[1].Cost != 1 ||
		x.UnitTokens != 4 {
		t.Errorf("prefill leg: %+v", x)
	}
	if d.Worker.Name != "d" || len(d.Candidates) != 2 || *d.Candidates[1].Cost != 2 {
		t.Errorf("decode leg: %+v", d)
	}
}

// Costs of workers that cannot be chosen may be infinite or NaN, which JSON cannot write.
func TestDecisionWithoutFiniteCost(t *testing.T) {
	d := asJSON(
		&router.Record{
			Decision: router.Decision{
				Costs: []router.Cost{{Name: "a", Cost: math.NaN()}, {Name: "b", Cost: math.Inf(1)}},
			},
		},
	)
	text, err := json.Marshal(d)
	if err != nil || d.Candidates[0].Cost != nil || d.Candidates[1].Cost != nil {
		t.Errorf("%s, %v", text, err)
	}
}
