package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// sampleTexts are files with prose for models and benchmarks to read.
var sampleTexts = []string{"test/bench/words.txt", "test/bench/quality/traffic.go", "test/models/train.py",
	"test/parity/oracle.py",
	"prompt/bpe/oracle_test.go", "prompt/memory_test.go", "prompt/tokenize_test.go"}

// TestWords refuses the words that docs/style.md lists, in code, scripts and pages.
func TestWords(t *testing.T) {
	const style = "docs/style.md"
	_, list, found := strings.Cut(read(t, style), "\n## Words that the lint test refuses\n")
	if !found {
		t.Fatalf("%s has no list of words", style)
	}
	var words []string
	for _, word := range regexp.MustCompile("`([a-z ]+)`").FindAllStringSubmatch(list, -1) {
		first := word[1][:1] // at the beginning of a sentence, too; not within an identifier such as NoBody
		words = append(words, "["+first+strings.ToUpper(first)+"]"+
			strings.ReplaceAll(word[1][1:], " ", `\s+(?://\s*|#\s*)?`))
	}
	if len(words) < 10 {
		t.Fatalf("%s lists %d words", style, len(words))
	}
	refused := regexp.MustCompile(`\b(` + strings.Join(words, "|") + `)\b`)
	written := regexp.MustCompile(`\.(go|md|sh|py|ya?ml|c|h|s|tpl|txt)$|(^|/)(Makefile|Dockerfile)$`)
	for _, name := range treeFiles(t) {
		if name == style || !written.MatchString(name) || strings.Contains(name, "testdata/") ||
			slices.Contains(sampleTexts, name) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range refused.FindAllIndex(text, -1) {
			t.Errorf("%s:%d: %q: see %s", name, 1+strings.Count(string(text[:at[0]]), "\n"), text[at[0]:at[1]], style)
		}
	}
}
