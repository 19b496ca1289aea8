package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

func TestCalledAsPicker(t *testing.T) {
	for _, c := range []struct{ argv, want []string }{
		{[]string{"/app/epp", "", "--pool-name", "p"}, []string{"epp", "", "--pool-name", "p"}},
		{[]string{"/app/epp"}, []string{"epp"}},
		{[]string{"/kvepp", "--pool-name", "p"}, []string{"epp", "--pool-name", "p"}},
		{[]string{"/kvepp", "-v=2"}, []string{"epp", "-v=2"}},
		{[]string{"/bin/sleep", "15"}, []string{"sleep", "15"}},
		{[]string{"/kvepp", "--version"}, []string{"--version"}},
		{[]string{"kvepp", "--help"}, []string{"--help"}},
		{[]string{"kvepp", "serve", "--pool-name=p"}, []string{"serve", "--pool-name=p"}},
		{[]string{"kvepp"}, []string{}},
	} {
		if got := arguments(c.argv); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.argv, got, c.want)
		}
	}
	for args, want := range map[string]struct {
		status int
		says   string
	}{
		"sleep 0.001":      {0, ""},
		"sleep 1ms":        {0, ""},
		"sleep":            {2, "give one time"},
		"sleep -1":         {2, "give one time"},
		"epp --help":       {0, "--zap-encoder"},
		"epp --pool-nam=p": {2, "did you mean --pool-name?"},
		"epp --print-config --endpoints=e -v=5 x": {0, "log-level: debug"},
		"epp --drain-timeout=x":                   {2, "must be a duration"},
	} {
		var out bytes.Buffer
		if got := start(strings.Fields(args), nil, &out, &out, nil); got != want.status ||
			!strings.Contains(out.String(), want.says) {
			t.Errorf("%s: status %d\n%s", args, got, out.String())
		}
	}
	var out bytes.Buffer
	if start([]string{"epp"}, nil, &out, &out, []string{"KVEPP_GRPC_PROT=1"}) != 2 ||
		!strings.Contains(out.String(), "KVEPP_GRPC_PROT") {
		t.Errorf("a misspelt variable: %s", out.String())
	}
}

func TestExplainConfig(t *testing.T) {
	for file, want := range map[string]struct {
		status int
		says   []string
	}{
		"guide-precise": {0, []string{"index (precise-prefix-cache-producer): approximated --kv-events-port=5556",
			"ids (token-producer): maps to --pick-timeout=4s: token ids from http://localhost:8000"}},
		"guide-bands": {0, []string{"flowControl: approximated: ", "concurrency-detector: maps to: the queue"}},
		"guide-turns": {1, []string{"flowControl: refused: program-aware-fairness"}},
		"none":        {1, []string{"no such file"}},
	} {
		var out bytes.Buffer
		status := start([]string{"check", "--config-file", "../../serve/llmd/testdata/" + file + ".yaml"}, nil, &out,
			&out, nil)
		for _, says := range want.says {
			if status != want.status || !strings.Contains(out.String(), says) {
				t.Errorf("%s: status %d, want %q\n%s", file, status, says, out.String())
			}
		}
	}
}

// chat sends a chat and its whole response through kvepp, and returns the endpoint.
func (r *running) chat(content string) (string, error) {
	stream, err := extprocv3.NewExternalProcessorClient(r.processor).Process(r.t.Context())
	if err != nil {
		return "", err
	}
	headers := func(end bool, pairs ...string) *extprocv3.HttpHeaders {
		h := &extprocv3.HttpHeaders{EndOfStream: end, Headers: &corev3.HeaderMap{}}
		for i := 0; i < len(pairs); i += 2 {
			h.Headers.Headers = append(h.Headers.Headers,
				&corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
		}
		return h
	}
	body := func(text string) *extprocv3.HttpBody {
		return &extprocv3.HttpBody{Body: []byte(text), EndOfStream: true}
	}
	endpoint := ""
	for _, send := range []*extprocv3.ProcessingRequest{
		{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: headers(false, ":method", "POST", ":path",
			"/v1/chat/completions")}},
		{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: body(
			`{"model":"m","messages":[{"role":"user","content":"` + content + `"}]}`)}},
		{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers(false, ":status", "200",
			"content-type", "application/json")}},
		{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: body(
			`{"usage":{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":16}}}`)}},
	} {
		if err := stream.Send(send); err != nil {
			return "", err
		}
		for wait := send.GetRequestHeaders() == nil; wait; {
			response, err := stream.Recv()
			if err != nil {
				return "", err
			}
			for _, h := range response.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
				if h.GetHeader().GetKey() == "x-gateway-destination-endpoint" {
					endpoint = string(h.GetHeader().GetRawValue())
				}
			}
			wait = response.GetRequestHeaders() != nil // the body's reply follows
		}
	}
	if err := stream.CloseSend(); err != nil {
		return "", err
	}
	_, err = stream.Recv() // kvepp ends the stream after it has freed the booking
	if !errors.Is(err, io.EOF) {
		return "", fmt.Errorf("after the end: %w", err)
	}
	return endpoint, nil
}

