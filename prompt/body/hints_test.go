package body

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// describe renders h for the tables of expectations.
func describe(h Hints) string {
	var s []string
	if h.Priority != nil {
		s = append(s, fmt.Sprint("priority=", *h.Priority))
	}
	if h.hasStrictPriority {
		s = append(s, fmt.Sprint("strict=", h.StrictPriority))
	}
	if h.LatencySensitivity != 0 {
		s = append(s, fmt.Sprint("latency=", h.LatencySensitivity))
	}
	if h.ExpectedOutputTokens != 0 {
		s = append(s, fmt.Sprint("osl=", h.ExpectedOutputTokens))
	}
	for _, x := range [][2]string{{"class", h.PolicyClass}, {"tenant", h.Tenant}, {"session", h.Session},
		{"parent", h.ParentSession}} {
		if x[1] != "" {
			s = append(s, x[0]+"="+x[1])
		}
	}
	if h.FirstToken != 0 {
		s = append(s, fmt.Sprint("ttft=", h.FirstToken))
	}
	if h.SessionFinal {
		s = append(s, "final")
	}
	if h.SessionOpen {
		s = append(s, fmt.Sprint("open=", h.SessionTimeoutSecs))
	}
	if h.Malformed != nil {
		s = append(s, "malformed="+strings.Join(h.Malformed, ","))
	}
	return strings.Join(s, " ")
}

// The readings of Dynamo's frontend for the same headers. Source: dynamo-llm 1.6.1, protocols/common/extensions,
// protocols/agents and their tests.
func TestHeaderHints(t *testing.T) {
	for _, c := range []struct{ headers, want string }{
		{"", ""},
		{"x-other=1", ""},
		{"x-dynamo-request-priority= 5 ", "priority=5"},
		{"x-dynamo-request-priority=-2147483648", "priority=-2147483648"},
		{"x-dynamo-request-priority=+7", "priority=7"},
		{"x-dynamo-request-priority=2147483648", "malformed=priority"},
		{"x-dynamo-request-priority=1_0", "malformed=priority"},
		{"x-dynamo-request-priority=0x1", "malformed=priority"},
		{"x-dynamo-request-priority=5.0", "malformed=priority"},
		{"x-dynamo-request-priority=", "malformed=priority"},
		{"x-dynamo-request-priority=5\xff", "malformed=priority"},
		// the first occurrence counts
		{"x-dynamo-request-priority=x|x-dynamo-request-priority=5", "malformed=priority"},
		{"x-dynamo-request-priority=1|x-dynamo-request-priority=2", "priority=1"},
		{"x-dynamo-request-strict-priority=0", "strict=0"},
		{"x-dynamo-request-strict-priority=+4294967295", "strict=4294967295"},
		{"x-dynamo-request-strict-priority=4294967296", "malformed=strict_priority"},
		{"x-dynamo-request-strict-priority=-1", "malformed=strict_priority"},
		{"x-tenant-id=a|x-tenant-id= b |x-tenant-id= ", "tenant=b"},
		{"x-tenant-id=a|x-tenant-id=\xc3\xa9", "tenant=a malformed=tenant"},
		{"x-tenant-id= \t", ""},
		{"x-dynamo-meta-policy-class= latency |x-dynamo-meta-policy-class=batch", "class=latency"},
		{"x-dynamo-meta-policy-class= |x-dynamo-meta-policy-class=batch", ""},
		{"x-dynamo-meta-policy-class=Bearer x|x-dynamo-meta-policy-class=batch", "class=batch"},
		{"x-dynamo-meta-policy-class=\x01|x-dynamo-meta-policy-class=batch", "class=batch malformed=policy_class"},

		{"x-dynamo-session-id= s |x-dynamo-session-id=other", "session=s"},
		{"x-dynamo-session-id=s|x-dynamo-parent-session-id=p", "session=s parent=p"},
		{"x-dynamo-session-id=s|x-dynamo-parent-session-id=s", "session=s"},
		{"x-dynamo-parent-session-id=p", ""},
		{"x-dynamo-session-id=s|x-claude-code-session-id=c|thread-id=t", "session=s"},
		{"x-dynamo-session-id= |thread-id=t", "session=t"},
		{"x-dynamo-session-id=\xff|thread-id=t", "session=t malformed=session"},
		{"x-claude-code-session-id=root|thread-id=t", "session=root"},
		{"x-claude-code-session-id=root|x-claude-code-parent-agent-id=p", "session=root"},
		{"x-claude-code-session-id=root|x-claude-code-agent-id=child", "session=child parent=root"},
		{"x-claude-code-session-id=root|x-claude-code-agent-id=child|x-claude-code-parent-agent-id=p",
			"session=child parent=p"},
		{"x-claude-code-session-id=root|x-claude-code-agent-id=child|x-claude-code-parent-agent-id=child",
			"session=child parent=root"},
		{"x-claude-code-session-id=root|x-claude-code-agent-id=root|x-claude-code-parent-agent-id=p", "session=root"},
		{"x-claude-code-agent-id=child|thread-id=t|x-session-id=o", "session=t"},
		{"thread-id=t|x-codex-parent-thread-id=p|x-session-id=o", "session=t parent=p"},
		{"thread-id=t|x-codex-parent-thread-id=t", "session=t"},
		{"x-session-id=o|x-parent-session-id=p", "session=o parent=p"},
		{"session-id=o", ""},

		{"x-dynamo-session-final=1", "final"},
		{"x-dynamo-session-final= YES ", "final"},
		{"x-dynamo-session-final=off", ""},
		{"x-dynamo-session-final=0|x-dynamo-session-final=1", ""},
		{"x-dynamo-session-final=maybe", "malformed=session_final"},
	} {
		var h HeaderHints
		for _, header := range strings.Split(c.headers, "|") {
			name, value, _ := strings.Cut(header, "=")
			h.Add(name, value)
		}
		if got := describe(h.Hints()); got != c.want {
			t.Errorf("%q:\ngot  %s\nwant %s", c.headers, got, c.want)
		}
	}
}

