package models

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/prompt"
)

// TestLoadOnlyModels: kvepp warns when it loads a model whose chats the engine encodes with code that is not known
// here, and says that it routes them by load.
func TestLoadOnlyModels(t *testing.T) {
	raw, err := os.ReadFile("../../test/models/tiny-bytelevel/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		engine                           prompt.Engine
		version, architecture, modelType string
	}{
		{prompt.SGLang, "0.5.22", "KimiK3ForConditionalGeneration", "kimi_k3"},
		{prompt.SGLang, "0.5.23", "DeepseekV4ForCausalLM", "deepseek_v4"},
		{prompt.SGLang, "0.5.23", "InklingForConditionalGeneration", "inkling"},
		{prompt.SGLang, "0.5.23", "DeepseekV41ForCausalLM", "deepseek_v41"},
		{prompt.SGLang, "0.5.23", "MuseSparkForConditionalGeneration", "muse"},
		{prompt.SGLang, "0.5.23", "BeamForCausalLM", "beam"},
		{prompt.VLLM, "0.33.0", "KimiK3ForConditionalGeneration", "kimi_k3"},
		{prompt.VLLM, "0.33.0", "DeepseekV41ForCausalLM", "deepseek_v41"},
		{prompt.TRTLLM, "1.3", "InklingForConditionalGeneration", "inkling"},
	} {
		dir := t.TempDir()
		for name, text := range map[string]string{
			"tokenizer.json":      string(raw),
			"config.json":         fmt.Sprintf(`{"architectures":[%q],"model_type":%q}`, c.architecture, c.modelType),
			"chat_template.jinja": "{{ messages }}",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		m, err := prompt.Load(dir, prompt.Options{Engine: c.engine, Version: c.version})
		if err != nil {
			t.Fatal(err)
		}
		level, said := templateOf(m, "")
		if level != slog.LevelWarn || !strings.HasPrefix(said, "unusable (chats are routed by load): ") ||
			!strings.Contains(said, "only the engine knows its tokens") {
			t.Errorf("%s %s, %s: %v %q", c.engine, c.version, c.architecture, level, said)
		}
	}
}
