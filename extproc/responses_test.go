package extproc

import (
	"testing"
	"time"

	"kvepp/router"
	"kvepp/router/session"
	"kvepp/scoring"
)

// The id of a response is learned as soon as it comes, streamed or not, and from nothing else.
func TestResponseIDsAreLearned(t *testing.T) {
	const sse, created = "text/event-stream", "event: response.created\ndata: " +
		`{"response":{"id":"resp_1","status":"in_progress"},"type":"response.created"}` + "\n\n"
	for name, c := range map[string]struct {
		path, body, status, contentType, encoding string
		pieces                                    []string
		learned                                   bool
	}{
		"whole":      {"", "", "200", "application/json", "", []string{`{"id":"re`, `sp_1","output":[`}, true},
		"stream":     {"", "", "200", sse, "", []string{created}, true},
		"not stored": {"", `,"store":false`, "200", sse, "", []string{created}, false},
		"an error":   {"", "", "404", "application/json", "", []string{`{"id":"resp_1"}`}, false},
		"compressed": {"", "", "200", "application/json", "gzip", []string{`{"id":"resp_1"}`}, false},
		"another API": {"/v1/chat/completions", `,"messages":[{"role":"user","content":"-"}]`, "200", "", "",
			[]string{`{"id":"resp_1"}`}, false},
	} {
		b := newBench(t, Config{})
		table := session.NewTable(session.Config{TTL: time.Hour})
		r := router.New(router.Config{Scoring: scoring.DefaultConfig(), Responses: table}, b.pool, b.index, b.book,
			b.metrics, b.log)
		if c.path == "" {
			c.path = "/v1/responses"
		}
		route, err := r.Route(t.Context(),
			&router.Request{Path: c.path, Body: []byte(`{"model":"m","input":"-"` + c.body + `}`)})
		if err != nil {
			t.Fatal(err)
		}
		x := &exchange{Server: NewServer(Config{}, r, b.metrics, b.log), route: route}
		x.observe(&effect{Status: c.status, ContentType: c.contentType, ContentEncoding: c.encoding})
		for _, piece := range c.pieces {
			x.observe(&effect{Body: []byte(piece)})
		}
		if _, learned := table.Find(session.ResponseKeyOf("resp_1")); learned != c.learned || x.responseID != nil {
			t.Errorf("%s: learned is %v, want %v", name, learned, c.learned)
		}
		x.end(t.Context())
	}
}
