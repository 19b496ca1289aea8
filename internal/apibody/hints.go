package apibody

import (
	"cmp"
	"math"
	"math/big"
	"strconv"
	"strings"

	"kvepp/chattemplate"
)

// Hints is what a request says of its own routing, in its body (nvext) or in headers. Every field is optional; a header
// goes before the body, field by field.
//
// Source: dynamo-llm 1.6.1, protocols/common/extensions and protocols/agents; session_control: dynamo-llm 1.2,
// protocols/openai/nvext.
type Hints struct {
	// Priority is agent_hints.priority, or the header x-dynamo-request-priority: higher goes first in the queue. nil:
	// not said.
	Priority *int32
	// StrictPriority is agent_hints.strict_priority, or the header x-dynamo-request-strict-priority: before all
	// requests of a lower one. 0 is the default.
	StrictPriority uint32
	// LatencySensitivity is agent_hints.latency_sensitivity, which stands for Priority where that is not said. 0: not
	// said.
	LatencySensitivity float64
	// ExpectedOutputTokens is agent_hints.osl: how many tokens the answer will have. 0: not said.
	ExpectedOutputTokens int
	// PolicyClass is the header x-dynamo-meta-policy-class: the queue's policy class, or a family of them.
	PolicyClass string
	// Objective is the header x-llm-d-inference-objective, or x-gateway-inference-objective: the name of an
	// InferenceObjective, which has a priority.
	Objective string
	// Tenant is the header x-tenant-id. Dynamo's frontends make it the request's cache salt; no engine knows it.
	Tenant string

	// Session names the conversation that the request belongs to, for session affinity: a header, else
	// session_control.session_id. Empty: none.
	Session string
	// ParentSession is the session whose agent made this one for a part of its work. Empty: none.
	ParentSession string
	// SessionFinal says that this is the last request of its session: the header x-dynamo-session-final, or
	// session_control.action "close".
	SessionFinal bool
	// SessionOpen says that the session is to be kept even where affinity is not configured: session_control.action
	// "open" or "bind".
	SessionOpen bool
	// SessionTimeoutSecs is session_control.timeout, with SessionOpen: after how many seconds without a request the
	// session ends.
	SessionTimeoutSecs int

	// Malformed are the hints that were there and could not be read, one of HintNames each; nil if there are none.
	Malformed []string

	strictSaid bool // StrictPriority 0 was said, and is not the default
}

// HintNames are the names of hints, as metrics have them.
var HintNames = []string{
	"priority",
	"strict_priority",
	"latency_sensitivity",
	"osl",
	"policy_class",
	"objective",
	"tenant",
	"session",
	"session_final",
	"session_control",
	"pin",
	"override",
	"routing_constraints",
}

// defaultSessionTimeoutSecs is what stands for an absent session_control.timeout. Source: dynamo-llm 1.2, nvext.
const defaultSessionTimeoutSecs = 300

// WithDefaults returns the hints of headers before those of a body.
func (h Hints) WithDefaults(body Hints) Hints {
	if h.Priority == nil {
		h.Priority = body.Priority
	}
	if !h.strictSaid {
		h.StrictPriority, h.strictSaid = body.StrictPriority, body.strictSaid
	}
	if h.Session == "" {
		h.Session = body.Session
	}
	h.SessionFinal = h.SessionFinal || body.SessionFinal
	h.SessionOpen, h.SessionTimeoutSecs = body.SessionOpen, body.SessionTimeoutSecs
	h.LatencySensitivity, h.ExpectedOutputTokens = body.LatencySensitivity, body.ExpectedOutputTokens
	h.Malformed = append(h.Malformed, body.Malformed...)
	return h
}

// Given returns the names of the hints that are there, malformed or not.
func (h *Hints) Given() []string {
	given := h.Malformed[:len(h.Malformed):len(h.Malformed)]
	for _, x := range []struct {
		name  string
		given bool
	}{
		{"priority", h.Priority != nil},
		{"strict_priority", h.strictSaid},
		{"latency_sensitivity", h.LatencySensitivity != 0},
		{"osl", h.ExpectedOutputTokens != 0},
		{"policy_class", h.PolicyClass != ""},
		{"objective", h.Objective != ""},
		{"tenant", h.Tenant != ""},
		{"session", h.Session != ""},
		{"session_final", h.SessionFinal && !h.SessionOpen},
		{"session_control", h.SessionOpen},
	} {
		if x.given {
			given = append(given, x.name)
		}
	}
	return given
}

