package suggest

import (
	"strings"
	"testing"
)

func TestDidYouMean(t *testing.T) {
	commands := []string{"serve", "check", "tokenize", "indexer", "select", "fetch", "version", "help"}
	keys := []string{"name", "address", "blockSize", "kvEvents", "kvReplay", "totalKvBlocks"}
	for _, c := range []struct {
		word  string
		known []string
		want  string
	}{
		{"sevre", commands, "; did you mean serve?"},
		{"slect", commands, "; did you mean select?"},
		{"tokenise", commands, "; did you mean tokenize?"},
		{"run", commands, ""},
		{"deploy", commands, ""},
		{"x", commands, ""},
		{"", commands, ""},
		{"block_size", keys, "; did you mean blockSize?"},
		{"blocksize", keys, "; did you mean blockSize?"},
		{"kv-events", keys, "; did you mean kvEvents?"},
		{"adress", keys, "; did you mean address?"},
		{"port", keys, ""},
		{"---", keys, ""},
		{strings.Repeat("a", 1<<20), keys, ""},
		{"serve", nil, ""},
	} {
		if got := DidYouMean(c.word, "", c.known); got != c.want {
			t.Errorf("%.40q: %q, want %q", c.word, got, c.want)
		}
	}
	if got := DidYouMean("mdoel", "--", []string{"mode", "model"}); got != "; did you mean --model?" {
		t.Errorf("a swap of two letters counts as more than one edit: %q", got)
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"abc", "abc", 0}, {"abc", "acb", 1}, {"ca", "abc", 3},
		{"kitten", "sitting", 3}, {"ab", "ba", 1},
	} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q to %q: %d edits, want %d", c.a, c.b, got, c.want)
		}
	}
}
