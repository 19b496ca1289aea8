package selector

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/serve/api"
	"kvepp/serve/api/apitest"
)

var quiet = slog.New(slog.DiscardHandler)

// counter is a selection service behind its handler, with its pool, index and book.
type counter struct {
	t        testing.TB
	pool     *pool.Pool
	index    *indexer.Index
	book     *scoring.ActiveSequences
	metrics  *metrics.Metrics
	selector *Selector
	handler  http.Handler
}

func newCounter(t testing.TB, edit func(*Config)) *counter {
	t.Helper()
	index, err := indexer.New(
		indexer.Config{MaxPredicted: indexer.DefaultMaxPredicted, PruneTarget: indexer.DefaultPruneTarget},
	)
	if err != nil {
		t.Fatal(err)
	}
	c := &counter{t: t, pool: pool.New(quiet), index: index, book: scoring.NewActiveSequences(), metrics: metrics.New()}
	cfg := Config{
		Scoring:        scoring.DefaultConfig(),
		PredictTTL:     time.Minute,
		PendingTTL:     2 * time.Minute,
		PendingEntries: 10,
		PendingBytes:   1 << 20,
	}
	if edit != nil {
		edit(&cfg)
	}
	var events *feed.Feed
	if cfg.Events {
		if events, err = feed.New(feed.Config{}, c.pool, index, c.metrics, quiet); err != nil {
			t.Fatal(err)
		}
		c.pool.Watch(events)
		t.Cleanup(func() { events.Close() })
	}
	c.book.Expiry = 5 * time.Minute
	c.pool.Watch(leaving{c.book})
	c.selector = New(cfg, c.pool, index, events, c.book, c.metrics.NewSelectionService(), quiet)
	c.handler = c.selector.Handler()
	return c
}

// leaving is a pool watcher that makes the book forget workers that leave.
type leaving struct{ book *scoring.ActiveSequences }

func (leaving) WorkerJoined(pool.Worker)      {}
func (l leaving) WorkerLeft(w kvblock.Worker) { l.book.Forget(w) }

