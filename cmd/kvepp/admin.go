package main

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
)

// adminToken reads the token that requests to the admin address must bring; "" when none is asked for.
func adminToken(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("--admin-token-file: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", errors.New("--admin-token-file: the file is empty; put a secret into it, in one line")
	}
	return token, nil
}

// webServer returns a server whose clients cannot hold it up: a request must come, and its answer be taken, within a minute.
// What takes longer by nature, as a dump does, sets deadlines of its own.
func webServer(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute, WriteTimeout: time.Minute, IdleTimeout: 5 * time.Minute}
}

// checkPeers says which of the URLs is none.
func checkPeers(flag string, peers []string) error {
	for _, peer := range peers {
		if u, err := url.Parse(peer); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return fmt.Errorf("%s %q: must look like http://HOST:PORT", flag, peer)
		}
	}
	return nil
}

// guarded lets requests through that bring the token, and whoever asks for health.
func guarded(next http.Handler, token string) http.Handler {
	if token == "" {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		given, bearer := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
		if req.URL.Path != "/health" && !(bearer && subtle.ConstantTimeCompare([]byte(given), []byte(token)) == 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the header \"Authorization: Bearer TOKEN\" must bring the content of --admin-token-file", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, req)
	})
}
