package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/internal/tracing"
	"kvepp/kvblock"
	"kvepp/router"
	"kvepp/serve/admin"
	"kvepp/serve/listen"
	"kvepp/test/harness/browser"
)

// served is a kvepp serve in this process: all that the flags wire, without Envoy and engines.
type served struct {
	*server
	t   testing.TB
	web *httptest.Server
}

// serveHere starts a kvepp with an endpoints file. The workers' events come from store.
func serveHere(t testing.TB, endpoints string, flags ...string) *served {
	t.Helper()
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	if err := os.WriteFile(file, []byte(endpoints), 0o600); err != nil {
		t.Fatal(err)
	}
	var o options
	args := append([]string{"--endpoints", file, "--admin-address", "127.0.0.1:9091", "--refresh-metrics-interval=0"},
		flags...)
	if err := parseServe(&o, args, func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	s := &server{options: &o, m: metrics.New(), log: log, ready: listen.NewReadiness()}
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(func() { stop(); s.close() })
	if err := s.open(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.discover(ctx); err != nil {
		t.Fatal(err)
	}
	s.decide(ctx)
	// A stream of decisions ends when its client leaves: the browser must have ended before web is closed.
	web := httptest.NewUnstartedServer(nil)
	web.Config = listen.WebServer(s.adminHandler(), &o.ports.Hosts)
	web.Start()
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	return &served{server: s, t: t, web: web}
}

const threeWorkers = `endpoints:
- {name: w0, address: "10.0.0.1:8000", model: m, blockSize: 4, kvEvents: "tcp://127.0.0.1:9", totalKvBlocks: 1000}
- {name: w1, address: "10.0.0.2:8000", model: m, blockSize: 4, kvEvents: "tcp://127.0.0.1:9", totalKvBlocks: 1000}
- {name: w2, address: "10.0.0.3:8000", model: m, blockSize: 4, kvEvents: "tcp://127.0.0.1:9", totalKvBlocks: 1000}
`

// traced begins the span of a request with this trace id, which the caller samples and no collector takes.
func traced(t *testing.T, id string) *tracing.Span {
	t.Helper()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
	tracer, err := tracing.New(t.Context(), "test", slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), time.Second)
		defer stop()
		_ = tracer.Close(ctx) // the collector is not there
	})
	return tracer.Request("test", tracing.Context{Traceparent: "00-" + id + "-b7ad6b7169203331-01"})
}

// store makes a worker hold the leading blocks of a prompt, as its events would.
func (s *served) store(worker string, ids []kvblock.Token) {
	s.t.Helper()
	snapshot := s.pool.Acquire()
	defer snapshot.Release()
	for _, w := range snapshot.Workers {
		if w.Name != worker {
			continue
		}
		var e kvblock.Stored
		for i, l := range kvblock.AppendLocalHashes(nil, ids, kvblock.HashOptions{BlockSize: 4}) {
			engine := kvblock.EngineHash(uint64(ids[0])<<32 + uint64(w.Worker)<<20 + uint64(i))
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: engine, Local: l})
		}
		if err := s.index.Stored(w.Worker, e); err != nil {
			s.t.Fatal(err)
		}
		return
	}
	s.t.Fatalf("no worker %s", worker)
}

// tokenIDs returns n token ids from first on.
func tokenIDs(first, n int) (ids []kvblock.Token) {
	for i := range n {
		ids = append(ids, kvblock.Token(first+i))
	}
	return ids
}

// tokensRequest is a completion with token ids; more are further keys of its body.
func tokensRequest(id string, ids []kvblock.Token, more string) *router.Request {
	text, _ := json.Marshal(ids)
	return &router.Request{ID: id, Path: "/v1/completions",
		Body: fmt.Appendf(nil, `{"model":"m","prompt":%s%s}`, text, more)}
}

