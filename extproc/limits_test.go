package extproc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"kvepp/extproc/extproctest"
	"kvepp/internal/metrics/metricstest"
	"kvepp/router/budget"
)

// TestStreamsAreLimited: kvepp refuses a request above MaxStreams with an HTTP response, which a proxy sends to the
// client even if it fails open.
func TestStreamsAreLimited(t *testing.T) {
	b := newBench(t, Config{MaxStreams: 3})
	var running, done sync.WaitGroup
	end := make(chan struct{})
	for range 3 {
		running.Add(1)
		done.Go(func() {
			out, err := b.Do(
				t.Context(),
				&extproctest.Request{
					Header: chat,
					Body:   [][]byte{[]byte(chatBody)},
					Upstream: func(r *extproctest.Routed) extproctest.Response {
						running.Done()
						<-end
						return response("x")(r)
					},
				},
			)
			if err != nil || out.Immediate != nil {
				t.Error(out, err)
			}
		})
	}
	running.Wait()
	if n := b.server.Streams(); n != 3 {
		t.Errorf("%d streams are followed, want 3", n)
	}
	out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}})
	if err != nil || out.Immediate.GetStatus().GetCode() != 429 || out.Set["retry-after"] != "1" ||
		out.Set[reasonHeader] != "too_many_requests" ||
		out.Set[droppedHeader] != "rejected-saturated" ||
		out.Immediate.GetDetails() != "kvepp_too_many_requests" {
		t.Errorf("%v %v %v", err, out.Immediate, out.Set)
	}
	close(end)
	done.Wait()
	b.idle(t)
	for deadline := time.Now().Add(30 * time.Second); b.server.Streams() > 0 && time.Now().Before(deadline); {
		<-time.After(time.Millisecond)
	}
	if out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)},
		Upstream: response("x")}); err != nil ||
		out.Immediate != nil {
		t.Errorf("after the others have ended: %v %v", err, out)
	}
}

// TestStreamsBeyondAllBounds: above twice MaxStreams, kvepp ends new streams with a gRPC error, before they send a
// message.
func TestStreamsBeyondAllBounds(t *testing.T) {
	b := newBench(t, Config{MaxStreams: 2})
	var streams sync.WaitGroup
	silent, begun := make(chan struct{}), make(chan struct{}, 4)
	for range 4 {
		streams.Go(func() {
			b.server.Process(&wire{ctx: t.Context(), message: func(int) *extprocv3.ProcessingRequest {
				begun <- struct{}{}
				<-silent
				return nil
			}})
		})
	}
	for range 4 {
		<-begun
	}
	if err := b.server.Process(&wire{ctx: t.Context()}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v", err)
	}
	close(silent)
	streams.Wait()
	if n := b.server.Streams(); n != 0 {
		t.Errorf("%d streams are left", n)
	}
}

// heldOf returns the size of a budget with room for so many bytes of bodies.
func heldOf(n int) int { return n * 56 / 17 }

// TestHeldBytesAreLimited: bytes of a body count until kvepp has sent them on.
func TestHeldBytesAreLimited(t *testing.T) {
	b := newBench(t, Config{Memory: budget.New(heldOf(120_000)), MaxParseBytes: 90_000})
	blank := bytes.Repeat([]byte(" "), 50_000)
	for name, body := range map[string][][]byte{
		"short":           {[]byte(chatBody)},
		"streamed beyond": {blank, blank[:45_000], blank, blank, blank}, // by load once it is above --max-parse-bytes
	} {
		out, err := b.Do(
			t.Context(),
			&extproctest.Request{Header: chat, Body: body, Upstream: func(r *extproctest.Routed) extproctest.Response {
				b.holdsNothing(t, name+", while it is answered")
				return response("x")(r)
			}},
		)
		if err != nil || out.Immediate != nil {
			t.Errorf("%s: %v %v", name, err, out.Immediate)
		}
	}
	out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{blank, bytes.Repeat(blank, 2)}})
	if err != nil || out.Immediate.GetStatus().GetCode() != 429 ||
		!strings.Contains(string(out.Immediate.GetBody()), `"code":"too_many_bytes"`) {
		t.Errorf("%v %v", err, out)
	}
	// Memory that is reserved for a declared length counts too, when it is reserved: at first four times the received
	// bytes.
	announced := map[string]string{"content-length": "1000000"}
	for k, v := range chat {
		announced[k] = v
	}
	out, err = newBench(
		t,
		Config{Memory: budget.New(heldOf(100_000))},
	).Do(
		t.Context(),
		&extproctest.Request{Header: announced, Body: [][]byte{blank[:30_000], blank}},
	)
	if err != nil || out.Immediate.GetStatus().GetCode() != 429 {
		t.Errorf("%v %v", err, out)
	}
	// If the client closes the connection, its bytes no longer count.
	if _, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{blank}}); err != nil {
		t.Error(err)
	}
	b.idle(t)
	b.holdsNothing(t, "when all is over")
}