func (c *counter) ask(method, path, body string) (int, string) {
	c.t.Helper()
	req := httptest.NewRequest(method, path, strings.NewReader(body))
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	w := httptest.NewRecorder()
	c.handler.ServeHTTP(w, req)
	text, err := io.ReadAll(w.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return w.Code, strings.TrimSpace(string(text))
}

func (c *counter) want(request, body string, status int, part string) {
	c.t.Helper()
	method, path, _ := strings.Cut(request, " ")
	if got, text := c.ask(method, path, body); got != status || !strings.Contains(text, part) {
		c.t.Errorf("%s %.200s: %d %.500s; want %d with %q", request, body, got, text, status, part)
	}
}

const (
	workerOne = `{"worker_id": 1, "endpoint": "http://a:1", "block_size": 4, "taints": ["b", "a", "b"], ` +
		`"max_num_batched_tokens": 50, "total_kv_blocks": 9}`
	workerTwo = `{"worker_id": 2, "endpoint": "http://b:1", "block_size": 4, "data_parallel_start_rank": 3, ` +
		`"data_parallel_size": 2}`
)

func TestSelectionRefuses(t *testing.T) {
	c := newCounter(t, nil)
	c.want("GET /ready", "", http.StatusServiceUnavailable, `{"ready":false,"schedulable_workers":0,"workers":[]}`)
	c.want("POST /select", `{"token_ids": [1]}`, http.StatusServiceUnavailable, "no schedulable workers are available")
	c.want("POST /workers", workerOne, http.StatusCreated, `"taints":["a","b"]`)
	c.want("POST /workers", workerTwo, http.StatusCreated, `"lifecycle":"schedulable"`)
	c.want("GET /ready", "", http.StatusOK, `"schedulable_workers":2`)
	long := strings.Repeat("x", pool.MaxText+1)
	for _, x := range []struct {
		request, body string
		status        int
		part          string
	}{
		{"GET /nowhere", "", http.StatusNotFound, `{"error":"route not found"}`},
		{"GET /reservations/", "", http.StatusNotFound, "route not found"},
		{"GET /select", "", http.StatusMethodNotAllowed, `{"error":"method not allowed"}`},
		{"HEAD /health", "", http.StatusOK, ""},
		{"POST /select", `{`, http.StatusBadRequest, "not JSON"},
		{"POST /select", `[]`, http.StatusUnprocessableEntity, "must be a JSON object"},
		{"POST /select", `{"token_ids": [-1]}`, http.StatusUnprocessableEntity, `"token_ids: number -1`},
		{"POST /select", `{}`, http.StatusBadRequest, "block_hashes is required without token_ids"},
		{"POST /select", `{"block_hashes": []}`, http.StatusBadRequest,
			"sequence_hashes is required without token_ids"},
		{"POST /select", `{"block_hashes": [], "sequence_hashes": []}`, http.StatusBadRequest,
			"isl_tokens is required without token_ids"},
		{"POST /select", `{"block_hashes": [], "sequence_hashes": [], "isl_tokens": 0}`, http.StatusBadRequest,
			"must be greater than 0"},
		{"POST /select", `{"block_hashes": [], "sequence_hashes": [], "isl_tokens": 9000000000}`, http.StatusBadRequest,
			"at most"},
		{"POST /select", `{"block_hashes": [1], "sequence_hashes": [], "isl_tokens": 5}`, http.StatusBadRequest,
			"length 1 must match sequence_hashes length 0"},
		{"POST /select", `{"token_ids": [1], "selection_id": "` + long + `"}`, http.StatusBadRequest,
			"selection_id is longer"},
		{"POST /select", `{"token_ids": [1], "selection_id": "a\r\nb"}`, http.StatusBadRequest, "control character"},
		{"POST /workers", strings.Replace(workerOne, `"taints": [`, `"taints": ["a\nb", `, 1), http.StatusBadRequest,
			"control character"},
		{"POST /workers", `{"worker_id": 99, "model_name": "a\u001bb"}`, http.StatusBadRequest, "control character"},
		{"POST /workers", `{"worker_id": 99, "model_name": "m", "endpoint": "http://a b"}`, http.StatusBadRequest,
			"has a space"},
		{"POST /select", `{"token_ids": [1], "model_name": "m"}`, http.StatusServiceUnavailable,
			"no schedulable workers for model=m routing_group=default"},
		{"POST /select", `{"token_ids": [1], "pinned_worker": {"worker_id": 1}}`, http.StatusUnprocessableEntity,
			"pinned_worker.dp_rank is missing"},
		{"POST /select", `{"token_ids": [1], "pinned_worker": {"dp_rank": 1}}`, http.StatusUnprocessableEntity,
			"pinned_worker.worker_id is missing"},
		{"POST /select", `{"token_ids": [1], "affinity_target": {}}`, http.StatusUnprocessableEntity,
			"affinity_target.worker_id is missing"},
		{"POST /select", `{"token_ids": [1], "session_context": {}}`, http.StatusUnprocessableEntity,
			"session_context.session_id is missing"},
		{"POST /select", `{"token_ids": [1], "session_context": {"session_id": "s", "input_trigger": "x"}}`,
			http.StatusUnprocessableEntity, "input_trigger"},
		{"POST /select", `{"token_ids": [1], "pinned_worker": {"worker_id": 2, "dp_rank": 0}}`,
			http.StatusServiceUnavailable, "no endpoints available to route work"},
		{"POST /select", `{"token_ids": [1], "pinned_worker": {"worker_id": 9, "dp_rank": 0}}`,
			http.StatusServiceUnavailable, "no endpoints available to route work"},
		{"POST /select", `{"token_ids": [1], "allowed_worker_ids": [1], "pinned_worker": {"worker_id": 2, "dp_rank": ` +
			`3}}`, http.StatusBadRequest, "pinned worker 2 is not in allowed worker set"},
		{"POST /select", `{"token_ids": [1], "affinity_target": {"worker_id": 1}, "pinned_worker": {"worker_id": 2, ` +
			`"dp_rank": 3}}`, http.StatusBadRequest, "pinned worker 2"},
		{"POST /select", `{"token_ids": [1], "affinity_target": {"worker_id": 9}, "pinned_worker": {"worker_id": 2, ` +
			`"dp_rank": 3}}`, http.StatusOK, `"worker_id":2,"dp_rank":3`},
		{"POST /select", `{"token_ids": [1], "affinity_target": {"worker_id": 2, "dp_rank": 4}}`, http.StatusOK,
			`"worker_id":2,"dp_rank":4`},
		{"POST /select", `{"token_ids": [1], "allowed_worker_ids": []}`, http.StatusServiceUnavailable, "no endpoints"},
		{"POST /select", `{"token_ids": [1], "routing_constraints": {"required_taints": ["b", "a"]}}`, http.StatusOK,
			`"worker_id":1`},
		{"POST /select", `{"token_ids": [1], "routing_constraints": {"required_taints": ["b", "c"]}}`,
			http.StatusServiceUnavailable, "no endpoints"},
		{"POST /select", `{"token_ids": [1], "routing_constraints": {"preferred_taints": {"a": 1}}}`, http.StatusOK,
			`"worker_id":1`},
		{"POST /select", `{"token_ids": [1], "routing_constraints": {"preferred_taints": {"a": -1, "b": -9}}}`,
			http.StatusOK, `"worker_id":2`},
		{"POST /select", `{"token_ids": [1], "router_config_override": {"router_temperature": -1}}`,
			http.StatusUnprocessableEntity, "router_temperature must be a number from 0 to 1000000000"},
		{"POST /select", `{"token_ids": [1], "router_config_override": {"prefill_load_scale": 1e300}}`,
			http.StatusUnprocessableEntity, "prefill_load_scale must be a number from 0 to 1000000000"},
		{"POST /select", `{"token_ids": [1], "router_config_override": {"prefill_load_scale": 1e9, "other": 1}}`,
			http.StatusOK, `"worker_id"`},
		{"POST /select", `{"token_ids": [1], "router_config_override": {"shared_cache_multiplier": 2}}`,
			http.StatusUnprocessableEntity, "from 0 to 1"},
		{"POST /select", `{"token_ids": [1], "router_config_override": {"overlap_score_weight": 1e999}}`,
			http.StatusUnprocessableEntity, "overlap_score_weight"},
		{"POST /potential_loads", `{"token_ids": [1], "router_config_override": {"overlap_score_credit": -1}}`,
			http.StatusUnprocessableEntity, "overlap_score_credit"},
		{"POST /overlap_scores", `{"token_ids": [1], "model_name": "m"}`, http.StatusServiceUnavailable, "for model=m"},
		{"POST /select_and_reserve", `{"token_ids": [1], "selection_id": ""}`, http.StatusBadRequest,
			"selection_id is empty"},
		{"POST /reservations", `{"selection_id": "", "worker_id": 1, "token_ids": [1]}`, http.StatusBadRequest,
			"selection_id is empty"},
		{"POST /reservations", `{}`, http.StatusUnprocessableEntity, "selection_id is missing"},
		{"POST /reservations", `{"selection_id": "` + long + `"}`, http.StatusBadRequest, "selection_id is longer"},
		{"POST /reservations", `{"selection_id": "a"}`, http.StatusNotFound,
			"no pending selection a for model=default routing_group=default (expired, already used, or never " +
				"selected)"},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 9, "token_ids": [1]}`, http.StatusNotFound,
			"schedulable worker 9 not found for model=default"},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 2, "token_ids": [1]}`, http.StatusNotFound,
			"Worker WorkerWithDpRank { worker_id: 2, dp_rank: 0 } not found"},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 2}`, http.StatusBadRequest,
			"sequence_hashes is required"},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 2, "sequence_hashes": []}`, http.StatusBadRequest,
			"isl_tokens is required"},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 1, "token_ids": [1], "effective_prefill_tokens": 2}`,
			http.StatusBadRequest, "effective_prefill_tokens (2) must not exceed isl_tokens (1)"},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 1, "token_ids": [1], "router_config_override": ` +
			`{"prefill_load_scale": -1}}`, http.StatusUnprocessableEntity, "prefill_load_scale"},
		{"POST /reservations/a/prefill_complete", "", http.StatusNotFound, "reservation a not found"},
		{"POST /reservations/a/output_block", `{}`, http.StatusNotFound, "reservation a not found"},
		{"POST /reservations/a/output_block", `{"decay_fraction": 1.5}`, http.StatusBadRequest,
			"decay_fraction must be between 0.0 and 1.0"},
		{"POST /reservations/a/output_block", "", http.StatusUnsupportedMediaType, "application/json"},
		{"DELETE /reservations/a%2Fb", "", http.StatusNotFound, "reservation a/b not found"},
		{"POST /workers", `{}`, http.StatusUnprocessableEntity, "worker_id is missing"},
		{"POST /workers", `{"worker_id": 3, "block_size": "x"}`, http.StatusUnprocessableEntity, `"block_size: string`},
		{"POST /workers", `{"worker_id": 3, "kv_transfer_enforcement": "x"}`, http.StatusUnprocessableEntity,
			"neither required nor preferred"},
		{"POST /workers", `{"worker_id": 3, "data_parallel_size": 4097}`, http.StatusBadRequest,
			"data_parallel_size 4097 exceeds the maximum 4096"},
		{"POST /workers", `{"worker_id": 3, "model_name": "` + long + `"}`, http.StatusBadRequest, "longer than"},
		{"POST /workers", `{"worker_id": 3, "taints": ["` + long + `"]}`, http.StatusBadRequest, "longer than"},
		{"POST /workers", `{"worker_id": 3, "topology_domains": {"` + long + `": ""}}`, http.StatusBadRequest,
			"longer than"},
		{"POST /workers", `{"worker_id": 3, "kv_events_endpoints": {"1": "` + long + `"}}`, http.StatusBadRequest,
			"longer than"},
		{"POST /workers", `{"worker_id": 3, "kv_events_endpoints": {` + strings.TrimSuffix(manyRanks(maxItems+1), ",") +
			`}}`, http.StatusBadRequest, "more than"},
		{"POST /workers", `{"worker_id": 3, "endpoint": "e", "block_size": 8}`, http.StatusCreated,
			"block_size mismatch for model=default routing_group=default: existing=4 requested=8"},
		{"POST /workers", `{"worker_id": 3, "endpoint": "e", "block_size": 4, "is_eagle": true}`, http.StatusCreated,
			"is_eagle mismatch for model=default routing_group=default: existing=false requested=true"},
		{"POST /workers", `{"worker_id": 3, "endpoint": "e", "block_size": 4000000000}`, http.StatusCreated,
			"block_size must be at most"},
		{"POST /workers", `{"worker_id": 3, "endpoint": "e", "data_parallel_size": 0}`, http.StatusCreated,
			`"not_schedulable_reasons":["block_size must be greater than 0","data_parallel_size must be greater than ` +
				`0"]`},
		{"PATCH /workers/9", `{}`, http.StatusNotFound, "worker 9 not found"},
		{"PATCH /workers/x", `{}`, http.StatusBadRequest, "Invalid URL"},
		{"DELETE /workers/9", "", http.StatusNotFound, "worker 9 not found"},
		{"DELETE /workers/-1", "", http.StatusBadRequest, "Invalid URL"},
		{"GET /replica_sync/peers", "", http.StatusOK, "[]"},
		{"POST /replica_sync/register_peer", `{"endpoint": "tcp://a:1"}`, http.StatusConflict,
			"replica sync is disabled"},
		{"POST /replica_sync/deregister_peer", `{}`, http.StatusUnprocessableEntity, "endpoint is missing"},
		{"GET /dump", "", http.StatusOK, "{}"},
	} {
		c.want(x.request, x.body, x.status, x.part)
	}
	if n := c.book.Len(); n != 0 {
		t.Errorf("%d requests are booked after refusals", n)
	}
}