// route sends a request, and returns it running.
func (s *served) route(req *router.Request) *router.Route {
	s.t.Helper()
	r, err := s.router.Route(s.t.Context(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// response ends a request with what the engine reports.
func response(r *router.Route, prompt, cached int) {
	r.Free()
	r.Ended(router.Response{Status: "200", Complete: true, PromptTokens: prompt, CachedTokens: cached, Tokens: 8})
}

// get decodes a response of the admin API.
func (s *served) get(path string, v any) {
	s.t.Helper()
	resp, err := s.web.Client().Get(s.web.URL + path)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		s.t.Fatalf("%s: %s", path, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		s.t.Fatalf("%s: %v", path, err)
	}
}

// newBrowser starts a real Chromium. The test is skipped without Chromium.
func newBrowser(t *testing.T) *browser.Browser {
	t.Helper()
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	path := browser.Find()
	if path == "" {
		t.Skip("no Chromium: test/tools/install.sh chromium installs it")
	}
	b, err := browser.Start(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Logf("the browser's profile: %v", err)
		}
	})
	return b
}

// tab is a page of a served kvepp.
type tab struct {
	*browser.Page
	t   *testing.T
	ctx context.Context
}

func (s *served) open(t *testing.T, b *browser.Browser, path string) *tab {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	p, err := b.Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	x := &tab{p, t, ctx}
	x.must(p.Resize(ctx, 1280, 900, false))
	x.must(p.Go(ctx, s.web.URL+path))
	return x
}

func (x *tab) must(err error) {
	x.t.Helper()
	if err != nil {
		x.t.Fatalf("%v\nerrors of the page: %v", err, x.Errors())
	}
}

// shows waits until an element shows these texts.
func (x *tab) shows(selector string, texts ...string) {
	x.t.Helper()
	x.must(x.Await(x.ctx, selector, texts...))
}

func (x *tab) run(script string) {
	x.t.Helper()
	x.must(x.Run(x.ctx, script, nil))
}

// visit shows a view.
func (x *tab) visit(view, title string) {
	x.t.Helper()
	x.run(fmt.Sprintf("location.hash = '#/%s'", view))
	x.shows("main[data-view='"+view+"'] h2", title)
}

// picture keeps a picture of the window in the folder of PAGE_PICTURES, or checks only that there is one.
func (x *tab) picture(name string) {
	x.t.Helper()
	png, err := x.Picture(x.ctx)
	x.must(err)
	if len(png) < 2000 {
		x.t.Errorf("the picture %s has %d bytes", name, len(png))
	}
	if dir := os.Getenv("PAGE_PICTURES"); dir != "" {
		x.must(os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644))
	}
}

// fits checks at 390 pixels that nothing makes the page wider than the window, in both color schemes.
func (x *tab) fits(view string) {
	x.t.Helper()
	x.picture(view + "-1280")
	x.must(x.Resize(x.ctx, 390, 844, true))
	var wide []string
	x.must(x.Run(x.ctx, `[...document.querySelectorAll('body, body *')].filter(e => e.getBoundingClientRect().right >
		document.documentElement.clientWidth + 1).map(e => e.tagName + '.' + e.className + ' ' + `+
		`e.textContent.slice(0, 40))`, &wide))
	var scroll int
	x.must(x.Run(x.ctx, "document.documentElement.scrollWidth", &scroll))
	if scroll > 390 || len(wide) > 0 {
		x.t.Errorf("%s at 390 pixels: %d wide, because of %q", view, scroll, wide)
	}
	x.picture(view + "-390")
	x.must(x.Resize(x.ctx, 1280, 900, false))
}

// quiet checks that the console has no errors.
func (x *tab) quiet() {
	x.t.Helper()
	if errs := x.Errors(); len(errs) > 0 {
		x.t.Errorf("the console has errors:\n%s", strings.Join(errs, "\n"))
	}
}

