package router

// Reason says on what a decision rests. It is a metric's label: few values, none from a client.
type Reason string

// The reasons. Every one but ReasonKV, ReasonMediaPrefix and ReasonApproximate means that only load was priced.
const (
	ReasonKV Reason = "kv" // overlap and load
	// overlap of the prompt up to its first image, audio or video, and load
	ReasonMediaPrefix  Reason = "media_prefix"
	ReasonNoBody       Reason = "no_body"        // a request without a body, a GET for example
	ReasonBodyMode     Reason = "body_mode"      // the proxy's body mode does not let the body be waited for
	ReasonBodyCut      Reason = "body_cut"       // the proxy's buffer held less than the whole body
	ReasonBodyTooLarge Reason = "body_too_large" // above the size that is parsed
	// reading the body takes more memory than its bytes may, or it has too many prompts
	ReasonBodyValues  Reason = "body_values"
	ReasonUnknownAPI  Reason = "unknown_api"  // a path whose body kvepp does not read, a WebSocket, gRPC
	ReasonNoTokenizer Reason = "no_tokenizer" // no --model for the request's model
	// an image, audio or video in the prompt, and where it stands is not known
	ReasonMedia Reason = "media"
	// of /v1/responses or /v1/messages: something that no chat holds
	ReasonUnmapped       Reason = "unmapped"
	ReasonNoChatTemplate Reason = "no_chat_template" // a chat, and the model's folder has no template
	// what only the engine can tokenize, or refuses; the debug log says which
	ReasonTokenize Reason = "tokenize_error"
	// only the engine at --tokenizer-url knows the tokens, and it failed
	ReasonRemoteError Reason = "tokenizer_url_error"
	// the same, and it did not answer in time, or had too much to answer
	ReasonRemoteTimeout Reason = "tokenizer_url_timeout"
	// the same, and after many failures it is left alone for a while
	ReasonRemoteOpen Reason = "tokenizer_url_open"
	// the body was not read, or its prompt not tokenized, within --pick-timeout
	ReasonPickTimeout Reason = "pick_timeout"
	// kvepp's ids, or the files behind them, were found to be others than the engine's
	ReasonTokenizerDiffers Reason = "tokenizer_differs"
	ReasonNoBlockSize      Reason = "no_block_size" // the chosen worker's block size is not known
	// the chosen worker's events have another block size than was configured for it
	ReasonBlockSize Reason = "block_size_mismatch"
	// no events, at all or of the chosen worker: overlap by where requests went before, and load
	ReasonApproximate Reason = "approximate"
	ReasonNoCredit    Reason = "no_credit"   // cached blocks have no worth in the cost function
	ReasonNoEvents    Reason = "no_events"   // no candidate announces its blocks
	ReasonMode        Reason = "router_mode" // --router-mode is one that looks at nothing of the prompt
	ReasonPanic       Reason = "panic"       // a defect of kvepp's, contained; the log has the stack
)

// reasons are all of them.
var reasons = []Reason{
	ReasonKV, ReasonMediaPrefix, ReasonNoBody, ReasonBodyMode, ReasonBodyCut, ReasonBodyTooLarge, ReasonBodyValues,
	ReasonUnknownAPI,
	ReasonNoTokenizer, ReasonMedia, ReasonUnmapped, ReasonNoChatTemplate, ReasonTokenize, ReasonRemoteError,
	ReasonRemoteTimeout, ReasonRemoteOpen, ReasonPickTimeout, ReasonTokenizerDiffers, ReasonNoBlockSize,
	ReasonBlockSize, ReasonApproximate, ReasonNoCredit,
	ReasonNoEvents, ReasonMode, ReasonPanic,
}
