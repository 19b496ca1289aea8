package prompt

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"kvepp/prompt/body"
)

// FuzzEngines tokenizes bodies twice by every engine's rules. Both results must be equal, and the request unchanged,
// because several goroutines may read it.
func FuzzEngines(f *testing.F) {
	requests, err := os.ReadFile("testdata/requests.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	for line := range bytes.Lines(requests) {
		f.Add(line, true)
	}
	f.Add([]byte(`{"model":"m","prompt":["a","b"],"suffix":null}`), false)
	f.Add([]byte(`{"model":"m","prompt":[1,2],"kv_transfer_params":{}}`), false)
	var models []*Model
	for _, engine := range Engines {
		for _, template := range []string{"strings", "parts", "chat"} {
			m, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{
				Engine: engine, ChatTemplate: "testdata/templates/" + template + ".jinja",
				DefaultChatTemplateKwargs: `{"custom":1}`})
			if err != nil {
				f.Fatal(err)
			}
			models = append(models, m)
		}
	}
	f.Add(
		[]byte(
			`{"model":"m","system":[{"type":"text","text":"s"}],"messages":[{"role":"user",`+
				`"content":[{"type":"tool_result","content":[{"type":"image"}]}]},{"role":"assistant",`+
				`"content":[{"type":"tool_use","id":"i","input":{}}]}],"thinking":{"type":"disabled"}}`,
		),
		true,
	)
	f.Add(
		[]byte(
			`{"model":"m","input":[{"role":"assistant","content":"a"},{"type":"function_call","call_id":"c",`+
				`"name":"f","arguments":"{}"},{"type":"reasoning","summary":[]}],"tools":[{"type":"function",`+
				`"name":"f"}]}`,
		),
		true,
	)
	f.Fuzz(func(t *testing.T, payload []byte, chat bool) {
		paths := []string{"/v1/completions"}
		if chat {
			paths = []string{"/v1/chat/completions", "/v1/messages", "/v1/responses"}
		}
		var requests []*body.Request
		for _, path := range paths {
			if request, err := body.ParseRequest(path, payload); err == nil {
				requests = append(requests, request)
			}
		}
		for i := range len(models) * len(requests) {
			m, request := models[i/len(requests)], requests[i%len(requests)]
			first, err := m.Tokenize(t.Context(), request)
			again, errAgain := m.Tokenize(t.Context(), request)
			if (err == nil) != (errAgain == nil) || len(first) != len(again) {
				t.Fatalf("%s: %v, %v, then %v, %v", m.options.Engine, first, err, again, errAgain)
			}
			for i := range first {
				if len(first[i].IDs) != len(again[i].IDs) || first[i].Certain != again[i].Certain ||
					first[i].Certain > len(first[i].IDs) {
					t.Fatalf("%s: %v, then %v", m.options.Engine, first[i], again[i])
				}
			}
		}
	})
}
