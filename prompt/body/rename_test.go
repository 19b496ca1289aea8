package body

import (
	"strings"
	"testing"
)

func TestRenamer(t *testing.T) {
	for _, c := range []struct{ name, response, want string }{
		{"json", `{"id":"1","model":"served/x","choices":[]}`, `{"id":"1","model":"asked","choices":[]}`},
		{"blanks", "{\"model\" :\n \"served/x\"}", "{\"model\" :\n \"asked\"}"},
		{"too many blanks", `{"model":` + strings.Repeat(" ", maxGap+1) + `"served/x"}`,
			`{"model":` + strings.Repeat(" ", maxGap+1) + `"served/x"}`},
		{"events", "data: {\"model\":\"served/x\"}\n\ndata: {\"model\":\"served/x\"}\n\ndata: [DONE]\n\n",
			"data: {\"model\":\"asked\"}\n\ndata: {\"model\":\"asked\"}\n\ndata: [DONE]\n\n"},
		{"another model", `{"model":"served/y"}`, `{"model":"served/y"}`},
		{"a longer name", `{"model":"served/xy"}`, `{"model":"served/xy"}`},
		{"text", `{"content":"\"model\":\"served/x\""}`, `{"content":"\"model\":\"served/x\""}`},
		{"a value", `{"x":"model","model":"served/x"}`, `{"x":"model","model":"asked"}`},
		{"two keys", `{"model""model":"served/x"}`, `{"model""model":"asked"}`},
		{"cut off", `{"model":"serv`, `{"model":"serv`},
		{"cut off in the key", `{"mod`, `{"mod`},
		{"empty", "", ""},
	} {
		for size := 1; size <= len(c.response)+1; size++ {
			r := NewRenamer("served/x", "asked")
			var got []byte
			for rest := c.response; rest != ""; {
				n := min(size, len(rest))
				given := []byte(rest[:n])
				got = append(got, r.Next(given, false)...)
				if string(given) != rest[:n] {
					t.Fatalf("%s: Next changed its input to %q", c.name, given)
				}
				if len(r.held) > len(modelKey)+maxGap+1+len(r.served) {
					t.Fatalf("%s: %d bytes held back, too many", c.name, len(r.held))
				}
				rest = rest[n:]
			}
			if got = append(got, r.Rest()...); string(got) != c.want {
				t.Errorf("%s, in pieces of %d bytes: %q, want %q", c.name, size, got, c.want)
			}
			whole := NewRenamer("served/x", "asked").Next([]byte(c.response), true)
			if string(whole) != c.want {
				t.Errorf("%s, in one piece: %q, want %q", c.name, whole, c.want)
			}
		}
	}
}