// TestPageInShadow: in shadow the page shows how often the other picker chose as kvepp, and what each choice had
// cached.
func TestPageInShadow(t *testing.T) {
	b := newBrowser(t)
	s := serveHere(t, threeWorkers, "--shadow")
	s.server.m.ShadowTokens(0, 0, 0) // as the server of Envoy's streams does
	s.store("w1", tokenIDs(1000, 400))
	for _, address := range []string{"10.0.0.2:8000", "10.0.0.1:8000", "10.9.9.9:1"} {
		r, err := s.router.Shadow(t.Context(), tokensRequest(address, tokenIDs(1000, 400), ""))
		if err != nil {
			t.Fatal(err)
		}
		s.router.Serve(r, address)
		response(r, 400, 0)
	}
	x := s.open(t, b, "/")
	x.shows("#t-equal", "50.0 %")
	x.shows("#t-kvepp", "100.0 %")
	x.shows("#t-served", "50.0 %")
	x.shows("#shadow", "unknown_endpoint")
	x.visit("ladder", "Why is the hit rate what it is?")
	x.shows("[data-cause='other_picker']", "50.0 %")
	x.visit("fleet", "Fleet")
	x.fits("fleet-shadow")
	x.quiet()
}

// TestPage: each view shows the numbers of the API for known traffic, in a real browser, without errors of the console
// and without horizontal scrolling.
func TestPage(t *testing.T) {
	b := newBrowser(t)
	s := serveHere(t, threeWorkers, "--router-session-affinity-ttl-secs=600", "--router-policy=dynamo",
		`--trace-url=https://traces.example/t/{trace_id}?of="><img src=x>&again={trace_id}`)
	s.store("w1", tokenIDs(1000, 400))
	for i := range 4 {
		req := tokensRequest(fmt.Sprintf("request-%d", i), tokenIDs(1000, 400), "")
		req.Hints.Session = "conversation"
		response(s.route(req), 400, 396)
	}
	response(s.route(tokensRequest("cold", tokenIDs(9000, 100), "")), 100, 0)
	running := s.route(tokensRequest("running", tokenIDs(20000, 80), ""))
	defer running.Free()
	x := s.open(t, b, "/")

	x.shows("#t-requests", "5")
	var fleet admin.Fleet
	s.get("/debug/fleet", &fleet)
	prompts, cached := uint64(0), uint64(0)
	table := []string{"w0/0", "w1/0", "w2/0", "100 / 1,000", "connecting"}
	for _, w := range fleet.Workers {
		prompts, cached = prompts+w.PromptTokens, cached+w.CachedTokens
		if w.PromptTokens > 0 { // the cold request may have gone to any of the three
			table = append(table, fmt.Sprintf("%.1f %%", 100*float64(w.CachedTokens)/float64(w.PromptTokens)))
		}
	}
	if prompts != 1700 || cached != 4*396 {
		t.Errorf("the fleet has %d prompt tokens, %d of them cached", prompts, cached)
	}
	x.shows("#t-hits", fmt.Sprintf("%.1f %%", 100*float64(cached)/float64(prompts)))
	x.shows("#t-workers", "3")
	x.shows("#t-running", "1")
	x.shows("main tbody", table...)
	x.run("[...document.querySelectorAll('th button')].find(b => b.textContent === 'Blocks').click()")
	var first string
	x.must(x.Run(x.ctx, "document.querySelector('main tbody td').textContent", &first))
	if first != "w1/0" {
		t.Errorf("sorted by blocks, %q comes first", first)
	}
	x.fits("fleet")

	x.visit("requests", "Requests")
	x.shows("tr[data-request='request-3']", "w1/0", "kv", "396 of 400", "200")
	x.shows("#status", "following")
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	followed := tokensRequest("followed", tokenIDs(1000, 400), "")
	followed.Trace = traced(t, traceID)
	response(s.route(followed), 400, 396) // over the stream of events
	x.shows("tr[data-request='followed']", "w1/0", "396 of 400")
	x.run("document.querySelector('tr[data-request=followed] button').click()")
	var d struct{ Decisions []admin.Decision }
	s.get("/debug/decisions?request_id=followed", &d)
	for _, c := range d.Decisions[0].Candidates {
		name := fmt.Sprintf(".candidate[data-worker='%s/%d']", c.Name, c.Rank)
		x.shows(name, fmt.Sprintf("%.2f blocks", *c.Cost))
		if c.Chosen {
			x.shows(name, "chosen", "400 tokens cached")
		} else {
			x.shows(name, c.Lost)
		}
		var shown string
		script := fmt.Sprintf("document.querySelector(%q + ' svg').getAttribute('aria-label')", name)
		x.must(x.Run(x.ctx, script, &shown))
		for _, p := range c.Parts {
			if want := fmt.Sprintf("%s %.2f", p.Name, p.Value); !strings.Contains(shown, want) {
				t.Errorf("%s shows %q, want %q", name, shown, want)
			}
		}
	}
	// The link is the operator's address with the id, however it is written; a decision without a trace has none.
	link := `https://traces.example/t/` + traceID + `?of="><img src=x>&again=` + traceID
	if d.Decisions[0].TraceURL != link {
		t.Errorf("the trace is at %q, want %q", d.Decisions[0].TraceURL, link)
	}
	var found []string
	x.must(x.Run(x.ctx, "[...document.querySelectorAll('.detail a')].flatMap(a => [a.getAttribute('href'), "+
		"a.textContent, a.target, a.rel])", &found))
	if !slices.Equal(found, []string{link, traceID, "_blank", "noopener noreferrer"}) {
		t.Errorf("links %q, want the trace's", found)
	}
	x.run("document.querySelector('tr[data-request=request-3] button').click()")
	x.must(x.Run(x.ctx, "[...document.querySelectorAll('.detail a, .detail img')].map(a => a.outerHTML)", &found))
	if len(found) != 1 {
		t.Errorf("links and images in the details: %q, want that of the traced decision", found)
	}
	x.shows(".detail", "Cached, reported\n396", "Cached, predicted\n400", "Output tokens\n8")
	x.fits("requests")

	x.visit("ladder", "hit rate")
	var l admin.Ladder
	s.get("/debug/ladder", &l)
	for _, r := range l.Total.Rungs {
		share := 100 * float64(r.Tokens) / float64(l.Total.Rungs[0].Tokens)
		x.shows("[data-rung='"+r.Rung+"']", fmt.Sprintf("%.1f %%", share))
	}
	x.shows("main", "index_wrong", "kvepp check compares tokenizer")
	x.fits("ladder")

	x.visit("queue", "Queue")
	x.shows("main tbody", "default")
	x.fits("queue")
	x.visit("sessions", "Sessions")
	x.shows("#t-active", "1")
	x.shows("#t-kept", "3")
	x.fits("sessions")
	x.visit("configuration", "Configuration")
	x.shows("main tbody", "router-session-affinity-ttl-secs", "600", "flag")
	x.fits("configuration")
	x.quiet()
}

