package router

import (
	"fmt"
	"log/slog"
	"testing"

	"kvepp/internal/logtest"
	"kvepp/prompt"
)

// TestPromptCounts: a response whose number of prompt tokens differs from kvepp's is counted. After three in a row
// kvepp logs once for each model and API.
func TestPromptCounts(t *testing.T) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var log logtest.Log
	endpoints := workers(2)
	for i := range endpoints {
		endpoints[i].Model = ""
	}
	h, sample := exportingAs(t, Config{Models: map[string]*prompt.Model{"m": model, "none": nil}}, endpoints...)
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	differing := 0.0
	response := func(path, model, input, status string, more int) {
		t.Helper()
		body := fmt.Sprintf(`{"model":%q,"prompt":%s}`, model, input)
		switch path {
		case "/v1/responses":
			body = fmt.Sprintf(`{"model":%q,"input":%s}`, model, input)
		case "/v1/chat/completions":
			body = fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%s}]}`, model, input)
		}
		r := h.route(&Request{Path: path, Body: []byte(body)})
		tokens := r.PromptTokens + more
		if more < 0 {
			tokens = 0 // no usage in the response
		}
		r.Free()
		r.Ended(Response{Status: status, PromptTokens: tokens, CachedTokens: -1})
	}
	lines := func(want int) {
		t.Helper()
		if n := log.Count("the engine counts a different number of prompt tokens than kvepp"); n != want {
			t.Fatalf("%d lines, want %d:\n%s", n, want, log.String())
		}
		if got := sample("kvepp_prompt_token_mismatches_total"); got != differing {
			t.Fatalf("%v mismatches are counted, want %v", got, differing)
		}
	}
	const chats, completions, prompt = "/v1/chat/completions", "/v1/completions", `"a long story"`
	for range 10 {
		response(chats, "m", prompt, "200", 0)
		response(completions, "m", prompt, "200", -1)             // no usage
		response(completions, "m", `["one", "two"]`, "200", 5)    // a batch
		response(completions, "none", `[1, 2, 3]`, "200", 5)      // not tokenized by kvepp
		response(completions, "m", prompt, "500", 5)              // not a response of the model
		response("/v1/responses", "m", `"another API"`, "200", 5) // counts by other rules
	}
	lines(0)
	response(chats, "m", prompt, "200", 5)
	response(chats, "m", prompt, "200", 5)
	response(chats, "m", prompt, "200", 0) // one differing response alone
	response(chats, "m", prompt, "200", 5)
	response(chats, "m", prompt, "200", 5)
	differing = 4
	lines(0)
	response(completions, "m", prompt, "200", 0) // says nothing about chats
	response(chats, "m", prompt, "200", 5)
	differing = 5
	lines(1)
	for _, part := range []string{"level=WARN", "model=m", `api="chat completions"`, "worker=w", "tokens_by_kvepp=",
		"tokens_by_engine=", "--chat-template"} {
		if log.Count(part) == 0 {
			t.Errorf("no %q in %s", part, log.String())
		}
	}
	for range 10 {
		response(chats, "m", prompt, "200", 5)
	}
	differing = 15
	lines(1)
	for range 3 {
		response(completions, "m", prompt, "200", 5)
	}
	differing = 18
	lines(2)
}
