package replay

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

const agenticHead = `{"schema":"dynamo.agentic_mooncake","version":2,"block_size":16,"hash_id_scope":"local",` +
	`"source":{"format":"t","digest":"d"}}` + "\n"

// agenticLine is a row. after has dependencies as ID:TRIGGER:DELAY.
func agenticLine(id, play string, notBefore int, after ...string) string {
	var dependencies []string
	for _, a := range after {
		p := strings.Split(a, ":")
		dependencies = append(dependencies, fmt.Sprintf(`{"request_id":%q,"trigger":%q,"delay_ms":%s,`+
			`"relation":"sequence"}`, p[0], p[1], p[2]))
	}
	return fmt.Sprintf(`{"request_id":%q,"play_id":%q,"session_id":"s","model":"m","input_length":16,`+
		`"output_length":2,"hash_ids":[1],"not_before_ms":%d,"dependencies":[%s]}`+"\n", id, play, notBefore,
		strings.Join(dependencies, ","))
}

// TestAgentic: a request arrives when all that it depends on has happened, and not before its time. The times are those
// that Dynamo 1.6.1's replay reports for the same rows on one worker: arrivals of 0, 5, 10, 500 and a completion + 10.
func TestAgentic(t *testing.T) {
	text := agenticHead + agenticLine("later", "p", 5500, "root:completion:100") + agenticLine("root", "p", 5000) +
		agenticLine("child", "p", 5000, "root:dispatch:5") +
		agenticLine("join", "p", 5000, "root:completion:10", "child:completion:0") +
		agenticLine("other", "q", 5010)
	c := config()
	c.Workers = 1
	arrived, ended := map[string]time.Duration{}, map[string]time.Duration{}
	c.Decided = func(d *Decision) {
		arrived[d.Request.ID], ended[d.Request.ID] = d.Arrived, d.Arrived+d.E2E
		if !strings.Contains(d.Request.Session, "\x00s") {
			t.Errorf("session %q", d.Request.Session)
		}
	}
	r := run(t, c, AgenticMooncake, text)
	want := map[string]time.Duration{"root": 0, "child": 5 * time.Millisecond, "other": 10 * time.Millisecond,
		"later": 500 * time.Millisecond, "join": max(ended["root"]+10*time.Millisecond, ended["child"])}
	for id, at := range want {
		if got, ok := arrived[id]; !ok || got != at {
			t.Errorf("%s arrived at %v, want %v", id, got, at)
		}
	}
	if r.Completed != 5 || len(arrived) != 5 {
		t.Errorf("%d completed", r.Completed)
	}
	c.ArrivalSpeed = 2
	run(t, c, AgenticMooncake, text)
	if arrived["later"] != 250*time.Millisecond || arrived["child"] != 2500*time.Microsecond {
		t.Errorf("twice as fast: %v", arrived)
	}
	// A request that fits into no engine does not hold up those that wait for it.
	c.Engine.Blocks = 2
	text = agenticHead + strings.Replace(agenticLine("big", "p", 0), `"output_length":2`, `"output_length":200`, 1) +
		agenticLine("small", "p", 0, "big:completion:0")
	if r := run(t, c, AgenticMooncake, text); r.TooLarge != 1 || r.Completed != 1 {
		t.Errorf("%d too large, %d completed", r.TooLarge, r.Completed)
	}
}

func TestBadAgentic(t *testing.T) {
	root := agenticLine("a", "p", 0)
	for _, c := range []struct{ text, want string }{
		{"", "must begin with the header"},
		{root, "line 1: schema \"\", version 0"},
		{strings.Replace(agenticHead, `"version":2`, `"version":1`, 1), "version 1: the first line must be"},
		{strings.Replace(agenticHead, "local", "global", 1), "hash_id_scope"},
		{strings.Replace(agenticHead, `"block_size":16`, `"block_size":0`, 1), "block_size 0: must be"},
		{agenticHead + root + root, `line 3: request_id "a" is taken by line 2`},
		{agenticHead + root + agenticLine("b", "p", 0, "c:completion:0"), `line 3: a dependency on the request "c"`},
		{agenticHead + root + agenticLine("b", "q", 0, "a:completion:0"), `line 3: a dependency on the request "a"`},
		{agenticHead + root + agenticLine("b", "p", 0, "a:never:0"), `line 3: trigger "never"`},
		{agenticHead + root + agenticLine("b", "p", 0, "a:dispatch:-1"), "line 3: delay_ms -1"},
		{agenticHead + root + agenticLine("b", "p", 0, "c:completion:0") + agenticLine("c", "p", 0, "b:dispatch:0"),
			`line 3: 2 requests wait for one another, among them "b", "c"`},
		{agenticHead + agenticLine("b", "p", 0, "b:completion:0"), `line 2: 1 requests wait`},
		{agenticHead + agenticLine("", "p", 0), "line 2: a row must have request_id"},
		{agenticHead + strings.Replace(root, `"model"`, `"wait_for":["x"],"model"`, 1), "line 2: wait_for"},
		{agenticHead + root[:40], "line 2: the line ends in the middle"},
	} {
		if _, err := read(t, AgenticMooncake, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.200s: %v, want %q", c.text, err, c.want)
		}
	}
}

func FuzzAgentic(f *testing.F) {
	f.Add(agenticHead + agenticLine("a", "p", 0) + agenticLine("b", "p", 5, "a:dispatch:1", "c:completion:2") +
		agenticLine("c", "p", 9))
	f.Fuzz(func(t *testing.T, text string) {
		r, err := NewReader("trace", strings.NewReader(text), AgenticMooncake, ReaderOptions{BlockSize: 4})
		if err != nil {
			return
		}
		waits, released, at := 0, 0, time.Duration(0)
		for {
			q, err := r.Next()
			if err != nil {
				if errors.Is(err, io.EOF) && waits != released {
					t.Errorf("%d dependencies, %d dependents", waits, released)
				}
				return
			}
			if q.At < at || q.Prompt < 1 || len(q.Chain) != len(q.Locals) {
				t.Errorf("%+v after %v", q, at)
			}
			at, waits, released = q.At, waits+q.waits, released+len(q.dependents)
		}
	})
}
