package main

import (
	"log/slog"
	"testing"

	"kvepp/internal/logtest"
	"kvepp/pool"
)

// TestUnusableEndpointsAreLeftOut: an endpoint with an invalid name, address or discovery text is left out and logged
// once. The others stay.
func TestUnusableEndpointsAreLeftOut(t *testing.T) {
	var said logtest.Log
	wrong := newDedupLog(slog.New(slog.NewTextHandler(&said, nil)))
	for range 3 {
		wrong.begin()
		left := usable([]pool.Endpoint{
			{Name: "a", Address: "10.0.0.1:80"},
			{Name: "b\nc", Address: "10.0.0.2:80"},
			{Name: "d", Address: "10.0.0 .3:80"},
			{Name: "e", Address: "10.0.0.4:80", Model: "m\x00"},
			{Name: "f", Address: "10.0.0.5:80"},
		}, wrong)
		if len(left) != 2 || left[0].Name != "a" || left[1].Name != "f" {
			t.Errorf("left: %v", left)
		}
	}
	if said.Count("ignores an endpoint") != 3 {
		t.Error(said.String())
	}
}
