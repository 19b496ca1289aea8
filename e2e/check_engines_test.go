package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

const tinyModel = "../test/models/tiny-bytelevel" // relative to this folder

// standIns starts stand-ins for an engine, one for each list of flags.
func standIns(t *testing.T, n int, flags ...string) (engines []*stack.Engine) {
	t.Helper()
	dir := t.TempDir()
	program, err := stack.BuildEngine(t.Context(), "..", dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		engines = append(engines, standIn(t, program, "engine-"+string(rune('a'+i)), flags...))
	}
	return engines
}

func standIn(t *testing.T, program, name string, flags ...string) *stack.Engine {
	t.Helper()
	e, err := stack.StartEngine(t.Context(), program, t.TempDir(), name, tinyModel, flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// write writes a text to a file in a new folder.
func write(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// bareModel returns the test model without a chat template.
func bareModel(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "config.json"} {
		text, err := os.ReadFile(filepath.Join(tinyModel, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// anotherTemplate renders the same messages differently.
const anotherTemplate = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"

func endpointsOf(engines ...*stack.Engine) string {
	text := "endpoints:\n"
	for _, e := range engines {
		text += e.Entry()
	}
	return text
}

// TestCheckStockEngines: `kvepp check` reports no problem with stand-ins for vLLM and SGLang, and reports each mistake
// in kvepp's configuration.
func TestCheckStockEngines(t *testing.T) {
	for _, like := range []string{"vllm", "sglang"} {
		t.Run(like, func(t *testing.T) {
			engines := standIns(t, 2, "-like", like)
			endpoints := endpointsOf(engines...)
			model := "--model=" + stack.Model + "="
			for _, c := range []struct {
				name      string
				endpoints string
				flags     []string
				status    int
				says      []string
			}{
				{"nothing is wrong", endpoints, []string{model + tinyModel}, 0,
					[]string{"ids of a text equal the engine's", "ids of a chat equal the engine's", "announces blocks",
						"the second time, as predicted"}},
				{"wrong template", endpoints,
					[]string{model + tinyModel, "--chat-template=" + write(t, "t.jinja", anotherTemplate)}, 1,
					[]string{"ids of a chat differ from the engine's at token 0",
						"-> give kvepp the engine's template: --chat-template FILE"}},
				{"missing template", endpoints, []string{model + bareModel(t)}, 1,
					[]string{"kvepp has no chat template for tiny, and routes its chats by load",
						"-> give --chat-template FILE"}},
				{"address by name", strings.ReplaceAll(endpoints, "address: 127.0.0.1:", "address: localhost:"),
					[]string{model + tinyModel, "--dns-lookup-family=v4_only"}, 1,
					[]string{"is a host name, which kvepp resolves to 127.0.0.1:",
						"or write the IP address, address: 127.0.0.1:"}},
				{"address by a name that is gone",
					endpoints + "- {name: gone, address: \"no-such-host.invalid:1\"}\n- {name: lost, address: " +
						"\"no-such-host.invalid:2\"}\n", []string{model + tinyModel}, 1,
					[]string{"has no address: kvepp leaves the endpoint out", "-> correct the name"}},
				{"wrong block size", endpoints, []string{model + tinyModel, "--kv-cache-block-size=32"}, 1,
					[]string{"kvepp is configured with 32 tokens, but the events have 16: no block would match",
						"-> set blockSize to 16"}},
				{"conversations", endpoints, []string{model + tinyModel, "--conversations=4"}, 0,
					[]string{"100.0 %  ok     10 of 10 predictions are exact"}},
				{"conversations in approximate mode",
					strings.ReplaceAll(endpoints, "kvEvents:", "blockSize: 16\n  kvEvents:"),
					[]string{model + tinyModel, "--no-router-kv-events", "--conversations=4"}, 0,
					[]string{"100.0 %  ok     10 of 10 predictions are exact"}},
				{"conversations with the wrong template", endpoints,
					[]string{model + tinyModel, "--chat-template=" + write(t, "t.jinja", anotherTemplate),
						"--conversations=4"}, 1,
					[]string{"wrong  for 10 of 10 prompts kvepp and the engine count different numbers of tokens",
						"-> give kvepp the engine's template: --chat-template FILE"}},
				{"conversations with the wrong block size", endpoints,
					[]string{model + tinyModel, "--kv-cache-block-size=32", "--conversations=4"}, 1,
					[]string{"predictions are wrong; request "}},
				{"approximate mode", strings.ReplaceAll(endpoints, "kvEvents:", "blockSize: 16\n  kvEvents:"),
					[]string{model + tinyModel, "--no-router-kv-events"}, 0,
					[]string{"kvepp predicts the worker's cache", "the second time, as predicted"}},
			} {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel() // most of the time it waits for events that do not come
					flags := append(
						[]string{"--endpoints", write(t, "endpoints.yaml", c.endpoints), "--engine=" + like, "--probe"},
						c.flags...)
					status, table := runCheck(t, flags...)
					if status != c.status {
						t.Errorf("status %d, want %d", status, c.status)
					}
					for _, says := range c.says {
						if n := strings.Count(table, says); n < len(engines) {
							t.Errorf("%q occurs for %d of %d workers", says, n, len(engines))
						}
					}
				})
			}
		})
	}
}

// TestCheckCachedBefore: blocks of the chat template's prefix are cached before the check begins, and predicted.
func TestCheckCachedBefore(t *testing.T) {
	template := write(t, "template.jinja", strings.Repeat("Knowledge ends in 2023. ", 20)+anotherTemplate)
	engine := standIns(t, 1, "-chat-template", template)[0]
	a, err := stack.Chat(t.Context(), http.DefaultClient, "http://"+engine.Address, nil, novel(), false, nil)
	if err != nil || a.Status != http.StatusOK {
		t.Fatal(err, a)
	}
	flags := []string{
		"--model=" + stack.Model + "=" + tinyModel,
		"--engine=vllm",
		"--chat-template=" + template,
		"--conversations=1",
	}
	for _, c := range []struct {
		name, endpoints string
		flags           []string
	}{
		{"events are repeated", endpointsOf(engine), nil},
		{"no events", strings.ReplaceAll(endpointsOf(engine), "kvEvents:", "blockSize: 16\n  kvEvents:"),
			[]string{"--no-router-kv-events"}},
	} {
		status, table := runCheck(
			t,
			append(append([]string{"--endpoints", write(t, "endpoints.yaml", c.endpoints)}, flags...), c.flags...)...)
		if status != 0 || !strings.Contains(table, "5 of 5 predictions are exact") {
			t.Errorf("%s: status %d", c.name, status)
		}
	}
}
