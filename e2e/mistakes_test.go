package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"kvepp/test/harness/stack"
)

var rewrite = flag.Bool("rewrite", false, "rewrite docs/mistakes.md from the output that TestMistakes gets")

const mistakesPage = "../docs/mistakes.md"

// mistake is a mistake of an operator: a section of docs/mistakes.md.
type mistake struct {
	group string // heading above it
	name  string // its own heading
	made  string // the mistake, as commands or configuration
	sees  symptom
	fix   string
	// names are parts of the messages: those that name the cause, and those that name the fix.
	names []string
	slow  bool // it takes 10 s or more to be noticed
	make  func(t *testing.T) []quote
}

// quote is a message about a mistake from kvepp, or from Envoy.
type quote struct {
	where string // the source of the message
	text  string // without values that differ from run to run
}

// symptom is what an operator sees first. The page has a table of symptoms.
type symptom string

const (
	notStarted symptom = "kvepp does not start"
	byLoad     symptom = "requests are served, but routed by load: `kvepp_decisions_total` counts another " +
		"`reason` than `kv`"
	wrongCache symptom = "requests are served, but prefix cache hits are missing: predicted or cached " +
		"tokens are too few"
	elsewhere     symptom = "requests are served, but not by the endpoints that kvepp chose"
	unavailable   symptom = "requests are answered 503"
	clientErrors  symptom = "requests are answered 400, 401, 404 or 413"
	notFollowed   symptom = "kvepp ignores an endpoint or a change in the endpoints file"
	lessEndpoints symptom = "an endpoint gets no requests"
	lessCertain   symptom = "requests are correct: the mistake shows in the log, in metrics, or after a restart of " +
		"kvepp"
)

var symptoms = []symptom{
	notStarted,
	unavailable,
	clientErrors,
	elsewhere,
	byLoad,
	wrongCache,
	lessEndpoints,
	notFollowed,
	lessCertain,
}

// TestMistakes makes each mistake of docs/mistakes.md with real programs: kvepp as a process, Envoy, and stand-ins for
// stock engines. The messages must name the cause and the fix, and equal those on the page.
func TestMistakes(t *testing.T) {
	text, err := os.ReadFile(mistakesPage)
	if err != nil && !(*rewrite && errors.Is(err, os.ErrNotExist)) {
		t.Fatal(err)
	}
	page := string(text) + "\n" // as after the other sections
	all := mistakes(t)
	sections := make([]string, len(all))
	order := make([]int, 0, len(all)) // slow ones first
	for _, slow := range []bool{true, false} {
		for i := range all {
			if all[i].slow == slow {
				order = append(order, i)
			}
		}
	}
	var wait sync.WaitGroup
	places := make(chan struct{}, 8) // they mostly wait
	for _, i := range order {
		m := &all[i]
		places <- struct{}{}
		wait.Go(func() {
			defer func() { <-places }()
			t.Run(m.name, func(t *testing.T) {
				quotes := m.make(t)
				section := m.section(quotes)
				t.Log(section)
				for _, name := range m.names {
					if !strings.Contains(section, name) {
						t.Errorf("%q was not reported:\n%s", name, section)
					}
				}
				if !*rewrite && !strings.Contains(page, section) {
					t.Errorf(
						"docs/mistakes.md has another section; go test ./e2e -run TestMistakes -rewrite writes "+
							"the page again. Now:\n%s",
						section,
					)
				}
				if !t.Failed() {
					sections[i] = section
				}
			})
		})
	}
	wait.Wait()
	if slices.Contains(sections, "") { // failed, or not selected
		if *rewrite {
			t.Error("docs/mistakes.md is left as it was: not all mistakes were made")
		}
		return
	}
	whole := "# Mistakes and their messages\n\n" + wrapped(mistakesIntroduction) + "\n\n" + symptomTable(all)
	group := ""
	for i := range all {
		if all[i].group != group {
			group = all[i].group
			whole += "## " + group + "\n\n"
		}
		whole += sections[i]
	}
	switch whole += mistakesEnd; {
	case *rewrite:
		if err := os.WriteFile(mistakesPage, []byte(whole), 0o644); err != nil {
			t.Fatal(err)
		}
	case whole != string(text):
		t.Error(
			"docs/mistakes.md is not what this test would write; go test ./e2e -run TestMistakes -rewrite writes " +
				"it again",
		)
	}
}

