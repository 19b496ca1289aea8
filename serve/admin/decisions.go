package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/router"
	"kvepp/router/ladder"
	"kvepp/scoring"
	"kvepp/serve/api"
)

// HandleDecisions adds GET /debug/decisions: the latest decisions of r, newest first, with all terms of each
// candidate's cost and what became of the request. ?n=N limits their number; queryOf lists the parameters that select
// some. With ?follow=1 the response is a stream of server-sent events: each decision when its request has ended, at
// most ?rate=N a second. traceURL is the address of a trace, with TraceIDPart in place of its id; empty: there is none.
func HandleDecisions(mux *http.ServeMux, r *router.Router, traceURL string) {
	mux.HandleFunc("GET /debug/decisions", func(w http.ResponseWriter, req *http.Request) {
		values := req.URL.Query()
		n := 20
		query, err := queryOf(values)
		if given := values.Get("n"); given != "" && err == nil {
			if n, err = strconv.Atoi(given); err != nil || n < 1 {
				err = api.Refuse(http.StatusBadRequest, "n must be a number of decisions, at least 1")
			}
		}
		if err != nil {
			api.Reply(w, 0, nil, err)
			return
		}
		if on, _ := strconv.ParseBool(values.Get("follow")); on {
			rate := 0
			if given := values.Get("rate"); given != "" {
				if rate, err = strconv.Atoi(given); err != nil || rate < 1 {
					err = api.Refuse(http.StatusBadRequest, "rate must be a number of decisions, at least 1")
					api.Reply(w, 0, nil, err)
					return
				}
			}
			follow(w, req, r, query, rate, traceURL)
			return
		}
		found := struct {
			Decisions []Decision `json:"decisions"`
		}{[]Decision{}}
		for _, record := range r.Records(n, query) {
			found.Decisions = append(found.Decisions, linked(record, traceURL))
		}
		api.Reply(w, http.StatusOK, found, nil)
	})
}

// TraceIDPart stands for the id in the address of a trace.
const TraceIDPart = "{trace_id}"

// linked returns a decision with the address of its trace.
func linked(r *router.Record, traceURL string) Decision {
	d := asJSON(r)
	if d.TraceID != "" {
		d.TraceURL = strings.ReplaceAll(traceURL, TraceIDPart, url.QueryEscape(d.TraceID))
	}
	return d
}

// parameters are those that select decisions.
var parameters = []string{"request_id", "worker", "model", "session", "reason", "status", "cold", "wrong", "slow"}

// queryOf reads the parameters that select decisions: request_id, worker (NAME or NAME/RANK), model, session (new, kept
// or moved), reason, status (404, or 4xx), cold and wrong (true), slow (a duration such as 500ms).
func queryOf(values url.Values) (q router.Query, err error) {
	for name := range values {
		if !slices.Contains(parameters, name) && name != "n" && name != "follow" && name != "rate" {
			return q, api.Refuse(http.StatusBadRequest, "unknown parameter %q: the parameters are n, follow, rate, %s",
				name, strings.Join(parameters, ", "))
		}
	}
	q = router.Query{RequestID: values.Get("request_id"), Worker: values.Get("worker"), Model: values.Get("model"),
		Session: values.Get("session"), Reason: router.Reason(values.Get("reason")), Status: values.Get("status")}
	for name, to := range map[string]*bool{"cold": &q.Cold, "wrong": &q.Wrong} {
		if given := values.Get(name); given != "" {
			if *to, err = strconv.ParseBool(given); err != nil {
				return q, api.Refuse(http.StatusBadRequest, "%s must be true or false", name)
			}
		}
	}
	if given := values.Get("slow"); given != "" {
		if q.Slow, err = time.ParseDuration(given); err != nil || q.Slow <= 0 {
			return q, api.Refuse(http.StatusBadRequest, "slow must be a duration above 0, such as 500ms")
		}
	}
	return q, nil
}

const (
	// beat is the interval at which a stream without decisions shows that it lives.
	beat = 10 * time.Second

	// writeWithin bounds the time until a reader has taken what it was sent.
	writeWithin = 30 * time.Second
)

