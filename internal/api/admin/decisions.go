package admin

import (
	"math"
	"net/http"
	"strconv"
	"time"

	"kvepp/internal/api"
	"kvepp/router"
	"kvepp/scoring"
)

// HandleDecisions adds GET /debug/decisions: the latest decisions of r, newest first, with all terms of each
// candidate's cost. ?n=N limits their number; ?request_id=ID selects those of one request.
func HandleDecisions(mux *http.ServeMux, r *router.Router) {
	mux.HandleFunc("GET /debug/decisions", func(w http.ResponseWriter, req *http.Request) {
		query := req.URL.Query()
		n := 20
		if given := query.Get("n"); given != "" {
			var err error
			if n, err = strconv.Atoi(given); err != nil || n < 1 {
				api.Reply(w, 0, nil, api.Refuse(http.StatusBadRequest, "n must be a number of decisions, at least 1"))
				return
			}
		}
		found := struct {
			Decisions []decision `json:"decisions"`
		}{[]decision{}}
		for _, record := range r.Records(n, query.Get("request_id")) {
			found.Decisions = append(found.Decisions, asJSON(record))
		}
		api.Reply(w, http.StatusOK, found, nil)
	})
}

// decision is a router.Record as JSON.
type decision struct {
	Time                  time.Time     `json:"time"`
	RequestID             string        `json:"request_id"`
	Path                  string        `json:"path"`
	Model                 string        `json:"model,omitempty"`
	LoRA                  string        `json:"lora,omitempty"`
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
	Worker         *destination `json:"worker,omitempty"`
	// the endpoint that answered, as the proxy reports it; absent: not known yet
	AnsweredBy *answeredBy `json:"served,omitempty"`
	Fallbacks  []string    `json:"fallbacks,omitempty"` // addresses to try if this one fails, in order
	// endpoints that were no candidates because they are ejected
	Ejected []string `json:"ejected,omitempty"`
	// EjectedServe means that every endpoint was ejected, and they were candidates despite that.
	EjectedServe bool     `json:"ejected_serve,omitempty"`
	Cordoned     []string `json:"cordoned,omitempty"` // endpoints that were no candidates because they are cordoned
	// the request decides whether an ejected endpoint gets requests again
	Trial bool `json:"trial,omitempty"`
	// UnitTokens is the block, in tokens, in which costs are expressed.
	UnitTokens int         `json:"unit_tokens,omitempty"`
	Weights    *weights    `json:"weights,omitempty"`
	Pinned     bool        `json:"pinned,omitempty"`  // the request named its worker
	Session    string      `json:"session,omitempty"` // new, kept or moved
	Ties       int         `json:"ties"`
	Candidates []candidate `json:"candidates"`
	// Prefill is the leg of the prefill worker, if it is not the destination.
	Prefill *prefillLeg `json:"prefill,omitempty"`
}

type prefillLeg struct {
	Worker     destination `json:"worker"`
	UnitTokens int         `json:"unit_tokens,omitempty"`
	Weights    *weights    `json:"weights,omitempty"`
	Candidates []candidate `json:"candidates"`
}

// weights are the factors of the costs' terms, by flag name.
type weights struct {
	Mode                      string  `json:"mode"`
	Policy                    string  `json:"policy"` // costs are in blocks with dynamo, in milliseconds with time
	OverlapScoreCredit        float64 `json:"kv_overlap_score_credit"`
	OverlapScoreCreditDecay   float64 `json:"kv_overlap_score_credit_decay"`
	PrefillLoadScale          float64 `json:"prefill_load_scale"`
	DecodeActiveRequestWeight float64 `json:"decode_active_request_weight"`
	KVUsageWeight             float64 `json:"kv_usage_weight"`
	HostCacheHitWeight        float64 `json:"host_cache_hit_weight"`
	DiskCacheHitWeight        float64 `json:"disk_cache_hit_weight"`
	SharedCacheMultiplier     float64 `json:"shared_cache_multiplier"`
	Temperature               float64 `json:"temperature"`
	TrackPrefillTokens        bool    `json:"track_prefill_tokens"`
	TrackActiveBlocks         bool    `json:"track_active_blocks"`
	AssumeKVReuse             bool    `json:"assume_kv_reuse"`
}

