package apibody

// Hints is what a request says of its own routing, in its body (nvext) or in headers. Every field is optional; a header goes
// before the body, field by field.
//
// Source: dynamo-llm 1.6.1, protocols/common/extensions and protocols/agents.
type Hints struct {
	// Priority is agent_hints.priority, or the header x-dynamo-request-priority: higher goes first in the queue. nil: not said.
	Priority *int32
	// StrictPriority is agent_hints.strict_priority, or the header x-dynamo-request-strict-priority: before all requests of a
	// lower one. 0 is the default.
	StrictPriority uint32
	// LatencySensitivity is agent_hints.latency_sensitivity, which stands for Priority where that is not said. 0: not said.
	LatencySensitivity float64
	// ExpectedOutputTokens is agent_hints.osl: how many tokens the answer will have. 0: not said.
	ExpectedOutputTokens int
	// PolicyClass is the header x-dynamo-meta-policy-class: the queue's policy class, or a family of them.
	PolicyClass string
	// Session names the conversation that the request belongs to, for session affinity. Empty: none.
	Session string
}