// follow writes decisions as server-sent events until the client leaves or does not read.
func follow(w http.ResponseWriter, req *http.Request, r *router.Router, q router.Query, rate int, traceURL string) {
	f := r.Follow(q, rate)
	if f == nil {
		api.Reply(w, 0, nil, api.Refuse(http.StatusServiceUnavailable,
			"at most %d requests follow decisions at once", router.MaxFollowers))
		return
	}
	defer f.Close()
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	send := func(event string) bool {
		// A server that does not support deadlines has none.
		err := control.SetWriteDeadline(time.Now().Add(writeWithin))
		if err != nil && !errors.Is(err, http.ErrNotSupported) {
			return false
		}
		_, err = io.WriteString(w, event)
		return err == nil && control.Flush() == nil
	}
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for ok := send(": decisions\n\n"); ok; {
		select {
		case <-req.Context().Done():
			return
		case <-tick.C:
			ok = send(": no decision\n\n")
		case record := <-f.C:
			text, err := json.Marshal(linked(record, traceURL))
			if err != nil { // a Decision has only values that JSON can express
				return
			}
			event := "data: " + string(text) + "\n\n"
			if n := f.Missed(); n > 0 {
				event = fmt.Sprintf("event: missed\ndata: %d\n\n%s", n, event)
			}
			ok = send(event)
		}
	}
}

// Outcome is what became of a request.
type Outcome struct {
	Status   string `json:"status,omitempty"` // absent: there was no response
	Complete bool   `json:"complete"`
	// milliseconds; absent: not known
	TTFT         float64 `json:"time_to_first_token_ms,omitempty"`
	ITL          float64 `json:"inter_token_ms,omitempty"`
	Duration     float64 `json:"duration_ms"`
	PromptTokens int     `json:"prompt_tokens,omitempty"` // as the engine reports
	Tokens       int     `json:"output_tokens,omitempty"`
	CachedTokens *int    `json:"cached_tokens"`    // as the engine reports; null: it does not
	Ladder       []Rung  `json:"ladder,omitempty"` // the request's rungs; absent without a ladder
}

func outcomeOf(o *router.Outcome, byTime bool) *Outcome {
	if o == nil {
		return nil
	}
	milliseconds := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	out := &Outcome{Status: o.Status, Complete: o.Complete, TTFT: milliseconds(o.TTFT), ITL: milliseconds(o.ITL),
		Duration: milliseconds(o.Duration), PromptTokens: o.PromptTokens, Tokens: o.Tokens}
	if o.CachedTokens >= 0 {
		out.CachedTokens = &o.CachedTokens
	}
	if o.Climb != (ladder.Climb{}) {
		var one ladder.Ladder
		climb := o.Climb
		one.Add(&climb)
		sum := ladder.Total(one.Sums())
		out.Ladder = ladderSumOf(&sum, byTime).Rungs
	}
	return out
}

// Decision is a router.Record as JSON.
type Decision struct {
	Time                  time.Time     `json:"time"`
	RequestID             string        `json:"request_id"`
	Path                  string        `json:"path"`
	Model                 string        `json:"model,omitempty"`
	LoRA                  string        `json:"lora,omitempty"`
	TraceID               string        `json:"trace_id,omitempty"`  // absent: its trace is not exported
	TraceURL              string        `json:"trace_url,omitempty"` // absent: without --trace-url, or a trace
	Error                 string        `json:"error,omitempty"`
	Reason                router.Reason `json:"reason"`
	PromptTokens          int           `json:"prompt_tokens"`
	PredictedCachedTokens int           `json:"predicted_cached_tokens"`
	UpperBound            bool          `json:"upper_bound,omitempty"`
	// EngineVersion is the version by whose rules the prompt was tokenized, if the workers' versions differ about it.
	EngineVersion string `json:"engine_version,omitempty"`
	// UnusableTokens are cached by full attention, but not usable because of layers of the kind UnusableBy.
	UnusableTokens int          `json:"unusable_tokens,omitempty"`
	UnusableBy     string       `json:"unusable_by,omitempty"`
	IndexAtBound   bool         `json:"index_at_bound,omitempty"`
	WaitedSeconds  float64      `json:"waited_seconds,omitempty"` // in the queue
	Worker         *Destination `json:"worker,omitempty"`
	// the endpoint that answered, as the proxy reports it; absent: not known yet
	ServedBy  *ServedEndpoint `json:"served,omitempty"`
	Fallbacks []string        `json:"fallbacks,omitempty"` // addresses to try if this one fails, in order
	// endpoints that were no candidates because they are ejected
	Ejected []string `json:"ejected,omitempty"`
	// EjectedServe means that every endpoint was ejected, and they were candidates despite that.
	EjectedServe bool     `json:"ejected_serve,omitempty"`
	Cordoned     []string `json:"cordoned,omitempty"` // endpoints that were no candidates because they are cordoned
	// the request decides whether an ejected endpoint gets requests again
	Trial bool `json:"trial,omitempty"`
	// UnitTokens is the block, in tokens, in which costs are expressed.
	UnitTokens int      `json:"unit_tokens,omitempty"`
	Weights    *Weights `json:"weights,omitempty"`
	Pinned     bool     `json:"pinned,omitempty"`  // the request named its worker
	Session    string   `json:"session,omitempty"` // new, kept or moved
	// Conditional is the outcome of --router-conditional-disagg, as in kvepp_conditional_total.
	Conditional scoring.BypassOutcome `json:"conditional,omitempty"`
	Ties        int                   `json:"ties"`
	Candidates  []Candidate           `json:"candidates"`
	// Prefill is the leg of the prefill worker, if it is not the destination.
	Prefill *PrefillLeg `json:"prefill,omitempty"`
	// Outcome is absent while the request runs, and if it was refused.
	Outcome *Outcome `json:"outcome,omitempty"`
}

