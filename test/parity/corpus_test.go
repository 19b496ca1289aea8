package parity

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// corpusFolder is the tokenizer that the templates of the corpus are rendered with. It is byte-level, so that different
// texts have different ids.
const corpusFolder = "../../test/models/tiny-bytelevel"

// onlyTemplates limits TestCorpus, for someone who works on one construct.
var onlyTemplates = flag.String("templates", "", "TestCorpus renders only the templates whose hash and name contain a "+
	"match of this `pattern`, such as Qwen3 or ^constructs")

// corpusTemplate is a template of the packages from which test/tools/install.sh templates collects it.
type corpusTemplate struct {
	path string
	name string // its hash and the name of one of its files
}

// corpus returns the templates of KVEPP_TEMPLATES, of every nth hash only, and the lines of testdata/constructs.txt,
// which hold what few or none of the others have.
func corpus(t *testing.T, nth int) []corpusTemplate {
	t.Helper()
	folder := environment(t, "KVEPP_TEMPLATES")
	raw, err := os.ReadFile(filepath.Join(folder, "names.json"))
	if err != nil {
		t.Fatal(err)
	}
	var names map[string][]string
	if err := json.Unmarshal(raw, &names); err != nil {
		t.Fatal(err)
	}
	if len(names) < 900 {
		t.Fatalf("only %d templates", len(names))
	}
	var all []corpusTemplate
	for i, hash := range slices.Sorted(maps.Keys(names)) {
		if i%nth == 0 {
			all = append(all, corpusTemplate{filepath.Join(folder, hash+".jinja"), hash + " " + names[hash][0]})
		}
	}
	own, err := os.ReadFile("testdata/constructs.txt")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for i, line := range strings.Split(strings.TrimSpace(string(own)), "\n") {
		name := fmt.Sprintf("constructs.txt:%d", i+1)
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		all = append(all, corpusTemplate{path, name})
	}
	only := regexp.MustCompile(*onlyTemplates)
	return slices.DeleteFunc(all, func(c corpusTemplate) bool { return !only.MatchString(c.name) })
}

// asker is a running Python program that answers each line with a line of JSON.
type asker struct {
	cmd        *exec.Cmd
	in         io.WriteCloser
	out        *bufio.Reader
	complaints tail       // Dynamo's frontend logs each request
	asking     sync.Mutex // held from a question of ask to its response
}

// startAsker starts a program that ends with the test.
func startAsker(t *testing.T, python string, args ...string) *asker {
	t.Helper()
	a := newAsker(t, python, args...)
	t.Cleanup(func() {
		a.in.Close()
		if err := a.cmd.Wait(); err != nil {
			t.Errorf("%v: %v\n%s", a.cmd.Args, err, a.complaints)
		}
	})
	return a
}

// newAsker starts a program that ends with all tests.
func newAsker(t *testing.T, python string, args ...string) *asker {
	t.Helper()
	a := &asker{cmd: exec.Command(python, args...)}
	a.cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "TRANSFORMERS_VERBOSITY=error")
	a.cmd.Stderr = &a.complaints
	var err error
	if a.in, err = a.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := a.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.out = bufio.NewReaderSize(out, 1<<20)
	if err := a.cmd.Start(); err != nil {
		t.Fatalf("%v: %v", a.cmd.Args, err)
	}
	return a
}

// tail keeps the end of what is written to it.
type tail []byte

func (w *tail) Write(p []byte) (int, error) {
	*w = append(*w, p...)
	*w = (*w)[max(0, len(*w)-8192):]
	return len(p), nil
}

// send writes lines while the caller reads their responses.
func (a *asker) send(lines []string) {
	go func() {
		for _, line := range lines {
			if _, err := io.WriteString(a.in, line+"\n"); err != nil {
				return // the program's end is reported where its response is missing
			}
		}
	}()
}

// ask sends one question and returns the response, a line without its newline. It is safe for concurrent use.
func (a *asker) ask(question any) ([]byte, error) {
	line, err := json.Marshal(question)
	if err != nil {
		return nil, err
	}
	a.asking.Lock()
	defer a.asking.Unlock()
	a.send([]string{string(line)})
	return a.line()
}

func (a *asker) line() ([]byte, error) {
	line, err := a.out.ReadBytes('\n')
	return bytes.TrimSpace(line), err
}

func (a *asker) response(t *testing.T, into any) {
	t.Helper()
	line, err := a.line()
	if err == nil {
		err = json.Unmarshal(line, into)
	}
	if err != nil {
		t.Fatalf("%v: %v\n%s", a.cmd.Args, err, a.complaints)
	}
}

// hashOf is the function of that name of corpus.py.
func hashOf(ids []kvblock.Token) string {
	raw := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:8])
}

// corpusResult is kvepp's prompt of a chat: the hash of its ids, or why there are none.
type corpusResult struct {
	hash string
	err  error
}

func corpusResults(ctx context.Context, m *prompt.Model, bodies [][]byte) []corpusResult {
	responses := make([]corpusResult, len(bodies))
	for i, payload := range bodies {
		request, err := body.ParseRequest("/v1/chat/completions", payload)
		var prompts []prompt.Prompt
		if err == nil {
			prompts, err = m.Tokenize(ctx, request)
		}
		if responses[i].err = err; err == nil {
			responses[i].hash = hashOf(prompts[0].IDs)
		}
	}
	return responses
}