// manyRanks returns n members of a JSON object.
func manyRanks(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `"%d":"e",`, i)
	}
	return b.String()
}

// TestReservationsAreBooked: each kind of reservation changes the loads.
func TestReservationsAreBooked(t *testing.T) {
	c := newCounter(t, nil)
	c.want("POST /workers", workerOne, http.StatusCreated, "schedulable")
	c.want("POST /workers", workerTwo, http.StatusCreated, "schedulable")
	load := func(rank string, want string) {
		t.Helper()
		c.want("GET /loads", "", http.StatusOK, rank+want)
	}
	const one, three = `{"worker_id":1,"dp_rank":0,`, `{"worker_id":2,"dp_rank":3,`

	c.want(
		"POST /select_and_reserve",
		`{"token_ids": [1,2,3,4,5,6,7,8,9], "selection_id": "a", "pinned_worker": {"worker_id": 1, "dp_rank": 0}}`,
		http.StatusOK,
		`"isl_tokens":9,"track_prefill_tokens":true,"model_name":"default","routing_group":"default","worker_id":1,`+
			`"dp_rank":0,"endpoint":"http://a:1","block_size":4,`+
			`"overlap":{"longest_matched":0,"gpu":0,"dp":{"0":0},"cpu":0,"disk":0},"effective_prefill_tokens":9,`+
			`"potential_decode_blocks":3}`,
	)
	load(one, `"potential_prefill_tokens":9,"potential_decode_blocks":2,"active_requests":1}`)
	c.want(
		"POST /select_and_reserve",
		`{"token_ids": [1], "selection_id": "a"}`,
		http.StatusConflict,
		"selection a is already reserved or being reserved",
	)

	// The same prompt again: its blocks are booked already, and its tokens count as cached, because kvepp predicts them
	// without events.
	c.want(
		"POST /potential_loads",
		`{"token_ids": [1,2,3,4,5,6,7,8,9]}`,
		http.StatusOK,
		one+`"potential_prefill_tokens":10,"potential_decode_blocks":2,"active_requests":1}`,
	)
	c.want(
		"POST /potential_loads",
		`{"token_ids": [1,2,3,4,5,6,7,8,9], "router_config_override": {"track_prefill_tokens": false, `+
			`"assume_kv_reuse": false}}`,
		http.StatusOK,
		one+`"potential_prefill_tokens":9,"potential_decode_blocks":4,"active_requests":1}`,
	)
	c.want(
		"POST /overlap_scores",
		`{"token_ids": [1,2,3,4,5,6,7,8,9]}`,
		http.StatusOK,
		`{"block_size":4,"num_blocks":2,"workers":[`+one+`"device_blocks":2,`,
	)
	c.want(
		"POST /select",
		`{"token_ids": [1,2,3,4,5,6,7,8,9], "selection_id": "b", "advisory": true, "pinned_worker": {"worker_id": 1, `+
			`"dp_rank": 0}}`,
		http.StatusOK,
		`"effective_prefill_tokens":1,"potential_decode_blocks":3,"worker_load":{"active_prefill_tokens":9,`+
			`"prefill_token_capacity":50,"total_kv_blocks":9}}`,
	)
	// a selection books nothing
	load(one, `"potential_prefill_tokens":9,"potential_decode_blocks":2,"active_requests":1}`)
	c.want(
		"POST /reservations",
		`{"selection_id": "b", "model_name": "other"}`,
		http.StatusNotFound,
		"no pending selection b for model=other",
	)
	c.want(
		"POST /reservations",
		`{"selection_id": "b"}`,
		http.StatusCreated,
		`{"selection_id":"b","model_name":"default","routing_group":"default","worker_id":1,"dp_rank":0,`+
			`"endpoint":"http://a:1"}`,
	)
	load(one, `"potential_prefill_tokens":10,"potential_decode_blocks":2,"active_requests":2}`)
	c.want("POST /reservations", `{"selection_id": "b"}`, http.StatusNotFound, "already used")

	// Without a number of tokens no prefill is booked. A request may have hashes instead of tokens.
	c.want(
		"POST /reservations",
		`{"selection_id": "c", "worker_id": 2, "dp_rank": 3, "token_ids": [1,2,3,4,5,6,7,8,9]}`,
		http.StatusCreated,
		`"dp_rank":3`,
	)
	c.want(
		"POST /reservations",
		`{"selection_id": "c", "worker_id": 2, "dp_rank": 3, "token_ids": [1]}`,
		http.StatusConflict,
		"already reserved",
	)
	load(three, `"potential_prefill_tokens":0,"potential_decode_blocks":2,"active_requests":1}`)
	c.want(
		"POST /reservations",
		`{"selection_id": "d", "worker_id": 2, "dp_rank": 3, "sequence_hashes": [-1, 2], "isl_tokens": 9, `+
			`"effective_prefill_tokens": 7}`,
		http.StatusCreated,
		"",
	)
	c.want(
		"POST /reservations",
		`{"selection_id": "e", "worker_id": 2, "dp_rank": 3, "sequence_hashes": [-1, 2], "isl_tokens": 9, `+
			`"effective_prefill_tokens": 7, "track_prefill_tokens": false}`,
		http.StatusCreated,
		"",
	)
	load(three, `"potential_prefill_tokens":7,"potential_decode_blocks":4,"active_requests":3}`)
	c.want("POST /reservations/d/prefill_complete", "", http.StatusOK, `{"status":"ok"}`)
	c.want("POST /reservations/d/prefill_complete", "", http.StatusOK, `{"status":"ok"}`)
	load(three, `"potential_prefill_tokens":0,"potential_decode_blocks":4,"active_requests":3}`)
	c.want("POST /reservations/d/output_block", `{}`, http.StatusOK, `{"status":"ok"}`)
	load(three, `"potential_prefill_tokens":0,"potential_decode_blocks":5,"active_requests":3}`)
	// two blocks more, a quarter each
	c.want("POST /reservations/d/output_block", `{"decay_fraction": 0.25}`, http.StatusOK, `{"status":"ok"}`)
	load(three, `"potential_prefill_tokens":0,"potential_decode_blocks":5,"active_requests":3}`)
	for _, id := range []string{"c", "d", "e"} {
		c.want("DELETE /reservations/"+id, "", http.StatusOK, `{"status":"ok"}`)
		c.want("DELETE /reservations/"+id, "", http.StatusNotFound, "reservation "+id+" not found")
	}
	load(three, `"potential_prefill_tokens":0,"potential_decode_blocks":0,"active_requests":0}`)

	// A worker's reservations end when it leaves.
	c.want("PATCH /workers/1", `{"endpoint": "http://c:1"}`, http.StatusOK, `"endpoint":"http://c:1"`)
	load(one, `"potential_prefill_tokens":10,"potential_decode_blocks":2,"active_requests":2}`)
	c.want("DELETE /workers/1", "", http.StatusOK, `"lifecycle":"unschedulable"`)
	c.want("POST /reservations/a/prefill_complete", "", http.StatusNotFound, "reservation a not found")
	c.want("GET /loads?model_name=default", "", http.StatusOK, `"loads":[`+three)
	c.want("GET /loads?routing_group=other", "", http.StatusOK, `[]`)
	c.want("GET /workers?model_name=default", "", http.StatusOK, `[{"worker_id":2,`)
	c.want("DELETE /workers/2", "", http.StatusOK, "")
	if n, stats := c.book.Len(), c.selector.Stats(); n != 0 || stats != (Stats{}) || c.selector.pending.len() != 0 ||
		c.selector.bytes != 0 {
		t.Errorf("%d requests are booked, %+v are held", n, stats)
	}
}

