package web

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net/http"
	"sync"
	"time"
)

const (
	// Cookie is the name of the cookie that holds a browser's session.
	Cookie = "kvepp_session"

	maxSessions  = 64             // the oldest ends when another begins
	sessionLasts = 12 * time.Hour // from the login
	maxForm      = 4 << 10        // bytes of a login
)

// Guard lets browsers in that gave the token once. The zero value is not valid: call NewGuard.
type Guard struct {
	token func() string // the current one

	mu       sync.Mutex // guards sessions
	sessions []session  // the oldest first
}

// session is a browser that gave the token. Its id is in the cookie; the token is not.
type session struct {
	id    string
	token [sha256.Size]byte // of the token that it gave: the session ends when the token changes
	ends  time.Time
}

// NewGuard returns a guard without sessions. token returns the current token.
func NewGuard(token func() string) *Guard { return &Guard{token: token} }

// Protect passes requests with a valid session, those for the login form, and those to log in or out. All others go to
// other, which checks their own credentials; but a browser that asks for the page is sent to the login form.
func (g *Guard) Protect(next, other http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		path := req.URL.Path
		switch {
		case path == "/login" && req.Method == http.MethodPost:
			g.login(w, req)
		case path == "/logout" && req.Method == http.MethodPost:
			g.logout(w, req)
		case public[path] && (req.Method == http.MethodGet || req.Method == http.MethodHead), g.knows(req):
			next.ServeHTTP(w, req)
		case path == "/" && req.Header.Get("Authorization") == "":
			restrict(w)
			http.Redirect(w, req, "/login", http.StatusSeeOther)
		default:
			other.ServeHTTP(w, req)
		}
	})
}

// knows reports whether a request has a valid session. Other sites' requests have none, with any cookie.
func (g *Guard) knows(req *http.Request) bool {
	if site := req.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" {
		return false
	}
	cookie, err := req.Cookie(Cookie)
	if err != nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.dropEnded()
	known := 0
	for i := range g.sessions {
		known |= subtle.ConstantTimeCompare([]byte(g.sessions[i].id), []byte(cookie.Value))
	}
	return known == 1
}

// dropEnded drops sessions that are too old, or began with another token. The caller holds mu.
func (g *Guard) dropEnded() {
	now, token := time.Now(), sha256.Sum256([]byte(g.token()))
	kept := g.sessions[:0]
	for _, s := range g.sessions {
		if now.Before(s.ends) && s.token == token {
			kept = append(kept, s)
		}
	}
	g.sessions = kept
}

func (g *Guard) login(w http.ResponseWriter, req *http.Request) {
	req.Body = http.MaxBytesReader(w, req.Body, maxForm)
	given, token := req.PostFormValue("token"), g.token()
	if token == "" || subtle.ConstantTimeCompare([]byte(given), []byte(token)) != 1 {
		restrict(w)
		http.Redirect(w, req, "/login#wrong", http.StatusSeeOther)
		return
	}
	s := session{id: newID(), token: sha256.Sum256([]byte(token)), ends: time.Now().Add(sessionLasts)}
	g.mu.Lock()
	g.dropEnded()
	if len(g.sessions) >= maxSessions {
		g.sessions = g.sessions[1:]
	}
	g.sessions = append(g.sessions, s)
	g.mu.Unlock()
	setCookie(w, s.id, int(sessionLasts.Seconds()))
	http.Redirect(w, req, "/", http.StatusSeeOther)
}

func (g *Guard) logout(w http.ResponseWriter, req *http.Request) {
	if cookie, err := req.Cookie(Cookie); err == nil {
		g.mu.Lock()
		kept := g.sessions[:0]
		for _, s := range g.sessions {
			if subtle.ConstantTimeCompare([]byte(s.id), []byte(cookie.Value)) != 1 {
				kept = append(kept, s)
			}
		}
		g.sessions = kept
		g.mu.Unlock()
	}
	setCookie(w, "", -1)
	http.Redirect(w, req, "/login", http.StatusSeeOther)
}

// setCookie sets the cookie for so many seconds; below 0 it removes it. The admin address has no TLS, so the cookie
// cannot be Secure.
func setCookie(w http.ResponseWriter, value string, seconds int) {
	restrict(w)
	http.SetCookie(w, &http.Cookie{Name: Cookie, Value: value, Path: "/", MaxAge: seconds, HttpOnly: true,
		SameSite: http.SameSiteStrictMode})
}

// newID returns 256 random bits.
func newID() string {
	var b [32]byte
	rand.Read(b[:]) // never fails, see crypto/rand
	return base64.RawURLEncoding.EncodeToString(b[:])
}
