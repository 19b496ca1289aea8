// Package prompt turns a request's text into the token ids that the inference engine will compute from it.
//
// It reads a model's Hugging Face folder (tokenizer.json, tokenizer_config.json, the chat template), and applies each
// engine's rules for chats. Package bpe encodes the text. If an engine would make something of a request that is not
// known here, the request gets an error instead of ids, because one wrong id makes every later block hash wrong.
// What an engine does for an API is in the file ENGINE_API.go, such as vllm_responses.go.
//
// A Model is safe for concurrent use.
package prompt
