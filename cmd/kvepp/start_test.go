package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/internal/flags"
	"kvepp/test/harness/process"
)

// log returns all that kvepp has logged.
func (r *running) log() string {
	r.t.Helper()
	text, err := os.ReadFile(r.Log)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(text)
}

// awaitLog waits until one log line has all of these parts, and returns that line. It fails if several lines have them.
func (r *running) awaitLog(parts ...string) string {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var found []string
	err := process.Until(ctx, func() error { // works also after kvepp has ended
		found = nil
	lines:
		for line := range strings.Lines(r.log()) {
			for _, part := range parts {
				if !strings.Contains(line, part) {
					continue lines
				}
			}
			found = append(found, line)
		}
		if len(found) == 0 {
			return errors.New("no such line")
		}
		return nil
	})
	if err != nil {
		r.t.Fatalf("log line with %q: %v", parts, err)
	}
	if len(found) > 1 {
		r.t.Errorf("%d log lines have %q:\n%s", len(found), parts, strings.Join(found, ""))
	}
	return found[0]
}

// awaitEnd waits until kvepp has ended, so that its log is complete.
func (r *running) awaitEnd() {
	r.t.Helper()
	<-r.Exited()
}

// modelFolder returns a folder with a tokenizer, and a chat template unless it is "".
func modelFolder(t *testing.T, template string) string {
	t.Helper()
	dir := t.TempDir()
	tokenizer, err := os.ReadFile("../../test/models/tiny-bytelevel/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), tokenizer, 0o644); err != nil {
		t.Fatal(err)
	}
	if template != "" {
		if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestStartAndStopAreLogged: at its start kvepp logs its version and commit, the settings that differ from their
// defaults, each listener with its TLS mode and each model with its template, one line each; at its stop one line.
func TestStartAndStopAreLogged(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("hidden-token"), 0o600); err != nil {
		t.Fatal(err)
	}
	good, bare := modelFolder(t, "{{ messages[0]['content'] }}"), modelFolder(t, "")
	broken := modelFolder(t, "{{ raise_exception('no') }}")
	r := reserve(t)
	r.env = []string{"NATS_SERVER=nats://someone:hidden-password@127.0.0.1:4222", "KVEPP_MODEL_PATH=m", "KVEPP_TOOLS=t",
		"KVEPP_SELECT_PORT=8092"}
	r.writeEndpoints("endpoints: []\n")
	r.start(
		"--secure-serving",
		"--load-aware",
		"--model=good="+good,
		"--model=bare="+bare,
		"--model=broken="+broken,
		"--admin-token-file="+secret,
		"--tokenizer-url=asked=http://127.0.0.1:1",
		"--drain-delay=0s",
	)
	r.awaitLog("kvepp starts", "level=INFO", "command=serve", "version=", "commit=", "go=go1.")
	r.awaitLog("environment variables of other commands", "level=WARN",
		"variables=KVEPP_MODEL_PATH,KVEPP_SELECT_PORT\n")
	settings := r.awaitLog("settings that differ from their defaults", "level=INFO")
	for _, want := range []string{" load-aware=true", " router-kv-overlap-score-credit=0", " admin-token-file=" +
		secret, " drain-delay=0s",
		fmt.Sprintf(" grpc-port=%d", r.grpc), "nats-server=nats://***@127.0.0.1:4222"} {
		if !strings.Contains(settings, want) {
			t.Errorf("the line lacks %q: %s", want, settings)
		}
	}
	for _, wrong := range []string{" drain-timeout=", " secure-serving=", " no-router-kv-events"} {
		if strings.Contains(settings, wrong) {
			t.Errorf("the line has %q, which has its default: %s", wrong, settings)
		}
	}
	r.awaitLog("listening", "for=ext_proc", fmt.Sprintf(":%d", r.grpc), "tls=self-signed")
	r.awaitLog("listening", "for=health", fmt.Sprintf(":%d", r.health), "tls=off")
	r.awaitLog("listening", "for=metrics", fmt.Sprintf(":%d", r.prom), "tls=off")
	r.awaitLog("listening", "for=\"admin requests\"", fmt.Sprintf(":%d", r.admin), "tls=off")
	r.awaitLog("model loaded", "model=good", "level=INFO", "template=yes")
	r.awaitLog("model loaded", "model=bare", "level=WARN", `template="none (chats are routed by load)"`)
	r.awaitLog("model loaded", "model=broken", "level=WARN", `template="unusable (chats are routed by load)`)
	r.awaitLog("model=asked", "level=INFO", `template="the engine's"`)
	r.awaitReady()
	r.Signal(syscall.SIGTERM)
	r.awaitEnd()
	r.awaitLog("kvepp stops", "level=INFO", "running_requests=0")
	if text := r.log(); strings.Contains(text, "hidden-") {
		t.Errorf("the log has a secret:\n%s", text)
	}
}

// TestChangedSettings: the log line about settings has effective values, each under its own flag.
func TestChangedSettings(t *testing.T) {
	for _, c := range []struct {
		args []string
		env  map[string]string
		want string
	}{
		{nil, nil, ""},
		{[]string{"--grpc-port=9002"}, nil, ""}, // the default
		{[]string{"--metrics-port=9100"}, nil, " metrics-port 9100"},
		{[]string{"--no-router-kv-events"}, nil, " router-kv-events false"},
		{[]string{"--load-aware"}, nil, " router-policy dynamo router-kv-overlap-score-credit 0 " +
			"router-assume-kv-reuse false load-aware true router-kv-events false"},
		{nil, map[string]string{"DYN_ROUTER_TEMPERATURE": "0.5"}, " router-policy dynamo router-temperature 0.5"},
		{[]string{"--nats-server=nats://user:p@ss@b:2"}, nil, " nats-server nats://***@b:2"},
	} {
		var o options
		if err := parseServe(&o, append([]string{"--endpoints=e.yaml"}, c.args...),
			func(name string) string { return c.env[name] }); err != nil {
			t.Errorf("%q: %v", c.args, err)
			continue
		}
		got := ""
		for _, s := range flags.Changed(o.flags) {
			got += fmt.Sprint(" ", s)
		}
		if want := " endpoints e.yaml" + c.want; got != want {
			t.Errorf("%q %v: %q, want %q", c.args, c.env, got, want)
		}
	}
}

// TestSubscriptionIsLate: the log line about a missing connection names a flag of the engine. Without --engine that is
// vLLM's.
func TestSubscriptionIsLate(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints("endpoints:\n- {name: w, address: 127.0.0.1:1, kvEvents: tcp://127.0.0.1:2}\n")
	r.start()
	line := r.awaitLog(
		"kvepp cannot connect to a worker's KV events",
		"level=WARN",
		"worker=w/0",
		"address=tcp://127.0.0.1:2",
		"engine_flag=",
		"enable_kv_cache_events",
	)
	if strings.Contains(line, "dynamo") {
		t.Errorf("the line names a flag of Dynamo: %s", line)
	}
}
