package connlimit

import (
	"encoding/binary"
	"errors"
	"io"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// Method is what the streams of a gRPC method may use. The zero value has no limits of its own.
type Method struct {
	Codec   encoding.CodecV2
	Message int  // bytes of a message, with a Codec
	Streams int  // open at once, over all connections; 0: no limit
	Idle    bool // a stream does not keep its connection from being replaced, because it may wait without end
	open    atomic.Int64
}

// Receiver is a message that is asked before its bytes are received. It refuses them by an error.
type Receiver interface{ Receiving(bytes int) error }

// wire is grpc's own stream below a grpc.ServerStream. grpc.MaxRecvMsgSize is one number for all services of a server,
// and a message counts nowhere until all of it is in memory. Here its length is known first: the peer can send a
// message that is larger than a stream's window only after Read was called.
//
// Source: grpc-go 1.85.0, internal/transport.ServerStream.
type wire interface {
	ReadMessageHeader(header []byte) error
	Read(bytes int) (mem.BufferSlice, error)
}

// stream is a stream with the limits of its method.
type stream struct {
	grpc.ServerStream
	wire
	of   *Method
	conn *Conn
	used bool
	head [5]byte // of a message: whether it is compressed, and its length
}

// Serve runs the handler of a stream with the limits of its method; nil: none. The stream counts as a request of its
// connection from its first message on, unless it is Idle. A nil l is allowed.
func (l *Listener) Serve(server any, s grpc.ServerStream, of *Method, handler grpc.StreamHandler) error {
	if of == nil {
		of = new(Method)
	}
	defer of.open.Add(-1)
	if n := of.open.Add(1); of.Streams > 0 && n > int64(of.Streams) {
		return status.Errorf(codes.ResourceExhausted, "kvepp: more than %d streams of this method are open", of.Streams)
	}
	limited := &stream{ServerStream: s, of: of}
	if of.Codec != nil { // with another version of grpc the server's limits are the only ones
		limited.wire, _ = grpc.ServerTransportStreamFromContext(s.Context()).(wire)
	}
	if p, ok := peer.FromContext(s.Context()); ok && l != nil && !of.Idle {
		limited.conn = l.Find(p.LocalAddr, p.Addr)
		defer func() {
			if limited.used {
				limited.conn.End()
			}
		}()
	}
	return handler(server, limited)
}

// RecvMsg receives a message, and counts the stream from the first one on.
func (s *stream) RecvMsg(m any) (err error) {
	if s.wire == nil {
		err = s.ServerStream.RecvMsg(m)
	} else {
		err = s.receive(m)
	}
	if err == nil && !s.used && !s.of.Idle {
		s.used = true
		s.conn.Begin()
	}
	return err
}

// receive receives a message within the limits. Compressed messages, which no proxy sends, are refused: they can be a
// thousand times as large in memory.
func (s *stream) receive(m any) error {
	if err := s.ReadMessageHeader(s.head[:]); err != nil {
		return err
	}
	n := int(binary.BigEndian.Uint32(s.head[1:]))
	switch {
	case s.head[0] != 0:
		return status.Error(codes.Unimplemented, "kvepp: messages must not be compressed")
	case n > s.of.Message:
		return status.Errorf(codes.ResourceExhausted, "kvepp: a message of %d bytes, more than %d", n, s.of.Message)
	}
	if r, ok := m.(Receiver); ok {
		if err := r.Receiving(n); err != nil {
			return err
		}
	}
	data, err := s.Read(n)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	defer data.Free()
	return s.of.Codec.Unmarshal(data, m)
}
