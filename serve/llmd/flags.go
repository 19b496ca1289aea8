package llmd

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"kvepp/internal/flags"
	"kvepp/internal/suggest"
)

// Flag is a flag of llm-d's picker that kvepp serve does not have, or has in another form.
type Flag struct {
	Name    string
	kind    string // of kinds
	Verdict Verdict
	Says    string                            // what kvepp does
	follow  func(s *Seat, value string) error // nil: nothing follows from it
}

// Flags are those flags. Flags with the same name and meaning in kvepp serve are not among them.
var Flags = []Flag{
	{"config-file", "text", Maps, "the file of the EndpointPickerConfig",
		func(s *Seat, v string) error { s.file = v; return nil }},
	{"config-text", "text", Maps, "the EndpointPickerConfig", func(s *Seat, v string) error { s.text = v; return nil }},
	{"config-strict", "bool", Maps, "kvepp's own: refuses plugins that kvepp approximates or ignores",
		func(s *Seat, v string) error { s.strict = isTrue(v); return nil }},
	{"metrics-compat", "text", Maps,
		"kvepp's own: none, llm-d (llm_d_epp_*; the default), or all (also the older names)",
		func(s *Seat, v string) error {
			s.Compat = v
			return flags.OneOf("metrics-compat", v, compatNone, compatLLMD, compatAll)
		}},
	{"allow-experimental-plugins", "bool", Maps, "allows plugins of maturity alpha",
		func(s *Seat, v string) error { s.alpha = isTrue(v); return nil }},
	{"feature-gates", "text", Maps, "gates after those of the configuration",
		func(s *Seat, v string) error { s.gates = strings.Split(v, ","); return nil }},
	{"v", "int", Maps, "--log-level debug from 4 on", setLevel},
	{"zap-log-level", "text", Maps, "--log-level", setLevel},
	{"zap-encoder", "text", Maps, "--log-format", translate("log-format", "json=json console=text")},
	{"zap-devel", "bool", Approximated, "--log-level debug, --log-format text", func(s *Seat, v string) error {
		if isTrue(v) {
			s.Args = append(s.Args, "--log-level=debug", "--log-format=text")
		}
		return nil
	}},
	{"zap-stacktrace-level", "text", Ignored, "kvepp logs stack traces of panics only", nil},
	{"zap-time-encoding", "text", Ignored, "kvepp logs times in RFC 3339", nil},
	{"tracing", "bool", Maps, "false exports no spans; true exports them if OTEL_EXPORTER_OTLP_ENDPOINT is set",
		func(s *Seat, v string) error { s.NoTraces = !isTrue(v); return nil }},
	{"tls-min-version", "text", Maps, "--tls-min-version; VersionTLS10 and 11 mean 1.2 here",
		translate("tls-min-version",
			"VersionTLS10=1.2 VersionTLS11=1.2 VersionTLS12=1.2 VersionTLS13=1.3 1.2=1.2 1.3=1.3")},
	{"tls-cipher-suites", "text", Maps, "the cipher suites of TLS 1.2", setCipherSuites},
	{"total-queued-requests-metric", "text", Maps, "--engine-metrics queued=", engineMetric("queued")},
	{"total-running-requests-metric", "text", Maps, "--engine-metrics running=", engineMetric("running")},
	{"kv-cache-usage-percentage-metric", "text", Maps, "--engine-metrics usage=", engineMetric("usage")},
	{"lora-info-metric", "text", Maps, "--engine-metrics lora=", engineMetric("lora")},
	{"cache-info-metric", "text", Ignored, "kvepp reads block sizes of events and of the engines' pages", nil},
	{"disable-endpoint-subset-filter", "bool", Refused,
		"kvepp follows the subset of endpoints that the proxy names; let the proxy name none", nil},
	{"metrics-cert-dir", "text", Refused, sayPlain, nil},
	{"metrics-client-ca-file", "text", Refused, sayPlain, nil},
	{"emit-endpoint-scores", "bool", Approximated, "scores in the metadata are 1 / (1 + cost)",
		func(s *Seat, v string) error { s.Conventions.EndpointScores = isTrue(v); return nil }},
	{"grpc-max-recv-msg-size", "size", Ignored, "a message may have as many bytes as --max-parse-bytes needs", nil},
	{"grpc-max-send-msg-size", "size", Ignored, "kvepp cuts bodies into pieces", nil},
	{"enable-pprof", "bool", Ignored, "profiles are at --admin-address", nil},
	{"enable-cert-reload", "bool", Ignored, "kvepp always reads certificates again when they change", nil},
	{"health-checking", "bool", Ignored, "both ports always answer gRPC health checks", nil},
	{"enable-grpc-stream-metrics", "bool", Ignored, "kvepp_streams counts open streams", nil},
	{"metrics-staleness-threshold", "duration", Ignored,
		"an engine's metrics count for three times --refresh-metrics-interval", nil},
	{"refresh-prometheus-metrics-interval", "duration", Ignored, "kvepp computes metrics when they are scraped", nil},
	{"plugin-state-staleness-threshold", "duration", Ignored, "there are no plugins", nil},
	{"fairness-id-metric-label-limit", "int", Ignored, "no metric of kvepp has fairness ids as labels", nil},
}

