package e2e

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSelectionsAsDynamos plays the same histories of workers, KV events, selections and reservations into python -m
// dynamo.select_service and kvepp select. Both must agree on overlaps, tokens to prefill, blocks to decode, loads, and
// every response. The test computes the workers' costs from Dynamo's responses, and each service must choose one of the
// cheapest.
//
// Known defects of Dynamo are excluded. It ignores weights and temperatures of a request (then its choice must be one
// of the cheapest by the weights of the start), and keeps names of reservations after their worker left; both are
// counted. Defects of its index are not triggered (TestIndexerWhereDynamosErrs shows them): the engines here give equal
// blocks equal hashes, free the ends of prompts first, and lose no event.
func TestSelectionsAsDynamos(t *testing.T) {
	for _, c := range []struct {
		name  string
		steps int
		weights
	}{
		{"defaults", 5000, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true}},
		{"every weight", 3000, weights{credit: 0.5, decay: 1, scale: 2, request: 3, host: 0.5, disk: 0.125,
			track: true}},
		{"prefill not tracked", 1000, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25}},
		{"without events", 1000, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true, unheard: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := startSelectors(t, c.weights)
			seed := uint64(begun)
			x.rng = rand.New(rand.NewPCG(seed, uint64(c.steps)))
			x.add(7, "default", 0, 1)
			x.add(8, "default", 3, 2, "a")
			x.add(12510495253119935035, "default", 0, 1, "b")
			x.add(9, "default", 0, 1, "a", "b")
			x.add(10, "other", 0, 2, "b")
			defer func() {
				for _, what := range slices.Sorted(maps.Keys(x.counts)) {
					t.Logf("%6d %s", x.counts[what], what)
				}
				t.Logf("seed %d", seed)
			}()
			x.play(c.steps)
		})
	}
}