// TestWorkersAreBounded registers a worker when only its own bytes are left.
func TestWorkersAreBounded(t *testing.T) {
	c := newCounter(t, nil)
	c.want("POST /workers", workerOne, http.StatusCreated, "schedulable")
	c.selector.bytes += api.MaxWorkerBytes - 2*c.selector.bytes // as if other workers took the rest
	c.want(
		"POST /workers",
		strings.Replace(workerOne, `"worker_id": 1`, `"worker_id": 2`, 1),
		http.StatusCreated,
		"schedulable",
	)
	c.want("POST /workers", workerOne, http.StatusCreated, "schedulable") // replaces its own record
	c.want(
		"POST /workers",
		`{"worker_id": 3}`,
		http.StatusTooManyRequests,
		"what is known of workers takes 268435456 bytes, of at most 268435456",
	)
	c.want("PATCH /workers/1", `{"endpoint": "http://a:12"}`, http.StatusTooManyRequests, "what is known of workers")
	c.want("DELETE /workers/2", "", http.StatusOK, "")
	c.want("POST /workers", `{"worker_id": 3}`, http.StatusCreated, "incomplete")
}

// TestSelectionsEnd: pending selections and reservations expire.
func TestSelectionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCounter(t, nil)
		c.want("POST /workers", workerOne, http.StatusCreated, "schedulable")
		c.want("POST /select", `{"token_ids": [1,2,3,4], "selection_id": "a"}`, http.StatusOK, "")
		c.want("POST /select_and_reserve", `{"token_ids": [1,2,3,4], "selection_id": "b"}`, http.StatusOK, "")
		<-time.After(2*time.Minute + 1)
		c.want("POST /reservations", `{"selection_id": "a"}`, http.StatusNotFound, "no pending selection")
		c.want("POST /reservations/b/prefill_complete", "", http.StatusOK, "")
		<-time.After(3 * time.Minute)
		c.want("POST /reservations/b/prefill_complete", "", http.StatusNotFound, "reservation b not found")
		c.want("GET /loads", "", http.StatusOK, `"active_requests":0`)
	})
}

