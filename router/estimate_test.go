package router

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/prompt/remote"
)

// TestEstimatedTokens: without token ids a later turn follows the earlier ones, by the bytes of its prompt.
func TestEstimatedTokens(t *testing.T) {
	for name, how := range map[string]Predict{
		"approximate mode": {TTL: time.Minute, Alone: true},
		"with KV events":   {Silent: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t, workers(3)...)
			h.cfg.EstimateTokens, h.cfg.Predict = true, how
			said := strings.Repeat("a long turn of a conversation, ", 20)
			turn := func(conversation string, turns int) *Request {
				messages := ""
				for i := range turns {
					messages += fmt.Sprintf(`{"role":"user","content":"%s %d %s"},`, conversation, i, said)
				}
				return &Request{Path: "/v1/chat/completions",
					Body: []byte(`{"model":"m","messages":[` + strings.TrimSuffix(messages, ",") + `]}`)}
			}
			for _, conversation := range []string{"first", "second", "third", "fourth"} {
				worker := ""
				for turns := 1; turns < 5; turns++ {
					r := h.route(turn(conversation, turns))
					r.Free()
					if r.Reason != ReasonApproximate || r.PromptTokens < turns*len(said)/bytesPerToken {
						t.Fatalf("%+v", r.Decision)
					}
					if turns > 1 && (r.Name != worker || r.PredictedCachedTokens < (turns-1)*len(said)/bytesPerToken) {
						t.Errorf("%s, turn %d: %s, before %s; %d tokens are predicted", conversation, turns, r.Name,
							worker, r.PredictedCachedTokens)
					}
					worker = r.Name
				}
			}
			media := h.route(&Request{Path: "/v1/chat/completions", Body: []byte(`{"model":"m","messages":[{` +
				`"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`)})
			if media.Reason != ReasonMedia {
				t.Errorf("a picture: %+v", media.Decision)
			}
			media.Free()
			text := h.route(&Request{Path: "/v1/completions",
				Body: []byte(`{"model":"m","prompt":["` + said + `","b"]}`)})
			if text.Reason != ReasonApproximate || text.PromptTokens != len(said)/bytesPerToken {
				t.Errorf("completions: %+v", text.Decision)
			}
			text.Free()
		})
	}
}

// TestAnyEngineTokenizes: a model without a server of its own is asked for at the one of all models; without a response
// its tokens are estimated.
func TestAnyEngineTokenizes(t *testing.T) {
	status := 200
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, `{"token_ids":[1,2,3,4,5,6,7,8]}`)
	}))
	defer engine.Close()
	h := newHouse(t, workers(2)...)
	h.asks(engine.URL, time.Minute)
	any := h.cfg.Remote["m"]
	h.cfg.Remote, h.cfg.RemoteOf = nil, func(string) *remote.Client { return any }
	h.cfg.EstimateTokens = true
	for code, reason := range map[int]Reason{200: ReasonKVRendered, 400: ReasonApproximate} {
		status = code
		r := h.route(&Request{Path: "/v1/chat/completions",
			Body: []byte(`{"model":"m","messages":[{"role":"user","content":"a question of some words"}]}`)})
		if r.Reason != reason {
			t.Errorf("status %d: %+v", code, r.Decision)
		}
		r.Free()
	}
}
