package e2e

import (
	"os"
	"path/filepath"
	"testing"

	"kvepp/test/harness/stack"
)

// TestWorkerWithOtherFiles: if a worker's model card names another template than kvepp's, kvepp does not predict its
// cache. All other tests show that kvepp accepts equal files.
func TestWorkerWithOtherFiles(t *testing.T) {
	template, err := os.ReadFile("../test/models/tiny-bytelevel/chat_template.jinja")
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "other.jinja")
	if err := os.WriteFile(other, append(template, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	s := start(t, stack.Config{Workers: 1, Speedup: 20, KveppFlags: []string{"--chat-template", other}})
	messages := conversation(t.Name(), 1)
	for range 2 {
		if a := chat(t, s.Envoy.URL, messages, true, nil); a.Reason != "tokenizer_differs" || a.KveppCached != 0 {
			t.Errorf("reason %s, predicted %d cached tokens", a.Reason, a.KveppCached)
		}
	}
	if n := metric(t, s, "kvepp_model_file_mismatches"); n != 1 {
		t.Errorf("kvepp_model_file_mismatches is %v", n)
	}
	if n := metric(t, main, "kvepp_model_file_mismatches"); n != 0 {
		t.Errorf("with the same files the metric is %v", n)
	}
}
