package main

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/prompt/body"
)

// TestEngineKeyChanges: engines at --tokenizer-url get the present key.
func TestEngineKeyChanges(t *testing.T) {
	var keys []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Authorization"))
		io.WriteString(w, `[{"token_ids":[1]}]`)
	}))
	defer server.Close()
	var key string
	o := parsed(t, []string{"--endpoints=x", "--tokenizer-url=m=" + server.URL}, nil)
	o.models.URLTimeout = time.Minute
	engines, err := o.models.Remote(func() string { return key }, metrics.New(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	payload := []byte(`{"model":"m","prompt":"p"}`)
	request, err := body.ParseRequest("/v1/completions", payload)
	if err != nil {
		t.Fatal(err)
	}
	for _, key = range []string{"one", "two"} {
		if _, err := engines["m"].Tokenize(t.Context(), request, payload); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(keys, []string{"Bearer one", "Bearer two"}) {
		t.Errorf("%q", keys)
	}
}
