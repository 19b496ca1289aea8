package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestHostsOverLoopback: a request with the name of a web page that resolves to this machine is refused (DNS
// rebinding). Clients of this machine are served.
func TestHostsOverLoopback(t *testing.T) {
	handler := webServer(
		http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
		&webHosts{names: []string{"kvepp.internal"}},
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
	handler := webServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), new(webHosts)).Handler
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
		{"GET", "Sec-Fetch-Site", "cross-site", 200}, // the page cannot read the answer
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

// TestIdleWebConnections: with few file descriptors, idle connections do not block proxies or operators.
func TestIdleWebConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.wrapper = []string{"/bin/sh", "-c", `ulimit -n 900; exec "$0" "$@"`}
	r.start()
	r.awaitReady()
	for i := range 700 {
		for _, port := range []int{r.prom, r.admin} {
			c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
			defer c.Close()
			if i%2 == 0 {
				fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: ") // and no more
			}
		}
	}
	for range 5 { // each time over new connections
		r.awaitEndpoint("10.0.0.1:8000")
		text, err := r.metrics()
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"metrics", "admin"} {
			if !strings.Contains(
				text,
				"\nkvepp_connections_closed_total{listener=\""+name+"\",outcome=\"evicted\"} ",
			) ||
				strings.Contains(
					text,
					"\nkvepp_connections_closed_total{listener=\""+name+"\",outcome=\"evicted\"} 0\n",
				) {
				t.Errorf("no connection to %s was closed", name)
			}
		}
		resp, err := http.Get(r.adminURL() + "/workers")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Error(resp.Status)
		}
		http.DefaultClient.CloseIdleConnections()
	}
}
