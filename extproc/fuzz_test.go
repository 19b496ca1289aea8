package extproc

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"kvepp/router/budget"
	"kvepp/scoring"
)

// script is a proxy that sends messages in any order, independent of the responses, and records which protocol rules
// the responses violate.
type script struct {
	extprocv3.ExternalProcessor_ProcessServer
	ctx  context.Context
	left []byte // two bytes for each message

	uncut             bool           // some message says that pieces must not be cut
	asked             map[string]int // messages sent that are to be answered, by kind
	sent, relayed     []byte         // of the request body
	complete          bool           // the request was sent to its end
	over              string         // the response after which none may follow
	headers, bodyDone bool
	trailersDone      bool
	responded         bool
	broken            error

	mode filterv3.ProcessingMode_BodySendMode // of the request's body
	// kinds of the messages so far, until the request is complete: h, b, t; x is any other
	order string
}

// The contents of a script's messages.
var (
	paths  = []string{"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/files", ""}
	bodies = [][]byte{
		[]byte(chatBody),
		[]byte(chatBody[:20]),
		[]byte(chatBody[20:]),
		nil,
		[]byte("{"),
		bytes.Repeat([]byte(" "), 70_000),
	}
)

func (s *script) Context() context.Context { return s.ctx }

// RecvMsg decodes the next message from two buffers, as gRPC delivers it.
func (s *script) RecvMsg(to any) error {
	if len(s.left) < 2 {
		return io.EOF
	}
	data, err := proto.Marshal(s.next())
	if err != nil {
		return err
	}
	return encoding.GetCodecV2("proto").Unmarshal(
		mem.BufferSlice{mem.SliceBuffer(data[:len(data)/2]), mem.SliceBuffer(data[len(data)/2:])},
		to,
	)
}

func (s *script) next() *extprocv3.ProcessingRequest {
	kind, detail := s.left[0], s.left[1]
	s.left = s.left[2:]
	end := detail&0x80 != 0
	in := &extprocv3.ProcessingRequest{ObservabilityMode: kind > 250}
	if detail&0x40 != 0 {
		mode := filterv3.ProcessingMode_BodySendMode(detail % 7)
		in.ProtocolConfig = &extprocv3.ProtocolConfiguration{RequestBodyMode: mode, ResponseBodyMode: mode}
		s.uncut = s.uncut || mode == grpcMessages
	}
	asked := func(what string) {
		if !in.ObservabilityMode {
			s.asked[what]++
		}
	}
	header := func(pairs ...string) *extprocv3.HttpHeaders {
		h := &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{}, EndOfStream: end}
		for i := 0; i < len(pairs); i += 2 {
			v := &corev3.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])}
			if kind&0x40 != 0 { // as NGINX Gateway Fabric
				v = &corev3.HeaderValue{Key: pairs[i], Value: pairs[i+1]}
			}
			h.Headers.Headers = append(h.Headers.Headers, v)
		}
		return h
	}
	body := &extprocv3.HttpBody{Body: bodies[int(detail&0x3f)%len(bodies)], EndOfStream: end}
	if !s.complete {
		if s.order == "" && in.ProtocolConfig != nil {
			s.mode = in.ProtocolConfig.RequestBodyMode
		}
		s.order += string("hbbtxxxx"[kind%8])
		if in.ObservabilityMode {
			s.order += "x"
		}
	}
	switch kind % 8 {
	case 0:
		in.Request = &extprocv3.ProcessingRequest_RequestHeaders{
			RequestHeaders: header(":path", paths[int(detail&0xf)%len(paths)],
				"content-length", fmt.Sprint(int(detail)*100), "x-dynamo-session-id", fmt.Sprint(detail)),
		}
		asked("request_headers")
		s.complete = s.complete || end && s.order == "h"
	case 1, 2:
		in.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: body}
		asked("request_body")
		if s.asked["request_headers"] > 0 && !in.ObservabilityMode && !s.complete {
			s.sent = append(s.sent, body.Body...)
			s.complete = end
		}
	case 3:
		in.Request = &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}
		asked("request_trailers")
		s.complete = s.complete || s.asked["request_headers"] > 0 && !in.ObservabilityMode
	case 4:
		in.Request = &extprocv3.ProcessingRequest_ResponseHeaders{
			ResponseHeaders: header(":status", fmt.Sprint(100+int(detail)*3), "content-type", "text/event-stream"),
		}
		served := []string{"", "10.0.0.1:8000", "10.0.0.2:8000", "10.9.9.9:1", "nonsense"}[int(detail)%5]
		in.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{endpointNamespace: {
			Fields: map[string]*structpb.Value{servedByKey: structpb.NewStringValue(served)}}}}
		if detail&0x20 != 0 { // what a proxy says of a response, true or not
			details := []string{"via_upstream", "upstream_reset_before_response_started{connection_termination}", "",
				"\xff"}[int(detail)%4]
			in.Attributes = map[string]*structpb.Struct{attributesNamespace: {Fields: map[string]*structpb.Value{
				detailsAttribute: structpb.NewStringValue(strings.ToValidUTF8(details, "?")),
				flagsAttribute: structpb.NewNumberValue(
					[]float64{0, 32, 64, 4, 1e300, -1, math.NaN()}[int(detail)%7],
				),
				triesAttribute: structpb.NewNumberValue([]float64{0, 1, 2, 3, -5, 1e300}[int(detail)%6])}}}
		}
		asked("response_headers")
	case 5:
		in.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: body}
		asked("response_body")
	case 6:
		in.Request = &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}
		asked("response_trailers")
	}
	return in
}

