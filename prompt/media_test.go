package prompt

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// mediaModel loads the small model with another architecture and with marks as added tokens. Package parity compares
// the places of the marks with the engines.
func mediaModel(t testing.TB, engine Engine, architecture, template string, marks ...string) *Model {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(modelsDir, "tiny-bytelevel", tokenizerFile))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]json.RawMessage
	var added []json.RawMessage
	if err := errors.Join(json.Unmarshal(raw, &file), json.Unmarshal(file["added_tokens"], &added)); err != nil {
		t.Fatal(err)
	}
	for i, mark := range marks {
		added = append(
			added,
			fmt.Appendf(
				nil,
				`{"id":%d,"content":%q,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,`+
					`"special":true}`,
				3079+i,
				mark,
			),
		)
	}
	if file["added_tokens"], err = json.Marshal(added); err != nil {
		t.Fatal(err)
	}
	if raw, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{
		tokenizerFile: string(raw), chatTemplateFile: template,
		modelConfigFile: fmt.Sprintf(`{"model_type":"x","architectures":[%q],"vision_config":{}}`, architecture),
	}), Options{Engine: engine})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const (
	mediaStrings = `{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}`
	mediaParts   = `{% for m in messages %}<|im_start|>{% for c in m['content'] %}{% if c.type == 'text' %}{{ c.text ` +
		`}}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>{% endfor %}`
)

func TestCertainOfMedia(t *testing.T) {
	const image = `{"type":"image_url","image_url":{"url":"u"}}`
	qwen := []string{"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"}
	llava := mediaModel(t, VLLM, "LlavaForConditionalGeneration", mediaStrings, "<image>")
	qwenParts := mediaModel(t, VLLM, "Qwen2VLForConditionalGeneration", mediaParts, qwen...)
	for _, c := range []struct {
		m             *Model
		content, text string
		certain       string
	}{
		{llava, `[{"type":"text","text":"Look at this"},` + image + `]`,
			"<|im_start|>You see<|im_end|><|im_start|><image>\nLook at this<|im_end|>",
			"<|im_start|>You see<|im_end|><|im_start|>"},
		{llava, `[{"type":"text","text":"Look at <image> there"},` + image + `]`,
			"<|im_start|>You see<|im_end|><|im_start|>Look at <image> there<|im_end|>",
			"<|im_start|>You see<|im_end|><|im_start|>Look"},
		{llava, `"no <image> at all"`, "<|im_start|>You see<|im_end|><|im_start|>no <image> at all<|im_end|>",
			"<|im_start|>You see<|im_end|><|im_start|>no <image> at all<|im_end|>"},
		{qwenParts, `[{"type":"text","text":"Look at this"},` + image + `]`,
			"<|im_start|>You see<|im_end|><|im_start|>Look at " +
				"this<|vision_start|><|image_pad|><|vision_end|><|im_end|>",
			"<|im_start|>You see<|im_end|><|im_start|>Look at"},
		{qwenParts, `[` + image + `,` + image + `,{"type":"text","text":"Look at this"}]`,
			"<|im_start|>You " +
				"see<|im_end|><|im_start|><|vision_start|><|image_pad|><|vision_end|><|vision_start|><|image_pad|>" +
				"<|vision_end|>Look at this<|im_end|>",
			"<|im_start|>You see<|im_end|><|im_start|>"},
	} {
		request := chatRequest(t, `[{"role":"system","content":"You see"},{"role":"user","content":`+c.content+`}]`)
		prompts, err := c.m.Prompts(t.Context(), request)
		if err != nil || len(prompts) != 1 || prompts[0].Text != c.text {
			t.Errorf("%s: got %+v, %v\nwant %q", c.content, prompts, err, c.text)
			continue
		}
		want, err := c.m.Encode(c.certain, false)
		if err != nil || prompts[0].Certain != len(want) {
			t.Errorf(
				"%s: %d ids are certain, want %d of %q (%v)",
				c.content,
				prompts[0].Certain,
				len(want),
				c.certain,
				err,
			)
		}
	}
}

// TestMediaWithoutAPlace: if kvepp does not know where the engine puts a chat's media, none of the ids are certain.
func TestMediaWithoutAPlace(t *testing.T) {
	const drops = `{% for m in messages %}{{ m.content[0].text }}{% endfor %}`
	marked := []string{"<image>"}
	for name, m := range map[string]*Model{
		"an architecture that is not known": mediaModel(t, VLLM, "PaliGemmaForConditionalGeneration", mediaStrings,
			marked...),
		"a tokenizer without the mark": mediaModel(t, VLLM, "LlavaForConditionalGeneration", mediaStrings),
		"a template that drops it":     mediaModel(t, VLLM, "Mistral3ForConditionalGeneration", drops, "[IMG]"),
		"a string template without its mark": mediaModel(t, VLLM, "Mistral3ForConditionalGeneration", mediaStrings,
			"[IMG]"),
		"TensorRT-LLM": mediaModel(t, TRTLLM, "LlavaForConditionalGeneration", mediaStrings,
			marked...),
	} {
		got, err := m.Tokenize(
			t.Context(),
			chatRequest(
				t,
				`[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}]`,
			),
		)
		if !errors.Is(err, ErrMedia) {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	m := mediaModel(t, VLLM, "LlavaForConditionalGeneration", mediaStrings, marked...)
	for _, fields := range []string{
		`[{"role":"user","content":[{"type":"image_embeds","image_embeds":"AAAA"}]}]`,
		`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"},"audio_url":{"url":"u"},"uuid":"1"}]}]`,
		`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}],` +
			`"mm_processor_kwargs":{"use_audio_in_video":true}`,
		`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}],"nvext":{"token_data":[1]},` +
			`"kv_transfer_params":{"prompt_token_ids":[1]}`,
		`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}},{"type":"text",` +
			`"text":"<image><image>"}]}]`,
	} {
		got, err := m.Tokenize(t.Context(), chatRequest(t, fields))
		if err == nil && got[0].Certain == len(got[0].IDs) {
			t.Errorf("%s: all of %v are certain", fields, got)
		}
	}
}
