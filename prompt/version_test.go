package prompt

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"kvepp/prompt/body"
)

func TestMatchVersion(t *testing.T) {
	for _, c := range []struct {
		engine          Engine
		version         string
		want            string
		tested, invalid bool
	}{
		{SGLang, "0.5.21", "0.5.21", true, false},
		{SGLang, "v0.5.23", "0.5.23", true, false},
		{SGLang, "0.5.22.post1", "0.5.22", false, false},
		{SGLang, "0.5.23rc1", "0.5.23", false, false},
		{SGLang, "0.5.24", "0.5.23", false, false},
		{SGLang, "0.6", "0.5.23", false, false},
		{SGLang, "0.5.9", "0.5.21", false, false},
		{VLLM, "0.33.0", "0.33.0", true, false},
		{VLLM, "0.33.1.dev7+gabc", "0.33.0", false, false},
		{VLLM, "0.32.0", "0.32.0", true, false},
		{VLLM, "0.32.1", "0.32.0", false, false},
		{VLLM, "0.10.2", "0.31.0", false, false},
		{TRTLLM, "1.3", "1.3", true, false},
		{TRTLLM, "1.3.0rc2", "1.3", false, false},
		{Dynamo, "2.0.0", "1.6.1", false, false},
		{SGLang, "", "", false, true},
		{SGLang, "latest", "", false, true},
		{SGLang, "7", "", false, true},
		{SGLang, "0.", "", false, true},
		{SGLang, "0.5.99999999999999999999999", "", false, true},
		{SGLang, "0.5.21" + string(make([]byte, 100)), "", false, true},
	} {
		got, tested, err := MatchVersion(c.engine, c.version)
		if got != c.want || tested != c.tested || (err != nil) != c.invalid {
			t.Errorf("%s %q: %q, %v, %v", c.engine, c.version, got, tested, err)
		}
	}
}

// TestReleases: versions are in order, as MatchVersion needs them.
func TestReleases(t *testing.T) {
	for _, engine := range Engines {
		var last numbers
		for _, version := range Versions(engine) {
			n, err := parseVersion(version)
			if err != nil || !last.before(n) {
				t.Errorf("%s %s: %v, after %v", engine, version, err, last)
			}
			last = n
		}
		if last == (numbers{}) {
			t.Errorf("%s has no version", engine)
		}
	}
}