func TestBodyHints(t *testing.T) {
	for _, c := range []struct{ nvext, want string }{
		{`null`, ""},
		{`[]`, ""},
		{`{}`, ""},
		{`{"agent_hints":null}`, ""},
		{`{"agent_hints":{"priority":null,"strict_priority":null,"osl":null,"latency_sensitivity":null,` +
			`"speculative_prefill":true}}`, ""},
		{`{"agent_hints":{"priority":-3,"strict_priority":4294967295,"osl":200,"latency_sensitivity":2}}`,
			"priority=-3 strict=4294967295 latency=2 osl=200"},
		{`{"agent_hints":{"latency_sensitivity":-0.5}}`, "latency=-0.5"},
		{`{"agent_hints":{"priority":5.0,"strict_priority":-1,"osl":"9","latency_sensitivity":"1"}}`,
			"malformed=priority,strict_priority,osl,latency_sensitivity"},
		{`{"agent_hints":{"priority":99999999999999999999,"latency_sensitivity":true}}`,
			"malformed=priority,latency_sensitivity"},
		{`{"agent_hints":7}`, "malformed=priority"},
		{`{"router":{"ttft_target":250,"itl_target":20}}`, "ttft=250ms"},
		{`{"router":{"ttft_target":null}}`, ""},
		{`{"router":{"ttft_target":-1}}`, "malformed=ttft_slo"},
		{`{"router":{"ttft_target":"fast"}}`, "malformed=ttft_slo"},
		{`{"router":{"ttft_target":1e300}}`, "malformed=ttft_slo"},
		{`{"router":5}`, "malformed=ttft_slo"},
		{`{"session_control":{"session_id":" s "}}`, "session=s"},
		{`{"session_control":{"session_id":"s","action":"open"}}`, "session=s open=300"},
		{`{"session_control":{"session_id":"s","action":"bind","timeout":60}}`, "session=s open=60"},
		{`{"session_control":{"session_id":"s","action":"open","timeout":0}}`,
			"session=s open=300 malformed=session_control"},
		{`{"session_control":{"session_id":"s","action":"close"}}`, "session=s final"},
		{`{"session_control":{"session_id":"s","action":"shut"}}`, "session=s malformed=session_control"},
		{`{"session_control":{"action":"open"}}`, "malformed=session_control"},
		{`{"session_control":{"session_id":" "}}`, "malformed=session_control"},
		{`{"session_control":"s"}`, "malformed=session_control"},
	} {
		r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":"x","nvext":`+c.nvext+`}`))
		if err != nil {
			t.Errorf("%s: %v", c.nvext, err)
		} else if got := describe(r.Hints); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.nvext, got, c.want)
		}
	}
}