func TestPendingSelectionsAreBounded(t *testing.T) {
	p := newPendingSelections(&Config{PendingTTL: time.Minute, PendingEntries: 2, PendingBytes: 100})
	put := func(id string, blocks int) {
		p.put(&pendingSelection{key: pendingKey{id: id}, tracked: make([]kvblock.SequenceHash, blocks)})
	}
	want := func(there ...string) {
		t.Helper()
		if p.len() != len(there) {
			t.Errorf("%d selections wait, want %q", p.len(), there)
		}
		for _, id := range there {
			if p.get(pendingKey{id: id}) == nil {
				t.Errorf("%s does not wait", id)
			}
		}
	}
	put("a", 1)
	put("b", 1)
	put("a", 2) // now the newer one
	put("c", 3)
	want("a", "c")
	put("d", 9) // its bytes leave room for c only
	want("c", "d")
	put("e", 100)
	want()
	if p.bytes != 0 {
		t.Errorf("%d bytes are counted of nothing", p.bytes)
	}
}

// TestWorkersNeedEvents: with events, a worker without usable event addresses is not schedulable.
func TestWorkersNeedEvents(t *testing.T) {
	c := newCounter(t, func(cfg *Config) { cfg.Events = true })
	c.want(
		"POST /workers",
		workerOne,
		http.StatusCreated,
		`"not_schedulable_reasons":["kv_events endpoint is required for dp_rank 0"]`,
	)
	c.want(
		"PATCH /workers/1",
		`{"kv_events_endpoint": "nonsense"}`,
		http.StatusOK,
		"reconciliation failed: invalid kv_events endpoint for worker 1 dp_rank 0: ",
	)
	c.want(
		"PATCH /workers/1",
		`{"kv_events_endpoint": "tcp://127.0.0.1:9", "replay_endpoint": "nonsense"}`,
		http.StatusOK,
		"reconciliation failed: invalid replay endpoint for worker 1: ",
	)
	c.want("PATCH /workers/1", `{"replay_endpoint": "tcp://127.0.0.1:9"}`, http.StatusOK, `"lifecycle":"schedulable"`)
	c.want(
		"PATCH /workers/1",
		`{"data_parallel_size": 2}`,
		http.StatusOK,
		`["kv_events endpoint is required for dp_rank 0","kv_events endpoint is required for dp_rank 1",`+
			`"replay_endpoint is supported only for data_parallel_size 1"]`,
	)
	c.want("GET /ready", "", http.StatusServiceUnavailable, `"schedulable_workers":0`)
	c.want(
		"POST /workers",
		`{"worker_id": 2, "endpoint": "e", "block_size": 8, "data_parallel_size": 2, "kv_events_endpoints": {"0": `+
			`"tcp://127.0.0.1:9", "1": "tcp://127.0.0.1:10"}}`,
		http.StatusCreated,
		`"lifecycle":"schedulable"`,
	) // no worker is left with another block size
	for fields, status := range map[string]int{`4294967295`: http.StatusBadRequest,
		`4294967294, "data_parallel_size": 2`: http.StatusBadRequest, `4294967294`: http.StatusCreated} {
		c.want(
			"POST /workers",
			`{"worker_id": 3, "endpoint": "e", "block_size": 8, "data_parallel_start_rank": `+fields+`}`,
			status,
			"data_parallel_start_rank",
		)
	}
	c.want("GET /dump", "", http.StatusOK, `{"default:default":{"block_size":8,"events":[]}}`)
}

