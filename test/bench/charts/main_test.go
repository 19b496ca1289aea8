package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDescribed: each line of JSON becomes a file, and a bad one an error that names it.
func TestDescribed(t *testing.T) {
	out := filepath.Join(t.TempDir(), "charts")
	var said bytes.Buffer
	err := drawLines(strings.NewReader(`{"file": "a", "title": "A & B", "x": "times", "bars": [`+
		`{"name": "find", "value": 3.5}]}`+"\n"+`{"file": "b", "bars": [{"name": "x", "value": 12}]}`),
		&said, out)
	if err != nil {
		t.Fatal(err)
	}
	a, err := os.ReadFile(filepath.Join(out, "a.svg"))
	if err != nil || !strings.Contains(string(a), "A &amp; B") || !strings.Contains(string(a), ">3.5<") {
		t.Errorf("%v\n%s", err, a)
	}
	if _, err := os.Stat(filepath.Join(out, "b.svg")); err != nil || strings.Count(said.String(), "chart: ") != 2 {
		t.Errorf("%v %q", err, said.String())
	}
	for _, bad := range []string{`{"file": "../a", "bars": [{"name": "x", "value": 1}]}`, `{"file": "a"}`, `{`} {
		if err := drawLines(strings.NewReader(bad), &said, out); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}
