package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/scoring"
)

// keeping returns a house whose router keeps n decisions, and its log.
func keeping(t *testing.T, n int, endpoints ...pool.Endpoint) (*house, *bytes.Buffer) {
	h := newHouse(t, endpoints...)
	var log bytes.Buffer
	h.Router = New(Config{Scoring: scoring.DefaultConfig(), Keep: n}, h.pool, h.index, h.book, metrics.New(),
		slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	return h, &log
}

func TestRecords(t *testing.T) {
	h, _ := keeping(t, 3, workers(2)...)
	h.warm("w1", 0, tokens(0, 8), blocksOfFour)
	ids := func(n int, id string) string {
		var all []string
		for _, r := range h.Records(n, Query{RequestID: id}) {
			all = append(all, r.RequestID)
		}
		return strings.Join(all, " ")
	}
	if got := ids(10, ""); got != "" {
		t.Errorf("before any request: %q", got)
	}
	for i := range 5 {
		req := completion("m", tokens(0, 10))
		req.ID, req.Path = fmt.Sprint("r", i), req.Path+"?secret=1"
		defer h.route(req).Free()
	}
	if got := ids(10, ""); got != "r4 r3 r2" {
		t.Errorf("kept %q, want the latest three, newest first", got)
	}
	if got := ids(1, ""); got != "r4" {
		t.Errorf("one of them: %q", got)
	}
	if got := ids(10, "r3"); got != "r3" {
		t.Errorf("by request: %q", got)
	}
}

func TestRecordHasAllTerms(t *testing.T) {
	h, log := keeping(t, 3, workers(2)...)
	h.warm("w1", 0, tokens(0, 8), blocksOfFour)
	req := completion("m", tokens(0, 10))
	req.ID, req.Path = "first", "/v1/completions?secret=1"
	defer h.route(req).Free()
	r := h.Records(1, Query{})[0]
	if r.Path != "/v1/completions" || r.Model != "m" || r.Reason != ReasonKV || r.Name != "w1" || r.Error != "" ||
		r.Time.IsZero() {
		t.Errorf("record: %+v", r)
	}
	want := []Cost{
		{"w0", 0, 4.5, scoring.Terms{BlockSize: 4, ISLTokens: 10, DecodeBlocks: 2, UnitTokens: 4}, 0},
		{"w1", 0, 2.5, scoring.Terms{BlockSize: 4, ISLTokens: 10, DeviceBlocks: 2, DecodeBlocks: 2, UnitTokens: 4}, 2},
	}
	if fmt.Sprint(r.Costs) != fmt.Sprint(want) || r.Chosen != 1 || r.Ties() != 1 {
		t.Errorf("costs %+v, chosen %d, %d ties, want %+v, 1, 1", r.Costs, r.Chosen, r.Ties(), want)
	}
	line := `costs.w1/0="2.50 (block_size 4, device_blocks 2, host_blocks 0, disk_blocks 0, shared_blocks 0, ` +
		`credit_blocks 2.00, waiting_prefill_tokens 0, decode_blocks 2.00, active_requests 0, cost_multiplier 1)"`
	if !strings.Contains(log.String(), line) {
		t.Errorf("the log has no %s:\n%s", line, log)
	}
}

// In a JSON log a candidate's cost is an object, with any numbers.
func TestCostsInJSONLog(t *testing.T) {
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("m", logged("costs", []Cost{
		{
			"w0",
			1,
			4.5,
			scoring.Terms{
				BlockSize:      4,
				DeviceBlocks:   2,
				PrefillTokens:  7,
				DecodeBlocks:   2.25,
				ActiveRequests: 3,
				CostMultiplier: 2,
			},
			1.5,
		},
		{"w1", 0, math.Inf(1), scoring.Terms{BlockSize: 8}, math.NaN()},
	}))
	var line struct {
		Costs map[string]map[string]any `json:"costs"`
	}
	if err := json.Unmarshal(log.Bytes(), &line); err != nil {
		t.Fatalf("%v in %s", err, &log)
	}
	want := map[string]map[string]any{
		"w0/1": {
			"cost":                   4.5,
			"block_size":             4.0,
			"device_blocks":          2.0,
			"host_blocks":            0.0,
			"disk_blocks":            0.0,
			"shared_blocks":          0.0,
			"credit_blocks":          1.5,
			"waiting_prefill_tokens": 7.0,
			"decode_blocks":          2.25,
			"active_requests":        3.0,
			"cost_multiplier":        2.0,
		},
		"w1/0": {
			"cost":                   nil,
			"block_size":             8.0,
			"device_blocks":          0.0,
			"host_blocks":            0.0,
			"disk_blocks":            0.0,
			"shared_blocks":          0.0,
			"credit_blocks":          nil,
			"waiting_prefill_tokens": 0.0,
			"decode_blocks":          0.0,
			"active_requests":        0.0,
			"cost_multiplier":        1.0,
		},
	}
	if !reflect.DeepEqual(line.Costs, want) {
		t.Errorf("costs %v, want %v", line.Costs, want)
	}
}

// Texts that a client chooses are cut to a bound. The record has nothing of the prompt.
func TestRecordsAreBounded(t *testing.T) {
	h, _ := keeping(t, 2, workers(1)...)
	long := strings.Repeat("x", 100_000)
	req := &Request{ID: long, Path: "/v1/completions", Body: []byte(`{"model":"` + long + `","prompt":"a secret"}`)}
	if _, err := h.Route(context.Background(), req); !errors.Is(err, ErrUnknownModel) {
		t.Fatal(err)
	}
	r := h.Records(1, Query{RequestID: long})
	if len(r) != 1 || len(r[0].RequestID) > maxText || len(r[0].Model) > maxText || len(r[0].Error) > maxText {
		t.Fatalf("%d records, or longer than %d bytes", len(r), maxText)
	}
	if text := fmt.Sprintf("%+v", r[0]); strings.Contains(text, "secret") {
		t.Errorf("the prompt is in %s", text)
	}
	if !strings.HasPrefix(r[0].Error, ErrUnknownModel.Error()) || r[0].Ties() != 0 {
		t.Errorf("record: %+v", r[0])
	}
}

func TestTies(t *testing.T) {
	h, _ := keeping(t, 1, workers(3)...)
	h.warm("w1", 0, tokens(0, 4), blocksOfFour)
	h.warm("w2", 0, tokens(0, 4), blocksOfFour)
	h.route(completion("m", tokens(0, 10))).Free()
	if r := h.Records(1, Query{})[0]; r.Ties() != 2 || r.Costs[r.Chosen].Cost != 3.5 {
		t.Errorf("%d ties, want 2: %+v", r.Ties(), r)
	}
}

// Without a consumer of decisions the router does not list candidates.
func TestNothingIsExplainedToNobody(t *testing.T) {
	h := newHouse(t, workers(2)...)
	h.cfg.Explain = false
	r := h.route(completion("m", tokens(0, 10)))
	defer r.Free()
	if r.Costs != nil || h.Records(1, Query{}) != nil {
		t.Errorf("listed %+v, kept %+v", r.Costs, h.Records(1, Query{}))
	}
}
