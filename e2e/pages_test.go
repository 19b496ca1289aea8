package e2e

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// terminal runs the commands of a page with bash, from a folder that looks like the root of the tree. It changes only
// what a test on a shared machine must change:
//
//   - A port P of the page becomes a free port: in HOST:P, "port P", "port=P" and "port_value: P", in commands, in
//     files of the page and in manifests/envoy. The addresses 10.0.0.x are on loopback, each with ports of its own.
//     kvepp gets its default ports by KVEPP_*.
//   - vllm, and python3 with the modules of engines, are the stand-ins of testdata/standins.
//   - make and go run in the tree itself, so that Go's build cache serves. curl fails if the response is an error.
//   - /models and /run are in the folder, and https://HUB is a stand-in's hub.
type terminal struct {
	t     *testing.T
	dir   string
	env   []string
	hub   string // URL
	ports map[string]int
}

// buildEngine builds the stand-in engine for the terminals of a test.
func buildEngine(t *testing.T) (engine string) {
	t.Helper()
	engine, err := stack.BuildEngine(t.Context(), "..", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return engine
}

// openTerminal returns a terminal. engine is the program of the stand-in engine.
func openTerminal(t *testing.T, engine string) *terminal {
	t.Helper()
	c := &terminal{t: t, dir: t.TempDir(), ports: map[string]int{}}
	root, err := filepath.Abs("..")
	c.must(err)
	entries, err := os.ReadDir(root)
	c.must(err)
	for _, e := range entries {
		if name := e.Name(); name != "manifests" && !strings.HasPrefix(name, ".") {
			c.must(os.Symlink(filepath.Join(root, name), filepath.Join(c.dir, name)))
		}
	}
	configurations, err := filepath.Glob("../manifests/envoy/*.yaml")
	c.must(err)
	for _, f := range configurations {
		text, err := os.ReadFile(f)
		c.must(err)
		c.write(filepath.Join("manifests/envoy", filepath.Base(f)), c.mapped(string(text)))
	}
	for tool, script := range map[string]string{
		"make":  "cd '" + root + "' && exec '%s' \"$@\"",
		"go":    "cd '" + root + "' && exec '%s' \"$@\"",
		"curl":  "exec '%s' -sS --fail-with-body \"$@\"",
		"envoy": "exec '%s' \"$@\"",
	} {
		program, err := exec.LookPath(tool)
		if tool == "envoy" {
			program, err = filepath.Abs(filepath.Join(os.Getenv("KVEPP_TOOLS"), "bin/envoy"))
		}
		c.must(err)
		c.write("standins/"+tool, "#!/bin/sh\n"+fmt.Sprintf(script, program)+"\n")
	}
	model := filepath.Join(root, "test/models/tiny-bytelevel")
	c.must(os.MkdirAll(filepath.Join(c.dir, "page/models"), 0o755))
	c.must(os.MkdirAll(filepath.Join(c.dir, "page/run/dynamo"), 0o755))
	c.must(os.Symlink(model, filepath.Join(c.dir, "page/models/qwen")))
	python, err := exec.LookPath("python3")
	c.must(err)
	c.env = []string{
		fmt.Sprintf("PATH=%s:%s:%s:%s", filepath.Join(c.dir, "standins"), filepath.Join(root, "e2e/testdata/standins"),
			filepath.Join(root, "bin"), os.Getenv("PATH")),
		"STANDIN_ENGINE=" + engine, "STANDIN_MODEL=" + model, "STANDIN_PYTHON=" + python,
		"STANDIN_DYNAMO=" + filepath.Join(os.Getenv("KVEPP_TOOLS"), "bin/python"),
		fmt.Sprintf("KVEPP_LISTEN_PORT=%d", c.port("", "10080")), // these three: of kvepp envoy
		fmt.Sprintf("KVEPP_ENVOY_ADMIN_PORT=%d", c.port("", "19900")),
		fmt.Sprintf("KVEPP_KVEPP_ADDRESS=127.0.0.1:%d", c.port("", "9002")),
		fmt.Sprintf("KVEPP_GRPC_PORT=%d", c.port("", "9002")),
		fmt.Sprintf("KVEPP_GRPC_HEALTH_PORT=%d", c.port("", "9003")),
		fmt.Sprintf("KVEPP_METRICS_PORT=%d", c.port("", "9090")),
	}
	return c
}

func (c *terminal) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// write writes a file, executable, to the folder.
func (c *terminal) write(name, text string) {
	c.t.Helper()
	file := filepath.Join(c.dir, name)
	c.must(os.MkdirAll(filepath.Dir(file), 0o755))
	c.must(os.WriteFile(file, []byte(text), 0o755))
}

// port returns the free port that stands for a host's port; the hosts other than 10.0.0.x are "".
func (c *terminal) port(host, port string) int {
	c.t.Helper()
	if !strings.HasPrefix(host, "10.") {
		host = ""
	}
	key := host + ":" + port
	if c.ports[key] == 0 {
		free, err := process.Ports(1)
		c.must(err)
		c.ports[key] = free
	}
	return c.ports[key]
}

var (
	addresses  = regexp.MustCompile(`([\d.]*|\*|localhost):(\d{4,5})\b`)
	namedPorts = regexp.MustCompile(`(port[ =]|port_value: )(\d{4,5})\b`)
)

// mapped returns a text of the page with this machine's ports, paths and hub.
func (c *terminal) mapped(text string) string {
	text = addresses.ReplaceAllStringFunc(text, func(address string) string {
		m := addresses.FindStringSubmatch(address)
		host := m[1]
		if strings.HasPrefix(host, "10.") {
			host = "127.0.0.1"
		}
		return fmt.Sprintf("%s:%d", host, c.port(m[1], m[2]))
	})
	text = namedPorts.ReplaceAllStringFunc(text, func(named string) string {
		m := namedPorts.FindStringSubmatch(named)
		return fmt.Sprintf("%s%d", m[1], c.port("", m[2]))
	})
	return strings.NewReplacer(
		"=/models", "="+c.dir+"/page/models",
		" /models", " "+c.dir+"/page/models",
		"file:/run", "file:"+c.dir+"/page/run",
		"https://HUB", c.hub,
	).Replace(text)
}

// serving returns the ports at which a command of a page listens until it is killed; none if the command ends.
func (c *terminal) serving(command string) (ports []int) {
	c.t.Helper()
	command = strings.ReplaceAll(command, "\\\n", " ")
	port := func() int {
		m := regexp.MustCompile(`[ -]port (\d+)\b`).FindStringSubmatch(command)
		if m == nil {
			c.t.Fatalf("no port in %s", command)
		}
		return c.port("", m[1])
	}
	switch {
	case strings.HasPrefix(command, "cat >"), strings.Contains(command, "--print-config"):
		return nil
	case strings.Contains(command, "kvepp serve "):
		return []int{c.port("", "9002"), c.port("", "9090")}
	case strings.Contains(command, "/bin/envoy\" "), strings.HasPrefix(command, "envoy "):
		return []int{c.port("", "10080")}
	case regexp.MustCompile(`(^| )(vllm serve|bin/engine|bin/kvepp (indexer|select)|` +
		`python3 -m (sglang\.launch_server|dynamo\.frontend)) `).MatchString(command):
		return []int{port()}
	case strings.Contains(command, " dynamo.vllm "): // the page waits for it
		return nil
	case strings.HasSuffix(command, "&"):
		c.t.Fatalf("it is not known when this command is ready: %s", command)
	}
	return nil
}

// run runs the commands one after the other. Each must succeed; the next begins when those that serve listen.
func (c *terminal) run(commands []string, env ...string) {
	c.t.Helper()
	var script strings.Builder
	script.WriteString(`trap 'kill 0' EXIT
listens() {
	until (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do
		kill -0 $!
		read -rt 0.05 <>pause || true
	done
}
`)
	for i, command := range commands {
		ports := c.serving(command)
		text := c.mapped(command)
		if len(ports) > 0 && !strings.HasSuffix(text, "&") {
			text += " &"
		}
		fmt.Fprintf(&script, "{\n%s\n} >output.%d 2>&1\n", text, i)
		for _, port := range ports {
			fmt.Fprintf(&script, "listens %d\n", port)
		}
		fmt.Fprintf(&script, "echo %d >progress\n", i+1)
	}
	script.WriteString("wait\nread <>pause\n")
	c.write("script", script.String())
	pause := filepath.Join(c.dir, "pause")
	if _, err := os.Stat(pause); err != nil {
		c.must(exec.CommandContext(c.t.Context(), "mkfifo", pause).Run())
	}
	p, err := process.Start(c.dir, "bash", append(env, c.env...),
		"bash", "-c", `cd "$0" && exec bash -eu script`, c.dir)
	c.must(err)
	c.t.Cleanup(p.Stop)
	progress := func() (n int) {
		text, err := os.ReadFile(filepath.Join(c.dir, "progress"))
		if err == nil {
			fmt.Sscan(string(text), &n)
		}
		return n
	}
	err = process.Up(c.t.Context(), "the page's commands", func() error {
		if n := progress(); n < len(commands) {
			return fmt.Errorf("command %d of %d runs", n+1, len(commands))
		}
		return nil
	}, p)
	if err != nil {
		n := min(progress(), len(commands)-1)
		output, _ := os.ReadFile(filepath.Join(c.dir, fmt.Sprintf("output.%d", n)))
		c.t.Fatalf("a command of the page failed:\n%s\n%s\n%v", commands[n], output, err)
	}
}

// output runs a command that ends, and returns what it wrote.
func (c *terminal) output(command string) string {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), "bash", "-euc", c.mapped(command))
	cmd.Dir, cmd.Env = c.dir, append(os.Environ(), c.env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s\n%s%v", command, out, err)
	}
	return string(out)
}

