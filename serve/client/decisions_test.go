package client

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

const endedDecision = `{"time":"2026-01-02T03:04:05.678Z","request_id":"r1","reason":"kv","prompt_tokens":100,` +
	`"predicted_cached_tokens":96,"worker":{"name":"w0","dp_rank":1},"candidates":[],` +
	`"outcome":{"status":"200","complete":true,"time_to_first_token_ms":12.3,"duration_ms":456,"cached_tokens":80}}`

// TestDecisionsCommand: the flags select decisions, and the table has the newest last.
func TestDecisionsCommand(t *testing.T) {
	var asked string
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch asked = req.URL.String(); {
		case strings.Contains(asked, "bogus"):
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"error":"no such reason"}`)
		case strings.Contains(asked, "follow=true"):
			fmt.Fprintf(w, ": decisions\n\nevent: missed\ndata: 7\n\ndata: %s\n\n", endedDecision)
		default:
			fmt.Fprintf(w, `{"decisions":[{"time":"2026-01-02T03:04:06Z","request_id":"r2","error":"no endpoint",`+
				`"reason":"kv","candidates":[]},%s]}`, endedDecision)
		}
	}))
	defer web.Close()
	for _, c := range []struct {
		args  string
		usage bool // the flags are refused
		asked string
		out   []string // in this order
		err   string
	}{
		{"--number=5 --worker=w0/1 --cold --slow=1s", false, "/debug/decisions?cold=true&n=5&slow=1s&worker=w0%2F1",
			[]string{"TIME", "w0/1", "200", "100", "80/96", "12ms", "456ms", "r1", "refused", "r2 no endpoint"}, ""},
		{"--json", false, "/debug/decisions?n=20", []string{endedDecision + "\n", `"r2"`}, ""},
		{"--follow --status=5xx --wrong", false, "/debug/decisions?follow=true&status=5xx&wrong=true",
			[]string{"TIME", "r1"}, "7 decisions are left out"},
		{"--reason=bogus", false, "/debug/decisions?n=20&reason=bogus", nil, "no such reason"},
		{"--number=0", true, "", nil, "must be at least 1"},
		{"r1", true, "", nil, `unexpected argument "r1"`},
	} {
		asked = ""
		var out, errs bytes.Buffer
		config, f := Config{Command: "decisions"}, pflag.NewFlagSet("", pflag.ContinueOnError)
		config.AddFlags(f)
		args := append(strings.Fields(c.args), "--admin-address="+strings.TrimPrefix(web.URL, "http://"))
		if err := f.Parse(args); err != nil {
			t.Fatal(err)
		}
		err := config.Validate(f.Args())
		if (err != nil) != c.usage {
			t.Errorf("%s: %v", c.args, err)
		}
		if err == nil {
			err = config.Run(t.Context(), nil, &out, &errs)
		}
		if text := fmt.Sprint(errs.String(), err); asked != c.asked || !strings.Contains(text, c.err) ||
			c.err == "" && err != nil {
			t.Errorf("%s: asked %q, errors %s", c.args, asked, text)
		}
		rest := out.String()
		for _, want := range c.out {
			_, after, found := strings.Cut(rest, want)
			if !found {
				t.Errorf("%s: %q is not in, or not in this order:\n%s", c.args, want, out.String())
			}
			rest = after
		}
	}
}