// For each field, a header takes precedence over the body; a given zero is not an absent field.
func TestHeadersTakePrecedence(t *testing.T) {
	r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":"x","nvext":{
		"agent_hints":{"priority":1,"strict_priority":2,"osl":3,"latency_sensitivity":4},`+
		`"session_control":{"session_id":"b","action":"open","timeout":9}}}`))
	if err != nil {
		t.Fatal(err)
	}
	for headers, want := range map[string]string{
		"": "priority=1 strict=2 latency=4 osl=3 session=b open=9",
		"x-dynamo-request-priority=0|x-dynamo-request-strict-priority=0|x-dynamo-session-id=h": "priority=0 strict=0 " +
			"latency=4 osl=3 session=h open=9",
		"x-dynamo-request-priority=?|x-dynamo-session-final=1": "priority=1 strict=2 " +
			"latency=4 osl=3 session=b final open=9 malformed=priority",
	} {
		var h HeaderHints
		for _, header := range strings.Split(headers, "|") {
			name, value, _ := strings.Cut(header, "=")
			h.Add(name, value)
		}
		if got := describe(h.Hints().WithDefaults(r.Hints)); got != want {
			t.Errorf("%q:\ngot  %s\nwant %s", headers, got, want)
		}
	}
}

func TestGivenNamesEveryHint(t *testing.T) {
	n := int32(0)
	h := Hints{
		Priority:             &n,
		hasStrictPriority:    true,
		LatencySensitivity:   1,
		ExpectedOutputTokens: 1,
		PolicyClass:          "x",
		Objective:            "x",
		Tenant:               "x",
		FirstToken:           1,
		Fairness:             "x",
		Session:              "x",
		SessionFinal:         true,
		Malformed:            []string{"override"},
	}
	given := h.Given()
	h.SessionOpen = true
	given = append(given, h.Given()...)
	for _, name := range HintNames {
		if want := name != "pin" && name != "routing_constraints"; slices.Contains(given, name) != want {
			t.Errorf("Given contains %q: %v, want %v", name, !want, want)
		}
	}
	if !reflect.DeepEqual((&Hints{}).Given(), []string(nil)) {
		t.Errorf("Given of no hints is %v", (&Hints{}).Given())
	}
}

// TestDeadlines: a deadline that is no time between 0 and a day is ignored and counted; the newer header has
// precedence.
func TestDeadlines(t *testing.T) {
	for _, c := range []struct {
		newer, older string
		want         time.Duration
	}{{"250", "", 250 * time.Millisecond}, {"", "1.5", 1500 * time.Microsecond}, {"2", "9", 2 * time.Millisecond},
		{"0", "", 0}, {"-5", "", 0}, {"1e300", "", 0}, {"NaN", "", 0}, {"Inf", "", 0}, {"soon", "9", 0}} {
		var h HeaderHints
		if c.newer != "" {
			h.Add("x-llm-d-slo-ttft-ms", c.newer)
		}
		if c.older != "" {
			h.Add("x-slo-ttft-ms", c.older)
		}
		got := h.Hints()
		if got.FirstToken != c.want || slices.Contains(got.Malformed, "ttft_slo") != (c.want == 0) {
			t.Errorf("%q, %q: %v, malformed %q; want %v", c.newer, c.older, got.FirstToken, got.Malformed, c.want)
		}
	}
}