// TestSelectionsRefusedAsDynamos checks that refusals and unusual valid requests get the same response as from Dynamo's
// selection service: the same status and body, except for a JSON decoder's wording.
func TestSelectionsRefusedAsDynamos(t *testing.T) {
	x := startSelectors(t, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true})
	same := func(requests ...[2]string) {
		t.Helper()
		for _, r := range requests {
			method, path, _ := strings.Cut(r[0], " ")
			var body any
			if r[1] != "" {
				body = r[1]
			}
			x.same(method, path, body)
		}
	}
	same([][2]string{
		{
			"GET /health",
			"",
		}, {"GET /ready", ""}, {"GET /workers", ""}, {"GET /loads", ""}, {"GET /dump", ""}, {"GET /nowhere", ""},
		{"GET /select", ""},
		{
			"DELETE /workers",
			"",
		}, {"PUT /health", ""}, {"GET /replica_sync/peers", ""},
		{"POST /replica_sync/register_peer", `{"endpoint": "tcp://127.0.0.1:1"}`},
		{"POST /replica_sync/deregister_peer", `{"endpoint": "x"}`}, {"POST /replica_sync/register_peer", `{}`},
		{
			"POST /select",
			`{}`,
		}, {"POST /potential_loads", `{"token_ids": [1]}`}, {"POST /overlap_scores", `{"token_ids": [1]}`},
		{
			"POST /reservations",
			`{"selection_id": "a"}`,
		}, {"POST /reservations", `{}`},
		{"POST /reservations", `{"selection_id": "a", "worker_id": 1, "token_ids": [1]}`},
		{
			"POST /workers",
			`{}`,
		}, {"POST /workers", `{"worker_id": 1}`}, {"GET /ready", ""},
		{"PATCH /workers/1", `{"endpoint": "http://h:1"}`}, {"PATCH /workers/9", `{}`},
		{
			"PATCH /workers/x",
			`{}`,
		}, {"DELETE /workers/x", ""}, {"POST /workers", `{"worker_id": -1}`}, {"POST /workers", `{"worker_id": "1"}`},
		{
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4, "data_parallel_size": 2, "kv_events_endpoint": ` +
				`"tcp://127.0.0.1:1"}`,
		},
		{
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4, "data_parallel_size": 2, "kv_events_endpoints": ` +
				`{"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:2"}, "replay_endpoint": "tcp://127.0.0.1:9"}`,
		},
		{"POST /workers", `{"worker_id": 1, "endpoint": "e", "block_size": 4, "data_parallel_size": 4097}`},
		{"POST /workers", `{"worker_id": 1, "endpoint": "", "block_size": 0, "data_parallel_size": 0}`},
		{"POST /workers", `{"worker_id": 1, "kv_transfer_enforcement": "no"}`},
		{
			"POST /workers",
			`{"worker_id": 1, "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.1, ` +
				`"router_hint_worker_type": "p", "kv_event_source_mode": "m",
			"router_hint_source_control_endpoints": {"3": "c"}, "topology_domains": {"zone": "z"}, ` +
				`"stable_routing_id": "s", "kv_transfer_domain": "d", "is_eagle": false}`,
		},
		{
			"POST /workers",
			`{"worker_id": 1, "endpoint": "http://h:1", "block_size": 4, "data_parallel_size": 2, ` +
				`"data_parallel_start_rank": 3, "max_num_batched_tokens": 50, "total_kv_blocks": 100,
			"kv_events_endpoints": {"3": "tcp://127.0.0.1:1", "4": "tcp://127.0.0.1:2"}, "taints": ["b", "a", "b"]}`,
		},
	}...)
	one := &selectable{id: 1, group: "default"}
	x.booked(one, true)
	same([][2]string{
		{
			"POST /workers",
			`{"worker_id": 3, "endpoint": "e", "block_size": 8, "kv_events_endpoint": "tcp://127.0.0.1:4"}`,
		},
		{
			"POST /workers",
			`{"worker_id": 4, "endpoint": "e", "block_size": 4, "is_eagle": true, "kv_events_endpoint": ` +
				`"tcp://127.0.0.1:4"}`,
		},
		{
			"POST /workers",
			`{"worker_id": 5, "Endpoint": "e", "BLOCK_SIZE": 4}`,
		}, {"DELETE /workers/5", ""}, {"POST /workers", `{"worker_id": 5, "worker_id": 5}`},
		{"PATCH /workers/1", `{"taints": [], "taints": []}`}, {"PATCH /workers/1", `{"Taints": []}`},
		{
			"GET /ready",
			"",
		}, {"GET /workers?model_name=other", ""}, {"GET /workers?routing_group=default", ""}, {"GET /loads", ""},
		{"GET /dump", ""},
		{"GET /loads?model_name=other", ""},
	}...)
	only := `"pinned_worker": {"worker_id": 1, "dp_rank": 4}`
	for _, body := range []string{
		`{`, `[]`, ``, `"x"`, `{"token_ids": "x"}`, `{"token_ids": [-1]}`, `{"token_ids": [4294967296]}`,
		`{"token_ids": [1.5]}`, `{"token_ids": null}`,
		`{"block_hashes": [1]}`, `{"block_hashes": [1], "sequence_hashes": [1]}`,
		`{"sequence_hashes": [1], "isl_tokens": 5}`,
		`{"block_hashes": [1, 2], "sequence_hashes": [1], "isl_tokens": 5}`,
		`{"block_hashes": [], "sequence_hashes": [], "isl_tokens": 0}`,
		`{"token_ids": [1], "model_name": "other"}`, `{"token_ids": [1], "pinned_worker": {"worker_id": 1}}`,
		`{"token_ids": [1], "pinned_worker": {"worker_id": 1, "dp_rank": 0}}`,
		`{"token_ids": [1], "pinned_worker": {"worker_id": 9, "dp_rank": 0}}`,
		`{"token_ids": [1], "allowed_worker_ids": [9], ` + only + `}`,
		`{"token_ids": [1], "allowed_worker_ids": []}`, `{"token_ids": [1], "affinity_target": {}}`,
		`{"token_ids": [1], "affinity_target": {"worker_id": 1, "dp_rank": 3}}`,
		`{"token_ids": [1], "affinity_target": {"worker_id": 9}, ` + only + `}`,
		`{"token_ids": [1], "affinity_target": {"worker_id": 1, "dp_rank": 3}, ` + only + `}`,
		`{"token_ids": [1], "routing_constraints": {"required_taints": ["c"]}}`,
		`{"token_ids": [1], "routing_constraints": {"required_taints": ["a", "b"]}, ` + only + `}`,
		`{"token_ids": [1], "session_context": {}}`,
		`{"token_ids": [1], "session_context": {"session_id": "s", "input_trigger": "no"}}`,
		`{"token_ids": [1], "session_context": {"session_id": "s", "input_trigger": "other", "agent_headers": {"a": ` +
			`["b"]}}, ` + only + `}`,
		`{"token_ids": [1], "router_config_override": {"overlap_score_credit": -1}}`,
		`{"token_ids": [1], "router_config_override": {"prefill_load_scale": -1}}`,
		`{"token_ids": [1], "router_config_override": {"router_temperature": -1}}`,
		`{"token_ids": [1], "router_config_override": {"shared_cache_multiplier": 2}}`,
		`{"token_ids": [1], "router_config_override": {"overlap_score_weight": -1}}`,
		`{"token_ids": [1], "router_config_override": {"other": 1}, ` + only + `}`,
		`{"token_ids": [1], "expected_output_tokens": -1}`,
		`{"token_ids": [1], "expected_output_tokens": 7, "priority_jump": 2.5, "strict_priority": 3, ` + only + `}`,
		`{"token_ids": [], ` + only + `}`,
		`{"token_ids": [1, 2, 3, 4, 5], "is_eagle": true, "lora_name": "l", "cache_salt": "c", ` + only + `}`,
		`{"token_ids": [1], "mm_routing_info": {"routing_token_ids": [1, 2, 3, 4, 5]}, "selection_id": "m", ` + only +
			`}`,
		`{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "block_mm_infos": [{"mm_objects": [{"mm_hash": 18446744073709551615,` +
			` "offsets": [[0, 2]]}, {"mm_hash": 7, "offsets": []}]}, null], ` + only + `}`,
		`{"token_ids": [1], "advisory": true, ` + only + `}`,
		`{"Token_ids": [1], ` + only + `}`, `{"token\u005fids": [1], "TOKEN_IDS": "x", ` + only + `}`,
		`{"token_ids": [1], "token_ids": [1], ` + only + `}`,
		`{"token_ids": [1], "unknown": 1, "unknown": 2, ` + only + `}`,
		`{"token_ids": [1], "pinned_worker": {"worker_id": 1, "Worker_id": 9, "dp_rank": 4}}`,
		`{"token_ids": [1], "pinned_worker": {"worker_id": 1, "dp_rank": 4, "dp_rank": 4}}`,
		`{"token_ids": [1], "session_context": {"session_id": "s", "agent_headers": {"A": ["b"], "a": ["b"]}}, ` +
			only + `}`,
		`{"token_ids": [` + strings.Repeat("1,", 8<<19) + `1]}`,
	} {
		same([2]string{"POST /select", body})
	}
	tokens := `"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]`
	same([][2]string{
		{
			"POST /select_and_reserve",
			`{"selection_id": "b", ` + tokens +
				`, "block_mm_infos": [{"mm_objects": [{"mm_hash": 9, "offsets": []}, {"mm_hash": 7, "offsets": ` +
				`[]}]}], ` + only + `}`,
		},
		{"POST /select_and_reserve", `{"selection_id": "b", ` + tokens + `, ` + only + `}`},
		{"POST /reservations", `{"selection_id": "m"}`}, {"POST /reservations", `{"selection_id": "m"}`},
		{
			"POST /reservations",
			`{"selection_id": "c", "worker_id": 1, ` + tokens + `}`,
		}, {"POST /reservations", `{"selection_id": "c", "worker_id": 9, ` + tokens + `}`},
		{
			"POST /reservations",
			`{"selection_id": "c", "worker_id": 1, "dp_rank": 3, ` + tokens + `, "effective_prefill_tokens": 10}`,
		},
		{
			"POST /reservations",
			`{"selection_id": "c", "worker_id": 1, "dp_rank": 3, ` + tokens + `, "effective_prefill_tokens": 9}`,
		},
		{"POST /reservations", `{"selection_id": "c", "worker_id": 1, "dp_rank": 3, ` + tokens + `}`},
		{
			"POST /reservations",
			`{"selection_id": "d", "worker_id": 1, "dp_rank": 3}`,
		}, {"POST /reservations", `{"selection_id": "d", "worker_id": 1, "sequence_hashes": [1]}`},
		{
			"POST /reservations",
			`{"selection_id": "d", "worker_id": 1, "dp_rank": 3, "sequence_hashes": [-1], "isl_tokens": 0}`,
		},
		{
			"POST /reservations",
			`{"selection_id": "e", "worker_id": 1, "dp_rank": 3, "model_name": "other", ` + tokens + `}`,
		},
		{
			"GET /loads",
			"",
		}, {"POST /reservations/c/output_block", `{}`},
		{"POST /reservations/c/output_block", `{"decay_fraction": 1.5}`}, {"POST /reservations/c/output_block", ""},
		{
			"POST /reservations/x/output_block",
			`{}`,
		}, {"GET /loads", ""}, {"POST /reservations/c/prefill_complete", ""},
		{"POST /reservations/c/prefill_complete", ""},
		{
			"POST /reservations/x%2Fy/prefill_complete",
			"",
		}, {"POST /reservations/c/prefill_complete/", ""}, {"DELETE /reservations/", ""},
		{"DELETE /reservations/c", ""}, {"DELETE /reservations/c", ""}, {"GET /loads", ""},
		{"POST /potential_loads", `{}`}, {"POST /overlap_scores", `{}`}, {"POST /potential_loads", `{` + tokens + `}`},
		{
			"POST /potential_loads",
			`{` + tokens + `,` + tokens + `}`,
		}, {"POST /overlap_scores", `{` + tokens + `,` + tokens + `}`},
		{
			"POST /potential_loads",
			`{` + tokens + `, "Model_name": "x", "router_config_override": {"Overlap_score_credit": -1}}`,
		},
		{
			"POST /reservations",
			`{"selection_id": "f", "selection_id": "f", "worker_id": 1, "dp_rank": 3, ` + tokens + `}`,
		},
	}...)
	x.remove(one)
	same([][2]string{
		{
			"POST /reservations/b/prefill_complete",
			"",
		}, {"POST /select", `{` + tokens + `}`}, {"GET /workers", ""}, {"GET /loads", ""}, {"GET /ready", ""},
	}...)
	t.Logf("%d answers alike", x.counts["answers alike"])
}