// TestSGLangVersions: what each version makes of a request that the versions treat differently. The texts are SGLang's
// own; make parity compares thousands.
func TestSGLangVersions(t *testing.T) {
	template := filepath.Join(t.TempDir(), "t.jinja")
	if err := os.WriteFile(template, []byte("{{ tools }}|{{ messages }}|{{ reasoning_effort }}"), 0o644); err != nil {
		t.Fatal(err)
	}
	base, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{Engine: SGLang, ChatTemplate: template})
	if err != nil {
		t.Fatal(err)
	}
	const refused = ""
	for _, c := range []struct {
		path, body string
		texts      [3]string // of 0.5.21, 0.5.22 and 0.5.23
	}{
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],` +
			`"tools":[{"type":"function",` +
			`"function":{"name":"f","parameters":{}}}]}`, [3]string{
			"[{'type': 'function', 'function': {'description': None, 'name': 'f', 'parameters': {}, " +
				"'strict': False}, 'defer_loading': None}]|[{'role': 'user', 'content': 'hi'}]|",
			"[{'type': 'function', 'function': {'description': None, 'name': 'f', 'parameters': {}, " +
				"'strict': False}, 'defer_loading': None}]|[{'role': 'user', 'content': 'hi'}]|",
			"[{'type': 'function', 'function': {'name': 'f', 'parameters': {}, 'description': None}, " +
				"'defer_loading': None}]|[{'role': 'user', 'content': 'hi'}]|",
		}},
		{"/v1/responses", `{"model":"m","input":[{"role":"user","content":"hi"},{"role":"developer","content":"x"}]}`,
			[3]string{
				"None|[{'role': 'system', 'content': 'Developer instructions:\\nx'}, {'role': 'user', " +
					"'content': 'hi'}]|",
				"None|[{'role': 'user', 'content': 'hi'}, {'role': 'system', 'content': 'Developer " +
					"instructions:\\nx'}]|",
				"None|[{'role': 'user', 'content': 'hi'}, {'role': 'system', 'content': 'Developer " +
					"instructions:\\nx'}]|",
			}},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"root","content":"r"},{"role":"user",` +
			`"content":"hi"}]}`,
			[3]string{refused, refused,
				"None|[{'role': 'root', 'content': 'r'}, {'role': 'user', 'content': 'hi'}]|"}},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],` +
			`"reasoning_effort":"ultra"}`,
			[3]string{refused, refused, "None|[{'role': 'user', 'content': 'hi'}]|ultra"}},
	} {
		for i, version := range Versions(SGLang) {
			m, err := base.At(version)
			if err != nil || m.Version() != version {
				t.Fatalf("%s: %v, %v", version, m.Version(), err)
			}
			request, err := body.ParseRequest(c.path, []byte(c.body))
			if err != nil {
				t.Fatal(err)
			}
			prompts, err := m.Tokenize(t.Context(), request)
			if c.texts[i] == refused {
				if err == nil {
					t.Errorf("%s takes %s", version, c.body)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s: %s: %v", version, c.body, err)
				continue
			}
			want, err := m.Encode(c.texts[i], false)
			if err != nil || len(prompts) != 1 || !slices.Equal(prompts[0].IDs, want) {
				t.Errorf("%s: %s: %v, want the ids of %q", version, c.body, prompts, c.texts[i])
			}
		}
	}
	if again, err := base.At("0.5.23"); err != nil || again != base || !base.HasVersions() {
		t.Errorf("the newest version is another model: %v", err)
	}
}

// TestVLLMVersions is TestSGLangVersions for vLLM.
func TestVLLMVersions(t *testing.T) {
	template := filepath.Join(t.TempDir(), "t.jinja")
	source := `{% set ns = namespace(m=messages) %}{% for m in ns.m %}{% for p in m.content %}{{ p }}{% endfor %}` +
		`{% endfor %}{{ reasoning_effort }}`
	if err := os.WriteFile(template, []byte(source), 0o644); err != nil {
		t.Fatal(err)
	}
	base, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{Engine: VLLM, ChatTemplate: template,
		ReasoningEffortMap: `{"max":"high"}`})
	if err != nil {
		t.Fatal(err)
	}
	const billing = `"x-anthropic-billing-header: a\nhi"`
	for _, c := range []struct {
		body  string
		texts [3]string // of 0.31.0, 0.32.0 and 0.33.0
	}{
		{`{"model":"m","messages":[{"role":"user","content":"hi"}]}`,
			[3]string{"hi", "hi", "{'type': 'text', 'text': 'hi'}"}},
		{`{"model":"m","messages":[{"role":"user","content":"hi"}],"reasoning_effort":"max"}`,
			[3]string{"himax", "himax", "{'type': 'text', 'text': 'hi'}high"}},
		{`{"model":"m","messages":[{"role":"system","content":` + billing + `}]}`,
			[3]string{"x-anthropic-billing-header: a\nhi", "hi", "{'type': 'text', 'text': 'hi'}"}},
		{`{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":` + billing + `}]}]}`,
			[3]string{"x-anthropic-billing-header: a\nhi", "hi", "{'type': 'text', 'text': 'hi'}"}},
	} {
		for i, version := range Versions(VLLM) {
			m, err := base.At(version)
			if err != nil || m.Version() != version {
				t.Fatalf("%s: %v, %v", version, m.Version(), err)
			}
			request, err := body.ParseRequest("/v1/chat/completions", []byte(c.body))
			if err != nil {
				t.Fatal(err)
			}
			prompts, err := m.Tokenize(t.Context(), request)
			if err != nil {
				t.Errorf("%s: %s: %v", version, c.body, err)
				continue
			}
			want, err := m.Encode(c.texts[i], false)
			if err != nil || len(prompts) != 1 || !slices.Equal(prompts[0].IDs, want) {
				t.Errorf("%s: %s: %v, want the ids of %q", version, c.body, prompts, c.texts[i])
			}
		}
	}
}