// PrefillLeg is the choice of the worker that computes the prompt.
type PrefillLeg struct {
	Worker     Destination `json:"worker"`
	UnitTokens int         `json:"unit_tokens,omitempty"`
	Weights    *Weights    `json:"weights,omitempty"`
	Candidates []Candidate `json:"candidates"`
}

// Weights are the factors of the costs' terms, by flag name.
type Weights struct {
	Mode                      string  `json:"mode"`
	Policy                    string  `json:"policy"` // costs are in blocks with dynamo, in milliseconds with time
	OverlapScoreCredit        float64 `json:"kv_overlap_score_credit"`
	OverlapScoreCreditDecay   float64 `json:"kv_overlap_score_credit_decay"`
	PrefillLoadScale          float64 `json:"prefill_load_scale"`
	DecodeActiveRequestWeight float64 `json:"decode_active_request_weight"`
	HostCacheHitWeight        float64 `json:"host_cache_hit_weight"`
	DiskCacheHitWeight        float64 `json:"disk_cache_hit_weight"`
	SharedCacheMultiplier     float64 `json:"shared_cache_multiplier"`
	Temperature               float64 `json:"temperature"`
	TrackPrefillTokens        bool    `json:"track_prefill_tokens"`
	TrackActiveBlocks         bool    `json:"track_active_blocks"`
	AssumeKVReuse             bool    `json:"assume_kv_reuse"`
}

func weightsOf(c *scoring.Config) *Weights {
	if c == nil {
		return nil
	}
	return &Weights{
		c.Mode.String(),
		c.Policy.String(),
		c.OverlapScoreCredit,
		c.OverlapScoreCreditDecay,
		c.PrefillLoadScale,
		c.DecodeActiveRequestWeight,
		c.HostCacheHitWeight,
		c.DiskCacheHitWeight,
		c.SharedCacheMultiplier,
		c.Temperature,
		c.TrackPrefillTokens,
		c.TrackActiveBlocks,
		c.AssumeKVReuse,
	}
}

// Destination is a chosen worker.
type Destination struct {
	Name       string `json:"name"`
	Rank       uint32 `json:"dp_rank"`
	InstanceID uint64 `json:"instance_id"`
	Address    string `json:"address"`
}

// ServedEndpoint is the endpoint that answered.
type ServedEndpoint struct {
	Address string `json:"address"`
	Worker  string `json:"worker"`  // NAME/RANK; empty: kvepp has no endpoint with this address
	Outcome string `json:"outcome"` // as_chosen, moved or unknown
}

