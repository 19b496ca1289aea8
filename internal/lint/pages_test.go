package lint

import (
	"path"
	"regexp"
	"strings"
	"testing"
)

// TestPagesBeginAndEnd checks that each page of docs and examples begins with what it is for, as a sentence below its
// title, and ends with a link to a next step.
func TestPagesBeginAndEnd(t *testing.T) {
	for page, most := range map[string]int{"README.md": 200, "ARCHITECTURE.md": 200} {
		if lines := strings.Count(read(t, page), "\n"); lines > most {
			t.Errorf("%s has %d lines, and may have %d", page, lines, most)
		}
	}
	if words := len(strings.Fields(read(t, "README.md"))); words > 2000 {
		t.Errorf("README.md has %d words, and may have 2000", words)
	}
	of := regexp.MustCompile(`^(docs|examples)/.*\.md$`)
	pages := 0
	for _, name := range treeFiles(t) {
		if !of.MatchString(name) {
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

// TestMigrationPages checks that each page for people who come from another picker has the counterparts of its flags,
// headers and metrics, the steps of the change, and the way back.
func TestMigrationPages(t *testing.T) {
	parts := []string{"(?m)^\\|.*`--|^\\|.*`[A-Z_]+`", `(?m)^\| header`, `(?m)^\| metric`, `(?m)^## Cut over$`,
		`(?m)^\d\. Watch `, `(?m)^\*\*Go back\*\*: `}
	migrations := 0
	for _, name := range treeFiles(t) {
		if !strings.HasPrefix(name, "docs/migration/") {
			continue
		}
		migrations++
		for _, part := range parts {
			if !regexp.MustCompile(part).MatchString(read(t, name)) {
				t.Errorf("%s: nothing matches %s", name, part)
			}
		}
	}
	if migrations < 5 {
		t.Errorf("%d pages", migrations)
	}
}

// TestPagesNameTargetsAndTests checks that the make targets and the Go tests that pages name exist.
func TestPagesNameTargetsAndTests(t *testing.T) {
	makefile, tests, names := read(t, "Makefile"), map[string]bool{}, 0
	files := treeFiles(t)
	function := regexp.MustCompile(`(?m)^func (Test[A-Z]\w*)\(`)
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			for _, m := range function.FindAllStringSubmatch(read(t, name), -1) {
				tests[m[1]] = true
			}
		}
	}
	target := regexp.MustCompile("(?m)(?:^|`|&& )make ([a-z][a-z0-9-]*)")
	test := regexp.MustCompile(`\bTest[A-Z]\w*`)
	for _, name := range files {
		if !strings.HasSuffix(name, ".md") {
			continue
		}
		text := read(t, name)
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			if names++; !strings.Contains(makefile, "\n"+m[1]+":") {
				t.Errorf("%s: the Makefile has no target %s", name, m[1])
			}
		}
		for _, m := range test.FindAllString(text, -1) {
			if names++; !tests[m] {
				t.Errorf("%s: there is no test %s", name, m)
			}
		}
	}
	if names < 50 {
		t.Errorf("the pages have %d names of targets and tests", names)
	}
}

// TestCompatibilityNamesTests checks that the tests that docs/compatibility.md names, as FOLDER.TestName, exist.
func TestCompatibilityNamesTests(t *testing.T) {
	declared := map[string]bool{}
	goFiles(t, func(name string, text []byte) {
		for _, f := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(text, -1) {
			declared[path.Dir(name)+"."+string(f[1])] = true
		}
	})
	named := regexp.MustCompile("`([a-z0-9/]+\\.Test\\w+)`").FindAllStringSubmatch(read(t, "docs/compatibility.md"), -1)
	for _, n := range named {
		if !declared[n[1]] {
			t.Errorf("docs/compatibility.md: there is no %s", n[1])
		}
	}
	if len(named) < 30 {
		t.Errorf("%d tests are named", len(named))
	}
}