const mistakesIntroduction = "Search this page for a message, or begin with the symptom. A test makes each of these " +
	"mistakes with real programs (kvepp, Envoy, and stand-ins for stock vLLMs) and checks that the messages equal " +
	"those on this page: `go test ./e2e -run TestMistakes`; with `-rewrite` it writes this page. Addresses, ports, " +
	"paths and times are replaced: engines are at 10.0.0.1:8000 and 10.0.0.2:8000 (KV events on port 5557, replay on " +
	"5657), kvepp is at 10.0.0.9:9002, Envoy at 10.0.0.10:8080, and `tiny` is the model."

const mistakesEnd = `## Next

If no message fits, run [kvepp check](operations.md#is-everything-set-up). [Failure modes](failure-modes.md) says what
kvepp does when an engine, the network or a cluster fails.
`

// pageColumns is the greatest width of a page's prose; internal/lint checks it.
const pageColumns = 120

// wrapped breaks a paragraph into lines of at most pageColumns. Code spans may be broken at their spaces, as Markdown
// allows.
func wrapped(paragraph string) string {
	var b strings.Builder
	column := 0
	for word := range strings.FieldsSeq(paragraph) {
		switch width := utf8.RuneCountInString(word); {
		case column == 0:
			column = width
		case column+1+width <= pageColumns:
			b.WriteByte(' ')
			column += 1 + width
		default:
			b.WriteByte('\n')
			column = width
		}
		b.WriteString(word)
	}
	return b.String()
}

// section returns the part of the page about m.
func (m *mistake) section(quotes []quote) string {
	var b strings.Builder
	fmt.Fprintf(&b, "### %s\n\n```\n%s\n```\n\n", m.name, m.made)
	for _, q := range quotes {
		fmt.Fprintf(&b, "%s\n\n```\n%s\n```\n\n", q.where, q.text)
	}
	fmt.Fprintf(&b, "%s\n\n", wrapped("**What to do.** "+m.fix))
	return b.String()
}

// symptomTable lists the mistakes by symptom.
func symptomTable(all []mistake) string {
	var b strings.Builder
	b.WriteString("| symptom | mistakes |\n|---|---|\n")
	drop := regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	for _, s := range symptoms {
		var links []string
		for i := range all {
			if m := &all[i]; m.sees == s {
				anchor := strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(m.name), ""), " ", "-")
				links = append(links, fmt.Sprintf("[%s](#%s)", m.name, anchor))
			}
		}
		fmt.Fprintf(&b, "| %s | %s |\n", s, strings.Join(links, "; "))
	}
	return b.String() + "\n"
}

// setup is the programs of one mistake, with the replacements of their addresses and files on the page.
type setup struct {
	*stack.Stack
	t       *testing.T
	engines []*stack.Engine
	names   map[string]string // by host:port
	paths   []string          // pairs: old, new
}

var (
	address = regexp.MustCompile(`(localhost|127\.0\.0\.\d+):\d+`)
	// random matches parts of sentences that differ from run to run: the length of kvepp check's prompts, and the time
	// until Envoy noticed a refused connection.
	random = regexp.MustCompile(`(prompt of |prompt's |reset reason: )(\d+|[a-z][^"]*)`)
	// varying matches values in log lines that differ from run to run.
	varying = regexp.MustCompile(`\b(time|took_seconds|failed_handshakes|request_id)=(?:"[^"]*"|\S+)`)
)

