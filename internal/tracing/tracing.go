// Package tracing reports requests to an OpenTelemetry collector as spans over OTLP, and reads and writes W3C trace
// context.
//
// It owns the exporter and its configuration from OpenTelemetry's environment variables, OTEL_*. It never delays a
// request: spans wait in a bounded queue, and are dropped when it is full. Without a collector there is no Tracer.
// Methods of a nil *Tracer and of a nil *Span do nothing; callers compare with nil before they compute attributes.
//
// Concurrency: a Tracer is safe for concurrent use; so is a Span, until it has ended.
package tracing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/net/http/httpguts"
	"google.golang.org/grpc"

	"kvepp/internal/metrics"
	"kvepp/internal/useragent"
)

// Tracer creates spans. A nil one creates none.
type Tracer struct {
	tracer   trace.Tracer
	provider *sdktrace.TracerProvider
	exporter *counted
}

// Attribute is a key and value of a span.
type Attribute = attribute.KeyValue

// maxText is the maximum length of a text attribute, in bytes; clients choose some of these texts.
const maxText = 256

// Text returns an attribute for a text that a client may have chosen: it is truncated and made valid UTF-8.
func Text(key, value string) Attribute {
	if len(value) > maxText {
		value = value[:maxText]
	}
	if !utf8.ValidString(value) {
		value = strings.ToValidUTF8(value, "\uFFFD")
	}
	return attribute.String(key, value)
}

// Int returns an attribute with an integer.
func Int(key string, value int) Attribute { return attribute.Int(key, value) }

// Float returns an attribute with a number.
func Float(key string, value float64) Attribute { return attribute.Float64(key, value) }

// configured reports whether the environment asks for spans, and over which protocol.
//
// Source: OpenTelemetry specification, environment variables and OTLP exporter configuration. If no protocol is named,
// it is gRPC, as in the Gateway API's endpoint picker. An empty variable counts as not set.
func configured() (wanted bool, protocol string, err error) {
	first := func(names ...string) (string, string) {
		for _, name := range names {
			if v := strings.TrimSpace(os.Getenv(name)); v != "" {
				return v, name
			}
		}
		return "", ""
	}
	exporter, _ := first("OTEL_TRACES_EXPORTER")
	endpoint, _ := first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	switch {
	case strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || exporter == "none" || exporter == "" &&
		endpoint == "":
		return false, "", nil
	case exporter != "" && exporter != "otlp":
		return false, "", fmt.Errorf(
			"OTEL_TRACES_EXPORTER=%q: spans go to an OTLP collector alone; set it to otlp, or to none", exporter)
	}
	protocol, name := first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
	switch protocol {
	case "":
		return true, "grpc", nil
	case "grpc", "http/protobuf":
		return true, protocol, nil
	}
	return false, "", fmt.Errorf("%s=%q: must be grpc or http/protobuf", name, protocol)
}

// agent returns the value of User-Agent for the collector: kvepp's own, then the exporter's.
//
// Source: OpenTelemetry specification, OTLP exporter, user agent: a product's identifier comes before the exporter's.
func agent() string { return useragent.Text() + " OTel OTLP Exporter Go/" + otlptrace.Version() }

// headers returns the headers of OTEL_EXPORTER_OTLP_TRACES_HEADERS, or of OTEL_EXPORTER_OTLP_HEADERS if that is not
// set, with User-Agent unless they have it. The library's option for headers replaces those that it reads from the
// environment, so they are read here too. Pairs that cannot be read are left out; the library reports them.
//
// Source: OpenTelemetry specification, OTLP exporter, headers: name=value pairs with commas between them, values
// percent-encoded.
func headers() map[string]string {
	all := map[string]string{"User-Agent": agent()}
	text := strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS"))
	if text == "" {
		text = strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_HEADERS"))
	}
	for _, pair := range strings.Split(text, ",") {
		name, value, found := strings.Cut(pair, "=")
		name = strings.TrimSpace(name)
		value, err := url.PathUnescape(value)
		if !found || err != nil || !httpguts.ValidHeaderFieldName(name) {
			continue
		}
		all[http.CanonicalHeaderKey(name)] = strings.TrimSpace(value)
	}
	return all
}

// New returns a tracer that exports spans as the environment configures it; nil if the environment does not ask for
// spans. version is kvepp's. An unreachable collector is no error: until it can be reached, spans are dropped and count
// as failed.
//
// It reads from the environment: OTEL_TRACES_EXPORTER and OTEL_SDK_DISABLED; OTEL_EXPORTER_OTLP_* and
// OTEL_EXPORTER_OTLP_TRACES_* (ENDPOINT, PROTOCOL, HEADERS, INSECURE, CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY,
// COMPRESSION, TIMEOUT); OTEL_SERVICE_NAME ("kvepp") and OTEL_RESOURCE_ATTRIBUTES; OTEL_TRACES_SAMPLER and its _ARG;
// OTEL_BSP_* and OTEL_SPAN_*.
func New(ctx context.Context, version string, log *slog.Logger) (*Tracer, error) {
	wanted, protocol, err := configured()
	if err != nil || !wanted {
		return nil, err
	}
	// Errors that the library reports while it reads the environment are invalid variables, which it ignores.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("a variable of OpenTelemetry's in the environment (OTEL_*) cannot be used, and its default is",
			"error", err)
	}))
	var exporter sdktrace.SpanExporter
	if protocol == "grpc" {
		exporter, err = otlptracegrpc.New(ctx, otlptracegrpc.WithDialOption(grpc.WithUserAgent(agent())))
	} else {
		exporter, err = otlptracehttp.New(ctx, otlptracehttp.WithHeaders(headers()))
	}
	if err != nil {
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_*: %w", err)
	}
	about, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", "kvepp"),
		attribute.String("service.version", version)), resource.WithTelemetrySDK(), resource.WithFromEnv())
	if errors.Is(err, resource.ErrPartialResource) {
		otel.Handle(err)
	} else if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	t := &Tracer{exporter: &counted{SpanExporter: exporter, log: log}}
	t.provider = sdktrace.NewTracerProvider(sdktrace.WithBatcher(t.exporter), sdktrace.WithResource(about))
	t.tracer = t.provider.Tracer("kvepp", trace.WithInstrumentationVersion(version))
	// From here on the library reports each failed export, which the type counted logs already.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Debug("OpenTelemetry", "error", err) }))
	log.Info("spans of requests go to a collector", "protocol", protocol)
	return t, nil
}

