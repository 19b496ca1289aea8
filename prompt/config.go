package prompt

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// Config are Options as flags: those of the engines that change prompts, which kvepp takes with the same values.
// Validate completes the Options.
type Config struct {
	Options
	version, runtime string // --engine-version, --dynamo-runtime-config
}

// autoVersion is the value of --engine-version that leaves the version to the engines.
const autoVersion = "auto"

// EngineNames returns the names of the engines, the default first.
func EngineNames() (names []string) {
	for _, e := range Engines {
		names = append(names, string(e))
	}
	return names
}

// AddFlags declares the flags, without --engine.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.version, "engine-version", autoVersion,
		"`VERSION` of the engine, such as 0.5.23, whose rules are followed. auto: kvepp serve asks each engine, "+
			"unless --refresh-metrics-interval is 0, and takes the newest tested version for engines that do not "+
			"answer. The key engineVersion of an endpoint in the endpoints file takes precedence. docs/engines.md "+
			"lists the tested versions")
	fs.StringVar(&c.ChatTemplate, "chat-template", "",
		"chat template `FILE` in place of the model folder's, for every --model; give the engine's value")
	flags.Choice(fs, &c.ChatTemplateContentFormat, "chat-template-content-format", ContentAuto,
		"`FORMAT` of message content in templates: auto, string or openai; give the engine's value",
		ContentAuto, ContentString, ContentOpenAI)
	fs.StringVar(&c.DefaultChatTemplateKwargs, "default-chat-template-kwargs", "",
		"template variables as a `JSON` object for requests that do not set them, such as {\"enable_thinking\": "+
			"false}; give the engine's value")
	fs.BoolVar(&c.RequestChatTemplate, "trust-request-chat-template", false,
		"render the chat templates that requests bring; give it if the engine has it. Off: kvepp routes such requests "+
			"by load")
	fs.StringVar(&c.runtime, "dynamo-runtime-config", "",
		"with --engine dynamo, what the workers' model cards say about parsers, thinking and tools: a `JSON` object "+
			"like a card's runtime_config, such as {\"reasoning_parser\": \"kimi_k25\"}. Cards that kvepp reads by "+
			"--dynamo-discovery take precedence")
	fs.BoolVar(&c.ExcludeToolsWhenToolChoiceNone, "exclude-tools-when-tool-choice-none", false,
		"leave tools out of the template if tool_choice is none; give it if vLLM has it")
	fs.StringVar(&c.ReasoningEffortMap, "reasoning-effort-map", "",
		"the template's value for a request's reasoning_effort: a `JSON` object such as {\"max\": \"high\"}; give "+
			"vLLM's value")
	fs.StringVar(&c.AnthropicDisabledThinkingEffort, "anthropic-disabled-thinking-effort", autoEffort,
		"the reasoning `EFFORT` that stands for disabled thinking in /v1/messages; give vLLM's value")
	flags.Choice(fs, &c.TokenizerMode, "tokenizer-mode", TokenizerAuto,
		"which of a model folder's tokenizers to use: auto (Mistral's own, if the folder also has Mistral's own "+
			"weights), hf or mistral; give vLLM's value, and auto for its other `MODE`s",
		TokenizerAuto, TokenizerHF, TokenizerMistral)
	fs.StringVar(&c.HFChatTemplateName, "hf-chat-template-name", "",
		"`NAME` of the chat template, if the model's folder has several; give SGLang's value. Empty: the first")
}

// Validate completes the Options, and returns an error for a flag that is invalid or another engine's. Engine must be
// set.
func (c *Config) Validate() (err error) {
	if c.version != autoVersion {
		if _, _, err := MatchVersion(c.Engine, c.version); err != nil {
			return fmt.Errorf("--engine-version %s: give auto, or a version such as %s", c.version,
				strings.Join(Versions(c.Engine), ", "))
		}
		c.Version = c.version
	}
	for _, of := range []struct {
		flag  string
		given bool
	}{
		{"anthropic-disabled-thinking-effort", c.AnthropicDisabledThinkingEffort != autoEffort},
		{"exclude-tools-when-tool-choice-none", c.ExcludeToolsWhenToolChoiceNone},
		{"reasoning-effort-map", c.ReasoningEffortMap != ""},
		{"tokenizer-mode", c.TokenizerMode != TokenizerAuto},
	} {
		if of.given && c.Engine != VLLM {
			return fmt.Errorf("--%s is vLLM's flag: it needs --engine vllm", of.flag)
		}
	}
	switch {
	case c.HFChatTemplateName != "" && c.Engine != SGLang:
		return errors.New("--hf-chat-template-name is SGLang's flag: it needs --engine sglang")
	case c.runtime != "" && c.Engine != Dynamo:
		return errors.New("--dynamo-runtime-config is about Dynamo's frontends: it needs --engine dynamo")
	}
	if c.Dynamo, err = ParseDynamoSettings([]byte(c.runtime)); err != nil {
		return fmt.Errorf("--dynamo-runtime-config: %w", err)
	}
	return nil
}
