package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// operator runs commands such as kvepp drain against the kvepp of s.
type operator struct {
	t *testing.T
	s *stack.Stack
}

func (o *operator) command(args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	o.t.Cleanup(cancel)
	return exec.CommandContext(
		ctx,
		"../bin/kvepp",
		append(args, "--admin-address", strings.TrimPrefix(o.s.Admin(), "http://"))...)
}

// run runs a command that must succeed, and returns its output.
func (o *operator) run(args ...string) string {
	o.t.Helper()
	out, err := o.command(args...).CombinedOutput()
	o.t.Logf("$ kvepp %s\n%s", strings.Join(args, " "), out)
	if err != nil {
		o.t.Fatalf("kvepp %s: %v", strings.Join(args, " "), err)
	}
	return string(out)
}

// state returns an endpoint's entry at /workers.
type state struct {
	Cordon          *struct{ As string }
	RunningRequests int `json:"running_requests"`
}

func (o *operator) state(name string) (e state) {
	o.t.Helper()
	if err := json.Unmarshal([]byte(get(o.t, o.s.Admin()+"/workers/"+name)), &e); err != nil {
		o.t.Fatal(err)
	}
	return e
}

// get returns the body of a page.
func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v: %s", url, resp.Status, err, body)
	}
	return string(body)
}

// longStream is a response of many tokens that has begun.
type longStream struct {
	engine string
	done   chan string // receives an error of the response; closed when it ends
}

const longTokens = 300 // 6 s

