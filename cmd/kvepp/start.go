package main

import (
	"log/slog"
	"regexp"
	"runtime"
	"runtime/debug"

	"github.com/spf13/pflag"
)

// commit is set by the linker (-X main.commit=...): builds in containers and in git worktrees record none themselves.
var commit string

// build is what Go recorded when it built this binary. A field is "unknown" where Go recorded nothing.
type build struct {
	version string // of the module
	commit  string // git revision, with "-modified" behind it if the sources differed from that commit
}

// readBuild returns the build information of this binary.
func readBuild() build {
	b := build{version: "unknown", commit: "unknown"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Version != "" {
		b.version = info.Main.Version
	}
	modified := false
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.commit = s.Value
		case "vcs.modified":
			modified = s.Value == "true"
		}
	}
	if modified {
		b.commit += "-modified"
	}
	if commit != "" {
		b.commit = commit
	}
	return b
}

// logStart logs what was started, and the settings that differ from their defaults: one line each.
func (o *logging) logStart(command string, log *slog.Logger) {
	b := readBuild()
	log.Info("kvepp starts", "command", command, "version", b.version, "commit", b.commit, "go", runtime.Version())
	if len(o.settings) == 0 {
		log.Info("all settings have their defaults")
		return
	}
	log.Info("settings that differ from their defaults", o.settings...)
}

// changedSettings returns the flags whose effective values differ from their defaults, as name and value in turn. It
// includes values from the environment, and those that another flag sets (a preset). Passwords in URLs are masked.
func changedSettings(f *pflag.FlagSet) []any {
	var settings []any
	f.VisitAll(func(flag *pflag.Flag) {
		value := flag.Value.String()
		if flag.Hidden || value == flag.DefValue || value == "NaN" { // NaN stands for a number that was not given
			return
		}
		settings = append(settings, flag.Name, maskPasswords(value))
	})
	return settings
}

// urlUser finds the user and the password of a URL.
var urlUser = regexp.MustCompile(`://[^/\s]*@`)

// maskPasswords replaces users and passwords of the URLs in a setting.
func maskPasswords(value string) string { return urlUser.ReplaceAllString(value, "://***@") }
