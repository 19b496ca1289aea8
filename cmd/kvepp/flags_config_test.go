package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// settingsIn writes a file of settings and returns its path.
func settingsIn(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvepp.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// runWith runs kvepp with an environment, and returns the status and both outputs.
func runWith(env map[string]string, args ...string) (status int, stdout, stderr string) {
	var out, err bytes.Buffer
	status = run(args, nil, &out, &err, func(name string) string { return env[name] })
	return status, out.String(), err.String()
}

func TestPrecedenceOfSettings(t *testing.T) {
	file := settingsIn(t, "router-temperature: 3\n")
	env := map[string]string{"KVEPP_ROUTER_TEMPERATURE": "2", "DYN_ROUTER_TEMPERATURE": "4", "KVEPP_CONFIG": file}
	temperature := func(args ...string) float64 { return parsed(t, args, env).scoring.Temperature }
	if got := temperature("--router-temperature=1"); got != 1 {
		t.Errorf("with the flag: %v, want 1", got)
	}
	if got := temperature(); got != 2 {
		t.Errorf("with kvepp's variable: %v, want 2", got)
	}
	delete(env, "KVEPP_ROUTER_TEMPERATURE")
	if got := temperature(); got != 3 {
		t.Errorf("with the file: %v, want 3", got)
	}
	delete(env, "KVEPP_CONFIG")
	if got := temperature(); got != 4 {
		t.Errorf("with Dynamo's variable: %v, want 4", got)
	}
}

// TestSettingsFile: lists, and files without settings.
func TestSettingsFile(t *testing.T) {
	file := settingsIn(t, "model:\n- a=b\n- c=d,e\nindex-peers: ['http://a:1', 'http://b:1']\n"+
		"endpoint-selector: app=x\nendpoint-target-ports: [1, 2]\nrouter-kv-events: false\n")
	o := parsed(t, []string{"--config=" + file}, nil)
	if fmt.Sprint(o.models.Folders) != "map[a:b c:d,e]" || len(o.indexPeers) != 2 ||
		len(o.sources.Kube.Ports) != 2 || o.kvEvents {
		t.Errorf("lists: %v %q %v; router-kv-events %v", o.models.Folders, o.indexPeers, o.sources.Kube.Ports,
			o.kvEvents)
	}
	for _, text := range []string{"", "# nothing\n", "---\n"} {
		parsed(t, []string{"--config=" + settingsIn(t, text)}, nil)
	}
}

// configSample writes the file of settings that docs/configuration.md shows, and returns its path and its text.
func configSample(t *testing.T) (path, text string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, sample, found := strings.Cut(string(page), "```yaml\n")
	sample, _, ended := strings.Cut(sample, "```\n")
	if !found || !ended || !strings.HasPrefix(sample, "# kvepp.yaml") {
		t.Fatal("docs/configuration.md has no sample of --config any more")
	}
	return settingsIn(t, sample), sample
}

// TestConfigSample: each line of the sample in docs/configuration.md changes its flag, and no other flag.
func TestConfigSample(t *testing.T) {
	path, text := configSample(t)
	defaults, changed := parsed(t, nil, nil).flags, 0
	parsed(t, []string{"--config=" + path}, nil).flags.VisitAll(func(f *pflag.Flag) {
		value := f.Value.String()
		if f.Name == "config" || value == defaults.Lookup(f.Name).Value.String() {
			return
		}
		changed++
		if !strings.Contains(text, "\n"+f.Name+":") {
			t.Errorf("the sample changes --%s to %s, but does not name it", f.Name, value)
		}
	})
	if keys := len(regexp.MustCompile(`(?m)^[a-z-]+:`).FindAllString(text, -1)); changed != keys {
		t.Errorf("the sample has %d keys and changes %d flags", keys, changed)
	}
}

func TestSettingsFileErrors(t *testing.T) {
	for text, says := range map[string]string{
		"grcp-port: 1":                "line 1: unknown key \"grcp-port\"; did you mean grpc-port?",
		"# x\nno-router-kv-events: x": "line 2: unknown key \"no-router-kv-events\": write router-kv-events: false",
		"--grpc-port: 1":              "write it without dashes, grpc-port",
		"probe: true":                 "it is a flag of kvepp check",
		"config: x":                   "config belongs on the command line",
		"help-all: true":              "help-all belongs on the command line",
		"grpc-port: x":                "line 1: grpc-port \"x\": must be a whole number from 0 to 65535",
		"grpc-port: [1]":              "takes one value, not a list",
		"grpc-port:":                  "grpc-port: has no value",
		"model: {a: b}":               "takes one value, not a mapping",
		"grpc-port: 1\ngrpc-port: 2":  "line 2: grpc-port: line 1 sets the same flag",
		"- a":                         "line 1: must be lines of the form FLAG: VALUE",
		"a: 1\n---\nb: 2":             "more than one document",
		"a: [":                        "yaml",
		strings.Repeat("#", flags.MaxFileBytes+1): "larger than",
		"endpoints: e\nrouter-temperature: -1":    "(router-temperature is set by ",
		"endpoints: e\nconfig-file: x":            `"config-file": kvepp serve has its own flags`,
		"endpoints: e\neject: maybe":              "line 2: eject \"maybe\": must be true or false",
	} {
		file := settingsIn(t, text)
		status, _, stderr := runWith(nil, "serve", "--config", file)
		if status != 2 || !strings.Contains(stderr, says) {
			t.Errorf("%.60q: status %d, %q; want 2 and %q", text, status, stderr, says)
		}
	}
	if status, _, stderr := runWith(nil, "serve", "--config=testdata/none.yaml"); status != 2 ||
		!strings.Contains(stderr, "--config: open testdata/none.yaml") {
		t.Errorf("no file: status %d, %q", status, stderr)
	}
}

// TestPrintConfig: the output has the source of each value, and as a file it gives the same settings.
func TestPrintConfig(t *testing.T) {
	file := settingsIn(t, "load-aware: true\nmodel: ['m=a', 'n=b']\nnats-server: nats://u:secret@h:1\n"+
		"default-chat-template-kwargs: '{\"a\": 1}'\n")
	env := map[string]string{"KVEPP_METRICS_PORT": "9999", "DYN_ROUTER_TEMPERATURE": "0.5"}
	args := []string{"serve", "--config=" + file, "--endpoints=e.yaml", "--router-queue-threshold=2",
		"--router-policy-config=testdata/policy2.yaml", "--print-config"}
	status, stdout, stderr := runWith(env, args...)
	if status != 0 || stderr != "" {
		t.Fatalf("status %d, %s", status, stderr)
	}
	flat := strings.Join(strings.Fields(stdout), " ")
	for _, want := range []string{
		"endpoints: e.yaml # flag",
		"metrics-port: 9999 # KVEPP_METRICS_PORT",
		"router-temperature: 0.5 # DYN_ROUTER_TEMPERATURE",
		"model: [m=a, n=b] # " + file + ", line 2",
		"# router-kv-overlap-score-credit: 0 # follows from --load-aware",
		"# router-ttl-secs: 60.5 # follows from --router-policy-config",
		"# grpc-port: 9002 # default",
		"# active-decode-blocks-threshold: None # default",
		"nats-server: nats://***@h:1 # " + file + ", line 3; user and password are not shown",
	} {
		if !strings.Contains(flat, want) {
			t.Errorf("the output lacks %q:\n%s", want, stdout)
		}
	}
	if strings.Contains(stdout, "secret") {
		t.Error("the output has a password")
	}
	again := settingsIn(t, strings.ReplaceAll(stdout, "***@", "u:secret@"))
	first, second := parsed(t, args[1:], env), parsed(t, []string{"--config=" + again}, nil)
	first.flags.VisitAll(func(f *pflag.Flag) {
		other := second.flags.Lookup(f.Name)
		if (other.Value.String() != f.Value.String() || other.Changed != f.Changed) &&
			f.Name != "config" && f.Name != "print-config" {
			t.Errorf("--%s: %q (given: %v), want %q (%v)", f.Name, other.Value, other.Changed, f.Value, f.Changed)
		}
	})
	for _, command := range [][]string{
		{"check", "--endpoints=e"}, {"indexer", "--block-size=0"}, {"select", "--port=9"},
	} {
		status, stdout, stderr := runWith(nil, append(command, "--print-config")...)
		if status != 0 || stderr != "" || !strings.Contains(stdout, "kvepp "+command[0]) {
			t.Errorf("kvepp %s: status %d, %q, %.100q", command[0], status, stderr, stdout)
		}
	}
	if status, stdout, stderr := runWith(nil, "serve", "--print-config"); status != 2 || stdout != "" ||
		!strings.Contains(stderr, "no endpoints") {
		t.Errorf("invalid settings: status %d, %q, %q", status, stdout, stderr)
	}
}
