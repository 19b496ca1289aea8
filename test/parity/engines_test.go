package parity

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

var rewrite = flag.Bool("rewrite", false, "write prompt/testdata's goldens of the engines again")

// rendered is the result of engines.py for a request.
type rendered struct {
	Text  string
	IDs   []kvblock.Token
	Error string
}

// engineProgram is a running engines.py with the code of an engine's version. All tests share it, because its imports
// take seconds. It ends with the tests, at the end of its input.
type engineProgram struct {
	mu    sync.Mutex // of the test that asks
	asker *asker     // nil: it does not run
}

var enginePrograms sync.Map // from Python's path and engine to *engineProgram

// engineResults asks engines.py questions, with the code of an engine's version, and returns a response each.
func engineResults[T any](t *testing.T, engine prompt.Engine, version, folder string, questions []any) []T {
	t.Helper()
	python, sources := oracle(t, engine, version)
	shared, _ := enginePrograms.LoadOrStore(python+" "+string(engine), new(engineProgram))
	p := shared.(*engineProgram)
	p.mu.Lock()
	defer p.mu.Unlock()
	running := p.asker
	if p.asker = nil; running == nil {
		running = newAsker(t, python, "engines.py", string(engine), sources)
	}
	var lines []string
	for _, q := range append([]any{map[string]string{"folder": folder}}, questions...) {
		line, err := json.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(line))
	}
	running.send(lines)
	running.response(t, new(struct{})) // of the folder
	responses := make([]T, len(questions))
	for i := range responses {
		running.response(t, &responses[i])
	}
	if n := running.out.Buffered(); n > 0 {
		t.Fatalf("engines.py has written %d bytes more than it was asked for", n)
	}
	p.asker = running // after a failure another one starts: this one may have unread responses
	return responses
}

// mixed returns n more requests, one in each line: messages of several requests in sequence, with fields of others.
func mixed(t *testing.T, requests []byte, n int) []byte {
	t.Helper()
	type field struct {
		name  string
		value json.RawMessage
	}
	var messages []json.RawMessage
	var fields []field
	for line := range bytes.Lines(requests) {
		var body map[string]json.RawMessage
		if err := json.Unmarshal(line, &body); err != nil {
			t.Fatal(err)
		}
		var own []json.RawMessage
		if err := json.Unmarshal(body["messages"], &own); err != nil {
			t.Fatal(err)
		}
		messages = append(messages, own...)
		for _, name := range slices.Sorted(maps.Keys(body)) {
			if name != "messages" && name != "model" {
				fields = append(fields, field{name, body[name]})
			}
		}
	}
	random := rand.New(rand.NewPCG(4, 2))
	var out bytes.Buffer
	for range n {
		body := map[string]json.RawMessage{"model": json.RawMessage(`"m"`)}
		var chosen []json.RawMessage
		for range 1 + random.IntN(4) {
			chosen = append(chosen, messages[random.IntN(len(messages))])
		}
		for range random.IntN(4) {
			f := fields[random.IntN(len(fields))]
			body[f.name] = f.value
		}
		list, err := json.Marshal(chosen)
		if err != nil {
			t.Fatal(err)
		}
		body["messages"] = list
		line, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(append(line, '\n'))
	}
	return out.Bytes()
}