// corpusChats returns the bodies of the chats that each template renders.
func corpusChats(t *testing.T) [][]byte {
	t.Helper()
	raw, err := os.ReadFile("testdata/chats.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Split(bytes.TrimSpace(raw), []byte("\n"))
}

// TestCorpus renders the same chats with every template of the corpus, and compares the ids with those of each engine's
// own code and of Dynamo's frontend; with older versions for a sixth of the templates. testdata/corpus.txt lists
// what kvepp refuses.
func TestCorpus(t *testing.T) {
	if testing.Short() {
		t.Log("make parity compares the templates of packages")
		return
	}
	var listed *refusals
	if *onlyTemplates == "" {
		listed = listRefusals(t, "testdata/corpus.txt")
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang, prompt.Dynamo} {
		all := prompt.Versions(engine)
		for _, version := range comparedFiles(t, engine) {
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				nth, latest := 1, version == all[len(all)-1]
				switch {
				case sampled():
					nth = 23
				case !latest:
					nth = 6
				}
				run := corpusRun{engine: engine, version: version, templates: corpus(t, nth), bodies: corpusChats(t)}
				refused := run.compare(t)
				if latest && listed != nil {
					names := map[string]bool{}
					for _, template := range run.templates {
						names[template.name] = true
					}
					listed.add(string(engine), refused, names)
				}
			})
		}
	}
}

// corpusRun compares the templates with a version of an engine.
type corpusRun struct {
	engine    prompt.Engine
	version   string
	templates []corpusTemplate
	bodies    [][]byte
	// folder is a copy of corpusFolder, which gets each template in turn.
	folder string
	// questions are lines for corpus.py about chats that differ. wrong are the models and chats in the same order.
	questions []string
	wrong     []wrongChat
	// How many chats are equal, refused by both, refused by the engine only, and refused here only.
	equal, both, lenient, refused int
}

type wrongChat struct {
	template corpusTemplate
	chat     int
	got      string
}

// load returns kvepp's model with a template.
func (r *corpusRun) load(t *testing.T, template corpusTemplate) (*prompt.Model, error) {
	t.Helper()
	source, err := os.ReadFile(template.path)
	if err == nil {
		err = os.WriteFile(filepath.Join(r.folder, "chat_template.jinja"), source, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return prompt.Load(r.folder, prompt.Options{Engine: r.engine, Version: r.version})
}

// compare returns what kvepp refuses of each template.
func (r *corpusRun) compare(t *testing.T) map[string]string {
	var a *asker
	if r.engine == prompt.Dynamo {
		python := filepath.Join(environment(t, "KVEPP_TOOLS"), "bin/python")
		a = startAsker(t, python, "minijinja.py", corpusFolder, "testdata/chats.jsonl", t.TempDir())
	} else {
		python, sources := oracle(t, r.engine, r.version)
		a = startAsker(t, python, "corpus.py", string(r.engine), sources, corpusFolder, "testdata/chats.jsonl")
	}
	var lines []string
	for _, template := range r.templates {
		lines = append(lines, template.path)
	}
	a.send(lines)
	r.folder = copyOf(t, corpusFolder)
	refusals := map[string]string{}
	for _, template := range r.templates {
		m, loadErr := r.load(t, template)
		got := slices.Repeat([]corpusResult{{err: loadErr}}, len(r.bodies))
		if loadErr == nil {
			got = corpusResults(t.Context(), m, r.bodies)
		}
		var want []*string
		a.response(t, &want)
		if chats, reason := r.count(t, template, m, got, want); chats > 0 {
			reason = strings.ReplaceAll(reason, r.folder+"/", "")
			refusals[template.name] = fmt.Sprintf("%d chats: %s", chats, reason)
			if *onlyTemplates != "" {
				t.Logf("REFUSED %s: %s", template.name, reason)
			}
		}
	}
	a.send(r.questions)
	for _, w := range r.wrong {
		var responses []string
		a.response(t, &responses)
		t.Errorf("%s, chat %d:\n got %q\nwant %q", w.template.name, w.chat, w.got, responses[0])
	}
	t.Logf("%d templates: %d equal, %d refused by both, %d by the engine only, %d here only; %d templates differ",
		len(r.templates), r.equal, r.both, r.lenient, r.refused, len(r.wrong))
	count(r.equal, 0, len(r.wrong))
	return refusals
}

// count compares the chats with a template, and returns how many of them only kvepp refuses, and why.
func (r *corpusRun) count(t *testing.T, template corpusTemplate, m *prompt.Model, got []corpusResult,
	want []*string) (refused int, reason string) {
	differs := false
	for i, w := range want {
		switch {
		case w == nil && got[i].err != nil:
			r.both++
		case w == nil:
			if r.lenient++; *onlyTemplates != "" {
				t.Logf("only the engine refuses %s, chat %d", template.name, i)
			}
		case got[i].err != nil:
			if refused == 0 {
				reason = got[i].err.Error()
			}
			refused++
		case *w == got[i].hash:
			r.equal++
		case !differs: // the first one is shown
			differs = true
			request, err := body.ParseRequest("/v1/chat/completions", r.bodies[i])
			if err != nil {
				t.Fatal(err)
			}
			prompts, err := m.Prompts(t.Context(), request)
			if err != nil {
				t.Fatal(err)
			}
			r.questions = append(r.questions, fmt.Sprintf(`{"template":%q,"chat":%d}`, template.path, i))
			r.wrong = append(r.wrong, wrongChat{template, i, prompts[0].Text})
		}
	}
	r.refused += refused
	return refused, reason
}

// copyOf returns a copy of a folder that a test may change.
func copyOf(t *testing.T, folder string) string {
	t.Helper()
	copied := filepath.Join(t.TempDir(), "model")
	if err := os.CopyFS(copied, os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	return copied
}
