package admin

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/router/eject"
	"kvepp/router/session"
	"kvepp/scoring"
)

var quiet = slog.New(slog.DiscardHandler)

// operated is a router with the admin API.
type operated struct {
	*router.Router
	t      *testing.T
	pool   *pool.Pool
	health *eject.Tracker
	mux    *http.ServeMux
}

func newOperated(t *testing.T, endpoints ...pool.Endpoint) *operated {
	t.Helper()
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	o := &operated{t: t, pool: pool.New(quiet), mux: http.NewServeMux(),
		health: eject.New(
			eject.Config{On: true, ConsecutiveFailures: 1, FailurePercent: 50, MaxPercent: 50, Time: time.Minute},
			quiet,
		)}
	o.pool.Watch(o.health)
	o.pool.OnCordon(o.health.PoolCordon)
	o.pool.Update(endpoints)
	sessions := session.NewTable(session.Config{TTL: time.Minute})
	o.Router = router.New(
		router.Config{Scoring: scoring.DefaultConfig(), Eject: o.health, Sessions: sessions},
		o.pool,
		index,
		scoring.NewActiveSequences(),
		metrics.New(),
		quiet,
	)
	HandleWorkers(o.mux, o.Router)
	return o
}

// ask sends a request, for example "POST /workers/a/cordon", and returns the response's body.
func (o *operated) ask(request string, status int) string {
	o.t.Helper()
	method, path, _ := strings.Cut(request, " ")
	w := httptest.NewRecorder()
	o.mux.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	if w.Code != status {
		o.t.Errorf("%s: status %d, want %d: %s", request, w.Code, status, w.Body)
	}
	return w.Body.String()
}

// endpoint is ask for requests whose response is an endpoint.
func (o *operated) endpoint(request string) (e Endpoint) {
	o.t.Helper()
	if err := json.Unmarshal([]byte(o.ask(request, http.StatusOK)), &e); err != nil {
		o.t.Errorf("%s: %v", request, err)
	}
	return e
}

func (o *operated) list() []Endpoint {
	o.t.Helper()
	var all struct{ Endpoints []Endpoint }
	if err := json.Unmarshal([]byte(o.ask("GET /workers", http.StatusOK)), &all); err != nil {
		o.t.Fatal(err)
	}
	return all.Endpoints
}

// cordoned writes an endpoint's cordon on one line.
func cordoned(e Endpoint) string {
	if e.Cordon == nil {
		return ""
	}
	return e.Cordon.As + " by " + strings.Join(e.Cordon.By, ", ")
}

func (o *operated) route(session string) *router.Route {
	o.t.Helper()
	req := &router.Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":[1,2,3,4,5,6]}`)}
	req.Hints.Session = session
	r, err := o.Route(o.t.Context(), req)
	if err != nil {
		o.t.Fatal(err)
	}
	return r
}

// TestWorkers: the list gives each endpoint's properties, its running requests, and why it gets no requests.
func TestWorkers(t *testing.T) {
	o := newOperated(
		t,
		pool.Endpoint{
			Name:             "a",
			Address:          "10.0.0.1:8000",
			InstanceID:       1<<64 - 1,
			Model:            "m",
			BlockSize:        4,
			DataParallelSize: 2,
		},
		pool.Endpoint{
			Name:       "b",
			Address:    "10.0.0.2:8000",
			InstanceID: 8,
			Model:      "m",
			BlockSize:  4,
			CordonedBy: pool.CordonedByPod,
		},
		pool.Endpoint{Name: "c", Address: "10.0.0.3:8000", InstanceID: 9, Model: "m", BlockSize: 4},
	)
	o.health.Failed(o.health.Of(o.pool.Acquire().Workers[3].Worker), 0, eject.Refused) // c
	for range 3 {
		defer o.route("s").Free()
	}
	defer o.route("t").Free()
	all := o.list()
	if len(all) != 3 {
		t.Fatalf("%+v", all)
	}
	a, b, c := all[0], all[1], all[2]
	if !a.InPool || a.Name != "a" || a.Address != "10.0.0.1:8000" || a.InstanceID != 1<<64-1 || a.Model != "m" ||
		a.Role != "aggregated" ||
		a.Cordon != nil ||
		a.Ejected != nil {
		t.Errorf("a: %+v", a)
	}
	if a.RunningRequests != 4 || a.Sessions != 2 || len(a.Workers) != 2 || a.Workers[0].Rank != 0 ||
		a.Workers[1].Rank != 1 ||
		a.Workers[0].RunningRequests+a.Workers[1].RunningRequests != 4 ||
		a.Workers[0].Number == a.Workers[1].Number {
		t.Errorf("a: %+v", a)
	}
	if cordoned(b) != "cordoned by Pod annotation" || b.RunningRequests != 0 || len(b.Workers) != 1 {
		t.Errorf("b: %+v", b)
	}
	if x := c.Ejected; x == nil || x.Cause != "refused" || x.FailsInARow != 1 || x.NextTrial <= 0 || x.NextTrial > 60 {
		t.Errorf("c: %+v", x)
	}
	o.pool.Update(nil)
	if all := o.list(); len(all) != 0 {
		t.Errorf("an empty pool: %+v", all)
	}
	if body := o.ask("GET /workers", http.StatusOK); strings.TrimSpace(body) != `{"endpoints":[]}` {
		t.Errorf("an empty pool: %s", body)
	}
}