// block is a fenced block of a page.
type block struct {
	line           int
	language, text string
}

// blocksOf returns the fenced blocks of a page.
func blocksOf(t *testing.T, page string) (blocks []block) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", page))
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$").FindAllSubmatchIndex(text, -1) {
		blocks = append(blocks, block{
			line:     1 + bytes.Count(text[:at[0]], []byte("\n")),
			language: string(text[at[2]:at[3]]), text: string(text[at[4]:at[5]]),
		})
	}
	return blocks
}

// commandsOf splits a block of commands. Lines belong together as bash says: quotes, here-documents, a backslash.
func commandsOf(t *testing.T, text string) (commands []string) {
	t.Helper()
	command := ""
	for line := range strings.Lines(text) {
		command += line
		if strings.HasSuffix(line, "\\\n") {
			continue
		}
		said, err := exec.CommandContext(t.Context(), "bash", "-nc", command).CombinedOutput()
		if err == nil && len(said) == 0 {
			commands = append(commands, strings.TrimSpace(command))
			command = ""
		}
	}
	if command != "" {
		t.Fatalf("no whole command: %s", command)
	}
	return commands
}

// notRun are the commands of pages that TestPageCommands does not run, by page (* stands for all) and beginning.
var notRun = []struct{ page, begins, because string }{
	{"*", "helm ", "needs a cluster; TestPagesInstall renders each, and make e2e-kind installs the chart"},
	{"*", "kubectl ", "needs a cluster; make e2e-kind"},
	{"*", "make ", "is a target of its own"},
	{"docs/kubernetes.md", "", "needs a cluster; make e2e-kind"},
	{"examples/compose/README.md", "", "needs Docker; TestCompose runs its services as processes"},
	{"docs/security.md", "docker ", "needs Docker and a registry"},
	{"docs/dynamo.md", "python3 -m dynamo.", "needs a GPU; the tests of this package start Dynamo's mocker"},
	{"docs/dynamo.md", "export DYN_", "belongs to Dynamo's commands"},
	{"docs/dynamo.md", "bin/kvepp check ", "needs Dynamo; TestCheck runs it"},
	{"docs/sglang.md", "python3 -m sglang.", "needs a GPU"},
	{"docs/trtllm.md", "bin/kvepp check ", "needs a GPU: there is no stand-in for TensorRT-LLM"},
	{"docs/operations.md", "bin/kvepp check --endpoints endpoints.yaml --model qwen=/models/qwen --engine dynamo",
		"needs Dynamo; TestCheck runs it"},
	{"docs/operations.md", "bin/kvepp check --endpoints endpoints.yaml --model qwen=/models/qwen --gateway",
		"needs Envoy; TestCheckGateway runs it"},
	{"docs/tracing.md", "kvepp decisions --worker worker-0 --slow 2s --follow",
		"has no end; TestDecisionsCommand runs it"},
	{"docs/replicas.md", "openssl ", "writes a token for the next command"},
	{"docs/replicas.md", "kvepp serve ", "needs three machines; TestReplicas starts several processes"},
	{"docs/envoy.md", "envoy -c ", "TestManifestsAreValid has Envoy read what kvepp envoy prints"},
	{"docs/tracing.md", "OTEL_EXPORTER_OTLP_ENDPOINT=", "has an ellipsis; TestTraces runs it"},
	{"docs/disaggregation.md", "python -m dynamo.frontend", "TestBypassThroughFrontends runs it with its own ports"},
	{"docs/gateways.md", "kvepp check --gateway", "TestProtocol and make e2e-aigw run it with their own ports"},
	{"docs/replay.md", "kvepp serve --record", "has an ellipsis; TestRecordAndReplay runs it"},
	{"docs/replay.md", "kvepp replay /var/lib/kvepp", "reads what that one wrote; TestRecordAndReplay runs it"},
}

