package extproc

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvepp/extproc/extproctest"
	"kvepp/internal/logtest"
	"kvepp/router"
	"kvepp/router/budget"
)

// lines waits until the access log has n lines, and returns them.
func lines(t *testing.T, log *logtest.Log, n int) (all []map[string]any) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); log.Count("\n") < n; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the access log does not have %d lines:\n%s", n, log)
		}
	}
	for line := range strings.Lines(log.String()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		all = append(all, fields)
	}
	return all
}

// TestAccessLog: each request has one line, with any outcome, without the client's private data.
func TestAccessLog(t *testing.T) {
	const secret = "leafhopper"
	usage := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":3," +
		"\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n"
	completion := `{"choices":[{"text":"` + secret + `"}],"usage":{"prompt_tokens":20,"completion_tokens":3}}`
	header := func(method, path string) map[string]string {
		return map[string]string{
			":method":       method,
			":path":         path + "?key=" + secret,
			"x-request-id":  "id-1",
			"authorization": "Bearer " + secret,
		}
	}
	body := func(model string) [][]byte {
		return [][]byte{fmt.Appendf(nil, `{"model":%q,"messages":[{"role":"user","content":%q}]}`, model, secret), nil}
	}
	stream := func(status string, pieces ...string) func(*extproctest.Routed) extproctest.Response {
		r := response(pieces...)(nil)
		r.Header[":status"] = status
		return func(*extproctest.Routed) extproctest.Response { return r }
	}
	type fields = map[string]any
	routed := fields{
		"level":                   "INFO",
		"msg":                     "request",
		"request_id":              "id-1",
		"method":                  "POST",
		"path":                    "/v1/chat/completions",
		"model":                   "m",
		"reason":                  "no_tokenizer",
		"dp_rank":                 0.0,
		"predicted_cached_tokens": 0.0,
		"waited":                  0.0,
	}
	with := func(base fields, more fields) fields {
		all := fields{}
		for _, from := range []fields{base, more} {
			for k, v := range from {
				all[k] = v
			}
		}
		return all
	}
	for _, c := range []struct {
		name       string
		cfg        Config
		request    extproctest.Request
		want       fields // but for the worker, times and estimates
		firstToken bool
	}{
		{"a streamed response", Config{}, extproctest.Request{Header: header("POST", "/v1/chat/completions"),
			Body:     body("m"),
			Upstream: stream("200", roleEvent, contentEvent(secret), usage, "data: [DONE]\n\n", "")},
			with(routed, fields{"status": 200.0, "reported_cached_tokens": 16.0, "output_tokens": 3.0}), true},
		{"a response in one piece", Config{}, extproctest.Request{Header: header("POST", "/v1/chat/completions"),
			Body: body("m"),
			Upstream: func(*extproctest.Routed) extproctest.Response {
				return extproctest.Response{Header: map[string]string{":status": "200",
					"content-type": "application/json"}, Body: [][]byte{[]byte(completion), nil}}
			}}, with(routed, fields{"status": 200.0, "output_tokens": 3.0}), false},
		{"an engine's error", Config{}, extproctest.Request{Header: header("POST", "/v1/chat/completions"),
			Body: body("m"), Upstream: stream("500", "")},
			with(routed, fields{"status": 500.0}), false},
		{"a client that goes away", Config{}, extproctest.Request{Header: header("POST", "/v1/chat/completions"),
			Body: body("m")},
			with(routed, fields{"status": 0.0}), false},
		{"no body", Config{}, extproctest.Request{Header: header("GET", "/v1/models"), Upstream: stream("200", "")},
			with(routed, fields{"method": "GET", "path": "/v1/models", "reason": "no_body", "model": nil,
				"status": 200.0}), false},
		{"not JSON", Config{}, extproctest.Request{Header: header("POST", "/v1/chat/completions"),
			Body: [][]byte{[]byte("{" + secret), nil}},
			fields{"level": "INFO", "msg": "request", "request_id": "id-1", "method": "POST",
				"path": "/v1/chat/completions", "reason": "invalid_json", "status": 400.0}, false},
		{"a model without endpoints", Config{}, extproctest.Request{Header: header("POST", "/v1/chat/completions"),
			Body: body("missing")},
			fields{"level": "INFO", "msg": "request", "request_id": "id-1", "method": "POST",
				"path": "/v1/chat/completions", "model": "missing", "reason": "model_not_found", "status": 404.0},
			false},
		{"a body that is too large", Config{MaxBodyBytes: 10},
			extproctest.Request{Header: header("POST", "/v1/chat/completions"), Body: body("m")},
			fields{"level": "INFO", "msg": "request", "request_id": "id-1", "method": "POST",
				"path": "/v1/chat/completions", "reason": "body_too_large", "status": 413.0}, false},
		{"too many bytes held", Config{Memory: budget.New(heldOf(10)), OverloadStatus: 503},
			extproctest.Request{Header: header("POST", "/v1/chat/completions"), Body: body("m")},
			fields{"level": "INFO", "msg": "request", "request_id": "id-1", "method": "POST",
				"path": "/v1/chat/completions", "reason": "too_many_bytes", "status": 503.0}, false},
	} {
		var log logtest.Log
		c.cfg.AccessLog = slog.New(slog.NewJSONHandler(&log, nil))
		b := newBench(t, c.cfg)
		began := time.Now()
		if _, err := b.Do(t.Context(), &c.request); err != nil {
			t.Fatal(c.name, err)
		}
		got := lines(t, &log, 1)[0]
		took := float64(time.Since(began))
		if n := log.Count("\n"); n != 1 {
			t.Errorf("%s: %d lines", c.name, n)
		}
		if duration, _ := got["duration"].(float64); !(duration > 0 && duration <= took) {
			t.Errorf("%s: duration %v of %v", c.name, got["duration"], took)
		}
		if first, _ := got["time_to_first_token"].(float64); c.firstToken != (first > 0) ||
			first > got["duration"].(float64) {
			t.Errorf("%s: time to first token %v, duration %v", c.name, got["time_to_first_token"], got["duration"])
		}
		worker, at := got["worker"], got["address"]
		if _, chosen := c.want["dp_rank"]; chosen != (worker == "a" && at == "10.0.0.1:8000" || worker == "b" &&
			at == "10.0.0.2:8000") {
			t.Errorf("%s: worker %v at %v", c.name, worker, at)
		}
		for _, key := range []string{"time", "duration", "time_to_first_token", "worker", "address", "prompt_tokens"} {
			delete(got, key)
		}
		if c.want["model"] == nil {
			delete(c.want, "model")
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n%v, want\n%v", c.name, got, c.want)
		}
		if strings.Contains(log.String(), secret) {
			t.Errorf("%s: a secret is in %s", c.name, &log)
		}
	}
}

