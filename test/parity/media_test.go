package parity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// The templates of chats with media: one that takes strings, and one that writes marks itself.
const (
	stringsOfMedia = `{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}`
	partsOfMedia = `{% for m in messages %}<|im_start|>{{ m.role }}
{% for part in m['content'] %}{% if part.type == 'text' %}{{ part.text }}{% else %}MARK{{ part }}{% endif %}{% ` +
		`endfor %}<|im_end|>
{% endfor %}`
)

// firstMark is the id of the first mark: the one behind the small model's own.
const firstMark = 3079

// mediaFolder makes a folder of the small model with another architecture and with marks as added tokens.
func mediaFolder(t *testing.T, architecture string, marks []string) string {
	t.Helper()
	folder := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		raw, err := os.ReadFile("../../test/models/tiny-bytelevel/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if name == "tokenizer.json" {
			var file map[string]json.RawMessage
			var added []map[string]any
			if err := json.Unmarshal(raw, &file); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(file["added_tokens"], &added); err != nil {
				t.Fatal(err)
			}
			for i, mark := range marks {
				token := maps.Clone(added[0])
				token["id"], token["content"] = firstMark+i, mark
				added = append(added, token)
			}
			if file["added_tokens"], err = json.Marshal(added); err != nil {
				t.Fatal(err)
			}
			if raw, err = json.Marshal(file); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(folder, name), raw, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	config := fmt.Sprintf(`{"model_type":"llama","architectures":[%q]}`, architecture)
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	return folder
}

// mediaContents are contents of messages with media in many places.
func mediaContents(mark string) []string {
	image := `{"type":"image_url","image_url":{"url":"http://h/i.png"}}`
	text := func(s string) string { return fmt.Sprintf(`{"type":"text","text":%q}`, s) }
	return []string{
		`[` + image + `]`,
		`[` + text("look at this one") + `,` + image + `,` + text("and say") + `]`,
		`[` + image + `,` + image + `,` + text("two of them\n") + `]`,
		`[` + text("a "+mark+" in words") + `,` + image + `]`,
		`[` + text(mark+mark) + `,` + image + `]`,
		`[` + text("") + `,` + image + `,` + text("x") + `,` + text(" y") + `]`,
		`[{"type":"image_url","image_url":{"url":"u","detail":"low"},"detail":"low","extra":[1]}]`,
		`[{"type":"image_url","image_url":{"url":"u"},"uuid":"7"},` + text("x") + `]`,
		`[{"type":"image_url","image_url":null,"uuid":"7"},` + text("x") + `]`,
		`[{"type":"image_url","uuid":"7"},` + text("x") + `]`,
		`[{"type":"video_url","video_url":{"url":"u"}},` + image + `,` + text("both") + `]`,
		`[` + image + `,{"type":"video_url","video_url":{"url":"u"}},` + image + `]`,
		`[{"type":"audio_url","audio_url":{"url":"u"}},` + text("heard") + `]`,
		`[{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}},` + text("heard") + `]`,
		`[{"type":"input_image","image_url":"u"},` + text("x") + `]`,
		`[{"type":"image_embeds","image_embeds":null},` + text("x") + `]`,
		`[{"image_url":"u"},` + text("x") + `]`,
		`[{"type":"image"},` + text("x") + `]`,
		`"` + mark + ` in words alone"`,
	}
}

// mediaArchitectures are the architectures whose marks kvepp knows, with the marks.
var mediaArchitectures = map[string][]string{
	"Qwen2VLForConditionalGeneration":    {"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"},
	"Qwen2_5_VLForConditionalGeneration": {"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"},
	"Qwen3VLForConditionalGeneration":    {"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"},
	"Qwen3VLMoeForConditionalGeneration": {"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"},
	"Qwen3_5ForConditionalGeneration":    {"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"},
	"Qwen3_5MoeForConditionalGeneration": {"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"},
	"Glm4vForConditionalGeneration": {
		"<|image|>",
		"<|begin_of_image|>",
		"<|end_of_image|>",
		"<|video|>",
		"<|begin_of_video|>",
		"<|end_of_video|>",
	},
	"Glm4vMoeForConditionalGeneration": {
		"<|image|>",
		"<|begin_of_image|>",
		"<|end_of_image|>",
		"<|video|>",
		"<|begin_of_video|>",
		"<|end_of_video|>",
	},
	"LlavaForConditionalGeneration":     {"<image>"},
	"LlavaNextForConditionalGeneration": {"<image>"},
	"Idefics3ForConditionalGeneration":  {"<image>"},
	"SmolVLMForConditionalGeneration":   {"<image>"},
	"Mistral3ForConditionalGeneration":  {"[IMG]"},
	"Gemma3ForConditionalGeneration":    {"<start_of_image>"},
	"Gemma4ForConditionalGeneration":    {"<|image|>", "<|video|>", "<|audio|>"},
	"Llama4ForConditionalGeneration":    {"<|image|>"},
	"KimiVLForConditionalGeneration":    {"<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"},
}

// TestMedia compares chats with media with vLLM's own code, which uses the marks of its own model classes, and with
// SGLang's. kvepp's certain ids must equal the engine's ids before the first mark, except for the last few.
func TestMedia(t *testing.T) {
	if testing.Short() {
		t.Log("make test-long runs the engines' own code")
		return
	}
	requests, err := os.ReadFile("../../prompt/testdata/requests.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		for _, version := range compared(t, engine) {
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				testMedia(t, engine, version, requests)
			})
		}
	}
}

