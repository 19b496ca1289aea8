package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
)

func TestAdminToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if _, err := bearerToken("--admin-token-file", file); err == nil {
		t.Error("a file that is not there was taken")
	}
	if err := os.WriteFile(file, []byte(" \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := bearerToken("--admin-token-file", file); err == nil {
		t.Error("an empty file was taken")
	}
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	token, err := bearerToken("--admin-token-file", file)
	if err != nil || token != "secret" {
		t.Fatalf("%q, %v", token, err)
	}
	inside := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	for _, c := range []struct {
		token, path, header string
		want                int
	}{
		{"", "/query", "", http.StatusTeapot},
		{"secret", "/query", "", http.StatusUnauthorized},
		{"secret", "/query", "secret", http.StatusUnauthorized},
		{"secret", "/query", "Bearer wrong", http.StatusUnauthorized},
		{"secret", "/query", "Bearer secret", http.StatusTeapot},
		{"secret", "/health", "", http.StatusTeapot},
	} {
		req := httptest.NewRequest("POST", c.path, nil)
		req.Header.Set("Authorization", c.header)
		w := httptest.NewRecorder()
		guarded(inside, c.token).ServeHTTP(w, req)
		if w.Code != c.want {
			t.Errorf("token %q, %s, header %q: %d, want %d", c.token, c.path, c.header, w.Code, c.want)
		}
	}
}