// TestCordonRequests: the response is the state after the request, and routing follows that state.
func TestCordonRequests(t *testing.T) {
	a := pool.Endpoint{Name: "pods/a b", Address: "10.0.0.1:8000", Model: "m", BlockSize: 4}
	b := pool.Endpoint{Name: "b", Address: "10.0.0.2:8000", Model: "m", BlockSize: 4}
	o := newOperated(t, a, b)
	path := "/workers/" + url.PathEscape(a.Name)
	for _, step := range []struct{ change, want string }{
		{"cordon", "cordoned by operator"}, {"drain", "draining by operator"}, {"drain", "draining by operator"},
		{"cordon", "cordoned by operator"}, {"uncordon", ""}, {"uncordon", ""}, {"drain", "draining by operator"},
	} {
		e := o.endpoint("POST " + path + "/" + step.change)
		if got := cordoned(e); got != step.want || e.Name != a.Name || !e.InPool ||
			got != cordoned(o.endpoint("GET "+path)) {
			t.Errorf("%s: %q, want %q; %+v", step.change, got, step.want, e)
		}
		served, running := map[string]bool{}, []*router.Route(nil)
		for range 20 {
			r := o.route("")
			served[r.Name] = true
			running = append(running, r)
		}
		for _, r := range running {
			r.Free()
		}
		if served[a.Name] != (step.want == "") || !served[b.Name] {
			t.Errorf("%s: requests go to %v", step.change, served)
		}
	}
	a.CordonedBy = pool.CordonedByFile
	o.pool.Update([]pool.Endpoint{a, b})
	if got := cordoned(o.endpoint("GET " + path)); got != "draining by operator, endpoints file" {
		t.Errorf("cordoned twice: %s", got)
	}
	if got := cordoned(o.endpoint("POST " + path + "/uncordon")); got != "cordoned by endpoints file" {
		t.Errorf("uncordoned once: %s", got)
	}
	// A cordon stays with the endpoint's name when the endpoint leaves.
	o.endpoint("POST /workers/b/cordon")
	o.pool.Update([]pool.Endpoint{a})
	if all := o.list(); len(all) != 2 || all[1].Name != "b" || all[1].InPool ||
		cordoned(all[1]) != "cordoned by operator" ||
		all[1].Workers == nil {
		t.Errorf("b is gone: %+v", all)
	}
	if e := o.endpoint("POST /workers/b/uncordon"); e.Name != "b" || e.InPool || e.Cordon != nil {
		t.Errorf("b is gone, and uncordoned: %+v", e)
	}
	if all := o.list(); len(all) != 1 {
		t.Errorf("b is gone, and uncordoned: %+v", all)
	}
}

// TestCordonRefusals: a refusal says which requests are possible.
func TestCordonRefusals(t *testing.T) {
	endpoints := []pool.Endpoint{
		{Name: "worker-0", Address: "10.0.0.1:8000"},
		{Name: "worker-1", Address: "10.0.0.2:8000"},
	}
	for rank := range 8 {
		endpoints = append(
			endpoints,
			pool.Endpoint{Name: fmt.Sprintf("vllm-7f-rank-%d", rank), Address: fmt.Sprintf("10.0.0.3:80%02d", rank)},
		)
	}
	o := newOperated(t, endpoints...)
	for request, want := range map[string]string{
		"POST /workers/wroker-1/drain": `no endpoint is named \"wroker-1\"; did you mean worker-1?`,
		"POST /workers/zzz/uncordon":   `no endpoint is named \"zzz\" (GET /workers lists all)`,
		"POST /workers/vllm-7f/drain": `no endpoint is named \"vllm-7f\"; its endpoints are vllm-7f-rank-0, ` +
			`vllm-7f-rank-1, vllm-7f-rank-2, vllm-7f-rank-3 and 4 more`,
		"GET /workers/worker-2":          `no endpoint is named \"worker-2\"; did you mean worker-0?`,
		"POST /workers/worker-0/uncodon": `want cordon, drain or uncordon; did you mean uncordon?`,
	} {
		if body := o.ask(request, http.StatusNotFound); !strings.Contains(body, want) {
			t.Errorf("%s: %s, want %s", request, body, want)
		}
	}
	// A web page in the operator's browser cannot cordon an endpoint.
	w, req := httptest.NewRecorder(), httptest.NewRequest("POST", "/workers/worker-0/cordon", nil)
	req.Header.Set("Sec-Fetch-Site", "cross-site")
	o.mux.ServeHTTP(w, req)
	if w.Code != http.StatusForbidden ||
		slices.ContainsFunc(o.list(), func(e Endpoint) bool { return e.Cordon != nil }) {
		t.Errorf("from another site: status %d, %+v", w.Code, o.list())
	}
}
