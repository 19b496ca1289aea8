package main

import (
	"log/slog"
	"testing"

	"kvepp/internal/logtest"
	"kvepp/pool"
)

// TestUnusableEndpointsAreDropped: usable drops an endpoint with an invalid name, address or text of discovery, and
// logs it once.
func TestUnusableEndpointsAreDropped(t *testing.T) {
	var logged logtest.Log
	problems := newDedupLog(slog.New(slog.NewTextHandler(&logged, nil)))
	for range 3 {
		problems.begin()
		kept := usable([]pool.Endpoint{
			{Name: "a", Address: "10.0.0.1:80"},
			{Name: "b\nc", Address: "10.0.0.2:80"},
			{Name: "d", Address: "10.0.0 .3:80"},
			{Name: "e", Address: "10.0.0.4:80", Model: "m\x00"},
			{Name: "f", Address: "10.0.0.5:80"},
		}, problems)
		if len(kept) != 2 || kept[0].Name != "a" || kept[1].Name != "f" {
			t.Errorf("usable returns %v, want a and f", kept)
		}
	}
	if logged.Count("ignores an endpoint") != 3 {
		t.Error(logged.String())
	}
}
