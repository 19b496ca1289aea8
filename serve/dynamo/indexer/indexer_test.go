package indexer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/serve/api"
	"kvepp/serve/api/apitest"
)

var quiet = slog.New(slog.DiscardHandler)

// house is a registry behind HTTP, with its pool, index and feed.
type house struct {
	t        *testing.T
	pool     *pool.Pool
	index    *indexer.Index
	feed     *feed.Feed
	metrics  *metrics.Metrics
	registry *Registry
	server   *httptest.Server
}

func newHouse(t *testing.T) *house {
	t.Helper()
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t, pool: pool.New(quiet), index: index, metrics: metrics.New()}
	if h.feed, err = feed.New(feed.Config{}, h.pool, index, h.metrics, quiet); err != nil {
		t.Fatal(err)
	}
	h.pool.Watch(h.feed)
	h.registry = NewRegistry(h.pool, index, h.feed, quiet)
	mux := http.NewServeMux()
	h.registry.Handle(mux)
	h.server = httptest.NewServer(api.Counted(mux, h.metrics.NewIndexerService()))
	t.Cleanup(func() { h.server.Close(); h.feed.Close() })
	return h
}

// ask sends a request and returns status and body; body "" is a GET.
func (h *house) ask(path, body string) (int, string) {
	h.t.Helper()
	resp, err := http.Get(h.server.URL + path)
	if body != "" {
		resp.Body.Close()
		resp, err = http.Post(h.server.URL+path, "application/json; charset=utf-8", strings.NewReader(body))
	}
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp.StatusCode, strings.TrimSpace(string(text))
}

