package body

import (
	"cmp"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"

	"kvepp/prompt/values"
)

// Hints are a request's own wishes about its routing, in its body (nvext) or in headers. Every field is optional. For
// each field, a header takes precedence over the body.
//
// Source: dynamo-llm 1.6.1, protocols/common/extensions and protocols/agents; session_control: dynamo-llm 1.2,
// protocols/openai/nvext.
type Hints struct {
	// Priority is agent_hints.priority, or the header x-dynamo-request-priority. Higher priorities leave the queue
	// first. nil: absent.
	Priority *int32
	// StrictPriority is agent_hints.strict_priority, or the header x-dynamo-request-strict-priority. The request goes
	// before all requests with a lower one. The default is 0.
	StrictPriority uint32
	// LatencySensitivity is agent_hints.latency_sensitivity, which is used if Priority is absent. 0: absent.
	LatencySensitivity float64
	// ExpectedOutputTokens is agent_hints.osl: the expected length of the response, in tokens. 0: absent.
	ExpectedOutputTokens int
	// PolicyClass is the header x-dynamo-meta-policy-class: a policy class of the queue, or a family of classes.
	PolicyClass string
	// Objective is the header x-llm-d-inference-objective, or x-gateway-inference-objective: the name of an
	// InferenceObjective, which sets a priority.
	Objective string
	// Tenant is the header x-tenant-id. Dynamo's frontends use it as the request's cache salt. Engines do not read it.
	Tenant string
	// FirstToken is the header x-llm-d-slo-ttft-ms, or x-slo-ttft-ms, or router.ttft_target: how long after its arrival
	// the request wants its first token. 0: absent.
	FirstToken time.Duration
	// Fairness is the header x-llm-d-inference-fairness-id, or x-gateway-inference-fairness-id: who shares the queue
	// with others.
	Fairness string
	// Sender says the same by a header that the operator chose, such as an API key. It is no hint of the client's.
	Sender string

	// Session is the id of the request's conversation, for session affinity: from a header, else
	// session_control.session_id. Empty: none.
	Session string
	// ParentSession is the session whose agent started this session for a part of its work. Empty: none.
	ParentSession string
	// SessionFinal marks the last request of the session: the header x-dynamo-session-final, or session_control.action
	// "close".
	SessionFinal bool
	// SessionOpen says that the session is kept even if affinity is not configured: session_control.action "open" or
	// "bind".
	SessionOpen bool
	// SessionTimeoutSecs is session_control.timeout, with SessionOpen: the session ends after this many seconds without
	// a request.
	SessionTimeoutSecs int

	// Malformed are the names (of HintNames) of hints that were present but invalid; nil if there are none.
	Malformed []string

	hasStrictPriority bool // StrictPriority was given; distinguishes a given 0 from the default
}

// maxFirstToken is the longest time to a first token that a request may want, in milliseconds: a day.
const maxFirstToken = 24 * 60 * 60 * 1000