// TestWholeBuffersPass: Envoy's buffer of a connection in one message is received after the decision although bodies
// have taken all memory. The request has begun at its endpoint and cannot be refused any more.
func TestWholeBuffersPass(t *testing.T) {
	b := newBench(t, Config{Memory: budget.New(heldOf(120_000))})
	buffer := &extprocv3.HttpBody{Body: make([]byte, 1<<20)}
	size := proto.Size(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: buffer},
	})
	for _, c := range []struct {
		phase  phase
		passes bool
	}{{collect, false}, {relay, true}, {replied, true}} {
		x := b.server.exchange(t.Context())
		if x.phase = c.phase; (x.in.Receiving(size) == nil) != c.passes {
			t.Errorf("phase %d, %d bytes: %v", c.phase, size, x.in.refused)
		}
		x.hold()
	}
}

// holdsNothing waits until no bytes of requests are held: shortly after the last of them was sent on.
func (b *bench) holdsNothing(t *testing.T, when string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); b.server.HeldBytes() != 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("%s: %d bytes are held", when, b.server.HeldBytes())
			return
		}
	}
}

// TestCompressedResponsesPass: kvepp forwards compressed responses and counts them as unread.
func TestCompressedResponsesPass(t *testing.T) {
	b := newBench(t, Config{})
	for _, encoding := range []string{"gzip", "identity", ""} {
		out, err := b.Do(
			t.Context(),
			&extproctest.Request{
				Header: chat,
				Body:   [][]byte{[]byte(chatBody)},
				Upstream: func(*extproctest.Routed) extproctest.Response {
					return extproctest.Response{
						Header: map[string]string{":status": "200", "content-encoding": encoding},
						Body:   [][]byte{{0x1f, 0x8b, 0x08}},
					}
				},
			},
		)
		if err != nil || !bytes.Equal(out.Body, []byte{0x1f, 0x8b, 0x08}) {
			t.Errorf("%s: %v %v", encoding, err, out)
		}
	}
	b.idle(t)
	if n := metricstest.Read(t, b.metrics.Registry).Of("kvepp_unread_answers_total").Value(); n != 1 {
		t.Errorf("%v responses are counted as unread, want 1", n)
	}
}

// wire is a stream of encoded messages. It calls between before each.
type wire struct {
	extprocv3.ExternalProcessor_ProcessServer
	ctx      context.Context
	n        int
	message  func(i int) *extprocv3.ProcessingRequest // nil: the client has gone
	between  func(i int)
	sent     []byte // of the request's body, by kvepp
	messages int    // from kvepp
	ended    bool   // by kvepp, with the last piece
}

func (w *wire) Context() context.Context { return w.ctx }

func (w *wire) RecvMsg(to any) error {
	if w.between != nil {
		w.between(w.n)
	}
	m := w.message(w.n)
	if m == nil {
		return io.EOF
	}
	w.n++
	data, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return encoding.GetCodecV2("proto").Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, to)
}

func (w *wire) Send(m *extprocv3.ProcessingResponse) error {
	w.messages++
	if b := m.GetRequestBody(); b != nil {
		piece := b.GetResponse().GetBodyMutation().GetStreamedResponse()
		w.sent = append(w.sent, piece.GetBody()...)
		if w.ended {
			return errors.New("a piece after the last")
		}
		w.ended = piece.GetEndOfStream()
	}
	return nil
}

// headersMessage returns the first message of a stream, with these headers.
func headersMessage(header map[string]string) *extprocv3.ProcessingRequest {
	h := &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{}}
	for k, v := range header {
		h.Headers.Headers = append(h.Headers.Headers, &corev3.HeaderValue{Key: k, RawValue: []byte(v)})
	}
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: h},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: fullDuplex, ResponseBodyMode: fullDuplex}}
}

func bodyMessage(b []byte, end bool) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{Body: b, EndOfStream: end}},
	}
}

