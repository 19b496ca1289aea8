package llmd

import (
	"crypto/tls"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// serveFlags are some flags of kvepp serve.
func serveFlags() *pflag.FlagSet {
	fs := pflag.NewFlagSet("kvepp serve", pflag.ContinueOnError)
	for _, name := range []string{"pool-name", "pool-namespace", "grpc-port", "log-level", "tls-min-version",
		"cert-path", "engine-metrics", "zap-encoder", "endpoint-target-ports", "model"} {
		fs.String(name, "", "")
	}
	fs.Bool("secure-serving", true, "")
	fs.Bool("router-kv-events", true, "")
	return fs
}

// byDefault is what llm-d's default configuration means.
const byDefault = "--router-kv-events=false --router-approximate-cache-policy=lru --kv-cache-block-size=64"

func TestArguments(t *testing.T) {
	for _, c := range []struct {
		args  string
		want  string
		notes []string // beginnings
	}{
		{"--pool-name p --pool-namespace=ns --zap-encoder json --v=2 -v 2", // llm-d's chart
			"--pool-name=p --pool-namespace=ns --log-format=json", nil},
		{"--pool-name p  --grpc-port 9002    ", "--pool-name=p --grpc-port=9002", nil}, // KServe's, with empty ones
		{"-v=5", "--log-level=debug", nil},
		{"-v4 word --zap-log-level=error", "--log-level=debug --log-level=error", []string{`argument "word"`}},
		{"--zap-log-level=4", "--log-level=debug", nil},
		{"--zap-log-level=2 --zap-devel=false", "", nil},
		{"--grpc-max-recv-msg-size 10MiB --grpc-max-send-msg-size=25MB", "",
			[]string{"--grpc-max-recv-msg-size is ignored", "--grpc-max-send-msg-size is ignored"}},
		{"--tls-min-version=VersionTLS13", "--tls-min-version=1.3", nil},
		{"--tls-min-version=VersionTLS10", "--tls-min-version=1.2", nil},
		{"--secure-serving --secure-serving=false --tls-min-version=VersionTLS12 --cert-path /c",
			"--secure-serving=true --secure-serving=false",
			[]string{"--tls-min-version=1.2 is ignored", "--cert-path=/c is ignored"}},
		{"--enable-pprof=true --enable-cert-reload", "",
			[]string{"--enable-pprof is ignored", "--enable-cert-reload is ignored"}},
		{"--total-queued-requests-metric a --kv-cache-usage-percentage-metric=b --total-running-requests-metric=",
			"--engine-metrics=queued=a,usage=b", nil},
		{"--metrics-cert-dir= --emit-endpoint-scores=false --disable-endpoint-subset-filter=false", "", nil},
		{"--refresh-prometheus-metrics-interval 5s --lora-info-metric=l --fairness-id-metric-label-limit=10",
			"--engine-metrics=lora=l", []string{"--refresh-prometheus", "--fairness-id"}},
		{"--model a=/a --model b=/b", "--model=a=/a --model=b=/b", nil}, // kvepp's own
		{"--allow-experimental-plugins --feature-gates=flowControl=false", "", nil},
		{"--pool-name p --zap-encoder json   --tracing=true --enable-cert-reload=true", // KServe's, with TLS
			"--pool-name=p --log-format=json", []string{"--enable-cert-reload is ignored"}},
	} {
		s, err := Translate(strings.Split(c.args, " "), serveFlags())
		if err != nil {
			t.Errorf("%s: %v", c.args, err)
			continue
		}
		got := strings.TrimSpace(strings.TrimPrefix(strings.Join(s.Args, " "), byDefault))
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.args, got, c.want)
		}
		if !slices.EqualFunc(s.Notes, c.notes, strings.HasPrefix) {
			t.Errorf("%s: notes %q, want %q", c.args, s.Notes, c.notes)
		}
	}
	for args, events := range map[string]bool{"": false, "--router-kv-events": true,
		"--router-kv-events=false": false} {
		s, err := Translate(strings.Fields(args), serveFlags())
		if err != nil || s.Events != events || !s.Others.Engines || !s.EstimateTokens {
			t.Errorf("%s: %+v, %v", args, s, err)
		}
	}
	s, err := Translate([]string{"--tracing=false", "--tls-cipher-suites",
		"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"}, serveFlags())
	if err != nil || !s.NoTraces || !slices.Equal(s.CipherSuites,
		[]uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}) {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestRefusedArguments(t *testing.T) {
	for args, says := range map[string]string{
		"--pool-nam p":                      "unknown flag --pool-nam; did you mean --pool-name?",
		"--enable-pprof=yes":                `--enable-pprof "yes": must be true or false`,
		"--v=high":                          "must be a whole number",
		"--grpc-max-recv-msg-size=ten":      "such as 10MiB",
		"--metrics-staleness-threshold=2":   "must be a duration with a unit",
		"--tls-min-version=VersionTLS14":    "must be one of 1.2, 1.3, VersionTLS10",
		"--tls-cipher-suites=TLS_NULL":      "TLS_NULL is no safe cipher suite",
		"--metrics-cert-dir=/certs":         "kvepp serves metrics without TLS",
		"--disable-endpoint-subset-filter":  "let the proxy name none",
		"--zap-encoder=yaml":                "must be one of console, json",
		"--config-file=/a --config-text=b:": "give one of the two",
		"--config-file":                     "--config-file needs a value",
	} {
		_, err := Translate(strings.Fields(args), serveFlags())
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", args, err, says)
		}
	}
	if _, err := Translate([]string{"--help"}, serveFlags()); err == nil || !strings.Contains(Help(), "--zap-encoder") {
		t.Errorf("help: %v", err)
	}
}
