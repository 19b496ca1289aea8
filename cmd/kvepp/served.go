package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"kvepp/tokenizer"
)

// served are the flags that repeat to kvepp what the engine was told about prompts. `kvepp serve` and `kvepp tokenize`
// have them.
type served struct {
	chatTemplate              string
	chatTemplateContentFormat string
	defaultChatTemplateKwargs string
	trustRequestChatTemplate  bool
	excludeTools              bool
	reasoningEffortMap        string
	disabledThinkingEffort    string
	hfChatTemplateName        string
	dynamoRuntimeConfig       string
}

func (s *served) add(f *pflag.FlagSet) {
	f.StringVar(
		&s.chatTemplate,
		"chat-template",
		"",
		"chat template `FILE` in place of the model folder's, as given to the engine; for every --model",
	)
	f.StringVar(
		&s.chatTemplateContentFormat,
		"chat-template-content-format",
		"auto",
		"`FORMAT` of message content in templates, as given to the engine: auto, string or openai",
	)
	f.StringVar(
		&s.defaultChatTemplateKwargs,
		"default-chat-template-kwargs",
		"",
		"template variables as a `JSON` object for requests that do not give them, as given to the engine, such as "+
			"{\"enable_thinking\": false}",
	)
	f.BoolVar(
		&s.trustRequestChatTemplate,
		"trust-request-chat-template",
		false,
		"render the chat templates that requests bring, as the engine with this flag does. Off: such requests are "+
			"routed by load",
	)
	f.StringVar(
		&s.dynamoRuntimeConfig,
		"dynamo-runtime-config",
		"",
		"with --engine dynamo, what the workers' model cards say of parsers, thinking and tools: a `JSON` object "+
			"like a card's runtime_config, such as {\"reasoning_parser\": \"kimi_k25\"}. Cards that are read by "+
			"--dynamo-discovery come before it",
	)
	f.BoolVar(
		&s.excludeTools,
		"exclude-tools-when-tool-choice-none",
		false,
		"tools do not reach the template when tool_choice is none, as given to vLLM",
	)
	f.StringVar(
		&s.reasoningEffortMap,
		"reasoning-effort-map",
		"",
		"what the template gets for a request's reasoning_effort, as given to vLLM: a `JSON` object such as "+
			"{\"max\": \"high\"}",
	)
	f.StringVar(
		&s.disabledThinkingEffort,
		"anthropic-disabled-thinking-effort",
		"auto",
		"reasoning `EFFORT` that stands for disabled thinking in /v1/messages, as given to vLLM",
	)
	f.StringVar(
		&s.hfChatTemplateName,
		"hf-chat-template-name",
		"",
		"`NAME` of the chat template among several in the model's folder, as given to SGLang. Absent: the first",
	)
}

// options says how the engine serves its models.
func (s *served) options(engine tokenizer.Engine) (tokenizer.Options, error) {
	o := tokenizer.Options{
		Engine:                         engine,
		ChatTemplate:                   s.chatTemplate,
		ChatTemplateContentFormat:      s.chatTemplateContentFormat,
		DefaultChatTemplateKwargs:      s.defaultChatTemplateKwargs,
		RequestChatTemplate:            s.trustRequestChatTemplate,
		ExcludeToolsWhenToolChoiceNone: s.excludeTools,
		ReasoningEffortMap:             s.reasoningEffortMap,
		HFChatTemplateName:             s.hfChatTemplateName,
	}
	if s.disabledThinkingEffort != "auto" {
		o.AnthropicDisabledThinkingEffort = s.disabledThinkingEffort
	}
	switch {
	case o.AnthropicDisabledThinkingEffort != "" && engine != tokenizer.VLLM:
		return o, errors.New("--anthropic-disabled-thinking-effort is vLLM's flag: it needs --engine vllm")
	case s.excludeTools && engine != tokenizer.VLLM:
		return o, errors.New("--exclude-tools-when-tool-choice-none is vLLM's flag: it needs --engine vllm")
	case s.reasoningEffortMap != "" && engine != tokenizer.VLLM:
		return o, errors.New("--reasoning-effort-map is vLLM's flag: it needs --engine vllm")
	case s.hfChatTemplateName != "" && engine != tokenizer.SGLang:
		return o, errors.New("--hf-chat-template-name is SGLang's flag: it needs --engine sglang")
	case s.dynamoRuntimeConfig != "" && engine != tokenizer.Dynamo:
		return o, errors.New("--dynamo-runtime-config is about Dynamo's frontends: it needs --engine dynamo")
	}
	var err error
	if o.Dynamo, err = tokenizer.ParseDynamoSettings([]byte(s.dynamoRuntimeConfig)); err != nil {
		return o, fmt.Errorf("--dynamo-runtime-config: %w", err)
	}
	return o, oneOf(
		"chat-template-content-format",
		s.chatTemplateContentFormat,
		tokenizer.ContentAuto,
		tokenizer.ContentString,
		tokenizer.ContentOpenAI,
	)
}