// HintNames are the names of hints in metrics.
var HintNames = []string{
	"priority",
	"strict_priority",
	"latency_sensitivity",
	"osl",
	"ttft_slo",
	"fairness",
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

// defaultSessionTimeoutSecs replaces an absent session_control.timeout. Source: dynamo-llm 1.2, nvext.
const defaultSessionTimeoutSecs = 300

// WithDefaults returns h, the hints of headers, completed by those of a body.
func (h Hints) WithDefaults(body Hints) Hints {
	if h.Priority == nil {
		h.Priority = body.Priority
	}
	if !h.hasStrictPriority {
		h.StrictPriority, h.hasStrictPriority = body.StrictPriority, body.hasStrictPriority
	}
	if h.Session == "" {
		h.Session = body.Session
	}
	h.FirstToken = cmp.Or(h.FirstToken, body.FirstToken)
	h.SessionFinal = h.SessionFinal || body.SessionFinal
	h.SessionOpen, h.SessionTimeoutSecs = body.SessionOpen, body.SessionTimeoutSecs
	h.LatencySensitivity, h.ExpectedOutputTokens = body.LatencySensitivity, body.ExpectedOutputTokens
	h.Malformed = append(h.Malformed, body.Malformed...)
	return h
}

// Given returns the names of the hints that are present, malformed or not.
func (h *Hints) Given() []string {
	given := h.Malformed[:len(h.Malformed):len(h.Malformed)]
	for _, x := range []struct {
		name  string
		given bool
	}{
		{"priority", h.Priority != nil},
		{"strict_priority", h.hasStrictPriority},
		{"latency_sensitivity", h.LatencySensitivity != 0},
		{"osl", h.ExpectedOutputTokens != 0},
		{"policy_class", h.PolicyClass != ""},
		{"objective", h.Objective != ""},
		{"tenant", h.Tenant != ""},
		{"ttft_slo", h.FirstToken != 0},
		{"fairness", h.Fairness != ""},
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

// The headers with hints. Source: dynamo-llm 1.6.1, as for Hints; http/service/metadata.
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
	headerFairness
	headerOldFairness
	headerFirstToken
	headerOldFirstToken
	firstValueHeaders // of the headers above, the first value counts
	headerPolicyClass // this and the next have other rules
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
	"x-llm-d-inference-fairness-id":    headerFairness,
	"x-gateway-inference-fairness-id":  headerOldFairness,
	"x-llm-d-slo-ttft-ms":              headerFirstToken,
	"x-slo-ttft-ms":                    headerOldFirstToken,
	"x-dynamo-meta-policy-class":       headerPolicyClass,
	"x-tenant-id":                      headerTenant,
}

// DynamoHintHeaders are Dynamo's own headers with hints; the others are those of agents.
var DynamoHintHeaders = []string{"x-dynamo-request-priority", "x-dynamo-request-strict-priority", "x-dynamo-session-id",
	"x-dynamo-parent-session-id", "x-dynamo-session-final", "x-dynamo-meta-policy-class", "x-tenant-id"}

// ObjectiveHeaders are the headers with which a client names its request's objective. Endpoints must not see them.
var ObjectiveHeaders = []string{"x-llm-d-inference-objective", "x-gateway-inference-objective"}

// SessionHeaders are all headers in which Dynamo's frontend looks for a request's session. A frontend with its own
// affinity sends the request to the worker of its session's first request, and ignores the headers that kvepp sets.
var SessionHeaders = []string{"x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final",
	"x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id",
	"thread-id", "x-codex-parent-thread-id", "x-session-id", "x-parent-session-id"}

// HeaderHints collects the hints of a request's headers. The zero value is empty.
type HeaderHints struct {
	first       [firstValueHeaders]string // trimmed; empty if the first occurrence is invalid
	seen        [firstValueHeaders]bool
	policyClass string
	policySeen  bool
	tenant      string
	malformed   []string
}

// Add takes one header; name is in lower case. Call it for all occurrences of a header, in order.
func (h *HeaderHints) Add(name, value string) {
	i, ok := hintHeaders[name]
	if !ok {
		return
	}
	readable, value := isVisibleASCII(value), strings.TrimSpace(value)
	switch i {
	case headerTenant: // the last value that is not blank counts
		if !readable {
			h.malformed = append(h.malformed, "tenant")
		} else if value != "" {
			h.tenant = value
		}
	case headerPolicyClass: // the first valid value that does not look like a secret counts
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
		} else if i == headerFairness || i == headerOldFairness {
			h.malformed = append(h.malformed, "fairness")
		} else if i == headerFirstToken || i == headerOldFirstToken {
			h.malformed = append(h.malformed, "ttft_slo")
		} else if i != headerPriority && i != headerStrictPriority &&
			i != headerSessionFinal { // Hints counts those
			h.malformed = append(h.malformed, "session")
		}
	}
}

// Hints returns the hints of the headers added so far.
func (h *HeaderHints) Hints() Hints {
	out := Hints{
		PolicyClass: h.policyClass,
		Objective:   cmp.Or(h.first[headerObjective], h.first[headerOldObjective]),
		Fairness:    cmp.Or(h.first[headerFairness], h.first[headerOldFairness]),
		Tenant:      h.tenant,
		Malformed:   h.malformed,
	}
	if text := cmp.Or(h.first[headerFirstToken], h.first[headerOldFirstToken]); text != "" {
		ms, err := strconv.ParseFloat(text, 64)
		out.wantFirstToken(ms, err == nil)
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
		// Rust accepts a plus before an unsigned number, Go does not.
		if n, err := strconv.ParseUint(strings.TrimPrefix(h.first[headerStrictPriority], "+"), 10, 32); err == nil {
			out.StrictPriority, out.hasStrictPriority = uint32(n), true
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

// wantFirstToken takes the milliseconds within which a request wants its first token, if they are a number.
func (h *Hints) wantFirstToken(ms float64, ok bool) {
	if ok && ms > 0 && ms <= maxFirstToken {
		h.FirstToken = time.Duration(ms * float64(time.Millisecond))
	} else {
		h.Malformed = append(h.Malformed, "ttft_slo")
	}
}

// session returns the session's id and its parent's. Dynamo's own headers take precedence over those of the coding
// agents.
func (h *HeaderHints) session() (id, parent string) {
	switch {
	case h.first[headerSession] != "":
		id, parent = h.first[headerSession], h.first[headerParentSession]
	case h.first[headerClaudeSession] != "":
		root := h.first[headerClaudeSession]
		if id = h.first[headerClaudeAgent]; id == "" || id == root {
			return root, "" // the main agent: it has no parent
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

// isVisibleASCII reports whether a header's value is visible ASCII, spaces and tabs. Dynamo's frontend ignores others.
func isVisibleASCII(value string) bool {
	for i := range len(value) {
		if c := value[i]; c != '\t' && (c < ' ' || c > '~') {
			return false
		}
	}
	return true
}

// readHints reads the hints in nvext. Malformed hints are left out; the engine decides whether they are errors.
func readHints(nvext *values.Dict) (h Hints) {
	if hints, ok := object(nvext, "agent_hints", &h, "priority"); ok {
		if n, ok := integer(hints, "priority", math.MinInt32, math.MaxInt32, &h, "priority"); ok {
			priority := int32(n)
			h.Priority = &priority
		}
		if n, ok := integer(hints, "strict_priority", 0, math.MaxUint32, &h, "strict_priority"); ok {
			h.StrictPriority, h.hasStrictPriority = uint32(n), true
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
	if router, ok := object(nvext, "router", &h, "ttft_slo"); ok {
		if v, _ := router.Get("ttft_target"); v != nil {
			h.wantFirstToken(number(v))
		}
	}
	if control, ok := object(nvext, "session_control", &h, "session_control"); ok {
		readSessionControl(control, &h)
	}
	return h
}

func readSessionControl(control *values.Dict, h *Hints) {
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

// object returns a field that must be an object. A value of another type counts as a malformed hint.
func object(d *values.Dict, key string, h *Hints, hint string) (*values.Dict, bool) {
	v, _ := d.Get(key)
	o, ok := v.(*values.Dict)
	if v != nil && !ok {
		h.Malformed = append(h.Malformed, hint)
	}
	return o, ok
}

// integer returns a field that must be an integer within bounds. Another value counts as a malformed hint.
func integer(d *values.Dict, key string, least, most int64, h *Hints, hint string) (int64, bool) {
	v, _ := d.Get(key)
	n, ok := v.(int64)
	if ok = ok && least <= n && n <= most; v != nil && !ok {
		h.Malformed = append(h.Malformed, hint)
	}
	return n, ok
}

// number returns a JSON number as a float; false if v is not a number or is too large.
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