// pageState is what a page tells its readers to have before its commands, beside two engines at 10.0.0.7 and 10.0.0.8.
type pageState struct {
	like     string   // the engines; default: vllm
	env      []string // kvepp's
	commands []string
}

var statesBefore = map[string]pageState{
	"docs/sglang.md":             {like: "sglang"},
	"docs/overload-and-queue.md": adminState,
	"docs/operations.md":         adminState,
	"docs/hit-rate.md":           adminState,
	"docs/tracing.md":            adminState,
	"docs/tokenizers.md": {commands: []string{
		`echo '{"model": "qwen", "messages": [{"role": "user", "content": "hello"}]}' >body.json`}},
}

// adminState has a kvepp with an admin address.
var adminState = pageState{env: []string{"KVEPP_ADMIN_ADDRESS=127.0.0.1:9091"},
	commands: []string{"bin/kvepp serve --endpoints endpoints.yaml --model qwen=/models/qwen &"}}

// engineHosts are the endpoints of pages that have no endpoints file of their own.
const engineHosts = `endpoints:
- {name: engine-a, address: 10.0.0.7:8000, kvEvents: tcp://10.0.0.7:5557, kvReplay: tcp://10.0.0.7:5657}
- {name: engine-b, address: 10.0.0.8:8000, kvEvents: tcp://10.0.0.8:5557, kvReplay: tcp://10.0.0.8:5657}
`

