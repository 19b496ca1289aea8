package client

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"kvepp/router/ladder"
	"kvepp/serve/admin"
)

// TestLadderTable: the table has a line for each rung and each loss, with what to do about it.
func TestLadderTable(t *testing.T) {
	sums := new(ladder.Ladder)
	sums.Init("idle")
	sums.Add(&ladder.Climb{Model: "m", Known: true, NotInFleet: ladder.Evicted, NotChosen: ladder.Load,
		Tokens: [ladder.Rungs]int{1000, 800, 600, 600, 400, 400}})
	mux := http.NewServeMux()
	admin.HandleLadder(mux, sums, ladder.NewSeen(0), func() uint64 { return 1 }, true)
	web := httptest.NewServer(mux)
	defer web.Close()
	c := &server{address: strings.TrimPrefix(web.URL, "http://")}
	var out bytes.Buffer
	if err := c.ladder(t.Context(), false, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"model idle, 0 requests\n", "model m, 1 requests\n", "all models, 1 requests\n",
		"prompt          1000  100.0 %  " + strings.Repeat("#", 40) + "\n",
		"  - first_time  200    20.0 %  \n",
		"  - evicted     200    20.0 %  the caches are too small",
		"  - load        200    20.0 %  workers with the blocks hold more requests",
		"=> wrong template: ", "=> evicted loses the most that can be changed, 20 % of the prompt tokens: the caches",
		"delivered       400    40.0 %  " + strings.Repeat("#", 16) + "\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "--router-policy") {
		t.Errorf("it recommends the policy that is in use:\n%s", out.String())
	}
	out.Reset()
	if err := c.ladder(t.Context(), true, &out); err != nil || !strings.Contains(out.String(), `"cause": "evicted",`) {
		t.Errorf("--json: %v, %s", err, out.String())
	}
}

// TestLadderAdvice: each cause that is not as it should be has advice, and docs/hit-rate.md names each.
func TestLadderAdvice(t *testing.T) {
	page, err := os.ReadFile("../../docs/hit-rate.md")
	if err != nil {
		t.Fatal(err)
	}
	for c := range ladder.Causes {
		if !strings.Contains(string(page), "`"+c.String()+"`") {
			t.Errorf("docs/hit-rate.md does not name %s", c)
		}
		for _, byTime := range []bool{false, true} {
			advice, none := c.Advice(byTime), c == ladder.FirstTime || c == ladder.Preference
			if (advice == "") != none || byTime && strings.Contains(advice, "policy") {
				t.Errorf("%s, by time %v: advice %q", c, byTime, advice)
			}
		}
	}
}
