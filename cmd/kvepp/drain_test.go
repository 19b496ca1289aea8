package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kvepp/serve/admin"
	"kvepp/serve/client"
	"kvepp/test/harness/process"
)

// runAdmin runs a command against the running kvepp, and returns what it printed and its exit status.
func (r *running) runAdmin(args ...string) (stdout, stderr string, status int) {
	r.t.Helper()
	var out, errs bytes.Buffer
	status = start(append(args, "--admin-address", strings.TrimPrefix(r.adminURL(), "http://")), nil, &out, &errs, nil)
	return out.String(), errs.String(), status
}

// TestOperatorCommands cordons, drains and uncordons endpoints of a running kvepp, by command and by the endpoints
// file.
func TestOperatorCommands(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	kvepp := reserve(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const both = "endpoints:\n- {name: worker-a, address: 127.0.0.1:1, model: m}\n- {name: worker-b, address: " +
		"127.0.0.1:2, model: m"
	kvepp.writeEndpoints(both + "}\n")
	kvepp.start("--router-kv-events=false", "--eject=false", "--admin-token-file="+token)
	kvepp.awaitReady()
	command := func(status int, want string, args ...string) {
		t.Helper()
		stdout, stderr, got := kvepp.runAdmin(append(args, "--admin-token-file="+token)...)
		if text := stdout + stderr; got != status || !strings.Contains(text, want) {
			t.Errorf("kvepp %s: status %d, %q; want %d, %q", strings.Join(args, " "), got, text, status, want)
		}
	}
	gauge := func(want string) {
		t.Helper()
		if text, err := kvepp.metrics(); err != nil || !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s (%v)", want, err)
		}
	}
	if _, stderr, status := kvepp.runAdmin("drain", "worker-a"); status != 1 ||
		!strings.Contains(stderr, "--admin-token-file") {
		t.Errorf("without the token: status %d, %s", status, stderr)
	}
	command(0, "worker-a  serving  0 ", "workers")
	command(0, "worker-a: cordoned (operator), no request runs", "cordon", "worker-a")
	gauge(`kvepp_cordoned_workers 1`)
	gauge(`kvepp_worker_cordoned{dp_rank="0",worker="worker-a"} 1`)
	gauge(`kvepp_worker_cordoned{dp_rank="0",worker="worker-b"} 0`)
	command(0, `s, no request runs. "kvepp uncordon worker-a" brings it back.`, "drain", "worker-a")
	command(0, "worker-a  draining (operator)", "workers")
	command(1, "did you mean worker-a?", "drain", "wroker-a")
	command(1, `no endpoint is named "zzz"`, "uncordon", "zzz")

	kvepp.writeEndpoints(both + ", cordoned: true}\n")
	kvepp.eventually("b to be cordoned", func() error {
		if stdout, _, _ := kvepp.runAdmin("workers", "--admin-token-file="+token); !strings.Contains(
			stdout,
			"worker-b  cordoned (endpoints file)",
		) {
			return fmt.Errorf("%s", stdout)
		}
		// the gauge follows a moment later
		if text, err := kvepp.metrics(); err != nil || !strings.Contains(text, `kvepp_cordoned_workers 2`) {
			return fmt.Errorf("the metrics do not count two cordoned workers (%v)", err)
		}
		return nil
	})
	gauge(`kvepp_worker_cordoned{dp_rank="0",worker="worker-b"} 1`)
	command(1, "worker-b still gets no new requests: it is cordoned by the endpoints file", "uncordon", "worker-b")
	command(0, "worker-a: serving, no request runs", "uncordon", "worker-a")
	kvepp.writeEndpoints(both + "}\n")
	kvepp.eventually("b to be uncordoned", func() error {
		if text, err := kvepp.metrics(); err != nil || !strings.Contains(text, `kvepp_cordoned_workers 0`) {
			return fmt.Errorf("it is still cordoned (%v)", err)
		}
		return nil
	})
	for _, line := range []string{`msg="endpoint cordoned: it gets no new requests" endpoint=worker-a ` +
		`operator=cordoned pool=none`,
		`msg="endpoint cordoned: it gets no new requests" endpoint=worker-b operator=none pool="endpoints file"`,
		`msg="endpoint uncordoned: it gets requests again" endpoint=worker-a`,
		`msg="endpoint uncordoned: it gets requests again" endpoint=worker-b`} {
		if log := kvepp.Tail(100); strings.Count(log, line) != 1 {
			t.Errorf("the log does not have exactly one line %s:\n%s", line, log)
		}
	}
	if log := kvepp.Tail(100); strings.Contains(log, "worker left") {
		t.Errorf("a worker left:\n%s", log)
	}
}

