package router

import (
	"context"
	"errors"
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/scoring"
)

// Modes other than kv do not tokenize or use the index, but they book requests.
func TestOtherModes(t *testing.T) {
	for mode := scoring.RoundRobin; mode <= scoring.DeviceAwareWeighted; mode++ {
		h := newHouse(t, workers(3)...)
		h.cfg.Scoring.Mode, h.cfg.Pinning = mode, true
		h.warm("w1", 0, tokens(0, 40), kvblock.HashOptions{BlockSize: 4})
		req := completion("m", tokens(0, 40))
		if mode == scoring.Direct {
			req = with(req, `"nvext":{"backend_instance_id":101}`)
		}
		used := map[string]int{}
		for range 9 {
			r := h.route(req)
			used[r.Name]++
			if r.Reason != ReasonMode || r.PredictedCachedTokens != 0 ||
				r.PromptTokens != len(req.Body)/bytesPerToken {
				t.Fatalf("%v: %+v", mode, r.Decision)
			}
		}
		if even := mode == scoring.RoundRobin || mode == scoring.LeastLoaded; even &&
			(used["w0"] != 3 || used["w1"] != 3) {
			t.Errorf("%v: %v", mode, used)
		}
		if mode == scoring.Direct && used["w1"] != 9 {
			t.Errorf("%v: %v", mode, used)
		}
		if n := h.book.Len(); n != 9 {
			t.Errorf("%v: %d requests are booked, want 9", mode, n)
		}
	}
}

// If another feature needs token counts, prompts are tokenized in every mode.
func TestCountTokensInOtherModes(t *testing.T) {
	h := newHouse(t, workers(3)...)
	h.cfg.Scoring.Mode, h.cfg.CountTokens = scoring.LeastLoaded, true
	h.warm("w1", 0, tokens(0, 40), kvblock.HashOptions{BlockSize: 4})
	r := h.route(completion("m", tokens(0, 40)))
	if r.Reason != ReasonMode || r.PromptTokens != 40 || r.PredictedCachedTokens != 0 {
		t.Errorf("%+v", r.Decision)
	}
	if load := h.book.Load(r.computes.Worker); load.ActiveBlocks != 10 || load.PrefillTokens != 40 {
		t.Errorf("load %+v", load)
	}
}

func TestDeviceTypeIsHeeded(t *testing.T) {
	endpoints := workers(2)
	endpoints[0].DeviceType = pool.CPU
	h := newHouse(t, endpoints...)
	h.cfg.Scoring.Mode = scoring.DeviceAwareWeighted
	for range 8 {
		if r := h.route(completion("m", tokens(0, 4))); r.Name != "w1" {
			t.Fatalf("with a ratio of 8 the CPU has one of the first 8 requests")
		}
	}
	if r := h.route(completion("m", tokens(0, 4))); r.Name != "w0" {
		t.Errorf("the ninth went to %s, want the CPU", r.Name)
	}
}

// In direct mode a request must name its worker, or it gets an error that says so. The least loaded rank of the worker
// serves it. Requests to other paths go to any worker.
func TestDirectMode(t *testing.T) {
	endpoints := workers(2)
	endpoints[1].DataParallelSize = 3
	h := newHouse(t, endpoints...)
	h.cfg.Scoring.Mode, h.cfg.Pinning = scoring.Direct, true
	req := completion("m", tokens(0, 4))
	var refused *body.Error
	if _, err := h.Route(context.Background(), req); !errors.As(err, &refused) ||
		refused.Param != "nvext.backend_instance_id" {
		t.Errorf("a request that names no worker: %v", err)
	}
	ranks := map[uint32]int{}
	for range 6 {
		ranks[h.route(with(req, `"nvext":{"backend_instance_id":101}`)).Rank]++
	}
	if ranks[0] != 2 || ranks[1] != 2 || ranks[2] != 2 {
		t.Errorf("requests by rank: %v", ranks)
	}
	if r := h.route(with(req, `"nvext":{"decode_worker_id":101,"dp_rank":2}`)); r.Name != "w1" || r.Rank != 2 {
		t.Errorf("%s/%d", r.Name, r.Rank)
	}
	if r := h.route(&Request{Path: "/v1/models", BodylessReason: ReasonNoBody}); r.Name != "w0" {
		t.Errorf("a request without a body went to %s", r.Name)
	}
}
