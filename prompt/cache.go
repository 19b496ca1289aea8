package prompt

import (
	"strconv"

	"kvepp/prompt/body"
	"kvepp/prompt/values"
)

// What the fields of requests say about an engine's prefix cache.

// WritesCacheOnly reports whether the engine computes the whole prompt of a request, because it asks for something of
// each of its tokens, such as their log probabilities. The engine then adds the blocks to its cache, but reads none.
//
// Sources: vLLM 0.32.0 and 0.33.0, sampling_params, entrypoints/openai/chat_completion/protocol (0.31.0 reads its cache
// for an echo with top_logprobs null) and completion/protocol; SGLang 0.5.21 to 0.5.23, entrypoints/openai/
// serving_completions; Dynamo 1.6.1, common/backend/logprobs, and what its frontend sends to workers. TensorRT-LLM
// reads its cache.
func WritesCacheOnly(engine Engine, request *body.Request) bool {
	payload, echo := request.Body, request.Echo()
	chat := request.API == body.ChatCompletions
	sampling, _ := get[*values.Dict](payload, "sampling_params") // of /generate
	switch {
	case !chat && request.API != body.Completions:
		return false
	case engine == SGLang:
		logprobs, start := field(payload, "logprobs"), field(payload, "logprob_start_len") // the latter of /generate
		return !chat && (echo && logprobs != nil && logprobs != int64(0) && logprobs != false ||
			field(payload, "return_logprob") == true && start != nil && start != int64(-1))
	case engine == TRTLLM, engine != Dynamo && field(payload, "use_beam_search") == true:
		// The steps of a beam search ask for no prompt's.
		return false
	case field(payload, "prompt_logprobs") != nil, field(sampling, "prompt_logprobs") != nil:
		return true
	case engine == Dynamo:
		return !chat && echo
	case chat: // its top_logprobs are never absent
		return echo
	}
	return echo && field(payload, "logprobs") != nil
}

// Space names the part of an engine's prefix cache that holds a prompt's blocks.
type Space struct {
	LoRA string // the adapter; empty: the base model
	Salt string // the namespace; empty: the common one
}

// SGLangSpace returns the space of prompt i, from 0. adapter is the one in the model's name, which has precedence.
// unnamed says that KV events do not name the space: it has an extra_key.
//
// Sources: SGLang 0.5.21 to 0.5.23, entrypoints/openai/serving_chat, serving_completions, serving_responses (which has
// adapters of no request) and entrypoints/anthropic; managers/io_struct, GenerateReqInput (empty texts count as none);
// managers/schedule_batch, Req (the extra key and the adapter are one key beside the salt); mem_cache/events.
func SGLangSpace(request *body.Request, adapter string, i int) (s Space, unnamed bool) {
	payload := request.Body
	text := func(v any) string {
		if list, ok := v.(*values.List); ok { // one for each prompt
			if i >= len(list.Items) {
				return ""
			}
			v = list.Items[i]
		}
		text, _ := v.(string)
		return text
	}
	if s.LoRA = adapter; request.API == body.Responses {
		s.LoRA = ""
	}
	if request.API == body.Messages {
		return s, false
	}
	if adapter == "" && request.API != body.Responses {
		s.LoRA = text(field(payload, "lora_path"))
	}
	s.Salt = text(field(payload, "cache_salt"))
	if key := text(field(payload, "extra_key")); key != "" {
		s.Salt, unnamed = "extra_key "+strconv.Quote(key)+" "+s.Salt, true
	}
	return s, unnamed
}

// SGLangSpacesDiffer reports whether the prompts of a request may have different spaces.
func SGLangSpacesDiffer(request *body.Request) bool {
	payload := request.Body
	for _, name := range []string{"lora_path", "cache_salt", "extra_key"} {
		if _, list := field(payload, name).(*values.List); list {
			return len(request.Prompts) > 1
		}
	}
	return false
}