const sayPlain = "kvepp serves metrics without TLS; leave it out, and let --metrics-endpoint-auth or " +
	"--metrics-token-file guard metrics"

func isTrue(value string) bool { yes, _ := strconv.ParseBool(value); return yes }

// obey does what an occurrence of a flag asks for.
func (s *Seat) obey(f *Flag, value string) error {
	if k := kinds[f.kind]; !k.takes(value) {
		return errors.New("must be " + k.must)
	}
	switch {
	case f.Verdict == Ignored:
		s.note("--%s is ignored: %s", f.Name, f.Says)
		return nil
	case f.Verdict != Refused:
		return f.follow(s, value)
	case value == "" || !isTrue(value) && f.kind == "bool":
		return nil
	}
	return errors.New(f.Says)
}

// translate returns what sets a flag of kvepp to the word that a value stands for, of VALUE=WORD. An empty value means
// the default.
func translate(flag, words string) func(*Seat, string) error {
	of := map[string]string{"": ""}
	for pair := range strings.FieldsSeq(words) {
		value, word, _ := strings.Cut(pair, "=")
		of[value] = word
	}
	return func(s *Seat, value string) error {
		word, known := of[value]
		if !known {
			all := slices.Sorted(maps.Keys(of))[1:]
			return fmt.Errorf("must be one of %s%s", strings.Join(all, ", "), suggest.DidYouMean(value, "", all))
		}
		if word != "" {
			s.Args = append(s.Args, "--"+flag+"="+word)
		}
		return nil
	}
}

// debugVerbosity is llm-d's -v from which it logs single requests.
const debugVerbosity = 4

func setLevel(s *Seat, value string) error {
	if n, err := strconv.Atoi(value); err == nil {
		value = ""
		if n >= debugVerbosity {
			value = "debug"
		}
	}
	return translate("log-level", "debug=debug info=info error=error panic=error")(s, value)
}

func setCipherSuites(s *Seat, value string) error {
	ids := map[string]uint16{}
	for _, suite := range tls.CipherSuites() {
		ids[suite.Name] = suite.ID
	}
	for name := range strings.FieldsSeq(strings.ReplaceAll(value, ",", " ")) {
		if ids[name] == 0 {
			return fmt.Errorf("%s is no safe cipher suite of Go%s", name,
				suggest.DidYouMean(name, "", slices.Sorted(maps.Keys(ids))))
		}
		s.CipherSuites = append(s.CipherSuites, ids[name])
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

// Help returns the help of kvepp in the place of llm-d's picker.
func Help() string {
	text := Command + `: /app/epp, or kvepp with flags and no command. It takes the flags of
llm-d's picker and those of kvepp serve ("kvepp serve --help-all"). These differ from kvepp serve's:

`
	for i := range Flags {
		text += fmt.Sprintf("  --%-36s %s: %s\n", Flags[i].Name, Flags[i].Verdict, Flags[i].Says)
	}
	return text
}
