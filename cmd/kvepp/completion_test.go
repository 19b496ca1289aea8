package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestCompletion asks real shells what they offer.
func TestCompletion(t *testing.T) {
	cases := []struct {
		line string
		want []string // some of the offers; none: no offers
	}{
		{"kvepp ", []string{"serve", "check", "completion"}},
		{"kvepp env", []string{"envoy"}},
		{"kvepp envoy --engine-", []string{"--engine-ca", "--engine-tls"}},
		{"kvepp envoy --engine ", []string{"vllm", "dynamo"}},
		{"kvepp se", []string{"serve", "select"}},
		{"kvepp serve --grpc-", []string{"--grpc-port", "--grpc-health-port"}},
		{"kvepp serve --help", []string{"--help", "--help-all"}},
		{"kvepp check --pro", []string{"--probe"}},
		{"kvepp serve --router-mode ", []string{"kv", "round-robin", "direct"}},
		{"kvepp serve --router-mode=r", []string{"round-robin", "random"}},
		{"kvepp serve --engine vllm --log-format j", []string{"json"}},
		{"kvepp select --router-queue-policy ", []string{"fcfs", "wspt"}},
		{"kvepp serve --endpoints com", []string{"completion.go"}},
		{"kvepp tokenize --model-path test", []string{"testdata"}},
		{"kvepp completion ", []string{"bash", "fish", "zsh"}},
		{"kvepp serve --config-f", nil}, // --config-file is refused, so it is not offered
	}
	for shell, offers := range map[string]func(*testing.T, string, string) []string{
		"bash": offersOfBash, "fish": offersOfFish, "zsh": offersOfZsh,
	} {
		t.Run(shell, func(t *testing.T) {
			if _, err := exec.LookPath(shell); err != nil {
				t.Skipf("%v; install it: test/tools/install.sh shells (make test does so if it may)", err)
			}
			status, script, stderr := runWith(nil, "completion", shell)
			if status != 0 || stderr != "" {
				t.Fatalf("status %d, %s", status, stderr)
			}
			path := filepath.Join(t.TempDir(), "_kvepp")
			if err := os.WriteFile(path, []byte(script), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(shell, "-n", path).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for _, c := range cases {
				got := offers(t, path, c.line)
				for _, want := range c.want {
					if !slices.Contains(got, want) {
						t.Errorf("%q: the shell offers %q, want %q among them", c.line, got, want)
					}
				}
				if c.want == nil && len(got) > 0 {
					t.Errorf("%q: the shell offers %q, want none", c.line, got)
				}
			}
		})
	}
	for _, args := range [][]string{{"completion"}, {"completion", "tcsh"}, {"completion", "bash", "zsh"}} {
		if status, stdout, stderr := runWith(nil, args...); status != 2 || stdout != "" ||
			!strings.Contains(stderr, "must be bash, zsh or fish") {
			t.Errorf("%v: status %d, %q", args, status, stderr)
		}
	}
}

// runShell returns the lines that a shell prints for a script.
func runShell(t *testing.T, args ...string) []string {
	t.Helper()
	command := exec.Command(args[0], args[1:]...)
	command.Env = append(os.Environ(), "HOME="+t.TempDir(), "TERM=dumb", "NO_COLOR=1")
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", args[0], err, out)
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' || r == '\r' })
}

// offersOfBash calls the completion function with the words into which readline splits a line.
func offersOfBash(t *testing.T, script, line string) []string {
	words := strings.Fields(strings.ReplaceAll(line, "=", " = "))
	if strings.HasSuffix(line, " ") {
		words = append(words, "")
	}
	return runShell(t, append([]string{"bash", "--norc", "-c", `source "$1"; shift; COMP_WORDS=("$@"); ` +
		`COMP_CWORD=$(($# - 1)); _kvepp
		printf '%s\n' "${COMPREPLY[@]}"`, "bash", script}, words...)...)
}

// offersOfFish asks fish, which prints each offer with its description behind a tab.
func offersOfFish(t *testing.T, script, line string) []string {
	offers := runShell(t, "fish", "--no-config", "-c", `source $argv[1]; complete -C $argv[2]`, script, line)
	for i, offer := range offers {
		offer, _, _ = strings.Cut(offer, "\t")
		if _, value, isValue := strings.Cut(offer, "="); isValue && strings.Contains(line, "=") {
			offer = value
		}
		offers[i] = strings.TrimSuffix(offer, "/")
	}
	return offers
}

// offersOfZsh calls the completion function with fakes of zsh's own functions, which print their arguments. It parses
// the specifications of _arguments, because zsh itself completes only at a terminal.
func offersOfZsh(t *testing.T, script, line string) []string {
	words := strings.Fields(line)
	if strings.HasSuffix(line, " ") {
		words = append(words, "")
	}
	printed := runShell(t, append([]string{"zsh", "-f", "-c", `compdef() { }; source $1; shift
		_describe() { print -rl -- ${(P)2}; }; _arguments() { print -rl -- "$@"; }
		words=("$@"); CURRENT=$#; _kvepp`, "zsh", script}, words...)...)
	last, before := words[len(words)-1], words[len(words)-2]
	flag, value, isValue := strings.Cut(last, "=")
	if !isValue && strings.HasPrefix(before, "--") {
		flag, value, isValue = before, last, true
	}
	var offers []string
	specification := regexp.MustCompile(`^\*(--[a-z-]+)=?\[.*\](?::[^:]*(?:\\:[^:]*)*:(.*))?$`)
	for _, p := range printed {
		spec := specification.FindStringSubmatch(p)
		switch {
		case len(words) == 2:
			name, _, _ := strings.Cut(p, ":")
			offers = append(offers, name)
		case strings.HasPrefix(p, "1:argument:"):
			offers = strings.Fields(strings.Trim(strings.TrimPrefix(p, "1:argument:"), "()"))
		case spec == nil:
			t.Errorf("%q: not a specification: %s", line, p)
		case !isValue && strings.HasPrefix(spec[1], last):
			offers = append(offers, spec[1])
		case isValue && spec[1] == flag && strings.HasPrefix(spec[2], "_files"):
			found, err := filepath.Glob(value + "*")
			if err != nil {
				t.Fatal(err)
			}
			offers = found
		case isValue && spec[1] == flag:
			offers = strings.Fields(strings.Trim(spec[2], "()"))
		}
	}
	return offers
}