func testMedia(t *testing.T, engine prompt.Engine, version string, requests []byte) {
	var marks []string // all, each once
	for _, architecture := range slices.Sorted(maps.Keys(mediaArchitectures)) {
		for _, mark := range mediaArchitectures[architecture] {
			if !slices.Contains(marks, mark) {
				marks = append(marks, mark)
			}
		}
	}
	type question struct {
		Template     string          `json:"template"`
		Body         json.RawMessage `json:"body"`
		Architecture string          `json:"architecture"`
		model        *prompt.Model
		own          []kvblock.Token
	}
	var questions []any
	folder := ""
	for _, architecture := range slices.Sorted(maps.Keys(mediaArchitectures)) {
		folder = mediaFolder(t, architecture, marks)
		var own []kvblock.Token
		for _, mark := range mediaArchitectures[architecture] {
			own = append(own, kvblock.Token(firstMark+slices.Index(marks, mark)))
		}
		mark := mediaArchitectures[architecture][0]
		for i, template := range []string{stringsOfMedia, strings.Replace(partsOfMedia, "MARK", mark, 1)} {
			path := filepath.Join(folder, fmt.Sprint(i, ".jinja"))
			if err := os.WriteFile(path, []byte(template), 0o644); err != nil {
				t.Fatal(err)
			}
			m, err := prompt.Load(folder, prompt.Options{Engine: engine, Version: version, ChatTemplate: path})
			if err != nil {
				t.Fatal(err)
			}
			for _, content := range mediaContents(mark) {
				payload := json.RawMessage(
					`{"model":"m","messages":[{"role":"system","content":"You see."},{"role":"user","content":"What ` +
						`is there?"},{"role":"user","content":` + content + `}]}`,
				)
				questions = append(questions, question{template, payload, architecture, m, own})
			}
		}
		if engine != prompt.SGLang || architecture != "Qwen3VLForConditionalGeneration" {
			continue
		}
		// If the model takes images, SGLang also treats chats of text differently.
		paths, err := filepath.Glob("../../prompt/testdata/templates/*.jinja")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			source, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			m, err := prompt.Load(folder, prompt.Options{Engine: engine, Version: version, ChatTemplate: path})
			if err != nil {
				t.Fatal(err)
			}
			for line := range bytes.Lines(requests) {
				questions = append(questions, question{string(source), bytes.TrimSpace(line), architecture, m, own})
			}
		}
	}
	equal, refused, unknown, wrong := 0, 0, 0, 0
	for i, response := range engineResults[rendered](t, engine, version, folder, questions) {
		q, _ := questions[i].(question)
		request, err := body.ParseRequest("/v1/chat/completions", q.Body)
		if err != nil {
			t.Fatal(err)
		}
		first := slices.IndexFunc(response.IDs, func(id kvblock.Token) bool { return slices.Contains(q.own, id) })
		prompts, err := q.model.Prompts(t.Context(), request)
		switch {
		case response.Error != "" || first < 0 && request.HasMedia: // it finds no place for media
			refused++
		case err != nil && prompt.IsUnknown(err):
			unknown++
		case err != nil || prompts[0].Text != response.Text || !slices.Equal(prompts[0].IDs, response.IDs),
			request.HasMedia && (prompts[0].Certain > first || prompts[0].Certain < first-8):
			wrong++
			t.Errorf(
				"%s: %s\n got %+v, %v\nwant %q %v, certain %d",
				q.Architecture,
				q.Body,
				prompts,
				err,
				response.Text,
				response.IDs,
				first,
			)
		default:
			equal++
		}
	}
	if equal < 200 {
		t.Error("too few results are equal for a conclusion")
	}
	t.Logf("%d equal, %d refused by the engine, %d not known here, %d differ", equal, refused, unknown, wrong)
	count(equal+wrong, 0, wrong)
}