// Candidate is a worker's cost and its terms. Blocks are the worker's blocks.
type Candidate struct {
	Name   string   `json:"name"`
	Rank   uint32   `json:"dp_rank"`
	Chosen bool     `json:"chosen,omitempty"`
	Cost   *float64 `json:"cost"` // null: it was not eligible

	BlockSize      int      `json:"block_size"`
	RequestTokens  int      `json:"request_tokens"`
	PrefillTokens  int      `json:"waiting_prefill_tokens"`
	DeviceBlocks   int      `json:"device_blocks"`
	HostBlocks     int      `json:"host_blocks"`
	DiskBlocks     int      `json:"disk_blocks"`
	SharedBlocks   int      `json:"shared_blocks"`
	Credit         *float64 `json:"credit_blocks"`
	DecodeBlocks   *float64 `json:"decode_blocks"`
	ActiveRequests int      `json:"active_requests"`
	KVBlocks       int      `json:"kv_blocks,omitempty"` // that the worker has room for
	// among the candidates; the credit's decay reads it
	LeastPrefill   int      `json:"least_waiting_prefill_tokens,omitempty"`
	CostMultiplier *float64 `json:"cost_multiplier"`
	LoadUnknown    bool     `json:"load_unknown,omitempty"`
	// Pace is what the policy time knew about the worker's speed.
	Pace *router.Pace `json:"pace,omitempty"`
	// Parts add up to the cost but for rounding; see scoring.Part.
	Parts []Part `json:"parts,omitempty"`
	// Lost says why another worker was chosen; absent for the chosen one.
	Lost string `json:"lost,omitempty"`
	// Peers is the part that the requests of other replicas have in these terms and in the cost; absent: none.
	Peers *PeersPart `json:"peers,omitempty"`
}

// PeersPart is the part that other replicas' requests have in a candidate's terms and cost.
type PeersPart struct {
	Requests      int      `json:"active_requests"`
	PrefillTokens int      `json:"waiting_prefill_tokens"`
	DecodeBlocks  *float64 `json:"decode_blocks"`
	Cost          *float64 `json:"cost"`
}

// peersOf returns the part that other replicas' requests have in a cost; nil without any. weights are the cost's.
func peersOf(c *router.Cost, weights *scoring.Config) *PeersPart {
	t := &c.Terms.Peers
	if *t == (scoring.PeerTerms{}) || weights == nil {
		return nil
	}
	alone := c.Terms.WithoutPeers()
	return &PeersPart{t.Requests, t.PrefillTokens, Finite(t.DecodeBlocks), Finite(c.Cost - weights.Cost(&alone))}
}

// Part is one term of a cost.
type Part struct {
	Name  string  `json:"part"`
	Value float64 `json:"value"` // in blocks, or in milliseconds with the policy time
}

func asJSON(r *router.Record) Decision {
	d := Decision{
		Outcome:               outcomeOf(r.Outcome, r.Weights != nil && r.Weights.Policy == scoring.Time),
		Time:                  r.Time,
		RequestID:             r.RequestID,
		Path:                  r.Path,
		Model:                 r.Model,
		LoRA:                  r.LoRA,
		TraceID:               r.TraceID,
		Error:                 r.Error,
		Reason:                r.Reason,
		PromptTokens:          r.PromptTokens,
		PredictedCachedTokens: r.PredictedCachedTokens,
		UpperBound:            r.UpperBound,
		IndexAtBound:          r.IndexAtBound,
		WaitedSeconds:         r.Waited.Seconds(),
		Weights:               weightsOf(r.Weights),
		Pinned:                r.Pinned,
		Session:               r.Session,
		Conditional:           r.Conditional,
		Fallbacks:             r.Fallbacks,
		Ejected:               r.Ejected,
		EjectedServe:          r.EjectedAdmitted,
		Cordoned:              r.Cordoned,
		Trial:                 r.Trial,
		Ties:                  r.Ties(),
	}
	if r.UnusableTokens > 0 {
		d.UnusableTokens, d.UnusableBy = r.UnusableTokens, r.UnusableBy.String()
	}
	if r.Error == "" {
		d.Worker = &Destination{r.Name, r.Rank, r.InstanceID, r.Address}
	}
	if r.ServedBy.Outcome != "" {
		d.ServedBy = &ServedEndpoint{r.ServedBy.Address, r.ServedBy.Worker, r.ServedBy.Outcome}
	}
	d.Candidates, d.UnitTokens = candidates(r.Costs, r.Chosen, r.Weights)
	if x := r.Prefill; x != nil {
		d.Prefill = &PrefillLeg{Worker: Destination{x.Name, x.Rank, x.InstanceID, x.Address}}
		d.Prefill.Weights = weightsOf(x.Weights)
		d.Prefill.Candidates, d.Prefill.UnitTokens = candidates(x.Costs, x.Chosen, x.Weights)
	}
	return d
}

