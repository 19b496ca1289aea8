package lint

import (
	"regexp"
	"strings"
	"testing"
)

// TestPagesBeginAndEnd checks that each page of docs begins with what it is for, as a sentence below its title, and
// ends with a link to a next step.
func TestPagesBeginAndEnd(t *testing.T) {
	pages := 0
	for _, name := range treeFiles(t) {
		if !strings.HasPrefix(name, "docs/") || !strings.HasSuffix(name, ".md") {
			continue
		}
		pages++
		text := regexp.MustCompile(`(?s)^<!--.*?-->\s*`).ReplaceAllString(read(t, name), "")
		if !regexp.MustCompile("^# [^\n]+\n\n[A-Za-z`]").MatchString(text) {
			t.Errorf("%s: write below the title what the page is for", name)
		}
		next := max(strings.LastIndex(text, "\n## Next"), strings.LastIndex(text, "\nNext: "))
		if next < 0 || strings.Contains(text[next+2:], "\n#") || !strings.Contains(text[next:], "](") {
			t.Errorf("%s: end the page with a next step: \"Next: \" or a section \"## Next\", with a link", name)
		}
	}
	if pages < 20 {
		t.Errorf("%d pages", pages)
	}
}
