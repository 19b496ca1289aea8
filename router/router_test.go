package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/scoring"
)

// house is a router with its pool, index, book and metrics.
type house struct {
	*Router
	t     testing.TB
	pool  *pool.Pool
	index *indexer.Index
	book  *scoring.ActiveSequences
}

func newHouse(t testing.TB, endpoints ...pool.Endpoint) *house {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t, pool: pool.New(log), index: index, book: scoring.NewActiveSequences()}
	h.pool.Update(endpoints)
	cfg := Config{Scoring: scoring.DefaultConfig(), Explain: true}
	h.Router = New(cfg, h.pool, index, h.book, metrics.New(), log)
	return h
}

// workers returns n endpoints with blocks of four tokens.
func workers(n int) []pool.Endpoint {
	var es []pool.Endpoint
	for i := range n {
		es = append(
			es,
			pool.Endpoint{
				Name:       fmt.Sprintf("w%d", i),
				Address:    fmt.Sprintf("10.0.0.%d:8000", i+1),
				InstanceID: uint64(100 + i),
				BlockSize:  4,
				KVEvents:   "tcp://10.0.0.1:5557",
				Model:      "m",
			},
		)
	}
	return es
}

// warm stores the leading blocks of tokens on a worker.
func (h *house) warm(name string, rank uint32, tokens []kvblock.Token, o kvblock.HashOptions) {
	h.t.Helper()
	s := h.pool.Acquire()
	defer s.Release()
	for _, w := range s.Workers {
		if w.Name != name || w.Rank != rank {
			continue
		}
		var e kvblock.Stored
		for i, l := range kvblock.AppendLocalHashes(nil, tokens, o) {
			e.Blocks = append(
				e.Blocks,
				kvblock.StoredBlock{
					Engine: kvblock.EngineHash(1000*uint64(w.Worker) + uint64(i) + uint64(tokens[0])<<32),
					Local:  l,
				},
			)
		}
		if err := h.index.Stored(w.Worker, e); err != nil {
			h.t.Fatal(err)
		}
		return
	}
	h.t.Fatalf("no worker %s/%d", name, rank)
}

func tokens(from, n int) []kvblock.Token {
	var ts []kvblock.Token
	for i := range n {
		ts = append(ts, kvblock.Token(from+i))
	}
	return ts
}

func completion(model string, prompts ...[]kvblock.Token) *Request {
	lists := make([]string, len(prompts))
	for i, p := range prompts {
		lists[i] = strings.Join(strings.Fields(fmt.Sprint(p)), ",")
	}
	prompt := strings.Join(lists, ",")
	if len(prompts) > 1 {
		prompt = "[" + prompt + "]"
	}
	return &Request{Path: "/v1/completions", Body: []byte(fmt.Sprintf(`{"model":%q,"prompt":%s}`, model, prompt))}
}

func (h *house) route(req *Request) *Route {
	h.t.Helper()
	r, err := h.Route(context.Background(), req)
	if err != nil {
		h.t.Fatal(err)
	}
	return r
}

var blocksOfFour = kvblock.HashOptions{BlockSize: 4}

// Blocks in lower tiers reduce the cost less, and count only after those of the tiers above. The weight is 0.75 for a
// host block and 0.25 for one on disk or in external storage, as in Dynamo.
func TestLowerTiersArePriced(t *testing.T) {
	endpoints := workers(3)
	for i := range endpoints {
		endpoints[i].BlockSize = 16
	}
	h := newHouse(t, endpoints...)
	ids := tokens(0, 100)
	local := kvblock.AppendLocalHashes(nil, ids, kvblock.HashOptions{BlockSize: 16})
	store := func(w kvblock.Worker, tier kvblock.Tier, n int) {
		t.Helper()
		e := kvblock.Stored{Tier: tier}
		for i, l := range local[:n] {
			e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: kvblock.EngineHash(i + 1), Local: l})
		}
		if err := h.index.Stored(w, e); err != nil {
			t.Fatal(err)
		}
	}
	store(0, kvblock.TierDevice, 2)
	store(0, kvblock.TierHostPinned, 4)
	store(1, kvblock.TierHostPinned, 4)
	store(2, kvblock.TierDisk, 1)
	store(2, kvblock.TierExternal, 3)
	r := h.route(completion("m", ids))
	defer r.Free()
	// cost = 6.25 raw blocks - credit + 6 decode blocks
	terms := func(device, host, disk int) scoring.Terms {
		return scoring.Terms{
			BlockSize:    16,
			ISLTokens:    100,
			DeviceBlocks: device,
			HostBlocks:   host,
			DiskBlocks:   disk,
			DecodeBlocks: 6,
			UnitTokens:   16,
		}
	}
	want := []Cost{
		{"w0", 0, 12.25 - 2 - 0.75*2, terms(2, 2, 0), 3.5},
		{"w1", 0, 12.25 - 0.75*4, terms(0, 4, 0), 3},
		{"w2", 0, 12.25 - 0.25*3, terms(0, 0, 3), 0.75},
	}
	if !slices.Equal(r.Costs, want) || r.Name != "w0" || r.PredictedCachedTokens != 64 {
		t.Errorf("got %+v, want costs %+v", r.Decision, want)
	}
}

