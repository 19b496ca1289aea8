package router

import (
	"errors"
	"strings"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

// TestHostileBodies: every hostile body gets a clear 400 or a decision, never a panic or a wrong response.
func TestHostileBodies(t *testing.T) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := newHouse(t, workers(2)...)
	h.cfg.Models = map[string]*prompt.Model{"m": model}
	chat := func(message string) string { return `{"model":"m","messages":[` + message + `]}` }
	for _, c := range []struct {
		name, body string
		says       string // part of the 400's message; empty: the request is routed
		reason     Reason // if it is routed
	}{
		{"duplicate keys: the last counts, as in Python", `{"model":"x","model":"m","prompt":"a","prompt":"b"}`, "",
			ReasonKV},
		{"a surrogate pair", chat(`{"role":"user","content":"\ud83d\ude00"}`), "", ReasonKV},
		{"invalid UTF-8", chat("{\"role\":\"user\",\"content\":\"\xff\"}"), "UTF-8", ""},
		{"a NUL byte in the text", chat(`{"role":"user","content":"a\u0000b"}`), "", ReasonKV},
		{"a raw NUL byte", chat("{\"role\":\"user\",\"content\":\"a\x00b\"}"), "control character", ""},
		{"a number beyond 2^53", `{"model":"m","prompt":"a","seed":123456789012345678901234567890}`, "", ReasonKV},
		{"nesting without end", `{"model":"m","prompt":"a","x":` + strings.Repeat("[", 100_000), "",
			ReasonBodyEncoding},
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
		{"nothing", "", "body is empty", ""},
		{"a template of the client's", `{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template":"{% ` +
			`for i in range(10**9) %}{% endfor %}"}`, "", ReasonTokenize},
	} {
		path := "/v1/chat/completions"
		if strings.Contains(c.body, `"prompt"`) {
			path = "/v1/completions"
		}
		r, err := h.Route(t.Context(), &Request{Path: path, Body: []byte(c.body)})
		var bad *body.Error
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

// TestPythonsJSON: what servers in Python accept gets a decision, by cache if the prompt is known and by load if not.
// Dynamo's frontend refuses it, and so does kvepp before one. A body that would miss its tenant's salt is refused, too.
func TestPythonsJSON(t *testing.T) {
	model, err := prompt.Load("../test/models/tiny-bytelevel", prompt.Options{})
	if err != nil {
		t.Fatal(err)
	}
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	for _, c := range []struct {
		name, body string
		reason     Reason
		salted     bool // kvepp can add a tenant's salt
	}{
		{"a byte order mark", "\ufeff" + `{"model":"m","prompt":"a"}`, ReasonKV, true},
		{"a number that is none", `{"model":"m","prompt":"a","x":NaN}`, ReasonKV, true},
		{"infinite numbers", `{"model":"m","prompt":"a","x":[Infinity,-Infinity]}`, ReasonKV, true},
		{"a number beyond float64", `{"model":"m","prompt":"a","temperature":1e400}`, ReasonKV, true},
		{"deep nesting that is not read", `{"model":"m","prompt":"a","x":` + deep(990) + `}`, ReasonKV, true},
		{"deep nesting that is read", `{"model":"m","prompt":` + deep(990) + `}`, ReasonBodyEncoding, true},
		{"nesting deeper than kvepp reads", `{"model":"m","prompt":"a","x":` + deep(5000) + `}`, ReasonBodyEncoding,
			false},
		{"a lone surrogate in a field that is not read", `{"model":"m","prompt":"a","x":"\ud800"}`, ReasonKV, true},
		{"a lone surrogate in the prompt", `{"model":"m","prompt":"\ud800"}`, ReasonBodyEncoding, true},
		{"a lone surrogate in a message", `{"model":"m","messages":[{"role":"user","content":"\udc00"}]}`,
			ReasonBodyEncoding, true},
		{"a lone surrogate in a key", `{"model":"m","prompt":"a","\ud800":1}`, ReasonBodyEncoding, false},
		{"token ids as floats", `{"model":"m","prompt":[1.0,2e0]}`, ReasonKV, true},
		{"lists of token ids as floats", `{"model":"m","prompt":[[1.0],[2]]}`, ReasonKV, true},
		{"token ids as booleans", `{"model":"m","prompt":[1,true]}`, ReasonBodyEncoding, true},
		{"UTF-16", "\xff\xfe{\x00}\x00", ReasonBodyEncoding, false},
		{"surrogates in UTF-8", "{\"model\":\"m\",\"prompt\":\"\xed\xa0\x80\"}", ReasonBodyEncoding, false},
	} {
		path := "/v1/chat/completions"
		if strings.Contains(c.body, `"prompt"`) {
			path = "/v1/completions"
		}
		for _, kind := range []string{"stock", "frontends", "salted"} {
			h := newHouse(t, workers(2)...)
			h.cfg.Models = map[string]*prompt.Model{"m": model}
			h.cfg.Frontends, h.cfg.TenantSalt = kind == "frontends", kind == "salted"
			request := &Request{Path: path, Body: []byte(c.body)}
			request.Hints.Tenant = "t"
			r, err := h.Route(t.Context(), request)
			var bad *body.Error
			switch {
			case kind == "frontends" || kind == "salted" && !c.salted:
				if !errors.As(err, &bad) {
					t.Errorf("%s, %s: %v, want a 400", c.name, kind, err)
				}
			case err != nil:
				t.Errorf("%s, %s: %v, want a decision", c.name, kind, err)
			case r.Reason != c.reason:
				t.Errorf("%s, %s: reason %s, want %s", c.name, kind, r.Reason, c.reason)
			case kind == "stock" && r.Body != nil:
				t.Errorf("%s: the body became %s", c.name, r.Body)
			case kind == "salted" && !strings.Contains(string(r.Body), `"cache_salt":"dynamo-cache-salt:t"`):
				t.Errorf("%s: no salt in %s", c.name, r.Body)
			}
			if err == nil {
				r.Free()
			}
		}
	}
}
