package scoring

import (
	"math/rand/v2"
	"testing"
)

// Few keys and many operations: runs of slots form, wrap around the end of the table, and close again.
func TestTableEqualsMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var table table
	want := map[uint64]uint32{}
	check := func(key uint64) {
		t.Helper()
		got := uint32(0)
		if value := table.find(key); value != nil {
			got = *value
		}
		if got != want[key] || table.used != len(want) {
			t.Fatalf("key %d has value %d, want %d; %d keys, want %d", key, got, want[key], table.used, len(want))
		}
	}
	check(0)
	for step := range 200_000 {
		key := rng.Uint64N(90)
		if step > 100_000 {
			key = rng.Uint64N(3000) // grows
		}
		if rng.IntN(2) == 0 {
			value := 1 + rng.Uint32N(1000)
			*table.insert(key) = value
			want[key] = value
		} else {
			table.remove(key)
			delete(want, key)
		}
		check(key)
		check(rng.Uint64N(90))
	}
	for key := range uint64(3000) {
		check(key)
	}
}
