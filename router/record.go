package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"kvepp/kvblock"
	"kvepp/scoring"
)

// Cost is the cost of one candidate; lower is better.
type Cost struct {
	Name string
	Rank uint32
	Cost float64
	// Terms are the terms of the cost at the time of the choice. Credit is what cached blocks took off. Blocks are of
	// the worker's size.
	Terms  scoring.Terms
	Credit float64
}

// String returns the cost and its terms on one line.
func (c *Cost) String() string {
	t := &c.Terms
	text := fmt.Sprintf(
		"%.2f (block_size %d, device_blocks %d, host_blocks %d, disk_blocks %d, shared_blocks %d, credit_blocks "+
			"%.2f, waiting_prefill_tokens %d, decode_blocks %.2f, active_requests %d, cost_multiplier %v)",
		c.Cost,
		t.BlockSize,
		t.DeviceBlocks,
		t.HostBlocks,
		t.DiskBlocks,
		t.SharedBlocks,
		c.Credit,
		t.PrefillTokens,
		t.DecodeBlocks,
		t.ActiveRequests,
		multiplier(t),
	)
	if p := PaceOf(t); p != nil {
		text = fmt.Sprintf("%s, decoding_requests %d, "+
			"prefill_ms_per_1000_tokens %.3g, prefill_step_ms %.3g, gap_us_per_1000_held_tokens %.3g, "+
			"slower_ms_per_token %.3g, answer_tokens %.0f, answer_seconds %.3g)",
			text[:len(text)-1], p.DecodingRequests, p.PrefillMS, p.StepMS, p.GapUS,
			p.SlowerMS, p.OutputTokens, p.OutputSeconds)
	}
	return text
}

// Pace is what the policy time knows about a candidate's speed, in the units of /debug/decisions and logs.
type Pace struct {
	DecodingRequests int     `json:"decoding_requests"`
	PrefillMS        float64 `json:"prefill_ms_per_1000_tokens"`
	StepMS           float64 `json:"prefill_step_ms"`             // of a prefill, beside the time for its tokens
	GapUS            float64 `json:"gap_us_per_1000_held_tokens"` // between two tokens of a response
	SlowerMS         float64 `json:"slower_ms_per_token"`         // of a response, more than on the average worker
	OutputTokens     float64 `json:"answer_tokens"`               // mean
	OutputSeconds    float64 `json:"answer_seconds"`              // mean, from the first token
}

// PaceOf returns what the policy time knew; nil for the policy dynamo.
func PaceOf(t *scoring.Terms) *Pace {
	x := &t.Time
	if *x == (scoring.TimeTerms{}) {
		return nil
	}
	return &Pace{x.DecodingRequests, 1e6 * x.SecondsPerToken,
		1e3 * x.StepSeconds, 1e9 * x.GapPerToken, 1e3 * x.SlowerPerToken, x.OutputTokens, x.LifeSeconds}
}

func multiplier(t *scoring.Terms) float64 {
	if t.CostMultiplier == 0 {
		return 1
	}
	return t.CostMultiplier
}

// Record is a decision kept for people. It holds nothing of the prompt. Text that a client chose is cut to maxText.
type Record struct {
	Time      time.Time
	RequestID string
	Path      string // without the query
	Model     string // after rewriting; empty: the body was not read
	LoRA      string
	TraceID   string   // of the request's trace; empty: it is not exported
	Pinned    bool     // the request named its worker
	Error     string   // why no worker was chosen; of the decision only Reason, Waited and Cordoned may then be set
	ServedBy  ServedBy // the zero value: not known yet, or the proxy does not report it
	Outcome   *Outcome // nil: the request still runs, or it was refused
	Decision

	slot   int    // in the ring
	number uint64 // of all records
	// chain are the hashes of the prompt's first blocks, at most maxChain, and session is a hash of the session's name;
	// 0: it has none. See Router.Prefixes.
	chain     []kvblock.SequenceHash
	session   uint64
	elsewhere bool // another worker than that of the decision answered
}

// Ties returns how many candidates had the lowest cost. One of them was drawn at random.
func (r *Record) Ties() int {
	least, ties := math.Inf(1), 0
	for i := range r.Costs {
		switch c := r.Costs[i].Cost; {
		case c < least:
			least, ties = c, 1
		case c == least:
			ties++
		}
	}
	return ties
}

// explains reports whether decisions list the terms of their costs.
func (r *Router) explains() bool {
	return r.cfg.Explain || r.cfg.Keep > 0 || r.log.Enabled(context.Background(), slog.LevelDebug)
}

