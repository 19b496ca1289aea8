package router

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// Token ids are injected into a body exactly if the frontend would compute the same ids.
func TestTokenDataGoesOn(t *testing.T) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{Engine: prompt.Dynamo})
	if err != nil {
		t.Fatal(err)
	}
	const chat = `{"model":"m","messages":[{"role":"user","content":"Sing, \u00fc muse!"}]%s}`
	const completion = `{"model":"m","prompt":%s}`
	workers := workers(1)
	h := newHouse(t, workers...)
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	h.cfg.Frontends, h.cfg.InjectTokens = true, true
	for _, c := range []struct {
		path, body string
		same       bool // the worker has kvepp's tokenizer files
		want       bool
	}{
		{"/v1/chat/completions", fmt.Sprintf(chat, ""), true, true},
		{"/v1/chat/completions", fmt.Sprintf(chat, `,"nvext":{"greed_sampling":true,"dp_rank":3}`), true, true},
		{"/v1/completions", fmt.Sprintf(completion, `"Sing!"`), true, true},
		{"/v1/chat/completions", fmt.Sprintf(chat, ""), false, false},
		{"/v1/chat/completions", fmt.Sprintf(chat, `,"nvext":{"token_data":[1,2]}`), true, false},
		{"/v1/chat/completions", fmt.Sprintf(chat, `,"nvext":{"annotations":["token_ids"]}`), true, false},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url",` +
			`"image_url":{"url":"http://x"}}]}]}`, true, false},
		{"/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"x"}]}`, true, false},
		{"/v1/completions", fmt.Sprintf(completion, `["Sing!"]`), true, false},
		{"/v1/completions", fmt.Sprintf(completion, `["Sing!","muse"]`), true, false},
		{"/v1/completions", fmt.Sprintf(completion, `[1,2,3]`), true, false},
		{"/v1/responses", `{"model":"m","input":"Sing!"}`, true, false},
	} {
		workers[0].SameTokenizer, workers[0].Model = c.same, ""
		h.pool.Update(workers)
		before := h.counted("kvepp_injected_token_data_total")
		route := h.route(&Request{Path: c.path, Body: []byte(c.body)})
		if n := h.counted("kvepp_injected_token_data_total") - before; (n == 1) != c.want {
			t.Errorf("%s: counted %v", c.body, n)
		}
		if route.Free(); !c.want {
			if strings.Contains(string(route.Body), "token_data") {
				t.Errorf("%s: goes on as %s", c.body, route.Body)
			}
			continue
		}
		request, err := body.ParseRequest(c.path, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := model.Tokenize(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		var sent struct {
			Nvext struct {
				TokenData []kvblock.Token `json:"token_data"`
				Greed     bool            `json:"greed_sampling"`
				Rank      *int            `json:"dp_rank"`
			}
		}
		if err := json.Unmarshal(route.Body, &sent); err != nil {
			t.Fatalf("%s: %v", route.Body, err)
		}
		if fmt.Sprint(sent.Nvext.TokenData) != fmt.Sprint(prompts[0].IDs) || len(prompts[0].IDs) == 0 ||
			sent.Nvext.Rank != nil ||
			sent.Nvext.Greed != strings.Contains(c.body, "greed") {
			t.Errorf("%s: goes on as %s, the ids are %v", c.body, route.Body, prompts[0].IDs)
		}
	}

	h.cfg.InjectTokens = false
	workers[0].SameTokenizer = true
	h.pool.Update(workers)
	if route := h.route(&Request{Path: "/v1/completions",
		Body: []byte(fmt.Sprintf(completion, `"Sing!"`))}); route.Body != nil {
		t.Errorf("without the flag it goes on as %s", route.Body)
	}
}

// With a prefill and a decode worker, both must have kvepp's tokenizer files.
func TestTokenDataOfTwoLegs(t *testing.T) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{Engine: prompt.Dynamo})
	if err != nil {
		t.Fatal(err)
	}
	endpoints := disaggregated(1, 1)
	h := newHouse(t, endpoints...)
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	h.cfg.Frontends, h.cfg.InjectTokens = true, true
	for same := range 4 {
		endpoints[0].SameTokenizer, endpoints[1].SameTokenizer = same&1 != 0, same&2 != 0
		h.pool.Update(endpoints)
		route := h.route(&Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"Sing!"}`)})
		if injected := route.Body != nil; injected != (same == 3) || route.Prefill == nil {
			t.Errorf("%b: %s, %+v", same, route.Body, route.Decision)
		}
		route.Free()
	}
}

// With TenantSalt a tenant has blocks of its own on stock vLLM: the salt is in the forwarded body and in the hashes.
func TestTenantIsTheCacheSaltOfStockVLLM(t *testing.T) {
	h := newHouse(t, workers(3)...)
	ids := tokens(0, 40)
	h.warm("w0", 0, ids, blocksOfFour)
	h.warm("w1", 0, ids, kvblock.HashOptions{BlockSize: 4, CacheNamespace: "t"})
	h.warm("w2", 0, ids, kvblock.HashOptions{BlockSize: 4, CacheNamespace: "s"})
	for _, c := range []struct {
		on               bool
		tenant, in, want string
		salt             string // in the forwarded body; empty: the body is unchanged
	}{
		{false, "t", "", "w0", ""},
		{false, "", `"cache_salt":"s"`, "w2", ""},
		{true, "", "", "w0", ""},
		{true, "t", "", "w1", "dynamo-cache-salt:t"},
		{true, "t", `"cache_salt":"s"`, "w1", "dynamo-cache-salt:t"},
		{true, "", `"cache_salt":"s"`, "w2", "dynamo-cache-salt:s"},
		{true, "", `"nvext":{"cache_salt":"s"}`, "w2", "dynamo-cache-salt:s"},
	} {
		h.cfg.TenantSalt = c.on
		req := completion("m", ids)
		if c.in != "" {
			req = with(req, c.in)
		}
		req.Hints = body.Hints{Tenant: c.tenant}
		route := h.route(req)
		if route.Name != c.want || route.PredictedCachedTokens != 40 {
			t.Errorf("%+v: %s with %d cached tokens", c, route.Name, route.PredictedCachedTokens)
		}
		var sent struct {
			Salt string `json:"cache_salt"`
		}
		if route.Body != nil {
			if err := json.Unmarshal(route.Body, &sent); err != nil {
				t.Fatal(err)
			}
		}
		if sent.Salt != c.salt {
			t.Errorf("%+v: goes on as %s", c, route.Body)
		}
		route.Free()
	}
}

// The forwarded body has a client's worker ids only if kvepp follows them. Before Dynamo's frontends it has no legacy
// fields.
func TestBodyGoesOnWithoutWhatIsNotFollowed(t *testing.T) {
	const pins, legacy = `"backend_instance_id":100,"dp_rank":0,"prefill_worker_id":7`,
		`"session_control":{"session_id":"s"}`
	for _, c := range []struct {
		pinning, ignore, frontends bool
		nvext, want                string // want is "" if the body is unchanged
	}{
		{false, false, false, pins, "{}"},
		{false, false, true, pins + `,"greed_sampling":true`, `{"greed_sampling":true}`},
		{true, true, true, pins, "{}"},
		{true, false, true, pins, ""},
		{false, false, false, legacy, ""},
		{false, false, true, legacy + "," + pins, "{}"},
		{false, false, true, `"cache_salt":"s"`, ""},
	} {
		h := newHouse(t, workers(1)...)
		h.cfg.Pinning, h.cfg.IgnoreHints, h.cfg.Frontends = c.pinning, c.ignore, c.frontends
		req := with(completion("m", tokens(0, 8)), `"nvext":{`+c.nvext+`}`)
		want := ""
		if c.want != "" {
			want = strings.Replace(string(req.Body), "{"+c.nvext+"}", c.want, 1)
		}
		if route := h.route(req); string(route.Body) != want {
			t.Errorf("%+v: %s, want %s", c, route.Body, want)
		}
	}
}

// A model whose tokenizer could not be loaded is routed by load, also with StrictModel.
func TestModelWithoutTokenizer(t *testing.T) {
	endpoints := workers(1)
	endpoints[0].Model = ""
	h := newHouse(t, endpoints...)
	h.cfg.Models, h.cfg.StrictModel = map[string]*prompt.Model{"m": nil}, true
	if route := h.route(&Request{Path: "/v1/completions",
		Body: []byte(`{"model":"m","prompt":"Sing!"}`)}); route.Reason != ReasonNoTokenizer {
		t.Errorf("%+v", route.Decision)
	}
	if _, err := h.Route(t.Context(), &Request{Path: "/v1/completions",
		Body: []byte(`{"model":"n","prompt":"Sing!"}`)}); err == nil {
		t.Error("an unknown model is served")
	}
}
