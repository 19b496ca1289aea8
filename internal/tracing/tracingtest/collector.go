// Package tracingtest is an OpenTelemetry collector, in process, as net/http/httptest is the other side of HTTP.
//
// It owns a server of OTLP over gRPC or HTTP that keeps the spans it is sent. It imports nothing of kvepp, so that what
// it reads is the protocol. Concurrency: a Collector is safe from any goroutine.
package tracingtest

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonv1 "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Span is one that was sent.
type Span struct {
	Trace, ID, Parent string // hexadecimal; Parent is empty for the first of a trace
	Name              string
	Server            bool              // its kind
	Error             string            // its status's message; empty: it did not fail
	Service, Version  string            // of the resource
	Header            map[string]string // of the request that brought it, by names in lower case
	Attributes        map[string]string
	Start, End        time.Time
}

// Collector keeps the spans that it is sent.
type Collector struct {
	// Endpoint is its URL, as OTEL_EXPORTER_OTLP_ENDPOINT has it.
	Endpoint string
	// Refuse has it take nothing more while it is true.
	Refuse atomic.Bool

	collectorv1.UnimplementedTraceServiceServer
	mu    sync.Mutex // guards spans
	spans []Span
}

// Start runs a collector of a protocol, grpc or http/protobuf, until the test ends.
func Start(t testing.TB, protocol string) *Collector {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &Collector{Endpoint: "http://" + l.Addr().String()}
	if protocol == "grpc" {
		server := grpc.NewServer()
		collectorv1.RegisterTraceServiceServer(server, c)
		go server.Serve(l)
		t.Cleanup(server.Stop)
		return c
	}
	server := &http.Server{Handler: http.HandlerFunc(c.post)}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	return c
}

// Export takes spans over gRPC.
func (c *Collector) Export(
	ctx context.Context,
	in *collectorv1.ExportTraceServiceRequest,
) (*collectorv1.ExportTraceServiceResponse, error) {
	if c.Refuse.Load() {
		return nil, status.Error(codes.InvalidArgument, "refused") // which is not tried again
	}
	header := map[string]string{}
	md, _ := metadata.FromIncomingContext(ctx)
	for name, values := range md {
		header[name] = strings.Join(values, ",")
	}
	c.take(in, header)
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func (c *Collector) post(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	in := &collectorv1.ExportTraceServiceRequest{}
	if err == nil {
		err = proto.Unmarshal(body, in)
	}
	if err != nil || r.URL.Path != "/v1/traces" || c.Refuse.Load() {
		http.Error(w, fmt.Sprint("refused ", err), http.StatusBadRequest)
		return
	}
	header := map[string]string{}
	for name, values := range r.Header {
		header[strings.ToLower(name)] = strings.Join(values, ",")
	}
	c.take(in, header)
	w.Header().Set("content-type", "application/x-protobuf")
}

func (c *Collector) take(in *collectorv1.ExportTraceServiceRequest, header map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range in.ResourceSpans {
		about := attributes(r.GetResource().GetAttributes())
		for _, scope := range r.ScopeSpans {
			for _, s := range scope.Spans {
				span := Span{
					Trace:      hex.EncodeToString(s.TraceId),
					ID:         hex.EncodeToString(s.SpanId),
					Parent:     hex.EncodeToString(s.ParentSpanId),
					Name:       s.Name,
					Server:     s.Kind == tracev1.Span_SPAN_KIND_SERVER,
					Service:    about["service.name"],
					Version:    about["service.version"],
					Header:     header,
					Attributes: attributes(s.Attributes),
					Start:      time.Unix(0, int64(s.StartTimeUnixNano)),
					End:        time.Unix(0, int64(s.EndTimeUnixNano)),
				}
				if s.GetStatus().GetCode() == tracev1.Status_STATUS_CODE_ERROR {
					span.Error = s.Status.Message
				}
				c.spans = append(c.spans, span)
			}
		}
	}
}

// Spans returns those that have come so far.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Span(nil), c.spans...)
}

func attributes(list []*commonv1.KeyValue) map[string]string {
	all := map[string]string{}
	for _, kv := range list {
		switch v := kv.GetValue().GetValue().(type) {
		case *commonv1.AnyValue_StringValue:
			all[kv.Key] = v.StringValue
		case *commonv1.AnyValue_IntValue:
			all[kv.Key] = strconv.FormatInt(v.IntValue, 10)
		case *commonv1.AnyValue_DoubleValue:
			all[kv.Key] = strconv.FormatFloat(v.DoubleValue, 'g', -1, 64)
		case *commonv1.AnyValue_BoolValue:
			all[kv.Key] = strconv.FormatBool(v.BoolValue)
		}
	}
	return all
}
