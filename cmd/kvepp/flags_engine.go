package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
)

// promptFlags are flags of the engines that change prompts; kvepp takes them with the same values. `kvepp serve` and
// `kvepp tokenize` have them.
type promptFlags struct {
	engineVersion             string
	chatTemplate              string
	chatTemplateContentFormat string
	defaultChatTemplateKwargs string
	trustRequestChatTemplate  bool
	excludeTools              bool
	tokenizerMode             string
	reasoningEffortMap        string
	disabledThinkingEffort    string
	hfChatTemplateName        string
	dynamoRuntimeConfig       string
}

func (p *promptFlags) add(f *pflag.FlagSet) {
	f.StringVar(&p.engineVersion, "engine-version", autoVersion,
		"`VERSION` of the engine, such as 0.5.23, whose rules are followed. auto: kvepp serve asks each engine, "+
			"unless --refresh-metrics-interval is 0, and takes the newest tested version for engines that do not "+
			"answer. The key engineVersion of an endpoint in the endpoints file takes precedence. docs/engines.md "+
			"lists the tested versions")
	f.StringVar(&p.chatTemplate, "chat-template", "",
		"chat template `FILE` in place of the model folder's, for every --model; give the engine's value")
	f.StringVar(&p.chatTemplateContentFormat, "chat-template-content-format", "auto",
		"`FORMAT` of message content in templates: auto, string or openai; give the engine's value")
	values(f, "chat-template-content-format", prompt.ContentAuto, prompt.ContentString, prompt.ContentOpenAI)
	f.StringVar(&p.defaultChatTemplateKwargs, "default-chat-template-kwargs", "",
		"template variables as a `JSON` object for requests that do not set them, such as {\"enable_thinking\": "+
			"false}; give the engine's value")
	f.BoolVar(&p.trustRequestChatTemplate, "trust-request-chat-template", false,
		"render the chat templates that requests bring; give it if the engine has it. Off: kvepp routes such requests "+
			"by load")
	f.StringVar(&p.dynamoRuntimeConfig, "dynamo-runtime-config", "",
		"with --engine dynamo, what the workers' model cards say about parsers, thinking and tools: a `JSON` object "+
			"like a card's runtime_config, such as {\"reasoning_parser\": \"kimi_k25\"}. Cards that kvepp reads by "+
			"--dynamo-discovery take precedence")
	f.BoolVar(&p.excludeTools, "exclude-tools-when-tool-choice-none", false,
		"leave tools out of the template if tool_choice is none; give it if vLLM has it")
	f.StringVar(&p.reasoningEffortMap, "reasoning-effort-map", "",
		"the template's value for a request's reasoning_effort: a `JSON` object such as {\"max\": \"high\"}; give "+
			"vLLM's value")
	f.StringVar(&p.disabledThinkingEffort, "anthropic-disabled-thinking-effort", "auto",
		"the reasoning `EFFORT` that stands for disabled thinking in /v1/messages; give vLLM's value")
	f.StringVar(&p.tokenizerMode, "tokenizer-mode", prompt.TokenizerAuto,
		"which of a model folder's tokenizers to use: auto (Mistral's own, if the folder also has Mistral's own "+
			"weights), hf or mistral; give vLLM's value, and auto for its other `MODE`s")
	values(f, "tokenizer-mode", prompt.TokenizerAuto, prompt.TokenizerHF, prompt.TokenizerMistral)
	f.StringVar(&p.hfChatTemplateName, "hf-chat-template-name", "",
		"`NAME` of the chat template, if the model's folder has several; give SGLang's value. Empty: the first")
}

// autoVersion is the value of --engine-version that leaves the version to the engines.
const autoVersion = "auto"

// options returns how the engine serves its models.
func (p *promptFlags) options(engine prompt.Engine) (prompt.Options, error) {
	o := prompt.Options{
		Engine:                         engine,
		ChatTemplate:                   p.chatTemplate,
		ChatTemplateContentFormat:      p.chatTemplateContentFormat,
		DefaultChatTemplateKwargs:      p.defaultChatTemplateKwargs,
		TokenizerMode:                  p.tokenizerMode,
		RequestChatTemplate:            p.trustRequestChatTemplate,
		ExcludeToolsWhenToolChoiceNone: p.excludeTools,
		ReasoningEffortMap:             p.reasoningEffortMap,
		HFChatTemplateName:             p.hfChatTemplateName,
	}
	if p.engineVersion != autoVersion {
		if _, _, err := prompt.MatchVersion(engine, p.engineVersion); err != nil {
			return o, fmt.Errorf("--engine-version %s: give auto, or a version such as %s", p.engineVersion,
				strings.Join(prompt.Versions(engine), ", "))
		}
		o.Version = p.engineVersion
	}
	if p.disabledThinkingEffort != "auto" {
		o.AnthropicDisabledThinkingEffort = p.disabledThinkingEffort
	}
	switch {
	case o.AnthropicDisabledThinkingEffort != "" && engine != prompt.VLLM:
		return o, errors.New("--anthropic-disabled-thinking-effort is vLLM's flag: it needs --engine vllm")
	case p.excludeTools && engine != prompt.VLLM:
		return o, errors.New("--exclude-tools-when-tool-choice-none is vLLM's flag: it needs --engine vllm")
	case p.reasoningEffortMap != "" && engine != prompt.VLLM:
		return o, errors.New("--reasoning-effort-map is vLLM's flag: it needs --engine vllm")
	case p.tokenizerMode != prompt.TokenizerAuto && engine != prompt.VLLM:
		return o, errors.New("--tokenizer-mode is vLLM's flag: it needs --engine vllm")
	case p.hfChatTemplateName != "" && engine != prompt.SGLang:
		return o, errors.New("--hf-chat-template-name is SGLang's flag: it needs --engine sglang")
	case p.dynamoRuntimeConfig != "" && engine != prompt.Dynamo:
		return o, errors.New("--dynamo-runtime-config is about Dynamo's frontends: it needs --engine dynamo")
	}
	var err error
	if o.Dynamo, err = prompt.ParseDynamoSettings([]byte(p.dynamoRuntimeConfig)); err != nil {
		return o, fmt.Errorf("--dynamo-runtime-config: %w", err)
	}
	return o, errors.Join(
		oneOf("chat-template-content-format", p.chatTemplateContentFormat, prompt.ContentAuto,
			prompt.ContentString, prompt.ContentOpenAI),
		oneOf("tokenizer-mode", p.tokenizerMode, prompt.TokenizerAuto, prompt.TokenizerHF,
			prompt.TokenizerMistral),
	)
}