// TestPagePrefixes: the view of prefixes shows the numbers of the API: the tree, and who holds how much of a prefix.
func TestPagePrefixes(t *testing.T) {
	b := newBrowser(t)
	s := serveHere(t, threeWorkers, "--load-aware=false")
	system := tokenIDs(1000, 80)
	s.store("w1", system)
	s.store("w2", system[:40])
	for i := range 6 {
		prompt := append(append([]kvblock.Token(nil), system...), tokenIDs(5000+1000*(i/2), 20*(1+i%2))...)
		response(s.route(tokensRequest(fmt.Sprintf("request-%d", i), prompt, "")), len(prompt), 80)
	}
	var found admin.Prefixes
	s.get("/debug/prefixes", &found)
	root := found.Roots[0]
	if found.Requests != 6 || len(found.Roots) != 1 || root.Blocks != 20 || root.Requests != 6 ||
		len(root.Children) != 3 || root.Cached != 120 || len(root.Workers) != 2 || root.Workers[1].Blocks != 10 {
		t.Fatalf("%+v", found)
	}
	x := s.open(t, b, "/#/prefixes")
	x.shows("#t-prefix-requests", "6")
	x.shows("#t-prefixes", "7")
	x.shows("main tbody tr", root.Hash[:8], "0 + 20", "120", "100.0 %", "w1/0: 20, w2/0: 10")
	var widths map[string]float64
	x.must(x.Run(x.ctx, `Object.fromEntries([...document.querySelectorAll('.flame-bar')].map(r =>
		[r.dataset.prefix, Number(r.getAttribute('width'))]))`, &widths))
	var check func(p *admin.Prefix)
	bars := 0
	check = func(p *admin.Prefix) {
		bars++
		if want := 1000*float64(p.Requests)/6 - 1.5; math.Abs(widths[p.Hash]-want) > 0.01 {
			t.Errorf("the bar of %s is %v wide, want %v", p.Hash, widths[p.Hash], want)
		}
		for i := range p.Children {
			check(&p.Children[i])
		}
	}
	if check(&root); bars != 7 || len(widths) != 7 {
		t.Errorf("%d prefixes, %d bars", bars, len(widths))
	}
	x.run(fmt.Sprintf(`document.querySelector('[data-prefix="%s"]').dispatchEvent(
		new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))`, root.Hash))
	x.shows("#prefix", root.Hash, "Requests\n6", "Blocks x requests\n120", "20 of 4 tokens")
	x.shows("[data-holder='w2/0']", "10 of 20 blocks")
	x.fits("prefixes")
	x.quiet()
}

