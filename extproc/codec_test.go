package extproc

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/structpb"
)

// cut splits data into buffers of random sizes, as gRPC delivers frames.
func cut(random *rand.Rand, data []byte) (out mem.BufferSlice) {
	for len(data) > 0 {
		n := 1 + random.IntN(min(len(data), 1+random.IntN(40000)))
		out = append(out, mem.SliceBuffer(data[:n]))
		data = data[n:]
	}
	return out
}

// inOrder encodes a message with its fields in the order of their numbers, as Envoy does. Go's protobuf uses another
// order.
func inOrder(t testing.TB, m *extprocv3.ProcessingRequest) []byte {
	t.Helper()
	beside := proto.Clone(m).(*extprocv3.ProcessingRequest)
	beside.Request = nil
	var wire []byte
	for _, part := range []*extprocv3.ProcessingRequest{{Request: m.Request}, beside} {
		var err error
		if wire, err = (proto.MarshalOptions{}).MarshalAppend(wire, part); err != nil {
			t.Fatal(err)
		}
	}
	return wire
}

func someBody(random *rand.Rand) []byte {
	b := make([]byte, []int{0, 1, 127, 128, 1000, 1025, 16384, 70000}[random.IntN(8)])
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return b
}

func someHeaders(random *rand.Rand) *extprocv3.HttpHeaders {
	h := &extprocv3.HttpHeaders{EndOfStream: random.IntN(2) == 0}
	if random.IntN(5) > 0 {
		h.Headers = &corev3.HeaderMap{}
		for i := range random.IntN(20) {
			value := []byte(strings.Repeat("\xff", random.IntN(300)))
			h.Headers.Headers = append(
				h.Headers.Headers,
				&corev3.HeaderValue{Key: strings.Repeat("k", i), RawValue: value},
				&corev3.HeaderValue{Value: "ü"},
			)
		}
	}
	return h
}

// TestCodecReads: the codec decodes Envoy's messages as protobuf does, with any split into buffers.
func TestCodecReads(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	short := 0
	for range 500 {
		want := &extprocv3.ProcessingRequest{}
		piece := &extprocv3.HttpBody{Body: someBody(random), EndOfStream: random.IntN(2) == 0}
		if random.IntN(2) == 0 {
			want.MetadataContext = &corev3.Metadata{} // as Envoy has it in every message
		}
		switch random.IntN(8) {
		case 0:
			want.Request = &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: someHeaders(random)}
			want.ProtocolConfig = &extprocv3.ProtocolConfiguration{RequestBodyMode: fullDuplex}
			want.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb": {}}}
		case 7:
			want.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: someHeaders(random)}
		case 1:
			want.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: piece}
			want.Attributes = map[string]*structpb.Struct{"a": {}}
		case 2:
			piece.EndOfStreamWithoutMessage = true
			want.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: piece}
		case 3, 4:
			want.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: piece}
		default:
			want.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: piece}
		}
		wire := inOrder(t, want)
		in := &incoming{}
		in.next()
		if err := Codec().Unmarshal(cut(random, wire), in); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(in.ProcessingRequest, want) {
			t.Fatalf("a message of %d bytes was decoded as another message", len(wire))
		}
		in.next()
		if in.decode(cut(random, wire)) {
			short++
		}
	}
	if short < 230 {
		t.Errorf("only %d of 500 messages were decoded by the codec itself", short)
	}
}

// FuzzCodecReads: the codec refuses and decodes the same bytes as protobuf, to the same messages.
func FuzzCodecReads(f *testing.F) {
	for _, m := range []*extprocv3.ProcessingRequest{
		{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: []byte("body"),
			EndOfStream: true}}},
		{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{}}},
		{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: someHeaders(rand.New(rand.NewPCG(1, 1)))},
			ObservabilityMode: true,
			ProtocolConfig:    &extprocv3.ProtocolConfiguration{RequestBodyMode: fullDuplex}},
	} {
		f.Add(inOrder(f, m))
	}
	f.Add([]byte("\x22\x02\x10\x01\x42\x00")) // Envoy's
	f.Add([]byte("\x22\x01\x0a\x42\x00"))     // a length that is not in the field it belongs to
	f.Add([]byte("\x22\x06\x0a\x00\x10\x01\x10\x01"))
	f.Add([]byte("\x22\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x0a\x01x"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		want := &extprocv3.ProcessingRequest{}
		err := proto.Unmarshal(wire, want)
		data := mem.BufferSlice{mem.SliceBuffer(wire)}
		in := &incoming{}
		in.next()
		if in.decode(data) && (err != nil || !proto.Equal(in.ProcessingRequest, want)) {
			t.Errorf("read %v, which protobuf reads as %v, %v", in.ProcessingRequest, want, err)
		}
	})
}

