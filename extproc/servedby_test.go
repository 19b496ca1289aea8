package extproc

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"kvepp/internal/logtest"
	"kvepp/router"
)

// TestSeenSet: only the first of equal keys is new, and memory is bounded.
func TestSeenSet(t *testing.T) {
	var l seenSet[move]
	for _, c := range []struct {
		address, outcome string
		first            bool
	}{{"a:1", "moved", true}, {"a:1", "moved", false}, {"a:1", "unknown", true}, {"b:1", "moved", true},
		{"b:1", "moved", false}} {
		if got := l.add(move{c.address, c.outcome}); got != c.first {
			t.Errorf("%s %s: first is %v", c.address, c.outcome, got)
		}
	}
	for i := range 5 * maxSeen {
		l.add(move{fmt.Sprint(i), "moved"})
	}
	if len(l.keys) > maxSeen {
		t.Errorf("%d are remembered", len(l.keys))
	}
}

// TestLikelyCause: if the proxy tried twice, the chosen endpoint failed. If the first try went to another endpoint, the
// proxy does not have the chosen one. A proxy that reports no number of tries may have retried on a fallback endpoint.
func TestLikelyCause(t *testing.T) {
	for _, c := range []struct {
		served, outcome string
		tries           int
		want            string
	}{
		{"10.0.0.2:8000", router.ServedByOther,
			0, "the proxy retried on a fallback endpoint of kvepp's; or the proxy's cluster"},
		{"10.0.0.2:8000", router.ServedByOther, 1, "does not have the chosen address, or its health checks"},
		{"10.0.0.2:8000", router.ServedByOther, 2, "the proxy retried on another one"},
		{"10.0.0.3:8000", router.ServedByOther, 0, "does not have the chosen address, or its health checks"},
		{"10.0.0.9:8000", router.ServedByUnknown, 1, "kvepp has none at the address"},
	} {
		route := &router.Route{ServedBy: router.ServedBy{Address: c.served, Outcome: c.outcome}}
		route.Fallbacks = []string{"10.0.0.2:8000"}
		if got := likelyCause(route, c.tries); !strings.Contains(got, c.want) {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// TestLists: kvepp names several endpoints only to a proxy whose response has shown that it takes them, and says once
// why not.
func TestLists(t *testing.T) {
	for gateway, takes := range map[string]bool{"": false, "own": true, "istio": false, "conformance": false} {
		cfg := Config{Gateway: gateway, OverloadStatus: 429}
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		b := newBench(t, cfg)
		got := b.server.exchange(t.Context()).takesLists
		if got != takes || cfg.Conformance != (gateway == "conformance") {
			t.Errorf("--gateway %s: a list is %v, conformance %v", gateway, got, cfg.Conformance)
		}
	}
	b := newBench(t, Config{})
	var log logtest.Log
	b.server.log = slog.New(slog.NewTextHandler(&log, nil))
	response := func(proxy string, e effect) bool {
		x := &exchange{Server: b.server, proxy: proxy, route: new(router.Route)}
		x.takesLists = b.server.listTakers.has(proxy)
		x.route.Fallbacks = []string{"10.0.0.2:8000"}
		x.learnLists(&e)
		return b.server.listTakers.has(proxy)
	}
	const why = "kvepp names it one"
	if response("10.9.0.1", effect{Status: "503"}) || log.Count(why) != 0 {
		t.Error("a response of the proxy's own counts")
	}
	if response("10.9.0.1", effect{Status: "200", OfEndpoint: true}) ||
		response("10.9.0.1", effect{Status: "200", OfEndpoint: true, ServedBy: "10.0.0.1:8000"}) ||
		log.Count(why) != 1 {
		t.Errorf("a proxy that does not count its attempts takes a list: %s", log.String())
	}
	if !response("10.9.0.2", effect{Status: "200", OfEndpoint: true, ServedBy: "10.0.0.1:8000", Tries: 1}) {
		t.Error("a proxy that says which endpoint served after how many attempts takes no list")
	}
	if !response("10.9.0.2", effect{Status: "404"}) ||
		!response("10.9.0.2", effect{Status: "500", ServedBy: "10.0.0.1:8000"}) {
		t.Error("a response that a list does not cause ends the lists")
	}
	if response("10.9.0.2", effect{Status: "503"}) {
		t.Error("a proxy gets further lists after a request with one failed")
	}
	if response("10.9.0.1", effect{}) {
		t.Error("one proxy's response counts for another")
	}
}
