package router

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/prompt"
	"kvepp/prompt/remote"
)

// asks makes the router ask url for the token ids of model "m".
func (h *house) asks(url string, timeout time.Duration) {
	h.t.Helper()
	client, err := remote.New(
		remote.Config{Model: "m", URL: url, Engine: prompt.VLLM, Timeout: timeout},
		metrics.New(),
		slog.New(slog.DiscardHandler),
	)
	if err != nil {
		h.t.Fatal(err)
	}
	h.cfg.Remote = map[string]*remote.Client{"m": client}
}

// TestTheEngineTokenizes: if kvepp cannot tokenize, it routes by the engine's token ids. If the engine does not answer
// with ids, it routes by load.
func TestTheEngineTokenizes(t *testing.T) {
	ids := strings.Join(strings.Fields(fmt.Sprint(tokens(0, 42))), ",")
	responses := map[string]string{
		"/v1/chat/completions/render": `{"token_ids":` + ids + `}`,
		"/v1/completions/render":      `[{"token_ids":` + ids + `}]`,
		"/v1/responses/render":        `{"token_ids":` + ids + `}`,
	}
	asked := 0
	status := 200
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		w.WriteHeader(status)
		io.WriteString(w, responses[r.URL.Path])
	}))
	defer engine.Close()
	h := newHouse(t, workers(4)...)
	h.warm("w2", 0, tokens(0, 32), blocksOfFour)
	h.asks(engine.URL, time.Minute)

	const chat = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	for _, req := range []*Request{
		{Path: "/v1/chat/completions", Body: []byte(chat)},
		{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"text"}`)},
		// vLLM does not read it
		{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"text","nvext":{"token_data":[1,2,3]}}`)},
		// unmapped here
		{Path: "/v1/responses", Body: []byte(`{"model":"m","input":"hi","tools":[{"type":"web_search"}]}`)},
	} {
		asked = 0
		r := h.route(req)
		if r.Name != "w2" || r.Reason != ReasonKVRendered || r.PromptTokens != 42 || r.PredictedCachedTokens != 32 ||
			asked != 1 {
			t.Errorf("%s: %+v, asked %d times", req.Body, r.Decision, asked)
		}
		r.Free()
	}

	asked = 0
	for _, c := range []struct {
		path, body string
		reason     Reason
	}{
		{"/v1/completions", `{"model":"other","prompt":"text"}`, ReasonNoTokenizer},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url",` +
			`"image_url":{"url":"x"}}]}]}`, ReasonMedia},
		{"/v1/completions", `{"model":"m","prompt":[1,2,3]}`, ReasonKV},
	} {
		r, err := h.Route(t.Context(), &Request{Path: c.path, Body: []byte(c.body)})
		if c.reason == ReasonNoTokenizer {
			if !errors.Is(err, ErrUnknownModel) {
				t.Errorf("%s: %v", c.body, err)
			}
			continue
		}
		if err != nil || r.Reason != c.reason {
			t.Errorf("%s: %+v, %v", c.body, r, err)
			continue
		}
		r.Free()
	}
	if asked != 0 {
		t.Errorf("asked %d times for what the engine is not to be asked", asked)
	}

	for _, c := range []struct {
		status int
		reason Reason
	}{{400, ReasonNoTokenizer}, {503, ReasonRemoteError}, {503, ReasonRemoteError}, {503, ReasonRemoteError},
		{503, ReasonRemoteError}, {503, ReasonRemoteError}, {503, ReasonRemoteOpen}} {
		status = c.status
		r := h.route(&Request{Path: "/v1/chat/completions", Body: []byte(chat)})
		if r.Reason != c.reason || r.PredictedCachedTokens != 0 {
			t.Errorf("status %d: %s", c.status, r.Reason)
		}
		r.Free()
	}
}

// TestTheEngineHangs: the wait for the engine ends at the deadline or when the client leaves.
func TestTheEngineHangs(t *testing.T) {
	there, over := make(chan struct{}, 2), make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		there <- struct{}{}
		select {
		case <-r.Context().Done():
		case <-over:
		}
	}))
	defer engine.Close()
	defer close(over)
	h := newHouse(t, workers(1)...)
	h.asks(engine.URL, 20*time.Millisecond)
	req := &Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"text"}`)}
	r := h.route(req)
	if r.Reason != ReasonRemoteTimeout {
		t.Errorf("reason %s", r.Reason)
	}
	r.Free() // whether or not the request had reached the engine

	h.asks(engine.URL, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := h.Route(ctx, req)
		done <- err
	}()
	<-there
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the client went away: %v", err)
	}
	if n := h.book.Len(); n != 0 {
		t.Errorf("%d booked without a request", n)
	}
}

// TestTheEngineDiffers: kvepp stops using a tokenizer whose ids differ from the engine's.
func TestTheEngineDiffers(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `[{"token_ids":[1,2,3]}]`)
	}))
	defer engine.Close()
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := newHouse(t, workers(1)...)
	h.asks(engine.URL, time.Minute)
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	check := remote.NewCheck(model.Tokenize, h.cfg.Remote["m"], 3)
	h.cfg.Checks = map[string]*remote.Check{"m": check}
	req := &Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"text"}`)}
	r := h.route(req)
	if r.Reason != ReasonKV {
		t.Errorf("before anything was compared: %s", r.Reason)
	}
	r.Free()
	check.Run(t.Context()) // returns, because the first comparison decides
	for _, body := range []string{`{"model":"m","prompt":"text"}`, `{"model":"m","prompt":[1,2]}`} {
		r = h.route(&Request{Path: "/v1/completions", Body: []byte(body)})
		if r.Reason != ReasonTokenizerDiffers || r.PromptTokens != len(body)/bytesPerToken {
			t.Errorf("%s: %+v", body, r.Decision)
		}
		r.Free()
	}
}
