package body

import "kvepp/prompt/values"

// The tables of the fields that kvepp reads, and how. Other fields are checked and skipped, in the body and in nvext,
// and take no memory. TestFieldsAreThoseRead compares the tables with the code that reads the fields.

// topLevelFields are the fields of the outermost object that any API or engine reads.
var topLevelFields = map[string]values.JSONField{
	"add_generation_prompt": 0, "add_special_tokens": 0, "best_of": 0,
	"cache_salt": 0, "chat_template": 0, "chat_template_args": 0,
	"chat_template_kwargs": 0, "continue_final_message": 0, "conversation": 0, "documents": 0, "echo": 0, "input": 0,
	"instructions": 0, "max_completion_tokens": 0, "max_output_tokens": 0, "max_tokens": 0, "messages": 0, "model": 0,
	"n": 0, "output_config": 0, "previous_input_messages": 0, "previous_response_id": 0, "prompt_embeds": 0,
	"prompt_token_ids_b64": 0,
	"reasoning":            0, "reasoning_effort": 0, "store": 0, "stream": 0, "suffix": 0, "system": 0, "task": 0,
	"thinking":    0,
	"tool_choice": 0,
	"tools":       0,
	"extra_key":   0, "lora_path": 0, "logprobs": 0, "prompt_logprobs": 0, "use_beam_search": 0,
	"truncate_prompt_tokens": 0, "truncation": 0,
	"text": 0, "features": 0, "content_parts": 0, "image_data": 0, "video_data": 0, "audio_data": 0,
	"input_embeds": 0, "session_params": 0, "return_logprob": 0, "logprob_start_len": 0,
	"input_ids": values.JSONTokenIDs, "prompt": values.JSONTokenIDs,
	"prompt_token_ids": values.JSONTokenIDs, "token_ids": values.JSONTokenIDs, "sampling_params": values.JSONFields,
	"response_format": values.JSONFields, "kv_transfer_params": values.JSONFields,
	"mm_processor_kwargs": values.JSONFields, "nvext": values.JSONFields,
}

// nvextFields are the fields of nvext.
var nvextFields = map[string]values.JSONField{
	"agent_hints": 0, "annotations": 0, "backend_instance_id": 0, "cache_salt": 0, "decode_worker_id": 0, "dp_rank": 0,
	"prefill_dp_rank": 0, "prefill_worker_id": 0, "router": 0, "router_config_override": 0, "routing_constraints": 0,
	"session_control": 0,
	"token_data":      values.JSONTokenIDs,
}

// fieldsOf maps a field of the outermost object to the table of its own fields; "" is the outermost object.
var fieldsOf = map[string]map[string]values.JSONField{
	"":                    topLevelFields,
	"nvext":               nvextFields,
	"kv_transfer_params":  {"prompt_token_ids": values.JSONTokenIDs},
	"mm_processor_kwargs": {"use_audio_in_video": 0},
	"response_format":     {}, // only its presence matters
	"sampling_params":     {"max_tokens": 0, "max_new_tokens": 0, "n": 0, "prompt_logprobs": 0},
}

// requestField returns how ParseRequest reads a field.
func requestField(parent, key string) values.JSONField {
	how, read := fieldsOf[parent][key]
	if !read {
		return values.JSONSkip
	}
	return how
}

// routingField returns how a Parser with NoTokens reads a field.
func routingField(parent, key string) values.JSONField {
	how := requestField(parent, key)
	if parent == "" && promptOnly(key) {
		how |= values.JSONAsWritten
	}
	return how
}

// routeOnlyField returns how to read a field if the prompt is not read: it keeps only the fields that decide the route.
func routeOnlyField(parent, key string) values.JSONField {
	if parent == "" {
		switch key {
		case "model", "stream", "nvext", "cache_salt", "max_completion_tokens", "max_tokens", "max_output_tokens", "n",
			"best_of", "previous_response_id", "store", "sampling_params":
		default:
			return values.JSONSkip
		}
	}
	return requestField(parent, key)
}

// promptOnly reports whether a field is read only for the prompt's tokens.
func promptOnly(key string) bool {
	switch key {
	case "messages", "prompt", "text", "input", "instructions", "system", "tools", "documents", "chat_template":
		return true
	}
	return false
}
