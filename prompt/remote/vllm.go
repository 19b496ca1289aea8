package remote

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// vLLM has two ways to return a request's ids. Its render endpoints take the request's own body and run the code that
// serves it. A server has them with --enable-scale-out; `vllm launch render` starts a server of them that needs no GPU.
// Every server has /tokenize, which knows fewer fields. Source: vLLM 0.33.0, entrypoints/scale_out/render,
// entrypoints/serve/tokenize.

// vllmRender has the render endpoint of each API.
var vllmRender = map[body.API]string{
	body.ChatCompletions: "/v1/chat/completions/render",
	body.Completions:     "/v1/completions/render",
	body.Responses:       "/v1/responses/render",
	body.Messages:        "/v1/messages/render",
}

const tokenizePath = "/tokenize"

func (c *Client) vllm(ctx context.Context, request *body.Request, payload []byte) ([][]kvblock.Token, error) {
	path, known := vllmRender[request.API]
	if !known {
		return nil, fail(Unsupported, "vLLM has no render endpoint for %s", request.API)
	}
	only := vllmRenderOnly(request)
	if time.Now().UnixNano() < c.withoutRender.Load() {
		if only != "" {
			return nil, fail(Unsupported, "%s: only vLLM's render endpoints read this, and this server has none", only)
		}
		return c.vllmTokenize(ctx, request, payload)
	}
	a, err := c.call(ctx, path, payload)
	if err != nil {
		return nil, err
	}
	switch a.status {
	case http.StatusForbidden: // vLLM's status for endpoints that are switched off
		c.learnWithoutRender(a)
	case http.StatusNotFound, http.StatusMethodNotAllowed: // an older version, or a model that the server does not have
	default:
		return vllmRendered(request, path, a)
	}
	if only != "" {
		if a.status == http.StatusForbidden {
			return nil, fail(Unsupported, "%s: only vLLM's render endpoints read this: %s", only, a.message())
		}
		return nil, a.err(path)
	}
	ids, err := c.vllmTokenize(ctx, request, payload)
	if err == nil {
		c.learnWithoutRender(a)
	}
	return ids, err
}

// learnWithoutRender remembers that the server has no render endpoints.
func (c *Client) learnWithoutRender(a *response) {
	c.withoutRender.Store(time.Now().Add(relearn).UnixNano())
	if !c.saidWithout.Swap(true) {
		c.log.Warn(
			"the server's render endpoints are off: kvepp asks its /tokenize, which does not know every field, "+
				"so that more "+
				"requests are routed by load; start vLLM with --enable-scale-out, or give the URL of a `vllm launch "+
				"render`",
			"response",
			a.message(),
		)
	}
}

// vllmRendered reads a render endpoint's response: the body that vLLM's /generate takes. The ids are one of its fields.
func vllmRendered(request *body.Request, path string, a *response) ([][]kvblock.Token, error) {
	type generate struct {
		TokenIDs []kvblock.Token `json:"token_ids"`
	}
	var all []generate
	var err error
	want := 1
	if request.API == body.Completions {
		all, err = read[[]generate](path, a)
		want = len(request.Prompts)
	} else {
		all = make([]generate, 1)
		all[0], err = read[generate](path, a)
	}
	if err != nil {
		return nil, err
	}
	if len(all) != want {
		return nil, fail(Failed, "%s: ids of %d prompts instead of %d", path, len(all), want)
	}
	ids := make([][]kvblock.Token, len(all))
	for i := range all {
		if ids[i] = all[i].TokenIDs; len(ids[i]) == 0 {
			return nil, fail(Failed, "%s: the response has no token_ids", path)
		}
	}
	return ids, nil
}

// maxTokenizeCalls is the most prompts of a request for which kvepp asks /tokenize, which takes one prompt a call.
const maxTokenizeCalls = 16

