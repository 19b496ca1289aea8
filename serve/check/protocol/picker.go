package protocol

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"sync"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
)

// script says what the picker does with a request.
type script struct {
	endpoints string // the value of the endpoint's header and metadata
	refuse    bool   // answer 429
	away      bool   // end the stream with an error, as if no picker answered
}

// call is what one stream of the gateway told the picker.
type call struct {
	modes      bool // it says its body modes
	request    filterv3.ProcessingMode_BodySendMode
	response   filterv3.ProcessingMode_BodySendMode
	path       bool
	attributes []string
	subset     bool
	trailers   bool   // of the request
	responded  bool   // the response's headers came
	pieces     int    // of the response's body
	served     string // the endpoint that served, as the gateway says
}

// picker is a scripted endpoint picker.
type picker struct {
	extprocv3.UnimplementedExternalProcessorServer
	mu      sync.Mutex
	scripts map[string]script  // guarded by mu; by request
	calls   map[string][]*call // guarded by mu
}

// The names of the endpoint-picker protocol (Gateway API Inference Extension, proposal 004).
const (
	endpointHeader = "x-gateway-destination-endpoint"
	servedKey      = "x-gateway-destination-endpoint-served"
	namespace      = "envoy.lb"
	subset         = "envoy.lb.subset_hint"
)

// idHeader names a request for the picker and the engines.
const idHeader = "x-kvepp-check"

const (
	maxPiece   = 62000 // bytes; several proxies cap a message at 64 KiB
	fullDuplex = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
)

func (p *picker) begin(h *corev3.HeaderMap, c *call) script {
	id := ""
	for _, v := range h.GetHeaders() {
		value := string(v.GetRawValue()) + v.GetValue()
		switch strings.ToLower(v.GetKey()) {
		case ":path":
			c.path = value != ""
		case idHeader:
			id = value
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls[id] = append(p.calls[id], c)
	return p.scripts[id]
}

// Process plays the script of one request.
func (p *picker) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	c := new(call)
	var s script
	var held [][]byte // pieces of the body, until the headers are answered
	answered := false
	for {
		in, err := stream.Recv()
		if err != nil {
			return nil
		}
		p.mu.Lock()
		c.learn(in)
		p.mu.Unlock()
		var out []*extprocv3.ProcessingResponse
		streamed := c.request == fullDuplex || !c.modes
		switch m := in.Request.(type) {
		case *extprocv3.ProcessingRequest_RequestHeaders:
			s = p.begin(m.RequestHeaders.GetHeaders(), c)
			switch {
			case s.away:
				return status.Error(codes.Unavailable, "kvepp check plays a picker that is away")
			case s.refuse:
				return stream.Send(refusal())
			}
			if answered = !streamed || m.RequestHeaders.GetEndOfStream(); answered {
				out = append(out, s.choice())
			}
		case *extprocv3.ProcessingRequest_RequestBody:
			b := m.RequestBody
			if answered {
				out = relay(b, streamed, requestBody)
			} else if held = append(held, b.GetBody()); b.GetEndOfStream() {
				out, answered = s.choiceAndBody(held, true), true
			}
		case *extprocv3.ProcessingRequest_RequestTrailers:
			if !answered {
				out, answered = s.choiceAndBody(held, false), true
			}
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{
				RequestTrailers: &extprocv3.TrailersResponse{}}})
		case *extprocv3.ProcessingRequest_ResponseHeaders:
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{
				ResponseHeaders: &extprocv3.HeadersResponse{}}})
		case *extprocv3.ProcessingRequest_ResponseBody:
			out = relay(m.ResponseBody, c.response == fullDuplex || !c.modes, responseBody)
		case *extprocv3.ProcessingRequest_ResponseTrailers:
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{
				ResponseTrailers: &extprocv3.TrailersResponse{}}})
		}
		for _, m := range out {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
	}
}

// learn notes what a message says of the gateway. The caller holds picker.mu.
func (c *call) learn(in *extprocv3.ProcessingRequest) {
	if modes := in.GetProtocolConfig(); modes != nil {
		c.modes, c.request, c.response = true, modes.GetRequestBodyMode(), modes.GetResponseBodyMode()
	}
	for _, space := range in.GetAttributes() {
		c.attributes = append(c.attributes, slices.Collect(maps.Keys(space.GetFields()))...)
	}
	all := in.GetMetadataContext().GetFilterMetadata()
	c.subset = c.subset || all[subset] != nil
	switch in.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestTrailers:
		c.trailers = true
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		c.responded = true
		c.served = all[namespace].GetFields()[servedKey].GetStringValue()
	case *extprocv3.ProcessingRequest_ResponseBody:
		c.pieces++
	}
}

// choice names the script's endpoints in header and metadata.
func (s script) choice() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
			Response: &extprocv3.CommonResponse{ClearRouteCache: true, HeaderMutation: &extprocv3.HeaderMutation{
				SetHeaders: []*corev3.HeaderValueOption{{
					Header:       &corev3.HeaderValue{Key: endpointHeader, RawValue: []byte(s.endpoints)},
					AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
				}}}}}},
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{namespace: structpb.NewStructValue(
			&structpb.Struct{Fields: map[string]*structpb.Value{
				endpointHeader: structpb.NewStringValue(s.endpoints)}})}},
	}
}

func (s script) choiceAndBody(body [][]byte, end bool) []*extprocv3.ProcessingResponse {
	whole := &extprocv3.HttpBody{Body: bytes.Join(body, nil), EndOfStream: end}
	return append([]*extprocv3.ProcessingResponse{s.choice()}, relay(whole, true, requestBody)...)
}

const refusalText = `{"error":{"message":"kvepp check refuses this request"}}`

func refusal() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extprocv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: typev3.StatusCode_TooManyRequests}, Body: []byte(refusalText),
			Details: "kvepp_check"}}} // Envoy's configurations in manifests/envoy keep bodies with kvepp_ details
}

func requestBody(r *extprocv3.BodyResponse) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: r}}
}

func responseBody(r *extprocv3.BodyResponse) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: r}}
}

// relay answers a part of a body without a change.
func relay(
	b *extprocv3.HttpBody,
	streamed bool,
	wrap func(*extprocv3.BodyResponse) *extprocv3.ProcessingResponse,
) (out []*extprocv3.ProcessingResponse) {
	if !streamed {
		return append(out, wrap(&extprocv3.BodyResponse{}))
	}
	for body, end := b.GetBody(), b.GetEndOfStream(); ; {
		piece := body[:min(len(body), maxPiece)]
		body = body[len(piece):]
		out = append(out, wrap(&extprocv3.BodyResponse{Response: &extprocv3.CommonResponse{
			BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_StreamedResponse{
				StreamedResponse: &extprocv3.StreamedBodyResponse{Body: piece, EndOfStream: end && len(body) == 0}}}}}))
		if len(body) == 0 {
			return out
		}
	}
}
