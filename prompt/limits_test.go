package prompt

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"kvepp/prompt/jinja"
)

// recursiveTemplate writes tools' parameters as Python types with recursive macros, like Hermes 2 Pro's and Command-R's
// templates. It treats a type that is neither a known name nor an object as a list of alternatives. So it reads the
// name "null" letter by letter and recurses without end.
const recursiveTemplate = `
{%- macro python(schema) %}
    {%- set names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"} %}
    {%- if names[schema.type] is defined %}{{ names[schema.type] }}
    {%- elif schema.type == "array" %}list[{{ python(schema["items"]) }}]
    {%- elif schema.type == "object" %}{% for name, inner in schema.properties.items() %}{{ name }}: {{ ` +
	`python(inner) }}, {% endfor %}
    {%- elif schema.anyOf %}{% for inner in schema.anyOf %}{{ python(inner) }} | {{ python(inner) }}{% endfor %}
    {%- elif schema.type is iterable %}Union[{% for t in schema.type %}{{ python({"type": t}) }},{% endfor %}]
    {%- else %}Any{% endif %}
{%- endmacro %}
{%- for tool in tools or [] %}{{ tool.function.name }}({{ python(tool.function.parameters) }})
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}`

// TestHostileTools: every render of a client's tool schema ends. The stack is small, because a goroutine that overflows
// its stack ends the process.
func TestHostileTools(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	defer debug.SetMaxStack(debug.SetMaxStack(64 << 20))
	nested := func(before, inner, after string, depth int) string {
		return strings.Repeat(before, depth) + inner + strings.Repeat(after, depth)
	}
	harmless := map[string]string{
		`{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"array",` +
			`"items":{"type":"integer"}}}}`: "f(city: str, days: list[int], )\nuser: x\n",
		`{"type":"object","properties":{}}`: "f()\nuser: x\n",
	}
	hostile := map[string]string{
		"a nullable string": `{"type":"object","properties":{"city":{"type":["string","null"]}}}`,
		"an unknown type":   `{"type":"object","properties":{"city":{"type":"x"}}}`,
		"a deep schema":     nested(`{"type":"array","items":`, `{"type":"string"}`, `}`, 400),
		"a doubling schema": `{"type":"object","properties":{"a":` + nested(
			`{"anyOf":[`,
			`{"type":"string"}`,
			`]}`,
			60,
		) + `}}`,
		"a branching schema": `{"type":"object","properties":{"a":` + nested(
			`{"anyOf":[{"type":"string"},`,
			`{"type":"string"}`,
			`]}`,
			60,
		) + `}}`,
		"a long list of null": `{"type":[` + strings.Repeat(`"string",`, 100_000) + `"null"]}`,
		"a long name":         `{"type":"` + strings.Repeat("x", 1_000_000) + `"}`,
	}
	dir := copyModel(t, "tiny-bytelevel", map[string]string{"chat_template.jinja": recursiveTemplate})
	for _, engine := range Engines {
		m, err := Load(dir, Options{Engine: engine})
		if err != nil {
			t.Fatal(err)
		}
		body := func(parameters string) string {
			return fmt.Sprintf(
				`[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]`,
				parameters,
			)
		}
		for parameters, want := range harmless {
			if got, err := m.renderChat(t.Context(), chatRequest(t, body(parameters))); err != nil || got != want {
				t.Errorf("%s: %s: got %q, %v; want %q", engine, parameters, got, err, want)
			}
		}
		for name, parameters := range hostile {
			if engine != VLLM && name != "a nullable string" && name != "a deep schema" {
				continue // the renderer is the same
			}
			_, err := m.Tokenize(t.Context(), chatRequest(t, body(parameters)))
			if !errors.Is(err, jinja.ErrLimit) {
				t.Errorf("%s, %s: got %v, want a limit", engine, name, err)
			}
		}
	}
}

// TestHostileRequestTemplate: a request's own template has limits like the model's template.
func TestHostileRequestTemplate(t *testing.T) {
	defer debug.SetMaxStack(debug.SetMaxStack(64 << 20))
	trusting, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{RequestChatTemplate: true})
	if err != nil {
		t.Fatal(err)
	}
	strict, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	const chat = `[{"role":"user","content":"x"}],"chat_template":`
	if got, err := trusting.renderChat(t.Context(), chatRequest(t, chat+`"{{ messages[0].content }}!"`)); err != nil ||
		got != "x!" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := strict.Tokenize(t.Context(), chatRequest(t, chat+`"{{ messages[0].content }}!"`)); !errors.Is(
		err,
		errRequestTemplate,
	) {
		t.Errorf("without the flag: got %v", err)
	}
	for _, source := range []string{
		`"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"`,
		`"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"`,
		`"{{ 'x' * 1000000000000 }}"`,
		`"{% set s = 'X' * 16777216 %}{% for i in range(99999) %}{% set a = s.isalpha() %}{% endfor %}"`,
		`"{% set n = namespace(l=[]) %}{% set s = 'x' * 4194304 %}{% for i in range(99) %}{% set n.l = n.l + [s ~ i] ` +
			`%}{% endfor %}"`,
	} {
		if _, err := trusting.Tokenize(t.Context(), chatRequest(t, chat+source)); !errors.Is(
			err,
			jinja.ErrLimit,
		) {
			t.Errorf("%s: got %v, want a limit", source, err)
		}
	}
	for _, source := range []string{`"{% broken"`, `5`, `"` + strings.Repeat("x", 2<<20) + `"`} {
		if ids, err := trusting.Tokenize(t.Context(), chatRequest(t, chat+source)); err == nil {
			t.Errorf("%.40s: got %v", source, ids)
		}
	}
}
