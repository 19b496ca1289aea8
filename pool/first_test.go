package pool

import (
	"log/slog"
	"testing"
)

func TestFirstWorkers(t *testing.T) {
	enough := func(reached <-chan struct{}) bool {
		select {
		case <-reached:
			return true
		default:
			return false
		}
	}
	p := New(slog.New(slog.DiscardHandler))
	none, two := p.AwaitFirst(0), p.AwaitFirst(2)
	if !enough(none) || enough(two) {
		t.Errorf("an empty pool is enough for 0 workers: %v, for 2: %v", enough(none), enough(two))
	}
	prefill := Endpoint{Name: "p", Role: Prefill}
	a := Endpoint{Name: "a", Address: "10.0.0.1:1", DataParallelSize: 4}
	b := Endpoint{Name: "b", Address: "10.0.0.1:2", Role: Decode}
	if p.Update([]Endpoint{prefill, a, {Name: "e", Role: Encode}}); enough(two) {
		t.Error("an endpoint with four ranks counts as two, or a prefill or encode worker counts")
	}
	if p.Update([]Endpoint{prefill, a, b}); !enough(two) {
		t.Error("two workers are not enough")
	}
	p.Update(nil)
	p.Update([]Endpoint{a, b})
	if !enough(two) {
		t.Error("enough is not final")
	}
}
