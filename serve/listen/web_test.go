package listen

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/internal/metrics"
	"kvepp/serve/secrets"
)

// TestHostsOverLoopback: a request with the name of a web page that resolves to this machine is refused (DNS
// rebinding). Clients of this machine are served.
func TestHostsOverLoopback(t *testing.T) {
	handler := WebServer(
		http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
		&Hosts{names: []string{"kvepp.internal"}},
	).Handler
	for host, ok := range map[string]bool{
		"": true, "localhost": true, "localhost:9091": true, "LocalHost.:9091": true, "127.0.0.1": true,
		"127.0.0.1:9091": true, "127.1.2.3:1": true, "[::1]": true, "[::1]:9091": true,
		"kvepp.internal": true, "KVEPP.internal:80": true,
		"evil.example": false, "evil.example:9091": false, "localhost.evil.example:9091": false,
		"127.0.0.1.evil.example": false, "10.0.0.1:9091": false, "0.0.0.0": false,
		"[::2]": false, "kvepp.internal.evil": false, "localhost:9091:x": false, "2130706433": false,
	} {
		for local, checked := range map[string]bool{"127.0.0.1": true, "::1": true, "10.0.0.7": false} {
			req := httptest.NewRequest("GET", "/", nil)
			req.Host = host
			req = req.WithContext(
				context.WithValue(
					req.Context(),
					http.LocalAddrContextKey,
					net.Addr(&net.TCPAddr{IP: net.ParseIP(local), Port: 9091}),
				),
			)
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, req)
			if want := ok || !checked; (w.Code == http.StatusOK) != want ||
				!want && (w.Code != http.StatusForbidden || !strings.Contains(w.Body.String(), "--allowed-hosts")) {
				t.Errorf("Host %q at %s: %d %s", host, local, w.Code, w.Body)
			}
		}
	}
}

// TestCrossOriginRequests: a cross-origin request from a browser does not reach the handlers.
func TestCrossOriginRequests(t *testing.T) {
	handler := WebServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), new(Hosts)).Handler
	for _, c := range []struct {
		method, header, value string
		want                  int
	}{
		{"POST", "", "", 200},
		{"POST", "Sec-Fetch-Site", "cross-site", 403},
		{"POST", "Sec-Fetch-Site", "same-site", 403},
		{"POST", "Sec-Fetch-Site", "same-origin", 200},
		{"POST", "Origin", "http://evil.example", 403},
		{"POST", "Origin", "null", 403},
		{"DELETE", "Origin", "http://evil.example", 403},
		{"PATCH", "Sec-Fetch-Site", "cross-site", 403},
		{"GET", "Sec-Fetch-Site", "cross-site", 200}, // the page cannot read the response
	} {
		req := httptest.NewRequest(c.method, "/workers/a/cordon", nil)
		req.Host = "127.0.0.1:9091"
		if c.header != "" {
			req.Header.Set(c.header, c.value)
		}
		w := httptest.NewRecorder()
		if handler.ServeHTTP(w, req); w.Code != c.want {
			t.Errorf("%s with %s: %s: %d, want %d", c.method, c.header, c.value, w.Code, c.want)
		}
	}
}

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
		if code := statusOf(Guarded(inside, c.token), c.path, c.header); code != c.want {
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

func TestProfiles(t *testing.T) {
	mux := http.NewServeMux()
	HandleProfiles(mux)
	h := Guarded(mux, tokenOf(t, "secret"))
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
