// Package suggest finds the known word that a mistyped word was most likely meant to be, for error messages.
//
// It owns the measure of likeness and nothing else: it never prints, and never decides that a word is wrong. Its
// function is pure and safe from any goroutine.
package suggest

import "strings"

// maxLength is the length in bytes above which a word is not compared: no flag, key or variable is as long, and the
// comparison takes the product of both lengths.
const maxLength = 100

// DidYouMean returns "; did you mean PREFIXnearest?" for the known word nearest to word, as the end of an error
// message, or "" when no known word is near. Case, hyphens and underscores count for nothing, so that block_size
// suggests blockSize.
func DidYouMean(word, prefix string, known []string) string {
	// a distance of a third of the word, or of one edit in a short one, is still near
	nearest, least := "", len(word)/3+1
	if len(word) < 3 || len(word) > maxLength {
		return ""
	}
	plain := fold(word)
	for _, k := range known {
		if d := distance(plain, fold(k)); d <= least && (d < least || nearest == "") {
			nearest, least = k, d
		}
	}
	if nearest == "" || least >= len(plain) {
		return ""
	}
	return "; did you mean " + prefix + nearest + "?"
}

func fold(word string) string {
	return strings.ToLower(strings.NewReplacer("-", "", "_", "").Replace(word))
}

// distance is the number of edits that make a into b: a byte inserted, removed or replaced, or two neighbours swapped.
func distance(a, b string) int {
	if len(b) > maxLength {
		return maxLength
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, last[j]+cost)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