func TestWarmWorkerIsChosen(t *testing.T) {
	h := newHouse(t, workers(4)...)
	h.warm("w2", 0, tokens(0, 32), blocksOfFour)
	h.warm("w1", 0, tokens(0, 12), blocksOfFour)
	r := h.route(completion("m", tokens(0, 42)))
	defer r.Free()
	if r.Name != "w2" || r.InstanceID != 102 || r.Address != "10.0.0.3:8000" || r.Reason != ReasonKV ||
		r.PromptTokens != 42 ||
		r.PredictedCachedTokens != 32 {
		t.Errorf("decision: %+v", r.Decision)
	}
	// cost = 10.5 raw blocks - overlap + 10 decode blocks
	for i, want := range []float64{20.5, 17.5, 12.5, 20.5} {
		if c := r.Costs[i]; c.Cost != want || c.Name != fmt.Sprintf("w%d", i) {
			t.Errorf("cost %d: %+v, want %v", i, c, want)
		}
	}
	if got := h.book.Len(); got != 1 {
		t.Errorf("%d booked", got)
	}
	r.Free()
	r.Free()
	if got := h.book.Len(); got != 0 {
		t.Errorf("%d booked after the end", got)
	}
}

func TestRanksAreWorkers(t *testing.T) {
	e := workers(1)[0]
	e.DataParallelStartRank, e.DataParallelSize = 4, 3
	h := newHouse(t, e)
	h.warm("w0", 5, tokens(0, 16), blocksOfFour)
	r := h.route(completion("m", tokens(0, 20)))
	defer r.Free()
	if r.Rank != 5 || len(r.Costs) != 3 {
		t.Errorf("decision: %+v", r.Decision)
	}
}

func TestBatchOfPromptsGoesToOneWorker(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.warm("w0", 0, tokens(0, 8), blocksOfFour)
	h.warm("w1", 0, tokens(500, 8), blocksOfFour)
	h.warm("w1", 0, tokens(900, 8), blocksOfFour)
	r := h.route(completion("m", tokens(0, 10), tokens(500, 10), tokens(900, 10)))
	defer r.Free()
	if r.Name != "w1" || r.PredictedCachedTokens != 16 || r.PromptTokens != 30 {
		t.Errorf("decision: %+v, want w1 with the blocks of two prompts", r.Decision)
	}
}

func TestSaltedPromptMatchesItsOwn(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.warm("w0", 0, tokens(0, 16), blocksOfFour)
	h.warm("w1", 0, tokens(0, 16), kvblock.HashOptions{BlockSize: 4, CacheNamespace: "tenant-a"})
	req := completion("m", tokens(0, 16))
	req.Body = []byte(strings.Replace(string(req.Body), "{", `{"nvext":{"cache_salt":"tenant-a"},`, 1))
	r := h.route(req)
	defer r.Free()
	if r.Name != "w1" {
		t.Errorf("a salted prompt went to %s", r.Name)
	}
}