func newSetup(t *testing.T) *setup {
	model, err := filepath.Abs(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	return &setup{t: t, names: map[string]string{}, paths: []string{model, "/models/tiny", tinyModel, "/models/tiny"}}
}

// shown replaces a path on the page by another.
func (s *setup) shown(path, as string) string {
	s.paths = append([]string{path, as}, s.paths...)
	return path
}

// stable replaces values that differ from run to run.
func (s *setup) stable(text string) string {
	text = random.ReplaceAllString(strings.NewReplacer(s.paths...).Replace(text), "$1...")
	return address.ReplaceAllStringFunc(text, func(at string) string {
		if name := s.names[at]; name != "" {
			return name
		}
		return at[:strings.LastIndexByte(at, ':')] + ":PORT"
	})
}

// withEngines starts stand-ins for engines, engine-a and so on, one for each list of flags.
func withEngines(t *testing.T, flags ...[]string) *setup {
	t.Helper()
	s := newSetup(t)
	for i, f := range flags {
		s.add(
			standIn(
				t,
				mistakesEngine(),
				"engine-"+string(rune('a'+i)),
				append([]string{"-token-time", "1ms"}, f...)...),
		)
	}
	return s
}

func (s *setup) add(e *stack.Engine) {
	s.engines = append(s.engines, e)
	n := len(s.engines)
	s.names["localhost:"+portOf(e.Address)], s.names["127.0.0.2:"+portOf(e.Address)] = "localhost:8000",
		"127.0.0.2:8000"
	for port, at := range map[string]string{"8000": e.Address, "5557": strings.TrimPrefix(e.KVEvents, "tcp://"),
		"5657": strings.TrimPrefix(e.KVReplay, "tcp://")} {
		s.names[at] = fmt.Sprintf("10.0.0.%d:%s", n, port)
	}
}

// mistakesEngine is the program of the stand-ins. TestMistakes sets it.
var mistakesEngine func() string

// like returns the flags of n correct engines.
func like(n int) [][]string { return make([][]string, n) }

// entries returns the engines' entries for the endpoints file, with replacements: pairs of old and new.
func (s *setup) entries(changes ...string) string {
	text := endpointsOf(s.engines...)
	for i := 0; i < len(changes); i += 2 {
		if !strings.Contains(text, changes[i]) {
			s.t.Fatalf("no %q in\n%s", changes[i], text)
		}
		text = strings.ReplaceAll(text, changes[i], changes[i+1])
	}
	return text
}

// rightModel returns kvepp's flag for the engines' model.
const rightModel = "--model=" + stack.Model + "=" + tinyModel

// serve starts kvepp for these endpoints, without Envoy.
func (s *setup) serve(endpoints string, flags ...string) *setup {
	s.t.Helper()
	s.start(stack.Config{Endpoints: endpoints, Engines: s.engines, WithoutEnvoy: true, KveppFlags: flags})
	return s
}

// behind starts kvepp for these endpoints, and Envoy.
func (s *setup) behind(endpoints string, flags ...string) *setup {
	s.t.Helper()
	s.start(stack.Config{Endpoints: endpoints, Engines: s.engines, KveppFlags: flags})
	return s
}

func (s *setup) start(cfg stack.Config) {
	s.t.Helper()
	cfg.Workers, cfg.KveppFlags = -1, append([]string{"--engine=vllm"}, cfg.KveppFlags...)
	s.Stack = start(s.t, cfg)
	metrics, err := url.Parse(s.MetricsURL())
	if err != nil {
		s.t.Fatal(err)
	}
	s.names[s.ExtProc()], s.names[metrics.Host], s.names[strings.TrimPrefix(s.Admin(), "http://")] = "10.0.0.9:9002",
		"10.0.0.9:9090", "10.0.0.9:9091"
	s.shown(s.EndpointsFile(), "endpoints.yaml")
	if s.Envoy != nil {
		s.names[strings.TrimPrefix(s.Envoy.URL, "http://")] = "10.0.0.10:8080"
	}
}

// apart starts an Envoy that may not find kvepp, with a changed configuration.
func (s *setup) apart(edit func(config any)) *stack.Envoy {
	s.t.Helper()
	e, err := s.StartEnvoyApart(s.t.Context(), "stock-engines.yaml", edit)
	if err != nil {
		s.t.Fatal(err)
	}
	s.names[strings.TrimPrefix(e.URL, "http://")] = "10.0.0.10:8080"
	return e
}

// logs waits for the first log line of kvepp that has these parts.
func (s *setup) logs(parts ...string) quote {
	s.t.Helper()
	var line string
	eventually(s.t, func() error {
		text, err := s.Log()
		if err != nil {
			return err
		}
		for l := range strings.Lines(text) {
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(l, part) }) &&
				strings.HasSuffix(l, "\n") {
				line = l
				return nil
			}
		}
		return fmt.Errorf("no log line has %q", parts)
	})
	return quote{"`kvepp serve` logs:", s.stableLine(line)}
}