// engineGauges are the flags of `kvepp serve` about the engines' own metrics. They have the names of the Gateway API
// Inference Extension's endpoint picker.
type engineGauges struct {
	interval     time.Duration
	port         uint16
	path, scheme string
	skipVerify   bool

	queued, running, usage string // metrics, as enginemetrics.ParseMetric reads them
}

func (g *engineGauges) add(f *pflag.FlagSet) {
	f.DurationVar(&g.interval, "refresh-metrics-interval", 5*time.Second,
		"how often kvepp scrapes each engine's metrics, give or take a tenth; no request waits for it. 0: never")
	f.Uint16Var(&g.port, "model-server-metrics-port", 0,
		"`PORT` of the engines' metrics. 0: the port of the endpoint's address. For Dynamo's frontends, which show "+
			"none, give the workers' DYN_SYSTEM_PORT if each worker has its frontend beside it. The key metrics of an "+
			"endpoint in the endpoints file takes precedence")
	f.StringVar(&g.path, "model-server-metrics-path", "/metrics", "`PATH` of the engines' metrics")
	f.StringVar(&g.scheme, "model-server-metrics-scheme", "http", "`SCHEME` of the engines' metrics: http or https")
	values(f, "model-server-metrics-scheme", "http", "https")
	f.BoolVar(&g.skipVerify, "model-server-metrics-https-insecure-skip-verify", true,
		"with https: do not verify the engines' certificates")
	f.StringVar(&g.queued, "total-queued-requests-metric", "",
		"the engine's metric of waiting requests, as `METRIC` or METRIC{LABEL=VALUE}. Default: the one of vLLM, "+
			"SGLang, TensorRT-LLM or Triton that the page has")
	f.StringVar(&g.running, "total-running-requests-metric", "",
		"the engine's `METRIC` of running requests; likewise")
	f.StringVar(&g.usage, "kv-cache-usage-percentage-metric", "",
		"the engine's `METRIC` of the part of the KV blocks that requests hold, 0 to 1; likewise")
}

// minInterval is the least --refresh-metrics-interval. Source: GAIE's endpoint picker.
const minInterval = 50 * time.Millisecond

// config returns how kvepp scrapes the engines. Its Interval is 0 if kvepp does not.
func (g *engineGauges) config() (enginemetrics.Config, error) {
	c := enginemetrics.Config{
		Interval:   g.interval,
		Scheme:     g.scheme,
		Port:       g.port,
		Path:       g.path,
		SkipVerify: g.skipVerify,
	}
	switch {
	case g.interval != 0 && g.interval < minInterval:
		return c, fmt.Errorf(
			"--refresh-metrics-interval %v: must be at least %v, for example 5s, or 0 for never",
			g.interval,
			minInterval,
		)
	case !strings.HasPrefix(g.path, "/"):
		return c, errors.New("--model-server-metrics-path must begin with a slash")
	}
	if err := oneOf("model-server-metrics-scheme", g.scheme, "http", "https"); err != nil {
		return c, err
	}
	for _, m := range []struct {
		flag, value string
		to          *enginemetrics.Metric
	}{{"total-queued-requests-metric", g.queued, &c.Waiting}, {"total-running-requests-metric", g.running, &c.Running},
		{"kv-cache-usage-percentage-metric", g.usage, &c.Usage}} {
		if m.value == "" {
			continue
		}
		var err error
		if *m.to, err = enginemetrics.ParseMetric(m.value); err != nil {
			return c, fmt.Errorf("--%s: %w", m.flag, err)
		}
	}
	return c, nil
}

// unused adds the flags that have no effect because kvepp never scrapes engines.
func (g *engineGauges) unused(unused *flags.Unused) {
	if g.interval == 0 {
		unused.Add(
			"with --refresh-metrics-interval=0 kvepp never reads engines' metrics",
			"model-server-metrics-port",
			"model-server-metrics-path",
			"model-server-metrics-scheme",
			"model-server-metrics-https-insecure-skip-verify",
			"total-queued-requests-metric",
			"total-running-requests-metric",
			"kv-cache-usage-percentage-metric",
		)
	}
}