func weightsOf(c *scoring.Config) *weights {
	if c == nil {
		return nil
	}
	return &weights{
		c.Mode.String(),
		c.Policy.String(),
		c.OverlapScoreCredit,
		c.OverlapScoreCreditDecay,
		c.PrefillLoadScale,
		c.DecodeActiveRequestWeight,
		c.KVUsageWeight,
		c.HostCacheHitWeight,
		c.DiskCacheHitWeight,
		c.SharedCacheMultiplier,
		c.Temperature,
		c.TrackPrefillTokens,
		c.TrackActiveBlocks,
		c.AssumeKVReuse,
	}
}

type destination struct {
	Name       string `json:"name"`
	Rank       uint32 `json:"dp_rank"`
	InstanceID uint64 `json:"instance_id"`
	Address    string `json:"address"`
}

type answeredBy struct {
	Address string `json:"address"`
	Worker  string `json:"worker"`  // NAME/RANK; empty: kvepp has no endpoint with this address
	Outcome string `json:"outcome"` // as_chosen, moved or unknown
}

// candidate is a worker's cost and its terms. Blocks are the worker's blocks.
type candidate struct {
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
}

func asJSON(r *router.Record) decision {
	d := decision{
		Time:                  r.Time,
		RequestID:             r.RequestID,
		Path:                  r.Path,
		Model:                 r.Model,
		LoRA:                  r.LoRA,
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
		d.Worker = &destination{r.Name, r.Rank, r.InstanceID, r.Address}
	}
	if r.AnsweredBy.Outcome != "" {
		d.AnsweredBy = &answeredBy{r.AnsweredBy.Address, r.AnsweredBy.Worker, r.AnsweredBy.Outcome}
	}
	d.Candidates, d.UnitTokens = candidates(r.Costs, r.Chosen)
	if x := r.Prefill; x != nil {
		d.Prefill = &prefillLeg{Worker: destination{x.Name, x.Rank, x.InstanceID, x.Address}}
		d.Prefill.Weights = weightsOf(x.Weights)
		d.Prefill.Candidates, d.Prefill.UnitTokens = candidates(x.Costs, x.Chosen)
	}
	return d
}

// candidates returns the candidates of one leg, and the block size in tokens in which their costs are expressed.
func candidates(costs []router.Cost, chosen int) (all []candidate, unit int) {
	all = []candidate{}
	for i := range costs {
		c := &costs[i]
		t := &c.Terms
		multiplier := t.CostMultiplier
		if multiplier == 0 {
			multiplier = 1
		}
		unit = t.UnitTokens
		all = append(all, candidate{Name: c.Name, Rank: c.Rank, Chosen: i == chosen, Cost: finite(c.Cost),
			BlockSize: t.BlockSize, RequestTokens: t.ISLTokens, PrefillTokens: t.PrefillTokens,
			DeviceBlocks: t.DeviceBlocks, HostBlocks: t.HostBlocks, DiskBlocks: t.DiskBlocks,
			SharedBlocks: t.SharedBlocks,
			Credit:       finite(c.Credit), DecodeBlocks: finite(t.DecodeBlocks), ActiveRequests: t.ActiveRequests,
			KVBlocks:     t.KVBlocks,
			LeastPrefill: t.LeastPrefillTokens, CostMultiplier: finite(multiplier), LoadUnknown: t.LoadUnknown,
			Pace: router.PaceOf(t)})
	}
	return all, unit
}

// finite returns nil for NaN and infinities, which JSON cannot encode.
func finite(x float64) *float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return nil
	}
	return &x
}
