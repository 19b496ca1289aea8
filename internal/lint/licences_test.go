package lint

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// permissive has a sentence from each licence whose programs may be distributed with a notice alone.
var permissive = map[string]string{
	"Apache-2.0": "Apache License",
	"BSD":        "Redistribution and use in source and binary forms",
	"ISC":        "Permission to use, copy, modify, and/or distribute",
	"MIT":        "Permission is hereby granted, free of charge",
	"MPL-2.0":    "Mozilla Public License Version 2.0",
}

// TestLicences wants a permissive licence of each module in kvepp's program. `make release` puts the texts beside it.
func TestLicences(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-f",
		"{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}{{end}}{{end}}", "./cmd/kvepp")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		module, dir, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if !ok || seen[module] {
			continue
		}
		seen[module] = true
		if !isPermissive(t, dir) {
			t.Errorf("%s: its licence is none of those that internal/lint knows as permissive; read it, then add it "+
				"there or use another module", module)
		}
	}
	if len(seen) < 10 {
		t.Errorf("only %d modules found", len(seen))
	}
}

func isPermissive(t *testing.T, dir string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "LICENSE*"))
	if err != nil || len(files) == 0 {
		return false
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		words := strings.Join(strings.Fields(string(text)), " ")
		known := false
		for _, sentence := range permissive {
			known = known || strings.Contains(words, sentence)
		}
		if !known || strings.Contains(words, "GNU GENERAL PUBLIC LICENSE") {
			return false
		}
	}
	return true
}