// Close sends the remaining spans until ctx ends.
func (t *Tracer) Close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}

// Export exports the counts of spans.
func (t *Tracer) Export(m *metrics.Metrics) {
	if t != nil {
		metrics.Counters(m, metrics.TraceSpans, "outcome", func() map[string]int64 {
			return map[string]int64{"exported": t.exporter.exported.Load(), "failed": t.exporter.failed.Load()}
		})
	}
}

// Spans returns the number of spans that the collector accepted, and the number that was lost because it did not.
func (t *Tracer) Spans() (exported, failed int64) {
	if t == nil {
		return 0, 0
	}
	return t.exporter.exported.Load(), t.exporter.failed.Load()
}

// counted counts the spans of an exporter, and logs when the collector becomes unreachable and reachable.
type counted struct {
	sdktrace.SpanExporter
	log              *slog.Logger
	exported, failed atomic.Int64
	failing          atomic.Bool
}

// ExportSpans passes spans to the exporter.
func (c *counted) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := c.SpanExporter.ExportSpans(ctx, spans)
	if err != nil {
		c.failed.Add(int64(len(spans)))
		if !c.failing.Swap(true) {
			c.log.Warn(
				"the collector of spans cannot be reached, or refuses them; spans are dropped until it takes them",
				"error", err)
		}
		return err
	}
	c.exported.Add(int64(len(spans)))
	if c.failing.Swap(false) {
		c.log.Info("the collector takes spans again")
	}
	return nil
}

// Context holds the values of the W3C trace context headers, unparsed.
type Context struct{ Traceparent, Tracestate string }

// Add adds a received header. Several values of one name are joined by commas, as in HTTP: tracestate is then a list,
// and traceparent becomes invalid.
func (c *Context) Add(name, value string) {
	at := &c.Traceparent
	if name == Tracestate {
		at = &c.Tracestate
	}
	if *at != "" {
		value = *at + "," + value
	}
	*at = value
}

// Header names of W3C trace context.
const (
	Traceparent = "traceparent"
	Tracestate  = "tracestate"
)

var w3c propagation.TraceContext

// Span is a traced operation. Methods of a nil Span do nothing.
type Span struct {
	tracer *Tracer
	span   trace.Span
	ctx    context.Context // its current span is this one
}

// Request begins the span of a request from a caller; it returns nil without a tracer. An invalid caller context is
// ignored.
func (t *Tracer) Request(name string, caller Context) *Span {
	if t == nil {
		return nil
	}
	ctx := w3c.Extract(context.Background(),
		propagation.MapCarrier{Traceparent: caller.Traceparent, Tracestate: caller.Tracestate})
	s := &Span{tracer: t}
	s.ctx, s.span = t.tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer))
	return s
}

// Valid reports whether a trace context can be parsed.
func (c Context) Valid() bool {
	ctx := w3c.Extract(context.Background(),
		propagation.MapCarrier{Traceparent: c.Traceparent, Tracestate: c.Tracestate})
	return trace.SpanContextFromContext(ctx).IsValid()
}

// Context returns the trace context for the next service; empty for a nil Span.
func (s *Span) Context() Context {
	if s == nil {
		return Context{}
	}
	carrier := propagation.MapCarrier{}
	w3c.Inject(s.ctx, carrier)
	return Context{carrier[Traceparent], carrier[Tracestate]}
}

// TraceID returns the id of the span's trace, 32 hexadecimal digits; empty for a nil Span, and if the trace is not
// exported.
func (s *Span) TraceID() string {
	if s == nil || !s.span.SpanContext().IsSampled() {
		return ""
	}
	return s.span.SpanContext().TraceID().String()
}

// Child begins a child span at the given time. It returns nil if the span is not recorded.
func (s *Span) Child(name string, at time.Time) *Span {
	if s == nil || !s.span.IsRecording() {
		return nil
	}
	c := &Span{tracer: s.tracer}
	c.ctx, c.span = s.tracer.tracer.Start(s.ctx, name, trace.WithTimestamp(at))
	return c
}

// Phase records a child span that has already ended. Callers with attributes compare with nil first, to avoid building
// attributes that are not used.
func (s *Span) Phase(name string, from, to time.Time, attributes ...Attribute) {
	if s == nil || !s.span.IsRecording() {
		return
	}
	_, span := s.tracer.tracer.Start(s.ctx, name, trace.WithTimestamp(from), trace.WithAttributes(attributes...))
	span.End(trace.WithTimestamp(to))
}

// Set adds attributes to the span.
func (s *Span) Set(attributes ...Attribute) {
	if s != nil {
		s.span.SetAttributes(attributes...)
	}
}

// Fail marks the span as failed. reason is one word.
func (s *Span) Fail(reason string) {
	if s != nil {
		s.span.SetStatus(codes.Error, reason)
	}
}

// End ends the span.
func (s *Span) End() {
	if s != nil {
		s.span.End()
	}
}
