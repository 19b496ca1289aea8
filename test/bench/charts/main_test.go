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
	err := drawLines(strings.NewReader(`{"file": "a", "title": "A & B", "x": "times", "mark": "kvepp", "bars": [`+
		`{"name": "find", "value": 3.5}]}`+"\n"+`{"file": "b", "log": true, "bars": [{"name": "x", "value": 12}]}`),
		&said, out)
	if err != nil {
		t.Fatal(err)
	}
	a, err := os.ReadFile(filepath.Join(out, "a.svg"))
	if err != nil || !strings.Contains(string(a), "A &amp; B") || !strings.Contains(string(a), ">3.5<") ||
		!strings.Contains(string(a), ">kvepp<") {
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

// TestBenchmarks: the output passes unchanged, and the chart has the median of each benchmark of each package.
func TestBenchmarks(t *testing.T) {
	const text = "goos: linux\npkg: kvepp/indexer\nBenchmarkFind/deep-2   \t 100\t 120 ns/op\t 0 B/op\n" +
		"BenchmarkFind/deep-2 100 140.5 ns/op\nBenchmarkFind/deep-2 100 130 ns/op\nPASS\npkg: kvepp/router\n" +
		"BenchmarkPick 7 2000000 ns/op\nok\n"
	out := t.TempDir()
	var said bytes.Buffer
	if err := drawBenchmarks(strings.NewReader(text), &said, out, "go"); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(filepath.Join(out, "go.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{">indexer Find/deep<", ">130<", ">router Pick<", ">2000000<"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("no %s in the chart", want)
		}
	}
	if !strings.HasPrefix(said.String(), text) {
		t.Errorf("passed on %q", said.String())
	}
	for _, bad := range []string{"ok\n", text + "FAIL\tkvepp/router [build failed]\n"} {
		if err := drawBenchmarks(strings.NewReader(bad), &said, out, "go"); err == nil {
			t.Errorf("%q is no error", bad)
		}
	}
}