// vllmTokenize asks /tokenize. vllmRenderOnly must return "" for the request.
func (c *Client) vllmTokenize(ctx context.Context, request *body.Request, payload []byte) ([][]kvblock.Token, error) {
	bodies := [][]byte{payload}
	if request.API == body.Completions {
		bodies = nil
		for _, prompt := range request.Prompts {
			one := struct {
				Model            string `json:"model"`
				Prompt           string `json:"prompt"`
				AddSpecialTokens bool   `json:"add_special_tokens"`
			}{request.Model, prompt.Text, request.AddSpecialTokens == nil || *request.AddSpecialTokens}
			encoded, err := plainJSON(one)
			if err != nil {
				return nil, &Error{Outcome: Unsupported, err: err}
			}
			bodies = append(bodies, encoded)
		}
	}
	ids := make([][]kvblock.Token, len(bodies))
	for i, payload := range bodies {
		a, err := c.call(ctx, tokenizePath, payload)
		if err != nil {
			return nil, err
		}
		if ids[i], err = tokenized(a); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// tokenized reads /tokenize's response for one prompt, which has the same form on both engines. A response without ids
// means an empty prompt or a server without a tokenizer.
func tokenized(a *response) ([]kvblock.Token, error) {
	decoded, err := read[struct {
		Count  int
		Tokens []kvblock.Token
	}](tokenizePath, a)
	if err != nil {
		return nil, err
	}
	switch {
	case decoded.Tokens == nil || decoded.Count != len(decoded.Tokens):
		return nil, fail(Failed, "%s: %d tokens but a count of %d", tokenizePath, len(decoded.Tokens), decoded.Count)
	case decoded.Count == 0:
		return nil, fail(Unsupported, "%s: the response has no ids", tokenizePath)
	}
	return decoded.Tokens, nil
}

// vllmRenderOnly names a part of a request that changes the ids but that /tokenize ignores; "" if there is none. The
// list comes from a comparison of vLLM's ChatCompletionRequest and CompletionRequest with TokenizeChatRequest and
// TokenizeCompletionRequest, and of the fields that vLLM's renderers read.
func vllmRenderOnly(request *body.Request) string {
	var fields []string
	switch request.API {
	case body.Completions:
		if slices.ContainsFunc(request.Prompts, func(p body.Prompt) bool { return p.HasTokens }) {
			return "prompts of token ids"
		}
		if len(request.Prompts) > maxTokenizeCalls {
			return fmt.Sprintf("%d prompts", len(request.Prompts))
		}
		fields = []string{"truncate_prompt_tokens", "suffix", "prompt_embeds"}
	case body.ChatCompletions:
		fields = []string{
			"truncate_prompt_tokens",
			"documents",
			"reasoning_effort",
			"response_format",
			"kv_transfer_params",
		}
	default:
		return request.API.String()
	}
	for _, field := range fields {
		if v, _ := request.Body.Get(field); v != nil {
			return field
		}
	}
	if request.API == body.Completions {
		return ""
	}
	if choice, _ := request.Body.Get("tool_choice"); choice != nil && choice != "auto" {
		return "tool_choice"
	}
	for _, item := range request.Messages.Items {
		message, _ := item.(*values.Dict)
		if v, _ := message.Get("reasoning_content"); v != nil {
			return "reasoning_content"
		}
		if longToolCallID(message) {
			return "a tool call's id of more than 9 characters"
		}
	}
	return ""
}

// longToolCallID reports whether a message has an id that vLLM shortens for Mistral's own tokenizer in a chat but not
// in /tokenize.
func longToolCallID(message *values.Dict) bool {
	long := func(v any) bool {
		id, ok := v.(string)
		return ok && len(id) > 9
	}
	if id, _ := message.Get("tool_call_id"); long(id) {
		return true
	}
	calls, _ := message.Get("tool_calls")
	list, _ := calls.(*values.List)
	if list == nil {
		return false
	}
	return slices.ContainsFunc(list.Items, func(item any) bool {
		call, _ := item.(*values.Dict)
		id, _ := call.Get("id")
		return long(id)
	})
}
