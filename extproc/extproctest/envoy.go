// Package extproctest is Envoy's side of an external processing stream, in process, like net/http/httptest for HTTP.
//
// It owns a client that sends a request as Envoy sends it, and rejects responses that Envoy would reject. It imports
// nothing of kvepp, so that it checks the protocol and not our reading of it.
//
// Source: behaviour recorded from Envoy 1.40 in FULL_DUPLEX_STREAMED mode; external_processor.proto.
package extproctest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
)

// Request is an HTTP request that Envoy received, and the response that its upstream gave.
type Request struct {
	Header   map[string]string // pseudo headers included
	Body     [][]byte          // in the pieces that Envoy sends; nil: a header-only request
	Trailers bool              // ends with trailers instead of an end-of-stream piece

	// Upstream returns the response once the request phase is complete. Nil: the client disconnects instead.
	Upstream func(routed *Routed) Response
}

// Response is an upstream's response.
type Response struct {
	Header map[string]string // ":status" included
	Body   [][]byte          // in the pieces in which it arrives
}

// Routed is the result of the request phase.
type Routed struct {
	Set      map[string]string // headers that the processor sets
	Removed  []string          // headers that it removes
	Metadata map[string]any    // dynamic metadata, by namespace
	Body     []byte            // body that is sent upstream
}

// Outcome is the result for the client.
type Outcome struct {
	*Routed
	Immediate *extprocv3.ImmediateResponse // the processor's own response; then only Set is also set
	Set       map[string]string            // response headers that the processor sets
	Body      []byte                       // the response's body
}

// Serve runs a processor over an in-memory connection until the test ends.
func Serve(t testing.TB, processor extprocv3.ExternalProcessorServer, options ...grpc.ServerOption) *Envoy {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(options...)
	extprocv3.RegisterExternalProcessorServer(server, processor)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("passthrough:///processor", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return listener.Dial() }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &Envoy{client: extprocv3.NewExternalProcessorClient(conn)}
}

// Envoy sends requests to one processor.
type Envoy struct {
	client extprocv3.ExternalProcessorClient
}

// conversation is the exchange of messages on one stream.
type conversation struct {
	stream extprocv3.ExternalProcessor_ProcessClient
}

// Do sends one request in FULL_DUPLEX_STREAMED mode and returns its outcome. The error says which protocol rule a
// response violated, or how the stream failed.
func (e *Envoy) Do(ctx context.Context, r *Request) (*Outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // also ends the stream
	stream, err := e.client.Process(ctx)
	if err != nil {
		return nil, err
	}
	c := &conversation{stream: stream}
	out := &Outcome{Routed: &Routed{}}
	headerOnly := r.Body == nil && !r.Trailers
	first := &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: headers(r.Header, headerOnly)},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{
			RequestBodyMode:                         filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
			ResponseBodyMode:                        filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
			SendBodyWithoutWaitingForHeaderResponse: true,
		},
	}
	send := func(m *extprocv3.ProcessingRequest) error {
		if err := stream.Send(m); !errors.Is(err, io.EOF) {
			return err
		}
		return nil // the processor has ended the stream; its earlier messages are still to be received
	}
	if err := send(first); err != nil {
		return nil, err
	}
	for i, piece := range r.Body {
		end := i == len(r.Body)-1 && !r.Trailers
		if err := send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: piece, EndOfStream: end}}}); err != nil {
			return nil, err
		}
	}
	if r.Trailers {
		if err := send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{
			RequestTrailers: &extprocv3.HttpTrailers{}}}); err != nil {
			return nil, err
		}
	}
	if err := c.requestPhase(r, headerOnly, out); err != nil || out.Immediate != nil || r.Upstream == nil {
		return out, err
	}
	return out, c.responsePhase(r.Upstream(out.Routed), out)
}

// next receives a response. It records an ImmediateResponse, after which nothing may follow.
func (c *conversation) next(out *Outcome) (*extprocv3.ProcessingResponse, error) {
	m, err := c.stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("extproctest: waiting for a response: %w", err)
	}
	if i := m.GetImmediateResponse(); i != nil {
		out.Immediate = i
		out.Set = values(i.GetHeaders())
		if extra, err := c.stream.Recv(); !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf(
				"extproctest: after an immediate response: %v, %v; want the stream's end",
				extra,
				err,
			)
		}
	}
	return m, nil
}

// requestPhase checks the order that Envoy enforces: headers, then body pieces, then trailers.
func (c *conversation) requestPhase(r *Request, headerOnly bool, out *Outcome) error {
	m, err := c.next(out)
	if err != nil || out.Immediate != nil {
		return err
	}
	h := m.GetRequestHeaders()
	if h == nil {
		return fmt.Errorf("extproctest: the first response is %T, want request headers", m.Response)
	}
	mutation := h.GetResponse().GetHeaderMutation()
	out.Routed.Set, out.Removed = values(mutation), mutation.GetRemoveHeaders()
	out.Metadata = m.GetDynamicMetadata().AsMap()
	if headerOnly {
		return nil
	}
	for {
		m, err := c.next(out)
		if err != nil {
			return err
		}
		if r.Trailers && m.GetRequestTrailers() != nil {
			return nil
		}
		piece := m.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		if piece == nil {
			return fmt.Errorf("extproctest: %T while the request body is expected as streamed responses", m.Response)
		}
		if len(piece.GetBody()) > 62000 {
			return fmt.Errorf("extproctest: a piece of %d bytes", len(piece.GetBody()))
		}
		out.Routed.Body = append(out.Routed.Body, piece.GetBody()...)
		if piece.GetEndOfStream() {
			if r.Trailers {
				return errors.New("extproctest: the body ended before its trailers")
			}
			return nil
		}
	}
}

func (c *conversation) responsePhase(r Response, out *Outcome) error {
	if err := c.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
		ResponseHeaders: headers(r.Header, len(r.Body) == 0)}}); err != nil {
		return err
	}
	m, err := c.next(out)
	if err != nil {
		return err
	}
	if m.GetResponseHeaders() == nil {
		return fmt.Errorf("extproctest: %T, want response headers", m.Response)
	}
	out.Set = values(m.GetResponseHeaders().GetResponse().GetHeaderMutation())
	for i, piece := range r.Body {
		end := i == len(r.Body)-1
		if err := c.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: piece, EndOfStream: end}}}); err != nil {
			return err
		}
		// Wait for each piece: a processor that holds one back delays the client's next token.
		var got []byte
		for ended := false; len(got) < len(piece) || end && !ended; {
			m, err := c.next(out)
			if err != nil {
				return err
			}
			response := m.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
			if response == nil {
				return fmt.Errorf("extproctest: %T while a response body is expected", m.Response)
			}
			got = append(got, response.GetBody()...)
			if ended = response.GetEndOfStream(); ended && !end {
				return errors.New("extproctest: the response was ended early")
			}
			if len(piece) == 0 && !end {
				break
			}
		}
		if !bytes.Equal(got, piece) {
			return fmt.Errorf("extproctest: %d bytes of response relayed as %d others", len(piece), len(got))
		}
		out.Body = append(out.Body, got...)
	}
	return nil
}

func headers(h map[string]string, end bool) *extprocv3.HttpHeaders {
	m := &corev3.HeaderMap{}
	for k, v := range h {
		m.Headers = append(m.Headers, &corev3.HeaderValue{Key: k, RawValue: []byte(v)})
	}
	return &extprocv3.HttpHeaders{Headers: m, EndOfStream: end}
}

func values(m *extprocv3.HeaderMutation) map[string]string {
	set := map[string]string{}
	for _, h := range m.GetSetHeaders() {
		set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	return set
}
