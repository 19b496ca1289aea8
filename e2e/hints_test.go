package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// ask sends a chat request, which the chosen worker must answer.
func ask(
	t *testing.T,
	s *stack.Stack,
	header http.Header,
	messages []stack.Message,
	nvext map[string]any,
) *stack.Response {
	t.Helper()
	if nvext == nil {
		nvext = map[string]any{}
	}
	nvext["extra_fields"] = []string{"worker_id"}
	a, err := stack.Chat(
		t.Context(),
		http.DefaultClient,
		s.Envoy.URL,
		header,
		messages,
		false,
		map[string]any{"nvext": nvext},
	)
	if err != nil {
		t.Fatal(err)
	}
	if a.Status != http.StatusOK || a.Reason != "kv" || a.KveppPrompt != a.PromptTokens {
		t.Fatalf(
			"status %d, reason %s, kvepp counted %d prompt tokens, Dynamo %d: %.300s",
			a.Status,
			a.Reason,
			a.KveppPrompt,
			a.PromptTokens,
			a.Body,
		)
	}
	for _, w := range s.Workers {
		if w.Name+"/0" != a.Worker {
			continue
		}
		if id, err := w.InstanceID(t.Context()); err != nil || id != a.UpstreamWorker {
			t.Errorf("kvepp chose %s, with id %s (%v); Dynamo used %s", a.Worker, id, err, a.UpstreamWorker)
		}
	}
	return a
}

// TestSessions: the turns of a session, with unrelated prompts, stay on one worker; turns without a session do not.
func TestSessions(t *testing.T) {
	s := main
	nothingLeft(t, s)
	others := metric(t, s, "kvepp_sessions") // sessions of other tests that have not ended
	for name, turn := range map[string]func(last bool) *stack.Response{
		"Dynamo's header": func(last bool) *stack.Response {
			return ask(t, s, http.Header{"X-Dynamo-Session-Id": {t.Name()},
				"X-Dynamo-Session-Final": {fmt.Sprint(last)}}, novel(), nil)
		},
		"Claude Code's header": func(last bool) *stack.Response {
			return ask(t, s, http.Header{"X-Claude-Code-Session-Id": {t.Name() + "c"},
				"X-Dynamo-Session-Final": {fmt.Sprint(last)}}, novel(), nil)
		},
		"session_control": func(last bool) *stack.Response {
			control := map[string]any{"session_id": t.Name() + "n", "action": "bind", "timeout": 60}
			if last {
				control = map[string]any{"session_id": t.Name() + "n", "action": "close"}
			}
			return ask(t, s, nil, novel(), map[string]any{"session_control": control})
		},
	} {
		first := turn(false)
		if got := first.Header.Get("x-kvepp-session"); got != "new" {
			t.Errorf("%s: the session is %q at first", name, got)
		}
		for i := range 8 {
			if a := turn(i == 7); a.Worker != first.Worker || a.Header.Get("x-kvepp-session") != "kept" {
				t.Errorf(
					"%s: turn %d went to %s (%s), the first to %s",
					name,
					i+2,
					a.Worker,
					a.Header.Get("x-kvepp-session"),
					first.Worker,
				)
			}
		}
	}
	eventually(t, func() error {
		if n := metric(t, s, "kvepp_sessions"); n > others {
			return fmt.Errorf("%v sessions after the last turns, %v before the first", n, others)
		}
		return nil
	})
}

// TestHints: Dynamo's frontends accept requests with all hints of clients, and tokens and blocks stay exact.
func TestHints(t *testing.T) {
	s := main
	nothingLeft(t, s)
	header := http.Header{
		"X-Dynamo-Request-Priority":        {"5"},
		"X-Dynamo-Request-Strict-Priority": {"1"},
		"X-Dynamo-Meta-Policy-Class":       {"batch"},
	}
	nvext := map[string]any{
		"agent_hints": map[string]any{
			"priority":                1,
			"osl":                     8,
			"latency_sensitivity":     0.5,
			"kv_overlap_score_weight": 2,
		},
		"router_config_override": map[string]any{"overlap_score_credit": 1.5, "router_temperature": 0},
	}
	messages := conversation(t.Name(), 1)
	for _, size := range []int{0, 200 << 10} { // changed bodies in one piece and in several
		messages[0].Content += strings.Repeat(" ", size)
		eventually(t, func() error {
			a := ask(t, s, header, messages, nvext)
			if want := a.PromptTokens / stack.BlockSize * stack.BlockSize; a.KveppCached != want {
				return fmt.Errorf("predicted %d of %d cached tokens", a.KveppCached, want)
			}
			if want := expect(a.KveppCached, a.PromptTokens); a.CachedTokens != want {
				t.Errorf("Dynamo reported %d cached tokens, want %d", a.CachedTokens, want)
			}
			return nil
		})
	}
	// A tenant's blocks are separate from others' (not in the mocker, which has no tenants).
	header.Set("x-tenant-id", "a")
	if a := ask(t, s, header, messages, nvext); a.KveppCached != 0 {
		t.Errorf("a tenant's first request: predicted %d cached tokens", a.KveppCached)
	}
	a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, messages, false,
		map[string]any{"nvext": map[string]any{"router_config_override": map[string]any{"router_temperature": -1}}})
	if err != nil || a.Status != http.StatusBadRequest ||
		!strings.Contains(a.Body, "nvext.router_config_override.router_temperature") {
		t.Errorf("a bad override: %v, %+v", err, a)
	}
}

// TestPins: a request goes to the worker that its body names, although another worker has its prompt.
func TestPins(t *testing.T) {
	s := main
	nothingLeft(t, s)
	messages := conversation(t.Name(), 1)
	for _, w := range s.Workers {
		id, err := w.InstanceID(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, nvext := range []map[string]any{{"backend_instance_id": json.Number(id)},
			{"backend_instance_id": 1, "decode_worker_id": json.Number(id), "dp_rank": 0}} {
			if a := ask(t, s, nil, messages, nvext); a.Worker != w.Name+"/0" {
				t.Errorf("%v: went to %s, not to %s", nvext, a.Worker, w.Name)
			}
		}
	}
	a, err := stack.Chat(
		t.Context(),
		http.DefaultClient,
		s.Envoy.URL,
		nil,
		messages,
		false,
		map[string]any{"nvext": map[string]any{"backend_instance_id": 12345}},
	)
	if err != nil || a.Status != http.StatusBadRequest || !strings.Contains(a.Body, "nvext.backend_instance_id") {
		t.Errorf("an unknown worker: %v, %+v", err, a)
	}
}