// FuzzSelectionBodies: every body gets a response in JSON, and refused ones leave nothing booked.
func FuzzSelectionBodies(f *testing.F) {
	for _, body := range []string{
		`{"token_ids": [1,2,3,4], "selection_id": "a", "worker_id": 1}`,
		`{"block_hashes": [1], "sequence_hashes": [-1], "isl_tokens": 5, "router_config_override": ` +
			`{"overlap_score_weight": 0}}`,
		`{"mm_routing_info": {"routing_token_ids": [1,2,3,4], "block_mm_infos": [null, {"mm_objects": [{"mm_hash": ` +
			`3}]}]}}`,
		`{"token_ids": [], "routing_constraints": {"preferred_taints": {"a": 1e38, "b": -1e38}}, ` +
			`"allowed_worker_ids": [1]}`,
		`{"worker_id": 1, "endpoint": "e", "block_size": 1, "data_parallel_start_rank": 4294967295, "is_eagle": true}`,
		`null`, `{"pinned_worker": null, "token_ids": null}`,
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		c := newCounter(t, nil)
		c.want("POST /workers", workerOne, http.StatusCreated, "schedulable")
		for _, request := range []string{"POST /select", "POST /potential_loads", "POST /overlap_scores",
			"POST /reservations", "POST /select_and_reserve",
			"POST /workers", "PATCH /workers/1", "GET /loads", "GET /ready"} {
			method, path, _ := strings.Cut(request, " ")
			status, response := c.ask(method, path, body)
			if status == http.StatusInternalServerError || !json.Valid([]byte(response)) {
				t.Fatalf("%s %q: %d %q", request, body, status, response)
			}
		}
		if n, stats := c.book.Len(), c.selector.Stats(); n != stats.Reservations {
			t.Fatalf("%q: %d bookings for %d reservations", body, n, stats.Reservations)
		}
	})
}

