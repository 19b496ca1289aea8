package admin

import (
	"log/slog"
	"net/http"

	"kvepp/router"
	"kvepp/serve/api"
)

// busyThresholds are a model's thresholds in requests and responses; null: not set.
type busyThresholds struct {
	Model                   *string  `json:"model"`
	ActiveDecodeBlocks      *float64 `json:"active_decode_blocks_threshold"`
	ActivePrefillTokens     *uint64  `json:"active_prefill_tokens_threshold"`
	ActivePrefillTokensFrac *float64 `json:"active_prefill_tokens_threshold_frac"`
}

func thresholdsOf(model string, t router.Thresholds) busyThresholds {
	return busyThresholds{&model, t.ActiveDecodeBlocks, t.ActivePrefillTokens, t.ActivePrefillTokensFrac}
}

// HandleBusyThreshold adds the requests that read and change the busy thresholds of r's models.
//
// Source: dynamo-llm 1.6.1, http::service::busy_threshold, and the responses of `python -m dynamo.frontend`: 400 if the
// body is not JSON, 422 if its fields are not valid.
func HandleBusyThreshold(mux *http.ServeMux, r *router.Router, log *slog.Logger) {
	mux.HandleFunc("GET /busy_threshold", func(w http.ResponseWriter, _ *http.Request) {
		list := []busyThresholds{}
		for _, model := range r.Models() {
			list = append(list, thresholdsOf(model, r.Thresholds(model)))
		}
		api.Reply(w, http.StatusOK, map[string]any{"thresholds": list}, nil)
	})
	mux.HandleFunc("POST /busy_threshold", func(w http.ResponseWriter, req *http.Request) {
		var given busyThresholds
		if err := api.ReadBody(w, req, &given); err != nil {
			api.Reply(w, 0, nil, err)
			return
		}
		now, err := given.apply(r, log)
		api.Reply(w, http.StatusOK, now, err)
	})
}

// apply sets the given thresholds, and returns all thresholds of the model.
func (b *busyThresholds) apply(r *router.Router, log *slog.Logger) (now busyThresholds, err error) {
	if b.Model == nil {
		return now, api.Refuse(http.StatusUnprocessableEntity, "model is missing")
	}
	given := router.Thresholds{
		ActiveDecodeBlocks:      b.ActiveDecodeBlocks,
		ActivePrefillTokens:     b.ActivePrefillTokens,
		ActivePrefillTokensFrac: b.ActivePrefillTokensFrac,
	}
	if err := given.Validate(); err != nil {
		return now, api.Refuse(http.StatusBadRequest, "%v", err)
	}
	if given.None() {
		return thresholdsOf(*b.Model, r.Thresholds(*b.Model)), nil
	}
	set, known := r.SetThresholds(*b.Model, given)
	if !known {
		return now, api.Refuse(http.StatusNotFound,
			"Model '%s' not found. Thresholds can only be set for discovered models.", *b.Model)
	}
	now = thresholdsOf(*b.Model, set)
	log.Info("busy thresholds changed", "model", *b.Model, "active_decode_blocks", text(set.ActiveDecodeBlocks),
		"active_prefill_tokens", text(set.ActivePrefillTokens), "active_prefill_tokens_frac",
		text(set.ActivePrefillTokensFrac))
	return now, nil
}

// text formats a number that may be absent, for the log.
func text[T any](v *T) any {
	if v == nil {
		return "none"
	}
	return *v
}
