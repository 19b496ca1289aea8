package prompt

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// release is a version of an engine whose rules kvepp follows, and what sets it apart from the engine's other
// versions. Two releases with the same rules make the same prompts of every request.
type release struct {
	version string // as the engine prints it
	rules   rules
	// transformers is the second number of the version of Transformers 5 that the engine requires; 0 if the engine
	// does not use it, or loads by rules of its own.
	transformers int
}

// rules are the differences between the versions of an engine. Each is named by what the newer versions of
// SGLang, and the older ones of vLLM, do, so that an engine with one version has none.
type rules struct {
	// keepsLateSystem: /v1/responses leaves later system messages in their place if the template shows them there.
	// Source: SGLang 0.5.22, serving_responses, _construct_input_messages.
	keepsLateSystem bool
	// hidesTools: a tool_choice of none hides the tools from encoders that are not templates, too.
	// Source: SGLang 0.5.22, serving_chat, _apply_jinja_template.
	hidesTools bool
	// recipe: compiled packages, deepseek-recipe and tml-renderers, encode DeepSeek V4 and Inkling.
	// Source: SGLang 0.5.23, chat_encoding_adapters, parser/inkling_renderer.
	recipe bool
	// toolsAsSent: a tool's function keeps the client's order of keys and has no strict unless the client sent one.
	// Messages may have the role root and the field prefix, and an effort may be ultra.
	// Source: SGLang 0.5.23, entrypoints/openai/protocol.
	toolsAsSent bool
	// keepsBillingHeader: a system message keeps the line that Claude Code puts before it. True for older versions.
	// Source: vLLM 0.32.0, renderers/chat_utils, _strip_claude_code_billing_header, which 0.31.0 does not have.
	keepsBillingHeader bool
	// replacesTemplates: code takes the place of GLM-5.3's template, and prepares the chats of MiniMax M3.
	// Source: SGLang 0.5.23, parser/python_chat_template, serving_chat.
	replacesTemplates bool
	// byNameOnly: whether a template takes content as a list of parts is found without namespaces. True for older
	// versions. Source: vLLM 0.33.0, renderers/hf, _iter_nodes_assign_var_or_elems; 0.32.0 follows names only.
	byNameOnly bool
	// noEffortMap: there is no --reasoning-effort-map. True for older versions.
	noEffortMap bool
	// softImageTokens: Gemma 4's media have marks that are not known here. True for older versions.
	// Source: vLLM 0.32.0, model_executor/models/gemma4_mm, get_placeholder_str.
	softImageTokens bool
}

// releases are the versions that kvepp follows, oldest first. This is the only list of them: flags, discovery, the
// parity tests and docs/engines.md go by it. docs/contributing.md says what a new row takes.
var releases = map[Engine][]release{
	VLLM: {
		{version: "0.31.0", transformers: 17, rules: rules{keepsBillingHeader: true, byNameOnly: true,
			noEffortMap: true, softImageTokens: true}},
		{version: "0.32.0", transformers: 19, rules: rules{byNameOnly: true, noEffortMap: true, softImageTokens: true}},
		{version: "0.33.0", transformers: 20},
	},
	SGLang: {
		{version: "0.5.21", transformers: 12},
		{version: "0.5.22", transformers: 19, rules: rules{keepsLateSystem: true, hidesTools: true}},
		{version: "0.5.23", transformers: 19, rules: rules{keepsLateSystem: true, hidesTools: true, recipe: true,
			toolsAsSent: true, replacesTemplates: true}},
	},
	TRTLLM: {{version: "1.3"}},
	Dynamo: {{version: "1.6.1"}},
}

// Versions returns the versions of an engine that kvepp follows, oldest first.
func Versions(engine Engine) []string {
	var all []string
	for _, r := range releases[engine] {
		all = append(all, r.version)
	}
	return all
}

