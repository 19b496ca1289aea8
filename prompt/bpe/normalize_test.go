package bpe

import (
	"math/rand/v2"
	"strings"
	"testing"

	"golang.org/x/text/unicode/norm"
)

// TestIsNormalCharacters compares isNormal with NFC's IsNormalString for every character, alone and before a mark.
func TestIsNormalCharacters(t *testing.T) {
	for r := rune(0x80); r <= 0xFFFF; r++ {
		for _, s := range []string{string(r), string(r) + "\u0301", "e" + string(r) + "\u3099"} {
			if got, want := isNormal(norm.NFC, s), norm.NFC.IsNormalString(s); got != want {
				t.Fatalf("%+q: %v, want %v", s, got, want)
			}
		}
	}
}

// TestIsNormal compares isNormal with the form's IsNormalString.
func TestIsNormal(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	pieces := []string{
		"a", "e", "A ", "eight ascii", strings.Repeat("long ascii ", 30), "\u00e9", "\u00c5", "\u00a0", "\u00bd",
		"\u017f", "\u02ff",
		"\u0300", "\u0301", "\u0345", "\u0327", "\u0323\u0307", "\u0307\u0323", strings.Repeat("\u0316", 40), "\u034f",
		"\u0439", "\u0438\u0306", "\uac00", "\u1100", "\u1161", "\u11a8", "\u304b", "\u3099", "\u2126", "\u212b",
		"\ufb01",
		"\u65e5\u672c", "\U0001f600", "\u0928\u093c", "\u0958", "\u2019", strings.Repeat("\u0434\u0430", 200),
	}
	random := rand.New(rand.NewPCG(3, 4))
	normal := 0
	for range 40_000 {
		var b strings.Builder
		for range 1 + random.IntN(5) {
			b.WriteString(pieces[random.IntN(len(pieces))])
		}
		for _, form := range []norm.Form{norm.NFC, norm.NFD, norm.NFKC, norm.NFKD} {
			got, want := isNormal(form, b.String()), form.IsNormalString(b.String())
			if got != want {
				t.Fatalf("%+q: form %d: %v, want %v", b.String(), form, got, want)
			}
			if want {
				normal++
			}
		}
	}
	if normal < 10_000 {
		t.Errorf("only %d texts were normal", normal)
	}
}
