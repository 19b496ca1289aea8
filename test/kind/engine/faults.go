package main

import (
	"net/http"
	"sync/atomic"
)

// faults lets a test have the engine fail: POST /fault?mode=MODE. Only the process's own user reaches it on loopback;
// in a Pod, only the cluster.
type faults struct{ mode atomic.Value }

// The modes beside "", which is health.
const (
	errors503   = "503"   // every request but this one is answered 503
	errors500   = "500"   // the API's requests alone are answered 500: health checks and metrics are not
	resetsAfter = "reset" // answers of the API are broken off after their headers
)

// around returns a handler that fails as it is told, and else serves as next.
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