// program matches a line that begins with a program, in a block of any language.
var program = regexp.MustCompile(`(?m)^(\$ )?([A-Z_]+=\S+ )*(bin/\w+|kvepp|curl|vllm|python3|kubectl|helm|make|go|` +
	`docker|kind|git|cargo|cat|echo|export|npm|envoy|istioctl)( |$)`)

// harmless matches the commands that the test may run: those of programs that change nothing outside of the folder.
var harmless = regexp.MustCompile(`^([A-Z_]+=\S+ )*(bin/kvepp|kvepp|curl|vllm|cat|echo) `)

// TestPageCommands runs the commands of the pages, from their own text, or finds them in notRun. Blocks of commands are
// marked sh, or console if they show output too. TestReadmeStart runs those of the README, and TestMistakes those of
// docs/mistakes.md.
func TestPageCommands(t *testing.T) {
	pages := []string{"README.md", "CONTRIBUTING.md", "SECURITY.md", "manifests/README.md", "test/bench/README.md",
		"examples/compose/README.md"}
	for _, pattern := range []string{"../docs/*.md", "../docs/*/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			pages = append(pages, strings.TrimPrefix(f, "../"))
		}
	}
	engine, used, ran := buildEngine(t), map[int]bool{}, 0
	for _, page := range pages {
		if _, err := os.Stat("../" + page); err != nil || page == "docs/mistakes.md" {
			continue
		}
		var commands []string
		for _, b := range blocksOf(t, page) {
			switch b.language {
			case "sh":
				if page == "README.md" && slices.Contains(readmeStarts(t), b.text) || b.text == quickStart(t, page) {
					continue
				}
				commands = append(commands, commandsOf(t, b.text)...)
			case "console":
				for _, m := range regexp.MustCompile(`(?m)^\$ (.*)$`).FindAllStringSubmatch(b.text, -1) {
					commands = append(commands, m[1])
				}
			case "yaml":
				if m := regexp.MustCompile(`^# (\w+\.yaml)\b`).FindStringSubmatch(b.text); m != nil {
					commands = append(commands, fmt.Sprintf("cat >%s <<'END'\n%sEND", m[1], b.text))
				}
			default:
				if line := program.FindString(b.text); line != "" {
					t.Errorf("%s, line %d: %q looks like a command; mark the block sh or console", page, b.line, line)
				}
			}
		}
		commands = slices.DeleteFunc(commands, func(command string) bool {
			i := slices.IndexFunc(notRun, func(n struct{ page, begins, because string }) bool {
				return (n.page == "*" || n.page == page) && strings.HasPrefix(command, n.begins)
			})
			used[i] = true
			if i < 0 && !harmless.MatchString(command) {
				t.Errorf("%s: list this command in notRun, or allow its program: %s", page, command)
			}
			return i >= 0 || !harmless.MatchString(command)
		})
		if !slices.ContainsFunc(commands, func(c string) bool { return !strings.HasPrefix(c, "cat >") }) {
			continue
		}
		ran++
		t.Run(page, func(t *testing.T) { runPage(t, engine, statesBefore[page], commands) })
	}
	for i, n := range notRun {
		if !used[i] {
			t.Errorf("%s has no command %q any more: take it off the list", n.page, n.begins)
		}
	}
	if ran < 8 {
		t.Errorf("commands of %d pages were run", ran)
	}
}

// runPage runs the commands of a page in its state.
func runPage(t *testing.T, engine string, before pageState, commands []string) {
	c := openTerminal(t, engine)
	c.write("endpoints.yaml", c.mapped(engineHosts))
	for i, host := range []string{"10.0.0.7", "10.0.0.8"} {
		p, err := process.Start(c.dir, host, nil, engine, "-name", host,
			"-like", cmp.Or(before.like, "vllm"), "-served-model-name", "qwen", "-model", tinyModel,
			"-port", fmt.Sprint(c.port(host, "8000")), "-kv-events-port", fmt.Sprint(c.port(host, "5557")),
			"-kv-replay-port", fmt.Sprint(c.port(host, "5657")))
		c.must(err)
		t.Cleanup(p.Kill)
		url := fmt.Sprintf("http://127.0.0.1:%d", c.port(host, "8000"))
		c.must(process.Up(context.Background(), host, process.Healthy(url), p))
		if i == 0 {
			c.hub = url
		}
	}
	var env []string
	for _, variable := range before.env {
		env = append(env, c.mapped(variable))
	}
	c.run(append(slices.Clone(before.commands), commands...), env...)
}