// The headers that hints come in. Source: dynamo-llm 1.6.1, as for Hints; http/service/metadata.
const (
	headerPriority = iota
	headerStrictPriority
	headerSession
	headerParentSession
	headerSessionFinal
	headerClaudeSession
	headerClaudeAgent
	headerClaudeParentAgent
	headerCodexThread
	headerCodexParentThread
	headerOpenCodeSession
	headerOpenCodeParentSession
	headerObjective
	headerOldObjective
	headers
	headerPolicyClass // these two are not read by their first value
	headerTenant
)

var hintHeaders = map[string]int{
	"x-dynamo-request-priority":        headerPriority,
	"x-dynamo-request-strict-priority": headerStrictPriority,
	"x-dynamo-session-id":              headerSession,
	"x-dynamo-parent-session-id":       headerParentSession,
	"x-dynamo-session-final":           headerSessionFinal,
	"x-claude-code-session-id":         headerClaudeSession,
	"x-claude-code-agent-id":           headerClaudeAgent,
	"x-claude-code-parent-agent-id":    headerClaudeParentAgent,
	"thread-id":                        headerCodexThread,
	"x-codex-parent-thread-id":         headerCodexParentThread,
	"x-session-id":                     headerOpenCodeSession,
	"x-parent-session-id":              headerOpenCodeParentSession,
	"x-llm-d-inference-objective":      headerObjective,
	"x-gateway-inference-objective":    headerOldObjective,
	"x-dynamo-meta-policy-class":       headerPolicyClass,
	"x-tenant-id":                      headerTenant,
}

// DynamoHintHeaders are the headers with hints that are Dynamo's own, and not an agent's.
var DynamoHintHeaders = []string{"x-dynamo-request-priority", "x-dynamo-request-strict-priority", "x-dynamo-session-id",
	"x-dynamo-parent-session-id", "x-dynamo-session-final", "x-dynamo-meta-policy-class", "x-tenant-id"}

// ObjectiveHeaders are those by which a client names its request's objective. No endpoint is to see them.
var ObjectiveHeaders = []string{"x-llm-d-inference-objective", "x-gateway-inference-objective"}

// SessionHeaders are all headers in which Dynamo's frontend looks for a request's session. One with an affinity of its
// own would send the request to the worker of its session's first, whatever its other headers say.
var SessionHeaders = []string{"x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final",
	"x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id",
	"thread-id", "x-codex-parent-thread-id", "x-session-id", "x-parent-session-id"}

// HeaderHints gathers the hints of a request's headers. The zero value has seen none.
type HeaderHints struct {
	first       [headers]string // trimmed; empty if the first occurrence cannot be read
	seen        [headers]bool
	policyClass string
	policySeen  bool
	tenant      string
	malformed   []string
}

// Add takes one header, by its name in lower case. All occurrences of a header are added, in their order.
func (h *HeaderHints) Add(name, value string) {
	i, ok := hintHeaders[name]
	if !ok {
		return
	}
	readable, value := visible(value), strings.TrimSpace(value)
	switch i {
	case headerTenant: // the last that is not blank counts
		if !readable {
			h.malformed = append(h.malformed, "tenant")
		} else if value != "" {
			h.tenant = value
		}
	case headerPolicyClass: // the first that can be read, and does not look like a secret
		switch {
		case !readable:
			h.malformed = append(h.malformed, "policy_class")
		case !h.policySeen && !(len(value) >= 7 && strings.EqualFold(value[:7], "bearer ")):
			h.policyClass, h.policySeen = value, true
		}
	default:
		if h.seen[i] {
			return
		}
		h.seen[i] = true
		if readable {
			h.first[i] = value
		} else if i == headerObjective || i == headerOldObjective {
			h.malformed = append(h.malformed, "objective")
		} else if i != headerPriority && i != headerStrictPriority &&
			i != headerSessionFinal { // those are counted when they are parsed
			h.malformed = append(h.malformed, "session")
		}
	}
}

// Hints returns what the headers added so far say.
func (h *HeaderHints) Hints() Hints {
	out := Hints{
		PolicyClass: h.policyClass,
		Objective:   cmp.Or(h.first[headerObjective], h.first[headerOldObjective]),
		Tenant:      h.tenant,
		Malformed:   h.malformed,
	}
	if h.seen[headerPriority] {
		if n, err := strconv.ParseInt(h.first[headerPriority], 10, 32); err == nil {
			priority := int32(n)
			out.Priority = &priority
		} else {
			out.Malformed = append(out.Malformed, "priority")
		}
	}
	if h.seen[headerStrictPriority] {
		// Rust reads a plus before an unsigned number, Go does not.
		if n, err := strconv.ParseUint(strings.TrimPrefix(h.first[headerStrictPriority], "+"), 10, 32); err == nil {
			out.StrictPriority, out.strictSaid = uint32(n), true
		} else {
			out.Malformed = append(out.Malformed, "strict_priority")
		}
	}
	if h.seen[headerSessionFinal] {
		switch strings.ToLower(h.first[headerSessionFinal]) {
		case "1", "true", "on", "yes":
			out.SessionFinal = true
		case "0", "false", "off", "no":
		default:
			out.Malformed = append(out.Malformed, "session_final")
		}
	}
	out.Session, out.ParentSession = h.session()
	return out
}

