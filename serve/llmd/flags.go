package llmd

import (
	"crypto/tls"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/internal/suggest"
)

// kind says which values a flag takes.
type kind int

const (
	text kind = iota
	boolean
	number
	duration
	size // bytes, such as 10MiB
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
	{Name: "emit-endpoint-scores", kind: boolean, Verdict: Refused,
		Says: "kvepp shows costs by --decision-headers and at /debug/decisions",
		apply: func(_ *Seat, v string) error {
			if isTrue(v) {
				return errors.New("kvepp writes no scores into metadata")
			}
			return nil
		}},
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

func flagNamed(name string) *Flag {
	i := slices.IndexFunc(Flags, func(f Flag) bool { return f.Name == name })
	if i < 0 {
		return nil
	}
	return &Flags[i]
}

// follow does what an occurrence of the flag asks for.
func (f *Flag) follow(s *Seat, value string) error {
	if err := f.kind.check(value); err != nil {
		return err
	}
	switch {
	case f.Verdict == Ignored:
		s.note("--%s is ignored: %s", f.Name, f.Says)
	case f.apply != nil:
		return f.apply(s, value)
	}
	return nil
}

var sizes = regexp.MustCompile(`^[0-9]+(\.[0-9]+)? ?([kKMGT]i?)?B?$`)

// check returns an error unless a flag of the kind takes the value.
func (k kind) check(value string) (err error) {
	switch k {
	case boolean:
		if _, err = strconv.ParseBool(value); err != nil {
			return errors.New("must be true or false")
		}
	case number:
		if _, err = strconv.Atoi(value); err != nil {
			return errors.New("must be a whole number")
		}
	case duration:
		if _, err = time.ParseDuration(value); err != nil {
			return errors.New("must be a duration with a unit, such as 50ms")
		}
	case size:
		if value != "" && !sizes.MatchString(value) {
			return errors.New("must be a number of bytes, such as 10MiB")
		}
	}
	return nil
}

func isTrue(value string) bool { yes, _ := strconv.ParseBool(value); return yes }

// translate sets a flag of kvepp to the word that a value stands for. An empty value means the default.
func (s *Seat) translate(flag, value string, words map[string]string) error {
	switch word, known := words[value]; {
	case known:
		s.set(flag, word)
	case value != "":
		all := make([]string, 0, len(words))
		for word := range words {
			all = append(all, word)
		}
		slices.Sort(all)
		return fmt.Errorf("must be one of %s%s", strings.Join(all, ", "), suggest.DidYouMean(value, "", all))
	}
	return nil
}

// debugVerbosity is llm-d's -v from which it logs single requests.
const debugVerbosity = 4

func (s *Seat) setVerbosity(value string) error {
	if n, err := strconv.Atoi(value); err == nil && n >= debugVerbosity {
		s.set("log-level", "debug")
	}
	return nil
}

func setZapLevel(s *Seat, value string) error {
	if _, err := strconv.Atoi(value); err == nil {
		return s.setVerbosity(value)
	}
	return s.translate("log-level", value, map[string]string{"debug": "debug", "info": "info", "error": "error",
		"panic": "error"})
}

func setTLSVersion(s *Seat, value string) error {
	return s.translate("tls-min-version", value, map[string]string{"VersionTLS10": "1.2", "VersionTLS11": "1.2",
		"VersionTLS12": "1.2", "VersionTLS13": "1.3", "1.2": "1.2", "1.3": "1.3"})
}

func setCipherSuites(s *Seat, value string) error {
	ids, names := map[string]uint16{}, []string{}
	for _, suite := range tls.CipherSuites() {
		ids[suite.Name] = suite.ID
		names = append(names, suite.Name)
	}
	for name := range strings.SplitSeq(value, ",") {
		name = strings.TrimSpace(name)
		if ids[name] == 0 && name != "" {
			return fmt.Errorf("%s is no safe cipher suite of Go%s", name, suggest.DidYouMean(name, "", names))
		}
		if name != "" {
			s.CipherSuites = append(s.CipherSuites, ids[name])
		}
	}
	return nil
}

// engineMetric returns what sets a quantity of --engine-metrics.
func engineMetric(quantity string) func(*Seat, string) error {
	return func(s *Seat, value string) error {
		if value != "" {
			s.metrics = append(s.metrics, quantity+"="+value)
		}
		return nil
	}
}

func noMetricsTLS(_ *Seat, value string) error {
	if value != "" {
		return errors.New("kvepp serves metrics without TLS; leave it out, and let --metrics-endpoint-auth or " +
			"--metrics-token-file guard metrics")
	}
	return nil
}

// Help returns the help of kvepp in the place of llm-d's picker.
func Help() string {
	var text strings.Builder
	text.WriteString(Command + `: /app/epp, or kvepp with flags and no command. It takes the flags of
llm-d's picker and those of kvepp serve ("kvepp serve --help-all"). These differ from kvepp serve's:

`)
	for i := range Flags {
		fmt.Fprintf(&text, "  --%-36s %s: %s\n", Flags[i].Name, Flags[i].Verdict, Flags[i].Says)
	}
	return text.String()
}
