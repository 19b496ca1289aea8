package api

import "testing"

// TestPoolModel checks that a model's name may contain the separator between model and group.
func TestPoolModel(t *testing.T) {
	for _, g := range []ModelGroup{{"a", "b"}, {"a:b", ""}, {`"a"`, `"`}, {"", "x"}, {"a\xff\n", "\x00"}} {
		if got := ParsePoolModel(g.PoolModel()); got != g {
			t.Errorf("%q became %q", g, got)
		}
	}
}
