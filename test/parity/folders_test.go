package parity

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// onlyFolders limits TestFolders, for someone who works on one class.
var onlyFolders = flag.String("folders", "", "TestFolders makes only the folders whose class and variant contain a "+
	"match of this `pattern`, such as \"^Qwen2Tokenizer bytes\"")

// loadedFolder is the result of folders.py for a folder.
type loadedFolder struct {
	Folder, Class, Variant, Loaded, Error string
	Special, Plain, Chats                 [][]kvblock.Token
}

// folderChats is the function chats of folders.py.
var folderChats = []string{
	`[{"role":"system","content":"Be the first.\n"},{"role":"user","content":" Hi 1234, don't!"}]`,
	`[{"role":"user","content":"Hi"},{"role":"assistant","content":"ok\n\nHello"},` +
		`{"role":"user","content":"漢字 é e\u0301  world"}]`,
}

// folderBodies are the requests whose prompts folders.py tells: all texts as completions, each text as a chat of one
// message, and folderChats.
type folderBodies struct {
	texts       []string
	completions *body.Request
	plain       []*body.Request
	chats       []*body.Request
}

func readFolderBodies(t *testing.T) folderBodies {
	t.Helper()
	raw, err := os.ReadFile("testdata/texts.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var b folderBodies
	for line := range bytes.Lines(raw) {
		var text string
		if err := json.Unmarshal(line, &text); err != nil {
			t.Fatal(err)
		}
		b.texts = append(b.texts, text)
	}
	parse := func(path string, payload any) *body.Request {
		raw, err := json.Marshal(payload)
		if err != nil {
			t.Fatal(err)
		}
		request, err := body.ParseRequest(path, raw)
		if err != nil {
			t.Fatal(err)
		}
		return request
	}
	b.completions = parse("/v1/completions", map[string]any{"model": "m", "prompt": b.texts})
	for _, text := range b.texts {
		b.plain = append(b.plain, parse("/v1/chat/completions", map[string]any{"model": "m",
			"messages": []any{map[string]string{"role": "user", "content": text}}}))
	}
	for _, chat := range folderChats {
		b.chats = append(b.chats, parse("/v1/chat/completions", map[string]any{"model": "m",
			"messages": json.RawMessage(chat)}))
	}
	return b
}

// compare returns how kvepp's ids of a folder differ from the engine's; "" if they are equal. refused is the reason why
// kvepp does not know them.
func (b *folderBodies) compare(ctx context.Context, m *prompt.Model, want *loadedFolder) (differs, refused string) {
	completions, err := m.Tokenize(ctx, b.completions)
	if err != nil {
		return "", err.Error()
	}
	for i, text := range b.texts {
		if !slices.Equal(completions[i].IDs, want.Special[i]) {
			return fmt.Sprintf("completion %q\n got %v\nwant %v", text, completions[i].IDs, want.Special[i]), ""
		}
	}
	chat := func(request *body.Request, what string, want []kvblock.Token) {
		prompts, err := m.Tokenize(ctx, request)
		switch {
		case differs != "" || refused != "":
		case err != nil:
			refused = err.Error()
		case !slices.Equal(prompts[0].IDs, want):
			differs = fmt.Sprintf("chat %s\n got %v\nwant %v", what, prompts[0].IDs, want)
		}
	}
	if want.Variant != "real" { // whose template adds to the text
		for i, text := range b.texts {
			chat(b.plain[i], fmt.Sprintf("%q", text), want.Plain[i])
		}
	}
	for i := range want.Chats {
		if want.Chats[i] == nil {
			continue // a real model's template refuses the chat
		}
		chat(b.chats[i], folderChats[i], want.Chats[i])
	}
	return differs, refused
}

// TestFolders loads folders as each engine does, with its own loader, and compares the ids: small folders of every
// class of Transformers in many variants, and of every model type (with older versions every second variant and every
// sixth type, in a sample every 23rd), and the real folders of KVEPP_MODELS. testdata/folders.txt lists what kvepp
// refuses.
func TestFolders(t *testing.T) {
	if testing.Short() {
		t.Log("make parity loads folders as the engines do")
		return
	}
	b := readFolderBodies(t)
	var listed *refusals
	if *onlyFolders == "" {
		listed = listRefusals(t, "testdata/folders.txt")
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		all := prompt.Versions(engine)
		for _, version := range comparedFiles(t, engine) {
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				every, real := [2]string{"2", "6"}, []string{}
				latest, sampled := version == all[len(all)-1], sampled()
				if latest {
					every, real = [2]string{"1", "1"}, strings.Fields(environment(t, "KVEPP_MODELS"))
				}
				if sampled {
					every = [2]string{"23", "23"}
				}
				run := folderRun{engine: engine, version: version, bodies: &b}
				refused := run.compare(t, every, real)
				var listedAlone map[string]bool
				if sampled { // the list has what is refused of all folders
					maps.DeleteFunc(refused, func(subject, _ string) bool { return subject != realFolders })
					listedAlone = map[string]bool{realFolders: true}
				}
				if listed != nil {
					listed.add(string(engine)+" "+version, refused, listedAlone)
				}
			})
		}
	}
}