// TestSessionsAsDynamos begins sessions in both selection services, continues them, excludes their worker, and removes
// it.
func TestSessionsAsDynamos(t *testing.T) {
	x := startSelectors(
		t,
		weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true, unheard: true},
		"--session-affinity-ttl-secs",
		"600",
	)
	x.rng = rand.New(rand.NewPCG(uint64(begun), 9))
	for id := range uint64(3) {
		x.add(id+1, "default", 0, 1)
	}
	boundTo := map[string]uint64{}
	for step := range 600 {
		name, id := fmt.Sprintf("session-%d", x.rng.IntN(6)), 1+x.rng.Uint64N(3)
		tokens := x.prompt()
		selection := object{"token_ids": tokens}
		if x.rng.IntN(2) == 0 {
			selection["session_id"] = name
		} else {
			selection["session_context"], selection["session_id"] = object{"session_id": name}, "another"
		}
		reservation := maps.Clone(selection)
		reservation["selection_id"] = fmt.Sprintf("r%d", step)
		on, there := boundTo[name]
		want := func(a response, id uint64) {
			t.Helper()
			if got, _ := chose(a); a.status >= 300 || got != id {
				t.Fatalf("step %d: %v is bound to %d, but %v", step, name, id, a)
			}
		}
		switch n := x.rng.IntN(20); {
		case !there:
			// Only one worker is allowed, so that both services choose the same.
			reservation["allowed_worker_ids"] = []uint64{id}
			if x.rng.IntN(2) == 0 {
				x.same("POST", "/select", reservation) // a selection without a reservation binds nothing ...
				want(x.same("POST", "/reservations", object{"selection_id": reservation["selection_id"]}), id)
			} else {
				want(x.same("POST", "/select_and_reserve", reservation), id)
			}
			boundTo[name] = id
		case n == 0: // its worker is excluded: refused, and the session ends
			if id == on {
				id = 1 + on%3
			}
			reservation["allowed_worker_ids"] = []uint64{id}
			if a := x.same("POST", "/select_and_reserve", reservation); a.status != http.StatusBadRequest {
				t.Fatalf("step %d: %v is bound to %d, but %v", step, name, on, a)
			}
			delete(boundTo, name)
			continue
		case n == 1: // a request that names a worker has no session
			reservation["pinned_worker"] = object{"worker_id": id, "dp_rank": 0}
			want(x.same("POST", "/select_and_reserve", reservation), id)
		case n == 2:
			x.remove(x.worker(id))
			x.counts["workers that left"]++
			for session, at := range boundTo {
				if at == id { // the session begins again on another worker
					next := 1 + id%3
					want(
						x.same(
							"POST",
							"/select_and_reserve",
							object{
								"token_ids":          tokens,
								"session_id":         session,
								"selection_id":       session + fmt.Sprint(step),
								"allowed_worker_ids": []uint64{next},
							},
						),
						next,
					)
					boundTo[session] = next
				}
			}
			x.register(x.worker(id))
			continue
		default:
			want(x.same("POST", "/select", selection), on)
			want(x.same("POST", "/select_and_reserve", reservation), on)
		}
		x.counts["requests in sessions"]++
		if x.rng.IntN(2) == 0 {
			x.same("DELETE", "/reservations/"+reservation["selection_id"].(string), nil)
		}
	}
	x.same("POST", "/select", object{"token_ids": []int{1}, "session_id": strings.Repeat("s", 257)})
	x.same("POST", "/select_and_reserve", object{"token_ids": []int{1}, "session_id": strings.Repeat("s", 257)})
	t.Log(x.counts)
}

