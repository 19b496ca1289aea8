package prompt

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/suggest"
)

// Config are Options as flags: those of the engines that change prompts, which kvepp takes with the same values.
// Validate completes the Options.
type Config struct {
	Options
	version, runtime, engineArgs string // --engine-version, --dynamo-runtime-config, --engine-args

	own, engine *pflag.FlagSet // kvepp's flags, and those that --engine-args takes
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
	fs.StringVar(&c.DefaultChatTemplateKwargs, "default-chat-template-kwargs", "",
		"template variables as a `JSON` object for requests that do not set them, such as {\"enable_thinking\": "+
			"false}; give the engine's value")
	fs.StringVar(&c.runtime, "dynamo-runtime-config", "",
		"with --engine dynamo, what the workers' model cards say about parsers, thinking and tools: a `JSON` object "+
			"like a card's runtime_config, such as {\"reasoning_parser\": \"kimi_k25\"}. Cards that kvepp reads by "+
			"--dynamo-discovery take precedence")
	c.own, c.engine = fs, flags.New("--engine-args")
	c.addEngineArgs(c.engine)
	fs.StringVar(&c.engineArgs, "engine-args", "",
		"those of the engine's own arguments that change prompts, as on its command line, such as "+
			"\"--tokenizer-mode mistral\". Of the engine's arguments kvepp takes only these:\n"+flags.Lines(c.engine))
}

// addEngineArgs declares the engines' arguments that --engine-args takes.
func (c *Config) addEngineArgs(fs *pflag.FlagSet) {
	flags.Choice(fs, &c.ChatTemplateContentFormat, "chat-template-content-format", ContentAuto,
		"`FORMAT` of message content in templates: auto, string or openai; give the engine's value",
		ContentAuto, ContentString, ContentOpenAI)
	fs.BoolVar(&c.RequestChatTemplate, "trust-request-chat-template", false,
		"render the chat templates that requests bring; give it if the engine has it. Off: kvepp routes such requests "+
			"by load")
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

// parseEngineArgs reads --engine-args.
func (c *Config) parseEngineArgs() error {
	words, err := splitWords(c.engineArgs)
	if err != nil {
		return err
	}
	err = flags.Parse(c.engine, words, nil, nil, func(name string) error {
		if c.own.Lookup(name) != nil {
			return fmt.Errorf("--%s is a flag of kvepp; write it outside --engine-args", name)
		}
		var known []string
		for _, flag := range flags.Sections(c.engine)[0].Flags {
			known = append(known, flag.Name)
		}
		return fmt.Errorf("of the engine's arguments kvepp takes only --%s; leave out the others%s",
			strings.Join(known, ", --"), suggest.DidYouMean(name, "--", known))
	})
	if errors.Is(err, pflag.ErrHelp) { // which would show kvepp's help and end with status 0
		return errors.New("takes no --help; kvepp's help lists what it takes")
	}
	return err
}

// splitWords splits a text into words as a shell does, with its two kinds of quotes and the backslash.
func splitWords(text string) (words []string, err error) {
	var word []rune
	var quote rune // the quote that is open; 0: none
	begun, escaped := false, false
	for _, r := range text {
		switch {
		case escaped:
			word, escaped = append(word, r), false
		case r == '\\' && quote != '\'':
			begun, escaped = true, true
		case r == quote:
			quote = 0
		case quote == 0 && (r == '"' || r == '\''):
			begun, quote = true, r
		case quote == 0 && unicode.IsSpace(r):
			if begun {
				words = append(words, string(word))
			}
			word, begun = nil, false
		default:
			word, begun = append(word, r), true
		}
	}
	if quote != 0 || escaped {
		return nil, errors.New("ends inside a quote or behind a backslash")
	}
	if begun {
		words = append(words, string(word))
	}
	return words, nil
}

// Validate completes the Options, and returns an error for a flag that is invalid or another engine's. Engine must be
// set.
func (c *Config) Validate() (err error) {
	if c.engineArgs != "" {
		if err := c.parseEngineArgs(); err != nil {
			return fmt.Errorf("--engine-args: %w", err)
		}
	}
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
			return fmt.Errorf("--engine-args: --%s is vLLM's flag: it needs --engine vllm", of.flag)
		}
	}
	switch {
	case c.HFChatTemplateName != "" && c.Engine != SGLang:
		return errors.New("--engine-args: --hf-chat-template-name is SGLang's flag: it needs --engine sglang")
	case c.runtime != "" && c.Engine != Dynamo:
		return errors.New("--dynamo-runtime-config is about Dynamo's frontends: it needs --engine dynamo")
	}
	if c.Dynamo, err = ParseDynamoSettings([]byte(c.runtime)); err != nil {
		return fmt.Errorf("--dynamo-runtime-config: %w", err)
	}
	return nil
}
