package parity

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/jinja"
	"kvepp/prompt/values"
)

// realTemplate is the result of templates.py for a template.
type realTemplate struct {
	Name, Template string
	Renders        []struct {
		Kind string
		Vars json.RawMessage
		Text *string // nil: the template raises
	}
}

// realTemplates returns the distinct templates of the tree's own tests, those below the folders of KVEPP_MODELS and,
// without -short, those in the packages of KVEPP_ENGINES.
func realTemplates(t *testing.T) []realTemplate {
	t.Helper()
	folders := append(
		[]string{"templates.py", "../../prompt/testdata", "../../e2e", "../../test/models"},
		strings.Fields(environment(t, "KVEPP_MODELS"))...)
	if !testing.Short() {
		folders = append(folders, filepath.Join(environment(t, "KVEPP_ENGINES"), "sources"))
	}
	cmd := exec.Command(filepath.Join(environment(t, "KVEPP_ORACLES"), "bin/python"), folders...)
	cmd.Env = append(os.Environ(), "TRANSFORMERS_VERBOSITY=error")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v", cmd.Args, err)
	}
	var all []realTemplate
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var r realTemplate
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	if want := map[bool]int{true: 3, false: 25}[testing.Short()]; len(all) < want {
		t.Fatalf("only %d templates", len(all))
	}
	return all
}

// TestTemplates renders every real chat template with conversations of every kind, and compares text and errors with
// Transformers.
func TestTemplates(t *testing.T) {
	equal, raised, wrong := 0, 0, 0
	templates := realTemplates(t)
	for _, r := range templates {
		compiled, err := jinja.Compile(r.Name, r.Template)
		if err != nil {
			t.Errorf("%s: %v", r.Name, err)
			continue
		}
		for i, render := range r.Renders {
			vars, err := values.ParseJSON(render.Vars)
			if err != nil {
				t.Fatal(err)
			}
			dict, ok := vars.(*values.Dict)
			if !ok {
				t.Fatalf("%s is not an object", render.Vars)
			}
			got, err := compiled.Render(t.Context(), dict, jinja.Limits{})
			switch {
			case render.Text == nil && err == nil:
				wrong++
				t.Errorf("%s, %s (%d): got %q, Transformers raises", r.Name, render.Kind, i, got)
			case render.Text != nil && (err != nil || got != *render.Text):
				wrong++
				t.Errorf("%s, %s (%d):\n got %q, %v\nwant %q", r.Name, render.Kind, i, got, err, *render.Text)
			case err != nil:
				raised++
			default:
				equal++
			}
		}
	}
	t.Logf(
		"%d distinct templates, %d renders: %d equal, %d raise in both, %d differ",
		len(templates),
		equal+raised+wrong,
		equal,
		raised,
		wrong,
	)
	count(equal+raised+wrong, 0, wrong)
}

// indirections are templates that read content through a variable, a namespace, a slice, a filter or a macro, and
// similar ones that do not.
var indirections = []string{
	"{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% for c in m.content | list %}{{ c }}{% " +
		"endfor %}{% endfor %}",
	"{% set ns = namespace(rest=messages, n=0) %}{% for m in ns.rest %}{% for c in m['content'] %}{{ c }}{% endfor " +
		"%}{% endfor %}",
	"{% set ns = namespace(n=0) %}{% set ns.rest = messages[1:] %}{% for x in ns.rest %}{% for c in x.content %}{{ c " +
		"}}{% endfor %}{% endfor %}",
	"{% macro show(what, n=1) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ " +
		"show(m.content) }}{% endfor %}",
	"{% macro show(n, what=1) %}{% for c in what %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ " +
		"show(1, what=m['content']) }}{% endfor %}",
	"{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ " +
		"show(m.role) }}{% endfor %}",
	"{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c }}{% endfor %}{% endfor %}",
	"{% for m in messages %}{% set parts = m.content %}{% for c in parts %}{{ c }}{% endfor %}{% endfor %}",
	"{% for m in messages %}{% for c in m.content.parts %}{{ c }}{% endfor %}{% endfor %}",
	"{% for m in messages %}{% for a, c in m.content %}{{ c }}{% endfor %}{% endfor %}",
	"{% for i, m in messages | items %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
	"{% for i, m in messages %}{% endfor %}{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% " +
		"endfor %}",
	"{% for message in messages | reverse %}{% for c in message.content[::-1] | reverse %}{{ c }}{% endfor %}{% " +
		"endfor %}",
	"{% for turn in messages %}{% for c in turn.get('content') %}{{ c }}{% endfor %}{% endfor %}",
	"{% for turn in messages %}{% if turn.content is iterable %}{{ turn.content }}{% endif %}{% endfor %}",
	"{% for msg in other %}{% for c in msg.content %}{{ c }}{% endfor %}{% endfor %}{{ messages }}",
	"{% for m in messages[0:1] + messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
	"{% set a = messages %}{% set b = a %}{% for turn in b if turn.role %}{% generation %}{% for c in turn.content " +
		"%}{{ c }}{% endfor %}{% endgeneration %}{% endfor %}",
	"{% macro f(p) %}{% for c in p %}{% endfor %}{% endmacro %}{% for turn in messages %}{% call f(turn.content) " +
		"%}x{% endcall %}{% endfor %}",
	"{% for turn in messages %}vision{{ turn.content }}{% endfor %}",
}

// TestContentFormats compares the form of content for each real template with the engines' own code.
func TestContentFormats(t *testing.T) {
	if testing.Short() {
		t.Log("make test-long runs the engines' own code")
		return
	}
	templates := realTemplates(t)
	for _, source := range indirections {
		templates = append(templates, realTemplate{Name: source, Template: source})
	}
	dir := t.TempDir()
	var questions []any
	for _, r := range templates {
		questions = append(questions, map[string]string{"detect": r.Template})
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		parts := 0
		const folder = "../../test/models/tiny-bytelevel"
		for i, response := range engineResults[struct{ Format string }](t, engine, "", folder, questions) {
			path := filepath.Join(dir, "chat_template.jinja")
			if err := os.WriteFile(path, []byte(templates[i].Template), 0o600); err != nil {
				t.Fatal(err)
			}
			m, err := prompt.Load(folder, prompt.Options{Engine: engine, ChatTemplate: path})
			if err != nil {
				t.Errorf("%s: %v", templates[i].Name, err)
				continue
			}
			if got := m.ContentFormat(); got != response.Format {
				t.Errorf("%s, %s: got %s, want %s", engine, templates[i].Name, got, response.Format)
			}
			if response.Format == prompt.ContentOpenAI {
				parts++
			}
		}
		t.Logf("%s: %d templates, %d of them take content as parts", engine, len(templates), parts)
	}
}
