package extproc

import (
	"encoding/base64"
	"maps"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"kvepp/extproc/extproctest"
	"kvepp/pool"
)

// TestConventions: a request with the headers of llm-d's picker, and what it gets.
func TestConventions(t *testing.T) {
	b := newBench(t, Config{Conventions: Conventions{ModelHeaders: []string{"x-first-model", "x-second-model"},
		PickerHeaders: []string{"x-goal"}, TokenHeader: "x-session-token",
		TokenNamespace: "ns", EndpointScores: true, PrimaryPort: 9000, SessionHeaders: []string{"x-conversation"}}})
	b.pool.Update([]pool.Endpoint{
		{Name: "a", Address: "10.0.0.1:8000", InstanceID: 1, Model: "m"},
		{Name: "b", Address: "10.0.0.2:8001", InstanceID: 2, Model: "m"},
		{Name: "other", Address: "10.0.0.3:8000", InstanceID: 3, Model: "target"},
	})
	do := func(header map[string]string) *extproctest.Outcome {
		t.Helper()
		all := maps.Clone(chat)
		maps.Copy(all, header)
		out, err := b.Do(t.Context(), &extproctest.Request{Header: all, Body: [][]byte{[]byte(chatBody)},
			Upstream: response("data: [DONE]\n\n")})
		if err != nil || out.Immediate != nil {
			t.Fatal(out, err)
		}
		b.idle(t)
		return out
	}
	for range 8 {
		for token, want := range map[string]string{"ns/a": "10.0.0.1:8000", "b": "10.0.0.2:8001"} {
			out := do(map[string]string{"x-session-token": base64.StdEncoding.EncodeToString([]byte(token))})
			metadata, _ := out.Metadata[endpointNamespace].(map[string]any)
			scores, _ := metadata[scoresKey].(map[string]any)
			score, _ := scores[want].(float64)
			if out.Routed.Set["x-data-parallel-host-port"] != want ||
				out.Routed.Set[endpointHeader] != want[:strings.IndexByte(want, ':')]+":9000" || score <= 0 ||
				score > 1 {
				t.Errorf("%s: %v, %v", token, out.Routed.Set, out.Metadata)
			}
			name := token[strings.IndexByte(token, '/')+1:]
			if got, _ := base64.StdEncoding.DecodeString(out.Set["x-session-token"]); string(got) != "ns/"+name {
				t.Errorf("%s: the response's token %q", token, got)
			}
		}
	}
	do(map[string]string{"x-session-token": "no base64"})
	do(map[string]string{"x-session-token": base64.StdEncoding.EncodeToString([]byte("ns/gone"))})
	out := do(map[string]string{"x-second-model": "m", "x-first-model": "target", "x-goal": "5"})
	if !strings.Contains(string(out.Routed.Body), `"model":"target"`) ||
		out.Routed.Set["x-data-parallel-host-port"] != "10.0.0.3:8000" {
		t.Errorf("rewritten: %q to %v", out.Routed.Body, out.Routed.Set)
	}
	for _, name := range []string{"x-first-model", "x-second-model", "x-goal"} {
		if !slices.Contains(out.Removed, name) {
			t.Errorf("%s is not removed", name)
		}
	}
	conversation := &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: "x-conversation", Value: "c1"}}}
	for header, want := range map[string]string{"x-conversation": "c1", "x-dynamo-session-id": "own"} {
		s := &stream{cfg: &b.server.cfg}
		s.head.hints.Session = map[string]string{"x-dynamo-session-id": "own"}[header]
		if s.readNamed(conversation); s.head.hints.Session != want {
			t.Errorf("session %q, want %q", s.head.hints.Session, want)
		}
	}
	plain := newBench(t, Config{})
	out, err := plain.Do(t.Context(), &extproctest.Request{Body: [][]byte{[]byte(chatBody)}, Header: map[string]string{
		":method": "POST", ":path": "/v1/chat/completions", "x-first-model": "target"},
		Upstream: response("data: [DONE]\n\n")})
	if err != nil || string(out.Routed.Body) != chatBody || len(out.Set) != 0 {
		t.Errorf("without conventions: %v %v", out, err)
	}
}
