package router

// Reason says what a decision rests on. It is a metric's label: few values, none from a client.
type Reason string

// The reasons. With every reason but the first three and ReasonApproximate, only load was priced.
const (
	ReasonKV         Reason = "kv"          // overlap and load
	ReasonKVRendered Reason = "kv_rendered" // the same, with the token ids of an engine or its tokenizer server
	// overlap of the prompt up to its first image, audio or video, and load
	ReasonMediaPrefix  Reason = "media_prefix"
	ReasonNoBody       Reason = "no_body"        // a request without a body, for example a GET
	ReasonBodyMode     Reason = "body_mode"      // the proxy's body mode does not let kvepp wait for the body
	ReasonBodyCut      Reason = "body_cut"       // the proxy's buffer held only a part of the body
	ReasonBodyTooLarge Reason = "body_too_large" // the body is larger than kvepp parses
	// reading the body takes more memory than its size allows, or it has too many prompts
	ReasonBodyValues Reason = "body_values"
	// the body is compressed, or its text is JSON that only the engine may read
	ReasonBodyEncoding Reason = "body_encoding"
	ReasonUnknownAPI   Reason = "unknown_api"  // a path whose body kvepp does not read; a WebSocket; gRPC
	ReasonNoTokenizer  Reason = "no_tokenizer" // no --model for the request's model
	// an image, audio or video at an unknown place in the prompt
	ReasonMedia Reason = "media"
	// /v1/responses or /v1/messages with content that no chat can hold
	ReasonUnmapped       Reason = "unmapped"
	ReasonNoChatTemplate Reason = "no_chat_template" // a chat, but the model's folder has no template
	// only the engine can tokenize or refuse the request; the debug log says why
	ReasonTokenize Reason = "tokenize_error"
	// only the engine at --tokenizer-url knows the tokens, and it failed
	ReasonRemoteError Reason = "tokenizer_url_error"
	// the same, but it did not answer in time, or is at its limit of requests
	ReasonRemoteTimeout Reason = "tokenizer_url_timeout"
	// the same, but it is not asked for a while after many failures
	ReasonRemoteOpen Reason = "tokenizer_url_open"
	// the body was not read, or its prompt not tokenized, within --pick-timeout
	ReasonPickTimeout Reason = "pick_timeout"
	// kvepp's token ids, or the files behind them, were found to differ from the engine's
	ReasonTokenizerDiffers Reason = "tokenizer_differs"
	// the workers' versions of the engine make different token ids, and no worker has the prompt's prefix cached
	ReasonEngineVersions Reason = "engine_versions"
	ReasonNoBlockSize    Reason = "no_block_size" // the chosen worker's block size is not known
	// the chosen worker's events have another block size than the configured one
	ReasonBlockSize Reason = "block_size_mismatch"
	// no events, from any worker, from the chosen one or of the request's namespace, or no token ids but an estimate:
	// overlap by earlier routing decisions, and load
	ReasonApproximate Reason = "approximate"
	// the engine reads its cache for no request of this kind, such as one for its prompt's log probabilities
	ReasonCacheNotRead Reason = "cache_not_read"
	ReasonNoCredit     Reason = "no_credit"   // the cost function gives cached blocks no credit
	ReasonNoEvents     Reason = "no_events"   // no candidate announces its blocks
	ReasonMode         Reason = "router_mode" // --router-mode ignores the prompt
	ReasonNotSampled   Reason = "not_sampled" // --shadow-share leaves the request out
	ReasonPanic        Reason = "panic"       // a defect in kvepp, contained; the log has the stack
)

// reasons are all of them.
var reasons = []Reason{
	ReasonKV, ReasonKVRendered,
	ReasonMediaPrefix, ReasonNoBody, ReasonBodyMode, ReasonBodyCut, ReasonBodyTooLarge, ReasonBodyValues,
	ReasonBodyEncoding, ReasonUnknownAPI,
	ReasonNoTokenizer, ReasonMedia, ReasonUnmapped, ReasonNoChatTemplate, ReasonTokenize, ReasonRemoteError,
	ReasonRemoteTimeout, ReasonRemoteOpen, ReasonPickTimeout, ReasonTokenizerDiffers, ReasonEngineVersions,
	ReasonNoBlockSize,
	ReasonBlockSize, ReasonApproximate, ReasonCacheNotRead, ReasonNoCredit,
	ReasonNoEvents, ReasonMode, ReasonNotSampled, ReasonPanic,
}

// exact reports whether the prompt's token ids are all known.
func (r Reason) exact() bool { return r == ReasonKV || r == ReasonKVRendered }
