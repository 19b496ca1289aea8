package e2e

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"kvepp/internal/tracing/tracingtest"
	"kvepp/test/harness/stack"
)

// TestTraces: kvepp's spans reach a collector as part of the client's trace, and of Envoy's if Envoy traces. The
// traceparent for upstream names a span that exists: kvepp's or Envoy's.
func TestTraces(t *testing.T) {
	collector := tracingtest.Start(t, "grpc")
	address, last := upstream(t)
	s := start(
		t,
		stack.Config{Workers: -1, Servers: []string{address}, KveppFlags: []string{"--router-kv-events=false"},
			KveppEnv: []string{
				"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.Endpoint,
				"OTEL_SERVICE_NAME=kvepp-under-test",
				"OTEL_BSP_SCHEDULE_DELAY=100",
			}},
	)
	_, port, err := net.SplitHostPort(strings.TrimPrefix(collector.Endpoint, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	traced, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", func(config any) {
		manager := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0,
			"typed_config").(map[string]any)
		manager["tracing"] = map[string]any{
			"random_sampling": map[string]any{"value": 100},
			"provider": map[string]any{"name": "envoy.tracers.opentelemetry",
				"typed_config": map[string]any{
					"@type":        "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
					"service_name": "envoy-under-test",
					"grpc_service": map[string]any{
						"envoy_grpc": map[string]any{"cluster_name": "collector"},
						"timeout":    "1s",
					},
				}},
		}
		resources := stack.At(config, "static_resources").(map[string]any)
		resources["clusters"] = append(
			resources["clusters"].([]any),
			map[string]any{"name": "collector", "type": "STATIC",
				"typed_extension_protocol_options": map[string]any{
					"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": map[string]any{
						"@type": "type.googleapis.com/" +
							"envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
						"explicit_http_config": map[string]any{"http2_protocol_options": map[string]any{}}},
				},
				"load_assignment": map[string]any{
					"cluster_name": "collector",
					"endpoints": []any{map[string]any{"lb_endpoints": []any{map[string]any{
						"endpoint": map[string]any{
							"address": map[string]any{
								"socket_address": map[string]any{"address": "127.0.0.1", "port_value": n},
							},
						}}}}},
				}},
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	client := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for name, envoy := range map[string]*stack.Envoy{"kvepp traces": s.Envoy, "Envoy and kvepp trace": traced} {
		a, err := stack.Post(
			t.Context(),
			http.DefaultClient,
			envoy.URL+"/v1/completions",
			http.Header{"Traceparent": {client}},
			map[string]any{"model": stack.Model, "prompt": "one two three " + name},
		)
		if err != nil || a.Status != http.StatusOK {
			t.Fatalf("%s: %v %+v", name, err, a)
		}
		told := strings.Split(last().header.Get("traceparent"), "-")
		if len(told) != 4 || told[1] != "0af7651916cd43dd8448eb211c80319c" || told[3] != "01" {
			t.Fatalf("%s: upstream gets traceparent %q", name, told)
		}
		eventually(t, func() error {
			by := map[string]tracingtest.Span{} // of this request, by id
			var request, route tracingtest.Span
			for _, span := range collector.Spans() {
				if span.Trace == told[1] {
					by[span.ID] = span
				}
				if span.Name == "gateway.request" &&
					span.Attributes["kvepp.request_id"] == a.Header.Get("x-kvepp-request-id") {
					request = span
				}
			}
			steps := 0
			for _, span := range by {
				if span.Name == "gateway.request_orchestration" && span.Parent == request.ID {
					route = span
				}
			}
			for _, span := range by {
				if span.Parent == route.ID && route.ID != "" {
					steps++
				}
			}
			switch above, teller := by[request.Parent], by[told[2]]; {
			case request.ID == "" || steps < 3:
				return fmt.Errorf("%s: spans %+v, of the request %+v", name, by, request)
			case request.Service != "kvepp-under-test" || route.Attributes["kvepp.endpoint"] != "server-0" ||
				request.Attributes["http.response.status_code"] != "200":
				t.Fatalf("%s: %+v, %+v", name, request, route)
			case envoy == s.Envoy && (request.Parent != "b7ad6b7169203331" || told[2] != request.ID):
				t.Fatalf(
					"%s: kvepp's span %+v is not below the client's, or upstream not below it: %q",
					name,
					request,
					told,
				)
			case envoy == traced && (above.ID == "" || teller.ID == ""):
				return fmt.Errorf("%s: Envoy's spans have not arrived yet", name)
			case envoy == traced && (above.Service != "envoy-under-test" || teller.Service != "envoy-under-test" ||
				by[above.Parent].Service == "kvepp-under-test"):
				t.Fatalf("%s: kvepp's span is below %+v, upstream below %+v", name, above, teller)
			}
			return nil
		})
	}
	if n := metric(t, s, `kvepp_trace_spans_total{outcome="failed"}`); n != 0 {
		t.Errorf("the metric counts %v lost spans", n)
	}
}