// TestPageReplicas: the view of replicas shows the numbers of the API of a real process, whose peer has requests.
func TestPageReplicas(t *testing.T) {
	browser := newBrowser(t)
	token := replicaToken(t)
	all, peers := reserveReplicas(t, 2)
	a, b := all[0], all[1]
	a.startReplica(peers, "--replica-token-file", token)
	a.awaitReady()
	_, cancel := a.runRequests(5)
	defer cancel()
	b.startReplica(peers, "--replica-token-file", token)
	b.awaitReady()
	_, cancelOwn := b.runRequests(2)
	defer cancelOwn()
	b.awaitMetric("b to have a's requests", copied, 5)
	a.awaitMetric("a to have b's requests", copied, 2)
	var state struct {
		Self  struct{ Replica string }
		Peers []struct {
			Name, Address string
			Bookings      int
		}
	}
	resp, err := http.Get(b.adminURL() + "/debug/replicas")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&state); err != nil || len(state.Peers) != 1 ||
		state.Peers[0].Bookings != 5 {
		t.Fatalf("%+v, %v", state, err)
	}
	x := (&served{web: &httptest.Server{URL: b.adminURL()}}).open(t, browser, "/#/replicas")
	x.shows("#t-own", "2")
	x.shows("#t-copied", "5")
	x.shows("main", state.Self.Replica)
	x.shows("main tbody tr", state.Peers[0].Name, "live", state.Peers[0].Address, "5")
	x.fits("replicas")
	x.quiet()
}

// TestPageWorlds: for each of these mistakes, the page's own text names the cause.
func TestPageWorlds(t *testing.T) {
	b := newBrowser(t)
	withoutEvents := strings.ReplaceAll(threeWorkers, `kvEvents: "tcp://127.0.0.1:9", `, "")
	repeated := func(s *served, more func(i int) string) {
		for i := range 5 {
			response(s.route(tokensRequest(fmt.Sprint(i), tokenIDs(1000, 400), more(i))), 400, 0)
		}
	}
	same := func(int) string { return "" }
	for _, world := range []struct {
		name, endpoints string
		flags           []string
		traffic         func(s *served)
		fleet, ladder   []string // what the views show
	}{
		{"wrong template", threeWorkers,
			[]string{"--model=m=" + modelFolder(t, "{{ messages[0]['content'] }}")}, func(s *served) {
				for range 3 {
					chat := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("a b ", 100) + `"}]}`
					r := s.route(&router.Request{Path: "/v1/chat/completions", Body: []byte(chat)})
					response(r, r.PromptTokens+9, 200)
				}
			}, nil, []string{"wrong template", "Tokenizer or chat template differ"}},
		{"events off", withoutEvents, nil, func(s *served) { repeated(s, same) },
			[]string{"events off", "KV events are off: 3 of 3 workers"},
			[]string{"no_events loses the most that can be changed, 80 %", "workers publish no KV events"}},
		{"cache too small", threeWorkers, nil, func(s *served) { repeated(s, same) }, nil,
			[]string{"evicted loses the most that can be changed, 80 %", "the caches are too small"}},
		{"one hot worker", threeWorkers, nil, func(s *served) {
			s.store("w0", tokenIDs(1000, 400))
			for i := range 30 {
				response(s.route(tokensRequest(fmt.Sprint(i), tokenIDs(1000, 400), "")), 400, 396)
			}
		}, []string{"one hot worker: w0/0 served 30 of 30 requests"}, nil},
		{"salts that differ", threeWorkers, nil, func(s *served) {
			repeated(s, func(i int) string { return fmt.Sprintf(`,"cache_salt":"tenant %d"`, i) })
		}, nil, []string{"other_salt loses the most that can be changed, 80 %", "tenants, salts or adapters"}},
		{"sessions that hop", threeWorkers, []string{"--router-policy=dynamo"}, func(s *served) {
			s.store("w0", tokenIDs(1000, 400))
			s.store("w0", tokenIDs(50000, 2000))
			// Another request's blocks make the worker with the conversation the dearer one.
			long := s.route(tokensRequest("long", tokenIDs(50000, 2000), ""))
			turn := tokensRequest("turn", tokenIDs(1000, 400), "")
			turn.Hints.Session = "conversation"
			response(s.route(turn), 400, 0)
			response(long, 2000, 1996)
		}, nil, []string{"no_affinity loses the most that can be changed", "--router-session-affinity-ttl-secs"}},
	} {
		t.Run(world.name, func(t *testing.T) {
			s := serveHere(t, world.endpoints, world.flags...)
			world.traffic(s)
			x := s.open(t, b, "/")
			x.shows("main[data-view=fleet] tbody", "w0/0")
			x.shows("main", append(world.fleet, "Fleet")...)
			x.run("document.querySelector('#t-hits a').click()") // from the low hit share to its cause
			x.shows("main[data-view=ladder]", append(world.ladder, "delivered")...)
			x.quiet()
		})
	}
}

