package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// readmeStarts returns the README's two blocks of commands that end at a request routed by cache: that with stand-ins
// for the engines, and what differs with stock vLLM.
func readmeStarts(t *testing.T) []string {
	t.Helper()
	var standIns, vllm string
	for _, b := range blocksOf(t, "README.md") {
		switch {
		case b.language != "sh":
		case strings.Contains(b.text, "bin/engine "):
			standIns = b.text
		case strings.Contains(b.text, "vllm serve "):
			vllm = b.text
		}
	}
	if standIns == "" || vllm == "" {
		t.Fatal("README.md has no two starts any more")
	}
	return []string{standIns, vllm}
}

// most is the number of commands that a start may take, up to the request that is routed by cache.
const most = 10

// TestReadmeStart runs the README's commands, as a terminal does, to a request that is routed by cache: those with the
// stand-ins, and those with stock vLLM, where `vllm` is the named stand-in for engines on GPUs. Its last command is a
// request, which the README says to send twice.
func TestReadmeStart(t *testing.T) {
	starts := readmeStarts(t)
	standIns, vllm := commandsOf(t, starts[0]), commandsOf(t, starts[1])
	engine := buildEngine(t)

	t.Run("stand-ins", func(t *testing.T) {
		c := openTerminal(t, engine)
		first, second := startOf(c, standIns)
		predicted, err := strconv.Atoi(second["x-kvepp-predicted-cached-tokens"])
		if err != nil || predicted < 1 || predicted < second.cached() {
			t.Errorf("predicted %q cached tokens, the engine had %d",
				second["x-kvepp-predicted-cached-tokens"], second.cached())
		}
		if first["x-engine"] == "" || first["x-engine"] != second["x-engine"] {
			t.Errorf("the first request went to %q, the second to %q", first["x-engine"], second["x-engine"])
		}
	})

	// The reader keeps the other commands, with his model's name in place of "tiny".
	t.Run("stock vLLM", func(t *testing.T) {
		c := openTerminal(t, engine)
		hub := standIn(t, engine, "hub")
		c.hub = "http://" + hub.Address
		at := func(commands []string, begins string) int {
			i := slices.IndexFunc(commands, func(c string) bool { return strings.HasPrefix(c, begins) })
			if i < 0 {
				t.Fatalf("README.md has no command %q any more", begins)
			}
			return i
		}
		commands := []string{standIns[at(standIns, "make build")]}
		check := at(vllm, "bin/kvepp check ")
		commands = append(commands, vllm[:check]...)
		commands = append(commands, standIns[at(standIns, "cat >")])
		commands = append(commands, vllm[check:]...)
		serve := at(standIns, "bin/kvepp serve ")
		for _, command := range standIns[serve+1:] {
			commands = append(commands, strings.ReplaceAll(command, `"tiny"`, `"qwen"`))
		}
		startOf(c, commands)
	})
}

// reply is what curl -i shows of a response: its headers, by name, and its body, by "".
type reply map[string]string

