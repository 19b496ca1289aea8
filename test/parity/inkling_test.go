package parity

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

// inklingTokens are the special tokens of Inkling's prompts. One of them has another name in the vocabulary.
var inklingTokens = []string{
	"<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>",
	"<|content_image|>", "<|content_model_end_sampling|>", "<|content_thinking|>", "<|content_audio_input|>",
	"<|unused_200024|>", "<|content_invoke_tool_json|>", "<|end_message|>", "<|audio_end|>",
}

// takesImages is an architecture whose messages may have images, which say nothing about its marks to Inkling.
const takesImages = "LlavaForConditionalGeneration"

// TestInkling compares chats for Inkling on vLLM and SGLang with the engine's own renderer, over each API.
func TestInkling(t *testing.T) {
	if testing.Short() {
		t.Log("make parity runs the engine's own encoder")
		return
	}
	folder := mediaFolder(t, "InklingForConditionalGeneration", inklingTokens)
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		for _, version := range compared(t, engine) {
			if engine == prompt.SGLang && version == "0.5.23" {
				continue // kvepp routes the model's chats by load: a compiled package encodes them
			}
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				compareInkling(t, engine, version, folder)
			})
		}
	}
}

func compareInkling(t *testing.T, engine prompt.Engine, version, folder string) {
	type question struct {
		Body         json.RawMessage `json:"body"`
		Messages     bool            `json:"messages"`
		Responses    bool            `json:"responses"`
		Encoder      any             `json:"encoder"`
		Architecture string          `json:"architecture,omitempty"`
		path         string
	}
	m, err := prompt.Load(folder, prompt.Options{Engine: engine, Version: version})
	if err != nil {
		t.Fatal(err)
	}
	g := &chatGenerator{Rand: rand.New(rand.NewPCG(25, 11)), engine: engine}
	var questions []any
	for i := range *encoderChats {
		q := question{Encoder: "inkling", Architecture: takesImages, path: "/v1/chat/completions"}
		if engine == prompt.SGLang {
			q.Encoder, q.Architecture = []string{"InklingForConditionalGeneration", "inkling"}, ""
		}
		var payload map[string]any
		switch {
		case i%7 == 5:
			q.Messages, q.path, payload = true, "/v1/messages", g.messages()
		case i%7 == 6:
			q.Responses, q.path, payload = true, "/v1/responses", g.responses()
		default:
			payload = g.inkling()
		}
		if q.Body, err = json.Marshal(payload); err != nil {
			t.Fatal(err)
		}
		questions = append(questions, q)
	}
	equal, media, refused, unknown, wrong := 0, 0, 0, 0, 0
	for i, response := range engineResults[rendered](t, engine, version, folder, questions) {
		q, _ := questions[i].(question)
		if response.Error != "" {
			refused++
			continue
		}
		request, err := body.ParseRequest(q.path, q.Body)
		if err != nil {
			t.Errorf("%s: %v", q.Body, err)
			continue
		}
		prompts, err := m.Tokenize(t.Context(), request)
		switch {
		case prompt.IsUnknown(err):
			unknown++
		case err != nil || !slices.Equal(prompts[0].IDs[:prompts[0].Certain], response.IDs):
			if wrong++; wrong <= 5 {
				t.Errorf("%s\n got %v, %v\nwant %v", q.Body, prompts, err, response.IDs)
			}
		default:
			equal++
			if prompts[0].Certain < len(prompts[0].IDs) {
				media++
			}
		}
	}
	t.Logf("%s %s, Inkling: %d equal (%d with media), %d refused by the engine, %d not known here, %d differ",
		engine, version, equal, media, refused, unknown, wrong)
	if equal < 2*refused || unknown > equal/50 || wrong > 0 {
		t.Error("differences, or too few results are equal for a conclusion")
	}
	count(equal+wrong, 0, wrong)
}

// inkling is a chat for Inkling: with images, efforts that are numbers, and less of what the engines refuse there.
func (g *chatGenerator) inkling() object {
	body := g.chat()
	if !g.oneIn(20) {
		delete(body, "continue_final_message")
	}
	variables, _ := body["chat_template_kwargs"].(object)
	if variables != nil && g.oneIn(3) {
		variables["reasoning_effort"] = choose[any](g, 0, 0.5, 0.99, 0.125, 0.005, 0.3, "medium", "odd", true, nil,
			json.Number("0.0"), 1, -0.001)
	}
	messages, _ := body["messages"].([]any)
	for _, item := range messages {
		message, _ := item.(object)
		if message["role"] == "user" && g.oneIn(25) {
			message["content"] = []any{object{"type": "text", "text": g.text()}, object{"type": "image_url",
				"image_url": object{"url": "http://host/image.png"}}, object{"type": "text", "text": g.text()}}
		}
		if message["role"] == "tool" && g.oneIn(4) {
			message["name"] = choose(g, toolNames...)
		}
		if g.engine == prompt.SGLang {
			g.inklingSGLang(message)
		}
	}
	return body
}

// inklingSGLang changes a message to what only SGLang takes: media in tools' results, sound, thinking as parts.
func (g *chatGenerator) inklingSGLang(message object) {
	switch {
	case message["role"] == "tool" && g.oneIn(12):
		message["content"] = []any{object{"type": "text", "text": g.text()}, object{"type": "image_url",
			"image_url": object{"url": "http://host/image.png"}}}
	case message["role"] == "tool" && g.oneIn(12):
		message["content"] = []any{}
	case message["role"] == "user" && g.oneIn(25):
		message["content"] = []any{object{"type": "input_audio", "input_audio": object{"data": "AAAA",
			"format": "wav"}}, object{"type": "text", "text": g.text()}}
	case message["role"] == "assistant" && g.oneIn(5):
		if !g.oneIn(6) {
			delete(message, "reasoning_content")
		}
		message["content"] = []any{object{"type": choose(g, "thinking", "reasoning"),
			choose(g, "thinking", "text"): g.text()}, object{"type": "text", "text": g.text()}}
	}
}
