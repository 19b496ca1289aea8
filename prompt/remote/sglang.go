package remote

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt/body"
)

// SGLang's /tokenize turns a chat's body into the request that its chat endpoint reads, and prepares it in the same
// way. For a completion it encodes the prompts. Source: SGLang 0.5.21, entrypoints/openai/serving_tokenize and
// protocol, TokenizeRequest.

func (c *Client) sglang(ctx context.Context, request *body.Request, payload []byte) ([][]kvblock.Token, error) {
	switch request.API {
	case body.Completions:
		return c.sglangCompletion(ctx, request)
	case body.ChatCompletions:
		return c.sglangChat(ctx, request, payload)
	}
	return nil, fail(Unsupported, "SGLang's /tokenize does not take %s", request.API)
}

func (c *Client) sglangCompletion(ctx context.Context, request *body.Request) ([][]kvblock.Token, error) {
	if slices.ContainsFunc(request.Prompts, func(p body.Prompt) bool { return p.HasTokens }) {
		return nil, fail(Unsupported, "the prompts are token ids")
	}
	if v, _ := request.Body.Get("suffix"); v != nil {
		return nil, fail(Unsupported, "SGLang's /tokenize does not know suffix")
	}
	asked := struct {
		Model            string   `json:"model"`
		Prompt           []string `json:"prompt"`
		AddSpecialTokens bool     `json:"add_special_tokens"`
	}{Model: request.Model, AddSpecialTokens: true} // SGLang's completions do not know that field
	for _, prompt := range request.Prompts {
		asked.Prompt = append(asked.Prompt, prompt.Text)
	}
	payload, err := plainJSON(asked)
	if err != nil {
		return nil, &Error{Outcome: Unsupported, err: err}
	}
	a, err := c.call(ctx, tokenizePath, payload)
	if err != nil {
		return nil, err
	}
	return tokenizedAll(a, len(request.Prompts))
}

// tokenizedAll reads /tokenize's response for n prompts.
func tokenizedAll(a *response, n int) ([][]kvblock.Token, error) {
	decoded, err := read[struct {
		Count  []int
		Tokens [][]kvblock.Token
	}](tokenizePath, a)
	if err != nil {
		return nil, err
	}
	if len(decoded.Tokens) != n || len(decoded.Count) != n {
		return nil, fail(Failed, "%s: ids of %d prompts instead of %d", tokenizePath, len(decoded.Tokens), n)
	}
	for i, ids := range decoded.Tokens {
		switch {
		case ids == nil || decoded.Count[i] != len(ids):
			return nil, fail(Failed, "%s: %d tokens but a count of %d", tokenizePath, len(ids), decoded.Count[i])
		case len(ids) == 0:
			return nil, fail(Unsupported, "%s: the response has no ids", tokenizePath)
		}
	}
	return decoded.Tokens, nil
}

// sglangNotAsked are fields of a chat that do not change its prompt, and that /tokenize rejects.
var sglangNotAsked = []string{"stream", "stream_options", "prompt"}

func (c *Client) sglangChat(ctx context.Context, request *body.Request, payload []byte) ([][]kvblock.Token, error) {
	if v, _ := request.ChatTemplateKwargs.Get("reasoning_effort"); v != nil {
		return nil, fail(Unsupported,
			"SGLang's /tokenize and its chats read chat_template_kwargs.reasoning_effort differently")
	}
	if err := c.checkTextOnly(ctx); err != nil {
		return nil, err
	}
	a, err := c.call(ctx, tokenizePath, body.WithoutFields(payload, sglangNotAsked))
	if err != nil {
		return nil, err
	}
	ids, err := tokenized(a)
	if err != nil {
		return nil, err
	}
	return [][]kvblock.Token{ids}, nil
}

// modality is what a server reports about its model.
type modality struct {
	textOnly bool
	until    time.Time // when to ask again
}

// checkTextOnly returns an error for models that also take images or sound. SGLang encodes the text of their chats a
// second time, so /tokenize returns other ids.
func (c *Client) checkTextOnly(ctx context.Context) error {
	m := c.modality.Load()
	if m == nil || time.Now().After(m.until) {
		const path = "/model_info"
		a, err := c.call(ctx, path, nil)
		if err != nil {
			return err
		}
		info, err := read[struct {
			Image *bool `json:"has_image_understanding"`
			Audio *bool `json:"has_audio_understanding"`
		}](path, a)
		if err != nil {
			return err
		}
		if info.Image == nil || info.Audio == nil {
			return fail(Failed, "%s: the response does not say whether the model takes images or sound", path)
		}
		m = &modality{textOnly: !*info.Image && !*info.Audio, until: time.Now().Add(relearn)}
		c.modality.Store(m)
	}
	if !m.textOnly {
		return fail(Unsupported,
			"the model also takes images or sound: SGLang's /tokenize returns other ids than its chats have")
	}
	return nil
}

// plainJSON returns JSON with only the necessary escapes, so that most texts do not grow.
func plainJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}