// MatchVersion returns the version among Versions(engine) that a version of the engine is treated as: itself, or the
// newest one that is not newer than it, or the oldest. Suffixes count for nothing: 0.5.23.post1, 0.5.23rc1 and
// 0.5.23+cu130 are treated as 0.5.23. tested says that the version is one of Versions, without such a suffix.
//
// Errors: version is no version number, such as 0.5.23.
func MatchVersion(engine Engine, version string) (treatedAs string, tested bool, err error) {
	i, tested, err := matchRelease(engine, version)
	if err != nil {
		return "", false, err
	}
	return releases[engine][i].version, tested, nil
}

func matchRelease(engine Engine, version string) (index int, tested bool, err error) {
	asked, err := parseVersion(version)
	if err != nil {
		return 0, false, err
	}
	best := 0
	for i, r := range releases[engine] {
		if r.version == strings.TrimPrefix(version, "v") {
			return i, true, nil
		}
		own, err := parseVersion(r.version)
		if err != nil {
			return 0, false, err
		}
		if !asked.before(own) {
			best = i
		}
	}
	return best, false, nil
}

// numbers are the leading numbers of a version.
type numbers [3]int

func (n numbers) before(other numbers) bool {
	for i := range n {
		if n[i] != other[i] {
			return n[i] < other[i]
		}
	}
	return false
}

// maxVersionBytes bounds a version, which an engine may send.
const maxVersionBytes = 64

// parseVersion reads the first two or three numbers of a version such as v0.5.23.post1. What follows them is ignored.
func parseVersion(version string) (n numbers, err error) {
	wrong := fmt.Errorf("prompt: %.*q is not a version number like 0.5.23", maxVersionBytes, version)
	if len(version) > maxVersionBytes {
		return n, wrong
	}
	rest := strings.TrimPrefix(version, "v")
	for i := range n {
		digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
		if digits == 0 {
			if i < 2 {
				return n, wrong
			}
			break
		}
		if n[i], err = strconv.Atoi(rest[:digits]); err != nil {
			return n, wrong
		}
		var more bool
		if rest, more = strings.CutPrefix(rest[digits:], "."); !more {
			if i == 0 {
				return n, wrong
			}
			break
		}
	}
	return n, nil
}

// Version returns the version whose rules the model follows, one of Versions.
func (m *Model) Version() string { return m.release.version }

// HasVersions reports whether At may return something else than m.
func (m *Model) HasVersions() bool {
	return slices.ContainsFunc(m.family, func(other *Model) bool { return other != m })
}

// Recency compares the rules of m with those of other results of At: the newer, the larger.
func (m *Model) Recency() int { return slices.Index(m.family, m) }

// At returns the model by the rules of another version of its engine, treated as MatchVersion says. It shares all
// files of m, and returns m itself if that version makes the same prompts. SetDynamo has an effect on m and on all
// that At returns.
//
// Errors: version is no version number.
func (m *Model) At(version string) (*Model, error) {
	i, _, err := matchRelease(m.options.Engine, version)
	if err != nil {
		return nil, err
	}
	return m.family[i], nil
}

// makeFamily makes the variants of m for the other versions of its engine.
func (m *Model) makeFamily() {
	all := releases[m.options.Engine]
	m.family = make([]*Model, len(all))
	for i, r := range all {
		if r.rules == m.release.rules && m.loadedAlike(i, m.release) {
			m.family[i] = m
			continue
		}
		for j := range i { // an earlier variant with the same rules
			if all[j].rules == r.rules && m.loadedAlike(i, all[j]) {
				m.family[i] = m.family[j]
			}
		}
		if m.family[i] == nil {
			variant := *m
			variant.release = r
			if m.loads != nil && m.loads[i].encoder != m.encoder || m.unknown != nil {
				variant.use(m.loads[i])
			}
			variant.native = variant.chooseNative()
			variant.chat, variant.chatTools = variant.withForm(m.chat), variant.withForm(m.chatTools)
			variant.messages = variant.probeMessages()
			m.family[i] = &variant
		}
	}
	for _, variant := range m.family {
		variant.family = m.family
	}
}

// loadedAlike reports whether the engine's release i loads the same tokenizer as another release.
func (m *Model) loadedAlike(i int, other release) bool {
	all := releases[m.options.Engine]
	return m.loads == nil || m.loads[i] == m.loads[slices.Index(all, other)]
}