// TestSelectionsWaitAsDynamos makes selections wait in both services while their only allowed worker is busy, and
// checks that they continue in the same order.
func TestSelectionsWaitAsDynamos(t *testing.T) {
	policies := filepath.Join(t.TempDir(), "policies.yaml")
	if err := os.WriteFile(policies, []byte(`
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: short}, {min_tokens: 30, bucket: long}]
policy_classes:
- {name: short, policy_family: standard, cache_bucket: short, quantum: 60, prefill_busy_threshold_frac: 1, `+
		`request_queue_limit_per_worker: 2}
- {name: long, policy_family: standard, cache_bucket: long, queue_policy: wspt, quantum: 30, `+
		`prefill_busy_threshold: 20, raw_isl_token_queue_limit_per_worker: 60}
- {name: refused, quantum: 1, prefill_busy_threshold: 20, request_queue_limit_per_worker: 0}
- {name: free, quantum: 1}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, env string }{
		{"first come", "DYN_ROUTER_QUEUE_THRESHOLD=1"},
		{"shortest first", "DYN_ROUTER_QUEUE_THRESHOLD=1 DYN_ROUTER_QUEUE_POLICY=wspt"},
		{"classes", "DYN_ROUTER_POLICY_CONFIG=" + policies},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := startSelectors(
				t,
				weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true, unheard: true, more: c.env},
			)
			t.Logf("seed %d", begun)
			x.rng = rand.New(rand.NewPCG(uint64(begun), 11))
			x.same("POST", "/workers", object{"worker_id": 1, "endpoint": "e", "block_size": indexerBlock})
			x.add(1, "default", 0, 1)
			x.add(2, "default", 0, 1)
			for round := range 25 {
				x.waitInLine(round, c.name == "classes")
			}
			t.Log(x.counts)
		})
	}
}

// wentOn is the result of one selection that waited.
type wentOn struct {
	name string
	response
}

// waitInLine makes both workers busy, lets selections wait for them, and releases them one by one.
func (x *selectors) waitInLine(round int, classes bool) {
	x.t.Helper()
	x.class = ""
	fresh := func(n int) []int { // new tokens
		tokens := make([]int, n)
		for i := range tokens {
			tokens[i] = 1<<24 + round<<12 + x.rng.IntN(1<<12)
		}
		return tokens
	}
	last := map[uint64]string{} // by worker, the reservation that keeps it busy
	for id := range uint64(2) {
		last[id+1] = fmt.Sprintf("busy-%d-%d", round, id+1)
		x.same(
			"POST",
			"/select_and_reserve",
			object{
				"selection_id":  last[id+1],
				"token_ids":     fresh(30),
				"pinned_worker": object{"worker_id": id + 1, "dp_rank": 0},
			},
		)
	}
	urls := []string{x.Dynamo, x.Kvepp}
	over := []chan wentOn{make(chan wentOn, 100), make(chan wentOn, 100)}
	pending := func(want int) error { // nil: so many selections wait in both
		x.t.Helper()
		for _, url := range urls {
			loads := x.ask(url, "GET", "/loads", nil).body.([]any)[0].(object)
			if n := int(integer(loads["pending_count"])); n != want {
				return fmt.Errorf("%s: %d selections wait, want %d: %v", url, n, want, loads)
			}
		}
		return nil
	}
	next := func() (wentOn, wentOn) { // the next result, the same from both
		x.t.Helper()
		var went [2]wentOn
		for k := range went {
			select {
			case went[k] = <-over[k]:
			case <-time.After(time.Minute):
				x.t.Fatalf("round %d: no selection continues in %s", round, urls[k])
			}
		}
		theirs, ours := went[0], went[1]
		if theirs.name != ours.name {
			x.t.Fatalf("round %d: %s continues in Dynamo, %s in kvepp", round, theirs.name, ours.name)
		}
		x.equal("/select_and_reserve", theirs.name, theirs.response, ours.response)
		return theirs, ours
	}
	const anywhere = 0
	waiting, at := map[uint64]int{}, map[string]uint64{} // by the required worker
	total := 0
	for i := range 2 + x.rng.IntN(7) {
		name, id := fmt.Sprintf("wait-%d-%d", round, i), x.rng.Uint64N(3)
		body := object{
			"selection_id":    name,
			"token_ids":       fresh(21 + x.rng.IntN(20)),
			"strict_priority": x.rng.IntN(2),
			"priority_jump":   1000 * x.rng.IntN(5),
		}
		if classes {
			x.class = []string{"", "standard", "standard", "refused", "free", "unknown"}[x.rng.IntN(6)]
		}
		if x.class == "free" {
			id = 1 // it continues at once, and both must choose the same worker
		}
		if id != anywhere {
			body["pinned_worker"] = object{"worker_id": id, "dp_rank": 0}
		}
		class := x.class
		for k, url := range urls {
			go func() {
				a, err := send(x.t.Context(), url, "POST", "/select_and_reserve", class, body)
				if err != nil {
					a.body = err.Error()
				}
				over[k] <- wentOn{name, a}
			}()
		}
		// It waits, or its response comes at once. Both services count it as waiting for an instant before a class that
		// never waits lets it go on, so that only its response tells.
		responded := false
		eventually(x.t, func() error {
			if responded = len(over[0]) > 0; responded {
				return nil
			}
			if class == "free" || class == "refused" {
				return fmt.Errorf("%s (class %q) is not answered", name, class)
			}
			return pending(total + 1)
		})
		if responded {
			theirs, _ := next()
			x.counts[fmt.Sprintf("answered %d at once", theirs.status)]++
			if theirs.status == http.StatusOK {
				at[name] = id
				x.reserved = append(x.reserved, reserved{name, id})
			}
			continue
		}
		total++
		waiting[id]++
		at[name] = id
		x.same("POST", "/select_and_reserve", body) // the name is in use
	}
	x.class = ""
	x.counts["waited"] += total
	for total > 0 {
		id := 1 + x.rng.Uint64N(2)
		released := last[id]
		if released == "" {
			continue
		}
		for _, r := range x.reserved { // reservations of the class that never waits
			if r.worker == id {
				x.same("DELETE", r.path(), nil)
			}
		}
		x.reserved = slices.DeleteFunc(x.reserved, func(r reserved) bool { return r.worker == id })
		x.same("POST", "/reservations/"+released+"/prefill_complete", nil)
		if last[id] = ""; waiting[id]+waiting[anywhere] > 0 {
			theirs, _ := next() // this worker is cheaper: the other's last prompt is not prefilled
			if on, _ := chose(theirs.response); on != id {
				x.t.Fatalf("round %d: worker %d was released, but %s continues at %d", round, id, theirs.name, on)
			}
			last[id] = theirs.name
			waiting[at[theirs.name]]--
			total--
			eventually(x.t, func() error { return pending(total) })
		}
		x.same("DELETE", "/reservations/"+released, nil)
	}
	for _, url := range urls {
		for name := range at {
			x.ask(url, "DELETE", "/reservations/"+name, nil)
		}
		for id := range uint64(2) {
			x.ask(url, "DELETE", fmt.Sprintf("/reservations/busy-%d-%d", round, id+1), nil)
		}
	}
	x.reserved = nil
	x.same("GET", "/loads", nil)
}