func (s *script) Send(out *extprocv3.ProcessingResponse) error {
	wrong := func(format string, args ...any) {
		if s.broken == nil {
			s.broken = fmt.Errorf(format, args...)
		}
	}
	response := func(kind string) {
		if s.over != "" {
			wrong("%s after %s", kind, s.over)
		}
		if s.asked[kind] == 0 {
			wrong("unexpected %s", kind)
		}
	}
	switch r := out.Response.(type) {
	case *extprocv3.ProcessingResponse_RequestHeaders:
		response("request_headers")
		if s.headers || s.responded {
			wrong("request_headers twice, or after the response")
		}
		s.headers = true
	case *extprocv3.ProcessingResponse_RequestBody:
		response("request_body")
		piece := r.RequestBody.GetResponse().GetBodyMutation().GetStreamedResponse()
		switch {
		case !s.headers:
			wrong("request_body before request_headers")
		case s.bodyDone:
			wrong("request_body after its end")
		case len(piece.GetBody()) > maxChunk && !s.uncut:
			wrong("a piece of %d bytes", len(piece.GetBody()))
		}
		s.bodyDone = piece.GetEndOfStream()
		s.relayed = append(s.relayed, piece.GetBody()...)
	case *extprocv3.ProcessingResponse_RequestTrailers:
		response("request_trailers")
		if s.bodyDone {
			wrong("request_trailers after a body that ended the request")
		}
		s.bodyDone, s.trailersDone = true, true
	case *extprocv3.ProcessingResponse_ResponseHeaders:
		response("response_headers")
		s.responded = true
	case *extprocv3.ProcessingResponse_ResponseBody:
		response("response_body")
	case *extprocv3.ProcessingResponse_ResponseTrailers:
		response("response_trailers")
	case *extprocv3.ProcessingResponse_ImmediateResponse:
		if s.over != "" {
			wrong("two immediate responses")
		}
		s.over = "immediate_response"
	default:
		wrong("%T", r)
	}
	return nil
}

// orders are the valid orders of a request's messages.
var orders = regexp.MustCompile(`^hb*t?$`)

// noResponse returns an error if a reply is missing after a complete request in a valid order. A proxy would wait for
// this reply forever.
func (s *script) noResponse() error {
	streamed := s.mode == fullDuplex || s.mode == grpcMessages
	switch {
	case !s.complete || !orders.MatchString(s.order) || s.over != "":
		return nil
	case !s.headers:
		return fmt.Errorf("%s: no response to the headers", s.order)
	case strings.HasSuffix(s.order, "t") && !s.trailersDone:
		return fmt.Errorf("%s: no response to the trailers", s.order)
	case strings.HasSuffix(s.order, "b") && streamed && !s.bodyDone:
		return fmt.Errorf("%s: the body does not end", s.order)
	case streamed && !bytes.Equal(s.sent, s.relayed):
		return fmt.Errorf("%s: of %d bytes only %d were relayed", s.order, len(s.sent), len(s.relayed))
	}
	return nil
}

// FuzzMessageOrder: for messages of any kind in any order, kvepp does not panic, obeys the protocol's rules, relays no
// byte that was not sent, and leaves no booking.
func FuzzMessageOrder(f *testing.F) {
	for _, seed := range [][]byte{
		{0, 0, 1, 0x80}, // headers, body
		{0, 0, 1, 1, 1, 0x82, 4, 33, 5, 0, 5, 0x83},          // a body in two pieces, and its response
		{0, 0, 1, 0, 3, 0, 4, 33, 6, 0},                      // trailers
		{0, 0x42, 1, 0x80, 4, 34, 5, 0x80},                   // BUFFERED
		{0, 0, 1, 1, 4, 35, 1, 0x82, 3, 0},                   // a response before the body is there
		{0, 3, 1, 5, 4, 36, 1, 5, 5, 0x80, 1, 0x83, 1, 0x80}, // a response while the body is relayed
		{4, 33, 0, 0, 1, 0x80},                               // a response first
		{1, 0x80, 3, 0, 7, 0, 0, 0x82, 0, 0},                 // out of order
		{0, 0, 1, 5, 1, 5, 1, 5, 1, 5, 1, 0x83, 4, 33},       // more than is parsed
		{0x40, 4, 1, 0x80},                                   // NGINX Gateway Fabric: in value, no path
		{0, 0x41, 1, 1, 1, 2, 1, 0x83, 4, 33, 5, 0, 5, 0x83}, // agentgateway: the body does not wait
	} {
		f.Add(seed)
	}
	b := newBench(
		f,
		Config{
			MaxParseBytes:   100_000,
			MaxBodyBytes:    300_000,
			Memory:          budget.New(heldOf(200_000)),
			DecisionHeaders: true,
		},
	)
	health := b.eject(f)
	f.Fuzz(func(t *testing.T, messages []byte) {
		s := &script{ctx: t.Context(), left: messages, asked: map[string]int{}, mode: fullDuplex}
		if err := b.server.Process(s); status.Code(err) == codes.Internal {
			t.Fatal(err)
		}
		if s.broken != nil {
			t.Error(s.broken)
		}
		if err := s.noResponse(); err != nil {
			t.Error(err)
		}
		if !bytes.HasPrefix(s.sent, s.relayed) {
			t.Errorf("%d relayed bytes differ from the sent ones", len(s.relayed))
		}
		if b.server.Streams() != 0 || b.server.HeldBytes() != 0 {
			t.Errorf("%d streams and %d bytes are still counted", b.server.Streams(), b.server.HeldBytes())
		}
		if b.book.Len() != 0 || b.load() != (scoring.Load{}) {
			t.Errorf("%d bookings and the load %+v are left", b.book.Len(), b.load())
		}
		for _, e := range health.Endpoints() {
			if e.InTrial {
				t.Errorf("the trial of %s goes on without a request", e.Name)
			}
		}
	})
}
