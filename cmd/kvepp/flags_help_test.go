package main

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// TestHelpFits: each command's help fits a screen in width, and that of kvepp serve in height.
func TestHelpFits(t *testing.T) {
	for _, c := range commands {
		for _, flag := range []string{"--help", "--help-all"} {
			if c.flags == nil && flag == "--help-all" {
				continue
			}
			status, help, stderr := runWith(nil, c.name, flag)
			if status != 0 || stderr != "" {
				t.Errorf("kvepp %s %s: status %d, %s", c.name, flag, status, stderr)
			}
			lines := strings.Split(strings.TrimSuffix(help, "\n"), "\n")
			if c.name == "serve" && flag == "--help" && len(lines) > 50 {
				t.Errorf("kvepp serve --help has %d lines, want at most 50", len(lines))
			}
			for _, line := range lines {
				if n := utf8.RuneCountInString(line); n > 100 {
					t.Errorf("kvepp %s %s: a line of %d columns: %s", c.name, flag, n, line)
				}
			}
		}
	}
}

// TestHelpAllNamesEveryFlag: --help-all names each flag once, and --help fifteen.
func TestHelpAllNamesEveryFlag(t *testing.T) {
	_, all, _ := runWith(nil, "serve", "--help-all")
	_, brief, _ := runWith(nil, "serve", "--help")
	shown := 0
	serveFlags(new(options)).VisitAll(func(f *pflag.Flag) {
		has := func(help string) bool { return strings.Contains(help, "  --"+f.Name) }
		switch {
		case f.Hidden:
		case !has(all):
			t.Errorf("--help-all does not name --%s", f.Name)
		case has(brief+"\n") && strings.Contains(brief, "  --"+f.Name+" "):
			shown++
		}
	})
	if shown != 15 {
		t.Errorf("--help shows %d flags, want 15", shown)
	}
}

// TestNamedValues: each flag takes the values that help and completion offer, and no others.
func TestNamedValues(t *testing.T) {
	try := func(flag, value string) string {
		args := []string{"--endpoints=x", "--" + flag + "=" + value, "--model=m=d"}
		if flag == "router-mode" {
			args = append(args, "--allow-client-pinning")
		}
		if flag == "pool-group" || flag == "dynamo-discovery" {
			args = append(args, "--pool-name=p")
		}
		if err := parseServe(new(options), args, func(string) string { return "" }); err != nil {
			return err.Error()
		}
		return ""
	}
	named := 0
	serveFlags(new(options)).VisitAll(func(f *pflag.Flag) {
		all := flags.ValuesOf(f)
		if len(all) == 0 {
			return
		}
		named++
		for _, value := range all {
			if strings.HasSuffix(value, ":") {
				value += "h:1" // the beginning of a value
			}
			if err := try(f.Name, value); err != "" {
				t.Errorf("--%s=%s: %s", f.Name, value, err)
			}
		}
		if try(f.Name, "7") == "" {
			t.Errorf("--%s accepts 7", f.Name)
		}
	})
	if named < 15 {
		t.Errorf("%d flags name their values, want at least 15", named)
	}
}