// TestPickerFlags: kvepp takes the flags of llm-d's picker from 0.9 on, in the forms that pflag knows.
func TestPickerFlags(t *testing.T) {
	const pool = "--pool-name p --pool-namespace=ns --pool-group inference.networking.k8s.io"
	for _, c := range []struct{ args, want string }{
		{pool, "pool-name: p"},
		{"--endpoint-selector app=x --endpoint-target-ports 8000,8001", "8001"},
		{"--grpc-port 9002 --grpc-health-port=9003 --metrics-port 9090", ""},
		{"--drain-timeout 30s --disable-endpoint-subset-filter=false", ""},
		{"--secure-serving --cert-path=/var/run/tls --enable-cert-reload=true", "cert-path: /var/run/tls"},
		{"--secure-serving=false --tls-min-version VersionTLS12", "secure-serving: false"},
		{"--tls-min-version=VersionTLS13 --tls-cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "1.3"},
		{"--metrics-endpoint-auth=true --ha-enable-leader-election --health-checking", "leader-election: true"},
		{"--grpc-max-recv-msg-size 10MiB --grpc-max-send-msg-size=25MB", ""},
		{"--refresh-metrics-interval 50ms --metrics-staleness-threshold=2s", "refresh-metrics-interval: 50ms"},
		{"--refresh-prometheus-metrics-interval 5s --enable-grpc-stream-metrics", ""},
		{"--total-queued-requests-metric=q --total-running-requests-metric r --kv-cache-usage-percentage-metric=u",
			"queued=q,running=r,usage=u"},
		{"--lora-info-metric l --cache-info-metric=c", ""},
		{"--model-server-metrics-port=5000 --model-server-metrics-path /m --model-server-metrics-scheme=https " +
			"--model-server-metrics-https-insecure-skip-verify=false", "model-server-metrics-path: /m"},
		{"--enable-pprof", ""}, {"--enable-pprof=true", ""}, {"--enable-pprof=false", ""},
		{"--tracing", ""}, {"--tracing=false", ""},
		{"--metrics-cert-dir= --metrics-client-ca-file=", ""},
		{"--emit-endpoint-scores --allow-experimental-plugins", ""},
		{"--feature-gates flowControl=false,haPopulateNonLeaderDatastore", ""},
		{"--plugin-state-staleness-threshold 5m --fairness-id-metric-label-limit=1000", ""},
		{"-v 2", ""}, {"-v=2", ""}, {"-v2", ""}, {"--v 2", ""}, {"--v=2", ""}, {"-v=5", "log-level: debug"},
		{"--zap-encoder console --zap-log-level=debug", "log-level: debug"}, {"--zap-devel", "log-format: text"},
		{"--zap-stacktrace-level=error --zap-time-encoding iso8601", ""},
		{"--config-file ../../serve/llmd/testdata/guide-precise.yaml", "kv-events-port: 5556"},
		{"--metrics-compat=none --config-strict=false", ""},
		{"  words --v=2 ", ""},
	} {
		if !strings.Contains(c.args, "--pool") && !strings.Contains(c.args, "--endpoint-selector") {
			c.args += " " + pool
		}
		var out bytes.Buffer
		args := append([]string{"epp", "--print-config"}, strings.Split(c.args, " ")...)
		if got := start(args, nil, &out, &out, nil); got != 0 || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: status %d, want %q in\n%s", c.args, got, c.want, out.String())
		}
	}
}

// TestSeat: kvepp starts as llm-d's picker with a configuration that discovers endpoints in a file. It logs what the
// configuration means, routes a later turn to the endpoint of the earlier one, and shows the metrics of llm-d.
func TestSeat(t *testing.T) {
	t.Parallel()
	r := reserve(t)
	r.command = seatCommand
	r.writeEndpoints(`endpoints:
- {name: a, namespace: ns, address: 127.0.0.1, port: "1"}
- {name: b, namespace: ns, address: 127.0.0.1, port: "2", labels: {llm-d.ai/role: decode}}
- {name: c, namespace: ns, address: 127.0.0.1, port: "3", labels: {llm-d.ai/role: prefill}}
- {name: bad, address: nowhere, port: "4"}
`)
	r.start("", "--pool-name", "pool", "--pool-namespace=ns", "--zap-encoder", "console", "-v=2", "--tracing=false",
		"--drain-delay=0s", "--refresh-metrics-interval=0s", "--metrics-compat=all", "--config-text", `
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {name: hosts, type: file-discovery, parameters: {path: `+r.endpoints+`, watchFile: true}}
- {type: prefix-cache-scorer}
- {type: queue-scorer}
- {type: k8s-notification-source}
dataLayer: {discovery: {endpoints: {pluginRef: hosts}}}
`)
	r.awaitReady()
	r.awaitLog("of llm-d's configuration", "name=prefix-cache-scorer", "verdict=approximated")
	r.awaitLog("of llm-d's configuration", "name=k8s-notification-source", "verdict=ignored")
	r.awaitLog("of llm-d's picker", "--pool-name=pool is ignored")
	r.awaitLog("kvepp skips entries", "nowhere")
	r.eventually("both endpoints", func() error {
		text, err := r.metrics()
		if err == nil && !strings.Contains(text, "\nkvepp_workers 3\n") {
			err = errors.New("another number of workers")
		}
		return err
	})
	said := strings.Repeat("what was said before, ", 40)
	first, err := r.chat(said)
	if err != nil || first == "" || strings.HasSuffix(first, ":3") {
		t.Fatalf("%q, %v", first, err)
	}
	for range 6 {
		said += strings.Repeat("and what was said then, ", 20)
		if again, err := r.chat(said); err != nil || again != first {
			t.Errorf("a later turn went to %q, the first to %q: %v", again, first, err)
		}
	}
	text, err := r.metrics()
	if err != nil || !strings.Contains(text, `kvepp_decisions_total{reason="approximate"} 7`) {
		t.Errorf("decisions: %v", err)
	}
	if !strings.Contains(text, "\nllm_d_epp_request_total{") || strings.Contains(text, "llm_d_epp_kv_cache_") {
		t.Error("llm-d's metrics are missing, or those of KV events are there")
	}
	r.Signal(syscall.SIGTERM)
	r.awaitEnd()
}
