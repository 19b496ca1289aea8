package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"

	"kvepp/pool"
)

func TestMixedFrontends(t *testing.T) {
	run := fmt.Sprint(rand.Uint64()) // what has been warned of once is never again, in no run of this test
	e := func(address, model, namespace string, role pool.Role) pool.Endpoint {
		return pool.Endpoint{Address: address + run, Model: model, Namespace: namespace, Role: role}
	}
	for _, c := range []struct {
		name      string
		endpoints []pool.Endpoint
		warned    bool
	}{
		{"none", nil, false},
		{"one frontend, one way", []pool.Endpoint{e("a:1", "m", "ns", pool.Decode), e("a:1", "m", "ns", pool.Decode), e("", "m", "ns", pool.Prefill)}, false},
		{"each its own frontend", []pool.Endpoint{e("a:2", "m", "ns", pool.Decode), e("a:3", "m", "ns", pool.Aggregated), e("a:4", "m", "other", pool.Aggregated)}, false},
		{"two models", []pool.Endpoint{e("a:5", "m", "ns", pool.Aggregated), e("a:5", "n", "other", pool.Aggregated)}, false},
		{"not Dynamo's, as far as is known", []pool.Endpoint{e("a:6", "m", "", pool.Aggregated), e("a:6", "m", "", pool.Decode)}, false},
		{"aggregated beside decode", []pool.Endpoint{e("a:7", "m", "ns", pool.Aggregated), e("a:7", "m", "ns", pool.Decode)}, true},
		{"two namespaces", []pool.Endpoint{e("a:8", "m", "ns", pool.Aggregated), e("a:8", "m", "other", pool.Aggregated)}, true},
	} {
		var log bytes.Buffer
		for range 2 {
			tellMixed(c.endpoints, slog.New(slog.NewTextHandler(&log, nil)))
		}
		if n := strings.Count(log.String(), "in two ways"); n > 1 || (n == 1) != c.warned {
			t.Errorf("%s: %d warnings: %s", c.name, n, log.String())
		}
	}
}