// folderRun compares folders with a version of an engine.
type folderRun struct {
	engine  prompt.Engine
	version string
	bodies  *folderBodies
	// How many folders are equal, not loaded by the engine, refused here, and different.
	equal, failed, refused, wrong int
}

// compare returns the variants that kvepp refuses of each class: all, if it knows none of them.
func (r *folderRun) compare(t *testing.T, every [2]string, real []string) map[string]string {
	python, sources := oracle(t, r.engine, r.version)
	args := []string{"folders.py", string(r.engine), sources, t.TempDir(), "testdata/texts.jsonl", every[0], every[1],
		*onlyFolders}
	cmd := exec.Command(python, append(args, real...)...)
	// The engines depend on SentencePiece, which is installed with mistral-common.
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "TRANSFORMERS_VERBOSITY=error",
		"PYTHONPATH="+environment(t, "KVEPP_VLLM_MISTRAL"))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	variants, exact := map[string][]string{}, map[string]bool{}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var want loadedFolder
		if err := json.Unmarshal(lines.Bytes(), &want); err != nil {
			t.Fatal(err)
		}
		subject, variant := r.subject(&want)
		switch r.outcome(t, &want) {
		case refused:
			variants[subject] = append(variants[subject], variant)
		case equal:
			exact[subject] = true
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	t.Logf("%d folders: %d equal, %d the engine does not load, %d refused here, %d differ",
		r.equal+r.failed+r.refused+r.wrong, r.equal, r.failed, r.refused, r.wrong)
	count(r.equal+r.wrong, 0, r.wrong)
	lists := map[string]string{}
	for subject, names := range variants {
		lists[subject] = strings.Join(names, " ")
		if !exact[subject] {
			lists[subject] = "all"
		}
	}
	return lists
}

// realFolders is the subject of the folders of KVEPP_MODELS in the list of refusals.
const realFolders = "real folders"

// subject returns what a folder counts for in the list of refusals: its class, or its class by model types.
func (r *folderRun) subject(f *loadedFolder) (subject, variant string) {
	subject = f.Class
	if subject == "" {
		subject = "no class"
	}
	if modelType, ok := strings.CutPrefix(f.Variant, "type "); ok {
		return subject + " by model type", modelType
	}
	if f.Variant == "real" {
		return realFolders, filepath.Base(f.Folder)
	}
	return subject, f.Variant
}

// The outcomes of a comparison.
const (
	failed = iota // the engine does not load the folder
	refused
	differs
	equal
)

func (r *folderRun) outcome(t *testing.T, want *loadedFolder) int {
	if want.Error != "" {
		r.failed++
		return failed
	}
	difference, reason := "", ""
	m, err := prompt.Load(want.Folder, prompt.Options{Engine: r.engine, Version: r.version})
	if err != nil {
		reason = err.Error()
	} else {
		difference, reason = r.bodies.compare(t.Context(), m, want)
	}
	what := fmt.Sprintf("%q %s %s, loaded as %s", want.Class, want.Variant, filepath.Base(want.Folder), want.Loaded)
	switch {
	case difference != "":
		r.wrong++
		t.Errorf("DIFFERS %s: %s", what, difference)
		return differs
	case reason != "":
		r.refused++
		if *onlyFolders != "" {
			t.Logf("REFUSED %s: %s", what, reason)
		}
		return refused
	}
	r.equal++
	return equal
}
