package router

import (
	"fmt"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/router/ladder"
)

// withLadder makes the house count where cached tokens are lost.
func (h *house) withLadder() *house {
	h.cfg.Ladder = &Ladder{Sums: new(ladder.Ladder), Seen: ladder.NewSeen(1 << 20)}
	return h
}

// climbed routes a request whose response reports cached tokens, and returns what it added to the ladder.
func (h *house) climbed(req *Request, cached int) (tokens [ladder.Rungs]uint64, lost map[string]uint64) {
	h.t.Helper()
	before := ladder.Total(h.cfg.Ladder.Sums.Sums())
	r := h.route(req)
	r.Free()
	r.Ended(Response{Status: "200", Complete: true, CachedTokens: cached})
	after := ladder.Total(h.cfg.Ladder.Sums.Sums())
	for i := range tokens {
		tokens[i] = after.Tokens[i] - before.Tokens[i]
	}
	lost = map[string]uint64{}
	for i := range after.Lost {
		if n := after.Lost[i] - before.Lost[i]; n > 0 {
			lost[ladder.Cause(i).String()] = n
		}
	}
	if n := after.Unpredicted - before.Unpredicted; n > 0 {
		lost["unpredicted"] = n
	}
	return tokens, lost
}

// TestLadder: each way in which cached tokens are lost, and its cause.
func TestLadder(t *testing.T) {
	type rungs = [ladder.Rungs]uint64
	prompt := tokens(0, 40)
	salted := func(salt string) *Request {
		req := completion("m", prompt)
		req.Body = []byte(strings.Replace(string(req.Body), "{", `{"nvext":{"cache_salt":"`+salt+`"},`, 1))
		return req
	}
	allow := func(h *house, worker int) *Request {
		req := completion("m", prompt)
		req.Allowed = func(address string) bool { return address == fmt.Sprintf("10.0.0.%d:8000", worker+1) }
		return req
	}
	again := func(h *house) { h.climbed(completion("m", prompt), 0) }
	for name, c := range map[string]struct {
		world  func(h *house) *Request
		cached int
		tokens rungs
		lost   map[string]uint64
	}{
		"a prompt that is new": {
			func(h *house) *Request { return completion("m", prompt) }, 0,
			rungs{40, 0, 0, 0, 0, 0}, map[string]uint64{"first_time": 40},
		},
		"all of it cached and delivered": {
			func(h *house) *Request { h.warm("w1", 0, prompt, blocksOfFour); return completion("m", prompt) }, 36,
			rungs{40, 40, 40, 40, 40, 36}, map[string]uint64{"index_wrong": 4},
		},
		"sent before, evicted since": {
			func(h *house) *Request {
				again(h)
				h.warm("w1", 0, prompt[:16], blocksOfFour)
				return completion("m", prompt)
			},
			16, rungs{40, 40, 16, 16, 16, 16}, map[string]uint64{"evicted": 24},
		},
		"sent with another salt": {
			func(h *house) *Request { h.climbed(salted("a"), 0); return salted("b") }, 0,
			rungs{40, 0, 0, 0, 0, 0}, map[string]uint64{"other_salt": 40},
		},
		"held by a worker that the proxy does not offer": {
			func(h *house) *Request { h.warm("w1", 0, prompt, blocksOfFour); return allow(h, 2) }, 0,
			rungs{40, 40, 40, 0, 0, 0}, map[string]uint64{"role": 40},
		},
		"held by another worker than the request names": {
			func(h *house) *Request {
				h.warm("w1", 0, prompt, blocksOfFour)
				h.cfg.Pinning = true
				req := completion("m", prompt)
				req.Body = []byte(strings.Replace(string(req.Body), "{", `{"nvext":{"backend_instance_id":100},`, 1))
				return req
			}, 0,
			rungs{40, 40, 40, 0, 0, 0}, map[string]uint64{"pinned": 40},
		},
		"given up because prompts wait there": {
			func(h *house) *Request {
				h.warm("w1", 0, prompt, blocksOfFour)
				h.busy("w1", tokens(5000, 400), false)
				return completion("m", prompt)
			}, 0,
			rungs{40, 40, 40, 40, 0, 0}, map[string]uint64{"waiting": 40},
		},
		"given up because of active requests there": {
			func(h *house) *Request {
				h.warm("w1", 0, prompt, blocksOfFour)
				h.busy("w1", tokens(5000, 400), true)
				return completion("m", prompt)
			}, 0,
			rungs{40, 40, 40, 40, 0, 0}, map[string]uint64{"load": 40},
		},
		"the response does not report it": {
			func(h *house) *Request { h.warm("w1", 0, prompt, blocksOfFour); return completion("m", prompt) }, -1,
			rungs{40, 40, 40, 40, 40, 0}, map[string]uint64{"not_confirmed": 40},
		},
		"more than the index knew": {
			func(h *house) *Request { return completion("m", prompt) }, 32,
			rungs{40, 0, 0, 0, 0, 32}, map[string]uint64{"first_time": 40, "unpredicted": 32},
		},
		"workers without events": {
			func(h *house) *Request {
				again(h)
				es := workers(3)
				for i := range es {
					es[i].KVEvents = ""
				}
				h.pool.Update(es)
				return completion("m", prompt)
			}, 0,
			rungs{40, 40, 0, 0, 0, 0}, map[string]uint64{"no_events": 40},
		},
		"a body that is not read": {
			func(h *house) *Request {
				return &Request{Path: "/v1/completions", BodylessReason: ReasonNoBody, BodyBytes: 400}
			},
			-1, rungs{100, 0, 0, 0, 0, 0}, map[string]uint64{"blocks_unknown": 100},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t, workers(3)...).withLadder()
			tokens, lost := h.climbed(c.world(h), c.cached)
			if tokens != c.tokens || fmt.Sprint(lost) != fmt.Sprint(c.lost) {
				t.Errorf("tokens %v, lost %v; want %v, %v", tokens, lost, c.tokens, c.lost)
			}
		})
	}
}

