package router

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/scoring"
)

// withFields returns a request with more fields in its body.
func withFields(req *Request, fields string) *Request {
	if fields != "" {
		req.Body = []byte(strings.TrimSuffix(string(req.Body), "}") + "," + fields + "}")
	}
	return req
}

// TestCacheNotRead: a request for which the engine reads no cache is predicted no cached tokens, pays for its whole
// prompt, and spreads by load. It still fills the cache.
func TestCacheNotRead(t *testing.T) {
	const n = 512
	for _, policy := range []scoring.Policy{scoring.Dynamo, scoring.Time} {
		for _, c := range []struct {
			engine prompt.Engine
			fields string
			read   bool
		}{
			{"", ``, true},
			{"", `"logprobs":1`, true},
			{"", `"prompt_logprobs":null`, true},
			{"", `"echo":true`, true},
			{"", `"prompt_logprobs":1`, false},
			{prompt.VLLM, `"prompt_logprobs":0`, false},
			{prompt.VLLM, `"echo":true,"logprobs":1`, false},
			{prompt.SGLang, ``, true},
			{prompt.SGLang, `"prompt_logprobs":1`, true},
			{prompt.SGLang, `"echo":true,"logprobs":1`, false},
			{prompt.Dynamo, `"prompt_logprobs":1`, false},
			{prompt.TRTLLM, `"prompt_logprobs":1`, true},
		} {
			name := fmt.Sprintf("%v, %q, %s", policy, c.engine, c.fields)
			h := newHouse(t, workers(2)...)
			h.cfg.Engine, h.cfg.Scoring.Policy = c.engine, policy
			h.cfg.Predict.TTL = time.Hour
			h.warm("w0", 0, tokens(0, n), blocksOfFour)
			input := func(from int) *Request { return withFields(completion("m", tokens(from, n)), c.fields) }
			if c.read {
				if r := h.route(input(0)); r.PredictedCachedTokens != n || r.Reason != ReasonKV {
					t.Errorf("%s: %d cached tokens, %s", name, r.PredictedCachedTokens, r.Reason)
				}
				continue
			}
			served := map[string]int{}
			var routes []*Route
			for range 16 {
				r := h.route(input(0))
				served[r.Name]++
				routes = append(routes, r)
				if r.PredictedCachedTokens != 0 || r.Reason != ReasonCacheNotRead || r.PromptTokens != n {
					t.Errorf("%s: %d of %d tokens cached, %s", name, r.PredictedCachedTokens, r.PromptTokens, r.Reason)
				}
			}
			for w, load := range h.book.Loads(nil) {
				if load.PrefillTokens != 8*n || load.ActiveBlocks != 8*n/4 {
					t.Errorf("%s: worker %d has a load of %+v", name, w, load)
				}
			}
			if served["w0"] != 8 || served["w1"] != 8 {
				t.Errorf("%s: 16 at once went to %v", name, served)
			}
			h.end(routes)
			// The blocks of one that was computed are there for the next plain request.
			other := h.route(input(n))
			h.end([]*Route{other})
			if r := h.route(completion("m", tokens(n, n))); r.Name != other.Name || r.PredictedCachedTokens != n {
				t.Errorf("%s: then %d cached tokens on %s", name, r.PredictedCachedTokens, r.Name)
			}
		}
	}
}

