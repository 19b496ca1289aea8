// Package service answers HTTP requests about the index, which worker holds how much of a prompt; about decisions and
// endpoints; and those that have workers chosen and booked for prompts that others send.
//
// It owns the requests and answers of Dynamo's standalone indexer, field for field: the part that only reads, which
// `kvepp serve` offers too, and the registry of workers, models and peers of `kvepp indexer`; those of Dynamo's
// selection service, which are `kvepp select`'s; and /debug/decisions and /workers of `kvepp serve`. It never sends a
// request to a worker, and never touches the index but through package indexer and its feed.
//
// Concurrency: handlers are called from any goroutine.
//
// Source: dynamo-kv-router 1.6.1, services::indexer and services::selection, and what `python -m dynamo.indexer` and
// `python -m dynamo.select_service` answer.
package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strings"
	"time"

	"kvepp/internal/metrics"
)

// maxBody bounds a request's body, in bytes. Source: dynamo-kv-router 1.6.1, services.
const maxBody = 8 << 20

// defaultGroup is the routing group of requests that name none.
const defaultGroup = "default"

// Counted is mux with every request to a known path counted.
func Counted(mux *http.ServeMux, m *metrics.IndexerService) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_, pattern := mux.Handler(req)
		_, path, known := strings.Cut(pattern, " ")
		if !known {
			mux.ServeHTTP(w, req) // it answers 404 or 405
			return
		}
		start := time.Now()
		status := &statusWriter{ResponseWriter: w, status: http.StatusOK}
		mux.ServeHTTP(status, req)
		m.Answered(path, req.Method, status.status, start)
	})
}

// statusWriter remembers the status.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// refusal is an error with the HTTP status that says it.
type refusal struct {
	status  int
	text    string
	details any // if there are any
}

func (r *refusal) Error() string { return r.text }

func refuse(status int, format string, args ...any) error {
	return &refusal{status: status, text: fmt.Sprintf(format, args...)}
}

// answer writes v, or err as {"error": …}, with its details if it has any.
func answer(w http.ResponseWriter, status int, v any, err error) {
	if err != nil {
		status = http.StatusInternalServerError
		body := map[string]any{"error": err.Error()}
		if r := (*refusal)(nil); errors.As(err, &r) {
			if status = r.status; r.details != nil {
				body["details"] = r.details
			}
		}
		v = body
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// An error here is the client's going away.
	_ = json.NewEncoder(w).Encode(v)
}

// shared takes the names of parts that several bodies have in common out of a field's, where the decoder puts them.
var shared = strings.NewReplacer("asked.", "", "promptFields.", "", "workerFields.", "")

// read decodes a request's JSON body into v. Keys that v does not have are ignored, as Dynamo does.
func read(w http.ResponseWriter, req *http.Request, v any) error {
	if kind, _, err := mime.ParseMediaType(req.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return refuse(http.StatusUnsupportedMediaType, "the body must be JSON, and the Content-Type application/json")
	}
	err := withBody(w, req, func(body []byte) error { return decode(body, v) })
	syntax, kind, refused := (*json.SyntaxError)(nil), (*json.UnmarshalTypeError)(nil), (*refusal)(nil)
	switch {
	case errors.As(err, &refused):
		return err
	case errors.As(err, &syntax):
		return refuse(http.StatusBadRequest, "the body is not JSON: byte %d: %v", syntax.Offset, err)
	case errors.As(err, &kind) && kind.Field == "":
		return refuse(http.StatusUnprocessableEntity, "the body must be a JSON object, not %s", kind.Value)
	case errors.As(err, &kind):
		return refuse(
			http.StatusUnprocessableEntity,
			"%s: %s has the wrong type or is out of range",
			shared.Replace(kind.Field),
			kind.Value,
		)
	case err != nil:
		return refuse(http.StatusUnprocessableEntity, "%v", err)
	}
	return nil
}