// cached returns the cached tokens that the engine reports; -1 if it reports none.
func (r reply) cached() int {
	m := regexp.MustCompile(`"cached_tokens": ?(\d+)`).FindStringSubmatch(r[""])
	if m == nil {
		return -1
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// request runs a curl -i, which must succeed, and returns its response.
func (c *terminal) request(command string) reply {
	c.t.Helper()
	r, err := parseReply(c.output(command))
	c.must(err)
	return r
}

// parseReply reads what curl -i printed. A status other than 200 is an error.
func parseReply(printed string) (reply, error) {
	head, body, _ := strings.Cut(printed, "\r\n\r\n")
	status, headers, _ := strings.Cut(head, "\r\n")
	if !strings.HasPrefix(status, "HTTP/1.1 200") {
		return nil, fmt.Errorf("not a response with status 200: %s", printed)
	}
	r := reply{"": body}
	for header := range strings.SplitSeq(headers, "\r\n") {
		name, value, _ := strings.Cut(header, ": ")
		r[name] = value
	}
	return r, nil
}

// startOf runs the commands of a start, the last of them twice. The second response must have cached tokens.
func startOf(c *terminal, commands []string) (first, second reply) {
	c.t.Helper()
	if n := len(commands) + 1; n > most {
		c.t.Errorf("%d commands, want at most %d:\n%s", n, most, strings.Join(commands, "\n"))
	}
	c.run(commands[:len(commands)-1])
	request := func() reply { c.t.Helper(); return c.request(commands[len(commands)-1]) }
	first = request()
	if first.cached() >= 100 { // the beginning of the template is cached since kvepp check --probe
		c.t.Errorf("the first request already had %d cached tokens", first.cached())
	}
	// The reader sends the second request by hand. Until then kvepp has applied the events of the first.
	eventually(c.t, func() error {
		metrics, err := stack.ReadMetrics(c.t.Context(), fmt.Sprintf("http://127.0.0.1:%d/metrics", c.port("", "9090")))
		if err != nil {
			return err
		}
		held := 0
		for _, port := range []string{"8001", "8002"} {
			blocks := get(c.t, fmt.Sprintf("http://127.0.0.1:%d/blocks", c.port("", port)))
			n, err := strconv.Atoi(strings.TrimSpace(blocks))
			if err != nil {
				return err
			}
			held += n
		}
		if indexed := int(metrics["kvepp_index_blocks"]); indexed != held {
			return fmt.Errorf("the engines hold %d blocks, the index has %d", held, indexed)
		}
		return nil
	})
	if second = request(); second.cached() < 100 {
		c.t.Errorf("the second request had %d cached tokens:\n%s", second.cached(), second[""])
	}
	return first, second
}

// quickStart returns the block of commands below the title "Quick start" of an engine's page; "" of other pages.
func quickStart(t *testing.T, page string) string {
	t.Helper()
	if !slices.Contains(enginePages, page) {
		return ""
	}
	text, err := os.ReadFile(filepath.Join("..", page))
	if err != nil {
		t.Fatal(err)
	}
	before, _, found := strings.Cut(string(text), "\n## Quick start\n")
	title := 2 + strings.Count(before, "\n")
	for _, b := range blocksOf(t, page) {
		if found && b.line > title && b.language == "sh" {
			return b.text
		}
	}
	t.Fatalf("%s has no quick start any more", page)
	return ""
}

var enginePages = []string{"docs/vllm.md", "docs/sglang.md", "docs/dynamo.md"}

// TestQuickStarts runs the quick start of each engine's page, from the page's own text, to a request that is routed by
// cache. Only what needs a GPU is replaced (testdata/standins).
func TestQuickStarts(t *testing.T) {
	engine := buildEngine(t)
	for _, page := range enginePages {
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			c := openTerminal(t, engine)
			c.hub = "http://" + standIn(t, engine, "hub").Address
			commands := commandsOf(t, quickStart(t, page))
			last := commands[len(commands)-1]
			if !strings.HasPrefix(last, "curl -i ") {
				t.Fatalf("the quick start ends with %s", last)
			}
			c.run(commands[:len(commands)-1])
			first := c.request(last)
			if first["x-kvepp-predicted-cached-tokens"] == "" {
				t.Fatalf("kvepp did not choose: %v", first)
			}
			// The reader sends the second request by hand. Until then kvepp has applied the events of the first.
			eventually(t, func() error {
				again := c.request(last)
				predicted, err := strconv.Atoi(again["x-kvepp-predicted-cached-tokens"])
				if err != nil || predicted < 100 || again.cached() < 100 || predicted < again.cached() {
					return fmt.Errorf("predicted %q, and the engine had %d (%v)",
						again["x-kvepp-predicted-cached-tokens"], again.cached(), err)
				}
				return nil
			})
		})
	}
}