func (h *house) want(path, body string, status int, part string) {
	h.t.Helper()
	if got, text := h.ask(path, body); got != status || !strings.Contains(text, part) {
		h.t.Errorf("%s %s: %d %s; want %d with %q", path, body, got, text, status, part)
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	h := newHouse(t)
	good := `{"instance_id": 7, "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 4}`
	h.want("/register", good, http.StatusCreated, "ok")
	h.want("/register", good, http.StatusConflict, "instance 7 dp_rank 0 already registered")
	for _, c := range []struct {
		path, body string
		status     int
		part       string
	}{
		{"/register", `{`, http.StatusBadRequest, "not JSON"},
		{"/register", `[]`, http.StatusUnprocessableEntity, "must be a JSON object, not array"},
		{"/register", strings.Replace(good, `"m"`, `1`, 1), http.StatusUnprocessableEntity, "model_name: number"},
		{"/register", strings.Replace(good, `"m"`, `"`+strings.Repeat("m", pool.MaxText+1)+`"`, 1),
			http.StatusBadRequest,
			"is longer than 1024"},
		{"/register", strings.Replace(good, "127.0.0.1", strings.Repeat("h", pool.MaxText), 1), http.StatusBadRequest,
			"is longer than 1024"},
		{"/register_peer", `{"url": "` + strings.Repeat("u", pool.MaxText+1) + `"}`, http.StatusBadRequest,
			"is longer than 1024"},
		{"/register", strings.Replace(good, `"m"`, `"m\r\nx"`, 1), http.StatusBadRequest, "model_name: "},
		{"/register", strings.Replace(good, `}`, `, "routing_group": "g\u0000"}`, 1), http.StatusBadRequest,
			"routing_group: "},
		{"/register", strings.Replace(good, "127.0.0.1", "127.0. 0.1", 1), http.StatusBadRequest, "no host name has"},
		{"/register", strings.Replace(good, "127.0.0.1", `h\n`, 1), http.StatusBadRequest, "endpoint: "},
		{"/register_peer", `{"url": "http://a\nb"}`, http.StatusBadRequest, "control character"},
		{"/register", `{"instance_id": 7}`, http.StatusUnprocessableEntity, "endpoint is missing"},
		{"/register", strings.Replace(good, "7", "18446744073709551616", 1), http.StatusUnprocessableEntity,
			"instance_id"},
		{"/register", strings.Replace(good, `: 4`, `: 8`, 1), http.StatusConflict,
			"block_size mismatch for model=m routing_group=default: existing=4, requested=8"},
		{"/register", `{"block_size": 0, "instance_id": 17, "endpoint": "tcp://127.0.0.1:9", "model_name": "n", ` +
			`"block_size": 4}`, http.StatusUnprocessableEntity, "block_size: the key is there twice"},
		{"/register", `{"Block_size": 0, "instance_id": 17, "endpoint": "tcp://127.0.0.1:9", "model_name": "n", ` +
			`"block_size": 4}`, http.StatusCreated, "ok"},
		{"/register", `{"instance_id": 8, "endpoint": "tcp://127.0.0.1:9", "model_name": "o", "block_size": 0}`,
			http.StatusBadRequest, "block_size 0"},
		{"/register", strings.Replace(good, "tcp://127.0.0.1:9", "tcp://*:9", 1), http.StatusBadRequest,
			"has no host"},
		{"/register", strings.Replace(good, "}", `, "dp_rank": 1, "replay_endpoint": "x"}`, 1), http.StatusBadRequest,
			"invalid replay endpoint"},
		{"/unregister", `{}`, http.StatusUnprocessableEntity, "missing"},
		{"/unregister", `{"instance_id": 7, "model_name": "m", "dp_rank": 3}`, http.StatusNotFound,
			"instance 7 dp_rank 3 not found"},
		{"/unregister", `{"instance_id": 7, "model_name": "m", "routing_group": "other"}`, http.StatusNotFound,
			"registered for model="},
		{"/query", `{"model_name": "m"}`, http.StatusUnprocessableEntity, "token_ids is missing"},
		{"/query", `{"token_ids": []}`, http.StatusUnprocessableEntity, "model_name is missing"},
		{"/query", `{"token_ids": [4294967296], "model_name": "m"}`, http.StatusUnprocessableEntity,
			"token_ids: number 4294967296 has the wrong type or is out of range"},
		{"/query", `{"token_ids": [1], "model_name": 1}`, http.StatusUnprocessableEntity, "model_name: number has"},
		{"/query", `{"token_ids": [1], "model_name": "m", "routing_group": "g"}`, http.StatusNotFound,
			"no indexer for model=m routing_group=g"},
		{"/query", `{"token_ids": [` + strings.Repeat("1,", api.MaxBody/2) + `1], "model_name": "m"}`,
			http.StatusRequestEntityTooLarge, "longer than"},
		{"/query_by_hash", `{"model_name": "m"}`, http.StatusUnprocessableEntity, "block_hashes is missing"},
		{"/register_peer", `{}`, http.StatusUnprocessableEntity, "url is missing"},
		{"/deregister_peer", `{"url": "x"}`, http.StatusNotFound, "peer not found"},
	} {
		h.want(c.path, c.body, c.status, c.part)
	}
	resp, err := http.Post(h.server.URL+"/query", "text/plain", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body.Close(); resp.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("text/plain: %s", resp.Status)
	}
	if models, workers := counts(h.registry); models != 2 || workers != 2 {
		t.Errorf("%d models, %d workers", models, workers)
	}
	for i := range maxPeers {
		if err := h.registry.AddPeer(fmt.Sprintf("http://peer-%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	h.want("/register_peer", `{"url": "one-more"}`, http.StatusTooManyRequests, "limit")
	h.want("/nosuch", "", http.StatusNotFound, "")
	errors := metricstest.Read(t, h.metrics.Registry).Of("dynamo_kvindexer_errors_total")
	for _, s := range errors {
		if s.Labels[0] == "endpoint=/unregister" && s.Value != 3 {
			t.Error(s, s.Value)
		}
	}
	if errors == nil {
		t.Error("no dynamo_kvindexer_errors_total")
	}
}

// TestWorkersAreKeptApart: two pairs of model and group are two workers even if their joined names are equal. They stay
// when others register, and leave when they are unregistered.
func TestWorkersAreKeptApart(t *testing.T) {
	h := newHouse(t)
	const worker = `{"instance_id": 7, "endpoint": "tcp://127.0.0.1:9", "block_size": 4, "dp_rank": 4294967295, `
	numbers := func() map[kvblock.Worker]bool {
		s := h.pool.Acquire()
		defer s.Release()
		all := map[kvblock.Worker]bool{}
		for _, w := range s.Workers {
			all[w.Worker] = true
		}
		return all
	}
	h.want("/register", worker+`"model_name": "a:b", "routing_group": "c"}`, http.StatusCreated, "ok")
	h.want("/register", worker+`"model_name": "a", "routing_group": "b:c"}`, http.StatusCreated, "ok")
	before := numbers()
	h.want("/register", worker+`"model_name": "other"}`, http.StatusCreated, "ok")
	h.want("/unregister", `{"instance_id": 7, "model_name": "other"}`, http.StatusOK, "ok")
	if after := numbers(); len(before) != 2 || !maps.Equal(before, after) {
		t.Errorf("workers %v became %v", before, after)
	}
	h.want("/unregister", `{"instance_id": 7, "model_name": "a", "routing_group": "b:c"}`, http.StatusOK, "ok")
	h.want("/unregister", `{"instance_id": 7, "model_name": "a:b", "routing_group": "c"}`, http.StatusOK, "ok")
	if connected, connecting := h.feed.Subscriptions(); connected+connecting != 0 {
		t.Errorf("%d+%d subscriptions are left", connected, connecting)
	}
}

const dumpText = `{"m:default": {"block_size": 4, "events": [
	{"worker_id": 7, "position": {"next": 5, "timestamp": 1.5}, "storage_tier": "device", "residency_domain": ` +
	`"worker", "event": {"event_id": 0, "dp_rank": 0,
		"data": {"stored": {"parent_hash": null, "start_position": null, "blocks": [{"block_hash": 1, ` +
	`"tokens_hash": 18446744073709551615, "mm_extra_info": null}]}}}},
	{"worker_id": 7, "storage_tier": "host_pinned", "residency_domain": "worker", "event": {"event_id": 1, "dp_rank": 1,
		"data": {"stored": {"parent_hash": 1, "blocks": [{"block_hash": 2, "tokens_hash": 3}]}}}},
	{"worker_id": 7, "storage_tier": "tape", "residency_domain": "worker", "event": {"data": {"stored": {"blocks": ` +
	`[{"block_hash": 2, "tokens_hash": 3}]}}}},
	{"worker_id": 7, "storage_tier": "device", "residency_domain": "worker", "event": {"data": "cleared"}}
], "more": {"a": [1]}}, "empty": {"events": []}}`

func TestReadDump(t *testing.T) {
	var got []string
	// The data of an event is "cleared", not an object: the rest of the dump is ignored.
	text := strings.Replace(dumpText, `"cleared"`, `{"cleared": null}`, 1)
	if err := readDump(bufio.NewReader(strings.NewReader(text)), func(part string, blockSize int, d *dumpEvent) error {
		s, ok := d.stored()
		got = append(got, fmt.Sprint(part, blockSize, d.WorkerID, d.Event.Rank, d.Position != nil, s, ok))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		fmt.Sprint(
			"m:default",
			4,
			7,
			0,
			true,
			kvblock.Stored{Blocks: []kvblock.StoredBlock{{Engine: 1, Local: 1<<64 - 1}}},
			true,
		),
		fmt.Sprint(
			"m:default",
			4,
			7,
			1,
			false,
			kvblock.Stored{
				HasParent: true,
				Parent:    1,
				Tier:      kvblock.TierHostPinned,
				Blocks:    []kvblock.StoredBlock{{Engine: 2, Local: 3}},
			},
			true,
		),
		fmt.Sprint("m:default", 4, 7, 0, false, kvblock.Stored{}, false),
		fmt.Sprint("m:default", 4, 7, 0, false, kvblock.Stored{}, false),
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, bad := range []string{"", "[", "{", `{"m": 1}`, `{"m": {"events": 1}}`, `{"m": {"events": [1]}}`,
		text[:len(text)-3], dumpText} {
		if readDump(bufio.NewReader(strings.NewReader(bad)),
			func(string, int, *dumpEvent) error { return nil }) == nil {
			t.Errorf("%.40q was read", bad)
		}
	}
	stop := errors.New("stop")
	if err := readDump(bufio.NewReader(strings.NewReader(text)),
		func(string, int, *dumpEvent) error { return stop }); !errors.Is(
		err,
		stop,
	) {
		t.Error(err)
	}
}

func FuzzReadDump(f *testing.F) {
	f.Add(dumpText)
	f.Add(strings.Replace(dumpText, `"cleared"`, `{"cleared": null}`, 1))
	f.Fuzz(func(t *testing.T, text string) {
		_ = readDump(bufio.NewReader(strings.NewReader(text)), func(_ string, _ int, d *dumpEvent) error {
			if s, ok := d.stored(); ok && len(s.Blocks) == 0 {
				t.Fatal("a store of no block")
			}
			return nil
		})
	})
}

// TestWorkerWithoutAModel: a worker without a model serves any name in a request, as kvepp serve routes to it.
func TestWorkerWithoutAModel(t *testing.T) {
	h := newHouse(t)
	h.pool.Update(
		[]pool.Endpoint{
			{Name: "a", InstanceID: 7, BlockSize: 1},
			{Name: "b", InstanceID: 8, BlockSize: 1, Model: "other"},
		},
	)
	s := h.pool.Acquire()
	defer s.Release()
	local := kvblock.AppendLocalHashes(nil, []kvblock.Token{5}, kvblock.HashOptions{BlockSize: 1})
	for _, w := range s.Workers {
		if err := h.index.Stored(w.Worker,
			kvblock.Stored{Blocks: []kvblock.StoredBlock{{Engine: 1, Local: local[0]}}}); err != nil {
			t.Fatal(err)
		}
	}
	mux := http.NewServeMux()
	NewReader(h.pool, h.index, nil, quiet).Handle(mux)
	for body, want := range map[string]string{
		`{"model_name": "m", "token_ids": [5]}`:                             `"scores":{"7":{"0":1}}`,
		`{"model_name": "other", "token_ids": [5]}`:                         `"scores":{"7":{"0":1},"8":{"0":1}}`,
		`{"model_name": "m", "token_ids": [5], "routing_group": "another"}`: "no indexer",
	} {
		req := httptest.NewRequest("POST", "/query", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		if mux.ServeHTTP(w, req); !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s: %s, want %s", body, w.Body, want)
		}
	}
}

// TestDump: a dump has exactly the blocks of the index.
func TestDump(t *testing.T) {
	h := newHouse(t)
	h.want("/dump", "", http.StatusOK, "{}")
	h.want(
		"/register",
		`{"instance_id": 18446744073709551615, "dp_rank": 2, "endpoint": "tcp://127.0.0.1:9", "model_name": "a `+
			`\"b\"", "block_size": 4}`,
		http.StatusCreated,
		"ok",
	)
	h.want(
		"/register",
		`{"instance_id": 8, "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 4}`,
		http.StatusCreated,
		"ok",
	)
	s := h.pool.Acquire()
	defer s.Release()
	for _, stored := range []kvblock.Stored{
		{Blocks: []kvblock.StoredBlock{{Engine: 1, Local: 11}, {Engine: 2, Local: 12}}},
		{HasParent: true, Parent: 1, Blocks: []kvblock.StoredBlock{{Engine: 3, Local: 13}}},
	} {
		if err := h.index.Stored(s.Workers[0].Worker, stored); err != nil {
			t.Fatal(err)
		}
	}
	status, text := h.ask("/dump", "")
	var all map[string]struct {
		BlockSize int `json:"block_size"`
		Events    []dumpEvent
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s: %v", status, text, err)
	}
	copied, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	model := all[`a "b":default`]
	for i := range model.Events {
		e := &model.Events[i]
		stored, ok := e.stored()
		if !ok || e.WorkerID != 1<<64-1 || e.Event.Rank != 2 || e.Position != nil {
			t.Errorf("event %d: %+v", i, e)
		}
		if err := copied.Stored(0, stored); err != nil {
			t.Errorf("event %d: %v", i, err)
		}
	}
	var scores indexer.OverlapScores
	for _, chain := range [][]kvblock.LocalHash{{11, 12}, {11, 13}} {
		if copied.FindMatches(kvblock.AppendSequenceHashes(nil, chain), &scores); scores.Blocks(0) != 2 {
			t.Errorf("%v: %d blocks", chain, scores.Blocks(0))
		}
	}
	if len(all) != 2 || len(all["m:default"].Events) != 0 || model.BlockSize != 4 {
		t.Errorf("%s", text)
	}
	h.registry.dumping.Lock()
	h.want("/dump", "", http.StatusTooManyRequests, "another dump")
	h.registry.dumping.Unlock()
}

// TestPartsAreKeptApart: if two models of a dump have workers with the same instance id, each worker gets its own part
// only.
func TestPartsAreKeptApart(t *testing.T) {
	h := newHouse(t)
	h.want(
		"/register",
		`{"instance_id": 7, "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 4}`,
		http.StatusCreated,
		"ok",
	)
	first := strings.Replace(dumpText[:strings.Index(dumpText, ",\n\t{")], `"next": 5`, `"next": 99`, 1)
	text := strings.Replace(
		first,
		"m:default",
		"a:default",
		1,
	) + "]}, " + strings.Replace(dumpText, `"cleared"`, `{"cleared": null}`, 1)[1:]
	for _, c := range []struct {
		named bool
		part  string
		next  uint64
	}{{true, "m:default", 5}, {false, "a:default", 99}} {
		h.registry.modelsNamed = c.named
		l := h.registry.newLoader()
		if err := readDump(bufio.NewReader(strings.NewReader(text)), l.event); err != nil {
			t.Fatal(err)
		}
		if w := l.wanted[workerKey{7, 0}]; !w.begun || w.part != c.part || w.at.Next != c.next {
			t.Errorf("named %t: %+v", c.named, w)
		}
	}
}

// TestWarmUpWaitsForItsTurn: kvepp asks a peer again that is busy with a dump for another replica.
func TestWarmUpWaitsForItsTurn(t *testing.T) {
	asked := 0
	peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if asked++; asked < 3 {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		io.WriteString(
			w,
			`{"m:default": {"block_size": 4, "events": [{"worker_id":7,"position":{"next":5,"timestamp":1.5},`+
				`"storage_tier":"device","residency_domain":"worker","event":{"event_id":0,`+
				`"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":1,`+
				`"tokens_hash":2,"mm_extra_info":null}]}},"dp_rank":0}}]}}`,
		)
	}))
	defer peer.Close()
	engine, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Close()
	if err := engine.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	events, err := engine.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	h := newHouse(t)
	h.feed.Hold()
	h.want(
		"/register",
		`{"instance_id": 7, "endpoint": "`+events+`", "model_name": "m", "block_size": 4}`,
		http.StatusCreated,
		"ok",
	)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	h.registry.WarmUp(ctx, []string{"http://127.0.0.1:9", peer.URL}, "")
	if n := h.index.Stats().Entries; n != 1 || asked != 3 {
		t.Errorf("%d entries; asked %d times", n, asked)
	}
}

// TestWarmUpEnds: the warm-up ends for any behaviour of the peers.
func TestWarmUpEnds(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	hang := make(chan struct{})
	defer close(hang)
	peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Header.Get("Authorization") != "Bearer secret":
			w.WriteHeader(http.StatusUnauthorized)
		case req.URL.Path == "/broken/dump":
			io.WriteString(w, `{"m": {"block_size": 4, "events": [`)
		case req.URL.Path == "/slow/dump":
			io.WriteString(w, `{`)
			w.(http.Flusher).Flush()
			select {
			case <-hang:
			case <-req.Context().Done():
			}
		}
	}))
	defer peer.CloseClientConnections()
	h := newHouse(t)
	h.feed.Hold()
	h.want(
		"/register",
		`{"instance_id": 7, "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 4}`,
		http.StatusCreated,
		"ok",
	)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	done := make(chan struct{})
	go func() {
		h.registry.WarmUp(
			ctx,
			[]string{"http://127.0.0.1:9", "::", peer.URL + "/broken/", peer.URL + "/slow"},
			"secret",
		)
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("it waits for ever")
	}
	if n := h.index.Stats().Entries; n != 0 {
		t.Errorf("%d entries", n)
	}
}

