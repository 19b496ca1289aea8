package bpe

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// cutAll describes how these sets of tokens cut text, applied in this order.
func cutAll(text string, from int, levels ...*addedTokens) []string {
	var parts []string
	for cuts := levels[0].cuts(text); ; {
		start, end, token := cuts.next()
		if end > start {
			if len(levels) > 1 {
				parts = append(parts, cutAll(text[start:end], from+start, levels[1:]...)...)
			} else {
				parts = append(parts, fmt.Sprint(from+start, text[start:end]))
			}
		}
		if token == nil {
			return parts
		}
		parts = append(parts, fmt.Sprint("token ", token.id))
	}
}

// TestBoundaries: a cut at boundaries, and then at the other tokens between them, equals a cut at all tokens.
func TestBoundaries(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	word := func(longest int) string {
		b := make([]byte, 1+r.IntN(longest))
		for i := range b {
			b[i] = "abc\n"[r.IntN(4)]
		}
		return string(b)
	}
	split := 0
	for range 3000 {
		var tokens []addedToken
		for id := range 1 + r.IntN(5) {
			token := addedToken{id: kvblock.Token(id), content: word(4)}
			if r.IntN(40) == 0 {
				token.singleWord, token.stripLeft, token.stripRight = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(2) == 0
			}
			if !slices.ContainsFunc(tokens, func(other addedToken) bool { return other.content == token.content }) {
				tokens = append(tokens, token)
			}
		}
		all := newAddedTokens(tokens)
		boundaries, others := all.boundaries()
		if len(boundaries)+len(others) != len(tokens) {
			t.Fatalf("%v became %v and %v", tokens, boundaries, others)
		}
		if len(boundaries) > 0 && len(others) > 0 {
			split++
		}
		for range 20 {
			text := word(30)
			want, got := cutAll(text, 0, all), cutAll(text, 0, newAddedTokens(boundaries), newAddedTokens(others))
			if !slices.Equal(got, want) {
				t.Fatalf("tokens %+v, text %q:\n got %q\nwant %q", tokens, text, got, want)
			}
		}
	}
	if split < 300 {
		t.Errorf("only %d sets of tokens had both boundaries and others", split)
	}
}

// TestBoundariesOfChats: the tokens that separate messages are boundaries, so the cache holds messages. Runs of
// newlines are not.
func TestBoundariesOfChats(t *testing.T) {
	var tokens []addedToken
	for _, content := range []string{"<start_of_turn>", "<end_of_turn>", "<table>", "\n", "\n\n", "\n\n\n", "\t",
		"\t\t", "<unused1>", "<unused11>"} {
		tokens = append(tokens, addedToken{content: content})
	}
	boundaries, _ := newAddedTokens(tokens).boundaries()
	var got []string
	for _, token := range boundaries {
		got = append(got, token.content)
	}
	if want := []string{"<start_of_turn>", "<end_of_turn>", "<table>", "<unused1>", "<unused11>"}; !slices.Equal(
		got,
		want,
	) {
		t.Errorf("got %q, want %q", got, want)
	}
}
