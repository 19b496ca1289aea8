package extproc

import (
	"fmt"
	"strings"
	"testing"

	"kvepp/router"
)

// TestLoggedMoves: for each chosen endpoint and outcome only the first request is the first, and memory is bounded.
func TestLoggedMoves(t *testing.T) {
	var l loggedMoves
	for _, c := range []struct {
		address, outcome string
		first            bool
	}{{"a:1", "moved", true}, {"a:1", "moved", false}, {"a:1", "unknown", true}, {"b:1", "moved", true},
		{"b:1", "moved", false}} {
		if got := l.first(c.address, c.outcome); got != c.first {
			t.Errorf("%s %s: first is %v", c.address, c.outcome, got)
		}
	}
	for i := range 5 * maxLoggedMoves {
		l.first(fmt.Sprint(i), "moved")
	}
	if len(l.logged) > maxLoggedMoves {
		t.Errorf("%d are remembered", len(l.logged))
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
