package join

import (
	"log/slog"
	"testing"

	"kvepp/internal/logtest"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/serve/models"
)

// TestUnusableEndpointsAreDropped: usable drops an endpoint with an invalid name, address or text of discovery, and
// logs it once.
func TestUnusableEndpointsAreDropped(t *testing.T) {
	var logged logtest.Log
	found := newProblems(slog.New(slog.NewTextHandler(&logged, nil)))
	for range 3 {
		found.begin()
		kept := found.usable([]pool.Endpoint{
			{Name: "a", Address: "10.0.0.1:80"},
			{Name: "b\nc", Address: "10.0.0.2:80"},
			{Name: "d", Address: "10.0.0 .3:80"},
			{Name: "e", Address: "10.0.0.4:80", Model: "m\x00"},
			{Name: "f", Address: "10.0.0.5:80"},
		})
		if len(kept) != 2 || kept[0].Name != "a" || kept[1].Name != "f" {
			t.Errorf("usable returns %v, want a and f", kept)
		}
	}
	if logged.Count("ignores an endpoint") != 3 {
		t.Error(logged.String())
	}
}

// TestMismatchesAreLoggedOnce: each mismatch is logged when it begins, and again if it ended in between.
func TestMismatchesAreLoggedOnce(t *testing.T) {
	var logged logtest.Log
	j := Join{Log: slog.New(slog.NewTextHandler(&logged, nil))}
	a := dynamo.Mismatch{Endpoint: "w0", File: "tokenizer.json", Own: "x", Worker: "y"}
	b := dynamo.Mismatch{Endpoint: "w1", File: "tokenizer.json", Own: "x", Worker: "y"}
	for _, mismatches := range [][]dynamo.Mismatch{{a}, {a}, {a, b}, {b}, {b, a}} {
		j.logMismatches(mismatches)
	}
	if logged.Count("level=ERROR") != 3 || logged.Count("worker=w0 file=tokenizer.json own=x worker's=y") != 2 {
		t.Error(logged.String())
	}
}

// TestSettingsWithoutTokenizer: the card of a worker whose model has no tokenizer changes nothing.
func TestSettingsWithoutTokenizer(t *testing.T) {
	var logged logtest.Log
	j := Join{Loaded: models.Models{"gone": nil}, problems: newProblems(slog.New(slog.NewTextHandler(&logged, nil)))}
	j.applySettings([]dynamo.Instance{{InstanceID: 1, Card: &dynamo.Card{Model: "gone"}}})
	if logged.String() != "" {
		t.Error(logged.String())
	}
}
