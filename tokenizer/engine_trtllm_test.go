package tokenizer

import (
	"path/filepath"
	"testing"

	"kvepp/internal/apibody"
)

// TestTRTLLM renders what is known of TensorRT-LLM, and leaves the rest to it.
func TestTRTLLM(t *testing.T) {
	m, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{Engine: TRTLLM, ChatTemplate: "testdata/templates/chat.jinja"})
	if err != nil {
		t.Fatal(err)
	}
	const unknown = ""
	for body, want := range map[string]string{
		`[{"role":"user","content":"a"}]`: "<|user|>\na<|end|>\n<|assistant|>\n",
		`[{"role":"system","content":null},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text","text":"b"}]}]`: "<|system|>\n<|end|>\n<|user|>\na\nb<|end|>\n<|assistant|>\n",
		`[{"role":"user","content":"a","name":"n"},{"role":"assistant","content":"b"}],"add_generation_prompt":false`:                                    "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n",
		`[{"role":"user","content":"a"}],"continue_final_message":false,"chat_template_kwargs":{"enable_thinking":true}`:                                 "<|user|>\na<|end|>\n<|assistant|>\n",
		`[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f"}}]`:                                                          unknown,
		`[{"role":"user","content":"a"}],"reasoning_effort":"low"`:                                                                                       unknown,
		`[{"role":"user","content":"a"}],"chat_template_kwargs":{"tools":[]}`:                                                                            unknown,
		`[{"role":"user","content":"a"}],"prompt_token_ids":[1]`:                                                                                         unknown,
		`[{"role":"assistant","content":"a","reasoning_content":"r"}]`:                                                                                   unknown,
		`[{"role":"tool","content":"a"}]`:                                                                                                                unknown,
		`[{"role":"user","content":["a"]}]`:                                                                                                              unknown,
		`[{"role":"user","content":[{"type":"image_url"}]}]`:                                                                                             unknown,
	} {
		request, err := apibody.ParseRequest("/v1/chat/completions", []byte(`{"model":"m","messages":`+body+`}`))
		if err != nil {
			t.Fatal(err)
		}
		prompts, err := m.Prompts(request)
		switch {
		case want == unknown:
			if !IsUnknown(err) {
				t.Errorf("%s: got %v, %v; want that only the engine knows", body, prompts, err)
			}
		case err != nil || prompts[0].Text != want:
			t.Errorf("%s: got %v, %v; want %q", body, prompts, err, want)
		}
	}
}