// busy books a long prompt on a worker; computed: its prefill is over.
func (h *house) busy(name string, prompt []kvblock.Token, computed bool) {
	h.t.Helper()
	s := h.pool.Acquire()
	defer s.Release()
	var address string
	for i := range s.Workers {
		if s.Workers[i].Name == name {
			address = s.Workers[i].Address
		}
	}
	req := completion("m", prompt)
	req.Allowed = func(a string) bool { return a == address }
	route := h.route(req)
	if computed {
		route.MarkPrefillCompleted()
	}
	h.t.Cleanup(route.Free)
}

// TestLadderOfAnotherModel: blocks of another model's workers are not in the fleet.
func TestLadderOfAnotherModel(t *testing.T) {
	es := workers(2)
	es[1].Model = "other"
	h := newHouse(t, es...).withLadder()
	h.warm("w1", 0, tokens(0, 40), blocksOfFour)
	if got, lost := h.climbed(completion("m", tokens(0, 40)), 0); got[ladder.Fleet] != 0 || lost["first_time"] != 40 {
		t.Errorf("tokens %v, lost %v", got, lost)
	}
	sums := h.cfg.Ladder.Sums.Sums()
	if len(sums) != 1 || sums[0].Model != "m" {
		t.Errorf("models: %+v", sums)
	}
}

// TestLadderOfPair: the prompt of a prefill and a decode worker is on the ladder of the prefill worker.
func TestLadderOfPair(t *testing.T) {
	es := workers(3)
	es[0].Role, es[1].Role, es[2].Role = pool.Prefill, pool.Prefill, pool.Decode
	h := newHouse(t, es...).withLadder()
	h.warm("w1", 0, tokens(0, 24), blocksOfFour)
	got, lost := h.climbed(completion("m", tokens(0, 40)), 24)
	if got != [ladder.Rungs]uint64{40, 24, 24, 24, 24, 24} || lost["first_time"] != 16 {
		t.Errorf("tokens %v, lost %v", got, lost)
	}
}

// TestLadderOfDynamosNames: Dynamo's counters of cached tokens are the ladder's rungs, for each model, with aggregated
// workers and pairs, for requests whose best candidate was not chosen, whose blocks no worker has, whose response
// reports too much, fails or reports nothing, and whose token ids are not known.
func TestLadderOfDynamosNames(t *testing.T) {
	pairs := workers(6)
	pairs[3].Role, pairs[4].Role, pairs[5].Role = pool.Prefill, pool.Prefill, pool.Decode
	for i := range pairs[3:] {
		pairs[3+i].Model = "pair"
	}
	sums := &Ladder{Sums: new(ladder.Ladder), Seen: ladder.NewSeen(1 << 20)}
	models := map[string]*prompt.Model{"m": nil, "pair": nil}
	h, sample := exportingAs(t, Config{Models: models, Ladder: sums}, pairs...)
	h.cfg.Ladder = sums
	h.warm("w1", 0, tokens(0, 40), blocksOfFour)
	h.warm("w2", 0, tokens(0, 24), blocksOfFour)
	h.warm("w4", 0, tokens(0, 32), blocksOfFour)
	end := func(req *Request, a Response) {
		r := h.route(req)
		r.Free()
		r.Ended(a)
	}
	ok := func(cached int) Response { return Response{Status: "200", Complete: true, CachedTokens: cached} }
	end(completion("m", tokens(0, 44)), ok(36))
	end(completion("pair", tokens(0, 44)), ok(28))
	end(completion("m", tokens(100, 44)), ok(0))
	end(completion("m", tokens(0, 44)), ok(400))
	end(completion("m", tokens(0, 44)), Response{Status: "500", CachedTokens: -1})
	end(completion("m", tokens(0, 44)), ok(-1))
	end(&Request{Body: []byte(`{"model":"pair","prompt":"text, which no tokenizer reads"}`), Path: "/v1/completions"},
		ok(3))
	h.busy("w1", tokens(1000, 40_000), false)
	end(completion("m", tokens(0, 44)), ok(20)) // w2, because w1 has too much to compute
	all := sums.Sums.Sums()
	if len(all) != 2 {
		t.Fatalf("ladders %+v, want those of m and pair", all)
	}
	for _, s := range all {
		if s.Tokens[ladder.Eligible] == 0 || s.Tokens[ladder.Delivered] == 0 {
			t.Errorf("%s has no tokens to compare: %+v", s.Model, s)
		}
		if s.Model == "m" && s.Tokens[ladder.Chosen] >= s.Tokens[ladder.Eligible] {
			t.Errorf("the best candidate was always chosen: %+v", s)
		}
		for rung, name := range map[ladder.Rung]string{
			ladder.Eligible:  "kv_best_eligible_cached_prefix_tokens_total",
			ladder.Chosen:    "kv_selected_cached_prefix_tokens_total",
			ladder.Delivered: "kv_worker_reused_tokens_total",
		} {
			got := 0.0
			for _, phase := range []string{"aggregated", "prefill", "decode"} {
				got += sample("dynamo_component_router_"+name, "model="+s.Model, "phase="+phase)
			}
			if got != float64(s.Tokens[rung]) {
				t.Errorf("%s: %s is %v, and the rung %v %d", s.Model, name, got, rung, s.Tokens[rung])
			}
		}
	}
}
