package router

import (
	"errors"
	"strings"
	"testing"

	"kvepp/internal/apibody"
	"kvepp/tokenizer"
)

// TestHostileBodies: every hostile body gets a clear 400 or a decision, never a panic or a wrong answer.
func TestHostileBodies(t *testing.T) {
	model, err := tokenizer.Load("../test/models/tiny-bytelevel", tokenizer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := newHouse(t, workers(2)...)
	h.cfg.Models = map[string]*tokenizer.Model{"m": model}
	chat := func(message string) string { return `{"model":"m","messages":[` + message + `]}` }
	for _, c := range []struct {
		name, body string
		says       string // part of the 400's message; empty: the request is routed
		reason     Reason // if it is routed
	}{
		{"duplicate keys: the last counts, as in Python", `{"model":"x","model":"m","prompt":"a","prompt":"b"}`, "",
			ReasonKV},
		{"a lone surrogate", chat(`{"role":"user","content":"\ud800"}`), "surrogate", ""},
		{"a surrogate pair", chat(`{"role":"user","content":"\ud83d\ude00"}`), "", ReasonKV},
		{"invalid UTF-8", chat("{\"role\":\"user\",\"content\":\"\xff\"}"), "UTF-8", ""},
		{"a NUL byte in the text", chat(`{"role":"user","content":"a\u0000b"}`), "", ReasonKV},
		{"a raw NUL byte", chat("{\"role\":\"user\",\"content\":\"a\x00b\"}"), "control character", ""},
		{"a number beyond 2^53", `{"model":"m","prompt":"a","seed":123456789012345678901234567890}`, "", ReasonKV},
		{"a number that is none", `{"model":"m","prompt":"a","seed":1e999999999}`, "out of range", ""},
		{"nesting without end", `{"model":"m","prompt":"a","x":` + strings.Repeat("[", 100_000), "nest", ""},
		{"an array of arrays", `{"model":"m","prompt":` + strings.Repeat("[", 400) + strings.Repeat("]", 400) + `}`,
			"prompt", ""},
		{"token ids out of range", `{"model":"m","prompt":[1,4294967296]}`, "prompt", ""},
		{"negative token ids", `{"model":"m","prompt":[-1]}`, "prompt", ""},
		{"ids beyond the vocabulary", `{"model":"m","prompt":[4294967295]}`, "", ReasonKV},
		{"an empty prompt", `{"model":"m","prompt":""}`, "", ReasonKV},
		{"messages that are no objects", chat(`1,null,"x"`), "messages[0]", ""},
		{"content that is an object", chat(`{"role":"user","content":{"a":1}}`), "", ""},
		{"no role", chat(`{"content":"x"}`), "", ""},
		{"trailing text", `{"model":"m","prompt":"a"} x`, "not valid", ""},
		{"a byte order mark", "\ufeff" + `{"model":"m","prompt":"a"}`, "not valid", ""},
		{"nothing", "", "body is empty", ""},
		{"a template of the client's", `{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template":"{% ` +
			`for i in range(10**9) %}{% endfor %}"}`, "", ReasonTokenize},
	} {
		path := "/v1/chat/completions"
		if strings.Contains(c.body, `"prompt"`) {
			path = "/v1/completions"
		}
		r, err := h.Route(t.Context(), &Request{Path: path, Body: []byte(c.body)})
		var bad *apibody.Error
		switch {
		case c.says != "":
			if !errors.As(err, &bad) || !strings.Contains(bad.Message, c.says) {
				t.Errorf("%s: %v, want a 400 that says %q", c.name, err, c.says)
			}
		case err != nil:
			t.Errorf("%s: %v, want a decision", c.name, err)
		case c.reason != "" && r.Reason != c.reason:
			t.Errorf("%s: reason %s, want %s", c.name, r.Reason, c.reason)
		}
		if err == nil {
			r.Free()
		}
	}
	if h.book.Len() != 0 {
		t.Errorf("%d bookings left", h.book.Len())
	}
}