// TestAccessLogBounds: texts from the client are cut to a limit, and escaped.
func TestAccessLogBounds(t *testing.T) {
	var log logtest.Log
	b := newBench(t, Config{AccessLog: slog.New(slog.NewJSONHandler(&log, nil))})
	long := strings.Repeat("é\n", 10_000)
	header := map[string]string{
		":method":      strings.Repeat("M", 1000),
		":path":        "/" + strings.Repeat("p", 100_000),
		"x-request-id": long,
	}
	if _, err := b.Do(t.Context(), &extproctest.Request{Header: header, Upstream: response("")}); err != nil {
		t.Fatal(err)
	}
	header = map[string]string{":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}
	text := fmt.Appendf(nil, `{"model":%q,"prompt":"p"}`, long)
	if _, err := b.Do(t.Context(), &extproctest.Request{Header: header, Body: [][]byte{text, nil}}); err != nil {
		t.Fatal(err)
	}
	for _, line := range lines(t, &log, 2) {
		for _, key := range []string{"request_id", "method", "path", "model"} {
			if text, _ := line[key].(string); len(text) > 256 || strings.Contains(text, "\ufffd") {
				t.Errorf("%s has %d bytes: %q", key, len(text), text)
			}
		}
	}
}

// TestAccessLogServedElsewhere: the line names the endpoint that answered, if it is not the chosen one.
func TestAccessLogServedElsewhere(t *testing.T) {
	for _, c := range []struct{ served, want string }{
		{"", "<nil> <nil>"},
		{"chosen", "<nil> <nil>"},
		{"other", "b/0 10.0.0.2:8000"},
		{"10.9.9.9:8000", "<nil> 10.9.9.9:8000"},
	} {
		b := newBench(t, Config{})
		x := b.running(t, router.Config{}, chatBody)
		var log logtest.Log
		x.Server.cfg.AccessLog = slog.New(slog.NewJSONHandler(&log, nil))
		x.phase, x.began = replied, time.Now()
		addresses := map[string]string{"chosen": x.route.Address, "other": "10.0.0.2:8000"}
		want := c.want
		if x.route.Address == addresses["other"] {
			addresses["other"] = "10.0.0.1:8000"
			want = strings.NewReplacer("b/0", "a/0", "10.0.0.2", "10.0.0.1").Replace(want)
		}
		if c.served != "" {
			address, named := addresses[c.served]
			if !named {
				address = c.served
			}
			x.reconcile(&effect{ServedBy: address})
		}
		x.end(t.Context())
		line := lines(t, &log, 1)[0]
		if got := fmt.Sprint(line["served_worker"], " ", line["served_address"]); got != want {
			t.Errorf("%q: %s, want %s", c.served, got, want)
		}
	}
}
