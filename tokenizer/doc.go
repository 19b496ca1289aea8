// Package tokenizer turns a request's text into the token ids that the inference engine will compute from it.
//
// It owns the reading of a model's Hugging Face folder (tokenizer.json, tokenizer_config.json, the chat template) and
// the encoding itself: byte-level BPE and SentencePiece-style BPE, exact to the id, in Go without cgo. It never
// guesses: a component that it does not know exactly is refused when the model is loaded, by name, because one wrong id
// would turn every later block hash wrong, silently.
//
// A Model is safe for concurrent use. Its caches are bounded: at most 64 MiB of remembered
// messages, and a MiB of remembered words for each encoding that runs at the same time, up to one a processor.
package tokenizer
