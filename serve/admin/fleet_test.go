package admin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/router"
	"kvepp/scoring"
)

// TestFleetHistory: the history has the differences of samples, at most HistoryLength, and forgets who left.
func TestFleetHistory(t *testing.T) {
	var past History
	now := Fleet{Time: time.Unix(1000, 0), Workers: []FleetWorker{{Name: "a"}, {Name: "b"}}}
	for i := range HistoryLength + 5 {
		past.Add(&now)
		now.Time = now.Time.Add(HistoryInterval)
		now.Workers[0].Requests += 20
		if i%2 == 0 {
			now.Workers[0].PromptTokens += 100
			now.Workers[0].CachedTokens += 25
		}
		now.Workers[0].Blocks = i
	}
	mux := http.NewServeMux()
	HandleFleet(mux, func() Fleet {
		return Fleet{Workers: []FleetWorker{{Name: "a"}, {Name: "b"}, {Name: "new"}}}
	}, &past)
	get := func(path string) (f Fleet) {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if err := json.Unmarshal(w.Body.Bytes(), &f); err != nil {
			t.Fatal(err)
		}
		return f
	}
	f := get("/debug/fleet?history=1")
	a := f.Workers[0].History
	if len(a.RequestsPerSecond) != HistoryLength || a.RequestsPerSecond[0] != 2 || a.Blocks[HistoryLength-1] != 63 {
		t.Errorf("%+v", a)
	}
	shares := 0
	for _, share := range a.HitShare {
		if share != nil {
			shares++
			if *share != 0.25 {
				t.Errorf("share %v", *share)
			}
		}
	}
	if shares != HistoryLength/2 || f.Workers[2].History != nil || get("/debug/fleet").Workers[0].History != nil {
		t.Errorf("%d shares; %+v", shares, f.Workers[2].History)
	}
	past.Add(&Fleet{Workers: now.Workers[1:]})
	if f := get("/debug/fleet?history=1"); f.Workers[0].History != nil || f.Workers[1].History == nil {
		t.Error("a worker that left has a history")
	}
	many := Fleet{}
	for i := range 2 * historyWorkers {
		many.Workers = append(many.Workers, FleetWorker{Name: fmt.Sprint(i)})
	}
	if past.Add(&many); len(past.workers) != historyWorkers {
		t.Errorf("%d workers have a history", len(past.workers))
	}
}

// TestFleetFindings: a fleet without trouble has no findings.
func TestFleetFindings(t *testing.T) {
	worker := func(name string, requests uint64, state string) FleetWorker {
		return FleetWorker{Name: name, Requests: requests, States: []WorkerCondition{{State: state}}}
	}
	for _, c := range []struct {
		fleet Fleet
		want  string // in the only finding; empty: there is none
	}{
		{Fleet{Workers: []FleetWorker{worker("a", 100, "serving"), worker("b", 110, "serving")}}, ""},
		{Fleet{Workers: []FleetWorker{worker("a", 19, "serving"), worker("b", 0, "serving")}}, ""},
		{Fleet{Workers: []FleetWorker{worker("a", 900, "serving")}}, ""},
		{Fleet{Workers: []FleetWorker{worker("a", 90, "serving"), worker("b", 10, "serving")}}, "one hot worker: a/0"},
		{Fleet{Workers: []FleetWorker{worker("a", 1, StateSilent), worker("b", 1, "serving")}}, "1 of 2 workers"},
		{Fleet{Sessions: &FleetSessions{Kept: 99, Moved: 1}}, ""},
		{Fleet{Sessions: &FleetSessions{Kept: 8, Moved: 8}}, "sessions hop: 50 %"},
	} {
		got := c.fleet.findings()
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)) {
			t.Errorf("%+v: %q, want %q", c.fleet, got, c.want)
		}
	}
}

// TestWhyCandidatesLost: each candidate has its parts and the reason why another was chosen.
func TestWhyCandidatesLost(t *testing.T) {
	cfg := scoring.DefaultConfig()
	cost := func(name string, x scoring.Terms) router.Cost {
		x.BlockSize, x.ISLTokens = 16, 1600
		return router.Cost{Name: name, Cost: cfg.Cost(&x), Terms: x}
	}
	all, _ := candidates([]router.Cost{
		cost("chosen", scoring.Terms{DeviceBlocks: 60, DecodeBlocks: 100}),
		cost("cold", scoring.Terms{DecodeBlocks: 100}),
		cost("loaded", scoring.Terms{DeviceBlocks: 60, DecodeBlocks: 200}),
		cost("waits", scoring.Terms{DeviceBlocks: 60, DecodeBlocks: 100, PrefillTokens: 3200}),
		cost("equal", scoring.Terms{DeviceBlocks: 60, DecodeBlocks: 100}),
		cost("cheaper", scoring.Terms{DeviceBlocks: 90, DecodeBlocks: 100}),
	}, 0, &cfg)
	for i, want := range []string{"", "60 blocks more: it has less of the prompt cached",
		"100 blocks more: its active requests hold", "200 blocks more: more prompt tokens wait", "drawn at random",
		"30 blocks less: the temperature"} {
		if !strings.Contains(all[i].Lost, want) || want == "" && all[i].Lost != "" || len(all[i].Parts) < 2 {
			t.Errorf("%s: %q, want %q; %v", all[i].Name, all[i].Lost, want, all[i].Parts)
		}
	}
}