// TestAdminResponses: the commands recognise responses that do not come from a kvepp.
func TestAdminResponses(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	var status int
	var body string
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}))
	defer other.Close()
	for _, c := range []struct {
		address string
		status  int
		body    string
		want    string
	}{
		{closed.Addr().String(), 0, "", "connection refused); a running kvepp serve listens there if its " +
			"--admin-address says so"},
		{other.Listener.Addr().String(), 404, "404 page not found\n",
			"answers 404 Not Found to POST /workers/a%2Fb/cordon; is it the --admin-address of a kvepp serve of this " +
				"version?"},
		{other.Listener.Addr().String(), 200, "<html>", "does not answer as kvepp serve does"},
		{other.Listener.Addr().String(), 401, "", "wants another token: give --admin-token-file"},
		{other.Listener.Addr().String(), 500, `{"error": "no"}`, "kvepp cordon: no\n"},
	} {
		status, body = c.status, c.body
		var out, errs bytes.Buffer
		if got := start([]string{"cordon", "a/b", "--admin-address", c.address}, nil, &out, &errs, nil); got != 1 ||
			!strings.Contains(errs.String(), c.want) {
			t.Errorf("status %d, %q; want 1, %q", got, errs.String(), c.want)
		}
	}
}

func TestAdminUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
	}{
		{"drain", `name the endpoint: kvepp drain NAME ("kvepp workers" lists the names)`},
		{"drain a b", `unexpected argument "b": one endpoint at a time`},
		{"workers a", `unexpected argument "a": kvepp workers lists all endpoints`},
		{"drain a --timeout=-1s", "--timeout -1s: may not be negative"},
		{"drain a --timeout=soon", `--timeout "soon"`},
		{"cordon a --timeout=1s", "unknown flag --timeout: it is a flag of kvepp"},
		{"drain a --admin-address=kvepp", "--admin-address: "},
		{"drain a --admin-adress=kvepp:1", "did you mean --admin-address?"},
	} {
		var out, errs bytes.Buffer
		if got := start(strings.Fields(c.args), nil, &out, &errs, nil); got != 2 ||
			!strings.Contains(errs.String(), c.want) {
			t.Errorf("kvepp %s: status %d, %q; want 2, %q", c.args, got, errs.String(), c.want)
		}
	}
	o := client.Config{Command: "drain"}
	if err := parseClient(&o, []string{"a"}, func(name string) string {
		return map[string]string{"KVEPP_ADMIN_ADDRESS": ":9400", "KVEPP_ADMIN_TOKEN_FILE": "f"}[name]
	}); err != nil || o.Endpoint != "a" || o.Address != "127.0.0.1:9400" || o.TokenFile != "f" {
		t.Errorf("%+v, %v", o, err)
	}
}

// TestDrainIsInterrupted: the first signal ends the command, which reports the running requests.
func TestDrainIsInterrupted(t *testing.T) {
	d := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(admin.Endpoint{Name: "a", InPool: true, RunningRequests: 3,
			Cordon: &admin.Cordon{As: "draining", By: []string{admin.Operator}}})
	}))
	defer d.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := process.Start(
		t.TempDir(),
		"drain",
		[]string{asProgram + "=1"},
		self,
		"drain",
		"a",
		"--admin-address",
		strings.TrimPrefix(d.URL, "http://"),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	if err := process.Until(t.Context(), func() error {
		if !strings.Contains(p.Tail(10), "3 requests run") {
			return fmt.Errorf("no progress line: %s", p.Tail(10))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGINT)
	if err := process.Until(t.Context(), func() error {
		if !strings.Contains(p.Tail(10), "kvepp drain: interrupted after") {
			return fmt.Errorf("%s", p.Tail(10))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