// TestAdapterMatchesItsOwn: an adapter uses its base model's workers, and matches only its own blocks.
func TestAdapterMatchesItsOwn(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.Adapters = NewAdapters(map[string]string{"sql": "m"})
	h.warm("w0", 0, tokens(0, 16), kvblock.HashOptions{BlockSize: 4})
	h.warm("w1", 0, tokens(0, 8), kvblock.HashOptions{BlockSize: 4, LoRAName: "sql"})
	for model, want := range map[string]struct {
		worker string
		cached int
	}{"m": {"w0", 16}, "sql": {"w1", 8}} {
		route, err := h.Route(t.Context(), completion(model, tokens(0, 16)))
		if err != nil {
			t.Fatal(err)
		}
		if route.Name != want.worker || route.PredictedCachedTokens != want.cached || route.Reason != ReasonKV {
			t.Errorf(
				"%s: %s with %d cached tokens, %s; want %s with %d",
				model,
				route.Name,
				route.PredictedCachedTokens,
				route.Reason,
				want.worker,
				want.cached,
			)
		}
		route.Free()
	}
	if _, err := h.Route(t.Context(), completion("other", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) {
		t.Errorf("an unknown adapter: %v", err)
	}
}

func TestWorkersOfTwoBlockSizes(t *testing.T) {
	es := workers(2)
	es[1].BlockSize = 8
	h := newHouse(t, es...)
	h.warm("w1", 0, tokens(0, 32), kvblock.HashOptions{BlockSize: 8})
	h.warm("w0", 0, tokens(0, 8), blocksOfFour)
	r := h.route(completion("m", tokens(0, 40)))
	defer r.Free()
	if r.Name != "w1" || r.PredictedCachedTokens != 32 || r.BlockSize != 8 {
		t.Errorf("decision: %+v", r.Decision)
	}
}

func TestEveryTroubleIsStillRouted(t *testing.T) {
	unsized := workers(1)
	unsized[0].BlockSize = 0
	silent := workers(1)
	silent[0].KVEvents = ""
	for _, c := range []struct {
		name      string
		endpoints []pool.Endpoint
		req       *Request
		reason    Reason
	}{
		{"no body", workers(1), &Request{Path: "/v1/models", BodylessReason: ReasonNoBody}, ReasonNoBody},
		{"too large", workers(1), &Request{
			Path: "/v1/completions", BodylessReason: ReasonBodyTooLarge, BodyBytes: 4000},
			ReasonBodyTooLarge},
		{"unknown API", workers(1), &Request{Path: "/v1/embeddings", Body: []byte("\x00\x01")}, ReasonUnknownAPI},
		{"no tokenizer", workers(1), &Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"text"}`)},
			ReasonNoTokenizer},
		{"an image", workers(1), &Request{Path: "/v1/chat/completions", Body: []byte(
			`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`)},
			ReasonMedia},
		{"a built-in tool", workers(1), &Request{Path: "/v1/responses", Body: []byte(
			`{"model":"m","input":"x","tools":[{"type":"web_search"}]}`)}, ReasonUnmapped},
		{"a part that no chat has", workers(1),
			&Request{Path: "/v1/responses", Body: []byte(`{"model":"m","input":"x","previous_response_id":"y"}`)},
			ReasonUnmapped},
		{"3,001 prompts", workers(1), &Request{Path: "/v1/completions",
			Body: []byte(`{"model":"m","prompt":["` + strings.Repeat(`","`, 3000) + `"]}`)}, ReasonBodyValues},
		{"tools without end", workers(1), &Request{Path: "/v1/chat/completions", Body: []byte(
			`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[` + strings.Repeat(`{},`, 1<<18) +
				`{}]}`)}, ReasonBodyValues},
		{"hints without end", workers(1), &Request{Path: "/v1/completions", Body: []byte(
			`{"model":"m","prompt":"x","nvext":{"agent_hints":[` + strings.Repeat(`{},`, 1<<18) + `{}]}}`)},
			ReasonBodyValues},
		{"no block size", unsized, completion("m", tokens(0, 16)), ReasonNoBlockSize},
		{"no events", silent, completion("m", tokens(0, 16)), ReasonNoEvents},
	} {
		h := newHouse(t, c.endpoints...)
		r := h.route(c.req)
		if r.Reason != c.reason || r.Address == "" || r.InstanceID != 100 || r.PredictedCachedTokens != 0 {
			t.Errorf("%s: %+v, want reason %s", c.name, r.Decision, c.reason)
		}
		if c.name == "too large" && r.PromptTokens != 1000 {
			t.Errorf("a body of 4000 bytes counts as %d tokens", r.PromptTokens)
		}
		r.Free()
		if h.book.Len() != 0 {
			t.Errorf("%s: still booked", c.name)
		}
	}
}

func TestWorkerThatAnnouncesAnotherBlockSizeIsLoadOnly(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.warm("w0", 0, tokens(0, 16), blocksOfFour)
	s := h.pool.Acquire()
	h.pool.ReportBlockSize(s.Workers[0].Worker, 8)
	s.Release()
	for name, c := range map[string]struct {
		address string
		want    Reason
	}{"it": {"10.0.0.1:8000", ReasonBlockSize}, "another": {"10.0.0.2:8000", ReasonKV}} {
		req := completion("m", tokens(0, 16))
		req.Allowed = func(address string) bool { return address == c.address }
		r := h.route(req)
		if r.Costs[0].Terms.DeviceBlocks != 0 || r.PredictedCachedTokens != 0 || r.Reason != c.want {
			t.Errorf("%s alone: reason %s, want %s; its blocks were believed: %+v", name, r.Reason, c.want, r.Decision)
		}
		r.Free()
	}
	// With both as candidates, the chosen one determines the reason.
	seen := map[Reason]string{}
	for range 200 {
		r := h.route(completion("m", tokens(0, 16)))
		seen[r.Reason] = r.Name
		r.Free()
	}
	if len(seen) != 2 || seen[ReasonBlockSize] != "w0" || seen[ReasonKV] != "w1" {
		t.Errorf("workers by reason: %v", seen)
	}
}

// TestReasonIsTheChosenWorkers: if the overlap of the chosen worker could not be priced, the decision says why, even if
// that of the others was.
func TestReasonIsTheChosenWorkers(t *testing.T) {
	es := workers(3)
	es[1].BlockSize, es[2].OtherTokenizer = 0, true
	h := newHouse(t, es...)
	seen := map[string]Reason{}
	for range 500 {
		r := h.route(completion("m", tokens(0, 16)))
		seen[r.Name] = r.Reason
		r.Free()
	}
	if want := (map[string]Reason{"w0": ReasonKV, "w1": ReasonNoBlockSize, "w2": ReasonTokenizerDiffers}); !maps.Equal(
		seen,
		want,
	) {
		t.Errorf("%v, want %v", seen, want)
	}
}

func TestCandidates(t *testing.T) {
	es := workers(4)
	es[1].Model = "other"
	es[2].Role = pool.Prefill
	es[3].Model = "" // serves any model
	h := newHouse(t, es...)
	names := func(r *Route) string {
		defer r.Free()
		var all []string
		for _, c := range r.Costs {
			all = append(all, c.Name)
		}
		return strings.Join(all, " ")
	}
	if got := names(h.route(completion("m", tokens(0, 16)))); got != "w0 w3" {
		t.Errorf("candidates for m: %s", got)
	}
	if got := names(h.route(&Request{BodylessReason: ReasonNoBody})); got != "w0 w1 w3" {
		t.Errorf("candidates without a model: %s", got)
	}
	req := completion("m", tokens(0, 16))
	req.Allowed = func(address string) bool { return address == "10.0.0.1:8000" }
	if got := names(h.route(req)); got != "w0" {
		t.Errorf("candidates in the subset: %s", got)
	}
	req.Allowed = func(string) bool { return false }
	if _, err := h.Route(t.Context(), req); !errors.Is(err, ErrNoEndpoints) {
		t.Errorf("an empty subset: %v", err)
	}
	h.pool.Update(es[1:3])
	if _, err := h.Route(t.Context(), completion("m", tokens(0, 16))); !errors.Is(err, ErrUnknownModel) ||
		!strings.Contains(err.Error(), `"m"`) {
		t.Errorf("a model without endpoints: %v", err)
	}
	var bad *body.Error
	if _, err := h.Route(t.Context(), &Request{Path: "/v1/completions", Body: []byte("[]")}); !errors.As(err, &bad) {
		t.Errorf("a body that is no request: %v", err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.Route(gone, completion("other", tokens(0, 16))); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that has gone: %v", err)
	}
	if h.book.Len() != 0 {
		t.Errorf("%d refused requests are booked", h.book.Len())
	}
}

// end ends all requests concurrently, and checks that nothing is booked.
func (h *house) end(routes []*Route) {
	h.t.Helper()
	var wait sync.WaitGroup
	for _, r := range routes {
		wait.Go(func() { r.MarkPrefillCompleted(); r.Free() })
	}
	wait.Wait()
	h.idle()
}

// idle checks that nothing is booked.
func (h *house) idle() {
	h.t.Helper()
	for _, l := range h.book.Loads(nil) {
		if l != (scoring.Load{}) {
			h.t.Errorf("load left: %+v", l)
		}
	}
	if h.book.Len() != 0 {
		h.t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestBurstSpreads: 1,000 identical concurrent requests spread evenly over idle workers.
func TestBurstSpreads(t *testing.T) {
	h := newHouse(t, workers(8)...)
	var wait sync.WaitGroup
	routes := make([]*Route, 1000)
	for i := range routes {
		wait.Go(func() { routes[i] = h.route(completion("m", tokens(0, 64))) })
	}
	wait.Wait()
	count := map[string]int{}
	for _, r := range routes {
		count[r.Name]++
	}
	low, high := 1000, 0
	for i := range 8 {
		n := count[fmt.Sprintf("w%d", i)]
		low, high = min(low, n), max(high, n)
	}
	if high-low > 1 {
		t.Errorf("requests per worker: %v", count)
	}
	h.end(routes)
}

// TestWorkersComeAndGo routes while the pool changes.
func TestWorkersComeAndGo(t *testing.T) {
	h := newHouse(t)
	h.pool.Watch(forget{h})
	all := workers(6)
	h.pool.Update(all[:1])
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				r := h.route(completion("m", tokens(0, 64)))
				if r.InstanceID-100 != uint64(r.Name[1]-'0') {
					t.Errorf("%s has instance %d", r.Name, r.InstanceID)
				}
				r.Free()
			}
		})
	}
	for i := range 500 {
		h.pool.Update(append([]pool.Endpoint{all[0]}, all[1+i%3:2+i%3+i%2]...))
	}
	close(stop)
	wait.Wait()
	if n := h.book.Len(); n != 0 {
		t.Errorf("%d bookings left", n)
	}
}

type forget struct{ h *house }

func (forget) WorkerJoined(pool.Worker)      {}
func (f forget) WorkerLeft(w kvblock.Worker) { f.h.index.Forget(w); f.h.book.Forget(w) }

// BenchmarkRoute measures a chat of about 8,000 tokens from its body to the booked worker, among 64 workers that hold
// parts of it. "again" repeats a request. "new" has a different long message each time, so that all of it is encoded.
func BenchmarkRoute(b *testing.B) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{})
	if err != nil {
		b.Fatal(err)
	}
	var text strings.Builder
	for i := range 1200 {
		fmt.Fprintf(&text, "Sentence %d says %d. ", i, i*i%9973)
	}
	body := func(i int) []byte {
		return fmt.Appendf(
			nil,
			`{"model":"m","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"%d `+
				`%s"}]}`,
			i,
			text.String(),
		)
	}
	for name, c := range map[string]struct {
		differs int
		ladder  bool
	}{"again": {0, false}, "new": {1, false}, "again/ladder": {0, true}, "new/ladder": {1, true}} {
		b.Run(name, func(b *testing.B) {
			es := workers(64)
			for i := range es {
				es[i].BlockSize = 16
			}
			h := newHouse(b, es...)
			if c.ladder {
				h.withLadder()
			}
			h.cfg.Models = map[string]*prompt.Model{"m": model}
			p, err := h.prepare(b.Context(), &Request{Path: "/v1/chat/completions", Body: body(0)}, nil)
			if err != nil || p.reason != ReasonKV {
				b.Fatal(err, p.reason)
			}
			for i := range es {
				h.warm(
					es[i].Name,
					0,
					p.tokens[0].IDs[:(i+1)*len(p.tokens[0].IDs)/64],
					kvblock.HashOptions{BlockSize: 16},
				)
			}
			b.ReportMetric(float64(p.isl), "tokens")
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				h.route(&Request{Path: "/v1/chat/completions", Body: body(i * c.differs)}).Free()
			}
		})
	}
}