// TestSelectionsAtOnce: clients send all kinds of requests concurrently. At the end nothing is booked.
func TestSelectionsAtOnce(t *testing.T) {
	c := newCounter(t, nil)
	c.want("POST /workers", workerOne, http.StatusCreated, "schedulable")
	var wait sync.WaitGroup
	for client := range 8 {
		wait.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(client), 1))
			for step := range 300 {
				id := fmt.Sprintf("%d-%d", client, step%7)
				body := fmt.Sprintf(
					`{"selection_id": %q, "token_ids": [1,2,3,4,5,6,7,8,%d,1,1,1], "worker_id": 1}`,
					id,
					rng.IntN(3),
				)
				request := []string{"POST /select", "POST /select_and_reserve", "POST /reservations",
					"POST /potential_loads", "POST /overlap_scores",
					"DELETE /reservations/" + id, "POST /reservations/" + id + "/prefill_complete", "GET /loads",
					"GET /ready"}[rng.IntN(9)]
				switch rng.IntN(40) {
				case 0:
					request, body = "POST /workers", workerTwo
				case 1:
					request = "DELETE /workers/2"
				case 2:
					request, body = "PATCH /workers/2", fmt.Sprintf(`{"data_parallel_size": %d}`, 1+rng.IntN(4))
				case 3:
					request, body = "POST /reservations/"+id+"/output_block", `{"decay_fraction": 0.5}`
				}
				method, path, _ := strings.Cut(request, " ")
				if status, text := c.ask(method, path, body); !json.Valid([]byte(text)) ||
					status >= 500 && !strings.Contains(text, "no longer schedulable") {
					t.Errorf("%s: %d %s", request, status, text)
				}
			}
			for i := range 7 {
				c.ask("DELETE", fmt.Sprintf("/reservations/%d-%d", client, i), "")
			}
		})
	}
	wait.Wait()
	for w, load := range c.book.Loads(nil) {
		if load != (scoring.Load{}) {
			t.Errorf("worker %d carries %+v at the end", w, load)
		}
	}
	if n := c.selector.Stats().Reservations; n != 0 {
		t.Errorf("%d reservations are left", n)
	}
}

