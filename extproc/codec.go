package extproc

import (
	"bytes"
	"unicode/utf8"
	"unsafe"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Codec returns protobuf's codec with a short way for headers, which are many small strings, and for pieces of bodies,
// which are nearly all bytes that pass: they are copied once when they come, out of gRPC's buffers to where the body is
// put together, and not at all when they go. A server without it (grpc.ForceServerCodecV2) does the same with more
// copies.
func Codec() encoding.CodecV2 { return codec{encoding.GetCodecV2("proto")} }

type codec struct{ encoding.CodecV2 }

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if in, ok := v.(*incoming); ok && (in.decode(data) || in.decodeHeaders(data)) {
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if out, ok := v.(*extprocv3.ProcessingResponse); ok {
		if data := encodePiece(out); data != nil {
			return data, nil
		}
	}
	return c.CodecV2.Marshal(v)
}

// incoming is a message from Envoy. It is a protobuf message, so that any codec reads it; this package's puts the
// pieces of a request body beside each other in memory.
type incoming struct {
	*extprocv3.ProcessingRequest
	declared int    // bytes of the request body, as its headers say; not above 0: they do not
	received int    // of these, how many came
	reserved int    // bytes of memory that were taken for them
	room     []byte // where they are put: what is used of it
	alone    bool   // pieces need not lie together any more
}

// next makes room for a message. The one before stays as it is.
func (in *incoming) next() any {
	in.ProcessingRequest = new(extprocv3.ProcessingRequest)
	return in
}

// release lets go of the request body: what still comes of it passes, piece by piece.
func (in *incoming) release() { in.room, in.alone = nil, true }

// The fields of a message with headers. Source: external_processor.proto, core/v3/base.proto.
const (
	requestHeadersField  protowire.Number = 2 // ProcessingRequest
	responseHeadersField protowire.Number = 3
	lastMessageField     protowire.Number = 7 // of those of which a request has one
	headersField         protowire.Number = 1 // HttpHeaders, HeaderMap
	headersEndField      protowire.Number = 3
	keyField             protowire.Number = 1 // HeaderValue
	valueField           protowire.Number = 2
	rawValueField        protowire.Number = 3
)

// decodeHeaders reads a message with headers, all of whose texts share one piece of memory. It reports whether data is
// one that it knows whole; if not, protobuf is to read it, whatever was changed.
func (in *incoming) decodeHeaders(data mem.BufferSlice) bool {
	var start [16]byte // the first field's number and length
	head := start[:gather(start[:], data, 0)]
	which, kind, tag := protowire.ConsumeTag(head)
	if tag < 0 || which != requestHeadersField && which != responseHeadersField || kind != protowire.BytesType {
		return false
	}
	length, more := protowire.ConsumeVarint(head[tag:])
	at := tag + more
	if more < 0 || length > uint64(data.Len()-at) || !in.decodeBeside(data, at+int(length)) {
		return false
	}
	headers := make([]byte, length)
	gather(headers, data, at)
	m := &struct {
		request  extprocv3.ProcessingRequest_RequestHeaders
		response extprocv3.ProcessingRequest_ResponseHeaders
		headers  extprocv3.HttpHeaders
		all      corev3.HeaderMap
	}{}
	for len(headers) > 0 {
		number, kind, tag := protowire.ConsumeTag(headers)
		switch {
		case number == headersField && kind == protowire.BytesType && m.headers.Headers == nil:
			list, size := protowire.ConsumeBytes(headers[tag:])
			if size < 0 || !readHeaders(list, &m.all) {
				return false
			}
			m.headers.Headers = &m.all
			headers = headers[tag+size:]
		case number == headersEndField && kind == protowire.VarintType:
			end, size := protowire.ConsumeVarint(headers[tag:])
			if size < 0 {
				return false
			}
			m.headers.EndOfStream = end != 0
			headers = headers[tag+size:]
		default:
			return false
		}
	}
	if m.request.RequestHeaders, m.response.ResponseHeaders = &m.headers, &m.headers; which == requestHeadersField {
		in.Request = &m.request
	} else {
		in.Request = &m.response
	}
	return true
}

// readHeaders reads a HeaderMap, whose texts stay where they are. It reports whether that is all there is.
func readHeaders(wire []byte, to *corev3.HeaderMap) bool {
	n := 0
	for left := wire; len(left) > 0; n++ {
		number, kind, tag := protowire.ConsumeTag(left)
		if number != headersField || kind != protowire.BytesType {
			return false
		}
		_, size := protowire.ConsumeBytes(left[tag:])
		if size < 0 {
			return false
		}
		left = left[tag+size:]
	}
	values := make([]corev3.HeaderValue, n)
	to.Headers = make([]*corev3.HeaderValue, n)
	for i := range values {
		_, _, tag := protowire.ConsumeTag(wire)
		header, size := protowire.ConsumeBytes(wire[tag:])
		wire = wire[tag+size:]
		to.Headers[i] = &values[i]
		for len(header) > 0 {
			number, kind, tag := protowire.ConsumeTag(header)
			if tag < 0 || kind != protowire.BytesType || number > rawValueField {
				return false
			}
			value, size := protowire.ConsumeBytes(header[tag:])
			if size < 0 || number != rawValueField && !utf8.Valid(value) { // "string" is UTF-8, "bytes" is not
				return false
			}
			header = header[tag+size:]
			switch number {
			case keyField:
				values[i].Key = text(value)
			case valueField:
				values[i].Value = text(value)
			default:
				values[i].RawValue = value
			}
		}
	}
	return true
}

// text is b as a string without a copy; nobody changes b any more.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// The fields that a piece of a body has. Source: external_processor.proto.
const (
	requestBodyField  protowire.Number = 4 // ProcessingRequest
	responseBodyField protowire.Number = 5
	bodyField         protowire.Number = 1 // HttpBody, StreamedBodyResponse
	endOfStreamField  protowire.Number = 2
)

// noMetadata is the metadata_context that Envoy ends its messages with where it has nothing to say, and how that is
// written.
var (
	noMetadata      = &corev3.Metadata{}
	noMetadataBytes = []byte{8<<3 | byte(protowire.BytesType), 0}
)

// decodeBeside reads what a message has besides the one of its fields of which a request has one: the bytes from at on.
// It reports whether there is nothing else.
func (in *incoming) decodeBeside(data mem.BufferSlice, at int) bool {
	n := data.Len() - at
	if n == 0 {
		return true
	}
	var short [2]byte
	if n == len(short) {
		if gather(short[:], data, at); bytes.Equal(short[:], noMetadataBytes) {
			in.MetadataContext = noMetadata
			return true
		}
	}
	rest := make([]byte, n)
	gather(rest, data, at)
	for left := rest; len(left) > 0; {
		number, _, size := protowire.ConsumeField(left)
		if size < 0 || number <= lastMessageField {
			return false
		}
		left = left[size:]
	}
	return proto.Unmarshal(rest, in.ProcessingRequest) == nil
}

// decode reads a message that holds a piece of a body, in the order in which protobuf writes its fields. It reports
// whether data is one; if not, protobuf is to read it, whatever was changed.
func (in *incoming) decode(data mem.BufferSlice) bool {
	var start [24]byte // two fields' numbers and lengths
	head := start[:gather(start[:], data, 0)]
	at, left := 0, data.Len()
	field := func(number protowire.Number) bool { // leaves at at the field's bytes, which go on to the message's end
		n, kind, size := protowire.ConsumeTag(head[at:])
		if size < 0 || n != number || kind != protowire.BytesType {
			return false
		}
		length, more := protowire.ConsumeVarint(head[at+size:])
		if more < 0 || size+more > left || length > uint64(left-size-more) {
			return false
		}
		at, left = at+size+more, int(length)
		return true
	}
	request := field(requestBodyField)
	if !request && !field(responseBodyField) {
		return false
	}
	beside := at + left // where the message's other fields begin
	length, whole := 0, left
	if body := at; field(bodyField) {
		length = left
		whole -= at - body + length // what follows the bytes
	}
	end := false
	switch whole {
	case 0:
	case 2:
		var last [2]byte
		gather(last[:], data, at+length)
		if last[0] != byte(protowire.EncodeTag(endOfStreamField, protowire.VarintType)) || last[1] > 1 {
			return false
		}
		end = last[1] == 1
	default:
		return false
	}
	if !in.decodeBeside(data, beside) {
		return false
	}
	if request {
		m := &struct {
			field extprocv3.ProcessingRequest_RequestBody
			body  extprocv3.HttpBody
		}{}
		m.field.RequestBody, m.body.EndOfStream = &m.body, end
		m.body.Body = in.take(length)
		gather(m.body.Body, data, at)
		in.Request = &m.field
		return true
	}
	m := &struct {
		field extprocv3.ProcessingRequest_ResponseBody
		body  extprocv3.HttpBody
	}{}
	m.field.ResponseBody, m.body.EndOfStream = &m.body, end
	m.body.Body = make([]byte, length)
	gather(m.body.Body, data, at)
	in.Request = &m.field
	return true
}

// Room for a body of unknown length doubles, from the one to the other, in bytes. Pieces of a byte then cost no more
// than large ones.
const (
	leastRoom = 512
	mostRoom  = 1 << 20
)

// take returns n bytes for the next piece of the request body, right behind the one before if there is room. Headers
// are believed only as far as four times of what has come, so that a client cannot reserve memory by promises.
func (in *incoming) take(n int) []byte {
	if in.alone {
		return make([]byte, n)
	}
	if cap(in.room)-len(in.room) < n {
		size := min(in.declared-in.received, 4*(in.received+n))
		if size < n && in.received > 0 {
			size = min(max(in.received, leastRoom), mostRoom)
		}
		in.room = make([]byte, 0, max(n, size))
		in.reserved += cap(in.room)
	}
	in.received += n
	used := len(in.room)
	in.room = in.room[:used+n]
	return in.room[used:]
}

// gather copies what data holds from byte at on, as far as it fits, and returns how much that is.
func gather(to []byte, data mem.BufferSlice, at int) (n int) {
	for _, b := range data {
		if n == len(to) {
			break
		}
		bytes := b.ReadOnlyData()
		if at >= len(bytes) {
			at -= len(bytes)
			continue
		}
		n += copy(to[n:], bytes[at:])
		at = 0
	}
	return n
}

// appendPiece appends a piece to those of a body. One that lies right behind the last in memory, where incoming puts
// it, becomes a part of it, and an empty one is dropped: so there are few, however many a client makes.
func appendPiece(pieces [][]byte, b []byte) [][]byte {
	if len(b) == 0 {
		return pieces
	}
	if n := len(pieces); n > 0 {
		last := pieces[n-1]
		if free := last[len(last):cap(last)]; len(free) >= len(b) && &free[:1][0] == &b[0] {
			pieces[n-1] = last[:len(last)+len(b)]
			return pieces
		}
	}
	return append(pieces, b)
}

// smallPiece is how many bytes are rather copied than sent from where they are.
const smallPiece = 1 << 10

// encodePiece returns the message as protobuf does if it is a streamed piece of a body and nothing else; else nil. The
// bytes are sent from where they are.
func encodePiece(m *extprocv3.ProcessingResponse) mem.BufferSlice {
	var reply *extprocv3.BodyResponse
	var field protowire.Number
	switch r := m.Response.(type) {
	case *extprocv3.ProcessingResponse_RequestBody:
		reply, field = r.RequestBody, 3
	case *extprocv3.ProcessingResponse_ResponseBody:
		reply, field = r.ResponseBody, 4
	default:
		return nil
	}
	//lint:ignore SA1019 whatever is set must arrive
	if m.DynamicMetadata != nil || m.TypedDynamicMetadata != nil || m.ModeOverride != nil || m.RequestDrain ||
		m.RequestDrainRequests ||
		m.RequestDrainResponses || m.OverrideMessageTimeout != nil ||
		m.ServerWindowUpdate != nil {
		return nil
	}
	common := reply.GetResponse()
	if common == nil || common.Status != 0 || common.HeaderMutation != nil || common.Trailers != nil ||
		common.ClearRouteCache {
		return nil
	}
	streamed, ok := common.GetBodyMutation().GetMutation().(*extprocv3.BodyMutation_StreamedResponse)
	if !ok || streamed.StreamedResponse == nil {
		return nil
	}
	piece := streamed.StreamedResponse
	if piece.EndOfStreamWithoutMessage || piece.GrpcMessageCompressed || piece.DrainComplete {
		return nil
	}
	// From the inside out: StreamedBodyResponse, BodyMutation.streamed_response, CommonResponse.body_mutation,
	// BodyResponse.response, ProcessingResponse. Fields may come in any order, so that the bytes can be last.
	const tag = 1 // bytes of each tag here
	sizes := [5]int{}
	if piece.EndOfStream {
		sizes[0] += tag + 1
	}
	if len(piece.Body) > 0 {
		sizes[0] += tag + protowire.SizeBytes(len(piece.Body))
	}
	for i := 1; i < len(sizes); i++ {
		sizes[i] = tag + protowire.SizeBytes(sizes[i-1])
	}
	small := len(piece.Body) <= smallPiece
	size := sizes[4]
	if !small {
		size -= len(piece.Body)
	}
	out := make([]byte, 0, size)
	for i, number := range [4]protowire.Number{field, 1, 3, 3} {
		out = protowire.AppendTag(out, number, protowire.BytesType)
		out = protowire.AppendVarint(out, uint64(sizes[3-i]))
	}
	if piece.EndOfStream {
		out = protowire.AppendTag(out, endOfStreamField, protowire.VarintType)
		out = append(out, 1)
	}
	if len(piece.Body) == 0 {
		return mem.BufferSlice{mem.SliceBuffer(out)}
	}
	out = protowire.AppendTag(out, bodyField, protowire.BytesType)
	out = protowire.AppendVarint(out, uint64(len(piece.Body)))
	if small {
		return mem.BufferSlice{mem.SliceBuffer(append(out, piece.Body...))}
	}
	return mem.BufferSlice{mem.SliceBuffer(out), mem.SliceBuffer(piece.Body)}
}
