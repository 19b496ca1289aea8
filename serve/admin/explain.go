package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"kvepp/prompt/body"
	"kvepp/router"
	"kvepp/serve/api"
)

const (
	// maxDryRuns bounds the dry runs at once. Source for the number: the default of Dynamo's probe.
	maxDryRuns = 4

	maxProbeBody = 2 << 20 // bytes. Source: as HandleProbe
	probeWithin  = time.Second
)

// Pick is the response of POST /pick: the decision that a request would get now, for which nothing is booked.
type Pick struct {
	Decision
	// WouldWait says that the request would wait in the queue first, because all workers are busy.
	WouldWait bool `json:"would_wait"`
}

// dryRuns hands out the places of dry runs.
type dryRuns chan struct{}

func (d dryRuns) take() bool {
	select {
	case d <- struct{}{}:
		return true
	default:
		return false
	}
}

func (d dryRuns) give() { <-d }

// HandlePick adds POST /pick, a dry run of a request: its body and its headers are those that the client would send to
// the gateway. ?path= is the path that it would ask for; without it, the body's keys decide.
//
// A request that no worker could take is answered with its decision, whose error says why; 400 for a body that is no
// request; 429 while other dry runs take all places.
func HandlePick(mux *http.ServeMux, r *router.Router, instance string) {
	places := make(dryRuns, maxDryRuns)
	mux.HandleFunc("POST /pick", func(w http.ResponseWriter, req *http.Request) {
		if !places.take() {
			api.Reply(w, 0, nil, api.Refuse(http.StatusTooManyRequests, "%d dry runs run already", maxDryRuns))
			return
		}
		defer places.give()
		var out Pick
		err := api.WithBody(w, req, func(payload []byte) error {
			found, err := r.Explain(req.Context(), dryRequest(req, req.URL.Query().Get("path"), payload))
			if invalid := (*body.Error)(nil); errors.As(err, &invalid) {
				return api.Refuse(http.StatusBadRequest, "the gateway would answer 400: %v", err)
			}
			if err == nil {
				out = Pick{asJSON(found.Record), found.WouldWait}
			}
			return err
		})
		api.Reply(w, http.StatusOK, out, err)
	})
	handleProbe(mux, r, places, instance)
}

// dryRequest returns the request that a client would send with these headers and this body. path: empty if the body's
// keys say which API it is for.
func dryRequest(req *http.Request, path string, payload []byte) *router.Request {
	var hints body.HeaderHints
	for name, values := range req.Header {
		for _, v := range values {
			hints.Add(strings.ToLower(name), v)
		}
	}
	return &router.Request{ID: cmp.Or(req.Header.Get("x-request-id"), router.NewRequestID()),
		Path: cmp.Or(path, pathOf(payload)), Body: payload, Hints: hints.Hints()}
}

// pathOf returns the path of the API that a body without a path is for.
func pathOf(body []byte) string {
	var keys struct{ Messages, Prompt, Input present }
	if json.Unmarshal(body, &keys) == nil && !keys.Messages {
		switch {
		case bool(keys.Prompt):
			return "/v1/completions"
		case bool(keys.Input):
			return "/v1/responses"
		}
	}
	return "/v1/chat/completions"
}

// present is true if the key is there, with any value.
type present bool

// UnmarshalJSON ignores the value.
func (p *present) UnmarshalJSON([]byte) error { *p = true; return nil }

// probeResponse is what Dynamo's probe answers. null: not known.
type probeResponse struct {
	Model        string         `json:"model"`
	Instance     string         `json:"epp_instance"`
	SampledAt    int64          `json:"sampled_at_unix_ms"`
	PromptTokens int            `json:"prompt_tokens"`
	BlockSize    int            `json:"block_size"`
	Candidate    probeCandidate `json:"candidate"`
	Pool         probePool      `json:"pool"`
}

type probeCandidate struct {
	WorkerID string     `json:"worker_id"`
	Rank     uint32     `json:"dp_rank"`
	Cache    probeCache `json:"cache"`
	Load     probeLoad  `json:"load"`
}

// probeCache has the leading tokens of the prompt that the candidate holds: on its device, with its host's memory, and
// with all tiers. A lower tier that adds nothing is null.
type probeCache struct {
	EstimateSource  string   `json:"estimate_source"` // events, approximate or unavailable
	Device          *int     `json:"gpu_prefix_tokens"`
	Host            *int     `json:"cpu_prefix_tokens"`
	Disk            *int     `json:"disk_prefix_tokens"`
	DeviceRate      *float64 `json:"predicted_gpu_hit_rate"`
	HostRate        *float64 `json:"predicted_cpu_inclusive_hit_rate"`
	DiskRate        *float64 `json:"predicted_disk_inclusive_hit_rate"`
	EffectiveTokens int      `json:"effective_prefill_tokens"`
}

type probeLoad struct {
	PrefillTokens *int `json:"active_prefill_tokens"`
	Capacity      *int `json:"prefill_token_capacity"`
	DecodeBlocks  *int `json:"potential_decode_blocks"`
	KVBlocks      *int `json:"total_kv_blocks"`
}

type probePool struct {
	Requests int `json:"pending_requests"`
	Tokens   int `json:"pending_input_tokens"`
}

