package web

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
)

// TestFiles: every file is served with the headers that restrict it, and no page has inline script or style.
func TestFiles(t *testing.T) {
	mux := http.NewServeMux()
	Handle(mux)
	inline := regexp.MustCompile(`(?i)<script(\s[^>]*)?>[^<]|<style|\son\w+=|\sstyle=|javascript:`)
	for pattern, file := range files {
		path := strings.TrimSuffix(strings.TrimPrefix(pattern, "GET "), "{$}")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if w.Code != http.StatusOK || w.Header().Get("Content-Type") != file.kind || w.Body.Len() == 0 ||
			w.Header().Get("Content-Security-Policy") != policy ||
			w.Header().Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d %v", path, w.Code, w.Header())
		}
		if found := inline.FindString(w.Body.String()); strings.HasSuffix(file.name, ".html") && found != "" {
			t.Errorf("%s has %q, which the policy forbids", file.name, found)
		}
		if strings.HasSuffix(file.name, ".js") {
			for _, forbidden := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
				"eval(", "https://"} {
				if strings.Contains(w.Body.String(), forbidden) {
					t.Errorf("%s uses %s", file.name, forbidden)
				}
			}
		}
	}
	w := httptest.NewRecorder()
	if mux.ServeHTTP(w, httptest.NewRequest("GET", "/other", nil)); w.Code != http.StatusNotFound {
		t.Errorf("another path: %d", w.Code)
	}
}

// guarded is a guard before a handler that answers 200, and before one that answers 401.
func guarded(token *string) (g *Guard, h http.Handler) {
	g = NewGuard(func() string { return *token })
	response := func(status int) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
	}
	return g, g.Protect(response(http.StatusOK), response(http.StatusUnauthorized))
}

func ask(h http.Handler, method, path, form, cookie string, headers ...string) *http.Response {
	req := httptest.NewRequest(method, path, strings.NewReader(form))
	if form != "" {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	if cookie != "" {
		req.AddCookie(&http.Cookie{Name: Cookie, Value: cookie})
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w.Result()
}

func logIn(t *testing.T, h http.Handler, token string) (cookie string) {
	t.Helper()
	resp := ask(h, "POST", "/login", url.Values{"token": {token}}.Encode(), "")
	for _, c := range resp.Cookies() {
		if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || strings.Contains(c.Value, token) {
			t.Errorf("cookie %+v", c)
		}
		cookie = c.Value
	}
	if resp.StatusCode != http.StatusSeeOther {
		t.Errorf("login: %s", resp.Status)
	}
	return cookie
}

// TestLogin: a browser that gave the token once has a session, until it logs out or the token changes.
func TestLogin(t *testing.T) {
	token := "secret"
	_, h := guarded(&token)
	status := func(want int, method, path, cookie string, headers ...string) {
		t.Helper()
		if resp := ask(h, method, path, "", cookie, headers...); resp.StatusCode != want {
			t.Errorf("%s %s with cookie %q, %v: %s, want %d", method, path, cookie, headers, resp.Status, want)
		}
	}
	status(http.StatusSeeOther, "GET", "/", "")
	status(http.StatusUnauthorized, "GET", "/", "", "Authorization", "Bearer wrong")
	status(http.StatusUnauthorized, "GET", "/debug/fleet", "")
	status(http.StatusUnauthorized, "GET", "/web/views.js", "")
	status(http.StatusUnauthorized, "GET", "/debug/fleet", "guessed")
	status(http.StatusOK, "GET", "/login", "")
	status(http.StatusOK, "GET", "/web/kvepp.css", "")
	status(http.StatusUnauthorized, "POST", "/web/kvepp.css", "")
	if cookie := logIn(t, h, "wrong"); cookie != "" {
		t.Errorf("a wrong token gives the cookie %q", cookie)
	}
	if cookie := logIn(t, h, ""); cookie != "" {
		t.Errorf("no token gives the cookie %q", cookie)
	}
	cookie := logIn(t, h, "secret")
	status(http.StatusOK, "GET", "/debug/fleet", cookie)
	status(http.StatusOK, "GET", "/debug/fleet", cookie, "Sec-Fetch-Site", "same-origin")
	status(http.StatusOK, "POST", "/workers/a/cordon", cookie)
	status(http.StatusUnauthorized, "GET", "/debug/fleet", cookie, "Sec-Fetch-Site", "cross-site")
	status(http.StatusUnauthorized, "GET", "/debug/fleet", cookie, "Sec-Fetch-Site", "same-site")
	status(http.StatusUnauthorized, "GET", "/logout", "") // no change by GET
	status(http.StatusSeeOther, "POST", "/logout", cookie)
	status(http.StatusUnauthorized, "GET", "/debug/fleet", cookie)
	cookie = logIn(t, h, "secret")
	token = "next"
	status(http.StatusUnauthorized, "GET", "/debug/fleet", cookie)
	token = ""
	if cookie := logIn(t, h, ""); cookie != "" {
		t.Errorf("without a token, %q is a session", cookie)
	}
}

// TestSessionsAreBounded: beyond the bound, the oldest session ends.
func TestSessionsAreBounded(t *testing.T) {
	token := "secret"
	g, h := guarded(&token)
	first := logIn(t, h, token)
	second := logIn(t, h, token)
	for range maxSessions - 1 {
		logIn(t, h, token)
	}
	for cookie, want := range map[string]int{first: http.StatusUnauthorized, second: http.StatusOK} {
		if resp := ask(h, "GET", "/debug/fleet", "", cookie); resp.StatusCode != want {
			t.Errorf("%s, want %d", resp.Status, want)
		}
	}
	if len(g.sessions) != maxSessions {
		t.Errorf("%d sessions", len(g.sessions))
	}
	form := strings.Repeat("x", 2*maxForm)
	if resp := ask(h, "POST", "/login", "token="+form, ""); len(resp.Cookies()) > 0 {
		t.Error("a form above the bound logs in")
	}
}
