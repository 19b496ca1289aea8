package tokenizer

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"kvepp/internal/apibody"
)

// FuzzEngines gives bodies to every engine's rules: an answer or an error, the same one twice, and the request unchanged
// between, because several goroutines may read it.
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
				Engine: engine, ChatTemplate: "testdata/templates/" + template + ".jinja", DefaultChatTemplateKwargs: `{"custom":1}`})
			if err != nil {
				f.Fatal(err)
			}
			models = append(models, m)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, chat bool) {
		path := "/v1/completions"
		if chat {
			path = "/v1/chat/completions"
		}
		request, err := apibody.ParseRequest(path, body)
		if err != nil {
			return
		}
		for _, m := range models {
			first, err := m.Tokenize(request)
			again, errAgain := m.Tokenize(request)
			if (err == nil) != (errAgain == nil) || len(first) != len(again) {
				t.Fatalf("%s: %v, %v, then %v, %v", m.options.Engine, first, err, again, errAgain)
			}
			for i := range first {
				if len(first[i].IDs) != len(again[i].IDs) || first[i].Certain != again[i].Certain || first[i].Certain > len(first[i].IDs) {
					t.Fatalf("%s: %v, then %v", m.options.Engine, first[i], again[i])
				}
			}
		}
	})
}