// startStream sends a request with a long response, and returns when the response begins.
func startStream(t *testing.T, s *stack.Stack, prompt string, header http.Header) *longStream {
	t.Helper()
	body := fmt.Sprintf(
		`{"model": %q, "prompt": %q, "max_tokens": %d, "stream": true}`,
		stack.Model,
		prompt,
		longTokens,
	)
	req, err := http.NewRequestWithContext(t.Context(), "POST", s.Envoy.URL+"/v1/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("content-type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	l := &longStream{engine: resp.Header.Get("x-engine"), done: make(chan string, 1)}
	go func() {
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if n := strings.Count(string(text), `"word `); err != nil || n != longTokens ||
			!strings.Contains(string(text), "[DONE]") {
			l.done <- fmt.Sprintf("%d tokens of %d from %s, %v", n, longTokens, l.engine, err)
		}
		close(l.done)
	}()
	return l
}

// TestDrain drains one of three engines under traffic and brings it back. Running responses continue to their end, and
// kvepp drain returns then. Meanwhile no request reaches the engine, not even a retry, and its session moves. At the
// end all engines are cordoned. It is one function, because each step begins where the one before ended.
func TestDrain(t *testing.T) {
	engines := standIns(t, 3, "-token-time=20ms")
	s := start(t, stack.Config{Workers: -1, Engines: engines, Manifest: "stock-engines.yaml",
		KveppFlags: []string{
			"--engine=vllm",
			"--fallback-endpoints=2",
			"--router-session-affinity-ttl-secs=600",
			"--eject=false",
		}})
	nothingLeft(t, s)
	o := &operator{t: t, s: s}
	n := 0
	ask := func(header http.Header) *stack.Response {
		t.Helper()
		n++
		question := fmt.Sprintf("Question %d. %s", n, strings.Repeat("Tell me more about this. ", 20))
		a, err := stack.Chat(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL,
			header,
			[]stack.Message{{Role: "user", Content: question}},
			true,
			nil,
		)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	turn := func() *stack.Response { t.Helper(); return ask(http.Header{"X-Dynamo-Session-Id": {"conversation"}}) }

	target := turn().Header.Get("x-engine")
	at := slices.IndexFunc(engines, func(e *stack.Engine) bool { return e.Name == target })
	if at < 0 {
		t.Fatalf("the session is at %q", target)
	}
	// It takes a quarter of a second to compute: more than the noise in what kvepp learns of the engines' speed.
	known := "The engine knows this prompt. " + strings.Repeat("It is a long one. ", 400)
	streams := []*longStream{startStream(t, s, known, http.Header{"X-Dynamo-Session-Id": {"conversation"}})}
	for i := range 5 {
		streams = append(streams, startStream(t, s, fmt.Sprintf("Story %d. %s", i, strings.Repeat("Go on. ", 40)), nil))
	}
	if streams[0].engine != target {
		t.Fatalf("the session's stream is at %s, the session at %s", streams[0].engine, target)
	}

	drain := o.command("drain", target, "--timeout=90s")
	var stdout, progress bytes.Buffer
	drain.Stdout, drain.Stderr = &stdout, &progress
	if err := drain.Start(); err != nil {
		t.Fatal(err)
	}
	drained := make(chan error, 1)
	go func() { drained <- drain.Wait() }()
	eventually(t, func() error {
		if e := o.state(target); e.Cordon == nil || e.Cordon.As != "draining" {
			return fmt.Errorf("%s is not drained: %+v", target, e)
		}
		return nil
	})
	blocks := get(t, "http://"+engines[at].Address+"/blocks")
	engines[at].Signal(syscall.SIGSTOP) // so that its streams do not end too early
	if a := turn(); a.Header.Get("x-engine") == target || a.Header.Get("x-kvepp-session") != "moved" {
		t.Errorf(
			"the session's next turn: at %s, session %q",
			a.Header.Get("x-engine"),
			a.Header.Get("x-kvepp-session"),
		)
	}
	sick := engines[(at+1)%3]
	if err := sick.Fault(t.Context(), "503"); err != nil { // Envoy retries its requests elsewhere
		t.Fatal(err)
	}
	well := engines[(at+2)%3].Name
	for range 20 {
		if a := ask(nil); a.Status != http.StatusOK || !a.Finished || a.Header.Get("x-engine") != well {
			t.Errorf("%d from %q, want %s: %.100s", a.Status, a.Header.Get("x-engine"), well, a.Body)
		}
	}
	if err := sick.Fault(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	last := ask(http.Header{"X-Request-Id": {"while-drained"}})
	if d, err := s.Decision(t.Context(), "while-drained"); err != nil || !slices.Equal(d.Cordoned, []string{target}) ||
		len(d.Candidates) != 2 {
		t.Errorf("the record of a decision (%v): %+v, answer %+v", err, d, last)
	}
	if m, err := s.Metrics(t.Context()); err != nil || m["kvepp_cordoned_workers"] != 1 ||
		m[`kvepp_worker_cordoned{dp_rank="0",worker="`+target+`"}`] != 1 {
		t.Errorf("%v; the metric has %v cordoned workers", err, m["kvepp_cordoned_workers"])
	}

	select {
	case err := <-drained:
		t.Fatalf("kvepp drain ended while requests run: %v, %s%s", err, &progress, &stdout)
	default:
	}
	if e := o.state(target); e.RunningRequests == 0 {
		t.Error("no request runs on the engine, and its streams have not ended")
	}
	engines[at].Signal(syscall.SIGCONT)
	for i, l := range streams {
		if wrong := <-l.done; wrong != "" {
			t.Errorf("stream %d: %s", i, wrong)
		}
	}
	err := <-drained
	t.Logf("$ kvepp drain %s\n%s%s", target, &progress, &stdout)
	if err != nil || !strings.HasPrefix(stdout.String(), target+": drained after ") ||
		!strings.HasPrefix(progress.String(), target+": draining, ") {
		t.Errorf("kvepp drain: %v, %s%s", err, &progress, &stdout)
	}
	if e := o.state(target); e.RunningRequests != 0 {
		t.Errorf("kvepp drain has ended, and %d requests run", e.RunningRequests)
	}
	if now := get(t, "http://"+engines[at].Address+"/blocks"); now != blocks {
		t.Errorf("the engine got new prompts: it has %s blocks, before %s", now, blocks)
	}

	if out := o.run("workers"); !strings.Contains(out, "draining (operator)") {
		t.Error("kvepp workers does not show it")
	}
	o.run("uncordon", target)
	eventually(t, func() error { // kvepp has connected again, if the engine was stopped for long
		has := metric(t, s, `kvepp_worker_blocks{dp_rank="0",worker="`+target+`"}`)
		if fmt.Sprint(has) != strings.TrimSpace(blocks) {
			return fmt.Errorf("kvepp knows %v of the %s blocks of %s", has, blocks, target)
		}
		return nil
	})
	eventually(t, func() error { // wait for Envoy's own health checks
		a, err := stack.Post(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL+"/v1/completions",
			nil,
			map[string]any{"model": stack.Model, "prompt": known, "max_tokens": 2},
		)
		if err != nil || a.Header.Get("x-engine") != target || a.KveppCached == 0 || a.CachedTokens <= 0 {
			return fmt.Errorf("a prompt that %s has cached (%v): %+v", target, err, a)
		}
		return nil
	})

	for _, e := range engines {
		o.run("cordon", e.Name)
	}
	if a := ask(nil); a.Status != http.StatusServiceUnavailable || !strings.Contains(a.Body, `"code":"cordoned"`) {
		t.Errorf("with all engines cordoned: %d, %s", a.Status, a.Body)
	}
	o.run("uncordon", target)
	if a := ask(nil); a.Status != http.StatusOK || a.Header.Get("x-engine") != target {
		t.Errorf("%d from %s, and only %s is not cordoned", a.Status, a.Header.Get("x-engine"), target)
	}
}
