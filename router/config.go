package router

import (
	"time"

	"kvepp/indexer"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/remote"
	"kvepp/router/budget"
	"kvepp/router/eject"
	"kvepp/router/modelrewrite"
	"kvepp/router/queue"
	"kvepp/router/record"
	"kvepp/router/session"
	"kvepp/scoring"
)

// bytesPerToken is the size of a body divided by its prompt tokens, for prompts that are not tokenized. It fits English
// text in JSON.
const bytesPerToken = 4

// Config is what an operator chooses.
type Config struct {
	// Models maps a model's name, as requests give it, to its tokenizer. A nil tokenizer stands for a model whose
	// tokenizer could not be loaded.
	Models map[string]*prompt.Model
	// UpperBound reports whether the engines of a model may have less of a prompt cached than their KV events announce,
	// without a sign of it in the events. Predictions for its requests are then marked as upper bounds. nil: no model.
	UpperBound func(model string) bool
	// Engine is the engine of all endpoints: its rules say which part of its cache a request uses. Empty: vLLM.
	Engine prompt.Engine
	// Adapters are the LoRA adapters. An adapter shares the tokenizer and the workers of its model and has blocks of
	// its own. A name in Models or Remote is always a model's. nil: no adapters.
	Adapters *Adapters
	// Rewrites replace the model that a request names, before the name is used. nil: none.
	Rewrites *modelrewrite.Rules
	// Objectives give priorities to requests that name an objective. nil: none.
	Objectives *Objectives
	// StrictModel refuses requests for a model that neither this configuration nor a worker names. Otherwise they go to
	// workers that report no model.
	StrictModel bool
	// Remote maps a model's name to the engine that tokenizes the requests that Models cannot. nil: none.
	Remote map[string]*remote.Client
	// RemoteOf returns an engine that tokenizes the requests of a model that is not in Remote; nil: none does. A nil
	// function: none.
	RemoteOf func(model string) *remote.Client
	// EstimateTokens takes 4 bytes of a prompt as a token where its token ids are not known: requests with the same
	// beginning then follow earlier routing decisions.
	EstimateTokens bool
	// Checks maps a model's name to the comparison of Models' token ids with its engine's. nil: none.
	Checks map[string]*remote.Check
	// IgnoreHints ignores the routing hints of clients, in headers and nvext.
	IgnoreHints bool
	// Sessions is the table of session affinity. The caller reports workers that left to it. nil: no affinity.
	Sessions *session.Table
	// Responses knows which worker has which stored response. The caller reports workers that left to it. nil: requests
	// that name a stored response are routed as others.
	Responses *session.Table
	// Pinning lets requests name their worker in nvext.
	Pinning bool
	// Frontends says that the endpoints are Dynamo's frontends. They make a request's tenant its cache salt, and refuse
	// body fields that are for kvepp alone.
	Frontends bool
	// InjectTokens puts prompts' token ids into bodies for Frontends, if the frontend would certainly compute the same
	// ids.
	InjectTokens bool
	// TenantSalt makes a request's tenant, or else its cache namespace, the cache salt of stock vLLM.
	TenantSalt bool
	// PromptComputed is called for each prompt of known tokens that a worker has computed. blockSize is the worker's,
	// in tokens; 0: not known. nil: not called.
	PromptComputed func(w kvblock.Worker, tokens, blockSize int)
	// Scoring configures the cost function. It must have passed Validate. If OverlapScoreCredit is 0 or Mode is not KV,
	// the index is never asked.
	Scoring scoring.Config
	// TrackOutput counts the blocks of responses while they are generated, as far as the proxy shows the responses.
	TrackOutput bool
	// CountTokens tokenizes prompts even in modes that ignore the prompt, because another feature needs their length.
	// false: in these modes a prompt's load is estimated from its size.
	CountTokens bool
	// Thresholds are the loads above which a worker is no candidate, for every model until SetThresholds changes them.
	// The zero value: none.
	Thresholds Thresholds
	// KVUsage appends to dst, for each worker number, the share of KV blocks in use (0..1) that its engine reports; 0
	// if unknown, as for workers beyond the end. It is called while a threshold reads KV blocks. nil: only the load
	// book is read.
	KVUsage func(dst []float64) []float64
	// Queue makes requests wait while every worker is busy. nil: no request waits.
	Queue *queue.RoomConfig
	// TenantHeader is the header whose value says who sent a request, in lower case: body.Hints.Sender. Empty:
	// body.Hints.Fairness says so.
	TenantHeader string
	// Charged is called with what a tenant of the queue was charged, for the turn of a request or beside it, and with
	// whether requests of it wait: for Router.HeardTenant of other replicas. nil: not called.
	Charged func(tenant uint64, tokens int, turn, waits bool)
	// Admission makes conversations wait while the workers' KV caches have no room for them. Scoring.Mode must be KV.
	// nil: none waits for that.
	Admission *Admission
	// Predict says for how long the index assumes that a worker holds the blocks of the requests it was sent.
	Predict Predict
	// Metrics counts choices and responses under the names of Dynamo's own router. nil: not counted.
	Metrics *metrics.Router
	// Picker counts requests under the names of the Gateway API Inference Extension's endpoint picker. nil: not
	// counted.
	Picker *metrics.Picker
	// Recorder gets each request that has ended. nil: nothing is recorded.
	Recorder *record.Recorder
	// Ladder counts where cached tokens are lost. nil: not counted.
	Ladder *Ladder
	// Explain makes every Decision list its candidates with the terms of their costs. Keep and a log at debug level do
	// the same.
	Explain bool
	// Memory bounds what requests take until they are routed. nil: no limit.
	Memory *budget.Budget
	// PickTimeout bounds the time until a body is read and its prompt's token ids are known, with the waits for memory
	// and a processor. After it the request is routed by load. 0: no limit.
	PickTimeout time.Duration
	// Eject excludes endpoints that fail or are cordoned. The pool reports joins and leaves to it. nil: none are
	// excluded.
	Eject *eject.Tracker
	// FirstByte bounds the time until the headers of a streamed response, or of any response to a trial request. After
	// it the request counts as a failure. 0: no limit.
	FirstByte time.Duration
	// FirstTokens hears of first tokens that workers note on Dynamo's event plane. nil: none are noted.
	FirstTokens *FirstTokens
	// Fallbacks is how many further endpoints a decision names, for a proxy that tries them in order. 0: none.
	Fallbacks int
	// Keep is how many of the latest decisions are kept for Router.Records. 0: none.
	Keep int
	// StockPrefill says that prefill workers are stock engines, which the destination reaches at their addresses.
	// Otherwise they are Dynamo's, which its frontend reaches by their ids. With it, a prefill worker without an
	// address is no candidate, and decode workers take requests alone if there is no prefill worker.
	StockPrefill bool
	// NoPrefill uses no prefill worker. It needs StockPrefill.
	NoPrefill bool
	// LabelServed makes the name of a model a metric's label once an endpoint has served a request with it. Else only
	// the names that the operator or a worker gave are.
	LabelServed bool
	// Disaggregation says for which prompts a decode worker works alone. Its Read must have accepted it.
	Disaggregation scoring.Disaggregation
}

// Predict configures how routing decisions count as stored blocks. The zero value: not at all.
type Predict struct {
	// TTL is how long a block counts after the latest request with it. 0: not at all.
	TTL time.Duration
	// LRU counts blocks until the worker's cache would be full, instead of for a time. TTL still holds for workers
	// whose number of KV blocks is not known.
	LRU bool
	// Alone says that there are no KV events: overlap is predicted or unknown.
	Alone bool
	// Silent is the TTL for a worker that should send events and does not. 0: TTL.
	Silent time.Duration
}

// lifetime returns for how long w is assumed to hold a block that it was sent.
func (c *Config) lifetime(w *pool.Worker) indexer.Lifetime {
	p := &c.Predict
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

// asksIndex reports whether cached blocks have any part in a choice.
func (c *Config) asksIndex() bool {
	return c.Scoring.Mode == scoring.KV && c.Scoring.OverlapScoreCredit != 0
}