// heap returns the bytes of the heap that are in use.
func heap() int {
	runtime.GC()
	runtime.GC() // what the first one finalizes or takes out of pools
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// TestPiecesCount: for pieces of any size, the counted memory is the used memory, and little more than the body's
// bytes. The body arrives unchanged, in few messages.
func TestPiecesCount(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const pieces = 100_000
	for name, c := range map[string]struct{ size, every int }{
		"one byte each":   {1, 1},
		"empty":           {1, 20_000},
		"one byte, empty": {1, 2},
		"three bytes":     {3, 1},
		"1000 bytes":      {1000, 100},
	} {
		b := newBench(t, Config{})
		var want []byte
		before, held, took := 0, 0, 0
		w := &wire{ctx: t.Context()}
		w.message = func(i int) *extprocv3.ProcessingRequest {
			var piece []byte
			if i%c.every == 0 {
				piece = bytes.Repeat([]byte{byte(i)}, c.size)
			}
			switch {
			case i == 0:
				return headersMessage(chat)
			case i <= pieces:
				want = append(want, piece...)
				return bodyMessage(piece, false)
			case i == pieces+1:
				return bodyMessage(nil, true)
			}
			return nil
		}
		w.between = func(i int) {
			switch i {
			case 1:
				want = make([]byte, 0, pieces*c.size/c.every+c.size)
				before = heap()
			case pieces + 1:
				took, held = heap()-before, b.server.HeldBytes()
			}
		}
		b.server.cfg.MaxParseBytes = 1 << 30
		if err := b.server.Process(w); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d bytes take %d, and count as %d; %d messages", name, len(want), took, held, w.messages)
		if took > 2*len(want)+1<<20 || took > held+1<<20 || held > 2*len(want)+1<<20 {
			t.Errorf("%s: %d bytes take %d, and count as %d", name, len(want), took, held)
		}
		if limit := 10 + len(want)/maxChunk; w.messages > limit {
			t.Errorf("%s: the body was sent on in %d messages", name, w.messages)
		}
		if b.server.HeldBytes() != 0 {
			t.Errorf("%s: %d bytes are still held", name, b.server.HeldBytes())
		}
	}
}

// TestPiecesArriveUnchanged: for any split into pieces, the body is passed on byte for byte and ends once.
func TestPiecesArriveUnchanged(t *testing.T) {
	b := newBench(t, Config{MaxParseBytes: 50_000})
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(1, seed))
		body := []byte(chatBody)
		if random.IntN(2) == 0 {
			body = append(body, bytes.Repeat([]byte(" "), random.IntN(80_000))...)
		}
		header := maps.Clone(chat)
		if random.IntN(2) == 0 {
			header["content-length"] = strconv.Itoa(len(body))
		}
		most, empty, trailers := max(
			len(body)/200,
			[]int{1, 10, 1000, 70_000}[random.IntN(4)],
		), random.IntN(
			3,
		), random.IntN(
			3,
		) == 0
		left, over := body, false
		w := &wire{ctx: t.Context()}
		w.message = func(i int) *extprocv3.ProcessingRequest {
			switch {
			case i == 0:
				return headersMessage(header)
			case over:
				return nil
			case len(left) == 0 && trailers:
				over = true
				return &extprocv3.ProcessingRequest{
					Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}},
				}
			case empty > 0 && random.IntN(4) < empty && len(left) > 0:
				return bodyMessage(nil, false)
			}
			piece := left[:min(len(left), random.IntN(most)+1)]
			left = left[len(piece):]
			over = len(left) == 0 && !trailers && random.IntN(2) == 0 || len(piece) == 0
			return bodyMessage(piece, over)
		}
		if err := b.server.Process(w); err != nil || !bytes.Equal(w.sent, body) || w.ended == trailers {
			t.Errorf("seed %d: %v, %d bytes of %d, ended %t", seed, err, len(w.sent), len(body), w.ended)
		}
		if b.server.HeldBytes() != 0 {
			t.Errorf("seed %d: %d bytes are still held", seed, b.server.HeldBytes())
		}
	}
}

// TestResponsesHoldNothingOfRequests: during the response, kvepp keeps neither the request's body, nor its replacement,
// nor its headers in memory.
func TestResponsesHoldNothingOfRequests(t *testing.T) {
	const streams, size, name = 16, 2 << 20, 60_000
	for what, body := range map[string]string{
		"text": chatBody[:len(chatBody)-1] + `,"x":"` + strings.Repeat("x", size) + `"}`,
		"changed": chatBody[:len(chatBody)-1] + `,"nvext":{"backend_instance_id":1,"agent_hints":{"priority":1}},` +
			`"user":"` + strings.Repeat("x", size) + `"}`,
	} {
		header := maps.Clone(chat)
		header["x-request-id"], header[":path"] = "an id", chat[":path"]+"?"+strings.Repeat("x", name)
		header["x-dynamo-session-id"] = "a session"
		b := newBench(t, Config{})
		wait, done := make(chan struct{}), make(chan int)
		before := heap()
		for range streams {
			w := &wire{ctx: t.Context()}
			w.message = func(i int) *extprocv3.ProcessingRequest {
				switch i {
				case 0:
					return headersMessage(header)
				case 1:
					return bodyMessage([]byte(body), true)
				case 2:
					w.sent = nil
					done <- 1
					<-wait
				}
				return nil
			}
			go b.server.Process(w)
		}
		for range streams {
			<-done
		}
		took := heap() - before
		close(wait)
		t.Logf("%s: %d responses hold %d bytes", what, streams, took)
		if took > streams*40_000 {
			t.Errorf("%s: %d responses hold %d bytes", what, streams, took)
		}
		if b.server.HeldBytes() != 0 {
			t.Errorf("%s: %d bytes count as held", what, b.server.HeldBytes())
		}
		b.idle(t)
	}
}
