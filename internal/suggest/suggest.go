// Package suggest finds the known word that is most similar to a mistyped word, for error messages.
//
// It owns the measure of similarity; it never prints, and never decides whether a word is wrong. Its function is pure
// and safe for concurrent use.
package suggest

import "strings"

// maxLength is the maximum length of a compared word, in bytes. No flag, key or variable is longer, and a comparison
// takes time proportional to the product of both lengths.
const maxLength = 100

// DidYouMean returns "; did you mean PREFIXnearest?" with the known word nearest to word, as the end of an error
// message. It returns "" if no known word is near. Case, hyphens and underscores are ignored: block_size suggests
// blockSize.
func DidYouMean(word, prefix string, known []string) string {
	// a word is near at a distance of at most a third of its length, or of one edit for a short word
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

// distance returns the number of edits that turn a into b: insert, remove or replace a byte, or swap two neighbours.
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
