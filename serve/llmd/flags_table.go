package llmd

import (
	"errors"
	"strings"

	"kvepp/internal/flags"
)

// Flag is a flag of llm-d's picker that kvepp serve does not have, or has in another form.
type Flag struct {
	Name    string
	Verdict Verdict
	Says    string // what kvepp does

	kind  kind
	short string                            // one letter
	apply func(s *Seat, value string) error // nil: nothing follows from it
}

// Flags are those flags. Flags with the same name and meaning in kvepp serve are not among them.
var Flags = []Flag{
	{Name: "config-file", Verdict: Maps, Says: "reads the EndpointPickerConfig in this file",
		apply: func(s *Seat, v string) error { s.config.file = v; return nil }},
	{Name: "config-text", Verdict: Maps, Says: "reads this EndpointPickerConfig",
		apply: func(s *Seat, v string) error { s.config.text = v; return nil }},
	{Name: "config-strict", kind: boolean, Verdict: Maps,
		Says:  "kvepp's own: refuses a configuration with plugins that kvepp approximates or ignores",
		apply: func(s *Seat, v string) error { s.strict = isTrue(v); return nil }},
	{Name: "metrics-compat", Verdict: Maps,
		Says: "kvepp's own: none, llm-d (llm_d_epp_*; the default), or all (also the older names)",
		apply: func(s *Seat, v string) error {
			s.Compat = v
			return flags.OneOf("metrics-compat", v, compatNone, compatLLMD, compatAll)
		}},
	{Name: "allow-experimental-plugins", kind: boolean, Verdict: Maps, Says: "allows plugins of maturity alpha",
		apply: func(s *Seat, v string) error { s.alpha = isTrue(v); return nil }},
	{Name: "feature-gates", Verdict: Maps, Says: "gates after those of the configuration",
		apply: func(s *Seat, v string) error { s.gates = strings.Split(v, ","); return nil }},
	{Name: "v", short: "v", kind: number, Verdict: Maps, Says: "--log-level debug from 4 on",
		apply: func(s *Seat, v string) error { return s.setVerbosity(v) }},
	{Name: "zap-log-level", Verdict: Maps, Says: "--log-level", apply: setZapLevel},
	{Name: "zap-encoder", Verdict: Maps, Says: "--log-format", apply: func(s *Seat, v string) error {
		return s.translate("log-format", v, map[string]string{"json": "json", "console": "text"})
	}},
	{Name: "zap-devel", kind: boolean, Verdict: Approximated, Says: "--log-level debug, --log-format text",
		apply: func(s *Seat, v string) error {
			if isTrue(v) {
				s.set("log-level", "debug")
				s.set("log-format", "text")
			}
			return nil
		}},
	{Name: "zap-stacktrace-level", Verdict: Ignored, Says: "kvepp logs stack traces of panics only"},
	{Name: "zap-time-encoding", Verdict: Ignored, Says: "kvepp logs times in RFC 3339"},
	{Name: "tracing", kind: boolean, Verdict: Maps,
		Says:  "false exports no spans; true exports them if OTEL_EXPORTER_OTLP_ENDPOINT is set",
		apply: func(s *Seat, v string) error { s.NoTraces = !isTrue(v); return nil }},
	{Name: "tls-min-version", Verdict: Maps, Says: "--tls-min-version; VersionTLS10 and 11 mean 1.2 here",
		apply: setTLSVersion},
	{Name: "tls-cipher-suites", Verdict: Maps, Says: "the cipher suites of TLS 1.2", apply: setCipherSuites},
	{Name: "total-queued-requests-metric", Verdict: Maps, Says: "--engine-metrics queued=",
		apply: engineMetric("queued")},
	{Name: "total-running-requests-metric", Verdict: Maps, Says: "--engine-metrics running=",
		apply: engineMetric("running")},
	{Name: "kv-cache-usage-percentage-metric", Verdict: Maps, Says: "--engine-metrics usage=",
		apply: engineMetric("usage")},
	{Name: "lora-info-metric", Verdict: Ignored, Says: "kvepp learns adapters from KV events and --lora"},
	{Name: "cache-info-metric", Verdict: Ignored, Says: "kvepp learns block sizes from KV events"},
	{Name: "disable-endpoint-subset-filter", kind: boolean, Verdict: Refused,
		Says: "true is refused: kvepp follows the subset of endpoints that the proxy names",
		apply: func(_ *Seat, v string) error {
			if isTrue(v) {
				return errors.New("kvepp follows the subset of endpoints that the proxy names; let the proxy name none")
			}
			return nil
		}},
	{Name: "metrics-cert-dir", Verdict: Refused, Says: "kvepp serves metrics without TLS", apply: noMetricsTLS},
	{Name: "metrics-client-ca-file", Verdict: Refused, Says: "kvepp serves metrics without TLS", apply: noMetricsTLS},
	{Name: "emit-endpoint-scores", kind: boolean, Verdict: Approximated,
		Says:  "scores in the metadata are 1 / (1 + cost)",
		apply: func(s *Seat, v string) error { s.EndpointScores = isTrue(v); return nil }},
	{Name: "grpc-max-recv-msg-size", kind: size, Verdict: Ignored,
		Says: "a message may have as many bytes as --max-parse-bytes needs"},
	{Name: "grpc-max-send-msg-size", kind: size, Verdict: Ignored, Says: "kvepp cuts bodies into pieces"},
	{Name: "enable-pprof", kind: boolean, Verdict: Ignored, Says: "profiles are at --admin-address"},
	{Name: "enable-cert-reload", kind: boolean, Verdict: Ignored,
		Says: "kvepp always reads certificates again when they change"},
	{Name: "health-checking", kind: boolean, Verdict: Ignored, Says: "both ports always answer gRPC health checks"},
	{Name: "enable-grpc-stream-metrics", kind: boolean, Verdict: Ignored, Says: "kvepp_streams counts open streams"},
	{Name: "metrics-staleness-threshold", kind: duration, Verdict: Ignored,
		Says: "an engine's metrics count for three times --refresh-metrics-interval"},
	{Name: "refresh-prometheus-metrics-interval", kind: duration, Verdict: Ignored,
		Says: "kvepp computes metrics when they are scraped"},
	{Name: "plugin-state-staleness-threshold", kind: duration, Verdict: Ignored, Says: "there are no plugins"},
	{Name: "fairness-id-metric-label-limit", kind: number, Verdict: Ignored,
		Says: "no metric of kvepp has fairness ids as labels"},
}
