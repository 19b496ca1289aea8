package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"kvepp/test/harness/stack"
)

// TestSGLangHybrid: kvepp's prediction for a hybrid model on SGLang is an upper bound, by the decision's header and
// metric. For a model with full attention only it is exact.
func TestSGLangHybrid(t *testing.T) {
	engine := standIns(t, 1, "-like", "sglang")[0]
	for _, c := range []struct {
		config string
		header string
	}{
		{`{"model_type":"qwen3_next","architectures":["Qwen3NextForCausalLM"]}`, "true"},
		{`{"model_type":"qwen3","architectures":["Qwen3ForCausalLM"]}`, ""},
	} {
		model := t.TempDir()
		if err := os.CopyFS(model, os.DirFS(tinyModel)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(model, "config.json"), []byte(c.config), 0o600); err != nil {
			t.Fatal(err)
		}
		s := start(
			t,
			stack.Config{
				Workers:    -1,
				Servers:    []string{engine.Address},
				KveppModel: model,
				KveppFlags: []string{"--engine=sglang"},
			},
		)
		if err := s.ReplaceEndpoints(endpointsOf(engine)); err != nil {
			t.Fatal(err)
		}
		if err := s.Settled(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		prompt := novel()
		if a := chat(t, s.Envoy.URL, prompt, false, nil); a.Header.Get("x-kvepp-upper-bound") != "" {
			t.Errorf("%s: an upper bound of %d cached tokens", c.config, a.KveppCached)
		}
		eventually(t, func() error {
			a := chat(t, s.Envoy.URL, prompt, false, nil)
			if a.KveppCached == 0 {
				return fmt.Errorf("no cached tokens predicted, reason %s", a.Reason)
			}
			if got := a.Header.Get("x-kvepp-upper-bound"); got != c.header {
				t.Errorf("%s: x-kvepp-upper-bound %q, want %q", c.config, got, c.header)
			}
			return nil
		})
		if got := metric(t, s, "kvepp_upper_bound_decisions_total"); (got > 0) != (c.header != "") {
			t.Errorf("%s: the metric counts %v decisions with upper bounds", c.config, got)
		}
	}
}