func (s *setup) stableLine(line string) string {
	line = varying.ReplaceAllStringFunc(strings.TrimSpace(line), func(field string) string {
		if strings.HasPrefix(field, "time=") {
			return ""
		}
		name, _, _ := strings.Cut(field, "=")
		return name + "=..."
	})
	return strings.TrimSpace(s.stable(line))
}

// ends runs kvepp serve, which must not start, and returns its output without its log.
func (s *setup) ends(env []string, args ...string) quote {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "../bin/kvepp", append([]string{"serve"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr, cmd.Env = &stderr, append(os.Environ(), env...)
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || ctx.Err() != nil {
		s.t.Fatalf("kvepp serve %s: %v\n%s", strings.Join(args, " "), err, &stderr)
	}
	var printed []string
	for line := range strings.Lines(stderr.String()) {
		if !strings.HasPrefix(line, "time=") {
			printed = append(printed, strings.TrimRight(s.stable(line), "\n"))
		}
	}
	return quote{
		fmt.Sprintf("`kvepp serve` ends with status %d and prints:", cmd.ProcessState.ExitCode()),
		strings.Join(printed, "\n"),
	}
}

// checks runs kvepp check, which must report a problem, and returns the lines about the first worker that has one.
func (s *setup) checks(flags ...string) quote {
	s.t.Helper()
	all := append([]string{"--endpoints", s.EndpointsFile(), "--engine=vllm"}, flags...)
	if !slices.ContainsFunc(flags, func(f string) bool { return strings.HasPrefix(f, "--model=") }) {
		all = append(all, rightModel)
	}
	status, table := runCheck(s.t, all...)
	if status != 1 {
		s.t.Errorf("kvepp check: status %d", status)
	}
	var wrong []string
	seen := map[string]bool{}
	keep := false
	state := regexp.MustCompile(`  (ok|wrong|unknown)  `)
	for line := range strings.Lines(s.stable(table)) {
		line = strings.TrimRight(line, "\n")
		// A line is "WORKER ABOUT STATE TEXT", or "ABOUT ..." under the same worker, or "-> FIX" in one or more lines.
		columns := regexp.MustCompile(` {2,}`).Split(strings.TrimSpace(line), -1)
		if m := state.FindStringSubmatch(line); m != nil {
			about := strings.Join(columns[max(0, len(columns)-3):], "  ")
			keep = m[1] == "wrong" && !seen[about]
			seen[about] = true
			if keep {
				wrong = append(wrong, about)
			}
		} else if keep && strings.HasPrefix(strings.TrimSpace(line), "-> ") {
			wrong = append(wrong, "    "+strings.TrimSpace(line))
		}
	}
	command := "kvepp check"
	for _, f := range flags {
		if name, _, _ := strings.Cut(f, "="); slices.Contains(
			[]string{"--probe", "--gateway", "--conversations"},
			name,
		) {
			command += " " + name
		}
	}
	return quote{"`" + command + "` prints:", strings.Join(wrong, "\n")}
}

// checksGateway is checks through an Envoy.
func (s *setup) checksGateway(e *stack.Envoy, flags ...string) quote {
	s.t.Helper()
	metrics, err := url.Parse(s.MetricsURL())
	if err != nil {
		s.t.Fatal(err)
	}
	return s.checks(
		append(
			[]string{
				"--gateway=" + e.URL,
				"--ext-proc-address=" + s.ExtProc(),
				"--metrics-address=" + metrics.Host,
				adminFlag(s.Stack),
			},
			flags...)...)
}

// responds returns the response that a client gets from an Envoy for a POST of this body.
func (s *setup) responds(e *stack.Envoy, path, body string) quote {
	s.t.Helper()
	return s.respondsAs(e, path, body, "A client gets:", func(int) bool { return true })
}

// unavailable returns the response that a client gets from an Envoy that does not reach kvepp.
func (s *setup) unavailable(e *stack.Envoy) quote {
	s.t.Helper()
	return s.respondsAs(
		e,
		chatsPath,
		chatBody(stack.Model, "x"),
		"A client gets:",
		func(status int) bool { return status == http.StatusServiceUnavailable },
	)
}

// respondsAs posts until the response's status is as wanted.
func (s *setup) respondsAs(e *stack.Envoy, path, body, where string, wanted func(status int) bool) quote {
	s.t.Helper()
	var text string
	eventually(s.t, func() error {
		resp, err := http.Post(e.URL+path, "application/json", strings.NewReader(body))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if !wanted(resp.StatusCode) {
			return fmt.Errorf("status %s: %s", resp.Status, all)
		}
		text = "HTTP " + resp.Status + "\n" + strings.TrimSpace(string(all))
		return nil
	})
	return quote{where, s.stable(text)}
}

// counts waits until a counter of kvepp's is above 0.
func (s *setup) counts(name string) quote {
	s.t.Helper()
	eventually(s.t, func() error {
		m, err := s.Metrics(s.t.Context())
		if err != nil {
			return err
		}
		if m[name] < 1 {
			return fmt.Errorf("%s is %v", name, m[name])
		}
		return nil
	})
	return quote{"kvepp's metrics count it:", name}
}

// ejected waits until kvepp has logged that it ejected an endpoint. With send it sends chats meanwhile.
func (s *setup) ejected(requests bool) quote {
	s.t.Helper()
	eventually(s.t, func() error {
		if requests {
			// An engine that fails breaks off the response.
			stack.Chat(s.t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), true, nil)
		}
		text, err := s.Log()
		if err == nil && !strings.Contains(text, ejectedLine) {
			err = errors.New("no endpoint is ejected")
		}
		return err
	})
	return s.logs(ejectedLine, "endpoint=engine-a ")
}

const ejectedLine = "endpoint ejected"

// cannotCheck runs kvepp check, which must find no endpoint to check.
func (s *setup) cannotCheck() quote {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "../bin/kvepp", "check", "--wait=1s", "--endpoints", s.EndpointsFile(), rightModel)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Run()
	if status := cmd.ProcessState.ExitCode(); status != 2 {
		s.t.Errorf("kvepp check: status %d", status)
	}
	return quote{"`kvepp check` ends with status 2 and prints:", s.stable(strings.TrimSpace(stderr.String()))}
}

