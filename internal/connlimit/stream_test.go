package connlimit

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// picky is a message that refuses to be received if it is not small.
type picky struct{ *wrapperspb.BytesValue }

var errTooMuch = status.Error(codes.Aborted, "too much")

func (picky) Receiving(n int) error {
	if n > 10 {
		return errTooMuch
	}
	return nil
}

// serve serves a method whose streams answer each message with its length, in which "picky" messages are picky.
func serve(t *testing.T, most int, of *Method) (*Listener, func() *grpc.ClientConn) {
	t.Helper()
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := New(raw, most)
	server := grpc.NewServer(
		grpc.StreamInterceptor(func(server any, s grpc.ServerStream, _ *grpc.StreamServerInfo,
			handler grpc.StreamHandler) error {
			return l.Serve(server, s, of, handler)
		}),
		grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(s)
			for {
				in := &wrapperspb.BytesValue{}
				var m any = in
				if strings.HasSuffix(method, "/picky") {
					m = picky{in}
				}
				if err := s.RecvMsg(m); err != nil {
					return err
				}
				if err := s.SendMsg(in); err != nil {
					return err
				}
			}
		}),
	)
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return l, func() *grpc.ClientConn {
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
}

// talk opens a stream and exchanges one message of n bytes.
func talk(ctx context.Context, conn *grpc.ClientConn, method string, n int, o ...grpc.CallOption) (grpc.ClientStream,
	error) {
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, o...)
	if err != nil {
		return nil, err
	}
	return s, exchange(s, n)
}

func exchange(s grpc.ClientStream, n int) error {
	sent, got := &wrapperspb.BytesValue{Value: bytes.Repeat([]byte("x"), n)}, &wrapperspb.BytesValue{}
	if err := s.SendMsg(sent); err != nil {
		return s.RecvMsg(got) // the server has ended the stream: why
	}
	if err := s.RecvMsg(got); err != nil {
		return err
	}
	if !bytes.Equal(got.Value, sent.Value) {
		return errors.New("another message came back")
	}
	return nil
}

func protobuf() encoding.CodecV2 { return encoding.GetCodecV2("proto") }

// refusing is a codec that fails the test if it is asked to read a message that should have been refused before.
type refusing struct {
	encoding.CodecV2
	t    *testing.T
	most int
}

func (r refusing) Unmarshal(data mem.BufferSlice, v any) error {
	if data.Len() > r.most {
		r.t.Errorf("a message of %d bytes was received", data.Len())
	}
	return r.CodecV2.Unmarshal(data, v)
}

// TestMessages: messages up to the limit pass, in any number. Larger ones, compressed ones, and those that refuse
// themselves end their stream before they are received.
func TestMessages(t *testing.T) {
	const most = 100_000
	_, dial := serve(t, 8, &Method{Codec: refusing{protobuf(), t, most}, Message: most})
	conn := dial()
	s, err := talk(t.Context(), conn, "/a/b", 0)
	for _, n := range []int{1, 70_000, 0, most - 4, 5} {
		if err == nil {
			err = exchange(s, n)
		}
	}
	if err != nil {
		t.Error(err)
	}
	for name, c := range map[string]struct {
		method  string
		bytes   int
		options []grpc.CallOption
		want    codes.Code
	}{
		"too large":      {"/a/b", most + 1, nil, codes.ResourceExhausted},
		"huge":           {"/a/b", 3 << 20, nil, codes.ResourceExhausted},
		"compressed":     {"/a/b", 1000, []grpc.CallOption{grpc.UseCompressor(gzip.Name)}, codes.Unimplemented},
		"small":          {"/a/picky", 5, nil, codes.OK},
		"refuses itself": {"/a/picky", 50, nil, codes.Aborted},
	} {
		if _, err := talk(t.Context(), conn, c.method, c.bytes, c.options...); status.Code(err) != c.want {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestIdleStreams: a connection with streams of an idle method makes room for new ones, one with others does not.
// Streams of a method are bounded over all connections, and are counted until they end.
func TestIdleStreams(t *testing.T) {
	for _, idle := range []bool{true, false} {
		_, dial := serve(t, 2, &Method{Codec: protobuf(), Message: 100, Idle: idle})
		var streams []grpc.ClientStream
		for range 2 {
			s, err := talk(t.Context(), dial(), "/a/b", 1)
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, s)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err := talk(ctx, dial(), "/a/b", 1)
		cancel()
		if (err == nil) != idle {
			t.Errorf("idle %v: a third connection: %v", idle, err)
		}
		if err := exchange(streams[0], 1); (err == nil) == idle {
			t.Errorf("idle %v: the oldest stream: %v", idle, err)
		}
	}
	_, dial := serve(t, 8, &Method{Codec: protobuf(), Message: 100, Streams: 2})
	ctx, cancel := context.WithCancel(t.Context())
	for i := range 3 {
		if _, err := talk(ctx, dial(), "/a/b", 1); i < 2 != (err == nil) || err != nil &&
			status.Code(err) != codes.ResourceExhausted {
			t.Errorf("stream %d of at most 2: %v", i+1, err)
		}
	}
	cancel()
	for deadline := time.Now().Add(30 * time.Second); ; <-time.After(time.Millisecond) {
		_, err := talk(t.Context(), dial(), "/a/b", 1)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("after the others have ended: ", err)
		}
	}
}

// TestSilentStreams: a stream without a message does not keep its connection from being replaced.
func TestSilentStreams(t *testing.T) {
	_, dial := serve(t, 2, &Method{Codec: protobuf(), Message: 100})
	for range 2 {
		s, err := dial().NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/a/b")
		if err != nil {
			t.Fatal(err)
		}
		go s.RecvMsg(&wrapperspb.BytesValue{})
	}
	if _, err := talk(t.Context(), dial(), "/a/b", 1); err != nil {
		t.Errorf("a connection with a request: %v", err)
	}
}

// TestCrowdsReplaceThemselves: many connections with former requests do not keep out new ones before their first
// request, and the other way round.
func TestCrowdsReplaceThemselves(t *testing.T) {
	const most = 20
	w := start(t, most)
	var former []net.Conn
	for range most {
		c := w.open()
		if err := errors.Join(ask(c, "/"), responded(c)); err != nil {
			t.Fatal(err)
		}
		former = append(former, c)
	}
	fresh := w.open()
	for range most/2 - 1 {
		w.open()
	}
	if err := errors.Join(ask(fresh, "/"), responded(fresh)); err != nil {
		t.Errorf("a new connection beside %d with former requests: %v", most, err)
	}
	for range 3 * most {
		w.open()
	}
	if last := former[most-1]; errors.Join(ask(last, "/"), responded(last)) != nil {
		t.Error("a connection with a former request was replaced by a crowd without any")
	}
}
