package prompt

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"kvepp/prompt/body"
)

// TestEngineGoldens renders each request of testdata/requests.jsonl with each template of testdata/templates as vLLM,
// SGLang and TensorRT-LLM do. testdata/vllm.jsonl and so on have one line for each: the rendered text, or null if the
// engine answers an error; a file without a version in its name is that of the versions without one of their own. The
// engines' own code wrote these files; for TensorRT-LLM, whose package does not install
// without a GPU's libraries, its types and Transformers did: go test ./test/parity -run Engines -rewrite.
func TestEngineGoldens(t *testing.T) {
	requests, err := os.ReadFile("testdata/requests.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	templates, err := filepath.Glob("testdata/templates/*.jinja")
	if err != nil || len(templates) < 3 {
		t.Fatalf("%d templates, %v", len(templates), err)
	}
	for _, c := range []struct {
		engine        Engine
		version, file string
	}{
		{VLLM, "", "vllm"}, {TRTLLM, "", "trtllm"},
		{VLLM, "0.31.0", "vllm-0.31.0"}, {VLLM, "0.32.0", "vllm"},
		{SGLang, "0.5.21", "sglang"}, {SGLang, "0.5.22", "sglang"}, {SGLang, "0.5.23", "sglang-0.5.23"},
	} {
		engine := c.engine
		golden, err := os.ReadFile("testdata/" + c.file + ".jsonl")
		if err != nil {
			t.Fatal(err)
		}
		wants := bytes.Split(bytes.TrimSpace(golden), []byte("\n"))
		compared, unknown := 0, 0
		for _, template := range templates {
			m, err := Load(
				filepath.Join(modelsDir, "tiny-bytelevel"),
				Options{Engine: engine, Version: c.version, ChatTemplate: template},
			)
			if err != nil {
				t.Fatal(err)
			}
			for line := range bytes.Lines(requests) {
				if len(wants) == 0 {
					t.Fatalf("%s.jsonl ends early: write it again", c.file)
				}
				var want *string
				if err := json.Unmarshal(wants[0], &want); err != nil {
					t.Fatal(err)
				}
				wants = wants[1:]
				if want == nil {
					continue
				}
				request, err := body.ParseRequest("/v1/chat/completions", line)
				if err != nil {
					t.Fatalf("%s: %v", line, err)
				}
				got, err := m.renderChat(t.Context(), request)
				switch {
				case err != nil && IsUnknown(err):
					unknown++
				case err != nil || got != *want:
					t.Errorf("%s, %s: %s\n got %q, %v\nwant %q", engine, filepath.Base(template), line, got, err, *want)
				}
				compared++
			}
		}
		if compared < 180 || unknown > compared/10 {
			t.Errorf("%s: of %d requests %d are not known here", engine, compared, unknown)
		}
	}
}
