// Package api holds what kvepp's HTTP APIs share: decoding and limits of request bodies, JSON replies, refusals with a
// status, and the pair of model and routing group that requests name.
//
// The APIs are in packages below it: indexer (Dynamo's standalone indexer), selector (Dynamo's selection service) and
// admin (endpoints with cordons, decisions, busy thresholds). No API sends a request to a worker.
//
// Concurrency: all functions may be called from any goroutine.
//
// Source: dynamo-kv-router 1.6.1, services.
package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net"
	"net/http"
	"regexp"
	"strings"
	"time"

	"kvepp/internal/metrics"
)

// MaxBody bounds a request's body, in bytes. Source: dynamo-kv-router 1.6.1, services.
const MaxBody = 8 << 20

// Counted returns a handler that calls mux and counts the requests to the paths that mux knows.
func Counted(mux *http.ServeMux, m *metrics.IndexerService) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_, pattern := mux.Handler(req)
		_, path, known := strings.Cut(pattern, " ")
		if !known {
			mux.ServeHTTP(w, req) // mux answers 404 or 405
			return
		}
		start := time.Now()
		status := NewStatusWriter(w)
		mux.ServeHTTP(status, req)
		m.Responded(path, req.Method, status.Status, start)
	})
}

// StatusWriter records the status of a response.
type StatusWriter struct {
	http.ResponseWriter
	Status int // 200 until WriteHeader is called
}

// NewStatusWriter returns a StatusWriter in front of w.
func NewStatusWriter(w http.ResponseWriter) *StatusWriter {
	return &StatusWriter{ResponseWriter: w, Status: http.StatusOK}
}

// WriteHeader records status and sends it.
func (w *StatusWriter) WriteHeader(status int) {
	w.Status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *StatusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Refusal is an error that Reply sends with a status of its own.
type Refusal struct {
	Status  int
	Text    string
	Details any // nil: none
}

func (r *Refusal) Error() string { return r.Text }

// Refuse returns a Refusal with a formatted text.
func Refuse(status int, format string, args ...any) error {
	return &Refusal{Status: status, Text: fmt.Sprintf(format, args...)}
}

// Missing refuses a body that lacks a required field.
func Missing(field string) error {
	return Refuse(http.StatusUnprocessableEntity, "%s is missing", field)
}

// StatusOK is the reply to requests that return no data.
var StatusOK = map[string]string{"status": "ok"}

// Reply writes v as JSON. If err is not nil, Reply writes {"error": TEXT} instead, with the status and the details of a
// Refusal, or 500.
func Reply(w http.ResponseWriter, status int, v any, err error) {
	if err != nil {
		status = http.StatusInternalServerError
		body := map[string]any{"error": err.Error()}
		if r := (*Refusal)(nil); errors.As(err, &r) {
			if status = r.Status; r.Details != nil {
				body["details"] = r.Details
			}
		}
		v = body
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// An error here means that the client closed the connection.
	_ = json.NewEncoder(w).Encode(v)
}

// embeddedStruct matches the names of embedded structs in the path of a field, which encoding/json includes. Go's names
// have a capital letter; the keys of the bodies have none.
var embeddedStruct = regexp.MustCompile(`\w*[A-Z]\w*\.`)

// ReadBody decodes a request's JSON body into v. It ignores unknown keys, as Dynamo does.
func ReadBody(w http.ResponseWriter, req *http.Request, v any) error {
	if kind, _, err := mime.ParseMediaType(req.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return Refuse(http.StatusUnsupportedMediaType, "the body must be JSON, and the Content-Type application/json")
	}
	err := WithBody(w, req, func(body []byte) error { return decode(body, v) })
	syntax, kind, refused := (*json.SyntaxError)(nil), (*json.UnmarshalTypeError)(nil), (*Refusal)(nil)
	switch {
	case errors.As(err, &refused):
		return err
	case errors.As(err, &syntax):
		return Refuse(http.StatusBadRequest, "the body is not JSON: byte %d: %v", syntax.Offset, err)
	case errors.As(err, &kind) && kind.Field == "":
		return Refuse(http.StatusUnprocessableEntity, "the body must be a JSON object, not %s", kind.Value)
	case errors.As(err, &kind):
		return Refuse(http.StatusUnprocessableEntity,
			"%s: %s has the wrong type or is out of range", embeddedStruct.ReplaceAllString(kind.Field, ""), kind.Value)
	case err != nil:
		return Refuse(http.StatusUnprocessableEntity, "%v", err)
	}
	return nil
}

// Dialable returns the address at which a client on the same machine reaches a server that listens at address.
func Dialable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && (host == "" || ip != nil && ip.IsUnspecified()) {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return address
}