// pick runs the part of a decision after tokenization, books and frees.
func (h *house) pick(p *prepared) {
	d := h.scratches.Get().(*scratch)
	s := h.pool.Acquire()
	r, err := h.choose(d, s, &Request{}, p)
	if err != nil {
		h.t.Fatal(err)
	}
	r.Free()
	d.booked = d.booked[:0]
	s.Release()
	h.scratches.Put(d)
}

// BenchmarkPick measures the part of a decision after tokenization.
func BenchmarkPick(b *testing.B) {
	for _, blockSize := range []int{16, 64} {
		for _, c := range []struct{ cached, explained bool }{{false, false}, {true, false}, {true, true}} {
			b.Run(
				fmt.Sprintf("8k-tokens/64-workers/block-%d/cached-%v/explained-%v", blockSize, c.cached, c.explained),
				func(b *testing.B) {
					es := workers(64)
					for i := range es {
						es[i].BlockSize = blockSize
					}
					h := newHouse(b, es...)
					h.cfg.Explain = c.explained
					ids := tokens(0, 8192)
					if c.cached {
						for i := range es {
							h.warm(es[i].Name, 0, ids[:(i+1)*128], kvblock.HashOptions{BlockSize: blockSize})
						}
					}
					p := prepared{
						model:  "m",
						tokens: []prompt.Prompt{{IDs: ids, Certain: len(ids)}},
						isl:    len(ids),
						reason: ReasonKV,
					}
					b.ReportAllocs()
					for b.Loop() {
						h.pick(&p)
					}
				},
			)
		}
	}
}

