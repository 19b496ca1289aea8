package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// hold opens a connection and sends text. The test's end closes it.
func hold(t *testing.T, port int, text string) {
	t.Helper()
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.(*net.TCPConn).SetReadBuffer(1 << 10)
	_, _ = io.WriteString(c, text) // kvepp may have closed it
}

// withoutRedirects is a client that opens a connection for each request, as an operator's first one does.
var withoutRedirects = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Timeout:       time.Minute,
}

// TestSlowLogins: clients without the token, which are slow to send headers or bodies and connect again and again,
// cannot keep the operator out of the admin address.
func TestSlowLogins(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.wrapper = []string{"/bin/sh", "-c", `ulimit -n 900; exec "$0" "$@"`} // 56 connections
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("s3cr3t"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.start("--admin-token-file=" + token)
	r.awaitReady()
	const login = "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
	for what, text := range map[string]string{
		"bodies":        login + "Content-Length: 99\r\n\r\ntoken=",
		"no bodies":     login + "Content-Length: 99\r\n\r\n",
		"chunks":        login + "Transfer-Encoding: chunked\r\n\r\n5\r\ntok",
		"headers":       login,
		"other bodies":  "POST /debug/pick HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
		"second bodies": "GET /login HTTP/1.1\r\nHost: localhost\r\n\r\n" + login + "Content-Length: 9\r\n\r\n",
	} {
		for range 200 {
			hold(t, r.admin, text)
		}
		in := func() error {
			resp, err := withoutRedirects.PostForm(r.adminURL()+"/login", url.Values{"token": {"s3cr3t"}})
			if err != nil {
				return err
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusSeeOther || len(resp.Cookies()) == 0 {
				return fmt.Errorf("%s: %v", resp.Status, resp.Header)
			}
			req, _ := http.NewRequest(http.MethodGet, r.adminURL()+"/workers", nil)
			req.AddCookie(resp.Cookies()[0])
			if resp, err = withoutRedirects.Do(req); err != nil {
				return err
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return errors.New(resp.Status)
			}
			return nil
		}
		for range 10 { // kvepp reads the slow requests meanwhile
			if _, err := r.metrics(); err != nil {
				t.Fatal(err)
			}
		}
		for range 5 {
			if err := in(); err != nil {
				t.Errorf("the operator's login beside slow %s: %v", what, err)
			}
			hold(t, r.admin, text)
		}
	}
}

// TestUnreadMetrics: with 1,500 workers the page is larger than what sockets buffer. Readers that do not read do not
// keep out others.
func TestUnreadMetrics(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	var text strings.Builder
	text.WriteString("endpoints:\n")
	for i := range 1500 {
		fmt.Fprintf(&text, "- {name: %s-%d, address: \"10.0.%d.%d:8000\"}\n", strings.Repeat("w", 40), i, i/250, i%250)
	}
	r.writeEndpoints(text.String())
	r.start()
	r.awaitReady()
	for range 40 {
		hold(t, r.prom, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
	}
	r.eventually("/metrics", func() error { // kvepp writes the other pages first
		resp, err := withoutRedirects.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", r.prom))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		page, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(page), "w-1499") {
			return fmt.Errorf("%s, %d bytes, %w", resp.Status, len(page), err)
		}
		return nil
	})
}