// record keeps and logs a decision, as far as the configuration asks for it.
func (r *Router) record(
	ctx context.Context,
	sc *scratch,
	req *Request,
	p *prepared,
	route *Route,
	waited time.Duration,
	err error,
) {
	if r.cfg.Keep > 0 {
		record := recordOf(&sc.gathered, req, p, route, waited, err)
		record.keepChain(&sc.matched, p, route)
		if r.records.add(record); err == nil {
			r.records.keep(route, record)
		} else {
			r.records.publish(record)
		}
	}
	if err != nil || !r.log.Enabled(ctx, slog.LevelDebug) {
		return // the caller that answers the request logs a refusal
	}
	log := r.log
	if x := route.Prefill; x != nil {
		log = log.With("prefill_worker", x.Name, "prefill_rank", x.Rank, logged("prefill_costs", x.Costs))
	}
	log.Debug(
		"routed",
		"request_id",
		req.ID,
		"path",
		req.Path,
		"model",
		p.model,
		"lora",
		p.lora,
		"worker",
		route.Name,
		"rank",
		route.Rank,
		"address",
		route.Address,
		"reason",
		route.Reason,
		"prompt_tokens",
		route.PromptTokens,
		"session",
		route.Session,
		"predicted_cached_tokens",
		route.PredictedCachedTokens,
		"upper_bound",
		route.UpperBound,
		"unusable_tokens",
		route.UnusableTokens,
		"unusable_by",
		route.UnusableBy,
		"index_at_bound",
		route.IndexAtBound,
		"waited",
		route.Waited,
		"ejected",
		route.Ejected,
		"cordoned",
		route.Cordoned,
		"trial",
		route.Trial,
		logged("costs", route.Costs),
	)
}

// recordOf returns the record of a decision. route is nil if err is not.
func recordOf(g *gathered, req *Request, p *prepared, route *Route, waited time.Duration, err error) *Record {
	path, _, _ := strings.Cut(req.Path, "?")
	record := &Record{
		Time:      time.Now(),
		RequestID: Clip(req.ID),
		Path:      Clip(path),
		Model:     Clip(p.model),
		LoRA:      Clip(p.lora),
		TraceID:   req.Trace.TraceID(),
		Pinned:    p.pins.Given(),
	}
	if err == nil {
		record.Decision = route.Decision
		return record
	}
	record.Error, record.Reason, record.Waited = Clip(err.Error()), p.reason, waited
	if errors.Is(err, ErrCordoned) {
		record.Cordoned = slices.Clone(g.cordoned)
	}
	return record
}

// logged returns a leg's costs as a log attribute.
func logged(name string, costs []Cost) slog.Attr {
	attrs := make([]any, len(costs))
	for i := range costs {
		c := &costs[i]
		attrs[i] = slog.Any(fmt.Sprintf("%s/%d", c.Name, c.Rank), loggedCost{c})
	}
	return slog.Group(name, attrs...)
}

// loggedCost is a cost in a log line: text in a text log, an object in a JSON log.
type loggedCost struct{ *Cost }

func (c loggedCost) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// MarshalJSON uses the field names of /debug/decisions. A number that JSON cannot express is null.
func (c loggedCost) MarshalJSON() ([]byte, error) {
	number := func(x float64) *float64 {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return nil
		}
		return &x
	}
	t := &c.Terms
	return json.Marshal(struct {
		Cost           *float64 `json:"cost"`
		BlockSize      int      `json:"block_size"`
		DeviceBlocks   int      `json:"device_blocks"`
		HostBlocks     int      `json:"host_blocks"`
		DiskBlocks     int      `json:"disk_blocks"`
		SharedBlocks   int      `json:"shared_blocks"`
		Credit         *float64 `json:"credit_blocks"`
		PrefillTokens  int      `json:"waiting_prefill_tokens"`
		DecodeBlocks   *float64 `json:"decode_blocks"`
		ActiveRequests int      `json:"active_requests"`
		CostMultiplier *float64 `json:"cost_multiplier"`
		Pace           *Pace    `json:"pace,omitempty"`
	}{number(c.Cost.Cost), t.BlockSize, t.DeviceBlocks, t.HostBlocks, t.DiskBlocks, t.SharedBlocks, number(c.Credit),
		t.PrefillTokens,
		number(t.DecodeBlocks), t.ActiveRequests, number(multiplier(t)), PaceOf(t)})
}

// maxText bounds text that a client chose in records and logs, in bytes.
const maxText = 256

// Clip returns the first maxText bytes of s. It shares no memory with s.
func Clip(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return strings.Clone(s)
}
