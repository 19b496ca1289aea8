package prompt

import (
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/bpe"
)

// mediaMarks are the texts that stand for an image, a video or a sound in a rendered chat. The engine replaces the
// tokens of a mark by as many as the media takes. The ids before the first mark stay.
type mediaMarks struct {
	// image, video and audio are the marks that the engine writes itself, for a template that takes content as one
	// string; empty where it writes none or the model takes no such media.
	image, video, audio string
	// tokens are the added tokens of the marks. The prompt is certain up to the first of them.
	tokens []string
	// text is another word that the engine takes for a mark; "" for none.
	text string
}

var (
	qwenMarks = mediaMarks{
		image: "<|vision_start|><|image_pad|><|vision_end|>", video: "<|vision_start|><|video_pad|><|vision_end|>",
		tokens: []string{"<|vision_start|>", "<|image_pad|>", "<|video_pad|>"},
	}
	glmMarks = mediaMarks{
		image: "<|begin_of_image|><|image|><|end_of_image|>", video: "<|begin_of_video|><|video|><|end_of_video|>",
		tokens: []string{"<|begin_of_image|>", "<|image|>", "<|begin_of_video|>", "<|video|>"},
	}
	llavaMarks = mediaMarks{image: "<image>", tokens: []string{"<image>"}}
)

// vllmMedia are the marks of the architectures whose processors in vLLM replace only the tokens of marks. Architectures
// that put media elsewhere (PaliGemma, BLIP-2, Molmo), change other tokens too, or have marks that are not tokens are
// missing. Source: vLLM 0.33.0, model_executor/models: get_placeholder_str and _get_prompt_updates of each.
var vllmMedia = map[string]mediaMarks{
	"Qwen2VLForConditionalGeneration":    qwenMarks,
	"Qwen2_5_VLForConditionalGeneration": qwenMarks,
	"Qwen3VLForConditionalGeneration":    qwenMarks,
	"Qwen3VLMoeForConditionalGeneration": qwenMarks,
	"Qwen3_5ForConditionalGeneration":    qwenMarks,
	"Qwen3_5MoeForConditionalGeneration": qwenMarks,
	"Glm4vForConditionalGeneration":      glmMarks,
	"Glm4vMoeForConditionalGeneration":   glmMarks,
	"LlavaForConditionalGeneration":      llavaMarks,
	"LlavaNextForConditionalGeneration":  llavaMarks,
	"Idefics3ForConditionalGeneration":   llavaMarks,
	"SmolVLMForConditionalGeneration":    llavaMarks,
	"Mistral3ForConditionalGeneration":   {tokens: []string{"[IMG]"}},
	"Gemma3ForConditionalGeneration":     {image: "<start_of_image>", tokens: []string{"<start_of_image>"}},
	"Llama4ForConditionalGeneration":     {image: "<|image|>", tokens: []string{"<|image|>"}},
	"Gemma4ForConditionalGeneration": {
		image: "<|image|>", video: "<|video|>", audio: "<|audio|>",
		tokens: []string{"<|image|>", "<|video|>", "<|audio|>"},
	},
	"KimiVLForConditionalGeneration": {
		image:  "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
		tokens: []string{"<|media_start|>", "<|media_content|>", "<|media_pad|>"},
	},
}

// sglangMedia are the marks of the architectures whose processor in SGLang is Qwen's. It also takes <image> for a mark.
// Source: SGLang 0.5.21, multimodal/processors/qwen_vl.
var sglangMedia = func() map[string]mediaMarks {
	marks := qwenMarks
	marks.text = "<image>"
	all := map[string]mediaMarks{}
	for architecture, known := range vllmMedia {
		if known.image == qwenMarks.image {
			all[architecture] = marks
		}
	}
	return all
}()

// findMarks sets the model's marks, if they are known for the engine and the tokenizer has their tokens.
func (m *Model) findMarks() {
	var known map[string]mediaMarks
	switch m.options.Engine {
	case VLLM:
		known = vllmMedia
	case SGLang, Dynamo: // Dynamo's workers may be vLLM's or SGLang's
		known = sglangMedia
	}
	marks, ok := known[m.architecture]
	for _, token := range marks.tokens {
		_, added := m.encoder.AddedID(token)
		ok = ok && added
	}
	if ok {
		m.media, m.certain = &marks, bpe.NewCertainPrefix(m.encoder)
	}
}

// mark returns the mark that the engine writes for a kind of media.
func (marks *mediaMarks) mark(kind string) string {
	switch kind {
	case "image":
		return marks.image
	case "video":
		return marks.video
	}
	return marks.audio
}

// place returns the byte offset of the first mark in a rendered chat.
func (marks *mediaMarks) place(text string) (int, error) {
	first := len(text)
	for _, token := range marks.tokens {
		if at := strings.Index(text, token); at >= 0 {
			first = min(first, at)
		}
	}
	if first == len(text) {
		return 0, fmt.Errorf("%w, and the template does not show where it is", ErrMedia)
	}
	if at := strings.Index(text, marks.text); marks.text != "" && at >= 0 {
		first = min(first, at)
	}
	return first, nil
}

// certainIDs returns the number of the text's ids that are certain if only text[:place] is.
func (m *Model) certainIDs(budget *bpe.Budget, text string, place int, special bool) (int, error) {
	ids, err := m.encoder.Encode(budget, text[:m.certain.End(text, place)], false)
	if special {
		return m.encoder.PrefixLen() + len(ids), err
	}
	return len(ids), err
}

// markFirst puts the marks that the text does not have itself before it, as vLLM does for templates that take strings.
// media are the marks of a message, one for each image, video or sound.
func markFirst(media []string, text string) (string, error) {
	var before []string
	for i, mark := range media {
		if slices.Contains(media[:i], mark) {
			continue
		}
		missing := -strings.Count(text, mark)
		for _, other := range media {
			if other == mark {
				missing++
			}
		}
		if missing < 0 {
			return "", errRefused("more %q in a text than the message has media", mark)
		}
		for range missing {
			before = append(before, mark)
		}
	}
	if text != "" {
		before = append(before, text)
	}
	return strings.Join(before, "\n"), nil
}

// mediaKinds maps the types of content parts that hold media to what they hold.
var mediaKinds = map[string]string{
	"image_url":   "image",
	"input_image": "image",
	"video_url":   "video",
	"audio_url":   "audio",
	"input_audio": "audio",
}
