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
	"sync"
	"time"

	"kvepp/scoring"
)

// Cost is one candidate's price; lower is better.
type Cost struct {
	Name string
	Rank uint32
	Cost float64
	// Terms is what the cost was made of, as the load book had it when the choice was made, and Credit what came off
	// for cached blocks. Blocks are of the worker's size.
	Terms  scoring.Terms
	Credit float64
}

// String is the cost and its terms on one line.
func (c *Cost) String() string {
	t := &c.Terms
	return fmt.Sprintf(
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
}

func multiplier(t *scoring.Terms) float64 {
	if t.CostMultiplier == 0 {
		return 1
	}
	return t.CostMultiplier
}

// Record is a decision as it is kept for people. It holds nothing of the prompt. What a client chooses in it is cut to
// a bounded length.
type Record struct {
	Time      time.Time
	RequestID string
	Path      string // without the query
	Model     string // as routing took it; empty: the body was not read
	LoRA      string
	Pinned    bool   // the request named its worker itself
	Error     string // why no worker was chosen: then the decision has a Reason at most
	Served    Served // the zero value: not known yet, or the proxy does not say
	Decision
}

// Ties is how many candidates had the least cost; one of them was drawn.
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

// records are the latest decisions, up to as many as ring has room for.
type records struct {
	mu   sync.Mutex // guards all below
	ring []*Record
	next int // where the next one goes
}

// add stores a record in place of the oldest, and returns its slot.
func (r *records) add(record *Record) (slot int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	slot = r.next
	r.ring[slot] = record
	r.next = (slot + 1) % len(r.ring)
	return slot
}

// setServed stores who served a route's request in its record, if that is still kept. Records do not change: a changed
// copy takes its place.
func (r *records) setServed(route *Route) {
	if route.record == nil {
		return
	}
	served := *route.record
	served.Served = route.Served
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ring[route.slot] == route.record {
		r.ring[route.slot] = &served
	}
	route.record = nil // the proxy says it once
}

// Records returns the latest decisions, the newest first: at most n, of the request with this id, if one is named. They
// do not change. Without Config.Keep there are none.
func (r *Router) Records(n int, requestID string) []*Record {
	r.records.mu.Lock()
	defer r.records.mu.Unlock()
	var out []*Record
	size := len(r.records.ring)
	requestID = Clip(requestID)
	for i := 1; i <= size && len(out) < n; i++ {
		record := r.records.ring[(r.records.next-i+size)%size]
		if record == nil {
			break
		}
		if requestID == "" || record.RequestID == requestID {
			out = append(out, record)
		}
	}
	return out
}

// explains says that somebody will look at the terms of decisions.
func (r *Router) explains() bool {
	return r.cfg.Explain || r.cfg.Keep > 0 || r.log.Enabled(context.Background(), slog.LevelDebug)
}

// record tells of a decision those who want to know. Nothing is done for nobody.
func (r *Router) record(
	ctx context.Context,
	sc *scratch,
	req *Request,
	p *prompt,
	route *Route,
	waited time.Duration,
	err error,
) {
	if r.cfg.Keep > 0 {
		path, _, _ := strings.Cut(req.Path, "?")
		record := &Record{
			Time:      time.Now(),
			RequestID: Clip(req.ID),
			Path:      Clip(path),
			Model:     Clip(p.model),
			LoRA:      Clip(p.lora),
			Pinned:    p.pins.Given(),
		}
		if err != nil {
			record.Error, record.Reason, record.Waited = Clip(err.Error()), p.reason, waited
			if errors.Is(err, ErrCordoned) {
				record.Cordoned = slices.Clone(sc.cordoned)
			}
		} else {
			record.Decision = route.Decision
		}
		if slot := r.records.add(record); err == nil {
			route.record, route.slot = record, slot
		}
	}
	if err != nil || !r.log.Enabled(ctx, slog.LevelDebug) {
		return // whoever refuses the request logs why
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

// logged is a leg's costs as a log has them.
func logged(name string, costs []Cost) slog.Attr {
	attrs := make([]any, len(costs))
	for i := range costs {
		c := &costs[i]
		attrs[i] = slog.Any(fmt.Sprintf("%s/%d", c.Name, c.Rank), loggedCost{c})
	}
	return slog.Group(name, attrs...)
}

// loggedCost is a cost as a log line has it: text in a text log, an object in a JSON log.
type loggedCost struct{ *Cost }

func (c loggedCost) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// MarshalJSON has the names of /debug/decisions. A number that JSON cannot express is null.
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
	}{number(c.Cost.Cost), t.BlockSize, t.DeviceBlocks, t.HostBlocks, t.DiskBlocks, t.SharedBlocks, number(c.Credit),
		t.PrefillTokens,
		number(t.DecodeBlocks), t.ActiveRequests, number(multiplier(t))})
}

// maxText bounds what records and logs keep of a text that a client chose, in bytes.
const maxText = 256

// Clip returns the beginning of s, sharing no memory with it.
func Clip(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return strings.Clone(s)
}
