package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/pool/enginemetrics"
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

// engineGauges is what `kvepp serve` can be told of the engines' own metrics. The flags have the names of the Gateway
// API Inference Extension's endpoint picker.
type engineGauges struct {
	interval, stale time.Duration
	port            uint16
	path, scheme    string
	skipVerify      bool

	queued, running, usage string // metrics, as enginemetrics.ParseMetric reads them
}

// add declares the flags.
func (g *engineGauges) add(f *pflag.FlagSet) {
	f.DurationVar(
		&g.interval,
		"refresh-metrics-interval",
		5*time.Second,
		"how often each engine's own metrics are read, give or take a tenth; beside the requests' way. 0: never",
	)
	f.DurationVar(
		&g.stale,
		"metrics-staleness-threshold",
		0,
		"what an engine told longer ago counts as not known. 0: three times --refresh-metrics-interval",
	)
	f.Uint16Var(
		&g.port,
		"model-server-metrics-port",
		0,
		"`PORT` at which engines show them. 0: that of the endpoint's address. With Dynamo's frontends, which show "+
			"none: the workers' DYN_SYSTEM_PORT, where a worker has its frontend beside it. An endpoint's own "+
			"metrics: in the endpoints file goes before",
	)
	f.StringVar(&g.path, "model-server-metrics-path", "/metrics", "`PATH` of that page")
	f.StringVar(&g.scheme, "model-server-metrics-scheme", "http", "its scheme, `http or https`")
	f.BoolVar(
		&g.skipVerify,
		"model-server-metrics-https-insecure-skip-verify",
		true,
		"with https: do not check the engines' certificates",
	)
	f.StringVar(
		&g.queued,
		"total-queued-requests-metric",
		"",
		"which metric is the number of requests that wait, as `METRIC` or METRIC{LABEL=VALUE}. Default: vLLM's, "+
			"SGLang's, TensorRT-LLM's or Triton's, whichever there is",
	)
	f.StringVar(
		&g.running,
		"total-running-requests-metric",
		"",
		"which `METRIC` is the number of requests that are computed; likewise",
	)
	f.StringVar(
		&g.usage,
		"kv-cache-usage-percentage-metric",
		"",
		"which `METRIC` is the part of the KV blocks that requests hold, 0 to 1; likewise",
	)
}

// withoutPool is the name of the pool, in labels, where there is no InferencePool to have one.
const withoutPool = "kvepp"

// minInterval is the extension's own.
const minInterval = 50 * time.Millisecond

// config returns how the engines are read. Its Interval is 0 if they are not.
func (g *engineGauges) config() (enginemetrics.Config, error) {
	c := enginemetrics.Config{
		Interval:   g.interval,
		Stale:      g.stale,
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
	case g.stale != 0 && g.stale < g.interval:
		return c, fmt.Errorf(
			"--metrics-staleness-threshold %v is shorter than --refresh-metrics-interval %v, so that nothing would "+
				"be known most of the time; leave it out, or give 0",
			g.stale,
			g.interval,
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

// check says what is wrong with them.
func (g *engineGauges) check() error {
	_, err := g.config()
	return err
}
