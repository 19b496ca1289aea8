package main

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"kvepp/internal/metrics"
	"kvepp/prompt/body"
	"kvepp/serve/secrets"
)

func TestAdminToken(t *testing.T) {
	none, token := tokenOf(t, ""), tokenOf(t, "secret")
	inside := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	for _, c := range []struct {
		token        *secrets.Token
		path, header string
		want         int
	}{
		{none, "/query", "", http.StatusTeapot},
		{token, "/query", "", http.StatusUnauthorized},
		{token, "/query", "secret", http.StatusUnauthorized},
		{token, "/query", "Bearer wrong", http.StatusUnauthorized},
		{token, "/query", "Bearer secret", http.StatusTeapot},
		{token, "/health", "", http.StatusTeapot},
	} {
		if code := statusOf(guarded(inside, c.token), c.path, c.header); code != c.want {
			t.Errorf("token %q, %s, header %q: %d, want %d", c.token.Text(), c.path, c.header, code, c.want)
		}
	}
}

// tokenOf returns the token of a file with this text; nil without text.
func tokenOf(t *testing.T, text string) *secrets.Token {
	t.Helper()
	file := ""
	if text != "" {
		file = filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	token, err := secrets.Follow(t.Context(), metrics.New(), slog.New(slog.DiscardHandler)).
		Token("--admin-token-file", file)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// statusOf returns the status of a request with an Authorization header.
func statusOf(h http.Handler, path, authorization string) int {
	req := httptest.NewRequest("GET", path, nil)
	req.Header.Set("Authorization", authorization)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w.Code
}

// TestEngineKeyChanges: engines at --tokenizer-url get the present key.
func TestEngineKeyChanges(t *testing.T) {
	var keys []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Authorization"))
		io.WriteString(w, `[{"token_ids":[1]}]`)
	}))
	defer server.Close()
	var key string
	o := parsed(t, []string{"--endpoints=x", "--tokenizer-url=m=" + server.URL, "--tokenizer-url-timeout=1m"}, nil)
	engines, err := remoteTokenizers(o, func() string { return key }, metrics.New(), slog.New(slog.DiscardHandler))
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

func TestProfiles(t *testing.T) {
	mux := http.NewServeMux()
	handleProfiles(mux)
	h := guarded(mux, tokenOf(t, "secret"))
	if code := statusOf(h, "/debug/pprof/cmdline", "Bearer secret"); code != http.StatusNotFound {
		t.Errorf("/debug/pprof/cmdline answers %d, want 404", code)
	}
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/goroutine?debug=1",
		"/debug/pprof/symbol"} {
		if with, without := statusOf(h, path, "Bearer secret"), statusOf(h, path, ""); with != http.StatusOK ||
			without != http.StatusUnauthorized {
			t.Errorf("%s: %d with the token, %d without", path, with, without)
		}
	}
}
