package client

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"kvepp/serve/admin"
)

// TestTopScreen: keys change what is shown, within the size of the terminal.
func TestTopScreen(t *testing.T) {
	g := &glance{rates: map[string]float64{"w3/0": 7}}
	for i := range 30 {
		g.Fleet.Workers = append(g.Fleet.Workers, admin.FleetWorker{Name: fmt.Sprintf("w%d", i), BookedRequests: i % 7,
			PromptTokens: 100, CachedTokens: uint64(i)})
		g.Decisions = append(g.Decisions, admin.Decision{RequestID: fmt.Sprintf("request-%d", i)})
	}
	s := &topScreen{now: g}
	width := 120
	shown := func(keys string) []string {
		for i := range len(keys) {
			if !s.press(keys[i]) {
				t.Errorf("%q ends", keys)
			}
		}
		text := s.draw(width, 12)
		for _, escape := range []string{"\x1b[H", "\x1b[K", "\x1b[J", "\x1b[1m", "\x1b[0m"} {
			text = strings.ReplaceAll(text, escape, "")
		}
		lines := strings.Split(text, "\r\n")
		if len(lines) > 12 || slices.ContainsFunc(lines, func(l string) bool { return len(l) > width }) {
			t.Errorf("%q: %d lines\n%s", keys, len(lines), text)
		}
		return lines
	}
	for _, c := range []struct{ keys, title, first string }{
		{"", "WORKER*", "w0/0"},
		{"s", "RUN*", "w6/0"},
		{"sssss", "HIT*", "w29/0"},
		{"s", "REQ/S*", "w3/0"},
		{"r", "TTFT", "running"},
		{"f" + strings.Repeat("j", 99), "REQ/S*", "w22/0"}, // 8 rows fit
		{"k\x80\x80", "REQ/S*", "w19/0"},
		{"\t\t", "REQ/S*", "w3/0"},
	} {
		lines := shown(c.keys)
		if !strings.Contains(lines[2], c.title) || !strings.Contains(lines[3], c.first) {
			t.Errorf("%q: want %s, %s:\n%s", c.keys, c.title, c.first, strings.Join(lines, "\n"))
		}
	}
	if width = 40; !strings.Contains(shown("r")[2], "TIME") {
		t.Error("40 columns do not show the requests")
	}
	if s.press('q') || s.press(3) {
		t.Error("q and Ctrl-C do not end")
	}
	width = 120
	s.lost = fmt.Errorf("no\nanswer")
	if text := strings.Join(shown(""), "\n"); !strings.Contains(text, "kvepp does not answer: no?answer") {
		t.Errorf("%s", text)
	}
}
