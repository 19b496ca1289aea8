package body

import (
	"strings"
	"testing"
)

// readID reads a body in pieces of so many bytes.
func readID(contentType, body string, piece int) string {
	r := NewResponseIDReader(contentType)
	for body != "" {
		n := min(piece, len(body))
		if id, more := r.Write([]byte(body[:n])); !more {
			return id
		}
		body = body[n:]
	}
	return ""
}

// The id is that of the response alone, in the forms of vLLM and SGLang, and in any chunking.
func TestResponseID(t *testing.T) {
	const stream, whole = "text/event-stream; charset=utf-8", "application/json"
	for _, c := range []struct{ contentType, body, want string }{
		{whole, `{"id":"resp_1","created_at":7,"object":"response","status":"queued"}`, "resp_1"},
		{whole, ` { "object" : "response" , "id" : "resp_1" } `, "resp_1"},
		{whole, `{"metadata":{"id":"forged"},"output":[{"id":"msg_1"}],"tools":["id","x"],"id":"resp_1"}`, "resp_1"},
		{whole, `{"instructions":"say \"id\":\"forged\" \\","id":"resp_1"}`, "resp_1"},
		{whole, `{"previous_response_id":"resp_0","id":null}`, ""},
		{whole, `{"id":7,"x":"resp_1"}`, ""},
		{whole, `["id","resp_1"]`, ""},
		{whole, `{"id":"` + strings.Repeat("x", maxResponseID) + `"}`, strings.Repeat("x", maxResponseID)},
		{whole, `{"id":"` + strings.Repeat("x", maxResponseID+1) + `"}`, ""},
		{whole, `{"a":"` + strings.Repeat("x", maxBeforeID) + `","id":"resp_1"}`, ""},
		{whole, `}]"id":"resp_1"`, ""},
		{"", `{"id":"resp_1"}`, "resp_1"},
		{stream, "event: response.created\ndata: " +
			`{"response":{"id":"resp_1","output":[]},"sequence_number":0,` +
			`"type":"response.created"}` + "\n\n", "resp_1"},
		{stream, ": \"ping\"\n\nevent: response.created\ndata: " +
			`{"type":"response.created","response":{"metadata":{"id":"forged"},"id":"resp_1"}}` + "\n\n", "resp_1"},
		{stream, `data: {"type":"x","item":{"id":"msg_1"},"list":["id"]}` + "\n\n" +
			`data: {"response":{"tools":["id","forged"],"id":"resp_1"}}` + "\n\n", "resp_1"},
		{stream, `data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"x"}}]}` + "\n\n", ""},
	} {
		for _, piece := range []int{1, 2, 7, len(c.body)} {
			if got := readID(c.contentType, c.body, piece); got != c.want {
				t.Errorf("%.200s in pieces of %d: %q, want %q", c.body, piece, got, c.want)
			}
		}
	}
}

func TestStoredResponse(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/responses/resp_1":                     "resp_1",
		"/v1/responses/resp_1?stream=true":         "resp_1",
		"/v1/responses/resp_1/cancel":              "resp_1",
		"/v1/responses/resp_1/input_items?limit=2": "resp_1",
		"/openai/v1/responses/resp%5F1/":           "resp_1",
		"/v1/responses/resp_%zz":                   "resp_%zz",
		"/v1/responses":                            "",
		"/v1/responses/":                           "",
		"/v1/chat/completions?x=/v1/responses/a":   "",
		"/v1/models":                               "",
	} {
		if got := StoredResponse(path); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

// Any bytes give the same id in any chunking.
func FuzzResponseID(f *testing.F) {
	f.Add(`{"id":"resp_1","x":[{}]}`, 3, true)
	f.Add(`data: {"response":{"id":"resp_1"}}`, 1, false)
	f.Fuzz(func(t *testing.T, body string, piece int, whole bool) {
		contentType := map[bool]string{false: "text/event-stream"}[whole]
		id := readID(contentType, body, len(body))
		if again := readID(contentType, body, max(piece, 1)); again != id || len(id) > maxResponseID {
			t.Errorf("%q, in pieces of %d %q", id, piece, again)
		}
	})
}