// session returns the session's id and its parent's: Dynamo's own headers go before those of coding agents, each of
// which names its sessions in a way of its own.
func (h *HeaderHints) session() (id, parent string) {
	switch {
	case h.first[headerSession] != "":
		id, parent = h.first[headerSession], h.first[headerParentSession]
	case h.first[headerClaudeSession] != "":
		root := h.first[headerClaudeSession]
		if id = h.first[headerClaudeAgent]; id == "" || id == root {
			return root, "" // not an agent's agent, whatever else is said
		}
		if parent = h.first[headerClaudeParentAgent]; parent == "" || parent == id {
			parent = root
		}
	case h.first[headerCodexThread] != "":
		id, parent = h.first[headerCodexThread], h.first[headerCodexParentThread]
	default:
		id, parent = h.first[headerOpenCodeSession], h.first[headerOpenCodeParentSession]
	}
	if id == "" || parent == id {
		parent = ""
	}
	return id, parent
}

// visible reports whether a header's value is visible ASCII, spaces and tabs: Dynamo's frontend does not see others.
func visible(value string) bool {
	for i := range len(value) {
		if c := value[i]; c != '\t' && (c < ' ' || c > '~') {
			return false
		}
	}
	return true
}

// readHints reads the hints in nvext. What is malformed is left out: it is the engine that judges it.
func readHints(nvext *chattemplate.Dict) (h Hints) {
	if hints, ok := object(nvext, "agent_hints", &h, "priority"); ok {
		if n, ok := integer(hints, "priority", math.MinInt32, math.MaxInt32, &h, "priority"); ok {
			priority := int32(n)
			h.Priority = &priority
		}
		if n, ok := integer(hints, "strict_priority", 0, math.MaxUint32, &h, "strict_priority"); ok {
			h.StrictPriority, h.strictSaid = uint32(n), true
		}
		if n, ok := integer(hints, "osl", 0, math.MaxUint32, &h, "osl"); ok {
			h.ExpectedOutputTokens = int(n)
		}
		if v, _ := hints.Get("latency_sensitivity"); v != nil {
			if x, ok := number(v); ok {
				h.LatencySensitivity = x
			} else {
				h.Malformed = append(h.Malformed, "latency_sensitivity")
			}
		}
	}
	if control, ok := object(nvext, "session_control", &h, "session_control"); ok {
		readSessionControl(control, &h)
	}
	return h
}

func readSessionControl(control *chattemplate.Dict, h *Hints) {
	id, ok := field[string](control, "session_id")
	if ok = ok && strings.TrimSpace(id) != ""; !ok {
		h.Malformed = append(h.Malformed, "session_control")
		return
	}
	h.Session = strings.TrimSpace(id)
	switch action, _ := control.Get("action"); action {
	case nil:
	case "open", "bind":
		h.SessionOpen, h.SessionTimeoutSecs = true, defaultSessionTimeoutSecs
		if n, ok := integer(control, "timeout", 1, math.MaxInt32, h, "session_control"); ok {
			h.SessionTimeoutSecs = int(n)
		}
	case "close":
		h.SessionFinal = true
	default:
		h.Malformed = append(h.Malformed, "session_control")
	}
}

// object returns a field that is to be an object. One that is something else is noted as a malformed hint.
func object(d *chattemplate.Dict, key string, h *Hints, hint string) (*chattemplate.Dict, bool) {
	v, _ := d.Get(key)
	o, ok := v.(*chattemplate.Dict)
	if v != nil && !ok {
		h.Malformed = append(h.Malformed, hint)
	}
	return o, ok
}

// integer returns a field that is to be an integer of a range. One that is something else is noted as a malformed hint.
func integer(d *chattemplate.Dict, key string, least, most int64, h *Hints, hint string) (int64, bool) {
	v, _ := d.Get(key)
	n, ok := v.(int64)
	if ok = ok && least <= n && n <= most; v != nil && !ok {
		h.Malformed = append(h.Malformed, hint)
	}
	return n, ok
}

// number returns a JSON number as a float; false if it is none, or too large for one.
func number(v any) (float64, bool) {
	switch x := v.(type) {
	case int64:
		return float64(x), true
	case float64:
		return x, true
	case *big.Int:
		f, _ := new(big.Float).SetInt(x).Float64()
		return f, !math.IsInf(f, 0)
	}
	return 0, false
}
