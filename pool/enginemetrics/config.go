package enginemetrics

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// AddFlags declares the flags. All but --engine-metrics have the names of the Gateway API Inference Extension's
// endpoint picker. Interval may then be 0, for never.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&c.Interval, "refresh-metrics-interval", 5*time.Second,
		"how often kvepp scrapes each engine's metrics, give or take a tenth; no request waits for it. 0: never")
	fs.Uint16Var(&c.Port, "model-server-metrics-port", 0,
		"`PORT` of the engines' metrics. 0: the port of the endpoint's address. For Dynamo's frontends, which show "+
			"none, give the workers' DYN_SYSTEM_PORT if each worker has its frontend beside it. The key metrics of an "+
			"endpoint in the endpoints file takes precedence")
	fs.StringVar(&c.Path, "model-server-metrics-path", "/metrics", "`PATH` of the engines' metrics")
	flags.Choice(fs, &c.Scheme, "model-server-metrics-scheme", "http",
		"`SCHEME` of the engines' metrics: http or https", "http", "https")
	fs.BoolVar(&c.SkipVerify, "model-server-metrics-https-insecure-skip-verify", true,
		"with https: do not verify the engines' certificates")
	fs.StringVar(&c.metrics, "engine-metrics", "",
		"the engines' metrics of waiting requests, of running ones, of the part of the KV blocks that requests hold "+
			"(0 to 1), and of LoRA adapters in use, `queued=NAME,running=NAME,usage=NAME,lora=NAME`; NAME may be "+
			"NAME{LABEL=VALUE}. For one that is left out: the metric of vLLM, SGLang, TensorRT-LLM or Triton that the "+
			"page has")
}

// Flags are the names of the flags without effect if Interval is 0.
var Flags = []string{"model-server-metrics-port", "model-server-metrics-path",
	"model-server-metrics-scheme", "model-server-metrics-https-insecure-skip-verify", "engine-metrics"}

// minInterval is the least --refresh-metrics-interval. Source: GAIE's endpoint picker.
const minInterval = 50 * time.Millisecond

// Validate reads the metrics that flags name, and returns an error for the first invalid flag.
func (c *Config) Validate() error {
	switch {
	case c.Interval != 0 && c.Interval < minInterval:
		return fmt.Errorf("--refresh-metrics-interval %v: must be at least %v, for example 5s, or 0 for never",
			c.Interval, minInterval)
	case !strings.HasPrefix(c.Path, "/"):
		return errors.New("--model-server-metrics-path must begin with a slash")
	}
	if c.metrics == "" {
		return nil
	}
	quantities := map[string]*Metric{"queued": &c.Waiting, "running": &c.Running, "usage": &c.Usage, "lora": &c.LoRA}
	for given := range strings.SplitSeq(c.metrics, ",") {
		key, value, _ := strings.Cut(given, "=")
		to := quantities[strings.TrimSpace(key)]
		if to == nil {
			return fmt.Errorf("--engine-metrics %q: each part must be queued=NAME, running=NAME, usage=NAME or "+
				"lora=NAME, and only one of each", given)
		}
		delete(quantities, strings.TrimSpace(key))
		var err error
		if *to, err = ParseMetric(value); err != nil {
			return fmt.Errorf("--engine-metrics: %w", err)
		}
	}
	return nil
}
