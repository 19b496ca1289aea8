package router

import (
	"time"

	"kvepp/indexer"
	"kvepp/internal/budget"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/modelrewrite"
	"kvepp/pool"
	"kvepp/router/eject"
	"kvepp/scoring"
	"kvepp/session"
	"kvepp/tokenizer"
	"kvepp/tokenizer/remote"
)

// Config is what an operator chooses.
type Config struct {
	// Models maps a model's name, as requests give it, to its tokenizer; nil for one that is served though it could not
	// be loaded.
	Models map[string]*tokenizer.Model
	// UpperBound reports whether the engines of a model may have less of a prompt cached than their KV events announce,
	// without a sign of it in the events. What is predicted for its requests is then an upper bound. nil: of no model.
	UpperBound func(model string) bool
	// Adapters are the LoRA adapters, each of which has the tokenizer and the workers of its model, and blocks of its
	// own. A name in Models or Remote is a model's, whatever events call an adapter. nil: there are none.
	Adapters *Adapters
	// Rewrites change the model that a request names, before anything else is made of that name. nil: none.
	Rewrites *modelrewrite.Rules
	// Objectives give priorities to requests that name one. nil: to none.
	Objectives *Objectives
	// StrictModel refuses requests for a model that neither this configuration nor a worker names. Otherwise workers
	// that do not say which model they serve are sent them.
	StrictModel bool
	// Remote maps a model's name to the engine that is asked for the token ids of requests that Models cannot tokenize;
	// nil asks nobody.
	Remote map[string]*remote.Client
	// Checks maps a model's name to the comparison of Models' ids with its engine's; nil compares nothing.
	Checks map[string]*remote.Check
	// IgnoreHints drops what clients say of their requests' routing, in headers and nvext.
	IgnoreHints bool
	// Sessions is the table of session affinity. The caller tells it which workers left. nil: there is no affinity.
	Sessions *session.Table
	// Pinning lets requests name the worker that they go to, in nvext.
	Pinning bool
	// Frontends says that the endpoints are Dynamo's frontends: they make the tenant of a request its cache salt, and
	// refuse what is for kvepp alone in a body.
	Frontends bool
	// KeepLegacyNvext leaves in a body for Dynamo's frontends what a frontend of Dynamo 1.6.1 refuses, for earlier ones
	// that do not.
	KeepLegacyNvext bool
	// InjectTokens puts the token ids of prompts into bodies for Frontends, where these are certain to make the same
	// ones.
	InjectTokens bool
	// TenantSalt makes the tenant of a request, or what else its cache namespace is, the cache salt of stock vLLM.
	TenantSalt bool
	// PromptComputed is called for each prompt of known tokens that a worker has computed. blockSize is the worker's,
	// in tokens; 0: not known. nil: not called.
	PromptComputed func(w kvblock.Worker, tokens, blockSize int)
	// Scoring holds the knobs of the cost function. It must have passed Validate. If its OverlapScoreCredit is 0 or its
	// Mode another than KV the index is never asked.
	Scoring scoring.Config
	// TrackOutput counts the blocks of answers while they are generated, for as long as the proxy shows them.
	TrackOutput bool
	// CountTokens has prompts tokenized in modes that read nothing of them as well, because something else wants their
	// numbers. false: such a prompt's load is estimated from its size.
	CountTokens bool
	// Thresholds say above which load a worker is no candidate. The zero value: whatever its load, it is one. They hold
	// for every model until SetThresholds changes them.
	Thresholds Thresholds
	// KVUsage appends to dst, for each worker number, the part of its KV blocks (0 to 1) that requests hold by its
	// engine's own account; 0 where that is not known, and so beyond the end. It is asked while Thresholds look at KV
	// blocks. nil: nothing is known but the book.
	KVUsage func(dst []float64) []float64
	// Queue has requests wait while every worker is busy. nil: none ever does.
	Queue *Queue
	// Predict says how long a worker is believed to hold the blocks of the requests it is sent, whatever its events
	// say.
	Predict Predict
	// Metrics is told of choices and answers, under the names of Dynamo's own router; nil: nobody is.
	Metrics *metrics.Router
	// Picker is told of requests, under the names of the Gateway API Inference Extension's endpoint picker; nil: nobody
	// is.
	Picker *metrics.Picker
	// Explain has every Decision list its candidates, with all terms of their costs. So do Keep and a log at debug
	// level.
	Explain bool
	// Memory is what requests may take until they are routed. nil: without limit.
	Memory *budget.Budget
	// PickTimeout is how long it may take until a body is read and its prompt's token ids are known, waiting for memory
	// and for a processor included; then the request is routed by load. 0: however long it takes.
	PickTimeout time.Duration
	// Eject leaves out endpoints that fail or are cordoned. The pool tells it who joins and leaves. nil: none is left
	// out.
	Eject *eject.Tracker
	// FirstByte is how long the headers of a streamed response, and of any response to a trial request, may take before
	// that is a failure. 0: however long they take.
	FirstByte time.Duration
	// Fallbacks is how many further endpoints a decision names, for a proxy that may try them in order. 0: none.
	Fallbacks int
	// Keep is how many of the latest decisions are kept for Router.Records. 0: none.
	Keep int
	// StockPrefill says that prefill workers are stock engines, which the destination reaches at their addresses, and
	// not Dynamo's, which its frontend reaches by their ids: a prefill worker without an address is no candidate, and
	// decode workers serve alone where there is none.
	StockPrefill bool
}

// Predict is how routing decisions count as stores. The zero value: they do not.
type Predict struct {
	// TTL is how long a block counts after the latest request with it. 0: not at all.
	TTL time.Duration
	// LRU lets blocks count until the worker's cache would be full, instead of for a time; TTL still holds for workers
	// of which the number of blocks is not known.
	LRU bool
	// Alone says that there are no events: overlap is predicted or not known.
	Alone bool
	// Silent is the TTL for a worker that should send events and does not. 0: TTL.
	Silent time.Duration
}

// lifetime returns how long w is believed to hold a block it was sent.
func (p *Predict) lifetime(w *pool.Worker) indexer.Lifetime {
	if p.LRU && w.TotalKVBlocks > 0 {
		return indexer.Lifetime{Blocks: w.TotalKVBlocks}
	}
	if w.Silent && p.Silent > 0 {
		return indexer.Lifetime{TTL: p.Silent}
	}
	return indexer.Lifetime{TTL: p.TTL}
}

// names reports whether the operator named the model.
func (c *Config) names(model string) bool {
	_, own := c.Models[model]
	_, asked := c.Remote[model]
	return own || asked
}

// modelNames returns the models that the operator named.
func (c *Config) modelNames() map[string]bool {
	names := make(map[string]bool, len(c.Models)+len(c.Remote))
	for name := range c.Models {
		names[name] = true
	}
	for name := range c.Remote {
		names[name] = true
	}
	return names
}

// asksIndex reports whether what workers hold has any part in a choice.
func (c *Config) asksIndex() bool {
	return c.Scoring.Mode == scoring.KV && c.Scoring.OverlapScoreCredit != 0
}
