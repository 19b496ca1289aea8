package parity

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/prompt"
)

// requests is how many random requests each test sends to each engine's version and API.
var requests = flag.Int("requests", 0, "at least `N` random requests to each engine's version and API; 0: fewer, for "+
	"CI's time")

// atLeast returns how many random requests to make for each template, so that there are -requests, and no fewer than n.
func atLeast(n, templates int) int { return max(n, (*requests+templates-1)/templates) }

// oracle returns the Python and the folder of sources of an engine's version; "": the one of KVEPP_ENGINES. The others
// are in KVEPP_ENGINE_VERSIONS, a folder each.
func oracle(t *testing.T, engine prompt.Engine, version string) (python, sources string) {
	t.Helper()
	if engine == prompt.TRTLLM { // whose rules engines.py tells itself
		engine, version = prompt.VLLM, ""
	}
	sourcesList, err := os.ReadFile("../tools/oracles/sources.txt")
	if err != nil {
		t.Fatal(err)
	}
	if version == "" || strings.Contains(string(sourcesList), "\n"+string(engine)+"=="+version+"\n") {
		home := environment(t, "KVEPP_ENGINES")
		return filepath.Join(home, string(engine), "bin/python"), filepath.Join(home, "sources")
	}
	name := string(engine) + "-" + version
	for _, home := range strings.Fields(environment(t, "KVEPP_ENGINE_VERSIONS")) {
		if strings.HasPrefix(filepath.Base(home), name+"-") {
			return filepath.Join(home, "bin/python"), filepath.Join(home, "sources")
		}
	}
	t.Fatalf("KVEPP_ENGINE_VERSIONS names no folder of %s: test/tools/install.sh versions makes it", name)
	return "", ""
}

// full is for a release, and for who changes what the tests compare.
var full = flag.Bool("full", false, "compare with all versions of the engines, not only the oldest and the latest; "+
	"all templates and folders, not every 23rd of them; and many times as many texts")

// sampled reports whether the tests compare only a part: neither -full nor a choice of what to compare is given.
func sampled() bool {
	chosen := *onlyTemplates + *onlyFolders + strings.TrimSpace(os.Getenv("KVEPP_PARITY"))
	return chosen == "" && !*full && !*rewrite
}

// comparedFiles is compared for templates and folders, which are many: only the latest version if sampled.
func comparedFiles(t *testing.T, engine prompt.Engine) []string {
	t.Helper()
	versions := compared(t, engine)
	if sampled() {
		versions = versions[len(versions)-1:]
	}
	return versions
}

// compared returns the versions of an engine to compare with: the oldest and the latest that kvepp follows, with -full
// all, or those that KVEPP_PARITY names, an engine and optionally a version.
func compared(t *testing.T, engine prompt.Engine) []string {
	t.Helper()
	all := prompt.Versions(engine)
	only := strings.Fields(os.Getenv("KVEPP_PARITY"))
	switch {
	case len(only) == 0 && len(all) > 2 && !*full && !*rewrite:
		return []string{all[0], all[len(all)-1]}
	case len(only) == 0:
		return all
	case only[0] != string(engine):
		return nil
	case len(only) == 1:
		return all
	case !slices.Contains(all, only[1]):
		t.Fatalf("%s %s is none of the versions %v in prompt/version.go: add it there, and its packages to "+
			"test/tools/oracles/versions", engine, only[1], all)
	}
	return only[1:]
}

