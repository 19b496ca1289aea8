// Package web is the page on the admin address of `kvepp serve`: embedded files that read the JSON of the admin API,
// and the login for it.
//
// It owns the files, the headers that restrict what a browser does with them, and the sessions of browsers. It never
// reads or shows anything of a prompt, and holds no data of its own: the script in the files asks the admin API.
//
// Concurrency: handlers are called from any goroutine.
package web

import (
	"embed"
	"net/http"
	"strconv"
)

//go:embed assets
var assets embed.FS

// policy is the Content-Security-Policy of every response: only the page's own files, no inline script or style, no
// framing, and no markup from text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; " +
	"base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"

// files are the page's files by path.
var files = map[string]struct{ name, kind string }{
	"GET /{$}":           {"index.html", "text/html; charset=utf-8"},
	"GET /login":         {"login.html", "text/html; charset=utf-8"},
	"GET /web/kvepp.js":  {"kvepp.js", "text/javascript; charset=utf-8"},
	"GET /web/views.js":  {"views.js", "text/javascript; charset=utf-8"},
	"GET /web/kvepp.css": {"kvepp.css", "text/css; charset=utf-8"},
	"GET /web/kvepp.svg": {"kvepp.svg", "image/svg+xml"},
}

// public are the paths that need no token: what the login form needs.
var public = map[string]bool{"/login": true, "/web/kvepp.css": true, "/web/kvepp.svg": true, "/health": true}

// Handle adds the page and its files.
func Handle(mux *http.ServeMux) {
	for pattern, file := range files {
		text, err := assets.ReadFile("assets/" + file.name)
		if err != nil {
			panic(err) // a mistake in this package
		}
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
			restrict(w)
			w.Header().Set("Content-Type", file.kind)
			w.Header().Set("Content-Length", strconv.Itoa(len(text)))
			_, _ = w.Write(text) // an error means that the client closed the connection
		})
	}
}

// restrict sets the headers of the page's own responses.
func restrict(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}