const chatsPath = "/v1/chat/completions"

// chatBody returns a chat with a word that makes it unique.
func chatBody(model, word string) string {
	return fmt.Sprintf(
		`{"model": %q, "max_tokens": 4, "messages": [{"role": "user", "content": "%s %s"}]}`,
		model,
		word,
		strings.Repeat("How was the weather? ", 20),
	)
}

// sendCached sends chats whose beginning one engine has cached through an Envoy, so that kvepp chooses that engine,
// until a line of kvepp's log contains a text.
func (s *setup) sendCached(e *stack.Envoy, engine *stack.Engine, text string) {
	s.t.Helper()
	post := func(url, word string) {
		resp, err := http.Post(url+chatsPath, "application/json", strings.NewReader(chatBody(stack.Model, word)))
		if err != nil {
			s.t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	attempt := 0
	eventually(s.t, func() error {
		post("http://"+engine.Address, fmt.Sprint("attempt ", attempt+1)) // its events have time until the next attempt
		post(e.URL, fmt.Sprint("attempt ", attempt))
		attempt++
		log, err := s.Log()
		if err == nil && !strings.Contains(log, text) {
			err = fmt.Errorf("no log line has %q", text)
		}
		return err
	})
}

// send sends chats through an Envoy and reads the responses of any status.
func (s *setup) send(e *stack.Envoy, model string, n int) {
	s.t.Helper()
	for i := range n {
		resp, err := http.Post(
			e.URL+chatsPath,
			"application/json",
			strings.NewReader(chatBody(model, fmt.Sprint("number ", i))),
		)
		if err != nil {
			s.t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}
