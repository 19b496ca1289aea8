package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/test/harness/stack"
)

// TestTokenizerURL: kvepp has no folder of the model, and gets token ids from a server with vLLM's render endpoints,
// which returns those of Dynamo's frontend here. Predictions are as exact as with a folder. While the server fails,
// requests are routed by load.
func TestTokenizerURL(t *testing.T) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{Engine: prompt.Dynamo})
	if err != nil {
		t.Fatal(err)
	}
	var failing atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		payload, err := io.ReadAll(r.Body)
		path, render := strings.CutSuffix(r.URL.Path, "/render")
		if err != nil || !render || failing.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		request, err := body.ParseRequest(path, payload)
		if err != nil {
			t.Error(err)
		}
		prompts, err := model.Tokenize(t.Context(), request)
		if err != nil || len(prompts) != 1 {
			t.Error(prompts, err)
		}
		json.NewEncoder(
			w,
		).Encode(
			map[string]any{"request_id": "chatcmpl-1", "token_ids": prompts[0].IDs, "features": nil},
		)
	}))
	defer server.Close()
	s := start(
		t,
		stack.Config{
			Workers:    2,
			Speedup:    20,
			KveppModel: t.TempDir(),
			KveppFlags: []string{"--engine", "vllm", "--tokenizer-url", server.URL},
		},
	)
	nothingLeft(t, s)
	worker := ""
	for turn := 1; turn <= 3; turn++ {
		a := warm(t, s.Envoy.URL, conversation(t.Name(), turn), true, nil)
		if turn > 1 && a.Worker != worker {
			t.Errorf("turn %d went to %s, the turn before to %s", turn, a.Worker, worker)
		}
		worker = a.Worker
	}
	failing.Store(true)
	eventually(t, func() error { // after several failures the circuit breaker opens for a while
		switch a := chat(t, s.Envoy.URL, novel(), true, nil); a.Reason {
		case "tokenizer_url_open":
			return nil
		case "tokenizer_url_error":
			return errors.New("the breaker is still closed")
		default:
			t.Fatalf("while the server fails: reason %s", a.Reason)
		}
		return nil
	})
	failing.Store(false)
	eventually(t, func() error {
		if a := chat(t, s.Envoy.URL, conversation(t.Name(), 3), true, nil); a.Reason != "kv_rendered" {
			return fmt.Errorf("reason %s", a.Reason)
		}
		return nil
	})
	if n := metric(t, s, `kvepp_tokenizer_url_requests_total{model="`+stack.Model+`",outcome="error"}`); n < 5 {
		t.Errorf("%v errors counted", n)
	}
}