// BenchmarkPickWithPeers measures the same part with the running requests of seven other replicas, which decide 8,750
// times a second, and alone with as much load. Each worker runs 16 requests, and 16 workers have half of the prompt.
// With peers, an observer copies each booking's hashes, as cmd/kvepp does to send them.
//
// It measures both in turns, 100 picks each, so that what else the machine does slows both. It reports the medians of
// ns/pick, and of their ratio as peers/alone.
func BenchmarkPickWithPeers(b *testing.B) {
	for _, policy := range []scoring.Policy{scoring.Dynamo, scoring.Time} {
		b.Run(fmt.Sprintf("8k-tokens/64-workers/policy=%v", policy), func(b *testing.B) {
			const picks = 100
			nanoseconds := func(pick func()) float64 {
				start := time.Now()
				for range picks {
					pick()
				}
				return float64(time.Since(start).Nanoseconds()) / picks
			}
			pickAlone, pickWithPeers := pickAmong(b, policy, 1), pickAmong(b, policy, 8)
			var alone, peers, ratios []float64
			for b.Loop() {
				a, p := nanoseconds(pickAlone), nanoseconds(pickWithPeers)
				alone, peers, ratios = append(alone, a), append(peers, p), append(ratios, p/a)
			}
			median := func(values []float64) float64 {
				slices.Sort(values)
				return values[len(values)/2]
			}
			b.ReportMetric(0, "ns/op") // 200 picks: tells nothing more
			b.ReportMetric(median(alone), "alone-ns/pick")
			b.ReportMetric(median(peers), "peers-ns/pick")
			b.ReportMetric(median(ratios), "peers/alone")
		})
	}
}

// pickAmong returns a pick of one of n replicas.
func pickAmong(b *testing.B, policy scoring.Policy, replicas int) func() {
	b.Helper()
	const n, blocks, blockSize = 64, 128, 64
	const length = blocks * blockSize
	es := workers(n)
	for i := range es {
		es[i].BlockSize = blockSize
	}
	h := newHouse(b, es...)
	h.cfg.Scoring.Policy = policy
	ids, rng := tokens(0, length), rand.New(rand.NewPCG(4, 4))
	for i := range es {
		h.warm(es[i].Name, 0, ids[:(1+i%4)*length/8], kvblock.HashOptions{BlockSize: blockSize})
	}
	for i := range 16 * n {
		hashes := make([]kvblock.SequenceHash, blocks)
		for j := range hashes {
			hashes[j] = kvblock.SequenceHash(rng.Uint64())
		}
		h.book.NewCopies().Apply([]scoring.Change{{Kind: scoring.Booked, Number: uint64(i),
			Worker: kvblock.Worker(i % n), BlockSize: blockSize, Chains: [][]kvblock.SequenceHash{hashes}}})
	}
	if replicas > 1 {
		var mu sync.Mutex
		var copied []kvblock.SequenceHash
		h.book.Observe(func(c *scoring.Change) {
			mu.Lock()
			defer mu.Unlock()
			if len(copied) > 1<<15 {
				copied = copied[:0]
			}
			for _, chain := range c.Chains {
				copied = append(copied, chain...)
			}
		})
		h.book.SetPeersStaleness(2 * time.Millisecond)
	}
	p := prepared{model: "m", tokens: []prompt.Prompt{{IDs: ids, Certain: len(ids)}}, isl: len(ids), reason: ReasonKV}
	return func() { h.pick(&p) }
}

