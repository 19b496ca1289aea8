package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kvepp/test/harness/stack"
)

// http2Upstream makes Envoy use HTTP/2 to the pool, as endpoints that serve gRPC need it.
func http2Upstream(config any) {
	for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
		if cluster := c.(map[string]any); cluster["name"] == "pool" {
			cluster["typed_extension_protocol_options"] = map[string]any{
				"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": map[string]any{
					"@type": "type.googleapis.com/" +
						"envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
					"explicit_http_config": map[string]any{"http2_protocol_options": map[string]any{}}},
			}
		}
	}
}

// TestGRPC: calls of an engine that serves gRPC pass unchanged through Envoy and kvepp in HTTP/2: unary calls,
// bidirectional streams in which each side waits for the other, metadata, trailers, errors and cancellations. kvepp's
// own refusals are gRPC errors.
func TestGRPC(t *testing.T) {
	var cancelled atomic.Int32
	echo := grpc.NewServer(
		grpc.MaxRecvMsgSize(8<<20),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(stream)
			in, _ := metadata.FromIncomingContext(stream.Context())
			if err := stream.SendHeader(metadata.Pairs("x-method", method, "x-data-bin", "\x00\xff")); err != nil {
				return err
			}
			n := 0
			for {
				message := &wrapperspb.BytesValue{}
				switch err := stream.RecvMsg(message); {
				case errors.Is(err, io.EOF):
					stream.SetTrailer(
						metadata.Pairs("x-messages", fmt.Sprint(n), "x-said", strings.Join(in.Get("x-say"), ",")),
					)
					if strings.HasSuffix(method, "/Fail") {
						return status.Error(codes.OutOfRange, "out of range; ünïcödé")
					}
					return nil
				case err != nil:
					cancelled.Add(1)
					return err
				}
				n++
				if err := stream.SendMsg(message); err != nil {
					return err
				}
			}
		}),
	)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go echo.Serve(l)
	t.Cleanup(echo.Stop)
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    []string{l.Addr().String()},
			KveppFlags: []string{"--router-kv-events=false", "--engine=vllm"},
			EditEnvoy:  http2Upstream,
		},
	)
	other, err := s.StartEnvoy(t.Context(), "original-dst.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	talk := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	for name, envoy := range map[string]*stack.Envoy{"override-host": s.Envoy, "original-dst": other} {
		conn, err := grpc.NewClient(
			strings.TrimPrefix(envoy.URL, "http://"),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(8<<20)),
		)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		// The last one is a valid method name too.
		for _, method := range []string{"/vllm.Generate/Talk", "/vllm.Generate/Fail", "/v1/chat/completions"} {
			call, err := conn.NewStream(metadata.AppendToOutgoingContext(ctx, "x-say", "hello"), talk, method)
			if err != nil {
				t.Fatal(name, err)
			}
			for i, size := range []int{0, 1, 100, 16 << 10, 70 << 10, 3 << 20, 7} {
				sent := bytes.Repeat([]byte{byte(i), 'x', 0}, size/3+1)[:size]
				if err := call.SendMsg(&wrapperspb.BytesValue{Value: sent}); err != nil {
					t.Fatal(name, method, err)
				}
				got := &wrapperspb.BytesValue{}
				if err := call.RecvMsg(got); err != nil || !bytes.Equal(got.Value, sent) {
					t.Fatalf("%s %s: %d bytes came back, changed to %d, %v", name, method, size, len(got.Value), err)
				}
			}
			if err := call.CloseSend(); err != nil {
				t.Fatal(err)
			}
			err = call.RecvMsg(&wrapperspb.BytesValue{})
			head, _ := call.Header()
			trailer := call.Trailer()
			if fmt.Sprint(
				head.Get("x-method"),
				head.Get("x-data-bin"),
				trailer.Get("x-messages"),
				trailer.Get("x-said"),
			) != fmt.Sprint(
				[]string{method},
				[]string{"\x00\xff"},
				[]string{"7"},
				[]string{"hello"},
			) {
				t.Errorf("%s %s: header %q, trailer %q", name, method, head, trailer)
			}
			if code := status.Convert(err); strings.HasSuffix(method, "/Fail") &&
				(code.Code() != codes.OutOfRange || code.Message() != "out of range; ünïcödé") ||
				!strings.HasSuffix(method, "/Fail") && !errors.Is(err, io.EOF) {
				t.Errorf("%s %s: ended with %v", name, method, err)
			}
		}
		var wait sync.WaitGroup
		for i := range 50 {
			wait.Go(func() {
				out, want := &wrapperspb.BytesValue{}, bytes.Repeat([]byte{byte(i)}, 1000*i)
				if err := conn.Invoke(ctx, "/vllm.Generate/Once", &wrapperspb.BytesValue{Value: want},
					out); err != nil ||
					!bytes.Equal(out.Value, want) {
					t.Errorf("%s: call %d: %d bytes, %v", name, i, len(out.Value), err)
				}
			})
		}
		wait.Wait()
		before := cancelled.Load()
		brief, leave := context.WithCancel(ctx)
		call, err := conn.NewStream(brief, talk, "/vllm.Generate/Talk")
		if err == nil {
			err = call.SendMsg(&wrapperspb.BytesValue{Value: []byte("and away")})
		}
		if err == nil {
			err = call.RecvMsg(&wrapperspb.BytesValue{})
		}
		if err != nil {
			t.Fatal(name, err)
		}
		if n := metric(t, s, "kvepp_active_requests"); n != 1 {
			t.Errorf("%s: %v calls are booked while one runs", name, n)
		}
		leave()
		eventually(t, func() error {
			if cancelled.Load() == before {
				return fmt.Errorf("%s: the engine does not see that its caller cancelled", name)
			}
			return nil
		})
		allFreed(t, s)
	}
	if err := s.ReplaceEndpoints("endpoints: []\n"); err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(
		strings.TrimPrefix(s.Envoy.URL, "http://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
	)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	eventually(t, func() error {
		err := conn.Invoke(ctx, "/vllm.Generate/Once", &wrapperspb.BytesValue{}, &wrapperspb.BytesValue{})
		if got := status.Convert(err); got.Code() != codes.Unavailable ||
			!strings.Contains(got.Message(), "no endpoint is available") {
			return fmt.Errorf("without endpoints: %v", err)
		}
		return nil
	})
	allFreed(t, s)
}
