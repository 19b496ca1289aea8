package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// storing is an engine that keeps responses in its memory, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1, and
// SGLang with --enable-response-store.
type storing struct {
	number int

	mu     sync.Mutex
	stored map[string]bool
}

func (e *storing) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	id, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/v1/responses"), "/"), "/")
	response := func(id string) string {
		return fmt.Sprintf(`{"id":%q,"object":"response","status":"completed","output":[{"id":"msg_1"}]}`, id)
	}
	unknown := func(id string) bool {
		if id != "" && !e.stored[id] {
			http.Error(w, `{"error":"no such response"}`, http.StatusNotFound)
			return true
		}
		return false
	}
	switch {
	case id != "":
		if !unknown(id) {
			w.Header().Set("content-type", "application/json")
			fmt.Fprint(w, response(id))
		}
	default:
		var body struct {
			Previous string `json:"previous_response_id"`
			Stream   bool
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || unknown(body.Previous) {
			return
		}
		id = fmt.Sprintf("resp_%d_%d", e.number, len(e.stored))
		e.stored[id] = true
		if body.Stream {
			w.Header().Set("content-type", "text/event-stream")
			for _, event := range []string{"response.created", "response.completed"} {
				fmt.Fprintf(w, "event: %s\ndata: {\"response\":%s,\"type\":%q}\n\n", event, response(id), event)
			}
			return
		}
		w.Header().Set("content-type", "application/json")
		fmt.Fprint(w, response(id))
	}
}

// TestStoredResponses: with two engines that store responses and get requests in turn, each request for a stored
// response reaches its engine.
func TestStoredResponses(t *testing.T) {
	var servers []string
	for number := range 2 {
		server := httptest.NewServer(&storing{number: number, stored: map[string]bool{}})
		t.Cleanup(server.Close)
		servers = append(servers, server.Listener.Addr().String())
	}
	s := start(t, stack.Config{Workers: -1, Servers: servers,
		KveppFlags: []string{"--router-kv-events=false", "--engine=vllm", "--router-mode=round-robin"}})
	engines := map[string]int{}
	send := func(method, path, body string) string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, s.Envoy.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("content-type", "application/json")
		a, err := stack.Do(http.DefaultClient, req)
		if err != nil || a.Status != http.StatusOK {
			t.Fatalf("%s %s %s: %v %+v", method, path, body, err, a)
		}
		_, id, _ := strings.Cut(a.Body, `"id":"resp_`)
		id, _, _ = strings.Cut(id, `"`)
		return "resp_" + id
	}
	for i := range 20 {
		stream := fmt.Sprintf(`,"stream":%v`, i%2 == 0)
		id := send("POST", "/v1/responses", fmt.Sprintf(`{"model":%q,"input":%q%s}`, stack.Model,
			strings.Repeat(fmt.Sprint(i, " "), 50), stream))
		engines[id[:6]]++
		for range 4 {
			again := send("GET", "/v1/responses/"+id, "")
			if again != id {
				t.Errorf("asked for %s, got %s", id, again)
			}
			send("POST", "/v1/responses/"+id+"/cancel", "")
			send("GET", "/v1/responses/"+id+"/input_items?limit=1", "")
			id = send("POST", "/v1/responses",
				`{"model":"`+stack.Model+`","input":"more","previous_response_id":"`+id+`"`+stream+`}`)
		}
		send("DELETE", "/v1/responses/"+id, "")
	}
	if len(engines) != 2 {
		t.Errorf("first responses by engine: %v", engines)
	}
}
