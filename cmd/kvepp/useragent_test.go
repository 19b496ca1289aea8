package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/internal/useragent"
)

// TestUserAgent: a kvepp process names itself and its version to engines, and commands name themselves to a hub and to
// a running kvepp.
func TestUserAgent(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]string{} // by path; guarded by mu
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.URL.Path] = r.UserAgent()
		mu.Unlock()
		http.NotFound(w, r)
	}))
	t.Cleanup(server.Close)
	address := strings.TrimPrefix(server.URL, "http://")
	useragent.Set("v7.8.9")
	t.Cleanup(func() { useragent.Set("") })
	for _, args := range [][]string{
		{"workers", "--admin-address", address},
		{"fetch", "--hub", server.URL, "--to", t.TempDir(), "m=org/model"},
	} {
		if status, _, _ := runWith(nil, args...); status == 0 {
			t.Errorf("kvepp %v succeeded at a server that knows nothing", args)
		}
	}
	for _, path := range []string{"/workers", "/api/models/org/model/revision/main"} {
		if seen[path] != "kvepp/7.8.9" {
			t.Errorf("%s: User-Agent %q of %v", path, seen[path], seen)
		}
	}
	r := reserve(t)
	r.writeEndpoints(fmt.Sprintf("endpoints:\n- {name: a, address: '%s'}\n", address))
	r.start("--engine=vllm")
	t.Cleanup(r.Kill)
	r.until("kvepp to ask for metrics", time.Minute, func() error {
		mu.Lock()
		defer mu.Unlock()
		for _, path := range []string{"/metrics", "/version"} {
			if agent := seen[path]; !strings.HasPrefix(agent, "kvepp/") || strings.ContainsAny(agent, "() ") {
				return fmt.Errorf("%s: User-Agent %q of %v", path, agent, seen)
			}
		}
		return nil
	})
}
