package join

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"kvepp/pool"
)

// TestMixedFrontends: kvepp warns about a frontend that serves one model in two ways.
func TestMixedFrontends(t *testing.T) {
	e := func(address, model, namespace string, role pool.Role) pool.Endpoint {
		return pool.Endpoint{Address: address, Model: model, Namespace: namespace, Role: role}
	}
	for _, c := range []struct {
		name      string
		endpoints []pool.Endpoint
		warned    bool
	}{
		{"none", nil, false},
		{"a frontend that serves one way", []pool.Endpoint{e("a:1", "m", "ns", pool.Decode),
			e("a:1", "m", "ns", pool.Decode),
			e("", "m", "ns", pool.Prefill)}, false},
		{"a frontend for each way", []pool.Endpoint{e("a:2", "m", "ns", pool.Decode),
			e("a:3", "m", "ns", pool.Aggregated), e("a:4", "m", "other", pool.Aggregated)}, false},
		{"two models", []pool.Endpoint{e("a:5", "m", "ns", pool.Aggregated), e("a:5", "n", "other", pool.Aggregated)},
			false},
		{"endpoints without a Dynamo namespace", []pool.Endpoint{e("a:6", "m", "", pool.Aggregated),
			e("a:6", "m", "", pool.Decode)}, false},
		{"aggregated beside decode", []pool.Endpoint{e("a:7", "m", "ns", pool.Aggregated),
			e("a:7", "m", "ns", pool.Decode)}, true},
		{"two namespaces", []pool.Endpoint{e("a:8", "m", "ns", pool.Aggregated),
			e("a:8", "m", "other", pool.Aggregated)}, true},
	} {
		var log bytes.Buffer
		found := newProblems(slog.New(slog.NewTextHandler(&log, nil)))
		for _, now := range [][]pool.Endpoint{c.endpoints, c.endpoints, nil, c.endpoints} {
			found.begin()
			found.warnMixedFrontends(now)
		}
		// One warning while the problem lasts, and another one when it returns.
		if n := strings.Count(log.String(), "in two ways"); n != 0 && n != 2 || (n == 2) != c.warned {
			t.Errorf("%s: %d warnings: %s", c.name, n, log.String())
		}
	}
}
