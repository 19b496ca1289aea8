package main

import (
	"bytes"
	"strings"
	"testing"
)

const tiny = "../../test/models/tiny-bytelevel"

func runTokenize(t *testing.T, input string, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(
		append([]string{"tokenize"}, args...),
		strings.NewReader(input),
		&out,
		&errs,
		func(string) string { return "" },
	)
	return out.String(), errs.String(), status
}

func TestTokenizeErrors(t *testing.T) {
	for _, c := range []struct {
		input string
		args  []string
		code  int
		says  string
	}{
		{"", nil, 2, "--model-path"},
		{"", []string{"--model-path", tiny, "x"}, 2, "standard input"},
		{"", []string{"--model-path", tiny, "--engine", "other"}, 2, "vllm"},
		{"", []string{"--model-path", tiny, "--api", "chats"}, 2, "chat, completions"},
		{"", []string{"--model-path", tiny, "--api", "chat", "--text"}, 2, "--text"},
		{"", []string{"--model-path", tiny, "--blocks"}, 2, "--kv-cache-block-size"},
		{"", []string{"--model-path", tiny, "--lora", "x"}, 2, "--blocks"},
		{"", []string{"--model-path", tiny, "--engine", "sglang", "--engine-args", "--reasoning-effort-map {}"}, 2,
			"vLLM's flag"},
		{"", []string{"--model-path", tiny, "--engine", "sglang", "--engine-args",
			"--exclude-tools-when-tool-choice-none"}, 2,
			"vLLM's flag"},
		{"", []string{"--model-path", tiny, "--engine", "dynamo", "--engine-args",
			"--anthropic-disabled-thinking-effort low"}, 2, "vLLM's flag"},
		{"", []string{"--model-path", tiny, "--engine-args", "--anthropic-disabled-thinking-effort minimal"}, 1,
			"vLLM does not take the effort"},
		{"", []string{"--model-path", tiny, "--engine", "sglang", "--engine-args", "--tokenizer-mode hf"}, 2,
			"vLLM's flag"},
		{"", []string{"--model-path", tiny, "--engine-args", "--tokenizer-mode slow"}, 2, "tokenizer-mode"},
		{"", []string{"--model-path", tiny, "--engine-args", "--tokenizer-mode mistral"}, 1,
			"tekken.json: no such file"},
		{"", []string{"--model-path", tiny, "--engine-args", "--hf-chat-template-name x"}, 2, "SGLang's flag"},
		{"", []string{"--model-path", tiny, "--dynamo-runtime-config", "{}"}, 2, "--engine dynamo"},
		{"", []string{"--model-path", tiny, "--engine-args", `--reasoning-effort-map '{"x":"y"}'`}, 1, "none of"},
		{"", []string{"--model-path", tiny, "--engine-args", `--reasoning-effort-map '{"max":1}'`}, 1,
			`reasoning effort map: a JSON number is in the wrong place; write an object such as {"max": "high"}`},
		{"", []string{"--model-path", tiny, "--engine-args", `--reasoning-effort-map "{\"max\":1}"`}, 1, "JSON number"},
		{"", []string{"--model-path", tiny, "--engine-args", "--reasoning-effort-map '{}"}, 2,
			"--engine-args: ends inside a quote"},
		{"", []string{"--model-path", tiny, "--engine-args", "--trust-request-chat-template true"}, 2,
			`unexpected argument "true"`},
		{"", []string{"--model-path", tiny, "--engine-args", "--tokenizer-mod hf"}, 2,
			"--engine-args: unknown flag --tokenizer-mod: of the engine's arguments kvepp takes only " +
				"--chat-template-content-format, --trust-request-chat-template, " +
				"--exclude-tools-when-tool-choice-none, --reasoning-effort-map, " +
				"--anthropic-disabled-thinking-effort, --tokenizer-mode, --hf-chat-template-name; leave out the " +
				"others; did you mean --tokenizer-mode?"},
		{"", []string{"--model-path", tiny, "--engine-args", "--help"}, 2, "takes no --help"},
		{"", []string{"--model-path", tiny, "--engine-args", "--chat-template x"}, 2,
			"--chat-template is a flag of kvepp; write it outside --engine-args"},
		{"", []string{"--model-path", tiny, "--tokenizer-mode", "hf"}, 2,
			`unknown flag --tokenizer-mode: write --engine-args "--tokenizer-mode MODE"`},
		{"", []string{"--model-path", "testdata/none"}, 1, "tokenizer.json"},
		{"{", []string{"--model-path", tiny}, 1, "not valid"},
		{`{"messages":[]}`, []string{"--model-path", tiny}, 1, "'model'"},
		{`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`,
			[]string{"--model-path", tiny}, 1, "routed by load"},
	} {
		if _, stderr, status := runTokenize(t, c.input, c.args...); status != c.code ||
			!strings.Contains(stderr, c.says) {
			t.Errorf("%v %q: status %d, %q; want %d and %q", c.args, c.input, status, stderr, c.code, c.says)
		}
	}
	if stdout, _, status := runTokenize(t, "", "--help"); status != 0 || !strings.Contains(stdout, "--jsonl") ||
		!strings.Contains(stdout, "KVEPP_<FLAG>") {
		t.Errorf("--help: %d %s", status, stdout)
	}
}