// TestPageShowsHostileText: names that clients choose stay text.
func TestPageShowsHostileText(t *testing.T) {
	b := newBrowser(t)
	s := serveHere(t, strings.ReplaceAll(threeWorkers, "model: m, ", ""))
	hostile := `"><img src=x onerror="window.hit=1"><script>window.hit=1</script>{{7*7}}`
	body, _ := json.Marshal(map[string]any{"model": hostile, "prompt": tokenIDs(1000, 40)})
	response(s.route(&router.Request{ID: hostile, Path: "/v1/completions", Body: body}), 40, 0)
	x := s.open(t, b, "/#/requests")
	x.shows("main tbody", hostile)
	x.run("document.querySelector('main tbody button').click()")
	x.shows(".detail", hostile)
	var hit bool
	x.must(x.Run(x.ctx, "window.hit === 1 || document.querySelectorAll('main img, main script').length > 0", &hit))
	if hit {
		t.Error("a client's text became markup")
	}
	x.visit("ladder", "hit rate")
	x.shows("main", "delivered")
	x.fits("hostile")
	x.quiet()
}

// TestPageLogin: with a token the page asks for it once, and the cookie is out of the script's reach.
func TestPageLogin(t *testing.T) {
	b := newBrowser(t)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("the-secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serveHere(t, threeWorkers, "--admin-token-file", file)
	x := s.open(t, b, "/")
	log := func(token string) {
		x.shows("form", "Token of the admin address")
		x.run(fmt.Sprintf("document.querySelector('#token').value = %q", token))
		x.run("document.querySelector('form').requestSubmit()")
	}
	log("wrong")
	x.shows("#wrong:target", "This is not the token.")
	x.fits("login")
	log("the-secret")
	x.shows("main tbody", "w0/0")
	var cookies string
	if x.must(x.Run(x.ctx, "document.cookie", &cookies)); cookies != "" {
		t.Errorf("scripts read the cookie %q", cookies)
	}
	x.visit("configuration", "Configuration")
	x.shows("main tbody", "admin-token-file", file)
	var secret bool
	x.must(x.Run(x.ctx, "document.documentElement.innerHTML.includes('the-secret')", &secret))
	if secret {
		t.Error("the page shows the token")
	}
	x.run("document.querySelector('form[action=\"/logout\"]').requestSubmit()")
	x.shows("form", "Token of the admin address")
	x.must(x.Go(x.ctx, s.web.URL+"/"))
	x.shows("form", "Token of the admin address")
	x.quiet()
}