// TestCodecWrites: protobuf decodes each encoded reply to the same reply, whether it has only a piece of a body or
// other fields too.
func TestCodecWrites(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	check := func(m *extprocv3.ProcessingResponse) {
		t.Helper()
		data, err := Codec().Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		got := &extprocv3.ProcessingResponse{}
		if err := proto.Unmarshal(data.Materialize(), got); err != nil || !proto.Equal(got, m) {
			t.Fatalf("%v arrives as %v, %v", m, got, err)
		}
	}
	reply := func(d direction) *extprocv3.ProcessingResponse {
		return appendBody(nil, d, someBody(random), random.IntN(2) == 0)[0]
	}
	// others sets, one after the other, each field of a message that has its zero value, at every depth.
	var others func(whole *extprocv3.ProcessingResponse, m protoreflect.Message)
	others = func(whole *extprocv3.ProcessingResponse, m protoreflect.Message) {
		fields := m.Descriptor().Fields()
		for i := range fields.Len() {
			f := fields.Get(i)
			switch {
			case m.Has(f):
				if f.Message() != nil && !f.IsList() && !f.IsMap() {
					others(whole, m.Mutable(f).Message())
				}
				continue
			case f.ContainingOneof() != nil && m.WhichOneof(f.ContainingOneof()) != nil, f.IsMap():
				continue
			case f.IsList():
				m.Mutable(f).List().Append(m.Mutable(f).List().NewElement())
			case f.Message() != nil:
				m.Set(f, m.NewField(f))
			case f.Kind() == protoreflect.BoolKind:
				m.Set(f, protoreflect.ValueOfBool(true))
			case f.Kind() == protoreflect.EnumKind:
				m.Set(f, protoreflect.ValueOfEnum(1))
			case f.Kind() == protoreflect.BytesKind:
				continue // the body, when it is empty
			default:
				t.Fatalf("this test does not know the kind of field %s", f.FullName())
			}
			check(whole)
			m.Clear(f)
		}
	}
	for range 200 {
		for _, d := range []direction{requestDirection, responseDirection} {
			m := reply(d)
			if encodePiece(m) == nil {
				t.Fatal("the codec does not encode a piece of a body itself")
			}
			check(m)
		}
	}
	others(reply(requestDirection), reply(requestDirection).ProtoReflect())
	m := reply(responseDirection)
	others(m, m.ProtoReflect())
	check(&extprocv3.ProcessingResponse{})
	check(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{}})
}

// TestPiecesLieTogether: if a body's size is declared, its pieces are adjacent in memory and join without a copy.
// Otherwise the joined pieces have the same bytes, and small pieces are merged.
func TestPiecesLieTogether(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for _, declared := range []int{-1, 0, 10, 100_000, 300_000} {
		for _, most := range []int{1, 30, 30_000} {
			in := &incoming{declared: declared}
			var pieces [][]byte
			var want []byte
			for len(want) < 100_000 {
				b := make([]byte, min(random.IntN(most+1), 100_000-len(want)))
				for i := range b {
					b[i] = byte(random.Uint32())
				}
				want = append(want, b...)
				p := in.take(len(b))
				copy(p, b)
				pieces = appendPiece(pieces, p)
			}
			if !bytes.Equal(bytes.Join(pieces, nil), want) {
				t.Fatal("the joined body differs from its pieces")
			}
			if len(pieces) > 20 || in.reserved > 6*len(want) {
				t.Errorf(
					"declared %d, up to %d: %d pieces, %d bytes are reserved",
					declared,
					most,
					len(pieces),
					in.reserved,
				)
			}
		}
	}
	in := &incoming{declared: 1000}
	first := in.take(400)
	pieces := appendPiece(appendPiece(appendPiece(appendPiece(nil, nil), first), in.take(0)), in.take(600))
	if len(pieces) != 1 || len(pieces[0]) != 1000 || &pieces[0][0] != &first[0] {
		t.Error("adjacent pieces were copied")
	}
	apart := [][]byte{make([]byte, 1, 10), make([]byte, 1, 10)}
	if len(appendPiece(apart[:1:1], apart[1])) != 2 {
		t.Error("separate pieces were joined")
	}
}