// handleProbe adds POST /v1/routing/probe: how much of a chat is likely cached, and how much work its worker has, for a
// model router that asks several pickers. Other than Dynamo's it also takes requests with salts, sessions and adapters,
// because kvepp prices them.
//
// Source: Dynamo's routing probe API, docs and ext/ext-proc of its main branch after 1.6.1.
func handleProbe(mux *http.ServeMux, r *router.Router, places dryRuns, instance string) {
	mux.HandleFunc("POST /v1/routing/probe", func(w http.ResponseWriter, req *http.Request) {
		out, status, code := probe(w, req, r, places)
		if code != "" {
			api.Reply(w, status, map[string]any{"error": map[string]string{"code": code}}, nil)
			return
		}
		out.Instance = instance
		api.Reply(w, http.StatusOK, out, nil)
	})
}

// probe runs a probe. code is Dynamo's name of an error; empty: none.
func probe(w http.ResponseWriter, req *http.Request, r *router.Router, places dryRuns) (
	out probeResponse, status int, code string) {
	if !places.take() {
		return out, http.StatusTooManyRequests, "probe_overloaded"
	}
	defer places.give()
	switch kind, _, err := mime.ParseMediaType(req.Header.Get("Content-Type")); {
	case req.Header.Get("Content-Encoding") != "":
		return out, http.StatusUnsupportedMediaType, "unsupported_encoding"
	case err != nil || kind != "application/json":
		return out, http.StatusUnsupportedMediaType, "expected_json"
	}
	req.Body = http.MaxBytesReader(w, req.Body, maxProbeBody)
	var found *router.Explanation
	err := api.WithBody(w, req, func(payload []byte) (err error) {
		ctx, cancel := context.WithTimeout(req.Context(), probeWithin)
		defer cancel()
		found, err = r.Explain(ctx, dryRequest(req, "/v1/chat/completions", payload))
		return err
	})
	refused, invalid := (*api.Refusal)(nil), (*body.Error)(nil)
	switch {
	case errors.As(err, &refused):
		return out, refused.Status, cmp.Or(map[int]string{http.StatusRequestEntityTooLarge: "request_too_large",
			http.StatusBadRequest: "invalid_request"}[refused.Status], "probe_overloaded")
	case errors.As(err, &invalid):
		return out, http.StatusBadRequest, "invalid_request"
	case err != nil:
		return out, http.StatusGatewayTimeout, "probe_timeout"
	}
	record := found.Record
	switch {
	case errors.Is(found.Refused, router.ErrUnknownModel):
		return out, http.StatusBadRequest, "model_mismatch"
	case found.Refused != nil:
		return out, http.StatusServiceUnavailable, "selection_unavailable"
	case record.Prefill != nil || record.Reason == router.ReasonMedia || record.Reason == router.ReasonMediaPrefix:
		return out, http.StatusUnprocessableEntity, "unsupported_probe_request"
	}
	out = probeOf(found)
	for _, q := range r.Queues() {
		out.Pool.Requests += q.Requests
		out.Pool.Tokens += q.Tokens
	}
	return out, 0, ""
}

func probeOf(found *router.Explanation) probeResponse {
	record, worker := found.Record, &found.Computes
	cost := &record.Costs[record.Chosen]
	t := &cost.Terms
	out := probeResponse{Model: record.Model, SampledAt: record.Time.UnixMilli(), PromptTokens: record.PromptTokens,
		BlockSize: record.BlockSize}
	known := func(n int, is bool) *int {
		if !is {
			return nil
		}
		return &n
	}
	rate := func(n *int) *float64 {
		if n == nil || record.PromptTokens == 0 || *n > record.PromptTokens {
			return nil
		}
		return Finite(float64(*n) / float64(record.PromptTokens))
	}
	c := &out.Candidate.Cache
	c.EstimateSource = "unavailable"
	switch record.Reason {
	case router.ReasonKV, router.ReasonKVRendered, router.ReasonCacheNotRead:
		c.EstimateSource = "events"
	case router.ReasonApproximate:
		c.EstimateSource = "approximate"
	}
	matched := c.EstimateSource != "unavailable"
	c.Device = known(t.DeviceBlocks*t.BlockSize, matched)
	c.Host = known((t.DeviceBlocks+t.HostBlocks)*t.BlockSize, matched && t.HostBlocks > 0)
	c.Disk = known((t.DeviceBlocks+t.HostBlocks+t.DiskBlocks)*t.BlockSize, matched && t.DiskBlocks > 0)
	c.DeviceRate, c.HostRate, c.DiskRate = rate(c.Device), rate(c.Host), rate(c.Disk)
	c.EffectiveTokens = max(t.ISLTokens-record.Weights.CachedTokens(t), 0)
	out.Candidate.WorkerID, out.Candidate.Rank = strconv.FormatUint(record.InstanceID, 10), record.Rank
	out.Candidate.Load = probeLoad{
		PrefillTokens: known(t.PrefillTokens, record.Weights.TrackPrefillTokens),
		Capacity:      known(worker.MaxNumBatchedTokens, worker.MaxNumBatchedTokens > 0),
		DecodeBlocks:  known(int(t.DecodeBlocks), record.Weights.TrackActiveBlocks),
		KVBlocks:      known(t.KVBlocks, t.KVBlocks > 0),
	}
	return out
}