// TestRegistrationIsLinear: the cost of a registration does not grow with the number of workers.
func TestRegistrationIsLinear(t *testing.T) {
	const part = 100
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	p := pool.New(quiet)
	// not a watcher of the pool, so it subscribes to no worker
	f, err := feed.New(feed.Config{}, p, index, metrics.New(), quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := NewRegistry(p, index, f, quiet)
	size, address := 16, "tcp://127.0.0.1:9"
	of := func(i int) Registration {
		id, model := uint64(i), fmt.Sprint("m", i%10)
		return Registration{InstanceID: &id, Endpoint: &address, Model: &model, BlockSize: &size}
	}
	apitest.Linear(t, part, "register", func(i int) {
		if err := r.Register(of(i)); err != nil {
			t.Fatal(err)
		}
	})
	if models, workers := counts(r); models != 10 || workers != 8*part {
		t.Errorf("%d models, %d workers", models, workers)
	}
	for i := range 8 * part {
		if err := r.unregister(of(i)); err != nil {
			t.Fatal(err)
		}
	}
	s := p.Acquire()
	defer s.Release()
	if models, workers := counts(r); models+workers+len(s.Workers)+len(r.workers)+r.bytes != 0 {
		t.Errorf(
			"%d models, %d workers, %d in the pool and %d bytes are left",
			models,
			workers,
			len(s.Workers),
			r.bytes,
		)
	}
}

// counts returns the pairs of model and group that have workers, and the worker instances.
func counts(r *Registry) (models, instances int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.groups), len(r.ranks)
}
