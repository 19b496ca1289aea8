package main

import (
	"net/http"
	"sync/atomic"
)

// faults lets a test make the engine fail: POST /fault?mode=MODE. On loopback only the process's own user reaches it;
// in a Pod, only the cluster.
type faults struct{ mode atomic.Value }

// The fault modes; "" means healthy.
const (
	errors503   = "503"   // all requests except this one are answered 503
	errors500   = "500"   // only API requests are answered 500, not health checks and metrics
	resetsAfter = "reset" // API responses break off after their headers
)

// around returns a handler that fails in the current mode, and otherwise calls next.
func (f *faults) around(next http.Handler) http.Handler {
	f.mode.Store("")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/fault" {
			f.mode.Store(r.URL.Query().Get("mode"))
			return
		}
		api := r.Method == http.MethodPost
		switch mode := f.mode.Load(); {
		case mode == errors503:
			http.Error(w, `{"error":{"message":"the engine is dead","code":503}}`, http.StatusServiceUnavailable)
		case mode == errors500 && api:
			http.Error(w, `{"error":{"message":"the engine is dead","code":500}}`, http.StatusInternalServerError)
		case mode == resetsAfter && api:
			w.Header().Set("content-type", "text/event-stream")
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		default:
			next.ServeHTTP(w, r)
		}
	})
}