// candidates returns the candidates of one leg, and the block size in tokens in which their costs are expressed.
func candidates(costs []router.Cost, chosen int, weights *scoring.Config) (all []Candidate, unit int) {
	all = []Candidate{}
	for i := range costs {
		c := &costs[i]
		t := &c.Terms
		multiplier := t.CostMultiplier
		if multiplier == 0 {
			multiplier = 1
		}
		unit = t.UnitTokens
		all = append(all, Candidate{Name: c.Name, Rank: c.Rank, Chosen: i == chosen, Cost: Finite(c.Cost),
			BlockSize: t.BlockSize, RequestTokens: t.ISLTokens, PrefillTokens: t.PrefillTokens,
			DeviceBlocks: t.DeviceBlocks, HostBlocks: t.HostBlocks, DiskBlocks: t.DiskBlocks,
			SharedBlocks: t.SharedBlocks,
			Credit:       Finite(c.Credit), DecodeBlocks: Finite(t.DecodeBlocks), ActiveRequests: t.ActiveRequests,
			KVBlocks:     t.KVBlocks,
			LeastPrefill: t.LeastPrefillTokens, CostMultiplier: Finite(multiplier), LoadUnknown: t.LoadUnknown,
			Pace: router.PaceOf(t), Peers: peersOf(c, weights)})
	}
	if weights != nil && chosen < len(costs) {
		explainLosses(all, costs, chosen, weights)
	}
	return all, unit
}

// explainLosses sets the parts of each candidate's cost, and why it lost to the chosen one.
func explainLosses(all []Candidate, costs []router.Cost, chosen int, weights *scoring.Config) {
	partsOf := func(i int) []scoring.Part {
		if weights.Mode != scoring.KV || all[i].Cost == nil {
			return nil // not priced
		}
		return weights.Parts(&costs[i].Terms)
	}
	won := map[string]float64{}
	for _, p := range partsOf(chosen) {
		won[p.Name] = p.Value
	}
	unit := "blocks"
	if weights.Policy == scoring.Time {
		unit = "ms"
	}
	for i := range all {
		parts := partsOf(i)
		most, by := 0.0, ""
		left := maps.Clone(won) // of the chosen worker's parts, those that this one lacks
		for _, p := range parts {
			all[i].Parts = append(all[i].Parts, Part{p.Name, p.Value})
			if more := p.Value - won[p.Name]; more > most {
				most, by = more, p.Name
			}
			delete(left, p.Name)
		}
		for name, value := range left {
			if -value > most || -value == most && by > name {
				most, by = -value, name
			}
		}
		more := costs[i].Cost - costs[chosen].Cost
		switch {
		case i == chosen || weights.Mode != scoring.KV:
		case all[i].Cost == nil || all[chosen].Cost == nil:
			all[i].Lost = "it was not eligible"
		case more < 0:
			all[i].Lost = fmt.Sprintf("it costs %.3g %s less: the temperature, or a trial, decided", -more, unit)
		case more == 0:
			all[i].Lost = "it costs the same: one of the cheapest is drawn at random"
		case by == "":
			all[i].Lost = fmt.Sprintf("it costs %.3g %s more", more, unit)
		default:
			all[i].Lost = fmt.Sprintf("it costs %.3g %s more: %s", more, unit, lostBy[by])
		}
	}
}

// lostBy says for each part of a cost what it means that a worker has more of it.
var lostBy = map[string]string{
	scoring.PartPrompt:   "its blocks have another size",
	scoring.PartCached:   "it has less of the prompt cached",
	scoring.PartWaiting:  "more prompt tokens wait there",
	scoring.PartHeld:     "its active requests hold more blocks",
	scoring.PartRequests: "more requests run there",
	scoring.PartSteps:    "a prefill step takes longer there, or one runs now",
	scoring.PartDelays:   "the prompt would delay more responses there",
	scoring.PartMemory:   "its KV cache has no room",
	scoring.PartSlower:   "its responses are slower",
}

// Finite returns nil for NaN and infinities, which JSON cannot encode.
func Finite(x float64) *float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return nil
	}
	return &x
}
