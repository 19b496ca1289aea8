package enginemetrics

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// AddFlags declares the flags, which have the names of the Gateway API Inference Extension's endpoint picker. Interval
// may then be 0, for never.
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
	fs.StringVar(&c.waiting, "total-queued-requests-metric", "",
		"the engine's metric of waiting requests, as `METRIC` or METRIC{LABEL=VALUE}. Default: the one of vLLM, "+
			"SGLang, TensorRT-LLM or Triton that the page has")
	fs.StringVar(&c.running, "total-running-requests-metric", "",
		"the engine's `METRIC` of running requests; likewise")
	fs.StringVar(&c.usage, "kv-cache-usage-percentage-metric", "",
		"the engine's `METRIC` of the part of the KV blocks that requests hold, 0 to 1; likewise")
}

// Flags are the names of the flags without effect if Interval is 0.
var Flags = []string{"model-server-metrics-port", "model-server-metrics-path",
	"model-server-metrics-scheme", "model-server-metrics-https-insecure-skip-verify", "total-queued-requests-metric",
	"total-running-requests-metric", "kv-cache-usage-percentage-metric"}

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
	for _, m := range []struct {
		flag, value string
		to          *Metric
	}{{"total-queued-requests-metric", c.waiting, &c.Waiting}, {"total-running-requests-metric", c.running, &c.Running},
		{"kv-cache-usage-percentage-metric", c.usage, &c.Usage}} {
		if m.value == "" {
			continue
		}
		var err error
		if *m.to, err = ParseMetric(m.value); err != nil {
			return fmt.Errorf("--%s: %w", m.flag, err)
		}
	}
	return nil
}
