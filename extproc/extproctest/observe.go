package extproctest

import (
	"context"
	"errors"
	"fmt"
	"io"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// Observed is a request that a filter in observability mode shows to a processor, together with its response.
type Observed struct {
	Header   map[string]string
	Body     [][]byte
	Response Response                             // without a header: there is none
	Address  string                               // upstream.address; empty: the filter does not send it
	Details  string                               // response.code_details; empty: the filter does not send it
	Mode     func(m *extprocv3.ProcessingRequest) // changes each message; nil: it stays
}

// Observe shows a request to the processor, as Envoy 1.40 does in observability mode. It returns an error unless the
// processor ends the stream in order and without a message. With leave, the client breaks off after that instead.
func (e *Envoy) Observe(ctx context.Context, o *Observed, leave func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := e.client.Process(ctx)
	if err != nil {
		return err
	}
	send := func(m *extprocv3.ProcessingRequest) {
		m.ObservabilityMode = true
		if o.Mode != nil {
			o.Mode(m)
		}
		if sent := stream.Send(m); sent != nil && !errors.Is(sent, io.EOF) {
			err = sent
		}
	}
	send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: headers(o.Header, o.Body == nil)}})
	for i, piece := range o.Body {
		send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: piece, EndOfStream: i == len(o.Body)-1}}})
	}
	if o.Response.Header != nil {
		attributes := map[string]any{}
		for name, value := range map[string]string{"upstream.address": o.Address, "response.code_details": o.Details} {
			if value != "" {
				attributes[name] = value
			}
		}
		fields, err := structpb.NewStruct(attributes)
		if err != nil {
			return err
		}
		send(&extprocv3.ProcessingRequest{
			Attributes: map[string]*structpb.Struct{"envoy.filters.http.ext_proc": fields},
			Request: &extprocv3.ProcessingRequest_ResponseHeaders{
				ResponseHeaders: headers(o.Response.Header, len(o.Response.Body) == 0)}})
	}
	for i, piece := range o.Response.Body {
		send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
			ResponseBody: &extprocv3.HttpBody{Body: piece, EndOfStream: leave == nil && i == len(o.Response.Body)-1}}})
	}
	if leave != nil {
		leave()
		return err
	}
	if err != nil {
		return err
	}
	if m, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("extproctest: the processor sent %v, %w; want the end of the stream", m, err)
	}
	return nil
}
