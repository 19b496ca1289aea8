package main

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics"
	"kvepp/prompt/body"
)

func TestAdminToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := newTokenFile("--admin-token-file", file); err == nil {
		t.Error("newTokenFile accepts a missing file")
	}
	write(" \n")
	if _, err := newTokenFile("--admin-token-file", file); err == nil {
		t.Error("newTokenFile accepts an empty file")
	}
	write("secret\n")
	token, err := newTokenFile("--admin-token-file", file)
	if err != nil || token.token() != "secret" {
		t.Fatal(token, err)
	}
	none, err := newTokenFile("--admin-token-file", "")
	if err != nil || none.token() != "" {
		t.Fatal(none, err)
	}
	inside := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	for _, c := range []struct {
		token        *tokenFile
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
			t.Errorf("token %q, %s, header %q: %d, want %d", c.token.token(), c.path, c.header, code, c.want)
		}
	}
}

// statusOf returns the status of a request with an Authorization header.
func statusOf(h http.Handler, path, authorization string) int {
	req := httptest.NewRequest("GET", path, nil)
	req.Header.Set("Authorization", authorization)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w.Code
}

// TestTokenChanges: a new token is used after the next reload. If the file cannot be read, the listener stays guarded.
func TestTokenChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "token")
		write := func(text string) {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("one")
		token, err := newTokenFile("--admin-token-file", file)
		if err != nil {
			t.Fatal(err)
		}
		m, log := metrics.New(), new(strings.Builder)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		followTokens(ctx, reloadEvery, m, slog.New(slog.NewTextHandler(log, nil)), nil, token)
		h := guarded(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), token)
		expect := func(what, good, bad string) {
			t.Helper()
			<-time.After(3 * reloadEvery)
			synctest.Wait()
			a, b := statusOf(h, "/query", "Bearer "+good), statusOf(h, "/query", "Bearer "+bad)
			if a != http.StatusOK || b != http.StatusUnauthorized {
				t.Errorf("%s: token %q gets %d, token %q gets %d", what, good, a, bad, b)
			}
		}
		expect("at first", "one", "two")
		write("two\n")
		expect("after a change", "two", "one")
		write("")
		expect("an empty file", "two", "")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		expect("no file", "two", "one")
		write("three")
		expect("after another change", "three", "two")
		if n := strings.Count(log.String(), "is refused"); n != 1 || strings.Contains(log.String(), "three") {
			t.Errorf("%d refusals are logged, want 1; or the log has a secret:\n%s", n, log)
		}
	})
}

// TestEngineKeyChanges: engines at --tokenizer-url get the key that the file holds now.
func TestEngineKeyChanges(t *testing.T) {
	var keys []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Authorization"))
		io.WriteString(w, `[{"token_ids":[1]}]`)
	}))
	defer server.Close()
	file := filepath.Join(t.TempDir(), "key")
	o := parsed(t, []string{"--endpoints=x", "--tokenizer-url=m=" + server.URL, "--tokenizer-url-timeout=1m"}, nil)
	log := slog.New(slog.DiscardHandler)
	write := func(now string) {
		if err := os.WriteFile(file, []byte(now), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	key, err := newTokenFile("--tokenizer-url-api-key-file", file)
	if err != nil {
		t.Fatal(err)
	}
	engines, err := remoteTokenizers(o, key, metrics.New(), log)
	if err != nil {
		t.Fatal(err)
	}
	payload := []byte(`{"model":"m","prompt":"p"}`)
	request, err := body.ParseRequest("/v1/completions", payload)
	if err != nil {
		t.Fatal(err)
	}
	for _, now := range []string{"one", "two"} {
		write(now)
		key.reload(log)
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
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	token, err := newTokenFile("--admin-token-file", file)
	if err != nil {
		t.Fatal(err)
	}
	h := guarded(mux, token)
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