// TestSessionsOfSelections: a session's reservation expires, and later the session itself.
func TestSessionsOfSelections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCounter(t, func(cfg *Config) {
			cfg.Sessions = session.NewTable(session.Config{TTL: 10 * time.Minute})
		})
		c.want("POST /workers", workerOne, http.StatusCreated, "schedulable")
		c.want("POST /workers", workerTwo, http.StatusCreated, "schedulable")
		c.want(
			"POST /select_and_reserve",
			`{"selection_id": "a", "session_id": "s", "token_ids": [1], "allowed_worker_ids": [1]}`,
			http.StatusOK,
			`"worker_id":1`,
		)
		c.want(
			"POST /select",
			`{"session_id": "s", "token_ids": [1], "selection_id": "b"}`,
			http.StatusOK,
			`"worker_id":1`,
		)
		c.want(
			"POST /select",
			`{"session_id": "s", "token_ids": [1], "allowed_worker_ids": [2]}`,
			http.StatusOK,
			`"worker_id":2`,
		)
		c.want(
			"POST /select",
			`{"session_context": {"session_id": "`+strings.Repeat("s", 257)+`"}, "token_ids": [1]}`,
			http.StatusBadRequest,
			"must not exceed 256 bytes",
		)
		<-time.After(14 * time.Minute) // 5 until the reservation ends, and 9 more
		c.want("POST /select", `{"session_id": "s", "token_ids": [1]}`, http.StatusOK, `"worker_id":1`)
		<-time.After(10*time.Minute + time.Second)
		if b, err := c.selector.sessionOf(group{name: api.ModelGroup{Model: "default", Group: "default"}.PoolModel()},
			new("s")); err != nil ||
			b.there {
			t.Errorf("the session is still on worker %d, %v", b.worker, err)
		}
		if c.selector.leases.Len() != 0 {
			t.Error("the lease of a reservation that has run out is still held")
		}

		// A selection is refused if its session has moved meanwhile.
		c.want(
			"POST /select",
			`{"selection_id": "c", "session_id": "t", "token_ids": [1], "allowed_worker_ids": [1]}`,
			http.StatusOK,
			`"worker_id":1`,
		)
		c.want(
			"POST /select_and_reserve",
			`{"selection_id": "d", "session_id": "t", "token_ids": [1], "allowed_worker_ids": [2]}`,
			http.StatusOK,
			`"worker_id":2`,
		)
		c.want(
			"POST /reservations",
			`{"selection_id": "c"}`,
			http.StatusBadRequest,
			"session t is bound to worker 2, not 1",
		)
		c.want("POST /reservations", `{"selection_id": "c"}`, http.StatusNotFound, "no pending selection c")
		c.want("DELETE /reservations/d", "", http.StatusOK, "ok")
		if n := c.book.Len(); n != 0 {
			t.Errorf("%d reservations are left", n)
		}
	})
}

// TestSelectRegistrationIsLinear: the cost of a registration does not grow with the number of workers.
func TestSelectRegistrationIsLinear(t *testing.T) {
	c := newCounter(t, nil)
	apitest.Linear(t, 500, "POST /workers", func(i int) {
		body := fmt.Sprintf(
			`{"worker_id": %d, "model_name": "m", "endpoint": "http://10.0.0.1:80", "block_size": 16}`,
			i,
		)
		req := httptest.NewRequest("POST", "/workers", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		if c.handler.ServeHTTP(w, req); w.Code != http.StatusCreated ||
			!strings.Contains(w.Body.String(), `"schedulable"`) {
			t.Fatal(w.Code, w.Body)
		}
	})
}

func (p *pendingSelections) len() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.byKey)
}