// mediaModel returns the small model with an architecture that takes images, and a token that marks an image.
func mediaModel(t *testing.T) *prompt.Model {
	t.Helper()
	dir := t.TempDir()
	file, err := os.ReadFile("../test/models/tiny-bytelevel/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	mark := `{"id": 3079, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false, ` +
		`"normalized": false, "special": true}`
	var parsed map[string]json.RawMessage
	var added []json.RawMessage
	if err := errors.Join(json.Unmarshal(file, &parsed), json.Unmarshal(parsed["added_tokens"], &added)); err != nil {
		t.Fatal(err)
	}
	if parsed["added_tokens"], err = json.Marshal(append(added, json.RawMessage(mark))); err != nil {
		t.Fatal(err)
	}
	if file, err = json.Marshal(parsed); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"tokenizer.json":      string(file),
		"config.json":         `{"model_type":"llava","architectures":["LlavaForConditionalGeneration"]}`,
		"chat_template.jinja": `{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := prompt.Load(dir, prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestPromptWithAnImage: a prompt is matched and priced by the tokens before the image, and booked with all text
// tokens.
func TestPromptWithAnImage(t *testing.T) {
	model := mediaModel(t)
	h := newHouse(t, workers(2)...)
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	payload := func(after string) []byte {
		return fmt.Appendf(
			nil,
			`{"model":"m","messages":[{"role":"system","content":"%s"},{"role":"user","content":[{"type":"image_url",`+
				`"image_url":{"url":"u"}},{"type":"text","text":"%s"}]}]}`,
			strings.Repeat("Look at it well. ", 10),
			after,
		)
	}
	request, err := body.ParseRequest("/v1/chat/completions", payload("What is this? Say it in ten words."))
	if err != nil {
		t.Fatal(err)
	}
	prompts, err := model.Tokenize(t.Context(), request)
	if err != nil || len(prompts) != 1 {
		t.Fatal(prompts, err)
	}
	p := prompts[0]
	if p.Certain < 30 || p.Certain > len(p.IDs)-9 || p.Certain%4 == 0 {
		t.Fatalf("%d of %d ids are certain: this shows nothing", p.Certain, len(p.IDs))
	}
	h.warm("w1", 0, p.IDs, blocksOfFour) // as if the image had no tokens
	r := h.route(&Request{Path: "/v1/chat/completions", Body: payload("What is this? Say it in ten words.")})
	if r.Name != "w1" || r.Reason != ReasonMediaPrefix || r.PredictedCachedTokens != p.Certain/4*4 ||
		r.PromptTokens != len(p.IDs) {
		t.Errorf("decision: %+v; %d of %d ids are certain", r.Decision, p.Certain, len(p.IDs))
	}
	// Two such requests share the blocks before the image. Each has blocks of its own after it.
	blocks := func() (n int) {
		for _, load := range h.book.Loads(nil) {
			n += load.ActiveBlocks
		}
		return n
	}
	one := blocks()
	h.pool.Update(workers(2)[1:]) // so that the second goes to the same worker
	again := h.route(&Request{Path: "/v1/chat/completions", Body: payload("What is this? Say it in ten words.")})
	if all, known := len(p.IDs)/4, p.Certain/4; one != all || blocks() != 2*all-known {
		t.Errorf("%d blocks are booked, then %d; want %d, then %d", one, blocks(), all, 2*all-known)
	}
	again.Free()
	r.Free()
	if got := h.book.Len() + blocks(); got != 0 {
		t.Errorf("%d are booked after the end", got)
	}
}

// TestOtherTokenizer: a worker whose tokenizer differs from kvepp's is priced by load only; the others also by overlap.
func TestOtherTokenizer(t *testing.T) {
	es := workers(2)
	es[0].OtherTokenizer = true
	h := newHouse(t, es...)
	h.warm("w0", 0, tokens(0, 40), blocksOfFour)
	h.warm("w1", 0, tokens(0, 12), blocksOfFour)
	r := h.route(completion("m", tokens(0, 42)))
	if r.Name != "w1" || r.Reason != ReasonKV || r.PredictedCachedTokens != 12 || r.Costs[0].Terms.DeviceBlocks != 0 {
		t.Errorf("decision: %+v", r.Decision)
	}
	r.Free()
	es[1].OtherTokenizer = true
	h.pool.Update(es)
	r = h.route(completion("m", tokens(0, 42)))
	if r.Reason != ReasonTokenizerDiffers || r.PredictedCachedTokens != 0 {
		t.Errorf("decision: %+v", r.Decision)
	}
	r.Free()
}

// Without events, a request with the same prefix goes to the first one's worker until the prediction expires.
func TestApproximateMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endpoints := workers(4)
		for i := range endpoints {
			endpoints[i].KVEvents = ""
		}
		h := newHouse(t, endpoints...)
		h.cfg.Predict = Predict{TTL: time.Minute, Alone: true}
		first := h.route(completion("m", tokens(0, 42)))
		first.Free()
		if first.Reason != ReasonApproximate || first.PredictedCachedTokens != 0 {
			t.Errorf("first: %+v", first.Decision)
		}
		second := h.route(completion("m", tokens(0, 60), tokens(1000, 8)))
		second.Free()
		if second.Name != first.Name || second.Reason != ReasonApproximate || second.PredictedCachedTokens != 40 {
			t.Errorf("second: %+v, first went to %s", second.Decision, first.Name)
		}
		<-time.After(59 * time.Second) // of the bubble, which does not wait
		third := h.route(completion("m", tokens(1000, 8)))
		third.Free()
		if third.Name != first.Name || third.PredictedCachedTokens != 8 {
			t.Errorf("third: %+v, first went to %s", third.Decision, first.Name)
		}
		<-time.After(2 * time.Second) // of the bubble, which does not wait
		// the second prompt was renewed meanwhile
		for _, c := range []struct{ from, want int }{{0, 0}, {1000, 8}} {
			r := h.route(completion("m", tokens(c.from, 8)))
			r.Free()
			byBlocks := func(a, b Cost) int { return a.Terms.DeviceBlocks - b.Terms.DeviceBlocks }
			if most := slices.MaxFunc(r.Costs, byBlocks); 4*most.Terms.DeviceBlocks != c.want {
				t.Errorf("from %d: %+v, want %d tokens", c.from, r.Decision, c.want)
			}
		}
	})
}

// For a worker that should send events but is silent, the index predicts blocks. For the others it uses their events.
func TestSilentWorkerIsApproximated(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.Predict = Predict{Silent: time.Minute}
	s := h.pool.Acquire()
	h.pool.ReportSilent(s.Workers[0].Worker, true)
	s.Release()
	names := map[string]bool{}
	for i := range 20 { // the choice between equals is random
		first := h.route(completion("m", tokens(100*i, 42)))
		first.Free()
		again := h.route(completion("m", tokens(100*i, 42)))
		again.Free()
		names[first.Name] = true
		switch {
		case first.Name == "w0" && (first.Reason != ReasonApproximate || again.Name != "w0" ||
			again.PredictedCachedTokens != 40):
			t.Errorf("the silent one: %+v, then %+v", first.Decision, again.Decision)
		case first.Name == "w1" && (first.Reason != ReasonKV || again.PredictedCachedTokens != 0):
			t.Errorf("the other: %+v, then %+v", first.Decision, again.Decision)
		}
	}
	if len(names) != 2 {
		t.Errorf("only %v were chosen", names)
	}
}

// With LRU predictions, a worker of known size holds at most as many blocks as it has.
func TestApproximateModeLRU(t *testing.T) {
	endpoints := workers(2)
	endpoints[0].TotalKVBlocks = 10
	h := newHouse(t, endpoints...)
	h.cfg.Predict = Predict{TTL: time.Minute, LRU: true, Alone: true}
	for i := range 20 {
		h.route(completion("m", tokens(100*i, 16))).Free()
	}
	s := h.pool.Acquire()
	defer s.Release()
	for _, w := range s.Workers {
		held := 0
		for i := range 20 {
			var scores indexer.OverlapScores
			local := kvblock.AppendLocalHashes(nil, tokens(100*i, 16), blocksOfFour)
			h.index.FindMatches(kvblock.AppendSequenceHashes(nil, local), &scores)
			held += scores.Blocks(w.Worker)
		}
		if w.Name == "w0" && held > 10 || w.Name == "w1" && held == 0 {
			t.Errorf("%s holds %d blocks", w.Name, held)
		}
	}
}

// With prediction and events, later requests of a burst match the first one's blocks before any event arrives.
func TestPredictOnRoute(t *testing.T) {
	for _, predict := range []bool{false, true} {
		h := newHouse(t, workers(4)...)
		if predict {
			h.cfg.Predict = Predict{TTL: 2 * time.Second}
		}
		cached := 0
		for range 3 {
			r := h.route(completion("m", tokens(0, 42)))
			r.Free()
			if r.Reason != ReasonKV {
				t.Errorf("got %+v", r.Decision)
			}
			cached += r.PredictedCachedTokens
		}
		if predict && cached != 80 || !predict && cached != 0 {
			t.Errorf("predict %v: %d tokens", predict, cached)
		}
	}
}

// If cached blocks have no credit, the router neither looks up nor predicts blocks.
func TestNoCredit(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.Scoring.OverlapScoreCredit = 0
	h.cfg.Predict = Predict{TTL: time.Minute, Alone: true}
	h.warm("w1", 0, tokens(0, 32), blocksOfFour)
	for range 2 {
		r := h.route(completion("m", tokens(0, 32)))
		defer r.Free()
		if r.Reason != ReasonNoCredit || r.PredictedCachedTokens != 0 || r.PromptTokens != 32 {
			t.Errorf("got %+v", r.Decision)
		}
	}
	if s := h.index.Stats(); s.Predicted != 0 {
		t.Errorf("got %+v", s)
	}
}

// PromptComputed is called once, when the prompt is computed, if its tokens are known. A prediction that is an upper
// bound is marked.
func TestServedAndUpperBound(t *testing.T) {
	h := newHouse(t, workers(1)...)
	var served []int
	h.cfg.PromptComputed = func(_ kvblock.Worker, tokens, blockSize int) { served = append(served, tokens, blockSize) }
	r := h.route(completion("m", tokens(0, 40)))
	if len(served) > 0 || r.UpperBound {
		t.Errorf("served %v before it was, upper bound %v", served, r.UpperBound)
	}
	r.MarkPrefillCompleted()
	r.MarkPrefillCompleted()
	r.Free()
	if !slices.Equal(served, []int{40, 4}) {
		t.Errorf("served %v, want 40 tokens in blocks of 4", served)
	}
	unknown := h.route(&Request{Path: "/v1/embeddings", Body: []byte(`{"model":"m","input":"text"}`)})
	unknown.MarkPrefillCompleted()
	unknown.Free()
	if len(served) != 2 {
		t.Errorf("served %v: tokens that are not known were counted", served)
	}
	s := h.pool.Acquire()
	h.pool.ReportTraits(s.Workers[0].Worker, kvblock.Traits{UpperBound: true})
	s.Release()
	cold := h.route(completion("m", tokens(0, 40)))
	cold.Free()
	h.warm("w0", 0, tokens(0, 32), blocksOfFour)
	warm := h.route(completion("m", tokens(0, 40)))
	warm.Free()
	if cold.UpperBound || !warm.UpperBound || warm.PredictedCachedTokens != 32 {
		t.Errorf(
			"upper bound %v of a cold worker, %v of one with %d tokens",
			cold.UpperBound,
			warm.UpperBound,
			warm.PredictedCachedTokens,
		)
	}
}

// A prediction is an upper bound too if the request's model, or the model that its adapter adapts, is one whose events
// do not tell.
func TestUpperBoundOfModels(t *testing.T) {
	h := newHouse(t, workers(1)...)
	h.cfg.UpperBound = func(model string) bool { return model == "m" }
	h.cfg.Adapters = NewAdapters(map[string]string{"adapter": "m"})
	if cold := h.route(completion("m", tokens(0, 40))); cold.UpperBound {
		t.Error("an upper bound of nothing")
	} else {
		cold.Free()
	}
	for _, model := range []string{"m", "adapter"} {
		o := blocksOfFour
		if model == "adapter" {
			o.LoRAName = model
		}
		h.warm("w0", 0, tokens(0, 32), o)
		for _, bounded := range []string{"m", "other"} {
			h.cfg.UpperBound = func(model string) bool { return model == bounded }
			r := h.route(completion(model, tokens(0, 40)))
			if r.UpperBound != (bounded == "m") || r.PredictedCachedTokens != 32 {
				t.Errorf(
					"%s, where predictions for %s are upper bounds: upper bound %v of %d tokens",
					model,
					bounded,
					r.UpperBound,
					r.PredictedCachedTokens,
				)
			}
			r.Free()
		}
	}
}

// A worker of a hybrid model counts for the blocks that all its layers can reuse. The decision says which layers cut
// the rest.
func TestHybridDecision(t *testing.T) {
	h := newHouse(t, workers(1)...)
	ids := tokens(0, 41)
	h.warm("w0", 0, ids[:40], blocksOfFour)
	s := h.pool.Acquire()
	w := s.Workers[0].Worker
	s.Release()
	classes := kvblock.Classes{{Kind: kvblock.ClassWindow, Window: 9, BlockSize: 4}}
	h.index.SetHybrid(w, &indexer.Hybrid{Classes: classes, BlockSize: 4})
	local := kvblock.AppendLocalHashes(nil, ids, blocksOfFour)
	e := kvblock.Stored{Tier: kvblock.ClassTier(0)}
	for i, l := range local[:7] {
		e.Blocks = append(e.Blocks, kvblock.StoredBlock{Engine: kvblock.EngineHash(900 + i), Local: l})
	}
	if err := h.index.Stored(w, e); err != nil {
		t.Fatal(err)
	}
	cut := h.route(completion("m", ids))
	cut.Free()
	if cut.PredictedCachedTokens != 28 || cut.UpperBound || cut.UnusableTokens != 12 ||
		cut.UnusableBy != kvblock.ClassWindow {
		t.Errorf("got %+v", cut.Decision)
	}
	sum := metricstest.Read(t, h.metrics.Registry).Of("kvepp_unusable_cached_tokens_total", "kind=window")
	if got := sum.Value(); got != 12 {
		t.Errorf("the metric counts %v tokens, want 12", got)
	}
	h.index.SetHybrid(w, &indexer.Hybrid{Classes: classes, BlockSize: 4, Incomplete: true})
	bound := h.route(completion("m", ids))
	bound.Free()
	if bound.PredictedCachedTokens != 40 || !bound.UpperBound || bound.UnusableTokens != 0 {
		t.Errorf("got %+v", bound.Decision)
	}
}
