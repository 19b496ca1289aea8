package router

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/pool"
	"kvepp/router/session"
)

func newResponsesHouse(t testing.TB, endpoints ...pool.Endpoint) *house {
	h := newHouse(t, endpoints...)
	h.cfg.Responses = session.NewTable(session.Config{TTL: 24 * time.Hour, Max: 100})
	h.pool.Watch(forgetting{h.cfg.Responses.Forget})
	return h
}

// continuing returns a request of the Responses API; fields are further ones.
func continuing(fields string) *Request {
	return &Request{Path: "/v1/responses", Body: []byte(`{"model":"m","input":"hello"` + fields + `}`)}
}

// retrieving returns a request for a stored response, which has no body.
func retrieving(path string) *Request { return &Request{Path: path, BodylessReason: ReasonNoBody} }

// Requests that name a stored response go where it is, however busy that worker is. Others do not.
func TestStoredResponsesAreFound(t *testing.T) {
	h := newResponsesHouse(t, workers(4)...)
	first := h.route(continuing(""))
	if !first.StoresResponse() {
		t.Fatal("a response of the Responses API is not stored")
	}
	first.Responded("resp_1")
	for i := range 20 { // none of them ends
		for _, req := range []*Request{continuing(`,"previous_response_id":"resp_1"`),
			continuing(`,"store":false,"previous_response_id":"resp_1","stream":true`),
			retrieving("/v1/responses/resp_1"),
			retrieving("/v1/responses/resp_1?stream=true&starting_after=3"),
			retrieving("/v1/responses/resp_1/input_items"),
			{Path: "/v1/responses/resp_1/cancel", Body: []byte("{}")}} {
			if r := h.route(req); r.Name != first.Name {
				t.Fatalf("round %d: %s %s went to %s, not %s", i, req.Path, req.Body, r.Name, first.Name)
			}
		}
	}
	for _, req := range []*Request{continuing(""), continuing(`,"previous_response_id":"resp_forged"`),
		continuing(`,"previous_response_id":7`), continuing(`,"previous_response_id":null`),
		retrieving("/v1/responses/resp_forged"), retrieving("/v1/responses/"), retrieving("/v1/models"),
		completion("m", tokens(0, 40)),
		with(completion("m", tokens(0, 40)), `"previous_response_id":"resp_1"`)} {
		r := h.route(req)
		if r.Name == first.Name {
			t.Errorf("%s %s went to the busiest worker", req.Path, req.Body)
		}
		r.Free()
	}
}

// Only what an engine stores is kept, and no engine takes over the id of another one's response.
func TestWhichResponsesAreStored(t *testing.T) {
	h := newResponsesHouse(t, workers(2)...)
	for _, req := range []*Request{continuing(`,"store":false`), completion("m", tokens(0, 40)),
		retrieving("/v1/responses/resp_1")} {
		r := h.route(req)
		if r.StoresResponse() {
			t.Errorf("%s %s: the response counts as stored", req.Path, req.Body)
		}
		r.Responded("resp_1")
		r.Free()
	}
	if n := h.cfg.Responses.Active(); n != 0 {
		t.Errorf("%d responses are known", n)
	}
	first, second := h.route(continuing(`,"store":true`)), h.route(continuing(`,"background":true`))
	if first.Name == second.Name {
		t.Fatal("both went to one worker")
	}
	first.Responded("resp_1")
	second.Responded("resp_1")
	second.Responded("")
	if r := h.route(retrieving("/v1/responses/resp_1")); r.Name != first.Name {
		t.Error("another engine took over the id")
	}
	for i := range 1000 {
		second.Responded(fmt.Sprint("resp_", i))
	}
	if n := h.cfg.Responses.Active(); n != 100 {
		t.Errorf("%d responses are known, want at most 100", n)
	}
}

// A response whose worker has left, or that has expired, is routed as any other request.
func TestStoredResponsesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endpoints := workers(3)
		h := newResponsesHouse(t, endpoints...)
		first := h.route(continuing(""))
		first.Responded("resp_1")
		first.Free()
		<-time.After(23 * time.Hour)
		if _, known := h.cfg.Responses.Find(session.ResponseKeyOf("resp_1")); !known {
			t.Error("forgotten before its time")
		}
		<-time.After(2 * time.Hour)
		if _, known := h.cfg.Responses.Find(session.ResponseKeyOf("resp_1")); known {
			t.Error("known after its time")
		}
		again := h.route(continuing(""))
		again.Responded("resp_2")
		again.Free()
		var left []pool.Endpoint
		for _, e := range endpoints {
			if e.Name != again.Name {
				left = append(left, e)
			}
		}
		h.pool.Update(left)
		if r := h.route(retrieving("/v1/responses/resp_2")); r.Name == again.Name {
			t.Error("it went to a worker that has left")
		}
		if n := h.cfg.Responses.Active(); n != 0 {
			t.Errorf("%d responses of workers that left are known", n)
		}
	})
}

// A request in a session that continues a response goes where the response is, and leaves the session as it is.
func TestStoredResponsePrecedesSession(t *testing.T) {
	h := newResponsesHouse(t, workers(2)...)
	h.cfg.Sessions = session.NewTable(session.Config{TTL: minute})
	bound := h.route(of("s", continuing("")))
	other := h.route(continuing(""))
	if bound.Name == other.Name {
		t.Fatal("both went to one worker")
	}
	other.Responded("resp_1")
	if r := h.route(of("s", continuing(`,"previous_response_id":"resp_1"`))); r.Name != other.Name {
		t.Error("the session decided")
	}
	if r := h.route(of("s", continuing(""))); r.Name != bound.Name {
		t.Error("the session moved")
	}
}