// TestEngines compares each engine's rules with the engine's own code; those of TensorRT-LLM with engines.py. It
// compares text and ids of every request of prompt/testdata, and of requests mixed from those, with each template.
func TestEngines(t *testing.T) {
	if testing.Short() && !*rewrite {
		t.Log(
			"the goldens that the engines wrote are compared in package tokenizer; the engines themselves in make " +
				"test-long",
		)
		return
	}
	const data = "../../prompt/testdata/"
	requests, err := os.ReadFile(data + "requests.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	templates, err := filepath.Glob(data + "templates/*.jinja")
	if err != nil {
		t.Fatal(err)
	}
	payload := requests
	more := append(slices.Clone(payload), mixed(t, payload, atLeast(700, len(templates)))...)
	for _, c := range []struct {
		engine   prompt.Engine
		folder   string
		defaults string
		efforts  string // also with vLLM's other flag
	}{
		{prompt.VLLM, "tiny-bytelevel", "", ""},
		{prompt.SGLang, "tiny-bytelevel", "", ""},
		{prompt.TRTLLM, "tiny-bytelevel", "", ""},
		{prompt.VLLM, "tiny-sentencepiece",
			`{"enable_thinking":false,"custom":null,"reasoning_effort":"medium","documents":[{"title":"d"}]}`, ""},
		{prompt.VLLM, "tiny-sentencepiece", "", `{"high":"none","low":"auto","none":"some","medium":"high"}`},
		{prompt.SGLang, "tiny-sentencepiece",
			`{"enable_thinking":false,"custom":null,"reasoning_effort":"medium","thinking":1}`, ""},
		{prompt.SGLang, "tiny-sentencepiece", newestOnly, ""},
		{prompt.TRTLLM, "tiny-sentencepiece", "", ""},
	} {
		versions := compared(t, c.engine)
		if c.defaults == newestOnly || c.efforts != "" { // older vLLM has no --reasoning-effort-map
			all := prompt.Versions(c.engine)
			versions = slices.DeleteFunc(versions, func(v string) bool { return v != all[len(all)-1] })
		}
		for _, version := range versions {
			t.Run(string(c.engine)+"/"+version+"/"+c.folder, func(t *testing.T) {
				if !*rewrite { // versions share golden files
					t.Parallel()
				}
				engine, folder := c.engine, filepath.Join("../../test/models", c.folder)
				payload, templates := payload, templates
				if c.folder != "tiny-bytelevel" { // its responses are the golden files
					payload = withVersioned(t, engine, more, requests)
					templates = append(slices.Clip(templates), versionedTemplate(t))
				}
				var questions []any
				var models []*prompt.Model
				for _, path := range templates {
					source, err := os.ReadFile(path)
					if err != nil {
						t.Fatal(err)
					}
					m, err := prompt.Load(
						folder,
						prompt.Options{Engine: engine, Version: version, ChatTemplate: path,
							DefaultChatTemplateKwargs: c.defaults,
							ReasoningEffortMap:        c.efforts, ExcludeToolsWhenToolChoiceNone: c.efforts != ""},
					)
					if err != nil {
						t.Fatal(err)
					}
					for line := range bytes.Lines(payload) {
						question := map[string]any{
							"template": string(source),
							"body":     json.RawMessage(bytes.TrimSpace(line)),
						}
						if c.defaults != "" {
							question["defaults"] = json.RawMessage(c.defaults)
						}
						if c.efforts != "" {
							question["effort_map"], question["exclude_tools"] = json.RawMessage(c.efforts), true
						}
						questions = append(questions, question)
						models = append(models, m)
					}
				}
				responses := engineResults[rendered](t, engine, version, folder, questions)
				var golden bytes.Buffer
				equal, refused, unknown, wrong := 0, 0, 0, 0
				for i, response := range responses {
					line, _ := questions[i].(map[string]any)["body"].(json.RawMessage)
					if response.Error != "" {
						refused++
						golden.WriteString("null\n")
						continue
					}
					text, err := json.Marshal(response.Text)
					if err != nil {
						t.Fatal(err)
					}
					golden.Write(append(text, '\n'))
					request, err := body.ParseRequest("/v1/chat/completions", line)
					if err != nil {
						t.Fatalf("%s: %v", line, err)
					}
					ids, err := models[i].Tokenize(t.Context(), request)
					switch {
					case err != nil && prompt.IsUnknown(err):
						unknown++
					case err != nil || len(ids) != 1 || !slices.Equal(ids[0].IDs, response.IDs):
						wrong++
						t.Errorf(
							"template %d: %s\n got %v, %v\nwant %q",
							i*len(templates)/len(responses),
							line,
							ids,
							err,
							response.Text,
						)
					default:
						equal++
					}
				}
				t.Logf(
					"%d requests: %d equal, %d refused by the engine, %d not known here, %d differ",
					len(responses),
					equal,
					refused,
					unknown,
					wrong,
				)
				count(equal+wrong, 0, wrong)
				path := data + goldenOf(engine, version)
				if c.folder != "tiny-bytelevel" {
					return
				}
				if *rewrite {
					if err := os.WriteFile(path, golden.Bytes(), 0o644); err != nil {
						t.Fatal(err)
					}
				} else if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, golden.Bytes()) {
					t.Errorf("%s differs from the engine's responses (%v): run this test with -rewrite", path, err)
				}
			})
		}
	}
}
