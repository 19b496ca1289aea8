package router

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
)

// TestModelUse: models that no request named are logged once, after 100 requests or five minutes with requests, with
// the names that requests used.
func TestModelUse(t *testing.T) {
	for _, c := range []struct {
		name     string
		named    []string
		requests func(ask func(model, adapter string, times int))
		want     []string // a part of each log line
	}{
		{"no models", nil, func(ask func(string, string, int)) { ask("x", "", 1000) }, nil},
		{"all are named", []string{"a", "b"},
			func(ask func(string, string, int)) { ask("a", "", 1); ask("b", "", 1); ask("x", "", 1000) }, nil},
		{"too few requests", []string{"a"}, func(ask func(string, string, int)) { ask("x", "", 99) }, nil},
		{"another name", []string{"a"}, func(ask func(string, string, int)) { ask("x", "", 99); ask("y", "", 1000) },
			[]string{`model=a requests=100 requested="\"x\": 99, \"y\": 1" workers_serve=served`}},
		{"one of two", []string{"a", "b"}, func(ask func(string, string, int)) { ask("b", "", 1000) },
			[]string{`model=a requests=100 requested="\"b\": 100"`}},
		{"both", []string{"a", "b"}, func(ask func(string, string, int)) { ask("x", "", 1000) },
			[]string{"model=a ", "model=b "}},
		{"five minutes", []string{"a"}, func(ask func(string, string, int)) {
			ask("x", "", 1)
			<-time.After(judgeAfter - time.Second)
			ask("x", "", 1)
			<-time.After(time.Second)
			ask("x", "", 1)
		}, []string{"model=a requests=3 "}},
		{"an adapter names its model too", []string{"a", "lora"},
			func(ask func(string, string, int)) { ask("a", "lora", 1000) }, nil},
		{"an adapter that is not asked for", []string{"a", "lora"},
			func(ask func(string, string, int)) { ask("a", "", 1000) }, []string{"model=lora "}},
		{"names without end", []string{"a"}, func(ask func(string, string, int)) {
			for i := range 1000 {
				ask(fmt.Sprintf("%03d%s", i, strings.Repeat("x", 1<<12)), "", 1)
			}
		}, []string{`others: 90"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				named := map[string]bool{}
				for _, name := range c.named {
					named[name] = true
				}
				var log logtest.Log
				u := newModelUse(named)
				c.requests(func(model, adapter string, times int) {
					for range times {
						if u.request(model, adapter) {
							u.logUnused([]string{"served"}, slog.New(slog.NewTextHandler(&log, nil)))
						}
					}
				})
				text := log.String()
				if got := strings.Count(text, "level=WARN"); got != len(c.want) {
					t.Errorf("%d lines, want %d:\n%.2000s", got, len(c.want), text)
				}
				for _, want := range c.want {
					if !strings.Contains(text, want) {
						t.Errorf("no %q in\n%.2000s", want, text)
					}
				}
				if len(u.others) > maxListedNames || len(text) > 10_000 {
					t.Errorf("%d names are kept, and the log has %d bytes", len(u.others), len(text))
				}
			})
		})
	}
}