// TestSGLangNamesOfCaches: SGLang's adapters, salts and extra keys, each on the blocks of all.
func TestSGLangNamesOfCaches(t *testing.T) {
	a, b := tokens(0, 64), tokens(1000, 64)
	for _, c := range []struct {
		blocks kvblock.HashOptions // that w0 holds, of both prompts
		model  string
		fields string
		two    bool // prompts
		want   int  // cached tokens
		reason Reason
	}{
		{kvblock.HashOptions{}, "m", ``, false, 64, ReasonKV},
		{kvblock.HashOptions{}, "m", ``, true, 128, ReasonKV},
		{kvblock.HashOptions{}, "m", `"cache_salt":"tenant-a"`, false, 0, ReasonKV},
		{kvblock.HashOptions{}, "m", `"cache_salt":["tenant-a"]`, false, 0, ReasonKV},
		{kvblock.HashOptions{}, "m", `"cache_salt":["x","y"]`, true, 0, ReasonKV},
		{kvblock.HashOptions{}, "m", `"cache_salt":["x",""]`, true, 64, ReasonKV},
		{kvblock.HashOptions{CacheNamespace: "x"}, "m", `"cache_salt":["x","y"]`, true, 64, ReasonKV},
		{kvblock.HashOptions{CacheNamespace: "x"}, "m", `"cache_salt":"x"`, true, 128, ReasonKV},
		{kvblock.HashOptions{}, "m", `"extra_key":"b"`, false, 0, ReasonApproximate},
		{kvblock.HashOptions{}, "m", `"extra_key":["b"]`, false, 0, ReasonApproximate},
		{kvblock.HashOptions{}, "m", `"extra_key":["","b"]`, true, 64, ReasonApproximate},
		{kvblock.HashOptions{CacheNamespace: "x"}, "m", `"extra_key":"b","cache_salt":"x"`, false, 0,
			ReasonApproximate},
		{kvblock.HashOptions{CacheNamespace: "b"}, "m", `"extra_key":"b"`, false, 0, ReasonApproximate},
		{kvblock.HashOptions{}, "m", `"extra_key":"","cache_salt":""`, false, 64, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, "m:sql", ``, false, 64, ReasonKV},
		{kvblock.HashOptions{}, "m:sql", ``, false, 0, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, "m", `"lora_path":"sql"`, false, 64, ReasonKV},
		{kvblock.HashOptions{}, "m", `"lora_path":"sql"`, false, 0, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, "m", ``, false, 0, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, "m:sql", `"lora_path":"law"`, false, 64, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, "m:", `"lora_path":"sql"`, false, 64, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, " m : sql ", ``, false, 64, ReasonKV},
		{kvblock.HashOptions{}, "m", `"lora_path":null`, false, 64, ReasonKV},
		{kvblock.HashOptions{}, "m", `"lora_path":""`, false, 64, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql"}, "m", `"lora_path":["sql",null]`, true, 64, ReasonKV},
		{kvblock.HashOptions{}, "m", `"lora_path":[null,"sql"]`, true, 64, ReasonKV},
		{kvblock.HashOptions{LoRAName: "sql", CacheNamespace: "x"}, "m:sql", `"cache_salt":"x"`, false, 64,
			ReasonKV},
		{kvblock.HashOptions{}, "sql", ``, false, 64, ReasonKV}, // SGLang serves it with the base model
		{kvblock.HashOptions{}, "named", ``, false, 64, ReasonKV},
	} {
		h := newHouse(t, workers(2)...)
		h.cfg.Engine, h.cfg.StrictModel = prompt.SGLang, true
		h.cfg.Adapters = NewAdapters(map[string]string{"named": "m"})
		h.cfg.Adapters.Seen(0, "sql", func() string { return "m" })
		c.blocks.BlockSize = 4
		h.warm("w0", 0, a, c.blocks)
		h.warm("w0", 0, b, c.blocks)
		req := completion(c.model, a)
		if c.two {
			req = completion(c.model, a, b)
		} else if strings.Contains(c.fields, "[") { // a list with one prompt
			req.Body = []byte(strings.NewReplacer("[", "[[", "]", "]]").Replace(string(req.Body)))
		}
		req = withFields(req, c.fields)
		r, err := h.Route(t.Context(), req)
		if err != nil {
			t.Errorf("%s: %v", req.Body, err)
			continue
		}
		cached := 0 // of w0, which need not be the chosen one
		for i := range r.Costs {
			cached = max(cached, r.Costs[i].Terms.DeviceBlocks*4)
		}
		if cached != c.want || r.Reason != c.reason {
			t.Errorf("%.40s %s on blocks of %+v: %d cached tokens, %s; want %d, %s", c.model, c.fields, c.blocks,
				cached, r.Reason, c.want, c.reason)
		}
		r.Free()
	}
}

// TestExtraKeysArePredicted: the blocks of a namespace that events do not name are known by earlier decisions alone.
func TestExtraKeysArePredicted(t *testing.T) {
	h := newHouse(t, workers(4)...)
	h.cfg.Engine, h.cfg.Predict.TTL = prompt.SGLang, time.Hour
	cached := map[string]int{}
	for range 2 {
		for _, fields := range []string{`"extra_key":"a"`, `"extra_key":"b"`, `"extra_key":"a","cache_salt":"s"`} {
			r := h.route(withFields(completion("m", tokens(0, 64)), fields))
			h.end([]*Route{r})
			cached[fields] += r.PredictedCachedTokens
			if r.Reason != ReasonApproximate {
				t.Errorf("%s: %s", fields, r.Reason)
			}
		}
	}
	for fields, n := range cached {
		if n != 64 { // none of the first, all of the second
			t.Errorf("%s: %d cached tokens, want 64", fields, n)
		}
	}
	if r := h.route(completion("m", tokens(0, 64))); r.PredictedCachedTokens != 0 || r.Reason != ReasonKV {
		t.Errorf("without an extra key: %d cached tokens, %s", r.PredictedCachedTokens, r.Reason)
	}
}

// TestSGLangModels: a request for an adapter goes to the endpoints of its model, and takes their tokenizer.
func TestSGLangModels(t *testing.T) {
	es := workers(3)
	es[1].Model, es[2].Model = "org:tiny", ""
	for _, c := range []struct {
		engine      prompt.Engine
		strict      bool
		model, want string
		adapter     string
	}{
		{prompt.SGLang, false, "m", "w0 w2", ""},
		{prompt.SGLang, false, "m:other", "w0 w2", "other"},
		{prompt.SGLang, true, "m:other", "w0", "other"},
		{prompt.SGLang, true, "org:tiny", "w1", ""},
		{prompt.SGLang, true, "org:tiny:other", "w1", "other"},
		{prompt.SGLang, true, "org:tiny:a:b", "w1", "a:b"},
		{prompt.SGLang, false, "org:tinyother", "w2", "tinyother"},
		{prompt.SGLang, true, "flag:a", "w2", ""},
		{prompt.SGLang, false, "flag:a", "w2", ""},
		{prompt.SGLang, false, "flag:a:b", "w2", "b"},
		{prompt.SGLang, true, "m:a:b", "w0", "a:b"},
		{prompt.SGLang, true, "unserved:other", "", ""},
		{prompt.SGLang, false, "unserved:other", "w2", "other"},
		{prompt.SGLang, false, ":other", "w0 w1 w2", "other"},
		{prompt.VLLM, true, "m:other", "", ""},
		{prompt.Dynamo, true, "m:other", "", ""},
	} {
		h := newHouse(t, es...)
		h.cfg.Engine, h.cfg.StrictModel = c.engine, c.strict
		h.cfg.Models, h.cfg.Keep = map[string]*prompt.Model{"flag:a": nil}, 1
		h.records.ring = make([]*Record, 1)
		r, err := h.Route(t.Context(), completion(c.model, tokens(0, 16)))
		if lora := h.Records(1, Query{})[0].LoRA; err == nil && lora != c.adapter {
			t.Errorf("%s, %q: the adapter is %q, want %q", c.engine, c.model, lora, c.adapter)
		}
		var got []string
		if err == nil {
			for _, candidate := range r.Costs {
				got = append(got, candidate.Name)
			}
		}
		if strings.Join(got, " ") != c.want || err != nil && !errors.Is(err, ErrUnknownModel) {
			t.Errorf("%s, strict %v, %q: %v, %v; want %q", c.engine, c.strict, c.model, got, err, c.want)
		}
	}
}

// TestSGLangAdaptersAreNoLabels: adapters that only clients name do not become labels of metrics.
func TestSGLangAdaptersAreNoLabels(t *testing.T) {
	h := newHouse(t, workers(1)...)
	h.cfg.Engine, h.cfg.Adapters = prompt.SGLang, NewAdapters(map[string]string{"sql": "m"})
	for model, want := range map[string]string{"m:sql": "sql", "m:client-1": "m", "m:client-2": "m"} {
		r := h.route(completion(model, tokens(0, 16)))
		if r.observed.target != want {
			t.Errorf("%s counts as %q, want %q", model, r.observed.target, want)
		}
	}
}

// TestOtherEnginesNameCachesAsBefore: SGLang's fields mean nothing to vLLM.
func TestOtherEnginesNameCachesAsBefore(t *testing.T) {
	h := newHouse(t, workers(1)...)
	h.warm("w0", 0, tokens(0, 64), blocksOfFour)
	for _, fields := range []string{`"extra_key":"b"`, `"lora_path":"sql"`} {
		if r := h.route(withFields(completion("m", tokens(0, 64)), fields)); r.PredictedCachedTokens != 64 {
			t.Errorf("%s: %d cached tokens", fields, r.PredictedCachedTokens)
		}
	}
}