// versionedRequests are chats that the versions of SGLang treat differently, with the templates of TestEngines.
const versionedRequests = `` +
	`{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f"}}]}
{"model":"m","messages":[{"role":"user","content":"b"}],"tools":[{"function":{"strict":true,"parameters":{"b":1,` +
	`"a":2},"name":"f","description":"d"},"type":"function"}]}
{"model":"m","messages":[{"role":"user","content":"c"}],"tools":[{"type":"function",` +
	`"function":{"parameters":{"type":"object","properties":{"x":{"type":"string"}}},"strict":null,` +
	`"unknown":1,"name":"g"}}]}
{"model":"m","messages":[{"role":"user","content":"d"}],"tools":[{"type":"function","function":{"strict":false,` +
	`"name":"g","defer_loading":true}},{"type":"function","defer_loading":false,` +
	`"function":{"description":null,"name":"h"}}]}
{"model":"m","messages":[{"role":"user","content":"e"}],"tools":[{"type":"function",` +
	`"function":{"defer_loading":false,"name":"g"}},{"type":"function",` +
	`"function":{"key_order":["name"],"name":"h","description":"x"}}],` +
	`"tool_choice":{"type":"function","function":{"name":"h"}}}
{"model":"m","messages":[{"role":"system","content":"s","tools":[{"type":"function","function":{"parameters":{},` +
	`"name":"f"}}]},{"role":"user","content":"f"}]}
{"model":"m","messages":[{"role":"root","content":"r"},{"role":"user","content":"g"}]}
{"model":"m","messages":[{"role":"Root","content":[{"type":"text","text":"r"},{"type":"text","text":"t"}],` +
	`"name":"n"},{"role":"user","content":"h"}]}
{"model":"m","messages":[{"role":"user","content":"i"},{"role":"assistant","content":"so","prefix":true}]}
{"model":"m","messages":[{"role":"user","content":"j"},{"role":"assistant","content":"so","prefix":false,` +
	`"reasoning_content":"t"},{"role":"user","content":"k"}]}
{"model":"m","messages":[{"role":"user","content":"l"},{"role":"assistant","content":"so","prefix":null},` +
	`{"role":"user","content":"m","prefix":true}],` +
	`"continue_final_message":true}
{"model":"m","messages":[{"role":"assistant","content":[{"type":"text","text":"so"}],"prefix":true},{"role":"tool",` +
	`"content":"x","tool_call_id":"1","prefix":true},` +
	`{"role":"user","content":"n"}]}
{"model":"m","messages":[{"role":"user","content":"o"}],"reasoning_effort":"ultra"}
{"model":"m","messages":[{"role":"user","content":"p"}],"reasoning":{"effort":"ultra","enabled":true}}
{"model":"m","messages":[{"role":"user","content":"q"}],"chat_template_kwargs":{"reasoning_effort":"ultra"}}
{"model":"m","messages":[{"role":"user","content":"r"}],"thinking":{"type":"adaptive"}}
{"model":"m","messages":[{"role":"user","content":"s"}],"thinking":"x","reasoning_effort":"low"}
{"model":"m","messages":[{"role":"user","content":"t"}],"mm_processor_kwargs":{"a":1},"watermark":{"enabled":true},` +
	`"bootstrap_room":3}
`

// versionedVLLM are the same for vLLM.
const versionedVLLM = `` +
	`{"model":"m","messages":[{"role":"system","content":"x-anthropic-billing-header: cch=1\nBe brief."},` +
	`{"role":"user","content":"a"}]}
{"model":"m","messages":[{"role":"system","content":"x-anthropic-billing-header: cch=1"},{"role":"user","content":"b"}]}
{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: 2\n\nkept"},` +
	`{"type":"text","text":"more"}]},{"role":"user","content":"c"}]}
{"model":"m","messages":[{"role":"system","content":["x-anthropic-billing-header: 3\nkept","more"]},{"role":"user",` +
	`"content":[{"type":"text","text":"d"},{"type":"text","text":"e"}]}]}
{"model":"m","messages":[{"role":"developer","content":"x-anthropic-billing-header: 4\nkept"},{"role":"user",` +
	`"content":"x-anthropic-billing-header: 5\nkept"}]}
{"model":"m","messages":[{"role":"user","content":"f"}],"min_p":0.1,"stop_token_ids":[1],"mm_payload":"none",` +
	`"return_mm_kwargs":false,"top_logprobs":3}
{"model":"m","messages":[{"role":"user","content":"g"}],"watermarking":true,"skip_special_tokens":null,` +
	`"reasoning_effort":"max"}
`

// namespacedTemplate takes content as parts where an engine's version looks into namespaces.
const namespacedTemplate = `{%- set ns = namespace(rest=messages) -%}{%- for m in ns.rest -%}<|im_start|>{{ m.role }}` +
	`{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content -%}[{{ p }}]{%- endfor -%}` +
	`{%- endif -%}{{ m.tool_calls }}{{ m.reasoning }}{%- endfor -%}{{ tools }}{{ reasoning_effort }}` +
	`{{ enable_thinking }}`

// versionedTemplate returns a file with namespacedTemplate.
func versionedTemplate(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "namespaced.jinja")
	if err := os.WriteFile(path, []byte(namespacedTemplate), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// newestOnly are defaults of template variables that only the newest version of an engine is compared with, for time.
const newestOnly = `{"custom":{"a":[1]}}`

// withVersioned returns chats, for SGLang and vLLM with those that their versions treat differently, and others mixed
// from them and requests.
func withVersioned(t *testing.T, engine prompt.Engine, chats, requests []byte) []byte {
	t.Helper()
	var versioned []byte
	switch engine {
	case prompt.SGLang:
		versioned = []byte(versionedRequests)
	case prompt.VLLM:
		versioned = []byte(versionedVLLM)
	default:
		return chats
	}
	return slices.Concat(chats, versioned, mixed(t, slices.Concat(versioned, requests), 300))
}

// goldenOf returns the name of the golden file of an engine's version. Versions that make the same text of all requests
// share one.
func goldenOf(engine prompt.Engine, version string) string {
	if engine == prompt.SGLang && version == "0.5.23" || engine == prompt.VLLM && version == "0.31.0" {
		return string(engine) + "-" + version + ".jsonl"
	}
	return string(engine) + ".jsonl"
}
