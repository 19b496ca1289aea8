package main

import (
	"fmt"
	"net"
	"net/http"
	"runtime/metrics"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
)

// echo is a minimal endpoint picker: it holds the header reply until the body is complete, sets one header, and sends
// everything back in the pieces in which it came. It uses grpc-go and the generated code without optimisations.
type echo struct {
	extprocv3.UnimplementedExternalProcessorServer
}

func streamed(body []byte, end bool) *extprocv3.BodyResponse {
	return &extprocv3.BodyResponse{Response: &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{
		Mutation: &extprocv3.BodyMutation_StreamedResponse{
			StreamedResponse: &extprocv3.StreamedBodyResponse{Body: body, EndOfStream: end},
		}}}}
}

func (echo) Process(envoy extprocv3.ExternalProcessor_ProcessServer) error {
	header := &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
			Response: &extprocv3.CommonResponse{
				HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{{
					Header: &corev3.HeaderValue{
						Key:      "x-gateway-destination-endpoint",
						RawValue: []byte("127.0.0.1:1"),
					}}}},
			}}},
	}
	var body [][]byte
	for {
		in, err := envoy.Recv()
		if err != nil {
			return nil // Envoy has ended the stream
		}
		var out []*extprocv3.ProcessingResponse
		switch m := in.Request.(type) {
		case *extprocv3.ProcessingRequest_RequestHeaders:
			if m.RequestHeaders.EndOfStream {
				out = append(out, header)
			}
		case *extprocv3.ProcessingRequest_RequestBody:
			if body = append(body, m.RequestBody.Body); !m.RequestBody.EndOfStream {
				break
			}
			out = append(out, header)
			for i, piece := range body {
				out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
					RequestBody: streamed(piece, i == len(body)-1)}})
			}
			body = nil
		case *extprocv3.ProcessingRequest_ResponseHeaders:
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{
				ResponseHeaders: &extprocv3.HeadersResponse{}}})
		case *extprocv3.ProcessingRequest_ResponseBody:
			out = append(out, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{
				ResponseBody: streamed(m.ResponseBody.Body, m.ResponseBody.EndOfStream)}})
		}
		for _, m := range out {
			if err := envoy.Send(m); err != nil {
				return nil
			}
		}
	}
}

// serveEcho serves the protocol on the first of two ports, and on the second its allocations, in the format of kvepp's
// metrics.
func serveEcho(port string) error {
	l, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	next := fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port+1)
	go func() {
		fail(http.ListenAndServe(next, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			s := []metrics.Sample{{Name: "/gc/heap/allocs:objects"}, {Name: "/gc/heap/allocs:bytes"}}
			metrics.Read(s)
			fmt.Fprintf(
				w,
				"go_memstats_mallocs_total %d\ngo_memstats_alloc_bytes_total %d\n",
				s[0].Value.Uint64(),
				s[1].Value.Uint64(),
			)
		})))
	}()
	server := grpc.NewServer()
	extprocv3.RegisterExternalProcessorServer(server, echo{})
	return server.Serve(l)
}
