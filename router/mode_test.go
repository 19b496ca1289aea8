package router

import (
	"testing"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
)

// Modes other than kv tokenize nothing, ask no index, and book all the same.
func TestOtherModes(t *testing.T) {
	for mode := scoring.RoundRobin; mode <= scoring.DeviceAwareWeighted; mode++ {
		h := newHouse(t, workers(3)...)
		h.cfg.Scoring.Mode = mode
		h.warm("w1", 0, tokens(0, 40), kvblock.HashOptions{BlockSize: 4})
		req := completion("m", tokens(0, 40))
		used := map[string]int{}
		for range 9 {
			r := h.route(req)
			used[r.Name]++
			if r.Reason != ReasonMode || r.PredictedCachedTokens != 0 || r.PromptTokens != len(req.Body)/bytesPerToken {
				t.Fatalf("%v: %+v", mode, r.Decision)
			}
		}
		if even := mode == scoring.RoundRobin || mode == scoring.LeastLoaded; even && (used["w0"] != 3 || used["w1"] != 3) {
			t.Errorf("%v: %v", mode, used)
		}
		if n := h.book.Len(); n != 9 {
			t.Errorf("%v: %d requests are booked, want 9", mode, n)
		}
	}
}

// What something else wants to know of prompts is known in every mode.
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
